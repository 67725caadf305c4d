"""Packing: documents become one stream of tokens, and the stream becomes blocks of `seq_len` predictions.

Block k is tokens[k * seq_len : k * seq_len + seq_len + 1]: inputs and labels are the same block shifted by one, so
neighbouring blocks share one token and every token but the first is a label exactly once in an epoch.
"""

import hashlib
from collections.abc import Iterable, Iterator
from functools import cached_property, lru_cache

import numpy as np
import torch

from training.data.tokenizer import Tokenizer
from training.errors import UserError

# Documents are tokenised this many characters at a time: enough for a tokenizer's threads, little enough that its
# intermediate objects (about 100 bytes a token) stay small.
CHARACTERS_PER_CALL = 1 << 20


class PackedTokens:
    """Batches from a corpus held in memory, its blocks in a new order each epoch.

    Args:
        tokens: the corpus, 1-D, any unsigned integer dtype (two bytes a token where the vocabulary allows).
        vocab_size: ids are below this.
        seed: decides the order of blocks.
        seq_len: predictions a sequence.
        batch_size: sequences a batch.

    Attributes:
        num_blocks: blocks an epoch.

    Raises:
        UserError: the corpus is shorter than one block.
    """

    def __init__(self, tokens: np.ndarray, *, vocab_size: int, seed: int, seq_len: int, batch_size: int):
        self.vocab_size = vocab_size
        self.num_blocks = (len(tokens) - 1) // seq_len
        if self.num_blocks < 1:
            raise UserError(
                f"dataset: {len(tokens)} tokens are less than one block of seq_len + 1 = {seq_len + 1}; "
                "give more text (or a larger dataset.max_tokens), or a smaller seq_len"
            )
        self._tokens = tokens
        self._seed = seed
        self._seq_len = seq_len
        self._batch_size = batch_size

    @cached_property
    def tokens_sha256(self) -> str:
        """The SHA-256 of the whole corpus as tokens, whose bytes are in little-endian order."""
        return hashlib.sha256(self._tokens.astype(self._tokens.dtype.newbyteorder("<"), copy=False)).hexdigest()

    def batch(self, index: int) -> torch.Tensor:
        """Batch `index` >= 0: int64 [batch_size, seq_len + 1] on the CPU, whatever was asked for before.

        The blocks are numbered through all epochs: a batch may hold the end of one epoch and the start of the next.
        """
        first = index * self._batch_size
        rows = []
        for number in range(first, first + self._batch_size):
            epoch, place = divmod(number, self.num_blocks)
            start = epoch_order(self.num_blocks, self._seed, epoch)[place] * self._seq_len
            rows.append(self._tokens[start : start + self._seq_len + 1])
        return torch.from_numpy(np.stack(rows).astype(np.int64))


@lru_cache(maxsize=2)
def epoch_order(num_blocks: int, seed: int, epoch: int) -> np.ndarray:
    """The permutation of `num_blocks` blocks in `epoch`: int64 [num_blocks].

    Sorts raw 64-bit random words, because numpy promises those to be the same in every version and on every machine,
    and promises no such thing for `permutation`.
    """
    return np.argsort(random_words(num_blocks, seed, epoch), kind="stable")


def random_words(count: int, *key: int) -> np.ndarray:
    """Uniform random uint64 [count], a function of the integers in `key` alone."""
    entropy = [part & 0xFFFF_FFFF_FFFF_FFFF for part in key]
    return np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(count)


def tokenise(pieces: Iterable[tuple[str, bool]], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Token arrays of a stream of (text, whether a document ends here), an end-of-text id after each document."""
    separator = np.array([tokenizer.end_of_text_id], dtype=token_dtype(tokenizer.vocab_size))
    for texts, ends in _grouped(pieces):
        for tokens, document_ends in zip(tokenizer.encode_batch(texts), ends, strict=True):
            yield tokens.astype(separator.dtype)
            if document_ends:
                yield separator


def _grouped(pieces: Iterable[tuple[str, bool]]) -> Iterator[tuple[list[str], list[bool]]]:
    texts: list[str] = []
    ends: list[bool] = []
    num_characters = 0
    for text, document_ends in pieces:
        texts.append(text)
        ends.append(document_ends)
        num_characters += len(text)
        if num_characters >= CHARACTERS_PER_CALL:
            yield texts, ends
            texts, ends, num_characters = [], [], 0
    if texts:
        yield texts, ends


def take(arrays: Iterable[np.ndarray], max_tokens: int | None) -> Iterator[np.ndarray]:
    """The arrays up to `max_tokens` tokens in all (None: all of them), reading no further than needed.

    Raises:
        UserError: max_tokens is below 1.
    """
    if max_tokens is not None and max_tokens < 1:
        raise UserError(f"dataset.max_tokens={max_tokens}: must be at least 1, or null for all tokens")
    left = max_tokens
    for array in arrays:
        if left is not None:
            array = array[:left]
            left -= len(array)
        yield array
        if left == 0:
            return


def pack(arrays: Iterable[np.ndarray], vocab_size: int) -> np.ndarray:
    """One array of all tokens: uint16, or uint32 for a vocabulary above 65,536."""
    # A bytearray grows in place by reallocation; concatenating a list of arrays would double the peak.
    buffer = bytearray()
    for array in arrays:
        buffer += array.astype(token_dtype(vocab_size)).data
    return np.frombuffer(buffer, dtype=token_dtype(vocab_size))


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint16 and uint32 that holds ids below `vocab_size`."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
