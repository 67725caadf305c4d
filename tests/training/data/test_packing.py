"""Blocks cut from one stream of tokens: their order, their digest and their size in memory."""

import hashlib

import numpy as np
import pytest
import torch

from training.data import long_documents
from training.data.packing import PackedTokens, concatenate, epoch_order, limit_tokens, random_words, tokenise
from training.data.tokenizer import ByteTokenizer
from training.errors import UserError

SEQ_LEN = 4


def packed(num_tokens: int, batch_size: int = 3, eval_share: float = 0.0) -> PackedTokens:
    tokens = np.arange(num_tokens, dtype=np.uint16)
    sizes = {"vocab_size": num_tokens, "seed": 0, "seq_len": SEQ_LEN, "batch_size": batch_size}
    return PackedTokens(tokens, **sizes, eval_share=eval_share)


def test_an_epoch_predicts_every_token_but_the_first_once() -> None:
    dataset = packed(41, batch_size=2)
    assert dataset.num_blocks == 10
    labels = torch.cat([dataset.batch(index)[:, 1:].flatten() for index in range(5)])
    assert sorted(labels.tolist()) == list(range(1, 41))


def test_a_batch_is_consecutive_tokens_in_int64() -> None:
    batch = packed(41).batch(2)
    assert batch.dtype == torch.int64
    assert batch.shape == (3, SEQ_LEN + 1)
    assert torch.equal(batch, batch[:, :1] + torch.arange(SEQ_LEN + 1))
    assert not (batch[:, 0] % SEQ_LEN).any()


def test_the_digest_covers_all_tokens_and_ignores_byte_order() -> None:
    tokens = np.arange(41)
    digests = {
        PackedTokens(tokens.astype(dtype), vocab_size=41, seed=seed, seq_len=SEQ_LEN, batch_size=3).data_sha256
        for dtype, seed in (("<u2", 0), (">u2", 1))
    }
    assert digests == {hashlib.sha256(b"".join(bytes([token, 0]) for token in tokens)).hexdigest()}
    assert packed(42).data_sha256 not in digests


def test_epochs_and_seeds_differ_in_order() -> None:
    first, second = epoch_order(100, 0, 0), epoch_order(100, 0, 1)
    assert sorted(first) == sorted(second) == list(range(100))
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, epoch_order(100, 1, 0))
    assert not np.array_equal(first, np.arange(100))


def test_the_order_is_the_same_on_every_machine() -> None:
    # Computed once. A numpy that gives other values would change the batches of every resumed run.
    assert epoch_order(8, 7, 3).tolist() == [2, 4, 7, 3, 5, 1, 0, 6]
    assert random_words(2, 7, 3).tolist() == [17986194428743177670, 16317385439118320161]


def test_earlier_calls_do_not_change_a_batch() -> None:
    forwards, backwards = packed(203), packed(203)
    expected = [forwards.batch(index) for index in range(60)]
    for index in reversed(range(60)):
        assert torch.equal(backwards.batch(index), expected[index])


def test_a_batch_may_span_epochs() -> None:
    dataset = packed(41, batch_size=7)
    rows = torch.cat([dataset.batch(index)[:, 0] for index in range(10)]) // SEQ_LEN
    for epoch in range(7):
        assert rows[epoch * 10 : epoch * 10 + 10].tolist() == epoch_order(10, 0, epoch).tolist()


def test_fewer_tokens_than_a_block_are_refused_with_the_numbers() -> None:
    assert packed(SEQ_LEN + 1).num_blocks == 1
    with pytest.raises(UserError, match=r"^dataset: 4 tokens are fewer than one block of seq_len \+ 1 = 5"):
        packed(SEQ_LEN)


def test_limit_tokens_stops_reading() -> None:
    def endless():
        while True:
            yield np.zeros(3, dtype=np.uint16)

    assert sum(map(len, limit_tokens(endless(), 7))) == 7
    assert len(list(limit_tokens([np.zeros(3)] * 2, None))) == 2
    with pytest.raises(UserError, match=r"dataset\.max_tokens=0: must be at least 1"):
        list(limit_tokens(endless(), 0))


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, np.uint16), (65_537, np.uint32)])
def test_tokens_use_as_few_bytes_as_the_vocabulary_allows(vocab_size: int, dtype: type) -> None:
    ids = [0, vocab_size - 1]
    tokens = concatenate([np.array(ids, dtype=np.uint32), np.array([], dtype=np.uint32)], vocab_size)
    assert tokens.dtype == dtype
    assert tokens.tolist() == ids


def test_no_held_out_token_is_trained_on_and_each_is_evaluated_on() -> None:
    dataset = packed(100, eval_share=0.25)
    labels = torch.cat([dataset.batch(index) for index in range(12)])
    assert labels.max() < 75
    evaluated = dataset.eval_batches(9)
    assert [len(batch) for batch in evaluated] == [3, 3]
    assert sorted(torch.cat(evaluated)[:, 1:].flatten().tolist()) == list(range(76, 100))
    assert dataset.data_sha256 == packed(100, eval_share=0.0).data_sha256


def test_fewer_batches_are_spread_over_the_held_out_text() -> None:
    dataset = packed(4000, eval_share=0.5)
    (batch,) = dataset.eval_batches(1)
    assert batch[:, 0].tolist() == [2000, 2000 + 166 * SEQ_LEN, 2000 + 332 * SEQ_LEN]
    assert torch.equal(dataset.eval_batches(1)[0], batch)


def test_a_share_below_a_block_holds_nothing_out() -> None:
    dataset = packed(4 * SEQ_LEN + 1, eval_share=0.25)
    assert (dataset.num_blocks, dataset.eval_batches(1)) == (4, [])


@pytest.mark.parametrize("characters_per_call", [1, long_documents.CHARACTERS_PER_CALL])
def test_documents_begin_and_end_as_the_tokenizer_says(characters_per_call: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(long_documents, "CHARACTERS_PER_CALL", characters_per_call)
    tokenizer = ByteTokenizer()
    pieces = [("a", False), ("b", True), ("c", True), ("d", False)]

    def packed(begin: tuple[int, ...], end: tuple[int, ...]) -> list[int]:
        tokenizer.begin, tokenizer.end = begin, end
        return np.concatenate(list(tokenise(pieces, tokenizer))).tolist()

    assert packed((1, 2), (256,)) == [1, 2, 97, 98, 256, 1, 2, 99, 256, 1, 2, 100]
    assert packed((), (3, 4)) == [97, 98, 3, 4, 99, 3, 4, 100]
    assert packed((), ()) == [97, 98, 99, 100]


def test_documents_that_write_their_beginning_or_end_have_it_once():
    """As rendered chats, or texts with `tokenizer.eos_token` at their end; TRL adds no second end either."""
    tokenizer = ByteTokenizer()
    tokenizer.begin, tokenizer.end = tuple(b"<s>"), tuple(b"</s>")
    texts = ["<s>a</s>", "b</s>", "<s>c", "</s>d<s>", ""]
    found = bytes(np.concatenate(list(tokenise([(text, True) for text in texts], tokenizer))).tolist())
    assert found == b"<s>a</s><s>b</s><s>c</s><s></s>d<s></s><s></s>"
