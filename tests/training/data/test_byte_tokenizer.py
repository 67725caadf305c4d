"""Ids are bytes, here and in transformers."""

from training.data.byte_tokenizer import ByteTokenizer, library_bytes

TEXT = "a Größe\n\t\x00 \U0001f600 <x>"


def test_bytes_are_the_ids() -> None:
    ids = ByteTokenizer().encode_batch(["aé", "", "z"])
    assert [list(text) for text in ids] == [[97, 0xC3, 0xA9], [], [122]]
    assert (ByteTokenizer.vocab_size, ByteTokenizer.end_of_text_id) == (257, 256)
    assert (ByteTokenizer().begin, ByteTokenizer().end, ByteTokenizer.stops) == ((), (256,), {256})


def test_a_lone_surrogate_becomes_a_question_mark() -> None:
    assert list(ByteTokenizer().encode_batch(["a\ud800"])[0]) == [97, ord("?")]


def test_the_library_and_transformers_give_the_same_ids() -> None:
    own = ByteTokenizer()
    expected = list(own.encode_batch([TEXT])[0])
    assert library_bytes().encode(TEXT).ids == own.pretrained(TEXT).input_ids == expected
    assert (own.pretrained.eos_token_id, len(own.pretrained)) == (256, 257)
    assert (own.id_of(own.pretrained.eos_token), own.id_of("a")) == (256, None)
