"""Every private name of torch that the engine uses, each with the reason why it is needed.

The rest of `offload/` imports these names from here, so that a release of torch that changes one of them is mended in
one file. tests/offload/torch_private/test_torch_internals.py has a test for each, which fails where torch changes it.
All were seen in torch 2.11, 2.12 and 2.13. A name that is called for every saved tensor is bound here as it is,
without a Python function around it.

Not hidden behind this file are `Tensor._version`, `Module._parameters` and `Module._buffers`: private by their names,
but described in torch's own notes on autograd and modules, and stable for years. Their test is in the same file.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from operator import attrgetter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch._ops import OpOverload as OpOverload
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef
from torch.utils import _python_dispatch, checkpoint
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten

# Imported above under the names that torch gives them:
# StorageWeakRef: a weak reference to a storage, with `expired()` and `cdata`, a pointer that stays valid while the
#   reference lives. Python's own weak references see the Python object of a storage, which torch makes anew at each
#   `untyped_storage()`.
# TorchDispatchMode: runs a function in place of each operation. A dry run counts memory and FLOPs with it.
# OpOverload: the class of torch's operations. A dry run keeps the results of these, and no others.
# tree_flatten, tree_unflatten, tree_leaves: take nested arguments apart and put them together again, as torch itself
#   does for checkpoints.

# (storage) -> int. The address of a storage, equal for all Python objects of it and distinct from that of every other
# living storage. Tables of storages use it as key; `data_ptr()` is 0 on the meta device.
storage_address = attrgetter("_cdata")

# (StorageWeakRef.cdata) -> UntypedStorage | None. The storage that a weak reference points to, if it is still alive.
# Activation swapping returns the original of a saved tensor while somebody else keeps it.
storage_of = torch.UntypedStorage._new_with_weak_ptr

# (tensor) -> bool. Whether a tensor is zeros without memory, as some formulas of backward make it. It cannot be copied.
is_zero_tensor = torch.Tensor._is_zerotensor

# (tensor) -> Tensor | None. The tensor that a differentiable view was made of. Views of parameters are not swapped.
view_base = attrgetter("_base")

# (tensor) -> Tensor. A view of the same bytes that stands for their negative, as `complex.conj().imag` does. Autograd
# saves such views of weights, and torch has no public function that makes one of a tensor.
negated_view = torch._neg_view

# (tensors, versions). Sets the version counters of tensors. Two tensors share a counter if a change to one shows at the
# other; torch has no other means to tell.
set_versions = torch._C._autograd._unsafe_set_version_counter

# (bool) -> (pack, unpack) | None. The innermost hooks on saved tensors of this thread. The argument must be True: it
# says that hooks are ignored while torch traces a graph.
innermost_saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks

# A context in which attributes and functions of tensors do not go through `__torch_function__` of their subclass. The
# engine asks quantised weights for their versions thousands of times in a step.
without_torch_function = torch._C.DisableTorchFunctionSubclass

# () -> bool. Whether torch.compile traces this call: the compiler answers for the function, which itself says no.
is_traced = torch.compiler.is_dynamo_compiling

# () -> object. torch.compile's answer to frames of this thread, None where no compiled function runs.
compiles_frames = torch._C._dynamo.eval_frame.get_eval_frame_callback

# () -> int. The number that the next autograd node recorded in this thread gets. A microbatch that runs in a thread of
# its own notes it at each turn.
next_sequence_number = torch._C._autograd._get_sequence_nr

# (tensor) -> bool. Tells tensors inside torch.func's transforms (vmap, grad), whose bytes cannot be read.
is_function_transform_tensor = torch._C._functorch.is_functorch_wrapped_tensor

# (packet of an operator's overloads: `function._overloadpacket`). Finds the FLOP formula of an operation.
overload_packet = attrgetter("_overloadpacket")
overload_name = attrgetter("_overloadname")

# The operation of nn.Bilinear: of torch's own, the one that calls others as its caller's autocast says.
trilinear = torch.ops.aten._trilinear.default

# torch's AdamW kernel on lists of tensors, under torch.optim.AdamW(fused=True). That class would count a step for each
# tile of a parameter.
fused_adamw_ = torch._fused_adamw_

# Each by one call of a kernel for many tensors. (tensors, number), which adds in place; (targets, sources), which
# copies, between dtypes too.
add_to_each = torch._foreach_add_
copy_each = torch._foreach_copy_

# (flat tensor, tensors) -> list of views of it, one behind the other, of the shapes of the tensors.
views_of_flat = torch._C._nn.unflatten_dense_tensors

# (node that accumulates gradients into a leaf). Raises RuntimeError where the running backward returns the gradient of
# that leaf, as `torch.autograd.grad` does: the node is then not run. Else what it returns does not matter here.
executes_node = torch._C._will_engine_execute_node

# (settings) changes those of the allocator of GPU memory, as PYTORCH_ALLOC_CONF makes them. torch 2.11 has the second
# name, which warns later. Memory that other processes open may not lie in segments that grow.
set_allocator = (
    getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
)

# A context that changes nothing. One serves everywhere: a step enters thousands.
NO_CONTEXT = nullcontext()

# The dispatch modes of a selective activation checkpoint, in its forward and in its recompute.
CachingDispatchMode, CachedDispatchMode = checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode
# The dispatch modes that are open in this thread: () -> list; () -> the innermost, which is closed; (mode), opened.
dispatch_modes = _python_dispatch._get_current_dispatch_mode_stack
pop_mode, push_mode = _python_dispatch._pop_mode, _python_dispatch._push_mode

# The names of the hooks with which torch's checkpoint notes what is saved: in forward, and in the recompute.
_CHECKPOINT_PACKS = {
    f"{hooks.__qualname__}.__init__.<locals>.pack_hook"
    for hooks in (checkpoint._checkpoint_hook, checkpoint._recomputation_hook)
}
# (tensor) -> pair of dictionaries or None: the hooks of `register_hook` and of `register_post_accumulate_grad_hook`. As
# `any(gradient_hooks(tensor))` it is `has_gradient_hooks` for code that asks for every gradient.
gradient_hooks = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")


class UncompiledMode(TorchDispatchMode):
    """A dispatch mode around what nobody compiles: torch need not keep its compiler out of each operation."""

    _should_skip_dynamo = classmethod(lambda cls: False)


def left_out_of_graphs(function: Callable) -> Callable:
    """Returns `function` as one that torch.compile leaves out of its graphs: it and all that it calls run as they are.

    As `torch.compiler.disable`, which imports the compiler and takes seconds. `function` must be one of a module or a
    class: torch makes it refer to itself, so that what a closure holds would wait for the collector.
    """
    uncompiled = torch._disable_dynamo(function)

    @functools.wraps(function)
    def run(*arguments: object, **keywords: object) -> object:
        # A step has thousands of these calls, and torch's wrapper takes longer than what many of them do. It is needed
        # while a call is traced, and where the functions that it calls would be compiled.
        if is_traced() or compiles_frames() is not None:
            return uncompiled(*arguments, **keywords)
        return function(*arguments, **keywords)

    return run


def without_compiler(function: Callable) -> Callable:
    """Returns `function` as one that does not make torch import torch.compile's compiler, which takes seconds.

    torch imports it to keep it out of functions, at their first call, though nobody compiles anything: out of formulas
    for the meta device, of checkpoints, of optimizers. Where code in `function` needs the compiler itself, it fails,
    and `function` is called again with the compiler. So one that raises must have changed nothing.
    """

    @functools.wraps(function)
    def run(*arguments: object, **keywords: object) -> object:
        if "torch._dynamo" in sys.modules:
            return function(*arguments, **keywords)
        stand_in, kept_out, needs = ModuleType("torch._dynamo"), [], []

        def needed(name: str) -> NoReturn:
            needs.append(name)
            raise AttributeError(name)

        def disable(function: Callable, *_: object, **how: object) -> Callable:
            kept_out.append(function)
            # torch.compiler.disable gives a reason. What that returns is kept for good.
            return needed("disable") if "reason" in how else function

        # Checkpoints read that setting.
        config = SimpleNamespace(error_on_nested_fx_trace=True)
        vars(stand_in).update(disable=disable, config=config, __getattr__=needed)
        sys.modules[stand_in.__name__] = torch._dynamo = stand_in
        try:
            return function(*arguments, **keywords)
        except Exception:
            if not needs:
                raise
        finally:
            del sys.modules[stand_in.__name__], torch._dynamo
            for each in kept_out:
                # Where torch keeps what `disable` returned.
                vars(each).pop("__dynamo_disable", None)
        return function(*arguments, **keywords)

    return run


def is_in_backward() -> bool:
    """Returns whether autograd runs a backward in this thread, so that a forward now is a recompute."""
    return torch._C._current_graph_task_id() != -1


def is_transformed() -> bool:
    """Tells whether a transform of torch.func that differentiates, or forward-mode AD, sees each operation now.

    Their tensors have no bytes that could be named, and they know no hooks on saved tensors.
    """
    if forward_ad._current_level >= 0:
        return True
    interpreter = torch._C._functorch.peek_interpreter_stack()
    if interpreter is None:
        return False
    is_vmap = interpreter.key() == torch._C._functorch.TransformType.Vmap
    return not is_vmap or torch.is_grad_enabled()


def is_checkpoint_pack(pack: Callable) -> bool:
    """Tells whether `pack` is the hook on saved tensors of torch's checkpoint, in its forward or in its recompute.

    Such a hook counts the tensors that are saved: a recompute ends at the last one of the forward.
    """
    return getattr(pack, "__qualname__", "") in _CHECKPOINT_PACKS and pack.__module__ == checkpoint.__name__


def check_no_transform(even_vmap: bool = False) -> None:
    """Raises RuntimeError under such a transform. `even_vmap`: under `vmap` too, where modules take no parameters."""
    if is_transformed() or (even_vmap and torch._C._functorch.peek_interpreter_stack() is not None):
        raise RuntimeError(
            "torch.func (grad, vjp, jvp, jacrev, vmap) and forward-mode AD do not work on a model whose weights stream:"
            " take torch.autograd, or a copy of the model (copy.deepcopy)"
        )


def current_stream_handle(device_index: int) -> int:
    """Returns the address of the CUDA stream that is current on a device, without an object of Python around it."""
    return torch._C._cuda_getCurrentRawStream(device_index)


def current_device_index() -> int:
    """Returns the number of the current CUDA device of a process that has begun to use CUDA."""
    return torch._C._cuda_getDevice()


def profiled(name: str) -> AbstractContextManager:
    """Returns a context that is a range of that name in a profiler's trace; it does nothing where none is recorded."""
    # To open a range costs microseconds, also where no profiler records it.
    return torch.profiler.record_function(name) if torch.autograd.profiler._is_profiler_enabled else NO_CONTEXT


def node_in_progress() -> torch.autograd.graph.Node | None:
    """Returns the autograd node that backward runs in this thread, with the hooks on what enters it; else None."""
    return torch._C._current_autograd_node()


def has_hooks_around_forward(module: nn.Module) -> bool:
    """Returns whether hooks run before or after the forward of `module` itself, which may read its weights."""
    return bool(module._forward_pre_hooks or module._forward_hooks)


def sequence_number(node: torch.autograd.graph.Node) -> int:
    """Returns the number of an autograd node. Backward runs the node with the highest number that is ready."""
    return node._sequence_nr()


def set_sequence_number(node: torch.autograd.graph.Node, number: int) -> None:
    """Gives an autograd node another number, so that microbatches pass the layers in backward in a chosen order."""
    node._set_sequence_nr(number)


def gradient_accumulator(parameter: Tensor) -> torch.autograd.graph.Node:
    """Returns the node that adds to `parameter.grad`. The parameter does not keep it alive, nor its hooks."""
    with torch.enable_grad():
        return parameter.expand_as(parameter).grad_fn.next_functions[0][0]


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Tells whether hooks of `register_hook` or `register_post_accumulate_grad_hook` wait for the gradient."""
    return any(gradient_hooks(tensor))


@contextmanager
def without_tensor_hooks(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Surrounds a backward in which hooks of `register_hook` on `tensors` do not run."""
    found = [(hooks, dict(hooks)) for tensor in tensors if (hooks := tensor._backward_hooks)]
    for hooks, _ in found:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, kept in found:
            hooks.update(kept)


def refresh_flat_weights(module: nn.RNNBase) -> None:
    """Makes a recurrent layer compute with the tensors that are its parameters now.

    Finding its list of weights outdated, torch would copy all of them into one piece of memory outside of the slot.
    """
    flat = [module._parameters.get(name) for name in module._flat_weights_names]
    module._flat_weights = flat
    module._flat_weight_refs = [weight if weight is None else weakref.ref(weight) for weight in flat]


def count_references(tensor: Tensor) -> int:
    """Counts what refers to the memory of a tensor, passed as an attribute of one object: 1 if that is all.

    Each other reference to the tensor, view of it or NumPy array over it adds at least 1.
    """
    holders = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) - _count_alone()
    # Python refers to the tensor by its owner, the argument and the call of getrefcount.
    return 1 + holders + max(sys.getrefcount(tensor) - 3, 0)


def holders_of_memory(tensor: Tensor) -> int:
    """Counts the tensors, views and NumPy arrays that hold the memory of a tensor: 1 if it is the only one.

    Several names of one tensor count once.
    """
    return 1 + torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) - _count_alone()


@functools.cache
def _count_alone() -> int:
    """Counts the references to the storage of a tensor that nobody else uses, which differ between versions."""
    alone = torch.empty(1)
    storage = alone.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata)


def check_no_data_parallel() -> None:
    """Raises RuntimeError in a forward that DistributedDataParallel has called.

    Its reducer takes each gradient when autograd has accumulated it, in a hook of C++ that Python does not see.
    """
    if nn.parallel.DistributedDataParallel._active_ddp_module is not None:
        raise RuntimeError(
            "DistributedDataParallel does not see gradients that a mode has sent to the host: leave it out, and sum"
            " each .grad over the processes before the optimizer's step (torch.distributed.all_reduce)"
        )


def call_after_backward(function: Callable[[], None]) -> None:
    """Makes the running backward call `function` when it is over, before it returns to its caller."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def clear_cuda_error() -> None:
    """Clears the error that a failed call of the CUDA runtime has left in this thread, or the next launch raises it.

    What `torch.cuda.cudart()` returns has no cudaGetLastError. An error that ended the context stays.
    """
    # Elsewhere (ROCm, the runtime linked statically) the error is raised once, by the next launch.
    with suppress(OSError, AttributeError):
        _cuda_library().cudaGetLastError()


@functools.cache
def _cuda_library() -> ctypes.CDLL:
    """Returns the loaded library of torch that checks the runtime's errors; symbols are searched in what it links, too.

    This finds torch's own runtime, in any version, also where a package has loaded another. A kernel that is launched
    to raise the error would need memory of the device, and must not run in the garbage collector.
    """
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10_cuda.so"))


def autocast_of_caller() -> AbstractContextManager:
    """Returns the context in which a dispatch mode calls an operation as if it stood in nobody's way.

    While a mode handles an operation, torch hides autocast from it. But kernels that packages have written in Python,
    and that of nn.Bilinear, see the autocast of their caller where no mode is.
    """
    with torch._C._RestorePythonTLSSnapshot():
        autocast = torch.is_autocast_enabled("cpu")
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutocastCPU, not autocast)
