"""Attributes, parameters and random numbers of a block that is computed twice: once in forward, again in backward.

A forward may count its calls in an attribute, and between forward and backward its user may call `eval()`, change a
dropout rate or end a `torch.func.functional_call`. The recompute begins with what its own forward began with, and
leaves what it found. The contents of a value are not kept: a list that a forward adds to has one item more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from offload.torch_private.random_state import RandomState

# torch keeps these in step with the parameters, which streaming replaces.
OF_TORCH = ("_flat_weights", "_flat_weight_refs")
# The attribute of a tensor that stands in for a parameter, in a window only.
STANDS_FOR = "_stands_for"
MISSING = object()


class BlockAttributes:
    """The attributes and parameters of a block's modules, and Python's random numbers, as a forward finds them."""

    def __init__(self, block: nn.Module):
        self._found = [(vars(module), dict(vars(module)), _own(module)) for module in block.modules()]
        self._random = RandomState.of_python()

    @contextmanager
    def in_recompute(self) -> Iterator[None]:
        """Returns the context of the recompute, also of one that an exception ends early."""
        here = [(attributes, dict(attributes)) for attributes, _, _ in self._found]
        random, held = RandomState.of_python(), []
        for attributes, found, parameters in self._found:
            restore(attributes, found)
            for name, tensor in parameters.items():
                now = attributes["_parameters"].get(name)
                # A block that takes gradients is computed again inside its own forward, with its window open.
                if now is not tensor and getattr(now, "__dict__", {}).get(STANDS_FOR) is not tensor:
                    held.append((attributes["_parameters"], name, now))
                    attributes["_parameters"][name] = tensor
        self._random.restore()
        try:
            yield
        finally:
            random.restore()
            for parameters, name, now in held:
                parameters[name] = now
            for attributes, now in here:
                restore(attributes, now)


def restore(attributes: dict[str, object], found: dict[str, object]) -> None:
    """Gives a module the attributes that it was found with."""
    for name in changed(attributes, found):
        if name in found:
            attributes[name] = found[name]
        else:
            del attributes[name]


def changed(attributes: dict[str, object], found: dict[str, object]) -> list[str]:
    """Returns the names of attributes that are other objects than they were found, that are new, or gone."""
    if len(attributes) == len(found) and all(found.get(name, MISSING) is value for name, value in attributes.items()):
        return []
    names = attributes.keys() | found.keys()
    return [
        name for name in names if name not in OF_TORCH and attributes.get(name, MISSING) is not found.get(name, MISSING)
    ]


def _own(module: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters that are no stand-ins: by the time of the recompute these have other memory."""
    # Those of a scripted module are in no dictionary.
    parameters = module._parameters if isinstance(module._parameters, dict) else {}
    return {
        name: tensor
        for name, tensor in parameters.items()
        if tensor is not None and STANDS_FOR not in getattr(tensor, "__dict__", ())
    }
