"""Computes the loss of a transformers model chunk by chunk, where its head is a plain linear layer.

`models.loss` never stores the logits of a batch. That is right only for a model whose logits are nothing but the
head's product: some models scale them, or cap them by a tanh. Here the model's own forward shows which it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from models.loss import Head

# Operations that change no value.
VIEWS = {"alias", "detach", "expand", "select", "slice", "squeeze", "unsqueeze", "view", "_unsafe_view", "permute", "t"}
# A batch that the watched forward gets.
IDS_SHAPE = (2, 3)


@dataclass(frozen=True)
class PlainHead:
    """The call of the model below the head in a model's forward, where its logits are plainly head(hidden).

    Attributes:
        arguments, options: those of the call, with None in place of the ids' position or name.
        ids: the position or the name of the argument that takes the ids.
    """

    arguments: tuple[Any, ...]
    options: dict[str, Any]
    ids: int | str

    def hidden(self, model: nn.Module, input_ids: Tensor, **more: Any) -> Tensor:
        """Returns what the head is applied to, [batch, seq_len, hidden_size]; `more` are options of the call."""
        arguments, options = list(self.arguments), {**self.options, **more}
        (arguments if isinstance(self.ids, int) else options)[self.ids] = input_ids
        return model.base_model(*arguments, **options).last_hidden_state


def use_plain_head(model: nn.Module) -> PlainHead | None:
    """Gives the model a head that can compute the loss (`models.loss.Head`), where that is the same.

    The model's own forward runs once, with another forward below the head that returns empty hidden states. If
    nothing but views surrounds that and the head, no operation scales, caps or adds to the logits. The model may be
    on any device, the meta device too; nothing of it is computed.

    Returns:
        How to call the model below the head; None if the logits must be computed as the model does, which is then
        unchanged.
    """
    # The second is the model itself where no part of it computes the hidden states.
    head, below = model.get_output_embeddings(), model.base_model
    if type(head) is not nn.Linear or head.bias is not None or below is model:
        return None
    if head._forward_hooks or head._forward_pre_hooks:
        return None
    call = _watched_call(model, below, head)
    if call is None:
        return None
    with torch.device("meta"):
        chunked = Head(head.in_features, head.out_features)
    chunked.weight = head.weight
    model.set_output_embeddings(chunked.train(head.training))
    return call


def _watched_call(model: nn.Module, below: nn.Module, head: nn.Linear) -> PlainHead | None:
    """Runs the model's forward without the parts; returns the call of `below`, or None if values are changed."""
    calls: list[tuple[tuple, dict]] = []
    logits: list[Tensor] = []
    device = head.weight.device
    ids = torch.zeros(IDS_SHAPE, dtype=torch.int64, device=device)
    hidden = torch.empty(*IDS_SHAPE, head.in_features, dtype=head.weight.dtype, device=device)

    def watched_below(*arguments: Any, **options: Any) -> _Hidden:
        calls.append((arguments, options))
        return _Hidden(hidden)

    def watched_head(given: Tensor) -> Tensor:
        logits.append(given.new_empty(*given.shape[:-1], head.out_features))
        return logits[-1]

    below.forward, head.forward = watched_below, watched_head
    try:
        with torch.no_grad(), _Changes() as changes:
            output = model(input_ids=ids)
    # A forward that was written for other hidden states may fail in any way: the model then computes its logits itself.
    except Exception:
        return None
    finally:
        del below.forward, head.forward
    if len(calls) != 1 or len(logits) != 1 or changes.seen or output.logits is not logits[0]:
        return None
    if logits[0].shape[:-1] != hidden.shape[:-1] or output.get("aux_loss") is not None:
        return None
    arguments, options = calls[0]
    places = {**dict(enumerate(arguments)), **options}
    tensors = [place for place, value in places.items() if isinstance(value, Tensor)]
    if len(tensors) != 1 or places[tensors[0]] is not ids:
        return None
    arguments = tuple(None if value is ids else value for value in arguments)
    return PlainHead(arguments, {k: None if v is ids else v for k, v in options.items()}, tensors[0])


class _Hidden:
    """The output of a model without one: hidden states alone; every other field is None."""

    def __init__(self, hidden: Tensor):
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int | str) -> Tensor:
        if index not in (0, "last_hidden_state"):
            raise KeyError(index)
        return self.last_hidden_state


class _Changes(TorchDispatchMode):
    """Collects the operations that compute values; memory that is made empty counts as none."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name not in VIEWS and not name.startswith(("empty", "new_empty")):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))
