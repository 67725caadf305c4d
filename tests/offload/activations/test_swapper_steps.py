"""Swapping over whole graphs and steps: when memory is freed and comes back, and that nothing is left behind."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from offload.activations.host_pool import IDLE_STEPS, RESERVE_BYTES
from offload.activations.policy import AutomaticBudget, FixedBudget
from offload.streams import registry
from offload.streams.transfer import Transfer
from tests.offload.helpers.swapping import Fails, Swap, save


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
    """Ends a step. Fails if a host block is still taken."""
    with swap.step():
        pass
    assert sum(block.block.bytes.numel() for block in swap.pool.idle_blocks()) == swap.arena.pageable_bytes


def assert_same_as_without(run: Callable[[Swap | None], list[torch.Tensor]], swap: Swap) -> None:
    """Fails unless `run` has the same results with and without swapping, or if a host block is still taken."""
    for one, other in zip(run(swap), run(None), strict=True):
        assert torch.equal(one, other)
    assert_nothing_is_left(swap)


def used_again(swap: Swap | None) -> list[torch.Tensor]:
    model = network()
    loss = loss_of(model, swap, inputs())
    for retain in (True, True, False):
        loss.backward(retain_graph=retain)
    return [parameter.grad for parameter in model.parameters()]


def differentiated_twice(swap: Swap | None) -> list[torch.Tensor]:
    model, leaf = network(), inputs().requires_grad_()
    (slope,) = torch.autograd.grad(loss_of(model, swap, leaf), leaf, create_graph=True)
    slope.square().sum().backward()
    return [leaf.grad, *(parameter.grad for parameter in list(model.parameters())[:-1])]


@pytest.mark.parametrize("run", [used_again, differentiated_twice])
def test_a_graph_that_is_kept(run: Callable, swap: Swap):
    assert_same_as_without(run, swap)


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
    assert_same_as_without(run, swap)


def test_a_backward_through_part_of_the_graph(swap: Swap):
    model = network()
    loss = loss_of(model, swap, inputs())
    part = torch.autograd.grad(loss, list(model[4].parameters()), retain_graph=True)
    loss.backward()
    assert torch.equal(model[4].weight.grad, part[0])
    del loss
    assert_nothing_is_left(swap)


@pytest.mark.parametrize(("policy", "waits"), [(FixedBudget(1000), 0), (AutomaticBudget(), 1)])
def test_the_host_waits_for_the_end_of_a_step_only_to_measure(policy, waits: int, streams, monkeypatch):
    swap, model, count = Swap(streams, policy=policy), network(), 0
    synchronize = streams.synchronize

    def counted() -> None:
        nonlocal count
        count += 1
        synchronize()

    for _ in range(3):
        with swap.step():
            loss_of(model, swap, inputs()).backward()
            monkeypatch.setattr(streams, "synchronize", counted)
            count = 0
        assert count == waits


def test_aborted_passes_leave_nothing_alive(swap: Swap):
    def fail(*_):
        raise KeyboardInterrupt

    for abort in ("forward", "backward", "never backward"):
        model = network()
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
    """A hook that kept the result itself would keep the operation alive, which keeps the hook's result."""
    swap = Swap(streams, min_bytes=min_bytes)
    with swap.hooks():
        result = function(torch.randn(64, requires_grad=True))
    storage = StorageWeakRef(result.untyped_storage())
    del result
    assert_nothing_is_left(swap)
    assert storage.expired()


def test_memory_is_free_between_forward_and_backward(swap: Swap):
    storages = []
    model = network()
    for layer in model:
        layer.register_forward_hook(lambda *call: storages.append(StorageWeakRef(call[2].untyped_storage())))
    loss = loss_of(model, swap, inputs())
    # The last two are still copied out; square() saved the result of the last layer.
    assert [storage.expired() for storage in storages[:-2]] == [True] * 4
    loss.backward()


def test_host_blocks_serve_step_after_step(swap: Swap):
    model, held = network(), []
    for seed in range(4):
        with swap.step(kept=model.parameters()):
            loss_of(model, swap, inputs(seed)).backward()
        held.append(swap.arena.pageable_bytes)
    assert held[0] > 0
    assert len(set(held)) == 1
    swap.close()
    assert swap.arena.pageable_bytes == 0


def test_host_blocks_that_are_not_needed_any_more_are_returned(swap: Swap):
    with swap.step():
        save(swap, torch.randn(4096), flush=False)[0].backward()
    held = []
    for _ in range(IDLE_STEPS):
        with swap.step():
            save(swap, torch.randn(1024), flush=False)[0].backward()
        held.append(swap.arena.pageable_bytes)
    assert held == [5 * 4096] * (IDLE_STEPS - 1) + [4096]


def test_a_host_that_is_full_keeps_tensors_on_the_device(swap: Swap, monkeypatch: pytest.MonkeyPatch):
    page = 4096
    # What is free, but for 2 pages of the pool, is left to others.
    monkeypatch.setattr(
        "offload.memory.host_memory.free_host_bytes", lambda **_: RESERVE_BYTES + 2 * page - swap.arena.pageable_bytes
    )
    tensors = [torch.full((1024,), float(number)) for number in range(4)]
    expected = [tensor.clone() for tensor in tensors]
    scalar, seen = save(swap, *tensors, flush=False)
    assert swap.swapped_bytes == swap.arena.pageable_bytes == 2 * page
    del tensors
    scalar.backward()
    assert all(torch.equal(one, other) for one, other in zip(seen[0], expected, strict=True))
    del scalar, seen
    assert_nothing_is_left(swap)
    # Blocks of another size make way.
    with swap.step():
        save(swap, torch.randn(2048), flush=False)[0].backward()
        assert swap.arena.pageable_bytes == 2 * page
        assert swap.swapped_bytes == 4 * page


def copies_in(swap: Swap, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Saves eight tensors one after the other. Returns, for each use in backward, the sizes copied in for it."""
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


@pytest.mark.parametrize(
    ("prefetch_bytes", "expected"),
    [
        # The last one saved is still copied out, and comes back as a view of itself. Two others fit ahead.
        (2500, [[1006, 1005], [1004], [1003], [1002], [1001], [1000], [], []]),
        (0, [[], *([1000 + number] for number in range(6, -1, -1))]),
    ],
)
def test_tensors_saved_before_are_copied_in_ahead_of_use(prefetch_bytes: int, expected: list, streams, monkeypatch):
    assert copies_in(Swap(streams, prefetch_bytes=prefetch_bytes), monkeypatch) == expected


def test_tensors_are_prefetched_in_the_order_in_which_the_step_before_used_them(
    streams: registry.Streams, monkeypatch: pytest.MonkeyPatch
):
    """Backward is in the order of saving. A step that saves other tensors falls back on the newest first."""
    swap, order, used = Swap(streams, prefetch_bytes=2500), [], []
    original = Transfer.copy_in
    monkeypatch.setattr(
        Transfer, "copy_in", lambda *call, **options: (order.append(call[2].numel()), original(*call, **options))
    )

    def fetched_until_each_use(sizes: list[int]) -> list[list[int]]:
        with swap.step():
            losses = [save(swap, torch.zeros(size, dtype=torch.uint8), flush=False)[0] for size in sizes]
            used.clear()
            for loss in losses:
                order.clear()
                loss.backward()
                used.append(list(order))
        return list(used)

    sizes = [1000 + number for number in range(6)]
    assert fetched_until_each_use(sizes) == [[1000 + number] for number in range(6)]
    assert fetched_until_each_use(sizes) == [[1000, 1001, 1002], [1003], [1004], [1005], [], []]
    assert fetched_until_each_use([*sizes[:3], 2000, *sizes[3:]])[:2] == [[1000], [1001]]


def test_the_device_holds_no_more_ahead_than_it_may(streams: registry.Streams, monkeypatch: pytest.MonkeyPatch):
    """A prefetch that was not used takes nothing of the limit for the next."""
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
    assert all(span.device_copy is None for span in swap._spans.alive())
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
            # Hooks inside find the checkpoint's own hooks or a running backward.
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


def test_backward_and_its_end_may_come_from_other_threads(swap: Swap):
    def run(swap: Swap | None, model: nn.Module) -> None:
        losses = [loss_of(model, swap, inputs(seed)) for seed in range(2)]

        def backward():
            losses.pop().backward()
            losses.clear()

        thread = threading.Thread(target=backward)
        thread.start()
        thread.join(300)

    model, plain = network(), network()
    run(swap, model)
    run(None, plain)
    assert torch.equal(model[0].weight.grad, plain[0].weight.grad)
    assert_nothing_is_left(swap)
