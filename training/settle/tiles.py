"""Settles `recompute.tile`: from how many tokens on the blocks compute their MLPs and norms in tiles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from omegaconf import DictConfig
from torch import nn

from offload import ActivationMode, BounceLinear, Mode, compute_in_tiles, find_blocks
from training.config.declare import AUTO
from training.config.rates import Choice
from training.errors import UserError
from training.settle.settled import units_of_microbatch
from training.tasks.task import Task

# Of tokens: a product over so many rows is as fast a token as over all, and its results in an MLP three to four times
# as wide as the model are half a GiB.
TILE = 16_384
# In tiles from so many tokens on: the last product of an MLP is computed once more than without, which took 2.4% of a
# step at 65,536 tokens, where attention is half of it.
TILED_FROM = 8 * TILE


def settle_tile(config: DictConfig, task: Task, mode: Mode, model: nn.Module, recomputes: bool) -> dict[str, str]:
    """Writes `recompute.tile` where it is auto, and returns the reason by its key.

    `recomputes`: the blocks are computed again, by `recompute` or by the mode. Raises UserError for a number under
    which the mode or the model cannot compute in tiles.
    """
    if config.recompute.tile != AUTO:
        problem = None if config.recompute.tile is None else _why_whole(mode, model)
        if problem is not None:
            raise UserError(f"recompute.tile={config.recompute.tile}: {problem}")
        return {}
    tokens = tokens_of_microbatch(config, task)
    config.recompute.tile = usual_tile(mode, model) if recomputes and tokens >= TILED_FROM else None
    if config.recompute.tile is None:
        return {}
    return {"recompute.tile": Choice.of(f"{TILE:,}", f"a microbatch has {tokens:,} tokens", f"{tokens:,} tokens")}


def tokens_of_microbatch(config: DictConfig, task: Task) -> int:
    """Returns the tokens of a device's largest microbatch; 0 for a task of pictures."""
    return units_of_microbatch(config, task) if task.unit == "tokens" else 0


def usual_tile(mode: Mode, model: nn.Module) -> int | None:
    """Returns the tokens of a tile where nobody gives another; None where nothing can be tiled."""
    return TILE if _why_whole(mode, model) is None else None


def _why_whole(mode: Mode, model: nn.Module) -> str | None:
    """Returns why nothing can be tiled, and what to take; None where it can."""
    weights = mode.weights if isinstance(mode, ActivationMode) else mode
    if mode.foreign or isinstance(weights, BounceLinear):
        return (
            "this mode brings single layers, for each tile anew: take offload=layer_stream or shard_offload, or"
            " recompute.tile=null"
        )
    try:
        compute_in_tiles((block for _, block in find_blocks(model, key="recompute.tile")), TILE)()
    except ValueError as error:
        return f"{error}: take recompute.tile=null"
    return None


@contextmanager
def in_tiles(config: DictConfig, model: nn.Module) -> Iterator[None]:
    """Surrounds the time in which a mode is attached to `model`, whose blocks then compute in the tiles of `config`."""
    with ExitStack() as undo:
        if config.recompute.tile is not None:
            blocks = (block for _, block in find_blocks(model, key="recompute.tile"))
            undo.callback(compute_in_tiles(blocks, config.recompute.tile))
        yield
