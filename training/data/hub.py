"""A dataset that streams text from the Hugging Face Hub."""

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
from training.data.packing import limit_tokens, token_dtype, tokenise
from training.data.tokenizer import load_tokenizer
from training.errors import UserError, first_line

HUB_TIMEOUT_S = 5.0
USE_LOCAL_FILES = "or train on local files with dataset=text dataset.files=PATH"


class HubText:
    """Streams a dataset of the Hugging Face Hub, or of a local folder with the same layout, without storing it.

    Each epoch shuffles the shards, and the rows through a buffer. Batches of increasing index are read one after
    another. A jump forward reads and drops the text in between; a jump back starts again from the first row. So
    resuming a long run reads its text once more. The batches are the same either way.

    Args:
        name: `owner/name` on the Hub, or a local folder.
        config_name: the dataset's configuration (subset); None where it has only one.
        split: the name of the split.
        text_column: the column that contains the text.
        revision: a commit, tag or branch; a commit keeps batches the same when the owner adds text.
        shuffle_buffer: the number of rows among which the next is drawn.
        tokenizer: a Hugging Face tokenizers JSON file; None for bytes.
        max_tokens: tokens in an epoch, counted from its shuffled start; None for all.
        cache_dir: a folder for the metadata that the Hub's client stores.

    Raises:
        UserError: within seconds, if there is no network or no such dataset, configuration, split or column. Also
            later, if the network fails for longer than the retries of `datasets` last.
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
        """Returns batch `index` >= 0: int64 [batch_size, seq_len + 1] on the CPU.

        Raises:
            UserError: the text can no longer be read, or there is none.
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
        except Exception as error:  # the library raises about ten types of error, without a common base class
            asked = f"dataset.name={self._name} dataset.config_name={config_name} dataset.split={split}"
            raise UserError(f"{asked}: {first_line(error)}") from error
        check_column(self._text_column, columns, self._name)
        return rows.select_columns([self._text_column])

    def _restart(self) -> None:
        """Starts again from the first row of the first epoch."""
        self._next_index = 0
        self._buffer = np.empty(0, dtype=token_dtype(self.vocab_size))
        self._arrays = self._all_epochs()

    def _read(self, *, skip: int, want: int) -> None:
        """Drops `skip` tokens, then reads until the buffer has at least `want`."""
        arrays = [self._buffer[skip:]]
        skip -= min(skip, len(self._buffer))
        num_tokens = len(arrays[0])
        while num_tokens < want:
            array = next(self._arrays)
            dropped = min(skip, len(array))
            skip -= dropped
            if dropped < len(array):  # an empty slice would keep its whole array in memory
                arrays.append(array[dropped:])
                num_tokens += len(array) - dropped
        self._buffer = np.concatenate(arrays)

    def _all_epochs(self) -> Iterator[np.ndarray]:
        """Yields arrays of tokens, epoch after epoch without end."""
        epoch = 0
        while True:
            self._rows.set_epoch(epoch)
            num_tokens = 0
            for array in limit_tokens(tokenise(self._documents(), self._tokenizer), self._max_tokens):
                num_tokens += len(array)
                yield array
            if not num_tokens:
                raise UserError(
                    f"dataset.name={self._name}: dataset.text_column={self._text_column} contains no text; "
                    "choose another column or dataset"
                )
            epoch += 1

    def _documents(self) -> Iterator[tuple[str, bool]]:
        """Yields (text, True) for each row of this epoch that has text."""
        try:
            for row in self._rows:
                if is_text(row[self._text_column], self._text_column, self._name):
                    yield row[self._text_column], True
        except UserError:
            raise
        except Exception as error:  # network, Arrow and JSON libraries raise errors without a common base class
            raise UserError(
                f"dataset.name={self._name}: reading failed ({first_line(error)}); check the network and start again, "
                f"{USE_LOCAL_FILES}"
            ) from error


def _keep_client_files_in(folder: str) -> None:
    """Makes the Hub's client write below `folder`, not in the home directory. It still reads a login from there."""
    from huggingface_hub import constants

    constants.HF_HUB_CACHE = os.path.join(folder, "hub")
    # The Xet transport writes caches and logs of its own, and does not speed up reading rows in order.
    constants.HF_HUB_DISABLE_XET = True
    # With telemetry, the client asks the Hub for a list of known callers first, and stores it in the home directory.
    constants.HF_HUB_DISABLE_TELEMETRY = True


def _check_reachable(name: str) -> None:
    """Sends one request with a short timeout. Without network, load_dataset alone would retry for half a minute.

    Raises:
        UserError: no network, no such dataset, or no permission to read it.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        HfApi().dataset_info(name, timeout=HUB_TIMEOUT_S)
    except GatedRepoError as error:
        raise UserError(
            f"dataset.name={name}: needs its owner's permission; ask for it on huggingface.co, then set HF_TOKEN"
        ) from error
    except (HFValidationError, RepositoryNotFoundError) as error:
        raise UserError(
            f"dataset.name={name}: no such dataset on the Hub; check the spelling (OWNER/NAME), "
            "and set HF_TOKEN if it is private"
        ) from error
    except Exception as error:  # each release of the client may use another HTTP library, with other errors
        raise UserError(
            f"dataset.name={name}: the Hugging Face Hub did not answer ({first_line(error)}); check the network, "
            f"{USE_LOCAL_FILES}"
        ) from error
