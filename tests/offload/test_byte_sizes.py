"""Sizes in bytes are read from and written as people write them."""

from __future__ import annotations

import pytest

from offload.byte_sizes import GIB, format_bytes, parse_bytes


def test_sizes_in_bytes():
    assert [parse_bytes("k", text) for text in ("2GiB", "1.5MiB", "4096", 7, "8B")] == [
        2 * 2**30,
        3 * 2**19,
        4096,
        7,
        8,
    ]


@pytest.mark.parametrize("wrong", ["2GB", "-1", "many", "-2MiB", "infGiB", "1.5", "", "GiB"])
def test_other_text_is_refused_with_key_and_value(wrong: str):
    with pytest.raises(ValueError, match=f"k={wrong}: must be bytes"):
        parse_bytes("k", wrong)


def test_sizes_for_people():
    assert [format_bytes(nbytes) for nbytes in (0, 3 * 2**19, 2**28 - 1, 2**28, 3 * GIB // 2)] == [
        "0.00 MiB",
        "1.50 MiB",
        "256.00 MiB",
        "0.25 GiB",
        "1.50 GiB",
    ]


def test_a_formatted_size_can_be_parsed():
    assert parse_bytes("k", format_bytes(3 * GIB).replace(" ", "")) == 3 * GIB
