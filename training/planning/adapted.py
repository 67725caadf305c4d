"""Tells which linear layers have no adapter beside them."""

from __future__ import annotations

from models.adapter_targets import linear_names
from models.adapters import adapter_layers, config_of, is_adapted, root_of, without_adapters
from training.settle.components import Components

# Names that are shown; layers of one name in all blocks count once.
NAMED = 8
HOW = {"experts": " (adapter.experts=true gives them one)"}


def unadapted_note(components: Components) -> str | None:
    """Returns a line with the linear layers that neither have an adapter nor train in full, by the ends of their names.

    None where nothing is adapted, or everything is.
    """
    model = components.model
    if not is_adapted(model):
        return None
    root = root_of(model)
    adapted = {name for name, _ in adapter_layers(root)}
    full = tuple(f"{name}." for name in config_of(model).modules_to_save or ())
    with without_adapters(model):
        kinds = linear_names(root)
    left = {name: kind for name, kind in kinds.items() if name not in adapted and not f"{name}.".startswith(full)}
    shown = list(dict.fromkeys(_short(name, kind) for name, kind in left.items()))
    if not shown:
        return None
    more = f" and {len(shown) - NAMED} more" if len(shown) > NAMED else ""
    return f"no adapter: {', '.join(shown[:NAMED])}{more}"


def _short(name: str, kind: str) -> str:
    own = name.rpartition(".")[2]
    return f"router {own}" if kind == "router" and own != kind else f"{own}{HOW.get(kind, '')}"
