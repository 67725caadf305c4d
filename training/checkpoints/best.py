"""The best checkpoint of a run, by a metric of its evaluations: `checkpoints/best` is a link to it.

Nothing else remembers it. The records of the run's directory tell, with the checkpoints that are there, which one is
the best; so a run that resumes knows it again, also where it is rewound or asks for another metric.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from training.errors import UserError
from training.metric_names import higher_is_better
from training.runs.checkpoint_files import BEST_LINK, folder_of
from training.runs.files import partial_path
from training.tasks.task import Task

logger = logging.getLogger(__name__)

KEY = "checkpoint.best"


class Best:
    """Finds the best of the steps whose records it is given, in their order, and links to the checkpoint there.

    `metric` is that of an evaluation; None: no checkpoint is the best.
    """

    def __init__(self, metric: str | None, run_dir: Path):
        self.step: int | None = None
        """of the best checkpoint; None: there is none"""
        self._metric, self._run_dir = metric, run_dir
        self._sign = 1.0 if metric is not None and higher_is_better(metric) else -1.0
        self._value = -math.inf
        # A step that is better, and its value, until it is saved.
        self._candidate: tuple[int, float] | None = None

    def add(self, record: Mapping[str, Any]) -> None:
        """Takes a record, new or of an earlier part of the run. The evaluation before the first step is left out."""
        value, step = record.get(self._metric), record["train/step"]
        # Of equal ones the first is kept. What is no number is never the best.
        if value is None or not step or not math.isfinite(value) or self._sign * value <= self._value:
            return
        self._candidate = step, value
        if folder_of(self._run_dir, step).is_dir():
            self.saved(step)

    def wants(self, step: int) -> bool:
        """Tells whether the checkpoint of `step`, which is not there yet, would be the best."""
        return self._candidate is not None and self._candidate[0] == step

    def saved(self, step: int) -> None:
        """Takes the checkpoint of `step`, which is complete, for the best, if `wants` it."""
        if not self.wants(step):
            return
        value = self._candidate[1]
        self.step, self._value, self._candidate = step, self._sign * value, None
        logger.info("%s=%s: the best so far is %.6g, after step %d", KEY, self._metric, value, step)
        self.link()

    def link(self) -> None:
        """Makes the link that of the best checkpoint, or removes it. A disk that refuses that gives a warning."""
        home = folder_of(self._run_dir, 0).parent
        link = home / BEST_LINK
        try:
            if self.step is None:
                link.unlink(missing_ok=True)
                return
            # No reader finds none.
            partial = partial_path(link)
            partial.unlink(missing_ok=True)
            partial.symlink_to(folder_of(self._run_dir, self.step).name)
            os.replace(partial, link)
        except OSError as error:
            logger.warning("%s cannot link to the best checkpoint (%s)", link, error.strerror or error)


def check_best(config: DictConfig, task: Task) -> None:
    """Raises UserError if checkpoint.best names what the run does not measure."""
    asked = config.checkpoint.best
    if asked is None:
        return
    measured = [f"eval/{name}" for name in task.score_names]
    if asked not in measured:
        raise UserError(f"{KEY}={asked}: the run measures {' and '.join(measured)}: choose one, or null")
    if config.eval.every is None:
        raise UserError(f"{KEY}={asked}: the run does not evaluate: give eval.every=N, or {KEY}=null")
