"""Weights that an autograd function keeps by itself, as attributes of its context.

`save_for_backward` is where hooks see what a function saves. Code also writes `ctx.weight = weight`, and the products
of bitsandbytes keep the packed weight and its quantisation state so. When backward runs, the slot that these lie in has
another unit: the gradients would be wrong in silence. So at the end of a forward in a window, the contexts that it made
are searched for views of slots, which are noted by name. Before backward runs such a function, it gets views of the
slot where the unit is then.

Not found: what a function keeps in a closure, or in a place of its own outside of its context.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Iterable

import torch
from torch.autograd.function import BackwardCFunction

from offload.torch_private.tensor_parts import replaced_in, tensors_in
from offload.torch_private.torch_internals import left_out_of_graphs
from offload.weights.units.unit import OffloadUnit
from offload.weights.windows.saved_weights import SavedWeights

# A value of a context, and its tensors: by name (`SavedWeights.named`), or themselves.
Kept = tuple[object, list[object]]
# The key in a node's metadata.
NAMED = "offload.kept_weights"


def name_kept_weights(
    contexts: Iterable[weakref.ref[BackwardCFunction]], units: Collection[OffloadUnit], saved: SavedWeights
) -> None:
    """Makes the functions of these contexts bring back the weights that they keep, before backward runs them.

    `units` are those whose windows have been open since before the first context was made.
    """
    if not units or not torch.is_grad_enabled():
        return
    for context in contexts:
        node = context()
        # Without inputs that need gradients it is no node of a graph.
        if node is None or not node.next_functions or NAMED in node.metadata:
            continue
        kept = {name: _kept(value, units, saved) for name, value in vars(node).items()}
        kept = {name: each for name, each in kept.items() if each is not None}
        if kept:
            node.metadata[NAMED] = True
            # The node has the hook: it would keep itself alive.
            node.register_prehook(functools.partial(_bring_back, context, kept, saved))


def _kept(value: object, units: Collection[OffloadUnit], saved: SavedWeights) -> Kept | None:
    tensors = list(tensors_in(value))
    names = [saved.named(tensor, units) for tensor in tensors]
    if not any(name is not None for name in names):
        return None
    return value, [tensor if name is None else name for tensor, name in zip(tensors, names, strict=True)]


@left_out_of_graphs
def _bring_back(node: weakref.ref, kept: dict[str, Kept], saved: SavedWeights, gradients: tuple) -> None:
    for name, (value, named) in kept.items():
        tensors = [each if isinstance(each, torch.Tensor) else saved.unpack(each) for each in named]
        setattr(node(), name, replaced_in(value, tensors))
