"""Measures the AdamW update in 10^9 parameters/s, on the host for each kernel and number of threads, and on a GPU.

    python scripts/bench_update.py
    python scripts/bench_update.py --threads 8 13 15 --master compact stochastic --state-dtype fp32 bf16 int8

Weights and gradients are bf16; --master and --state-dtype are formats of the states, of which each is measured. GB/s
count the bytes that an update reads and writes; `copy` is the rate of torch's copy of as many bytes on as many threads,
read and written. `pause` is the longest time, in ms, that another Python thread (such as the one that launches GPU
kernels) waits for Python's lock during an update. `with log` is the C loop's update that can be undone, and
`undone` is how fast that is.
"""

import argparse
import functools
import itertools
import statistics
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from offload.memory.limits import usable_cores
from offload.optimizer.formats import MASTER_DTYPES, STATE_DTYPES, StateFormat
from offload.optimizer.kernel_choice import copied_to, sample, update_on
from offload.optimizer.kernels import FusedUpdate, HyperParameters, Operands, UpdateKernel
from offload.optimizer.kernels import torch_threads as threads_of_torch
from offload.optimizer.native_kernel import NativeUpdate, native_library
from offload.speculation.undo_log import ReversibleUpdate, UndoLog, can_be_undone, undo_library

SETTINGS = HyperParameters(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)


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
    choices = {"nargs": "+", "metavar": "NAME"}
    parser.add_argument("--master", choices=list(MASTER_DTYPES), default=["compact"], **choices)
    parser.add_argument("--state-dtype", choices=list(STATE_DTYPES), default=["fp32"], help="of the moments", **choices)
    parser.add_argument(
        "--native-only", action="store_true", help="leave out torch's kernel on the host, which takes most of the time"
    )
    options = parser.parse_args()

    print(f"{cores} cores, {options.parameters} parameters, torch {torch.__version__}")
    for master, state_dtype in itertools.product(options.master, options.state_dtype):
        format = StateFormat(master, state_dtype)
        print(f"master {master}, moments {state_dtype}, {format.update_bytes:.1f} bytes a parameter", flush=True)
        measure_format(format, options)
        if torch.cuda.is_available():
            measure_on_gpu(format, options, torch.device("cuda", 0))


def measure_format(format: StateFormat, options: argparse.Namespace) -> None:
    """Prints a row for each number of threads and kernel."""
    library = native_library(format)
    if library is None:
        print("no C compiler: no native kernel")
    operands = sample(format, options.parameters)
    for threads in options.threads:
        kernels: list[UpdateKernel] = [] if library and options.native_only else [FusedUpdate(threads)]
        if library is not None:
            kernels.append(NativeUpdate(library, threads))
        for kernel in kernels:
            update = functools.partial(kernel, operands, torch.ones(()), SETTINGS)
            rate = options.parameters / seconds_of(update, options.repeats)
            pause = longest_pause_ms(update)
            print(
                f"{threads:3d} threads  {kernel.name:8s}  {rate / 1e9:5.2f} Gparam/s "
                f" {rate * format.update_bytes / 1e9:6.1f} GB/s  pause {pause:6.1f} ms",
                flush=True,
            )
        if library is not None and can_be_undone(format):
            measure_undoing(format, operands, threads, options.repeats)
        nbytes = int(options.parameters * format.update_bytes / 2)
        source, target = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
        with threads_of_torch(threads):
            seconds = seconds_of(functools.partial(target.copy_, source), options.repeats)
        print(f"{threads:3d} threads  copy      {2 * nbytes / seconds / 1e9:22.1f} GB/s", flush=True)


def measure_on_gpu(format: StateFormat, options: argparse.Namespace, device: torch.device) -> None:
    """Prints a row for each kernel; the bytes of torch's are more than those that GB/s count."""
    operands, step = copied_to(sample(format, options.parameters), device, shift=0), torch.ones((), device=device)
    kernels = [FusedUpdate(), update_on(device, 1, format)]
    # For 8 bits the second is torch's as well.
    for kernel in {kernel.name: kernel for kernel in kernels}.values():

        def update(kernel: UpdateKernel = kernel) -> None:
            kernel(operands, step, SETTINGS)
            torch.cuda.synchronize(device)

        rate = options.parameters / seconds_of(update, options.repeats)
        row = f"{kernel.name:8s}  {rate / 1e9:5.2f} Gparam/s  {rate * format.update_bytes / 1e9:6.1f} GB/s"
        print(f"        GPU  {row}", flush=True)


def measure_undoing(format: StateFormat, operands: Operands, threads: int, repeats: int) -> None:
    """Prints the rates of the update with a log, and of undoing it."""
    log = UndoLog.over(torch.zeros(UndoLog.nbytes(operands.weight.numel()), dtype=torch.uint8), operands.weight.numel())
    undoable, step = ReversibleUpdate(undo_library(format), threads), torch.ones(())
    for name, work in (("with log", undoable.update), ("undone", undoable.undo)):
        rate = operands.weight.numel() / seconds_of(lambda work=work: work(operands, step, SETTINGS, log), repeats)
        print(f"{threads:3d} threads  {name:8s}  {rate / 1e9:5.2f} Gparam/s", flush=True)


def seconds_of(work: Callable[[], object], repeats: int) -> float:
    """Returns the median time of `work` in seconds, after a warm-up that touches the pages."""
    seconds = []
    for _ in range(repeats + 1):
        start = perf_counter()
        work()
        seconds.append(perf_counter() - start)
    return statistics.median(seconds[1:])


if __name__ == "__main__":
    main()
