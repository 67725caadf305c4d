"""The processes that share the homes of a model: their protocol, their memory, exchanges and links between devices.

The names in `__all__` are public. `AttachOptions.sharers` has `Sharers`, processes of one host, each with a
device. `NO_SHARERS` is a process by itself.

- `ExchangeBoard`: their exchanges of a few numbers, through shared memory. `meet` waits for all. `SharerLostError`
  names one that has ended or hangs; an error that sharing alone brings about ends with `OWN_HOMES`.
- `gradient_buckets` cuts gradients into runs that a loop sums at once, each a `GradientBucket`, after
  `separate_gradients`.

Read `sharers` first, then `gather_filler` (how units come in) and `summing` (how gradients leave).
"""

from offload.sharing.shared_memory import ExchangeBoard
from offload.sharing.sharers import NO_SHARERS, OWN_HOMES, SharerLostError, Sharers, meet
from offload.sharing.slices import GradientBucket, gradient_buckets, separate_gradients

__all__ = [
    "NO_SHARERS",
    "OWN_HOMES",
    "ExchangeBoard",
    "GradientBucket",
    "SharerLostError",
    "Sharers",
    "gradient_buckets",
    "meet",
    "separate_gradients",
]
