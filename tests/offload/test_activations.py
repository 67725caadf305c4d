"""Swapped activations come back as they were, and nothing but them is moved, kept or freed."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from offload import registry
from offload.activations import ActivationOffloader
from offload.host_pool import IDLE_STEPS
from offload.memory import HostArena
from offload.telemetry import Telemetry
from offload.transfer import Transfer


class Swap(ActivationOffloader):
    """An offloader with an arena of its own, which forgets memory on its way out at once."""

    def __init__(self, streams: registry.Streams, **options):
        self.telemetry = Telemetry(streams)
        self.arena = HostArena(streams.device)
        defaults = {"min_bytes": 1, "in_flight_bytes": 0, "prefetch_bytes": 1 << 20}
        super().__init__(Transfer(streams, self.telemetry), self.arena, **(defaults | options))


@pytest.fixture
def streams() -> Iterator[registry.Streams]:
    streams = registry.acquire("cpu")
    yield streams
    registry.release(streams)


@pytest.fixture
def swap(streams: registry.Streams) -> Swap:
    return Swap(streams)


class Save(torch.autograd.Function):
    """Saves the tensors after the first; `seen` gets what backward finds of them."""

    @staticmethod
    def forward(ctx, scale, seen, *tensors):
        ctx.save_for_backward(*tensors)
        ctx.seen, ctx.count = seen, len(tensors)
        return scale.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.seen.append(ctx.saved_tensors)
        return gradient, None, *[None] * ctx.count


def save(swap: Swap, *tensors: torch.Tensor, flush: bool = True) -> tuple[torch.Tensor, list]:
    """A scalar whose backward appends the saved tensors to the list."""
    seen = []
    scale = torch.ones((), requires_grad=True)
    with swap.hooks():
        saved = Save.apply(scale, seen, *tensors)
        if flush:
            # One more on its way: the queue of what is leaving always keeps the last.
            saved = Save.apply(saved, [], torch.zeros(1))
    return saved, seen


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


def test_views_of_one_storage_travel_once_and_come_back_as_views_of_one_storage(swap: Swap):
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


def test_what_is_asked_for_again_while_it_is_there_is_not_copied_again(swap: Swap):
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


def test_a_slice_travels_as_a_slice_with_its_alignment(swap: Swap):
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


def test_views_of_other_types_share_the_trip(swap: Swap):
    whole = torch.randn(512)
    halves = whole.view(torch.int16)[2:200]
    expected = halves.clone()
    scalar, seen = save(swap, whole, halves)
    assert swap.swapped_bytes == whole.nbytes + 4
    del whole, halves
    scalar.backward()
    assert torch.equal(seen[0][1], expected)


def test_what_somebody_holds_keeps_its_memory_and_is_not_counted_as_released(swap: Swap):
    """The residual, a rope table, a tensor that the caller looks at later."""
    for step in range(3):
        swap.begin_step()
        held, expected = torch.full((8, 8), float(step)), torch.full((8, 8), float(step))
        scalar, seen = save(swap, held)
        assert torch.equal(held, expected)
        scalar.backward()
        ((found,),) = seen
        assert found.untyped_storage().data_ptr() == held.untyped_storage().data_ptr()
        swap.end_step()
        # Copied out once, to no use; afterwards the policy knows.
        assert swap.swapped_bytes == 256 + 4 * (step + 1)
    assert swap.telemetry.h2d_bytes == 0
    assert swap.released_bytes == 0


def test_what_is_held_once_and_then_another_shape_is_swapped_again(swap: Swap):
    for size, step in ((8, 0), (9, 1)):
        with swap.step():
            held = torch.ones(size, 8)
            save(swap, held)[0].backward()
        assert swap.swapped_bytes == sum(32 * s for s in range(8, size + 1)) + 4 * (step + 1)


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


def test_what_is_kept_twice_is_kept_until_the_last_lets_go(swap: Swap):
    shared = torch.randn(4)
    with swap.excluding([shared]):
        with swap.excluding([shared]):
            pass
        save(swap, shared, flush=False)
        assert swap.swapped_bytes == 0
    save(swap, shared, flush=False)
    assert swap.swapped_bytes == 16


@pytest.mark.parametrize(
    "tensor",
    [torch.randn(15), torch.ones(1).expand(64), torch.eye(64).to_sparse(), torch.randn(64, device="meta")],
    ids=["small", "small but for its expansion", "sparse", "another device"],
)
def test_small_sparse_and_foreign_tensors_stay(tensor: torch.Tensor, streams: registry.Streams):
    swap = Swap(streams, min_bytes=64)
    scalar, seen = save(swap, tensor)
    scalar.backward()
    assert swap.swapped_bytes == 0
    assert seen[0][0].layout == tensor.layout


def test_subclasses_stay(swap: Swap):
    class Marked(torch.Tensor):
        pass

    scalar, seen = save(swap, torch.randn(64).as_subclass(Marked), flush=False)
    scalar.backward()
    assert swap.swapped_bytes == 0
    assert type(seen[0][0]) is Marked


def test_the_predicate_has_the_last_word(streams: registry.Streams):
    asked = []

    def wanted(tensor: torch.Tensor) -> bool:
        asked.append(tensor.shape)
        return tensor.dim() == 1

    swap = Swap(streams, min_bytes=8, predicate=wanted)
    save(swap, torch.randn(4), torch.randn(2, 2), torch.randn(1))
    assert asked == [(4,), (2, 2)]
    assert swap.swapped_bytes == 16


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
    """The first graph is never used: its save is legal, and its copy out of date."""
    tensor = torch.zeros(16)
    stale, _ = save(swap, tensor)
    tensor.add_(1)
    scalar, seen = save(swap, tensor)
    del tensor
    scalar.backward()
    assert torch.equal(seen[0][0], torch.ones(16))
    del stale


def loss_of(model: nn.Module, swap: Swap | None, inputs: torch.Tensor) -> torch.Tensor:
    if swap is None:
        return model(inputs).square().mean()
    with swap.hooks():
        return model(inputs).square().mean()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Softmax(-1), nn.Linear(16, 4), nn.Sigmoid())


def inputs(seed: int = 0) -> torch.Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))


def assert_nothing_is_left(swap: Swap) -> None:
    """After a step: no tensor is on its way, and the host memory is there for the next."""
    swap.end_step()
    assert swap.pool.idle_bytes == swap.pool.held_bytes


def test_retained_graphs_can_be_used_again(swap: Swap):
    def run(swap: Swap | None) -> list[torch.Tensor]:
        model = network()
        loss = loss_of(model, swap, inputs())
        for retain in (True, True, False):
            loss.backward(retain_graph=retain)
        return [parameter.grad for parameter in model.parameters()]

    for one, other in zip(run(swap), run(None), strict=True):
        assert torch.equal(one, other)
    assert_nothing_is_left(swap)


def test_double_backward(swap: Swap):
    def run(swap: Swap | None) -> list[torch.Tensor]:
        model, leaf = network(), inputs().requires_grad_()
        (slope,) = torch.autograd.grad(loss_of(model, swap, leaf), leaf, create_graph=True)
        slope.square().sum().backward()
        return [leaf.grad, *(parameter.grad for parameter in list(model.parameters())[:-1])]

    for one, other in zip(run(swap), run(None), strict=True):
        assert torch.equal(one, other)
    assert_nothing_is_left(swap)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize("prefetch_bytes", [0, 500, 1 << 20])
def test_several_forwards_before_a_backward(order: tuple, prefetch_bytes: int, streams: registry.Streams):
    def run(swap: Swap | None) -> list[torch.Tensor]:
        model = network()
        losses = [loss_of(model, swap, inputs(seed)) for seed in range(3)]
        for index in order:
            losses[index].backward()
        return [parameter.grad for parameter in model.parameters()]

    swap = Swap(streams, prefetch_bytes=prefetch_bytes)
    for one, other in zip(run(swap), run(None), strict=True):
        assert torch.equal(one, other)
    assert_nothing_is_left(swap)


def test_a_backward_through_part_of_the_graph(swap: Swap):
    model = network()
    loss = loss_of(model, swap, inputs())
    part = torch.autograd.grad(loss, list(model[4].parameters()), retain_graph=True)
    loss.backward()
    assert torch.equal(model[4].weight.grad, part[0])
    del loss
    assert_nothing_is_left(swap)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden):
        return hidden.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ZeroDivisionError


def test_aborted_passes_leave_nothing_alive(swap: Swap):
    def fail(*_):
        raise KeyboardInterrupt

    for abort in ("forward", "backward", "never backward"):
        model = network()
        swap.begin_step()
        if abort == "forward":
            model[4].register_forward_pre_hook(fail)
            with pytest.raises(KeyboardInterrupt):
                loss_of(model, swap, inputs())
        elif abort == "backward":
            model[2].register_forward_hook(lambda *call: Fails.apply(call[2]))
            with pytest.raises(ZeroDivisionError):
                loss_of(model, swap, inputs()).backward()
        else:
            loss_of(model, swap, inputs())
        assert_nothing_is_left(swap)
    model, plain = network(), network()
    with swap.step():
        loss_of(model, swap, inputs()).backward()
    loss_of(plain, None, inputs()).backward()
    assert torch.equal(model[0].weight.grad, plain[0].weight.grad)


@pytest.mark.parametrize("min_bytes", [1, 1 << 20], ids=["swapped", "kept"])
@pytest.mark.parametrize("function", [torch.exp, torch.tanh, torch.sigmoid, lambda x: torch.softmax(x, 0)])
def test_a_result_saved_by_its_own_operation_goes_with_the_graph(function, min_bytes: int, streams):
    """A hook that kept the result itself would keep the operation, which keeps what the hook kept."""
    swap = Swap(streams, min_bytes=min_bytes)
    with swap.hooks():
        result = function(torch.randn(64, requires_grad=True))
    storage = StorageWeakRef(result.untyped_storage())
    del result
    swap.end_step()
    assert storage.expired()
    assert swap.pool.idle_bytes == swap.pool.held_bytes


def test_memory_is_free_between_forward_and_backward(swap: Swap):
    storages = []
    model = network()
    for layer in model:
        layer.register_forward_hook(lambda *call: storages.append(StorageWeakRef(call[2].untyped_storage())))
    loss = loss_of(model, swap, inputs())
    # The last two are on their way out, and what square() saved is the result of the last layer.
    assert [storage.expired() for storage in storages[:-2]] == [True] * 4
    loss.backward()


def test_host_blocks_serve_step_after_step(swap: Swap):
    model, held = network(), []
    for seed in range(4):
        with swap.step(kept=model.parameters()):
            loss_of(model, swap, inputs(seed)).backward()
        held.append(swap.pool.held_bytes)
    assert held[0] > 0
    assert len(set(held)) == 1
    swap.close()
    assert swap.pool.held_bytes == swap.arena.pageable_bytes == 0


def test_host_blocks_that_nobody_needs_any_more_are_given_back(swap: Swap):
    with swap.step():
        save(swap, torch.randn(4096), flush=False)[0].backward()
    held = []
    for _ in range(IDLE_STEPS):
        with swap.step():
            save(swap, torch.randn(1024), flush=False)[0].backward()
        held.append(swap.arena.pageable_bytes)
    assert held == [5 * 4096] * (IDLE_STEPS - 1) + [4096]
    assert swap.pool.held_bytes == 4096


def test_beyond_the_host_budget_tensors_stay_on_the_device(streams: registry.Streams):
    page = 4096
    swap = Swap(streams, host_budget=2 * page)
    tensors = [torch.full((1024,), float(number)) for number in range(4)]
    expected = [tensor.clone() for tensor in tensors]
    swap.begin_step()
    scalar, seen = save(swap, *tensors, flush=False)
    assert swap.swapped_bytes == swap.arena.pageable_bytes == 2 * page
    del tensors
    scalar.backward()
    assert all(torch.equal(one, other) for one, other in zip(seen[0], expected, strict=True))
    del scalar, seen
    assert_nothing_is_left(swap)
    # Blocks of another size make way, and the budget holds.
    with swap.step():
        save(swap, torch.randn(2048), flush=False)[0].backward()
        assert swap.arena.pageable_bytes == swap.pool.held_bytes == 2 * page
        assert swap.swapped_bytes == 4 * page


def test_a_full_host_is_no_error(swap: Swap, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("offload.memory.free_host_bytes", lambda: 0)
    tensor = torch.randn(64)
    scalar, seen = save(swap, tensor)
    scalar.backward()
    assert swap.swapped_bytes == 0
    assert seen[0][0].data_ptr() == tensor.data_ptr()


def copies_in(swap: Swap, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """For each of eight tensors saved one after the other, what came in until backward had it, by number."""
    log, current = [], []
    original = Transfer.copy_in
    monkeypatch.setattr(
        Transfer, "copy_in", lambda *call, **options: (current.append(call[2].numel()), original(*call, **options))
    )

    class Chain(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, tensor):
            ctx.save_for_backward(tensor)
            return hidden.clone()

        @staticmethod
        def backward(ctx, gradient):
            _ = ctx.saved_tensors
            log.append(list(current))
            current.clear()
            return gradient, None

    hidden = torch.ones((), requires_grad=True)
    with swap.hooks():
        for number in range(8):
            hidden = Chain.apply(hidden, torch.zeros(1000 + number, dtype=torch.uint8))
    hidden.backward()
    return log


def test_what_was_saved_before_comes_in_ahead_of_use(streams: registry.Streams, monkeypatch: pytest.MonkeyPatch):
    log = copies_in(Swap(streams, prefetch_bytes=2500), monkeypatch)
    # The last one saved is still on its way out: a view of it is given back. Two others fit ahead.
    assert log == [[1006, 1005], [1004], [1003], [1002], [1001], [1000], [], []]


def test_without_prefetch_a_copy_is_made_when_it_is_asked_for(
    streams: registry.Streams, monkeypatch: pytest.MonkeyPatch
):
    log = copies_in(Swap(streams, prefetch_bytes=0), monkeypatch)
    assert log == [[], *([1000 + number] for number in range(6, -1, -1))]


def test_the_device_holds_no_more_ahead_than_it_may(streams: registry.Streams, monkeypatch: pytest.MonkeyPatch):
    """After a prefetch that nobody used, prefetching goes on with its full width."""
    swap = Swap(streams, prefetch_bytes=2500)
    model = network()
    with swap.step():
        loss = loss_of(model, swap, inputs())
        torch.autograd.grad(loss, list(model[4].parameters()))
        del loss
        with monkeypatch.context() as patch:
            assert copies_in(swap, patch)[0] == [1006, 1005]


def test_a_step_ends_with_nothing_on_the_device_though_the_graph_lives_on(swap: Swap):
    model = network()
    with swap.step():
        loss = loss_of(model, swap, inputs())
        torch.autograd.grad(loss, list(model[4].parameters()), retain_graph=True)
    assert all(parcel.copy is None for parcel in swap._alive())
    loss.backward()
    plain = network()
    loss_of(plain, None, inputs()).backward()
    assert torch.equal(model[0].weight.grad, plain[0].weight.grad)
    swap.close()


def test_saved_tensors_survive_the_end_of_swapping(swap: Swap):
    model, plain = network(), network()
    with swap.step():
        loss = loss_of(model, swap, inputs())
    swap.close()
    swap.arena.close()
    loss.backward()
    loss_of(plain, None, inputs()).backward()
    assert torch.equal(model[0].weight.grad, plain[0].weight.grad)


@pytest.mark.parametrize("reentrant", [True, False])
def test_of_a_recomputed_block_only_the_input_is_swapped(reentrant: bool, swap: Swap):
    def run(swap: Swap | None) -> list[torch.Tensor]:
        model = network()
        hidden = model[0](inputs())
        for block in (model[1:3], model[3:6]):
            if swap is None:
                hidden = checkpoint(block, hidden, use_reentrant=reentrant)
                continue
            with swap.hooks():
                hidden = checkpoint(block, hidden, use_reentrant=reentrant)
            # Hooks inside, as of a module matched by a pattern, find the checkpoint's own or a running backward.
            block[0].register_forward_pre_hook(lambda *_: opened.append(swap.hooks().__enter__()))
        hidden.square().mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    opened = []
    swapped = run(swap)
    assert opened == [None, None]
    for one, other in zip(swapped, run(None), strict=True):
        assert torch.equal(one, other)
    assert swap.swapped_bytes == 2 * 6 * 16 * 4


def test_under_hooks_of_others_and_inside_itself_it_does_nothing(swap: Swap):
    packed = []
    with saved_tensors_hooks(lambda tensor: packed.append(tensor) or tensor, lambda tensor: tensor):
        save(swap, torch.randn(64))
    assert len(packed) == 2
    assert swap.swapped_bytes == 0
    with swap.hooks(), swap.hooks():
        save(swap, torch.randn(64))
    assert swap.swapped_bytes == 256 + 4


def test_within_keeping_tensors_stay(swap: Swap):
    with swap.hooks(), swap.keeping(), swap.hooks():
        save(swap, torch.randn(64))
    assert swap.swapped_bytes == 0


def test_backward_and_its_end_may_come_from_other_threads(swap: Swap):
    def run(swap: Swap | None, model: nn.Module) -> None:
        losses = [loss_of(model, swap, inputs(seed)) for seed in range(2)]

        def backward():
            losses.pop().backward()
            losses.clear()

        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()

    model, plain = network(), network()
    swap.begin_step()
    run(swap, model)
    run(None, plain)
    assert torch.equal(model[0].weight.grad, plain[0].weight.grad)
    assert_nothing_is_left(swap)


def test_autocast(swap: Swap):
    def run(swap: Swap | None) -> list[torch.Tensor]:
        model = network()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, swap, inputs())
        loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    for one, other in zip(run(swap), run(None), strict=True):
        assert torch.equal(one, other)
