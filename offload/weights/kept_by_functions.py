"""Weights that an autograd function keeps by itself, as attributes of its context.

`save_for_backward` is where hooks see what a function saves. The products of bitsandbytes keep the packed weight and
its quantisation state in attributes instead. When backward runs, the slot that these lie in has another unit. So at
the end of a forward that had such a weight in a window, the functions that it recorded are searched for views of the
slot, which are noted by name. Before backward runs such a function, it gets views of the slot where the unit is then.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Iterator

import torch
from torch.autograd.function import BackwardCFunction

from offload.runtime.tensor_parts import replaced_in, tensors_in
from offload.runtime.torch_internals import left_out_of_graphs, sequence_number, tree_leaves
from offload.weights.saved_weights import SavedWeights
from offload.weights.stand_ins import AT_ONCE
from offload.weights.units import OffloadUnit

# A value of a context, and its tensors: by name (`SavedWeights.named`), or themselves.
Kept = tuple[object, list[object]]
# The key in a node's metadata.
NAMED = "offload.kept_weights"


def name_kept_weights(result: object, since: int, units: Collection[OffloadUnit], saved: SavedWeights) -> None:
    """Has the functions behind `result` that were recorded `since` that number bring back the weights that they keep.

    `units` are those whose windows have been open ever since.
    """
    if not units or not torch.is_grad_enabled():
        return
    for node in _recorded(result, since):
        if not isinstance(node, BackwardCFunction) or NAMED in node.metadata:
            continue
        kept = {name: _kept(value, units, saved) for name, value in vars(node).items()}
        kept = {name: each for name, each in kept.items() if each is not None}
        if kept:
            node.metadata[NAMED] = True
            # The node has the hook: it would keep itself alive.
            node.register_prehook(functools.partial(_bring_back, weakref.ref(node), kept, saved))


def _recorded(result: object, since: int) -> Iterator[torch.autograd.graph.Node]:
    leaves = (leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
    nodes, seen = [leaf.grad_fn for leaf in leaves], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen or not since <= sequence_number(node) < AT_ONCE:
            continue
        seen.add(node)
        yield node
        nodes += [before for before, _ in node.next_functions]


def _kept(value: object, units: Collection[OffloadUnit], saved: SavedWeights) -> Kept | None:
    tensors = list(tensors_in(value))
    names = [saved.named(tensor, units) for tensor in tensors]
    if not any(name is not None for name in names):
        return None
    return value, [tensor if name is None else name for tensor, name in zip(tensors, names, strict=True)]


@left_out_of_graphs
def _bring_back(node: weakref.ref, kept: dict[str, Kept], saved: SavedWeights, gradients: tuple) -> None:
    for name, (value, named) in kept.items():
        tensors = [each if isinstance(each, torch.Tensor) else saved.brought_back(each) for each in named]
        setattr(node(), name, replaced_in(value, tensors))
