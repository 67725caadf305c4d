"""Saves a run: when, which files, how many checkpoints are kept, and which is the best: `checkpoints/best` links to it.

The folder of a checkpoint is complete or not there, even after a power failure or a kill. Which checkpoint is the best
is found again from the run's records when it resumes, even from an earlier checkpoint or with another metric.
"""

import errno
import functools
import hashlib
import json
import logging
import math
import os
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from threading import Event
from time import perf_counter
from types import MappingProxyType
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from models.adapter_files import CONFIG_FILE as ADAPTER_CONFIG_FILE
from models.adapter_files import WEIGHTS_FILE as ADAPTER_FILE
from models.adapter_files import adapter_config, adapter_fill
from models.llama import Llama
from models.quantise import is_quantised
from models.safetensors_files import split_into_files, write_tensors
from models.weights import INDEX_FILE, MAX_SHARD_BYTES, weight_files
from models.whole_folder import Fill, Write, bytes_of, renamed_when_whole, write_file
from offload import Streams
from offload.knobs import format_bytes
from training.checkpoints.base import BaseReference
from training.checkpoints.changes import config_text
from training.checkpoints.state import RunState, optimizer_tensors, random_states
from training.config.schema import Precision, due
from training.errors import UserError
from training.metric_names import higher_is_better
from training.runs.checkpoint_files import (
    BASE_FILE,
    BEST_LINK,
    EMA_STEM,
    HUGGING_FACE_FILE,
    MANIFEST_FILE,
    OPTIMIZER_STEM,
    RANDOM_FILE,
    STATE_FILE,
    FileRecord,
    checkpoints_in,
    folder_of,
    manifest_text,
    partials_in,
    side_by_side,
    step_of,
)
from training.runs.files import CONFIG_FILE, partial_path
from training.runs.signals import WORTH_SAVING_S
from training.tasks.task import Task
from training.weights.architecture import LLAMA_KEYS

logger = logging.getLogger(__name__)

KEY = "checkpoint.best"


class Checkpoints:
    """Saves the checkpoints of one run in its directory; training waits, because a step would change the tensors.

    With `base`, the frozen base of an adapter, a checkpoint has the adapter and `base`, not the whole model. It has the
    `averages` of weights too, if there are any.
    """

    def __init__(
        self,
        config: DictConfig,
        run_dir: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        streams: Streams,
        base: BaseReference | None = None,
        averages: Mapping[str, Tensor] = MappingProxyType({}),
    ):
        self.on_signal_after_s = _on_signal_after_s(config)
        """From this many seconds of training on, a signal saves the run; infinity: none does."""
        self.best = Best(config.checkpoint.best, run_dir)
        self._config, self._run_dir = config, run_dir
        self._model, self._optimizer, self._averages = model, optimizer, averages
        self._streams, self._base = streams, base

    def due(self, step: int) -> bool:
        """Tells whether to save after `step`: every `checkpoint.every` steps, after the last, and after the best."""
        return due(self._config.checkpoint.every, step, self._config.steps) or self.best.wants(step)

    def save(self, state: RunState, required: bool = False) -> float | None:
        """Writes a checkpoint, removes the oldest beyond `checkpoint.keep` except the best, and returns the ms taken.

        If the disk refuses the checkpoint, the earlier ones stay: warns and returns None, or raises UserError if the
        checkpoint is `required`.
        """
        folder = folder_of(self._run_dir, state.step)
        start = perf_counter()
        try:
            self._optimizer.finish()
            self._streams.synchronize()
            # Before writing, because the leftovers may be what fills the disk.
            self.remove_leftovers(state.step - 1)
            nbytes = write_folder(folder, self._files(state))
        except OSError as error:
            self._refused(folder, error, required)
            return None
        save_ms = (perf_counter() - start) * 1e3
        logger.info("saved %s, %s in %.0f ms", folder.name, format_bytes(nbytes), save_ms)
        self.best.saved(state.step)
        self.remove_leftovers(state.step)
        return save_ms

    def remove_leftovers(self, step: int) -> None:
        """Removes partial checkpoints, and of those up to `step` all but the newest `checkpoint.keep` and the best.

        A checkpoint that cannot be removed gives a warning.
        """
        home = folder_of(self._run_dir, 0).parent
        old = [folder for folder in checkpoints_in(home) if step_of(folder) <= step][self._config.checkpoint.keep :]
        old = [folder for folder in old if step_of(folder) != self.best.step]
        for remove, paths in ((remove_folder, old), (remove_leftover, partials_in(home))):
            for path in paths:
                try:
                    remove(path)
                except OSError as error:
                    logger.warning("%s could not be removed (%s)", path, _reason(error, path))

    def has(self, step: int) -> bool:
        """Tells whether there is a checkpoint of `step` in the run's directory."""
        return folder_of(self._run_dir, step).is_dir()

    def latest(self) -> Path:
        """Returns the folder of the newest checkpoint."""
        return checkpoints_in(folder_of(self._run_dir, 0).parent)[0]

    def _files(self, state: RunState) -> dict[str, Fill]:
        weights, texts = self._weights()
        states = split_into_files(OPTIMIZER_STEM, optimizer_tensors(self._model, self._optimizer), MAX_SHARD_BYTES)
        averages = split_into_files(EMA_STEM, self._averages, MAX_SHARD_BYTES) if self._averages else {}
        random = {RANDOM_FILE: random_states(self._streams.device)}
        files = weights | _fills(states | averages | random)
        texts |= {STATE_FILE: state.to_json(), CONFIG_FILE: config_text(self._config).encode()}
        return files | {name: bytes_of(text) for name, text in texts.items()}

    def _weights(self) -> tuple[dict[str, Fill], dict[str, bytes]]:
        """Returns what fills each file of weights, and the texts that belong to them: of all, or of the adapter."""
        if self._base is not None:
            texts = {BASE_FILE: self._base.to_json()}
            texts[ADAPTER_CONFIG_FILE] = adapter_config(self._model, self._base.name, self._base.revision)
            return {ADAPTER_FILE: adapter_fill(self._model)}, texts
        weights, index = weight_files(self._model, MAX_SHARD_BYTES)
        texts = {} if index is None else {INDEX_FILE: index}
        # transformers cannot load quantised weights.
        if isinstance(self._model, Llama) and not is_quantised(self._model):
            texts[HUGGING_FACE_FILE] = hugging_face_config(self._config)
        return _fills(weights), texts

    def _refused(self, folder: Path, error: OSError, required: bool) -> None:
        cause = f"{folder} could not be saved ({_reason(error, folder)})"
        if required:
            advice = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "fix that"
            raise UserError(f"{cause}: {advice}, or choose another place with hydra.run.dir=PATH") from error
        logger.warning("%s: the run continues, and the checkpoints before it stay as they are", cause)


def _fills(tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Fill]:
    return {name: partial(write_tensors, tensors=own) for name, own in tensors.items()}


def _reason(error: OSError, folder: Path) -> str:
    """Returns what is wrong, and with which file, if that is not `folder`."""
    reason = error.strerror or str(error)
    return reason if error.filename in (None, str(folder)) else f"{error.filename}: {reason}"


def _on_signal_after_s(config: DictConfig) -> float:
    chosen = config.checkpoint.on_signal
    if chosen is None:
        return WORTH_SAVING_S if config.checkpoint.every is None else 0.0
    return 0.0 if chosen else math.inf


def hugging_face_config(config: DictConfig, values: Mapping[str, Any] = MappingProxyType({})) -> bytes:
    """Returns the config.json with which transformers loads a Llama of `models.llama`.

    `values` are further keys of the file, such as the tokens that end a text.
    """
    dtype = "bfloat16" if config.precision == Precision.bf16 else "float32"
    known = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": config.seq_len,
        # The model does not know these ids; the tokenizer does.
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": dtype,
        **{key: config.model[key] for key in LLAMA_KEYS},
        **values,
    }
    return json.dumps(known, indent=2).encode()


def write_folder(folder: Path, files: Mapping[str, Fill]) -> int:
    """Writes `files`, several at a time, and their manifest into a new `folder`; returns the bytes written.

    The files are written to `FOLDER.partial`, which is renamed when all are on disk. An error leaves nothing; a kill
    leaves the partial folder. Raises OSError if the disk is full, or `folder` exists or cannot be written.
    """
    if os.path.lexists(folder):
        raise FileExistsError(errno.EEXIST, "something of this name is there: move it away", str(folder))
    partial = partial_path(folder)
    given_up = Event()
    with renamed_when_whole(partial, folder):
        writers = [functools.partial(_write_file, partial / name, fill, given_up) for name, fill in files.items()]
        records = dict(zip(files, side_by_side(writers, given_up), strict=True))
        manifest = manifest_text(records).encode()
        _write_file(partial / MANIFEST_FILE, bytes_of(manifest), given_up)
    return sum(record.nbytes for record in records.values()) + len(manifest)


def remove_folder(folder: Path) -> None:
    """Removes a complete folder. It is renamed first, so that no reader sees a part of it. Raises OSError."""
    partial = partial_path(folder)
    folder.rename(partial)
    remove_leftover(partial)


def remove_leftover(path: Path) -> None:
    """Removes what is at `path`: a folder with its content, a file, or a link, but never the target of a link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _write_file(path: Path, fill: Fill, given_up: Event) -> FileRecord:
    digest = hashlib.sha256()
    nbytes = 0

    def recorded(write: Write) -> None:
        def write_piece(data: bytes | memoryview) -> None:
            nonlocal nbytes
            if given_up.is_set():
                raise InterruptedError(f"{path} was given up")
            write(data)
            digest.update(data)
            nbytes += len(data)

        fill(write_piece)

    write_file(path, recorded)
    return FileRecord(nbytes, digest.hexdigest())


class Best:
    """Finds the best checkpoint by `metric` in the run's records, and keeps a link to it; None: there is no best."""

    def __init__(self, metric: str | None, run_dir: Path):
        self.step: int | None = None
        """of the best checkpoint; None: there is none"""
        self._metric, self._run_dir = metric, run_dir
        self._sign = 1.0 if metric is not None and higher_is_better(metric) else -1.0
        self._value = -math.inf
        # (step, value) of a step that is better than the best checkpoint, until its own checkpoint is saved.
        self._candidate: tuple[int, float] | None = None

    def add(self, record: Mapping[str, Any]) -> None:
        """Takes the record of a step, new or of an earlier part of the run; ignores one from before the first step."""
        value, step = record.get(self._metric), record["train/step"]
        # Of equal values the first stays the best; NaN and infinity never are.
        if value is None or not step or not math.isfinite(value) or self._sign * value <= self._value:
            return
        self._candidate = step, value
        if folder_of(self._run_dir, step).is_dir():
            self.saved(step)

    def wants(self, step: int) -> bool:
        """Tells whether `step`, of which there is no checkpoint yet, is better than the best checkpoint."""
        return self._candidate is not None and self._candidate[0] == step

    def saved(self, step: int) -> None:
        """Makes the complete checkpoint of `step` the best one if `wants(step)`, and links to it."""
        if not self.wants(step):
            return
        value = self._candidate[1]
        self.step, self._value, self._candidate = step, self._sign * value, None
        logger.info("%s=%s: the best so far is %.6g, after step %d", KEY, self._metric, value, step)
        self.link()

    def link(self) -> None:
        """Lets the link `checkpoints/best` point to the best checkpoint, or removes it; warns if the disk refuses."""
        home = folder_of(self._run_dir, 0).parent
        link = home / BEST_LINK
        try:
            if self.step is None:
                link.unlink(missing_ok=True)
                return
            # Replaced at once, so that a reader always finds a link.
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
