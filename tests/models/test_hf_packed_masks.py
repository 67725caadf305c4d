from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.masking_utils import create_causal_mask, create_chunked_causal_mask, create_sliding_window_causal_mask

from models import hf_packed_masks  # noqa: F401
from models.hf_host_reads import one_sequence_a_row, packed_rows
from models.packed_attention import bounds_of, positions_in
from tests.models.helpers.packed import SEGMENTS

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
