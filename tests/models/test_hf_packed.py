"""Packed rows in models of transformers: a sample's losses are those of the sample alone, or the model is refused."""

import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, masking_utils
from transformers.masking_utils import create_causal_mask, create_chunked_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from models import hf, hf_packed
from models.hf_packed import (
    SDPA,
    STARTS,
    Packing,
    mask_of,
    most_packed,
    most_positions,
    one_sequence_a_row,
    packed_rows,
    starts_for,
    starts_of_rows,
)
from models.packed_attention import bounds_of, positions_in
from offload.planning import memory_tracker
from offload.planning.memory_tracker import MemoryTracker
from offload.planning.meta_kernels import fused_kernels
from tests.models.helpers.hf_models import GROUPED, LANGUAGE, MODELS, SINGLE, VOCABULARY, batch, build_hf, task_of, tiny
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
    monkeypatch.setattr(hf_packed, "_sdpa_mask", lambda *given, **options: masks.append(given))
    found = packed_losses(model)
    found.sum().backward()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-4)
    assert not masks


@pytest.mark.parametrize("balances", [False, True])
def test_long_rows_need_no_masks_of_windows_or_of_padding(balances: bool, monkeypatch: pytest.MonkeyPatch):
    """As on a GPU: here the starts become masks again, in every layer."""
    name = "mixtral_balanced" if balances else "gemma3_text"
    model, (ids, labels) = far_from_uniform(tiny(name)), packed_batch()
    real = torch.arange(12) < torch.tensor([[9], [12]])
    given = {"real": real} if balances else {"reduction": "none"}
    labels = labels.masked_fill(~real, -100)
    expected = model(ids, labels, **given)
    expected.sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    assert model.packing.by_starts
    masks, starts = [], []
    monkeypatch.setattr(hf_packed, "_sdpa_mask", lambda *given, **options: masks.append(given))
    monkeypatch.setattr(hf, "starts_of_rows", lambda *given: torch.tensor([0, 12, 24], dtype=torch.int32))
    monkeypatch.setattr(hf_packed, "mask_of", lambda *given: starts.append(given) or mask_of(*given))
    found = model(ids, labels, **given)
    found.sum().backward()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-4)
    assert not masks
    assert [given[1:] for given in starts] == [(2, 12, None if balances else 4), (2, 12, None)]


def test_starts_are_of_long_rows_in_half_precision():
    rows = torch.empty(3, hf_packed.LONG, dtype=torch.int64, device="meta")
    assert starts_of_rows(rows, torch.bfloat16).shape == (4,)
    assert starts_of_rows(rows, torch.float32) is None
    assert starts_of_rows(rows[:, :-1], torch.bfloat16) is None
    assert starts_of_rows(torch.zeros(1, hf_packed.LONG, dtype=torch.int64), torch.bfloat16) is None, "of the CPU"


@pytest.mark.parametrize(("changes", "squares"), [({}, 0), ({"head_dim": 260}, 2), ({"sliding_window": 65}, 0)])
def test_a_plan_has_the_masks_of_a_run(changes: dict, squares: int, monkeypatch: pytest.MonkeyPatch):
    """No kernel of FlashAttention's has heads of more than 256 numbers: a mask for each layer of the two."""
    for module in (hf_packed, memory_tracker):
        monkeypatch.setattr(module, "LONG", 64)
    model = tiny("gemma3_text", "meta", **{"head_dim": 8, "max_position_embeddings": 64} | changes).bfloat16()
    ids, tracker = torch.empty(1, 64, dtype=torch.int64, device="meta"), MemoryTracker()
    with fused_kernels(tracker.add_flops), tracker.recording():
        loss = model(ids, ids)
    # What is kept for backward are numbers of 2 bytes; for a moment there are the booleans too.
    assert tracker.square_bytes // (64 * 64 * 2) == squares
    del loss


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


@pytest.mark.parametrize("scale", [12, 13])
def test_rows_in_which_llama4_scales_its_queries_are_longer_than_most_packed(scale: int):
    values = {**GROUPED, "head_dim": 4, "num_local_experts": 2, "intermediate_size_mlp": 16, "floor_scale": scale}
    values |= {"attn_temperature_tuning": True, "attn_scale": 9.0, "no_rope_layers": [0, 0]}
    model = build_hf("llama4_text", "causal_lm", values)
    model.initialise(0)
    model = far_from_uniform(model)
    with torch.no_grad():
        differs = not torch.allclose(packed_losses(model), losses_alone(model), atol=1e-5)
    assert most_packed(model.hf) == model.most_packed == scale - 1
    assert differs == (SEGMENTS.shape[1] > model.most_packed)


@pytest.mark.parametrize("most", [7, 8])
def test_rows_whose_longest_sample_chooses_the_angles_of_all_are_longer_than_most_packed(most: int):
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.0], "long_factor": [2.0, 3.0]}
    model = far_from_uniform(tiny("llama", rope_parameters=rope | {"original_max_position_embeddings": most}))
    with torch.no_grad():
        alike = torch.allclose(packed_losses(model), losses_alone(model), atol=1e-5)
    assert model.most_packed == most
    # The longest sample has 8 tokens.
    assert alike == (most >= 8)


def test_packed_rows_of_gpt_neo_are_at_most_as_long_as_its_mask():
    with torch.device("meta"):
        model = build_hf("gpt_neo", "causal_lm", {"num_layers": 1, "attention_types": [[["global"], 1]]})
        assert build_hf("llama", "causal_lm", GROUPED).most_packed is None
    assert model.most_packed == 2048


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
    with fused_kernels(lambda flops, kind=None: None):
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
        kernel = hf_packed.attention_by_starts
        monkeypatch.setattr(hf_packed, "attention_by_starts", lambda *given: calls.append(given) or kernel(*given))
        by_kernel = model(ids, labels, segments=counted(SEGMENTS, "cuda"), reduction="none").cpu()
    assert len(calls) == 2
    assert (by_kernel - expected).norm() < 1.2 * (by_masks - expected).norm() + 0.01 * expected.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernel_of_long_rows_is_as_near_to_exact_numbers_as_masks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hf_packed, "LONG", 12)
    exact, (ids, labels) = far_from_uniform(tiny("gemma3_text", head_dim=8)), packed_batch()
    losses, calls, kernel = {}, [], hf_packed.attention_by_starts
    monkeypatch.setattr(hf_packed, "attention_by_starts", lambda *given: calls.append(given) or kernel(*given))
    with torch.no_grad():
        expected = exact(ids, labels, reduction="none")
        model = exact.to("cuda", torch.bfloat16)
        for long in (13, 12):
            monkeypatch.setattr(hf_packed, "LONG", long)
            losses[long] = model(ids.cuda(), labels.cuda(), reduction="none").cpu()
    assert len(calls) == 2
    by_masks, by_kernel = ((losses[long] - expected).norm() for long in (13, 12))
    assert by_kernel < 1.2 * by_masks + 0.01 * expected.norm()


TWO_SAMPLES = torch.tensor([[0, 1, 2, 0, 1]])
# torch multiplies the rows of experts on the meta device in bf16 alone; tests/models/test_hf_modes.py plans them.
WITH_EXPERTS = {"mixtral", "mixtral_balanced", "gpt_oss", "deepseek_v3", "qwen3_next"}


class Reads(TorchDispatchMode):
    """Counts the values that the host reads from tensors."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def search() -> torch.Tensor | None:
    return masking_utils.find_packed_sequence_indices(TWO_SAMPLES)


def test_the_search_is_left_out_in_the_block_alone():
    assert search().tolist() == [[0, 0, 0, 1, 1]]
    with one_sequence_a_row():
        assert search() is None
        with one_sequence_a_row():
            assert search() is None
        assert search() is None
    assert search() is not None


def test_the_search_is_left_out_in_one_thread_alone():
    found = []
    with one_sequence_a_row():
        thread = threading.Thread(target=lambda: found.append(search()))
        thread.start()
        thread.join(300)
    assert found[0] is not None


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["bart", *sorted(LANGUAGE.keys() - WITH_EXPERTS)])
def test_a_step_reads_nothing_back(name: str):
    model = tiny(name, "meta").train()
    with Reads() as reads:
        model(*(argument.to("meta") for argument in batch(name))).backward()
    assert reads.count == 0


EMBEDS = torch.zeros(*SEGMENTS.shape, 4)
EXPECTED = bounds_of(SEGMENTS, EMBEDS)


def made(kind: str, make=create_causal_mask, **given) -> torch.Tensor | None:
    config = LlamaConfig(sliding_window=2, attention_chunk_size=3 if make is create_chunked_causal_mask else None)
    config._attn_implementation = kind
    mask = make(config=config, inputs_embeds=EMBEDS, past_key_values=None, **{"attention_mask": None} | given)
    return mask if mask is None or mask.dtype == torch.bool else mask == 0


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "given", [{"position_ids": positions_in(SEGMENTS)}, {}, {"attention_mask": torch.ones(SEGMENTS.shape)}]
)
def test_masks_are_bounded_with_and_without_positions(kind: str, given: dict):
    with packed_rows(SEGMENTS) as sequences:
        masks = made(kind, **given), made(kind, create_sliding_window_causal_mask, **given)
    assert torch.equal(masks[0], EXPECTED)
    assert torch.equal(masks[1], EXPECTED & torch.ones(12, 12, dtype=torch.bool).triu(-1))
    assert sequences.asked == 2


def test_rows_of_one_sequence_have_no_mask():
    with one_sequence_a_row():
        assert made("sdpa") is None
    assert made("sdpa") is None


def test_chunks_need_positions():
    with packed_rows(SEGMENTS):
        assert made("sdpa", create_chunked_causal_mask, position_ids=positions_in(SEGMENTS)) is not None
        with pytest.raises(ValueError, match="chunks of attention begin anew in each sample"):
            made("sdpa", create_chunked_causal_mask)


STARTS_OF = counted(SEGMENTS).starts


def test_the_mask_is_that_of_the_segments():
    mask = mask_of(STARTS_OF, *SEGMENTS.shape, None)
    assert torch.equal(mask, bounds_of(SEGMENTS, torch.empty(1)))
    near = mask_of(STARTS_OF, *SEGMENTS.shape, 2)
    assert torch.equal(near, mask & torch.ones(12, 12, dtype=torch.bool).triu(-1))


def test_starts_are_for_kernels_of_gpus():
    assert starts_for(SEGMENTS, torch.bfloat16) is None
    assert starts_for(SEGMENTS.to("meta"), torch.float32) is None
    assert starts_for(SEGMENTS.to("meta"), torch.bfloat16).is_meta


def test_what_the_kernel_does_not_compute_is_computed_under_the_mask():
    """Here dropout, which leaves nothing of anything."""
    query = torch.ones(*SEGMENTS.shape, 1, 4).transpose(1, 2)
    attend = ALL_ATTENTION_FUNCTIONS[SDPA]
    plain, _ = attend(torch.nn.Module(), query, query, query, None, **{STARTS: STARTS_OF})
    dropped, _ = attend(torch.nn.Module(), query, query, query, None, dropout=1.0, **{STARTS: STARTS_OF})
    torch.testing.assert_close(plain, torch.ones(*SEGMENTS.shape, 1, 4))
    assert not dropped.any()


def test_without_starts_attention_is_that_of_transformers():
    query = torch.randn(2, 1, 5, 4)
    found, _ = ALL_ATTENTION_FUNCTIONS[SDPA](torch.nn.Module(), query, query, query, None)
    expected = torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    assert torch.equal(found, expected.transpose(1, 2))


# Tables that begin with the first position, behind two rows, and behind a row for padding; and computed ones.
WITH_TABLES = ["gpt2", "openai-gpt", "opt", "bert", "prophetnet", "gptj", "codegen", "ctrl"]


@pytest.mark.parametrize("name", WITH_TABLES)
def test_one_token_more_is_beyond_the_table(name: str):
    model = tiny(name).eval()
    longest = most_positions(model)
    ids = torch.randint(3, VOCABULARY, (1, longest + 1), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert model(ids[:, :-1], ids[:, 1:]).isfinite()
        # Some look into a buffer of the positions first, which is as long.
        with pytest.raises((IndexError, RuntimeError)):
            model(ids, ids)


def test_a_table_behind_a_row_of_padding():
    table = torch.nn.Embedding(10, 4, padding_idx=1)
    own = {"position_embeddings": table, "word_embeddings": torch.nn.Embedding(3, 4)}
    other = torch.nn.ModuleDict({"position_embedding": torch.nn.Embedding(5, 4)})
    assert most_positions(torch.nn.ModuleDict({**own, "vision_tower": other})) == 8


@pytest.mark.parametrize("name", ["qwen3", "mamba"])
def test_rotary_embeddings_and_none_have_no_end(name: str):
    assert most_positions(tiny(name, "meta")) is None
