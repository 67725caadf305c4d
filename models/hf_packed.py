"""Tells which language models of transformers take packed rows: several samples in a row, none of which sees another.

Attention is bounded by the samples wherever functions of transformers make the masks (`models.hf_host_reads`,
`models.hf_packed_masks`), and positions are an argument. Both must be so in all of a model. Its own forward shows it,
on the meta device.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from models.hf_host_reads import packed_rows, without_padding_warning
from models.hf_packed_kernel import STARTS
from models.hf_positions import OF_POSITIONS
from models.hf_source import same_again, sub_configs

# Kinds of layers that see other positions by attention alone, under masks of transformers.
BOUNDED_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention", "moe", "sparse", "dense"}


@dataclass(frozen=True)
class Packing:
    """How a model takes packed rows.

    Attributes:
        why_not: None if it computes each sample as if it were alone; else a clause that says why it does not.
        by_starts: whether all of its attention takes `packed_starts` (see `models.hf_packed_kernel`).
    """

    why_not: str | None
    by_starts: bool = False

    @classmethod
    def of(cls, model: PreTrainedModel) -> Packing:
        """Finds out about a model on any device, of which it computes nothing."""
        why_not = _known_not_to(model)
        if why_not is not None:
            return cls(why_not)
        with torch.device("meta"):
            # On the meta device torch multiplies the rows of experts in bf16 alone.
            twin = same_again(model).to(torch.bfloat16)
        without_padding_warning(twin)
        # No layer reads the losses of routers, and some torch does not compute on the meta device.
        twin.config.output_router_logits = False
        try:
            asked, _ = _watched(twin)
        # Each forward fails in its own way.
        except Exception as error:
            return cls(f"its forward fails where positions are given ({type(error).__name__})")
        if not asked:
            return cls("its masks do not tell the samples of a row apart")
        try:
            _, calls = _watched(twin, **{STARTS: torch.empty(2, dtype=torch.int32, device="meta")})
        # It takes no options that it does not know.
        except Exception:
            return cls(None)
        return cls(None, bool(calls) and all(calls))


def _known_not_to(model: PreTrainedModel) -> str | None:
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return "its forward takes no positions"
    if model._is_stateful or any(isinstance(module, nn.Conv1d | nn.RNNBase) for module in model.modules()):
        return "its states run along the whole row"
    for name, module in model.named_modules():
        # RoBERTa's and its kin's begin after the number of the padding token.
        if isinstance(module, nn.Embedding) and OF_POSITIONS.search(name) and module.padding_idx is not None:
            return "its positions do not begin at 0"
    for config in sub_configs(model.config):
        others = {str(kind) for kind in getattr(config, "layer_types", None) or ()} - BOUNDED_LAYERS
        if others:
            return f"its layers of {', '.join(sorted(others))} may see the whole row"
        if getattr(config, "alibi", False):
            return "its attention counts positions along the whole row (alibi)"
    return None


def _watched(twin: PreTrainedModel, **options: torch.Tensor) -> tuple[int, list[bool]]:
    """Runs a forward of a packed row; returns how often its sequences were asked for, and what attention was given."""
    ids = torch.zeros((1, 4), dtype=torch.int64, device="meta")
    with torch.no_grad(), packed_rows(ids) as sequences:
        sequences.watched = []
        twin.eval()(input_ids=ids, position_ids=ids, **options)
    return sequences.asked, sequences.watched
