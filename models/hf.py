"""Causal language models and image classifiers of transformers, behind one way to call each.

The model is made from its configuration, with no weights: build it under `torch.device("meta")`, let a mode make its
memory, then fill it (`fill_buffers`, and `initialise` or `load`).
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, DynamicCache, PreTrainedModel
from transformers.core_model_loading import build_glob_alternation
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from models.attention_kernels import avoid_cudnn_attention
from models.built_again import fill_buffers
from models.divided_sequence import DividedSequence
from models.hf_divided import options_of, why_not_divided
from models.hf_files import load_hf, matched_hf
from models.hf_head import use_plain_head
from models.hf_initialise import initialise_hf
from models.hf_packed import (
    STARTS,
    Packing,
    lengths_of_angles,
    most_packed,
    most_positions,
    one_sequence_a_row,
    packed_rows,
    starts_for,
    starts_of_rows,
    without_padding_warning,
)
from models.hf_source import CAUSAL_LM, EXPERTS, find_source, one_line, same_again
from models.library_dtypes import Keeps, keep_float32
from models.loss import IGNORED_LABEL, averages
from models.packed_attention import positions_in
from models.safetensors_files import StoredTensor

# transformers chooses the attention backend.
AUTO = "auto"
# What the models that have an auxiliary loss of experts call its weight; the second is JetMoE's.
BALANCES = ("router_aux_loss_coef", "aux_loss_coef")
# MiniMax takes a class of its own; with a cache the others compute other logits than without (Moshi beyond its window).
WITH_OTHER_CACHES = ("minimax", "moshi", "prophetnet")


def build_hf(
    source: str,
    task: str,
    overrides: Mapping[str, Any] | None = None,
    attention: str = AUTO,
    dtype: torch.dtype | None = None,
) -> TransformersModel:
    """Makes a model of transformers; under `torch.device("meta")`, as the caller should, without memory.

    Args:
        source, task: see `models.hf_source.find_source`.
        overrides: keys of the configuration with other values, such as `{"num_hidden_layers": 4}`; or
            `{"experts_implementation": "batched_mm"}`, a choice of transformers that no configuration keeps.
        attention: "sdpa", "eager", or another backend of transformers; "auto" is sdpa where the architecture has it.
        dtype: that of `from_pretrained(dtype=...)`, by default torch's default dtype. What transformers keeps in
            float32 (rotary frequencies, some routers) is float32.

    Raises ValueError if the source, an override or the backend cannot be had. The message is one line.
    """
    avoid_cudnn_attention()
    config = find_source(source, task).config(overrides)
    auto = AutoModelForCausalLM if task == CAUSAL_LM else AutoModelForImageClassification
    # Where a task has several classes, transformers takes the one that is named here, or the first.
    config.architectures = config.architectures or []
    chosen = {} if attention == AUTO else {"attn_implementation": attention}
    # A file may name a backend that is not installed here.
    config._attn_implementation = None
    try:
        model = auto.from_config(config, dtype=dtype or torch.get_default_dtype(), **chosen)
    # Each architecture refuses sizes that do not fit in its own way; some miss a package.
    except Exception as error:
        # The first sentence says what is wrong; others are about the library's own functions.
        reason = one_line(error).partition(". ")[0]
        advice = f" (attention={attention}: auto takes what the architecture has)" if chosen else ""
        raise ValueError(f"{config.model_type}: {reason}{advice}") from error
    experts = (overrides or {}).get(EXPERTS)
    if experts is not None and not any(map(_chooses_products, model.modules())):
        raise ValueError(f"{EXPERTS}={experts}: {config.model_type} has no experts that take it: leave it out")
    if torch.get_default_device().type == "meta":
        # torch.normal and torch.Tensor make tensors of the CPU all the same.
        model = nn.Module.to(model, "meta")
    keep_float32(model, _keeps(model))
    if task != CAUSAL_LM:
        return ImageClassifier(model)
    return CachedLanguageModel(model) if keeps_keys_and_values(model) else CausalLanguageModel(model)


class TransformersModel(nn.Module):
    """A model of transformers with the forward of a task. `hf` is the model itself, under transformers' names."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        without_padding_warning(model)
        self.hf = model

    @property
    def experts_implementation(self) -> str | None:
        """The name of what of transformers computes the products of experts; None where there is no choice."""
        experts = next(filter(_chooses_products, self.hf.modules()), None)
        return None if experts is None else experts.config._experts_implementation

    def fill_buffers(self) -> None:
        """See `models.built_again.fill_buffers`. transformers computes the values in float32."""
        fill_buffers(self.hf, functools.partial(same_again, self.hf))

    def initialise(self, seed: int, device: torch.device | None = None) -> None:
        """See `models.hf_initialise.initialise_hf`."""
        initialise_hf(self, seed, device)

    def load(self, path: Path) -> None:
        """See `models.hf_files.load_hf`."""
        load_hf(self, path)

    def matched(self, path: Path) -> tuple[dict[str, Tensor], dict[str, StoredTensor]]:
        """See `models.hf_files.matched_hf`."""
        return matched_hf(self, path)


class CausalLanguageModel(TransformersModel):
    """A causal language model of transformers that returns its loss.

    Where the model's own forward does nothing to the head's product, the loss is computed chunk by chunk and the
    logits are never stored (`chunked_loss`); otherwise (capped or scaled logits, a head with bias) as transformers
    does. The auxiliary loss of experts is added with the model's own coefficient where the configuration has
    `output_router_logits=true`, as in transformers, and then the logits are stored. By default it is off.

    There is no attention mask: every position sees all earlier ones of its row, or of its sample in packed rows. In
    long rows on a GPU no mask of windows or of padding is made either, where FlashAttention's kernel does without.
    `most_positions` are the most tokens of a row, `most_packed` those of a packed row, None for any number. With
    `divided` rows are this rank's part of those that several ranks divide.
    """

    divided: DividedSequence | None = None

    def __init__(self, model: PreTrainedModel):
        super().__init__(model)
        # Mllama has embeddings of tokens that it cannot predict.
        self.vocab_size = min(model.get_input_embeddings().num_embeddings, _predicted_tokens(model))
        self.most_positions, self.most_packed = most_positions(model), most_packed(model)
        window = getattr(model.config.get_text_config(), "sliding_window", None)
        self._window = window if isinstance(window, int) else math.inf
        self._plain_head = use_plain_head(model)
        self._growing = [module for module in model.modules() if "dynamic" in lengths_of_angles(module)]
        self._balance = next((name for name in BALANCES if hasattr(model, name)), None)
        if self.balances_experts and self._balance is None:
            raise ValueError(
                f"output_router_logits=true: {model.config.model_type} has no auxiliary loss of experts: leave it out"
                " of model.overrides, or give false there"
            )
        if self.balances_experts and getattr(model.base_model, "_can_record_outputs", None):
            # Else each forward of a plan would add hooks, and a run have its experts' logits several times.
            maybe_install_capturing_hooks(model.base_model)

    @property
    def balances_experts(self) -> bool:
        """True if the loss has the auxiliary loss of experts, which needs to know what is padding."""
        return bool(getattr(self.hf.config.get_text_config(), "output_router_logits", False))

    @property
    def balance_weight(self) -> float | None:
        """The weight of the auxiliary loss of experts, if it is in the loss; None for a model without one."""
        return None if self._balance is None else getattr(self.hf, self._balance)

    @property
    def chunked_loss(self) -> bool:
        """True if the loss is computed without the logits of the whole batch."""
        return self._plain_head is not None

    @functools.cached_property
    def packing(self) -> Packing:
        """The way in which the model takes packed rows; a forward on the meta device finds it out at the first use."""
        return Packing.of(self.hf)

    @property
    def why_not_packed(self) -> str | None:
        """None for a model that takes packed rows; else a clause that says why not."""
        return self.packing.why_not

    def why_not_divided(self, count: int) -> str | None:
        """Returns None for a model whose rows `count` ranks can divide; else a clause that says why not."""
        if self.balances_experts:
            return "its auxiliary loss of experts (output_router_logits) counts the tokens of whole rows"
        return why_not_divided(self.hf, self.packing, count)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        *,
        segments: Tensor | None = None,
        reduction: str = "mean",
        real: Tensor | None = None,
    ) -> Tensor:
        """Returns the mean loss, a float32 scalar (float64 for a float64 model), or each position's loss.

        Args:
            input_ids: int64 [batch, seq_len].
            labels: int64 [batch, seq_len]: the token that should follow each position, so the caller shifts them.
                Positions with -100 are left out of the mean; if all are, the loss is 0.
            segments: int64 [batch, seq_len], for packed rows: the number of the sample within its row, -1 for padding
                at the end. Positions begin at 0 in each sample, and none sees another.
            reduction: "mean", or "none" for [batch, seq_len], 0 where the label is -100 and without the auxiliary loss
                of experts, which is no position's.
            real: bool [batch, seq_len], False for padding at the end, which the auxiliary loss of experts leaves out.

        Raises ValueError if the shapes differ, or the model does not take packed rows.
        """
        if labels.shape != input_ids.shape:
            raise ValueError(f"labels {tuple(labels.shape)} must have the shape of input_ids {tuple(input_ids.shape)}")
        mean = averages(reduction)
        self._forget_longer_rows(input_ids.shape[1])
        given, known, starts = {} if real is None else {"attention_mask": real}, one_sequence_a_row(), None
        if segments is not None:
            if self.why_not_packed is not None:
                raise ValueError(f"{self.hf.config.model_type} takes no packed rows, because {self.why_not_packed}")
            starts = starts_for(segments, self.hf.dtype) if self.packing.by_starts else None
            given["position_ids"] = positions_in(segments)
            known = packed_rows(segments, by_starts=starts is not None)
        elif self.divided is None and (real is not None or self._window <= input_ids.shape[1]):
            starts = starts_of_rows(input_ids, self.hf.dtype)
            # Finding out takes a second.
            starts = starts if starts is not None and self.packing.by_starts else None
            known = packed_rows(None, by_starts=starts is not None)
        if starts is not None:
            given[STARTS] = starts
        if self.divided is not None:
            given |= options_of(self.divided, input_ids)
        if self._plain_head is not None:
            with known:
                hidden = self._plain_head.hidden(self.hf, input_ids, **given)
            return self.hf.get_output_embeddings()(hidden, labels, reduction)
        with known:
            output = self.hf(input_ids=input_ids, **given)
        loss = cross_entropy(output.logits, labels, mean)
        auxiliary = output.get("aux_loss") if mean else None
        if auxiliary is not None:
            loss = loss + self.balance_weight * auxiliary.to(loss.device)
        return loss

    def _forget_longer_rows(self, length: int) -> None:
        """Lets rotary angles that grow with the longest row so far (dynamic) be those of rows of `length`.

        Else a loss would depend on what was computed before: on evaluations, and on where a run resumes.
        """
        for rotary in self._growing:
            first = rotary.original_max_seq_len
            if rotary.max_seq_len_cached > first:
                # transformers grows them from here on, or takes the first ones for shorter rows; neither at `first`.
                rotary.max_seq_len_cached = 0 if length == first else first + 0.5


class CachedLanguageModel(CausalLanguageModel):
    """A causal language model of transformers that can generate text: it keeps the keys and values of positions.

    `short_positions` are the most tokens of a text that has the short angles of longrope (Phi-3), None without it.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__(model)
        rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
        is_long = rope.get("rope_type") == "longrope"
        self.short_positions = rope.get("original_max_position_embeddings") if is_long else None

    def key_value_cache(self, capacity: int) -> DynamicCache:
        """Returns an empty cache of transformers for one text; it grows, whatever the `capacity`."""
        cache = DynamicCache(config=self.hf.config)
        # transformers counts the layers of Whisper's encoder. Without a configuration it adds layers as they come.
        return DynamicCache() if 0 < len(cache.layers) < getattr(self.hf.config, "decoder_layers", 0) else cache

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        cache: DynamicCache | None = None,
        *,
        segments: Tensor | None = None,
        reduction: str = "mean",
        real: Tensor | None = None,
    ) -> Tensor:
        """Returns the loss as `CausalLanguageModel` does, or with `cache` the logits of the last position.

        Args:
            cache: for inference, from `key_value_cache`: the positions of earlier calls, which those of `input_ids`
                follow. They are stored there too.

        Returns:
            The loss, or logits [batch, 1, vocab_size].

        Raises ValueError if the architecture leaves the cache as it was, so later positions would not see earlier ones.
        """
        if cache is None:
            return super().forward(input_ids, labels, segments=segments, reduction=reduction, real=real)
        if segments is not None:
            raise ValueError("segments and a cache were given: a text that is generated has a row of its own")
        if labels is not None:
            raise ValueError("labels and a cache were given: a loss is computed without a cache")
        before = cache.get_seq_length()
        with one_sequence_a_row():
            logits = self.hf(input_ids=input_ids, past_key_values=cache, use_cache=True).logits[:, -1:]
        if cache.get_seq_length() != before + input_ids.shape[1]:
            raise ValueError(f"{self.hf.config.model_type} does not store keys and values, so no text can be generated")
        return logits


def keeps_keys_and_values(model: PreTrainedModel) -> bool:
    """Tells whether a model of transformers takes and returns the cache of its attention layers.

    Others have none (OpenAI's first GPT), or states of another kind under another name (Mamba, RWKV).
    """
    takes = "past_key_values" in inspect.signature(model.forward).parameters
    return takes and model.config.model_type not in WITH_OTHER_CACHES


class ImageClassifier(TransformersModel):
    """An image classifier of transformers."""

    def forward(self, images: Tensor) -> Tensor:
        """Returns logits [batch, classes] for images [batch, channels, height, width] of the parameters' dtype."""
        output = self.hf(pixel_values=images)
        # PP-LCNet's are under another name.
        return output.last_hidden_state if output.get("logits") is None else output.logits


def _chooses_products(module: nn.Module) -> bool:
    """Tells whether a module has the experts of a layer, whose products transformers computes in one of several ways.

    Its own exporters tell these by the same attributes, which `use_experts_implementation` gives them.
    """
    return hasattr(module, "has_gate") and hasattr(module, "is_transposed")


def _keeps(model: PreTrainedModel) -> Keeps:
    """Returns which tensors transformers keeps in float32 in a load with the dtype of the model."""
    plan = model._get_dtype_plan(model.config.dtype)
    if not plan:
        return lambda name: False
    names, _, _ = build_glob_alternation(list(plan))
    return lambda name: names.search(name) is not None


def _predicted_tokens(model: PreTrainedModel) -> int:
    """Returns the rows of the head of a model, or those of its embeddings where it has no head of one matrix."""
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", model.get_input_embeddings().weight)
    return len(weight)


def cross_entropy(logits: Tensor, labels: Tensor, mean: bool) -> Tensor:
    """Returns the mean cross-entropy of logits [batch, seq_len, vocab_size] over the labels that are not -100, or 0.

    Without `mean`, each position's [batch, seq_len], 0 where the label is -100. It is computed in float32, or in
    float64 for float64 logits.
    """
    rows = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
    reduction = "sum" if mean else "none"
    losses = F.cross_entropy(rows, labels.flatten(), ignore_index=IGNORED_LABEL, reduction=reduction)
    return losses / (labels != IGNORED_LABEL).sum().clamp(min=1) if mean else losses.view(labels.shape)
