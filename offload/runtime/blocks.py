"""Finds the repeated blocks of a model: the modules that are streamed as layers and recomputed as blocks."""

from __future__ import annotations

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from offload.runtime.errors import KnobError

# Dotted paths of the block list in well-known models, the usual names first.
USUAL_PATHS = (
    "model.layers",
    "layers",
    "blocks",
    "transformer.h",
    "transformer.blocks",
    "transformer.layers",
    "encoder.layers",
    "encoder.layer",
    "model.decoder.layers",
    "gpt_neox.layers",
)


def find_blocks(model: nn.Module, path: str | None = None, key: str = "path") -> list[tuple[str, nn.Module]]:
    """Returns the blocks of `model` with their names, in order.

    `path` is the dotted path of an nn.ModuleList or nn.Sequential. None stands for the first of the usual paths that
    the model has, else for the ModuleList with the most parameters, else for the Sequential with the most. Raises
    KnobError naming the path, as the value of `key`, and the lists of the model.
    """
    modules = dict(model.named_modules())
    # Parametrisations are module lists too, of one parameter's transformations.
    lists = {
        name: module
        for name, module in modules.items()
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and not isinstance(module, ParametrizationList)
    }
    if path is None:
        path = next((usual for usual in USUAL_PATHS if isinstance(lists.get(usual), nn.ModuleList)), None)
    for kind in (nn.ModuleList, nn.Sequential):
        if path is None:
            path = max(
                (name for name, module in lists.items() if isinstance(module, kind)),
                key=lambda name: sum(p.numel() for p in lists[name].parameters()),
                default=None,
            )
    if path not in lists or not len(lists[path]):
        known = ", ".join(sorted(name or "(the model itself)" for name in lists)) or "none"
        raise KnobError(key, path, f"no list of blocks there; the lists of this model: {known}")
    return [(f"{path}.{name}".lstrip("."), block) for name, block in lists[path].named_children()]
