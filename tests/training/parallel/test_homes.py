"""Who shares the homes of what streams."""

from __future__ import annotations

import pytest

from tests.training.helpers.in_process import components_of, composed
from training.config.validation import check
from training.errors import UserError
from training.parallel.homes import warn_without_homes

STREAMED = ("offload=layer_stream", "optimizer=host_adamw")


@pytest.mark.parametrize(
    ("keys", "shares"),
    [
        ((), False),
        (("devices=2",), True),
        (("devices=2", "parallel.homes=own"), False),
        (("devices=2", "parallel.homes=shared"), True),
        (("devices=2", "offload=layer_stream_swap"), True),
        (("devices=2", "offload=tensor_swap"), False),
        (("devices=2", "offload=none", "parallel.homes=shared"), False),
        (("devices=4", "parallel.hosts=2"), True),
        # A rank that is alone on its host has nobody to share with.
        (("devices=2", "parallel.hosts=2"), False),
        # The hosts have two and one.
        (("devices=3", "parallel.hosts=2"), False),
    ],
)
def test_ranks_share_what_streams(keys: tuple[str, ...], shares: bool):
    assert components_of(*STREAMED, *keys).shares_homes == shares


def test_hosts_have_as_many_ranks_where_they_share():
    wrong = r"^parallel.homes=shared with devices=3 on parallel.hosts=2: .* or parallel.homes=own$"
    with pytest.raises(UserError, match=wrong):
        check(composed(*STREAMED, "parallel.homes=shared", "devices=3", "parallel.hosts=2", "plan=true")[0])


@pytest.mark.parametrize(
    ("keys", "warned"),
    [
        (("devices=2", "offload=none", "parallel.links=copies"), ["parallel.links"]),
        (("devices=2", "parallel.homes=own", "parallel.copies=whole", "parallel.links=copies"), None),
        (("devices=2", "parallel.copies=whole", "parallel.links=collectives"), []),
        (("devices=2", "offload=none"), []),
        # Of one device another warning tells.
        (("parallel.links=copies",), []),
    ],
)
def test_keys_of_shared_homes_are_named_where_nothing_is_shared(
    caplog: pytest.LogCaptureFixture, keys: tuple[str, ...], warned: list[str] | None
):
    components = components_of(*STREAMED, *keys)
    warn_without_homes(components.config, components.mode, {key.partition("=")[0] for key in keys})
    names = [message.partition(" has no effect: ")[0] for message in caplog.messages]
    assert names == (["parallel.copies", "parallel.links"] if warned is None else warned)
