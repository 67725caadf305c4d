"""Sums of gradients over ranks, in buckets, in the order of the ranks.

Rank k gets the k-th slice of a bucket from every rank, adds the slices in the order of the ranks, and all ranks then
gather the sums. That is a reduce-scatter and an all-gather, as in a ring all-reduce, so it moves as many bytes,
2 (N - 1) / N times those of the gradients; but the order of additions is fixed. Each addition rounds to the gradients'
dtype, as autograd's do that add one microbatch to the next. So N ranks give the bits of one device with N microbatches.
Of two ranks it is the library's sum. Buckets run from the last parameter to the first.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from offload import l2_norm
from offload.sharing import gradient_buckets, separate_gradients

# Those that NCCL and gloo add, rounding once, as torch does.
ADDED_BY_LIBRARIES = {torch.float32, torch.bfloat16, torch.float16, torch.float64}
# torch 2.13 has renamed it.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def gather_into(whole: Tensor, own: Tensor, group: dist.ProcessGroup, later: bool = False) -> dist.Work | None:
    """Fills `whole` (1-D) with the slices `own` of all ranks, in their order; `own` may be a view of `whole`.

    With `later` it does not wait, and returns the work to wait for.
    """
    return _gather(whole, own, group=group, async_op=later)


def ordered_sum(flat: Tensor, group: dist.ProcessGroup) -> None:
    """Adds `flat` of all ranks (1-D, of one dtype and length, which divides by their number) in place."""
    count = group.size()
    if count == 2 and flat.dtype in ADDED_BY_LIBRARIES:
        # A single addition has no order. One collective in place of two, and half the time of the device.
        dist.all_reduce(flat, group=group)
        return
    # As bytes, which every library moves, whatever the dtype.
    received = torch.empty_like(flat)
    dist.all_to_all_single(received.view(torch.uint8), flat.view(torch.uint8), group=group)
    own, *others = received.view(count, -1)
    for other in others:
        own += other
    gather_into(flat.view(torch.uint8), own.view(torch.uint8), group)


def ordered_sum_of_hosts(flat: Tensor, here: dist.ProcessGroup, across: dist.ProcessGroup) -> None:
    """Adds `flat` of all ranks (1-D) of several hosts in place, in the order of the ranks; those of a host are a run.

    `here` are the ranks of this host, `across` those with this one's place on their hosts. Each slice goes from host to
    host. A host adds its ranks' slices one by one to what comes, because a sum of its own that is added as one number
    would round otherwise. The last host has the sum, which goes to all.
    """
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
    gather_into(flat.view(torch.uint8), total.view(torch.uint8), here)


def reduce_gradients(
    parameters: Sequence[nn.Parameter], has_gradient: Sequence[bool], device: torch.device, group: dist.ProcessGroup
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
        ordered_sum(flat, group)
        bucket.spread(flat)
        norms |= {parameter: l2_norm(view) for parameter, view in bucket.views(flat) if parameter.grad.device != device}
    return norms


def exchange_bytes(parameters: Sequence[nn.Parameter]) -> int:
    """Returns the bytes on the device in which gradients are exchanged: two of the largest bucket."""
    return 2 * max((bucket.nbytes for bucket in gradient_buckets(parameters)), default=0)
