"""Finds the repeated blocks of a model: the modules that are streamed as layers and recomputed as blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from offload.knobs import KnobError, refuse_part
from offload.torch_private.tensor_parts import true_bytes

# A block of a larger share of the model (a stage of a U-Net) is taken apart where lists in it hold nearly all of it.
LARGE, NEARLY_ALL = 1 / 8, 3 / 4
# Blocks that have a larger share of their bytes in common with an earlier one are not blocks of their own.
COMMON = 1 / 4
# Lists of a smaller share of the model are no blocks: prediction heads, upsamplers.
SMALL = 1 / 100

Named = tuple[str, nn.Module]


def find_blocks(model: nn.Module, path: str | None = None, key: str = "path") -> list[Named]:
    """Returns the blocks of `model` with their names, in order.

    `path` is the dotted path of an nn.ModuleList or nn.Sequential. None stands for every ModuleList that is not inside
    another: the layers of encoder and decoder, of all towers, of both kinds. Where stages have lists inside, it takes
    these lists. Lists of less than a hundredth of the model count where there is nothing else. In a model without such
    lists it stands for the Sequential with the most parameters. Raises KnobError naming the path, as the value of
    `key`, and the lists of the model.
    """
    lists = {name: module for name, module in model.named_modules() if _is_list(module, (nn.ModuleList, nn.Sequential))}
    if path is None:
        sequentials = [name for name, module in lists.items() if isinstance(module, nn.Sequential)]
        # Small lists are better than none.
        for least in (SMALL,) if sequentials else (SMALL, 0.0):
            if blocks := list(_without_overlap(_blocks_below(model, "", _nbytes(model), least))):
                return blocks
        path = max(sequentials, key=lambda name: _nbytes(lists[name]), default=None)
    if path not in lists or not len(lists[path]):
        known = ", ".join(sorted(name or "(the model itself)" for name in lists)) or "none"
        raise KnobError(key, path, f"no list of blocks there; the lists of this model: {known}")
    return [(f"{path}.{name}".lstrip("."), block) for name, block in lists[path].named_children()]


def outside_blocks(model: nn.Module, blocks: Iterable[nn.Module]) -> Iterator[Named]:
    """Yields the modules that hold parameters themselves and are in none of `blocks`, in the order of the model."""
    inside = {module for block in blocks for module in block.modules()}
    for name, module in model.named_modules():
        if module not in inside and next(module.parameters(recurse=False), None) is not None:
            yield name or type(module).__name__, module


def _is_list(module: nn.Module, kinds: type | tuple[type, ...]) -> bool:
    # Parametrisations are module lists too, of one parameter's transformations.
    return isinstance(module, kinds) and not isinstance(module, ParametrizationList)


def _blocks_below(module: nn.Module, path: str, total: int, least: float) -> Iterator[Named]:
    """Yields the blocks of the outermost lists at or below `module`, in a model of `total` bytes.

    Lists of a smaller share than `least` are left out.
    """
    if not _is_list(module, nn.ModuleList):
        for name, child in module.named_children():
            yield from _blocks_below(child, f"{path}.{name}".lstrip("."), total, least)
    elif _nbytes(module) >= least * total:
        for name, block in module.named_children():
            yield from _taken_apart(block, f"{path}.{name}".lstrip("."), total, least)


def _taken_apart(block: nn.Module, path: str, total: int, least: float) -> Iterable[Named]:
    # A list in a list is no block: nobody calls it.
    if _is_list(block, nn.ModuleList):
        return _blocks_below(block, path, total, least)
    if (nbytes := _nbytes(block)) > LARGE * total:
        inner = list(_blocks_below(block, path, total, least))
        if sum(_nbytes(module) for _, module in inner) >= NEARLY_ALL * nbytes:
            return inner
    return [(path, block)]


def _without_overlap(blocks: Iterable[Named]) -> Iterator[Named]:
    """Leaves out blocks of which a large part is of modules that are in an earlier one, or that an earlier one is in.

    Blocks may have a small module in common, as the layers of some adapters do (VeRA).
    """
    taken: set[nn.Module] = set()
    found: set[nn.Module] = set()
    for name, block in blocks:
        modules = set(block.modules())
        common = modules & taken
        few = not common or _nbytes(nn.ModuleList(common)) <= COMMON * _nbytes(block)
        if block not in taken and found.isdisjoint(modules) and few:
            taken |= modules
            found.add(block)
            yield name, block


def _nbytes(module: nn.Module) -> int:
    found = 0
    for name, parameter in module.named_parameters():
        refuse_part(name, parameter)
        found += 0 if is_lazy(parameter) else true_bytes(parameter)
    return found
