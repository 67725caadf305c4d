"""Measures the AdamW update on the host in 10^9 parameters/s, for each kernel and number of threads.

    python scripts/bench_update.py
    python scripts/bench_update.py --threads 12 13 14 15 --compiled

Weights and gradients are bf16, masters float32, moments --state-dtype: 28 or 20 bytes for each parameter pass through
memory. `pause` is the longest time, in ms, that another Python thread (such as the one that launches GPU kernels) waits
for Python's lock during an update. `--compiled` adds a function compiled by torch.compile for comparison.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
from pathlib import Path
from time import perf_counter

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from offload.optimizer.adamw import STATE_DTYPES
from offload.optimizer.kernels import FusedUpdate, NativeUpdate, Operands, Settings, native_library
from offload.optimizer.kernels import torch_threads as threads_of_torch
from offload.runtime.host_cores import usable_cores

SETTINGS = Settings(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)


class CompiledUpdate:
    """The AdamW rule as one function, compiled by torch.compile."""

    name = "compiled"

    def __init__(self, threads: int):
        self._threads = threads
        # A change of torch's own number of threads would compile it again.
        self._function = torch.compile(_adamw, dynamic=True, options={"cpp.threads": threads})

    def __call__(self, operands: Operands, step: torch.Tensor, settings: Settings) -> None:
        count = step.item()
        scalars = (
            1 - settings.lr * settings.weight_decay,
            1 - settings.beta1,
            settings.beta2,
            (1 - settings.beta2**count) ** 0.5,
            settings.lr / (1 - settings.beta1**count),
        )
        with threads_of_torch(self._threads):
            self._function(*vars(operands).values(), *map(torch.tensor, scalars))


def _adamw(weight, gradient, master, exp_avg, exp_avg_sq, decay, rest1, beta2, correction, step_size):
    gradient = gradient.float()
    mean = torch.lerp(exp_avg.float(), gradient, rest1)
    square = exp_avg_sq.float() * beta2 + (1 - beta2) * gradient * gradient
    value = master * decay - step_size * mean / (square.sqrt() / correction + SETTINGS.eps)
    exp_avg.copy_(mean)
    exp_avg_sq.copy_(square)
    master.copy_(value)
    weight.copy_(value)


def longest_pause_ms(work) -> float:
    """Runs `work` in another thread, and returns the longest pause of this one meanwhile."""
    thread = threading.Thread(target=work)
    longest, last = 0.0, perf_counter()
    thread.start()
    while thread.is_alive():
        now = perf_counter()
        longest, last = max(longest, now - last), now
    return max(longest, perf_counter() - last) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = usable_cores()
    parser.add_argument(
        "--threads",
        type=int,
        nargs="+",
        default=sorted({1, max(cores // 2, 1), max(cores - 1, 1), cores}),
        help="numbers of threads to measure (default: %(default)s)",
    )
    parser.add_argument("--parameters", type=int, default=1 << 27, help="in one update (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=7, help="measured updates (default: %(default)s)")
    parser.add_argument("--state-dtype", choices=sorted(STATE_DTYPES), default="fp32", help="of the moments")
    parser.add_argument("--compiled", action="store_true", help="also measure a function of torch.compile")
    options = parser.parse_args()

    library = native_library()
    print(f"{cores} cores, {options.parameters} parameters, moments {options.state_dtype}, torch {torch.__version__}")
    if library is None:
        print("no C compiler: no native kernel")
    halves = [torch.zeros(options.parameters, dtype=torch.bfloat16) for _ in range(2)]
    moments = [torch.zeros(options.parameters, dtype=STATE_DTYPES[options.state_dtype]) for _ in range(2)]
    operands = Operands(*halves, torch.zeros(options.parameters), *moments)
    for threads in options.threads:
        kernels = [FusedUpdate(threads)]
        if library is not None:
            kernels.append(NativeUpdate(library, threads))
        if options.compiled:
            kernels.append(CompiledUpdate(threads))
        for kernel in kernels:
            seconds = []
            # The first update is a warm-up: it touches the pages and compiles functions.
            for _ in range(options.repeats + 1):
                start = perf_counter()
                kernel(operands, torch.ones(()), SETTINGS)
                seconds.append(perf_counter() - start)
            rate = options.parameters / statistics.median(seconds[1:]) / 1e9
            pause = longest_pause_ms(lambda kernel=kernel: kernel(operands, torch.ones(()), SETTINGS))
            print(f"{threads:3d} threads  {kernel.name:8s}  {rate:5.2f} Gparam/s  pause {pause:6.1f} ms", flush=True)


if __name__ == "__main__":
    main()
