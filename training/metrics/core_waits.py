"""Tells whether a run was slow because its machine was busy: how long its thread could run and got no core."""

from __future__ import annotations

import logging
from pathlib import Path
from time import monotonic

# Linux has, of this thread, the nanoseconds on a core, and those in the queue for one.
STATISTICS = Path("/proc/thread-self/schedstat")
# Shares of the time that are worth a line, and the seconds below which no run is worth one.
BUSY, SHORT_S = 0.2, 10.0

logger = logging.getLogger(__name__)


class CoreWaits:
    """The time that this thread waits for a core, from now on."""

    def __init__(self):
        self._start_s, self._waited_s = monotonic(), waited_s()

    def warn(self) -> None:
        """Warns if the thread has waited for more than `BUSY` of the time. Call it from the same thread."""
        passed_s = monotonic() - self._start_s
        if self._waited_s is None or passed_s < SHORT_S:
            return
        share = (waited_s() - self._waited_s) / passed_s
        if share > BUSY:
            logger.warning(
                "the machine was busy: the run waited for a core in %.0f%% of its time, while other programs or its own"
                " threads had them, so its times are longer than on a free machine",
                100 * share,
            )


def waited_s() -> float | None:
    """Returns the seconds that this thread has waited for a core since it began; None where that is not known."""
    try:
        return int(STATISTICS.read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return None
