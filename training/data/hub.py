"""Text streamed from the Hugging Face Hub."""

import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from training.data.corpus import check_column, import_datasets, is_text
from training.data.packing import take, token_dtype, tokenise
from training.data.tokenizer import load_tokenizer
from training.errors import UserError, first_line

HUB_TIMEOUT_S = 5.0
USE_LOCAL_FILES = "or train on local files with dataset=text dataset.files=PATH"


class HubText:
    """A dataset of the Hugging Face Hub (or a local folder laid out like one), streamed and never stored.

    Rows are shuffled through a buffer, shards too, anew each epoch. Asking for increasing batches reads on. A jump
    ahead reads and drops what lies between, and a jump back starts again from the first row, so resuming a long run
    costs reading its text once more; batches are the same either way.

    Args:
        name: `owner/name` on the Hub, or a local folder.
        config_name: the dataset's configuration (subset); None where it has one only.
        split: which split.
        text_column: the column that holds the text.
        revision: a commit, tag or branch; a commit keeps batches the same when the owner adds text.
        shuffle_buffer: rows held to draw from.
        tokenizer: a Hugging Face tokenizers JSON file; None for bytes.
        max_tokens: tokens an epoch, from the shuffled start; None for all.
        cache_dir: folder for the metadata that the Hub's client keeps.

    Raises:
        UserError: no network, no such dataset, configuration, split or column; within seconds. Later, when the
            network stays away longer than the retries of `datasets`.
    """

    num_blocks = None

    def __init__(
        self,
        name: str,
        config_name: str | None = None,
        split: str = "train",
        text_column: str = "text",
        revision: str | None = None,
        *,
        seed: int,
        seq_len: int,
        batch_size: int,
        shuffle_buffer: int = 1000,
        tokenizer: str | None = None,
        max_tokens: int | None = None,
        cache_dir: str | Path | None = None,
    ):
        if not name:
            raise UserError("dataset.name is empty: give dataset.name=OWNER/NAME, a dataset on huggingface.co")
        self._tokenizer = load_tokenizer(tokenizer)
        self.vocab_size = self._tokenizer.vocab_size
        self._name = name
        self._text_column = text_column
        self._max_tokens = max_tokens
        self._seq_len = seq_len
        self._batch_size = batch_size
        if cache_dir is None:
            cache_dir = tempfile.mkdtemp(prefix="datasets-")
            weakref.finalize(self, shutil.rmtree, cache_dir, ignore_errors=True)
        rows = self._open(config_name, split, revision, str(cache_dir))
        self._rows = rows.shuffle(seed=seed & 0xFFFF_FFFF_FFFF_FFFF, buffer_size=shuffle_buffer)
        self._restart()

    def batch(self, index: int) -> torch.Tensor:
        """Batch `index` >= 0: int64 [batch_size, seq_len + 1] on the CPU.

        Raises:
            UserError: the text cannot be read any more, or there is none.
        """
        if index < self._next_index:
            self._restart()
        size = self._batch_size * self._seq_len
        self._read(skip=(index - self._next_index) * size, want=size + 1)
        self._next_index = index + 1
        tokens = self._buffer[: size + 1].astype(np.int64)
        self._buffer = self._buffer[size:]  # the last label is the next batch's first input
        starts = np.arange(self._batch_size)[:, None] * self._seq_len
        return torch.from_numpy(tokens[starts + np.arange(self._seq_len + 1)])

    def _open(self, config_name: str | None, split: str, revision: str | None, folder: str) -> Any:
        datasets = import_datasets()
        if not os.path.isdir(self._name):
            _keep_client_files_in(folder)
            _check_reachable(self._name)
        try:
            rows = datasets.load_dataset(
                self._name,
                config_name,
                split=split,
                revision=revision,
                streaming=True,
                cache_dir=folder,
                download_config=datasets.DownloadConfig(cache_dir=os.path.join(folder, "downloads")),
            )
            columns = rows.column_names or list(next(iter(rows), {}))
        except Exception as error:  # the library raises about ten kinds, none with a base class of its own
            asked = f"dataset.name={self._name} dataset.config_name={config_name} dataset.split={split}"
            raise UserError(f"{asked}: {first_line(error)}") from error
        check_column(self._text_column, columns, self._name)
        return rows.select_columns([self._text_column])

    def _restart(self) -> None:
        self._next_index = 0
        self._buffer = np.empty(0, dtype=token_dtype(self.vocab_size))
        self._arrays = self._endless()

    def _read(self, *, skip: int, want: int) -> None:
        """Drop `skip` tokens, then fill the buffer with `want` at least."""
        arrays = [self._buffer[skip:]]
        skip -= min(skip, len(self._buffer))
        num_tokens = len(arrays[0])
        while num_tokens < want:
            array = next(self._arrays)
            dropped = min(skip, len(array))
            skip -= dropped
            if dropped < len(array):  # an empty slice would keep the array behind it alive
                arrays.append(array[dropped:])
                num_tokens += len(array) - dropped
        self._buffer = np.concatenate(arrays)

    def _endless(self) -> Iterator[np.ndarray]:
        epoch = 0
        while True:
            self._rows.set_epoch(epoch)
            num_tokens = 0
            for array in take(tokenise(self._pieces(), self._tokenizer), self._max_tokens):
                num_tokens += len(array)
                yield array
            if not num_tokens:
                raise UserError(f"dataset.name={self._name}: column {self._text_column} holds no text at all")
            epoch += 1

    def _pieces(self) -> Iterator[tuple[str, bool]]:
        try:
            for row in self._rows:
                if is_text(row[self._text_column], self._text_column, self._name):
                    yield row[self._text_column], True
        except UserError:
            raise
        except Exception as error:  # network, Arrow and JSON libraries each raise their own
            raise UserError(
                f"dataset.name={self._name}: reading failed ({first_line(error)}); check the network and start again, "
                f"{USE_LOCAL_FILES}"
            ) from error


def _keep_client_files_in(folder: str) -> None:
    """Have the Hub's client write below `folder` instead of the home directory; a login there is still read."""
    from huggingface_hub import constants

    constants.HF_HUB_CACHE = os.path.join(folder, "hub")
    # The alternative transport keeps caches and logs of its own, and brings nothing to reading rows in order.
    constants.HF_HUB_DISABLE_XET = True
    # With it, the client first asks the Hub for a list of programs that may be calling, and keeps that at home.
    constants.HF_HUB_DISABLE_TELEMETRY = True


def _check_reachable(name: str) -> None:
    """One request with a short timeout: load_dataset alone retries for half a minute where there is no network.

    Raises:
        UserError: no network, or no such dataset.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        HfApi().dataset_info(name, timeout=HUB_TIMEOUT_S)
    except GatedRepoError as error:
        raise UserError(
            f"dataset.name={name}: needs its owner's permission; ask on its page on huggingface.co, then set HF_TOKEN"
        ) from error
    except (HFValidationError, RepositoryNotFoundError) as error:
        raise UserError(
            f"dataset.name={name}: no such dataset on the Hub; check the spelling (OWNER/NAME), "
            "and set HF_TOKEN if it is private"
        ) from error
    except Exception as error:  # the HTTP library underneath changes from release to release, and its errors with it
        raise UserError(
            f"dataset.name={name}: the Hugging Face Hub did not answer ({first_line(error)}); check the network, "
            f"{USE_LOCAL_FILES}"
        ) from error
