"""Every private name of torch that the engine uses is there and does what the engine needs it for."""

import gc
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from offload.torch_private import torch_internals as internals


def test_version_counts_writes_in_place_and_is_shared_by_views():
    tensor = torch.zeros(4)
    before = tensor._version
    tensor[:2].add_(1)
    assert tensor._version == tensor.detach()._version == before + 1
    assert tensor.data._version == 0


def test_parameters_and_buffers_of_a_module_may_be_replaced_by_other_tensors():
    module = nn.BatchNorm1d(2)
    stand_in, statistics = nn.Parameter(torch.full((2,), 3.0)), torch.full((2,), 5.0)
    module._parameters["weight"], module._buffers["running_mean"] = stand_in, statistics
    assert module.weight is stand_in
    assert module.running_mean is statistics


def test_a_weak_reference_to_a_storage_does_not_keep_it():
    tensor = torch.zeros(8)
    reference = internals.StorageWeakRef(tensor.untyped_storage())
    gc.collect()
    # The Python object of the storage is gone, the storage is not.
    assert not reference.expired()
    del tensor
    assert reference.expired()


def test_a_storage_is_found_by_its_weak_reference_while_it_lives():
    tensor = torch.arange(8.0)
    reference = internals.StorageWeakRef(tensor.untyped_storage())
    found = internals.storage_of(reference.cdata)
    assert found.data_ptr() == tensor.data_ptr()
    del tensor, found
    assert internals.storage_of(reference.cdata) is None


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_address_of_a_storage_is_its_own_and_stays(device: str):
    one, other = torch.empty(8, device=device), torch.empty(8, device=device)
    address = internals.storage_address(one.untyped_storage())
    assert address == internals.storage_address(one[2:].untyped_storage())
    assert address != internals.storage_address(other.untyped_storage())


def test_the_address_of_a_storage_is_not_taken_while_a_weak_reference_lives():
    tensor = torch.empty(8)
    reference = internals.StorageWeakRef(tensor.untyped_storage())
    address = internals.storage_address(tensor.untyped_storage())
    del tensor
    others = [torch.empty(8) for _ in range(100)]
    assert address not in {internals.storage_address(other.untyped_storage()) for other in others}
    assert reference.expired()


def test_zeros_without_memory_are_known():
    assert internals.is_zero_tensor(torch._efficientzerotensor((2, 2)))
    assert not internals.is_zero_tensor(torch.zeros(2, 2))


def test_a_view_of_the_same_bytes_stands_for_their_negative():
    assert (lambda view: (view.is_neg(), view[0].item()))(internals.negated_view(torch.ones(1))) == (True, -1.0)


def test_the_base_of_a_view_is_the_tensor_it_was_made_of():
    weight = nn.Parameter(torch.zeros(2, 3))
    assert internals.view_base(weight.t()) is weight
    assert internals.view_base(weight) is None


def test_a_version_that_is_set_shows_at_the_tensors_that_share_the_counter():
    tensor = torch.zeros(4)
    view, copy = tensor[1:], tensor.clone()
    internals.set_versions((tensor,), (7,))
    assert (tensor._version, view._version, copy._version) == (7, 7, 0)


def test_the_innermost_hooks_are_the_pair_that_was_opened_last():
    def pack(tensor):
        return tensor

    def unpack(tensor):
        return tensor

    assert internals.innermost_saved_tensor_hooks(True) is None
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor), saved_tensors_hooks(pack, unpack):
        assert internals.innermost_saved_tensor_hooks(True) == (pack, unpack)


def test_attributes_are_read_without_the_function_of_a_subclass():
    class Refusing(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, arguments=(), keywords=None):
            raise AssertionError(function)

    with internals.without_torch_function():
        assert torch.Tensor._make_subclass(Refusing, torch.ones(2))._version == 0


def test_nodes_are_numbered_from_the_next_sequence_number_on():
    leaf = torch.ones(1, requires_grad=True)
    first = internals.next_sequence_number()
    node = leaf.exp().grad_fn
    assert internals.sequence_number(node) == first
    assert internals.sequence_number(leaf.exp().grad_fn) == first + 1
    assert internals.next_sequence_number() == first + 2


def test_backward_runs_the_ready_node_with_the_highest_number_first():
    def order(numbers) -> list[str]:
        seen = []
        leaves = [torch.ones(1, requires_grad=True) for _ in "ab"]
        results = [leaf.exp() for leaf in leaves]
        for name, result, number in zip("ab", results, numbers, strict=True):
            internals.set_sequence_number(result.grad_fn, number)
            assert internals.sequence_number(result.grad_fn) == number
            result.grad_fn.register_prehook(lambda *_, name=name: seen.append(name))
        torch.cat(results).sum().backward()
        return seen

    assert order((1000, 2000)) == ["b", "a"]
    assert order((2000, 1000)) == ["a", "b"]


def test_nodes_that_accumulate_gradients_have_numbers_above_all_others():
    weight = torch.ones(1, requires_grad=True)
    (accumulate, _), *_ = weight.exp().grad_fn.next_functions
    assert internals.sequence_number(accumulate) >= 2**63


def test_a_forward_knows_whether_backward_runs_it():
    seen = []

    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.append(internals.is_in_backward())
            return gradient

    result = Asks.apply(torch.ones(1, requires_grad=True))
    assert not internals.is_in_backward()
    result.backward()
    assert seen == [True]
    assert not internals.is_in_backward()


def test_a_range_is_opened_where_a_profiler_runs():
    assert internals.profiled("a range") is internals.NO_CONTEXT
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        context = internals.profiled("a range")
        context.__enter__()
        context.__exit__(None, None, None)
    assert "a range" in {event.key for event in profile.key_averages()}
    assert internals.profiled("a range") is internals.NO_CONTEXT


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_a_gradient_are_found(register: str):
    parameter = nn.Parameter(torch.ones(1))
    assert not internals.has_gradient_hooks(parameter)
    handle = getattr(parameter, register)(lambda tensor: None)
    assert internals.has_gradient_hooks(parameter)
    handle.remove()
    assert not internals.has_gradient_hooks(parameter)


def test_hooks_on_a_gradient_are_set_aside_and_can_be_removed_afterwards():
    parameter, seen = nn.Parameter(torch.ones(1)), []
    handle = parameter.register_hook(seen.append)
    with internals.without_tensor_hooks([parameter, nn.Parameter(torch.ones(1))]):
        torch.autograd.grad(2 * parameter, parameter)
    assert not seen
    torch.autograd.grad(2 * parameter, parameter)
    assert len(seen) == 1
    handle.remove()
    assert not internals.has_gradient_hooks(parameter)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_computes_with_the_parameters_that_it_was_given(kind: type[nn.RNNBase]):
    torch.manual_seed(0)
    layer, other = kind(3, 4), kind(3, 4)
    inputs = torch.randn(5, 2, 3)
    stand_ins = {name: nn.Parameter(weight.detach().clone()) for name, weight in other.named_parameters()}
    layer._parameters.update(stand_ins)
    internals.refresh_flat_weights(layer)
    result = layer(inputs)[0]
    assert torch.equal(result, other(inputs)[0])
    result.sum().backward()
    assert all(stand_in.grad is not None for stand_in in stand_ins.values())


def test_tensors_of_function_transforms_are_known():
    seen = []
    torch.func.vmap(lambda x: seen.append(internals.is_function_transform_tensor(x)) or x)(torch.ones(2))
    torch.func.grad(lambda x: seen.append(internals.is_function_transform_tensor(x)) or x)(torch.ones(()))
    assert seen == [True, True]
    assert not internals.is_function_transform_tensor(torch.ones(2))


def test_the_fused_adamw_kernel_makes_the_step_of_torch_s_optimizer():
    torch.manual_seed(0)
    weight, gradient = torch.randn(10), torch.randn(10)
    expected = nn.Parameter(weight.clone())
    expected.grad = gradient.clone()
    torch.optim.AdamW([expected], lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.01, fused=True).step()
    settings = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.01}
    moments = [torch.zeros(10)], [torch.zeros(10)]
    step = [torch.ones(())]
    internals.fused_adamw_([weight], [gradient], *moments, [], step, **settings, amsgrad=False, maximize=False)
    assert torch.equal(weight, expected)


def test_operations_on_many_tensors_change_each_as_one_alone():
    tensors = [torch.tensor(1.0), torch.arange(3.0), torch.full((2, 2), 0.3)]
    copies = [torch.empty_like(tensor, dtype=torch.bfloat16) for tensor in tensors]
    internals.copy_each(copies, tensors)
    assert all(map(torch.equal, copies, [tensor.bfloat16() for tensor in tensors]))
    expected = [tensor + 1 for tensor in tensors]
    internals.add_to_each(tensors, 1)
    assert all(map(torch.equal, tensors, expected))


def test_views_of_a_flat_tensor_lie_one_behind_the_other_in_the_shapes_of_others():
    flat, shapes = torch.arange(8), [torch.Size(()), torch.Size((2, 3)), torch.Size((1,))]
    views = internals.views_of_flat(flat, [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes])
    assert [view.shape for view in views] == shapes
    assert [view.data_ptr() - flat.data_ptr() for view in views] == [0, 8, 56]
    assert views[1].tolist() == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize("kind", [internals.TorchDispatchMode, internals.UncompiledMode])
def test_a_dispatch_mode_sees_every_operation_with_its_overload(kind: type):
    seen = []

    class Notes(kind):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append((internals.overload_packet(function), internals.overload_name(function)))
            return function(*args, **(kwargs or {}))

    with Notes():
        torch.mm(torch.ones(2, 2, device="meta"), torch.ones(2, 2, device="meta"))
    assert (torch.ops.aten.mm, "default") in seen
    # What torch puts around it keeps the compiler out.
    assert hasattr(Notes.__torch_dispatch__, "__wrapped__") == (kind is internals.TorchDispatchMode)


def test_nested_arguments_are_taken_apart_and_put_together():
    nested = ((1, [2, {"x": 3}]), {"y": (4,)})
    leaves, structure = internals.tree_flatten(nested)
    assert leaves == internals.tree_leaves(nested) == [1, 2, 3, 4]
    assert internals.tree_unflatten([10 * leaf for leaf in leaves], structure) == ((10, [20, {"x": 30}]), {"y": (40,)})


def test_references_to_the_memory_of_a_tensor_are_counted():
    def count(tensor: torch.Tensor) -> int:
        return internals.count_references(tensor)

    tensor = torch.ones(4)
    alone = count(tensor)
    view = tensor[:2]
    assert count(tensor) > alone
    del view
    array = tensor.numpy()
    assert count(tensor) > alone
    del array
    assert count(tensor) == alone


def test_a_gradient_that_is_asked_for_is_captured():
    leaf, seen = torch.ones(1, requires_grad=True), []
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    product = leaf * 2

    def look(_: torch.Tensor) -> None:
        try:
            internals.executes_node(node)
            seen.append("runs")
        except RuntimeError:
            seen.append("captured")

    product.register_hook(look)
    torch.autograd.grad(product, leaf, retain_graph=True)
    product.backward(retain_graph=True)
    product.backward(inputs=[leaf])
    assert seen == ["captured", "runs", "runs"]


def test_a_function_is_called_when_backward_is_over():
    leaf, seen = torch.ones(1, requires_grad=True), []
    product = leaf * 2

    def hook(_: torch.Tensor) -> None:
        internals.call_after_backward(lambda: seen.append(leaf.grad))

    product.register_hook(hook)
    product.backward()
    assert [gradient.item() for gradient in seen] == [2.0]


def test_the_node_in_progress_is_that_of_the_running_hook():
    leaf, seen = torch.ones(1, requires_grad=True), []
    product = leaf * 2
    product.register_hook(lambda _: seen.append(internals.node_in_progress()))
    leaf.register_hook(lambda _: seen.append(internals.node_in_progress()))
    assert internals.node_in_progress() is None
    product.backward()
    assert seen[0] is product.grad_fn
    assert seen[1].variable is leaf


def test_hooks_around_forward_are_found():
    assert not internals.has_hooks_around_forward(nn.Linear(1, 1))
    for register in ("register_forward_pre_hook", "register_forward_hook"):
        layer = nn.Linear(1, 1)
        getattr(layer, register)(lambda *_: None)
        assert internals.has_hooks_around_forward(layer)


def test_a_forward_of_distributed_data_parallel_is_seen(tmp_path: Path):
    class Seen(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            with pytest.raises(RuntimeError, match=r"^DistributedDataParallel"):
                internals.check_no_data_parallel()
            return super().forward(inputs)

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    nn.parallel.DistributedDataParallel(Seen(1, 1))(torch.zeros(1))
    dist.destroy_process_group()
    internals.check_no_data_parallel()


def test_without_cuda_there_is_no_error_to_clear():
    if torch.version.cuda is not None:
        pytest.skip("needs a torch without CUDA")
    internals.clear_cuda_error()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_pending_error_of_cuda_is_cleared():
    block = torch.zeros(4096, dtype=torch.uint8)
    torch.zeros(1, device="cuda")

    def fail() -> None:
        # Nothing is registered there.
        assert int(torch.cuda.cudart().cudaHostUnregister(block.data_ptr())) != 0

    fail()
    with pytest.raises(RuntimeError, match="CUDA error"):
        torch.ones(1, device="cuda").add_(1)
    fail()
    internals.clear_cuda_error()
    assert torch.ones(1, device="cuda").add_(1).item() == 2
    torch.cuda.synchronize()


def test_what_is_left_out_of_graphs_runs_as_it_is():
    graphs, compiling = [], []

    def noted(graph: torch.fx.GraphModule, inputs: list) -> object:
        graphs.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        return graph.forward

    def inner(x: torch.Tensor) -> torch.Tensor:
        return x.cos()

    @internals.left_out_of_graphs
    def left_out(x: torch.Tensor) -> torch.Tensor:
        compiling.append(torch.compiler.is_compiling())
        return inner(x).sin()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = torch.compile(lambda x: left_out(x.exp()).exp(), backend=noted)(torch.ones(2))
    assert torch.equal(result, torch.ones(2).exp().cos().sin().exp())
    # Each exponential is a graph; what is between them is in none.
    assert graphs == [1, 1]
    assert compiling == [False]
