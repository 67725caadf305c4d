"""Buffers that forwards may change, and copies that modules hold in their place."""

import pytest
import torch
from torch import nn

from offload.torch_private.buffer_states import (
    NOTHING,
    SMALL_BYTES,
    changes_unseen,
    copied,
    get,
    may_change,
    note_change,
    own_copies,
    put,
    version,
)


class Holder(nn.Module):
    def __init__(self, **buffers: torch.Tensor | None):
        super().__init__()
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor)


def test_a_place_holds_a_tensor_none_or_nothing():
    holder = Holder(some=torch.ones(2), none=None)
    assert get((holder, "some")) is holder.some
    assert get((holder, "none")) is None
    assert get((holder, "absent")) is NOTHING
    put((holder, "some"), NOTHING)
    put((holder, "none"), torch.zeros(1))
    assert list(holder.state_dict()) == ["none"]


def test_versions():
    tensor = torch.ones(2)
    tensor.add_(1)
    with torch.inference_mode():
        inference = torch.ones(2)
    assert [version(state) for state in (tensor, None, NOTHING, inference)] == [1, 0, 0, 0]


def test_copies_share_what_the_originals_share_and_stay_in_a_graph():
    shared, in_graph = torch.ones(2), torch.ones(2, requires_grad=True) * 2
    holder = Holder()
    states = {(holder, "a"): shared, (holder, "b"): shared, (holder, "c"): in_graph, (holder, "d"): None}
    copies = copied(states)
    assert copies[holder, "a"] is copies[holder, "b"] is not shared
    assert copies[holder, "c"] is in_graph
    assert copies[holder, "d"] is None


@pytest.mark.parametrize(
    ("dtype", "training", "unseen"),
    [(torch.float32, True, True), (torch.int64, True, True), (torch.uint8, True, False), (torch.float32, False, False)],
)
def test_large_buffers_are_expected_to_change_where_it_would_not_be_seen(
    dtype: torch.dtype, training: bool, unseen: bool
):
    large = torch.zeros(SMALL_BYTES // dtype.itemsize + 1, dtype=dtype)
    holder = Holder(large=large, small=large[:3].clone(), none=None).train(training)
    assert changes_unseen(large, training) == unseen
    assert may_change((holder, "large")) == unseen
    assert all(may_change((holder, name)) for name in ("small", "none", "absent"))
    note_change((holder, "large"))
    assert may_change((holder, "large"))


def test_modules_hold_copies_for_the_length_of_the_block_and_keep_their_values():
    holder = Holder(count=torch.zeros(2), unseen=torch.zeros(2), same=torch.zeros(2), mask=torch.ones(SMALL_BYTES + 1))
    holder.eval()
    holder.same = holder.count
    originals = dict(holder.named_buffers(remove_duplicate=False))
    with own_copies([(holder, name) for name in originals]):
        assert holder.mask is originals["mask"]
        assert holder.count is holder.same
        assert holder.count is not originals["count"]
        held = holder.count
        holder.count += 1
        holder.unseen.data.add_(2)
    assert all(getattr(holder, name) is tensor for name, tensor in originals.items())
    assert (holder.count.tolist(), holder.unseen.tolist()) == ([1, 1], [2, 2])
    # The change that was seen is seen at the buffer.
    assert (holder.count._version > 0, holder.unseen._version) == (True, 0)
    holder.count += 1
    assert held.tolist() == [1, 1]


def test_what_a_block_puts_in_place_of_a_copy_stays():
    holder = Holder(count=torch.zeros(2), none=None)
    with own_copies([(holder, "count"), (holder, "none")]):
        holder.count = holder.count + 1
        holder.none = torch.ones(1)
    assert (holder.count.tolist(), holder.none.tolist()) == ([1, 1], [1])
