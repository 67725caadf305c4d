"""Packed rows in models of transformers: a sample's losses are those of the sample alone, or the model is refused."""

from __future__ import annotations

import pytest
import torch

from models import hf, hf_packed_kernel
from models.hf_packed import Packing
from offload.planning.meta_kernels import fused_kernels
from tests.models.helpers.hf_models import GROUPED, LANGUAGE, MODELS, SINGLE, build_hf, task_of, tiny
from tests.models.helpers.packed import SEGMENTS, counted, far_from_uniform, losses_alone, packed_batch

NAMES = [name for name in MODELS | SINGLE if task_of(name) == "causal_lm"]
# Without "its forward", "its states", ...
REFUSED = {
    "bart": "takes no positions",
    "mamba": "takes no positions",
    "openai-gpt": "do not tell the samples of a row apart",
    "prophetnet": "takes no positions",
    "qwen3_next": "run along the whole row",
    "rwkv": "takes no positions",
    "xlstm": "takes no positions",
}
BY_STARTS = {"bert", "deepseek_v3", "gemma", "gemma3_text", "gpt2", "granite", "llama", "mixtral", "opt", "qwen3"}


def packed_losses(model: torch.nn.Module) -> torch.Tensor:
    ids, labels = packed_batch()
    return model(ids, labels, segments=SEGMENTS, reduction="none")


@pytest.mark.parametrize(
    "name", [name if name in ("qwen3", "gemma3_text") else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_samples_in_a_row_are_as_if_alone_or_are_refused(name: str):
    model = far_from_uniform(tiny(name))
    assert (model.why_not_packed is None) == (name not in REFUSED), model.why_not_packed
    if name in REFUSED:
        assert REFUSED[name] in model.why_not_packed
        with pytest.raises(ValueError, match=f"takes no packed rows, because {model.why_not_packed.split('(')[0]}"):
            packed_losses(model)
        return
    with torch.no_grad():
        found, alone = packed_losses(model), losses_alone(model)
        together = model(*packed_batch(), reduction="none")
    torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-5)
    assert (together - alone)[:, 6:].abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(BY_STARTS & LANGUAGE.keys()))
def test_starts_in_place_of_masks_give_the_same(name: str, monkeypatch: pytest.MonkeyPatch):
    model = far_from_uniform(tiny(name))
    assert model.packing == Packing(None, by_starts=True)
    expected = packed_losses(model)
    expected.sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    monkeypatch.setattr(hf, "starts_for", lambda segments, dtype: counted(segments).starts)
    masks = []
    monkeypatch.setattr(hf_packed_kernel, "_mask", lambda *given, **options: masks.append(given))
    found = packed_losses(model)
    found.sum().backward()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-4)
    assert not masks


def test_a_model_with_other_masks_keeps_them():
    """Llama 4's attention is bounded by chunks too, of which the starts say nothing."""
    values = {**GROUPED, "head_dim": 4, "num_local_experts": 2, "attention_chunk_size": 3, "intermediate_size_mlp": 16}
    with torch.device("meta"):
        model = build_hf("llama4_text", "causal_lm", values)
    assert model.packing == Packing(None, by_starts=False)


def test_alibi_is_refused():
    with torch.device("meta"):
        model = build_hf("falcon", "causal_lm", {**MODELS["falcon"][1], "alibi": True})
    assert "alibi" in model.why_not_packed


@pytest.mark.parametrize("source", ["roberta", "xlm-roberta"])
def test_positions_that_do_not_begin_at_0_are_refused(source: str):
    with torch.device("meta"):
        model = build_hf(source, "causal_lm", {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1})
    assert model.why_not_packed == "its positions do not begin at 0"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_a_plan_of_packed_rows_needs_no_values(name: str, dtype: torch.dtype):
    model = tiny(name, "meta").to(dtype)
    ids, labels = (tensor.to("meta") for tensor in packed_batch())
    with fused_kernels(lambda flops: None):
        model(ids, labels, segments=SEGMENTS.to("meta")).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "gpt2"])
def test_the_kernel_is_as_near_to_exact_numbers_as_masks(name: str, monkeypatch: pytest.MonkeyPatch):
    wide = {"head_dim": 8} if name != "gpt2" else {}
    exact = far_from_uniform(tiny(name, **wide))
    with torch.no_grad():
        expected = losses_alone(exact)
        model = exact.to("cuda", torch.bfloat16)
        ids, labels = (tensor.cuda() for tensor in packed_batch())
        by_masks = model(ids, labels, segments=SEGMENTS.cuda(), reduction="none").cpu()
        calls = []
        kernel = hf_packed_kernel.attention_by_starts
        monkeypatch.setattr(
            hf_packed_kernel, "attention_by_starts", lambda *given: calls.append(given) or kernel(*given)
        )
        by_kernel = model(ids, labels, segments=counted(SEGMENTS, "cuda"), reduction="none").cpu()
    assert len(calls) == 2
    assert (by_kernel - expected).norm() < 1.2 * (by_masks - expected).norm() + 0.01 * expected.norm()
