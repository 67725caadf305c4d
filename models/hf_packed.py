"""Packed rows in models of transformers: several samples in a row, none of which sees another.

Attention is bounded by the samples wherever functions of transformers make the masks, and positions are an argument.
`Packing` tells which models do both in all their layers: their own forward shows it, on the meta device.

* Without an attention mask, transformers searches the positions for sequences that were packed into one row, and the
  ids for padding that it should warn of. The host would wait for the device in every forward, and a forward on the meta
  device, which a plan is, would fail. The models here number the positions themselves, get no padding, and tell the
  sequences of each row in place of what would be found (`one_sequence_a_row`, `packed_rows`).
* transformers looks for the sequences only where it is given positions and no mask. Some models give it no positions
  for their masks (GPT-OSS, Falcon), others a mask of ones (OPT, BERT): those masks are bounded here (`_bounded`).
* Under a mask torch has no kernel that leaves out what the mask hides: on long rows it takes several times as long.
  transformers hands options of a model's forward down to its attention. The option `packed_starts` says where the
  samples begin, replaces the mask, and runs FlashAttention's kernel (`_attend`). It is an argument of every layer, so a
  layer that is computed again in backward has it as well. Long rows of one sequence have it too, for windows: a mask
  of 32,768 tokens takes 1 GiB, and in every layer 2 more.
"""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, and_masks, packed_sequence_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from models.attention_kernels import HALF, causal_kernel
from models.hf_source import same_again, sub_configs
from models.packed_attention import LONG, attention_by_starts, has_kernel

# Kinds of layers that see other positions by attention alone, under masks of transformers.
BOUNDED_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention", "moe", "sparse", "dense"}
STARTS = "packed_starts"
# As an option, rows that ranks divide (`models.hf_divided`).
DIVIDED = "divided"
SDPA = "sdpa"
# What the kernel does not compute, with the values under which it need not.
UNLIKE = {"dropout": (0.0,), "is_causal": (None, True), "position_bias": (None,), "softcap": (None,), "s_aux": (None,)}
# wpe in GPT-2, embed_positions in OPT, position_embeddings in BERT.
OF_POSITIONS = re.compile(r"(^|\.)(wpe|\w*position\w*)$")
# Tables that nothing trains: buffers in GPT-J and CodeGen, a plain attribute in CTRL.
COMPUTED = ("embed_positions", "pos_encoding")
# Towers beside the text have positions of their own.
OF_OTHERS = re.compile("vision|visual|image|audio|speech")

# Microbatches may run in threads of their own.
_thread = threading.local()
_search = masking_utils.find_packed_sequence_indices
_all = masking_utils.fast_all
_attention = ALL_ATTENTION_FUNCTIONS[SDPA]


@dataclass(frozen=True)
class Packing:
    """The way in which a model takes packed rows.

    Attributes:
        why_not: None if it computes each sample as if it were alone; else a clause that says why it does not.
        by_starts: whether all of its attention takes `packed_starts`.
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
            twin = same_again(model, torch.bfloat16)
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


@dataclass
class Sequences:
    """The sequences in rows.

    Attributes:
        segments: int64 [rows, seq_len], the number of the sequence of each token; None for one sequence a row.
        by_starts: whether attention is given where they begin, and needs no masks.
        asked: for how many masks they were asked for.
        told: whether they were asked for the mask that is made next.
        watched: for each call of attention whether it could do with the starts alone; None where nobody looks.
    """

    segments: Tensor | None
    by_starts: bool = False
    asked: int = 0
    told: bool = False
    watched: list[bool] | None = None


@contextmanager
def packed_rows(segments: Tensor | None, by_starts: bool = False) -> Iterator[Sequences]:
    """Makes transformers take rows [rows, seq_len] for the sequences that `segments` numbers, inside the block, in this
    thread, without looking; None for one sequence a row.
    """
    before, sequences = known_sequences(), Sequences(segments, by_starts)
    _thread.sequences = sequences
    try:
        yield sequences
    finally:
        _thread.sequences = before


def one_sequence_a_row() -> AbstractContextManager[Sequences]:
    """Makes transformers take each row for one sequence inside the block."""
    return packed_rows(None)


def known_sequences() -> Sequences | None:
    """Returns what is known in this thread, inside one of the blocks."""
    return getattr(_thread, "sequences", None)


def without_padding_warning(model: PreTrainedModel) -> None:
    """Lets a model and those inside it no longer look for padding in the ids."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.warn_if_padding_and_no_attention_mask = _no_warning


def _no_warning(*_: object) -> None:
    pass


def most_positions(model: nn.Module) -> int | None:
    """Returns the most tokens of a text, for which a model has an embedding each; None for one without such a table.

    A table is read by number: on a GPU a position beyond its end would end the process.
    """
    trained = (
        module.num_embeddings - _other_rows(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and OF_POSITIONS.search(name) and not OF_OTHERS.search(name)
    )
    named = (getattr(module, name, None) for module in model.modules() for name in COMPUTED)
    # [positions, width] or [1, positions, width]
    computed = (table.shape[-2] for table in named if isinstance(table, Tensor) and table.ndim > 1)
    return min((*trained, *computed), default=None)


def most_packed(model: PreTrainedModel) -> int | None:
    """Returns the most tokens of a packed row, None for any number: some attention counts along the whole row."""
    config = model.config.get_text_config()
    rotary = [most for module in model.modules() for most in lengths_of_angles(module).values()]
    if rotary:
        # Beyond, the longest sample of a microbatch chooses the angles of all.
        return min(rotary)
    if getattr(config, "attn_temperature_tuning", False):
        # Llama 4 scales the queries from this position on.
        return config.floor_scale - 1
    return config.max_position_embeddings if config.model_type == "gpt_neo" else None


def lengths_of_angles(module: nn.Module) -> dict[str, int]:
    """Returns by kind the most positions of a forward up to which rotary angles do not follow their number."""
    kinds, found = getattr(module, "rope_type", None), {}
    for layers, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
        if kind == "longrope":
            parameters = module.config.rope_parameters
            found[kind] = (parameters if layers is None else parameters[layers])["original_max_position_embeddings"]
        elif isinstance(kind, str) and "dynamic" in kind:
            found[kind] = module.original_max_seq_len
    return found


def _other_rows(table: nn.Embedding) -> int:
    """Returns the number of rows that are no positions of a text: those before the first stand for padding."""
    after_padding = 0 if table.padding_idx is None else table.padding_idx + 1
    # It looks up the position after each one too.
    ahead = type(table).__name__ == "ProphetNetPositionalEmbeddings"
    return getattr(table, "offset", after_padding) + ahead


def _found(position_ids: Tensor) -> Tensor | None:
    sequences = known_sequences()
    if sequences is None:
        return _search(position_ids)
    sequences.asked += 1
    sequences.told = True
    return sequences.segments


def _all_true(mask: Tensor) -> bool | Tensor:
    # Values are looked at, where there are any: a model may make its mask of the ids.
    return mask.is_meta or _all(mask)


def _bounded(make: Callable[..., Tensor | None], *arguments: Any, **options: Any) -> Tensor | None:
    sequences = known_sequences()
    if sequences is None or sequences.segments is None:
        return make(*arguments, **options)
    told, sequences.told = sequences.told, False
    if not told:
        if getattr(options["config"], "attention_chunk_size", None) is not None:
            raise ValueError("chunks of attention begin anew in each sample, but the model gives no positions")
        sequences.asked += 1
        within = packed_sequence_mask_function(sequences.segments)
        options |= {"mask_function": and_masks(within, options["mask_function"]), "allow_is_causal_skip": False}
    return make(*arguments, **options)


def starts_for(segments: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Returns `packed_starts` for a forward in `dtype`, where the kernel is to run; on the meta device a stand-in."""
    if dtype not in HALF or not (segments.is_cuda or segments.is_meta):
        return None
    return segments.new_empty(2, dtype=torch.int32) if segments.is_meta else getattr(segments, "starts", None)


def starts_of_rows(ids: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Returns `packed_starts` of long rows [rows, seq_len] of one sequence each, as `starts_for`; None for others."""
    if dtype not in HALF or not (ids.is_cuda or ids.is_meta) or ids.shape[1] < LONG:
        return None
    return torch.arange(0, ids.numel() + 1, ids.shape[1], device=ids.device, dtype=torch.int32)


def mask_of(starts: Tensor, rows: int, seq_len: int, window: int | None) -> Tensor:
    """Returns the mask that `starts` stands for: bool [rows, 1, seq_len, seq_len]."""
    places = torch.arange(rows * seq_len, device=starts.device, dtype=torch.int32)
    samples = torch.searchsorted(starts, places, right=True).view(rows, seq_len)
    mask = (samples[:, None, :, None] == samples[:, None, None, :]).tril_()
    return mask if window is None else mask.triu_(1 - window)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    starts, divided = options.pop(STARTS, None), options.pop(DIVIDED, None)
    sequences = known_sequences()
    window = options.get("sliding_window")
    unlike = {name for name, usual in UNLIKE.items() if options.get(name, usual[0]) not in usual}
    if divided is not None:
        if attention_mask is not None or window is not None or unlike - {"dropout"}:
            raise ValueError("its attention has a window, a mask or scores of its own")
        attend = partial(_attend_whole, module, options)
        return divided.attention(query, key, value, attend), None
    plain = not unlike
    if sequences is not None and sequences.watched is not None:
        alike = getattr(attention_mask, "window", False) == window and query.shape[2] == key.shape[2]
        sequences.watched.append(starts is not None and alike and plain)
    if starts is None:
        causal = attention_mask is None and plain and getattr(module, "is_causal", True)
        with causal_kernel(query, key, value) if causal else nullcontext():
            return _attention(module, query, key, value, attention_mask, **options)
    if not (plain and has_kernel(query, value)):
        mask = mask_of(starts, len(query), query.shape[2], window)
        return _attention(module, query, key, value, mask, **options)
    if not query.is_meta:
        context = attention_by_starts(query, key, value, starts, options.get("scaling"), window)
        return context.transpose(1, 2), None
    # A plan has no kernel, and saves under plain attention what the kernel saves.
    return _attention(module, query, key, value, None, **options)


def _attend_whole(module: nn.Module, options: dict[str, Any], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with nullcontext() if options.get("dropout") else causal_kernel(query, key, value):
        return _attention(module, query, key, value, None, **options)[0].transpose(1, 2)


def _make_mask(*arguments: Any, **options: Any) -> Tensor | None:
    sequences = known_sequences()
    if sequences is not None and sequences.by_starts:
        sequences.told = False
        return None
    mask = _sdpa_mask(*arguments, **options)
    if sequences is not None and sequences.watched is not None and mask is not None and not options.get("use_vmap"):
        mask.window = options.get("local_size")
    return mask


# The functions are replaced for good, since threads share them; outside the blocks, and without the option, all do as
# before.
masking_utils.find_packed_sequence_indices = _found
masking_utils.fast_all = _all_true
_sdpa_mask = partial(_bounded, ALL_MASK_ATTENTION_FUNCTIONS[SDPA])
ALL_MASK_ATTENTION_FUNCTIONS.register("eager", partial(_bounded, ALL_MASK_ATTENTION_FUNCTIONS["eager"]))
ALL_MASK_ATTENTION_FUNCTIONS.register(SDPA, _make_mask)
ALL_ATTENTION_FUNCTIONS.register(SDPA, _attend)
