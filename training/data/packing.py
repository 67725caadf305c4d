"""Turns documents into one stream of tokens, and cuts the stream into blocks of `seq_len` predictions.

Block k is tokens[k * seq_len : k * seq_len + seq_len + 1]. Inputs and labels are the same block, shifted by one.
Neighbouring blocks share one token, so that every token but the first is a label exactly once in an epoch.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, lru_cache

import numpy as np
import torch

from training.data.long_documents import encoded
from training.data.tokenizer import Tokenizer
from training.errors import UserError


class PackedTokens:
    """Makes batches from a corpus in memory. Each epoch has its `num_blocks` blocks in a new order, by `seed`.

    Args:
        tokens: the corpus, 1-D, any unsigned integer dtype, all below `vocab_size`.
        seq_len: the number of predictions in a sequence; a block has one token more.
        batch_size: the number of sequences in a batch.
        eval_share: the last part of the tokens is held out: no batch has it. Less than one block is not held out.
        held_out: the tokens to hold out if they are not in the corpus; then `eval_share` has no effect.

    Raises UserError if the corpus is shorter than one block.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        *,
        vocab_size: int,
        seed: int,
        seq_len: int,
        batch_size: int,
        eval_share: float = 0.0,
        held_out: np.ndarray | None = None,
    ):
        self.vocab_size = vocab_size
        share = int(len(tokens) * eval_share) if held_out is None else 0
        trained = len(tokens) - (share if share > seq_len else 0)
        self.num_blocks = (trained - 1) // seq_len
        if self.num_blocks < 1:
            raise UserError(
                f"dataset: {len(tokens)} tokens are fewer than one block of seq_len + 1 = {seq_len + 1}; "
                "give more text (or a larger dataset.max_tokens), or a smaller seq_len"
            )
        self._tokens = tokens
        self._held_out = tokens[trained:] if held_out is None else held_out
        self._seed, self._seq_len, self._batch_size = seed, seq_len, batch_size

    @cached_property
    def data_sha256(self) -> str:
        """The SHA-256 of all tokens in their own dtype, in little-endian byte order."""
        return hashlib.sha256(self._tokens.astype(self._tokens.dtype.newbyteorder("<"), copy=False)).hexdigest()

    @cached_property
    def used_ids(self) -> int:
        """One more than the largest id in the text."""
        return 1 + max(int(part.max()) for part in (self._tokens, self._held_out) if len(part))

    def batch(self, index: int) -> torch.Tensor:
        """Returns batch `index` >= 0: int64 [batch_size, seq_len + 1] on the CPU. Earlier calls do not change it."""
        places = places_of_batch(index, self._batch_size, self.num_blocks)
        rows = [epoch_order(self.num_blocks, self._seed, epoch)[position] for epoch, position in places]
        return blocks_of(self._tokens, rows, self._seq_len)

    def eval_batches(self, count: int) -> list[torch.Tensor]:
        """Returns up to `count` batches of held-out tokens, spread evenly: int64 [rows, seq_len + 1] on the CPU."""
        available = max((len(self._held_out) - 1) // self._seq_len, 0)
        batches = spread_batches(count, self._batch_size, available)
        return [blocks_of(self._held_out, batch, self._seq_len) for batch in batches]


def places_of_batch(index: int, batch_size: int, num_blocks: int) -> list[tuple[int, int]]:
    """Returns for each row of a batch (its epoch, its place in the order of the epoch); a batch may span two epochs."""
    return [divmod(place, num_blocks) for place in range(index * batch_size, (index + 1) * batch_size)]


def spread_batches(count: int, batch_size: int, available: int) -> list[list[int]]:
    """Returns up to `count` batches of numbers from 0 to `available` - 1, spread evenly; no number is there twice."""
    wanted = min(count * batch_size, available)
    numbers = [place * available // wanted for place in range(wanted)]
    return [numbers[start : start + batch_size] for start in range(0, wanted, batch_size)]


def blocks_of(tokens: np.ndarray, numbers: Sequence[int], seq_len: int) -> torch.Tensor:
    """Returns the blocks of these numbers: int64 [len(numbers), seq_len + 1] on the CPU."""
    starts = np.asarray(numbers)[:, None] * seq_len
    return torch.from_numpy(tokens[starts + np.arange(seq_len + 1)].astype(np.int64))


@lru_cache(maxsize=2)
def epoch_order(num_blocks: int, seed: int, epoch: int) -> np.ndarray:
    """Returns a random permutation, int64 [num_blocks], the order of an epoch.

    It sorts random words, which are the same in all releases of numpy; numpy does not promise that of `permutation`.
    """
    return np.argsort(random_words(num_blocks, seed, epoch), kind="stable")


def random_words(count: int, *key: int) -> np.ndarray:
    """Returns uniformly random uint64 [count]; they depend on the integers in `key` only."""
    entropy = [part & 0xFFFF_FFFF_FFFF_FFFF for part in key]
    return np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(count)


def tokenise(pieces: Iterable[tuple[str, bool]], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Yields the tokens of pieces (text, document_ends), with the tokenizer's `begin` and `end` around documents.

    Texts that write these themselves, as rendered chats may, have them once.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    begin, end = (np.array(ids, dtype=dtype) for ids in (tokenizer.begin, tokenizer.end))
    begins = True
    for tokens, document_ends in encoded(pieces, tokenizer):
        if begins and len(begin) and not np.array_equal(tokens[: len(begin)], begin):
            yield begin
        yield tokens.astype(dtype)
        if document_ends and len(end) and not np.array_equal(tokens[-len(end) :], end):
            yield end
        begins = document_ends


def limit_tokens(arrays: Iterable[np.ndarray], max_tokens: int | None) -> Iterator[np.ndarray]:
    """Yields arrays up to `max_tokens` tokens (None: all), and reads no further. Raises UserError for fewer than 1."""
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


def concatenate(arrays: Iterable[np.ndarray], vocab_size: int) -> np.ndarray:
    """Joins arrays of tokens to one: uint16, or uint32 for a vocabulary above 65,536."""
    # A bytearray grows in place. numpy.concatenate would need the list of arrays beside the result: twice the memory.
    buffer = bytearray()
    for array in arrays:
        buffer += array.astype(token_dtype(vocab_size)).data
    return np.frombuffer(buffer, dtype=token_dtype(vocab_size))


def token_dtype(vocab_size: int) -> np.dtype:
    """Returns uint16 if it can represent all ids below `vocab_size`, else uint32."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
