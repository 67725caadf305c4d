"""Counts what a process holds, so that a leak of one small object a step shows."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch
from torch import nn

from offload.streams import registry
from offload.torch_private.saved_tensor_hooks import active_hooks

CALLS = 4


@dataclass(frozen=True)
class Census:
    """Counts of living tensors and their bytes (each storage once), Python objects, threads, open files, memory.

    `objects` are those that the garbage collector tracks, `resident_bytes` is the memory of the process. On a GPU
    `device_bytes` is what torch's allocator has given out; on the CPU it is 0.
    """

    tensors: int
    tensor_bytes: int
    objects: int
    threads: frozenset[str]
    files: int
    resident_bytes: int
    device_bytes: int

    @classmethod
    def take(cls) -> Census:
        gc.collect()
        tracked = gc.get_objects()
        # By type, because `isinstance` may run code of the object's class.
        tensors = [thing for thing in tracked if issubclass(type(thing), torch.Tensor)]
        objects = len(tracked)
        del tracked
        storages = {}
        for tensor in tensors:
            # Those that torch.compile traced with have no memory, whatever device they name.
            is_fake = type(tensor).__name__ == "FakeTensor"
            if tensor.layout is torch.strided and not (tensor.is_meta or is_fake):
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        count = len(tensors)
        del tensors
        return cls(
            tensors=count,
            tensor_bytes=sum(storages.values()),
            objects=objects,
            # The thread of updates ends by itself when it is idle; `assert_given_back` looks for it.
            threads=frozenset(thread.name for thread in threading.enumerate() if thread.name != "host optimizer"),
            files=len(os.listdir("/proc/self/fd")),
            resident_bytes=psutil.Process().memory_info().rss,
            device_bytes=torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0,
        )

    def assert_no_more_than(self, before: Census, objects: int, resident_bytes: int) -> None:
        """Fails if more is held than in `before`; fewer than `objects` and `resident_bytes` more are allowed."""
        for name in ("tensors", "tensor_bytes", "threads", "files", "device_bytes"):
            assert getattr(self, name) == getattr(before, name), (name, self, before)
        assert self.objects - before.objects < objects, (self, before)
        assert self.resident_bytes - before.resident_bytes < resident_bytes, (self, before)


def assert_leaves_nothing(run: Callable[[], None], objects: int, resident_bytes: int) -> None:
    """Fails if `run` leaves `objects` objects, `resident_bytes` bytes or anything else behind.

    The first calls may fill caches of libraries, and the C library takes memory from the system in steps of its own. A
    leak leaves as much again in each of `CALLS`.
    """
    gc.collect()
    # What is there already is not counted: to look at all that tests before this one have left takes seconds.
    gc.freeze()
    after = Census.take()
    for call in range(CALLS):
        before = after
        run()
        after = Census.take()
        try:
            after.assert_no_more_than(before, objects, resident_bytes)
            return
        except AssertionError:
            if call == CALLS - 1:
                raise


def hooks_of(model: nn.Module) -> int:
    """Returns the number of hooks on the modules and parameters of `model`."""
    modules = [
        "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks",
        "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
    ]  # fmt: skip
    count = sum(len(getattr(module, name)) for module in model.modules() for name in modules)
    for parameter in model.parameters():
        count += len(parameter._backward_hooks or ()) + len(parameter._post_accumulate_grad_hooks or ())
    return count


def assert_given_back(model: nn.Module, device: str) -> None:
    """Fails if anything of a mode is left: a wrapped forward, a hook, a stand-in, a stream, a thread."""
    for module in model.modules():
        assert "forward" not in vars(module)
        assert module.forward.__func__ is type(module).forward
    assert hooks_of(model) == 0
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert active_hooks() is None
    assert registry.holders(device) == 0
    ours = ("lockstep", "host optimizer")
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(ours)]
