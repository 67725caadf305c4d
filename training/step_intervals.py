"""The steps after which something is done: every N steps, and after the last."""

from __future__ import annotations


def due(every: int | None, step: int, steps: int) -> bool:
    """Tells whether to do it after `step` of `steps` steps, 0 being before the first; never if `every` is None."""
    return every is not None and (step % every == 0 or step == steps)
