"""Attention over long sequences stores no scores in silence: torch computes it by another kernel, or it is refused."""

from pathlib import Path

import pytest
import torch

from tests.training.helpers.in_process import SMALL_MODEL, components_of, run_here
from training.errors import UserError
from training.run import attention
from training.run.attention import without_scores

JOB = ("steps=1", "warmup_steps=0", "dataset=synthetic", "tracking=disabled", "batch_size=2", "seq_len=32")
# Heads of 16, in blocks; dropout is what the CPU's kernel does not have.
OPT = (
    "model=hf", "model.source=opt", "model.overrides={hidden_size:16,word_embed_proj_dim:16,ffn_dim:32,"
    "num_hidden_layers:2,num_attention_heads:2,vocab_size:257,max_position_embeddings:32,attention_dropout:RATE}",
)  # fmt: skip


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "LONG", 32)


def opt(rate: float) -> tuple[str, ...]:
    return (OPT[0], OPT[1], OPT[2].replace("RATE", str(rate)))


@pytest.mark.parametrize("length", [31, 32])
def test_the_plain_kernel_is_no_choice_inside_the_block(length: int):
    components = components_of(*SMALL_MODEL, "dataset=synthetic", f"seq_len={length}")
    with without_scores(components):
        assert torch.backends.cuda.math_sdp_enabled() == (length < 32)
    assert torch.backends.cuda.math_sdp_enabled()


def test_other_errors_stay_what_they_are():
    components = components_of(*SMALL_MODEL, "dataset=synthetic", "seq_len=32")
    with pytest.raises(RuntimeError, match="another"), without_scores(components):
        raise RuntimeError("another")
    assert torch.backends.cuda.math_sdp_enabled()


def test_pictures_have_no_seq_len():
    with without_scores(components_of("model=unet_small", "seq_len=32")):
        assert torch.backends.cuda.math_sdp_enabled()


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_a_run_that_would_store_scores_is_refused_in_a_line(tmp_path: Path, recompute: str):
    with pytest.raises(UserError) as error:
        run_here(tmp_path, *JOB, *opt(0.1), f"recompute={recompute}")
    assert str(error.value) == (
        "seq_len=32: for attention of this model in float32 torch has the kernel alone that stores 32 x 32 scores for"
        " each head: take another model, no dropout in attention, or a seq_len below 32"
    )
    assert torch.backends.cuda.math_sdp_enabled()


@pytest.mark.parametrize("offload", ["none", pytest.param("layer_stream_swap", marks=pytest.mark.slow)])
def test_others_run_with_evaluations_and_samples_in_them(tmp_path: Path, offload: str):
    asked = ("eval.every=1", "sample.every=1", "sample.tokens=4", "sample.prompt=a", "dataset=stdlib")
    summary = run_here(tmp_path, *JOB, *opt(0.0), f"offload={offload}", "recompute=block", *asked)
    assert summary["status"] == "ok"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_grouped_heads_in_float32_are_refused_on_a_gpu(tmp_path: Path):
    sizes = "hidden_size:64,intermediate_size:64,num_hidden_layers:1,num_attention_heads:4,head_dim:16,vocab_size:256"
    model = ("model=hf", "model.source=qwen3", f"model.overrides={{{sizes},num_key_value_heads:2}}")
    with pytest.raises(UserError, match="take precision=bf16"):
        run_here(tmp_path / "fp32", *JOB, *model, "precision=fp32")
    assert run_here(tmp_path / "bf16", *JOB, *model, "precision=bf16")["status"] == "ok"
