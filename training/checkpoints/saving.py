"""When a run saves itself, what it writes, and which checkpoints it keeps."""

from __future__ import annotations

import errno
import logging
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
from omegaconf import DictConfig
from torch import nn

from models.llama import Llama
from models.safetensors_files import split_into_files, write_tensors
from models.weights import INDEX_FILE, MAX_SHARD_BYTES, weight_files
from offload.runtime.byte_sizes import format_bytes
from offload.runtime.registry import Streams
from training.checkpoints.changes import config_text
from training.checkpoints.durable import remove_folder, remove_leftover, write_folder
from training.checkpoints.hugging_face import HUGGING_FACE_FILE, hugging_face_config
from training.checkpoints.layout import (
    CONFIG_FILE,
    OPTIMIZER_STEM,
    RANDOM_FILE,
    STATE_FILE,
    checkpoints_in,
    folder_of,
    partials_in,
    step_of,
)
from training.checkpoints.state import RunState, random_states
from training.checkpoints.tensors import optimizer_tensors
from training.errors import UserError

logger = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one run, in its directory.

    Saving stops the step for as long as it takes: tensors go from where they are to the disk one by one, and a step
    in between would change them.
    """

    def __init__(
        self, config: DictConfig, run_dir: Path, model: nn.Module, optimizer: torch.optim.Optimizer, streams: Streams
    ):
        self.on_signal: bool = _on_signal(config)
        self._config = config
        self._run_dir = run_dir
        self._model = model
        self._optimizer = optimizer
        self._streams = streams

    def due(self, step: int) -> bool:
        """Whether to save after `step`: every `checkpoint.every` steps, and after the last."""
        every = self._config.checkpoint.every
        return every is not None and (step % every == 0 or step == self._config.steps)

    def save(self, state: RunState, required: bool = False) -> float | None:
        """Writes a checkpoint, then removes those beyond `checkpoint.keep`; returns ms.

        Where the disk refuses it, the run has those that it had: one warning and None, or, where it is `required`,
        UserError.
        """
        folder = folder_of(self._run_dir, state.step)
        start = perf_counter()
        try:
            self._optimizer.finish()
            self._streams.synchronize()
            self._remove_partials()
            nbytes = write_folder(folder, self._files(state))
        except OSError as error:
            self._refused(folder, error, required)
            return None
        save_ms = (perf_counter() - start) * 1e3
        logger.info("saved %s, %s in %.0f ms", folder.name, format_bytes(nbytes), save_ms)
        self._remove_old(state.step)
        return save_ms

    def latest(self) -> Path:
        """The newest checkpoint there is."""
        return checkpoints_in(folder_of(self._run_dir, 0).parent)[0]

    def _files(self, state: RunState) -> dict:
        weights, index = weight_files(self._model, MAX_SHARD_BYTES)
        states = split_into_files(OPTIMIZER_STEM, optimizer_tensors(self._model, self._optimizer), MAX_SHARD_BYTES)
        random = {RANDOM_FILE: random_states(self._streams.device)}
        files = {name: partial(write_tensors, tensors=tensors) for name, tensors in (weights | states | random).items()}
        texts = {STATE_FILE: state.to_json(), CONFIG_FILE: config_text(self._config).encode()}
        if index is not None:
            texts[INDEX_FILE] = index
        if isinstance(self._model, Llama):
            texts[HUGGING_FACE_FILE] = hugging_face_config(self._config)
        return files | {name: partial(_write_text, text=text) for name, text in texts.items()}

    def _refused(self, folder: Path, error: OSError, required: bool) -> None:
        cause = f"{folder} could not be saved ({_reason(error, folder)})"
        if required:
            advice = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "mend that"
            raise UserError(f"{cause}: {advice}, or choose another place with hydra.run.dir=PATH") from error
        logger.warning("%s: the run goes on, and the checkpoints before it are as they were", cause)

    def _remove_partials(self) -> None:
        for leftover in partials_in(folder_of(self._run_dir, 0).parent):
            remove_leftover(leftover)

    def _remove_old(self, step: int) -> None:
        folders = [folder for folder in checkpoints_in(folder_of(self._run_dir, 0).parent) if step_of(folder) <= step]
        for folder in folders[self._config.checkpoint.keep :]:
            try:
                remove_folder(folder)
            except OSError as error:
                logger.warning("%s could not be removed (%s)", folder, _reason(error, folder))


def _reason(error: OSError, folder: Path) -> str:
    """What is wrong, and where, if that is not `folder`."""
    reason = error.strerror or str(error)
    return reason if error.filename in (None, str(folder)) else f"{error.filename}: {reason}"


def _on_signal(config: DictConfig) -> bool:
    chosen = config.checkpoint.on_signal
    return config.checkpoint.every is not None if chosen is None else chosen


def _write_text(write, text: bytes) -> None:
    write(text)
