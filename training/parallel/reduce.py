"""Sums of gradients over ranks, in buckets: in the order of the ranks, or as the library of the device adds them.

`ordered` exchanges slices: rank k gets the k-th slice of a bucket from every rank, adds the slices in the order of the
ranks, and all ranks then gather the sums. That is a reduce-scatter and an all-gather, as in a ring all-reduce, so it
moves as many bytes, 2 (N - 1) / N times those of the gradients; but the order of additions is fixed. Each addition
rounds to the gradients' dtype, as autograd's do that add one microbatch to the next. So N ranks give the bits of one
device with N microbatches. Of two ranks it is the library's sum. Buckets run from the last parameter to the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from offload import gradient_buckets, l2_norm, separate_gradients
from training.parallel.collectives import add_slices, gather_into

# Those that NCCL and gloo add, rounding once, as torch does.
ADDED_BY_LIBRARIES = {torch.float32, torch.bfloat16, torch.float16, torch.float64}

Sum = Callable[[Tensor, dist.ProcessGroup], Tensor]
"""sums a flat tensor over all ranks of a group, each of which gets the result; its length divides by their number"""


def ordered_sum(flat: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Adds `flat` of all ranks (1-D, of one dtype and length) in place, in the order of the ranks; returns it."""
    count = group.size()
    if count == 2 and flat.dtype in ADDED_BY_LIBRARIES:
        # A single addition has no order. One collective in place of two, and half the time of the device.
        return fast_sum(flat, group)
    own = _ordered_slice(flat, group)
    gather_into(flat.view(torch.uint8), own.view(torch.uint8), group)
    return flat


def ordered_slices(flat: Tensor, group: dist.ProcessGroup) -> Tensor:
    """As `ordered_sum`, but of the result each rank has its slice alone: the rest of `flat` is not defined."""
    count = group.size()
    if count == 2 and flat.dtype in ADDED_BY_LIBRARIES:
        return fast_slices(flat, group)
    flat.chunk(count)[group.rank()].copy_(_ordered_slice(flat, group))
    return flat


def _ordered_slice(flat: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns this rank's slice of the sum, in memory of its own."""
    # As bytes, which every library moves, whatever the dtype.
    received = torch.empty_like(flat)
    dist.all_to_all_single(received.view(torch.uint8), flat.view(torch.uint8), group=group)
    own, *others = received.view(group.size(), -1)
    for other in others:
        own += other
    return own


def fast_sum(flat: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Adds `flat` of all ranks (1-D) in place, in the order that the library chooses for them; returns it."""
    dist.all_reduce(flat, group=group)
    return flat


def fast_slices(flat: Tensor, group: dist.ProcessGroup) -> Tensor:
    """As `fast_sum`, but of the result each rank has its slice alone: the rest of `flat` is not defined."""
    add_slices(flat, group)
    return flat


SUMS: Mapping[str, Sum] = {"ordered": ordered_sum, "fast": fast_sum}
SUMS_IN_SLICES: Mapping[str, Sum] = {"ordered": ordered_slices, "fast": fast_slices}

SumOfHosts = Callable[[Tensor, dist.ProcessGroup, dist.ProcessGroup], Tensor]
"""sums a flat tensor over all ranks of several hosts, given the group of this rank's host, and that of the ranks which
have the same place on all hosts; the length divides by the number of ranks of a host"""


def ordered_sum_of_hosts(flat: Tensor, here: dist.ProcessGroup, across: dist.ProcessGroup) -> Tensor:
    """Adds `flat` of all ranks (1-D) in place, in the order of the ranks, where those of a host follow each other.

    Each slice goes from host to host. A host adds its ranks' slices one by one to what comes, because a sum of its own
    that is added as one number would round otherwise. The last host has the sum, which goes to all.
    """
    own = _ordered_slice_of_hosts(flat, here, across)
    gather_into(flat.view(torch.uint8), own.view(torch.uint8), here)
    return flat


def ordered_slices_of_hosts(flat: Tensor, here: dist.ProcessGroup, across: dist.ProcessGroup) -> Tensor:
    """As `ordered_sum_of_hosts`, but of the result each rank has its slice alone."""
    flat.chunk(here.size())[here.rank()].copy_(_ordered_slice_of_hosts(flat, here, across))
    return flat


def _ordered_slice_of_hosts(flat: Tensor, here: dist.ProcessGroup, across: dist.ProcessGroup) -> Tensor:
    host, hosts = across.rank(), across.size()
    received = torch.empty_like(flat)
    dist.all_to_all_single(received.view(torch.uint8), flat.view(torch.uint8), group=here)
    first, *others = received.view(here.size(), -1)
    if host == 0:
        total = first
    else:
        total = torch.empty_like(first)
        dist.recv(total.view(torch.uint8), dist.get_global_rank(across, host - 1), group=across)
        total += first
    for other in others:
        total += other
    if host < hosts - 1:
        dist.send(total.view(torch.uint8), dist.get_global_rank(across, host + 1), group=across)
    dist.broadcast(total.view(torch.uint8), dist.get_global_rank(across, hosts - 1), group=across)
    return total


def fast_sum_of_hosts(flat: Tensor, here: dist.ProcessGroup, across: dist.ProcessGroup) -> Tensor:
    """Adds `flat` (1-D) over the ranks of each host, and then slices over the hosts, in the order of the library."""
    dist.all_reduce(flat, group=here)
    own = flat.chunk(here.size())[here.rank()].clone()
    dist.all_reduce(own, group=across)
    gather_into(flat.view(torch.uint8), own.view(torch.uint8), here)
    return flat


def fast_slices_of_hosts(flat: Tensor, here: dist.ProcessGroup, across: dist.ProcessGroup) -> Tensor:
    """As `fast_sum_of_hosts`, but of the result each rank has its slice alone."""
    add_slices(flat, here)
    dist.all_reduce(flat.chunk(here.size())[here.rank()], group=across)
    return flat


SUMS_OF_HOSTS: Mapping[str, SumOfHosts] = {"ordered": ordered_sum_of_hosts, "fast": fast_sum_of_hosts}
SUMS_OF_HOSTS_IN_SLICES: Mapping[str, SumOfHosts] = {"ordered": ordered_slices_of_hosts, "fast": fast_slices_of_hosts}


def reduce_gradients(
    parameters: Sequence[nn.Parameter],
    has_gradient: Sequence[bool],
    device: torch.device,
    group: dist.ProcessGroup,
    add: Sum,
) -> dict[nn.Parameter, Tensor]:
    """Makes the gradient of each parameter the sum over the ranks of `group`, whose tensors are on `device`.

    `has_gradient`: for each parameter whether any rank has a gradient; the others keep none. Gradients on the host go
    through the device and back, and their norms are returned: float32 scalars there. Those of gradients on the device
    may be taken from these, which keeps the order of their sum that of a run on one device.
    """
    norms = {}
    given = [parameter for parameter, some in zip(parameters, has_gradient, strict=True) if some]
    separate_gradients(given)
    for bucket in gradient_buckets(given, group.size()):
        flat = bucket.flat(device)
        add(flat, group)
        bucket.spread(flat)
        norms |= {parameter: l2_norm(view) for parameter, view in bucket.views(flat) if parameter.grad.device != device}
    return norms


def exchange_bytes(parameters: Sequence[nn.Parameter]) -> int:
    """Returns the bytes on the device in which gradients are exchanged: two of the largest bucket."""
    return 2 * max((bucket.nbytes for bucket in gradient_buckets(parameters)), default=0)
