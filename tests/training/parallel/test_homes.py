"""Who shares the homes of what streams."""

from __future__ import annotations

import pytest

from tests.training.helpers.in_process import components_of, composed
from training.config.validation import check
from training.errors import UserError

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
