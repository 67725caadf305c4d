"""Swapped tensors come back as they were, and no other tensor is moved, kept or freed."""

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from offload.streams import registry
from offload.streams.stream_checker import CheckedStream
from tests.offload.helpers.swapping import Save, Swap, save


def base() -> torch.Tensor:
    return torch.arange(96.0).reshape(8, 12)


LAYOUTS = {
    "contiguous": base,
    "transposed": lambda: base().t(),
    "permuted": lambda: torch.arange(96.0).reshape(2, 4, 12).permute(2, 0, 1),
    "expanded": lambda: torch.arange(12.0).expand(8, 12),
    "rows": lambda: base()[2:5],
    "columns": lambda: base()[:, 3:7],
    "every second": lambda: base()[::2],
    "chunk": lambda: base().chunk(3, dim=1)[1],
    "overlapping": lambda: torch.arange(20.0).as_strided((6, 4), (2, 1), 3),
    "scalar": lambda: torch.tensor(3.5),
    "empty": lambda: torch.empty(0, 4),
    "complex": lambda: torch.complex(base(), base() + 1),
    "conjugate": lambda: torch.complex(base(), base() + 1).conj(),
    "mask": lambda: base() > 40,
    "indices": lambda: torch.arange(30).reshape(5, 6)[1:, 2:],
    "bfloat16": lambda: base().bfloat16()[1:],
    "channels last": lambda: torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tensor_comes_back_as_it_was(layout: str, swap: Swap):
    tensor = LAYOUTS[layout]()
    expected, strides, dtype, shape = tensor.clone(), tensor.stride(), tensor.dtype, tensor.shape
    scalar, seen = save(swap, tensor)
    storage = StorageWeakRef(tensor.untyped_storage())
    swaps = layout not in ("empty", "conjugate")
    del tensor
    assert storage.expired() == swaps
    scalar.backward()
    ((found,),) = seen
    assert torch.equal(found, expected)
    assert (found.stride(), found.dtype, found.shape) == (strides, dtype, shape)
    assert found.is_conj() == (layout == "conjugate")


def test_views_of_one_storage_are_copied_once_and_come_back_as_views_of_one_storage(swap: Swap):
    whole = torch.randn(8, 12)
    queries, keys, values = whole.chunk(3, dim=1)
    expected = [part.clone() for part in (queries, keys, values, whole.t())]
    scalar, seen = save(swap, queries, keys, values, whole.t())
    assert swap.swapped_bytes == whole.nbytes + 4
    del whole, queries, keys, values
    scalar.backward()
    (found,) = seen
    for part, other in zip(found, expected, strict=True):
        assert torch.equal(part, other)
    assert len({part.untyped_storage().data_ptr() for part in found}) == 1
    assert swap.telemetry.h2d_bytes == swap.swapped_bytes - 4
    found[3][0, 0] = 77.0
    assert found[0][0, 0] == 77.0


def test_a_tensor_that_is_unpacked_again_while_its_copy_lives_is_not_copied_again(swap: Swap):
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, scale, tensor):
            ctx.save_for_backward(tensor)
            return scale.clone()

        @staticmethod
        def backward(ctx, gradient):
            (once,) = ctx.saved_tensors
            (again,) = ctx.saved_tensors
            assert once.data_ptr() == again.data_ptr()
            return gradient, None

    with swap.hooks():
        scalar = Twice.apply(torch.ones((), requires_grad=True), torch.randn(64))
        scalar = Save.apply(scalar, [], torch.zeros(1))
    scalar.backward()
    assert swap.telemetry.h2d_bytes == 256


def test_a_slice_is_copied_as_a_slice_with_its_alignment(swap: Swap):
    whole = torch.randn(4096)
    expected = whole[1001:1101].clone()
    alignment = whole[1001:].data_ptr() % 64
    scalar, seen = save(swap, whole[1001:1101])
    assert 400 <= swap.swapped_bytes - 4 < 400 + 256
    del whole
    scalar.backward()
    ((found,),) = seen
    assert torch.equal(found, expected)
    assert found.data_ptr() % 64 == alignment


def test_slices_that_overlap_are_copied_once(swap: Swap):
    tensor = base()
    scalar, seen = save(swap, tensor[:6], tensor[2:], tensor, flush=False)
    del tensor
    scalar.backward()
    assert swap.swapped_bytes == 96 * 4
    assert len({saved.untyped_storage().data_ptr() for saved in seen[0]}) == 1
    assert torch.equal(seen[0][1], base()[2:])


def test_a_tensor_that_is_too_small_is_swapped_with_its_storage(streams: registry.Streams):
    swap = Swap(streams, min_bytes=100)
    tensor = base()
    storage = StorageWeakRef(tensor.untyped_storage())
    scalar, seen = save(swap, tensor[:, 1:], tensor[0, :3])
    del tensor
    save(swap, torch.zeros(64))
    assert storage.expired()
    scalar.backward()
    assert torch.equal(seen[0][1], base()[0, :3])
    assert swap.released_bytes == 96 * 4


def test_a_tensor_that_others_reference_keeps_its_memory_and_is_not_counted_as_released(swap: Swap):
    """Examples are the residual, a rope table, and a tensor that the caller reads later."""
    for step in range(3):
        with swap.step():
            held = torch.full((8, 8), float(step))
            scalar, seen = save(swap, held)
            scalar.backward()
            ((found,),) = seen
            assert found.untyped_storage().data_ptr() == held.untyped_storage().data_ptr()
        # Copied out once in vain; then the policy knows.
        assert swap.swapped_bytes == 256 + 4 * (step + 1)
    assert swap.telemetry.h2d_bytes == 0
    assert swap.released_bytes == 0


def test_parameters_their_views_and_kept_storages_are_never_swapped(swap: Swap):
    weight, buffer, inputs = nn.Parameter(torch.randn(8, 8)), torch.randn(8), torch.randn(4, 4)
    stranger = nn.Parameter(torch.randn(3, 3))
    with swap.step(kept=[weight, buffer]), swap.excluding([inputs]):
        tensors = (weight, weight.t(), weight.detach(), buffer[2:], inputs.t(), stranger, stranger.view(9))
        scalar, seen = save(swap, *tensors, flush=False)
        assert swap.swapped_bytes == 0
        scalar.backward()
        assert all(found.data_ptr() == tensor.data_ptr() for found, tensor in zip(seen[0], tensors, strict=True))
    with swap.step():
        save(swap, inputs, flush=False)
        assert swap.swapped_bytes == inputs.nbytes


class Marked(torch.Tensor):
    """A subclass."""


STAYING = {
    "small": torch.randn(15),
    "small but for its expansion": torch.ones(1).expand(64),
    "sparse": torch.eye(64).to_sparse(),
    "another device": torch.randn(64, device="meta"),
    "without memory": torch._efficientzerotensor((4, 8)),
    "a subclass": torch.randn(64).as_subclass(Marked),
}


@pytest.mark.parametrize("tensor", STAYING.values(), ids=STAYING)
def test_small_sparse_and_foreign_tensors_stay(tensor: torch.Tensor, streams: registry.Streams):
    swap = Swap(streams, min_bytes=64)
    scalar, seen = save(swap, tensor, flush=False)
    scalar.backward()
    assert swap.swapped_bytes == 0
    ((found,),) = seen
    assert (type(found), found.layout, found.shape) == (type(tensor), tensor.layout, tensor.shape)
    assert found.is_meta or torch.equal(found.to_dense(), tensor.to_dense())


def test_memory_goes_back_behind_its_copy_on_the_stream_that_it_was_for(streams: registry.Streams):
    swap, one, other = Swap(streams), CheckedStream("one"), CheckedStream("other")
    with streams.on(one):
        tensor = torch.randn(64)
        storage = StorageWeakRef(tensor.untyped_storage())
        first, _ = save(swap, tensor, flush=False)
    del tensor
    with streams.on(other):
        second, _ = save(swap, torch.zeros(1), flush=False)
    assert storage.expired()
    assert one.clock.get("d2h", 0) > 0
    del first, second


def test_what_comes_back_is_memory_of_the_stream_that_uses_it(streams: registry.Streams):
    swap, other = Swap(streams), CheckedStream("other")
    tensors = [torch.randn(64) for _ in range(3)]
    expected = [tensor.clone() for tensor in tensors]
    first, seen_first = save(swap, tensors.pop(0), flush=False)
    with streams.on(other):
        second, seen_second = save(swap, tensors.pop(0), flush=False)
    third, seen_third = save(swap, tensors.pop(0))
    third.backward()  # prefetches the tensors that were saved before
    fetched = swap.fetched_bytes
    with streams.on(other):
        second.backward()
    assert swap.fetched_bytes > fetched
    first.backward()
    for seen, tensor in zip((seen_first, seen_second, seen_third), expected, strict=True):
        assert torch.equal(seen[0][0], tensor)


@pytest.mark.parametrize("edit", ["add_", "through a view", "through its base", "copy_"])
def test_an_edit_in_place_raises_as_autograd_does(edit: str, swap: Swap):
    tensor = torch.randn(4, 4)
    scalar, _ = save(swap, tensor[1:] if edit == "through its base" else tensor)
    if edit == "add_":
        tensor.add_(1)
    elif edit == "copy_":
        tensor.copy_(torch.zeros(4, 4))
    else:
        tensor[0].mul_(2)
    del tensor
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: a torch.float32 tensor of shape \(., 4"):
        scalar.backward()


def test_tensors_that_stayed_are_checked_too(streams: registry.Streams):
    tensor = torch.randn(4)
    scalar, _ = save(Swap(streams, min_bytes=1 << 20), tensor)
    tensor.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        scalar.backward()


def test_a_version_that_was_saved_before_an_edit_is_not_taken_for_the_one_after(swap: Swap):
    """The first graph is never used: its save is legal, but its copy is out of date."""
    tensor = torch.zeros(16)
    stale, _ = save(swap, tensor)
    tensor.add_(1)
    scalar, seen = save(swap, tensor)
    del tensor
    scalar.backward()
    assert torch.equal(seen[0][0], torch.ones(16))
    del stale
