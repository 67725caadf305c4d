"""The AdamW update as one C loop, compiled at start-up for the formats that a run has.

One pass over memory: 26 bytes a parameter with bf16 weights and gradients, compact masters and float32 moments. A
torch.compile'd function is as fast, but holds Python's global lock for as long as it computes, so that a thread that
updates would stop the one that launches work for the GPU.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import os
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from offload.optimizer.formats import StateFormat, dynamic_map, midpoints, noise_key
from offload.optimizer.kernels import EACH, SCALES, FusedUpdate, HyperParameters, Operands

# Additions and products are contracted only where the kernel's source says so. sqrt must not set errno, or it would not
# be vectorised.
FLAGS = ("-O3", "-march=native", "-std=c11", "-ffp-contract=off", "-fno-math-errno", "-fopenmp", "-fPIC", "-shared")
SOURCE = Path(__file__).with_name("adamw_kernel.c")
# A magnitude is looked up by its first 16 bits, from 2^-23 to 1.
FIRST_BIN, LAST_BIN = 0x3400, 0x3F80

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class NativeLibrary:
    """The compiled loop and the formats that it was compiled for."""

    functions: ctypes.CDLL
    format: StateFormat

    def supports(self, operands: Operands) -> bool:
        """Tells whether the loop takes these operands: the host's, of its formats."""
        weight, format = operands.weight, self.format
        master = None if operands.master is None else operands.master.dtype
        return (
            weight.device.type == "cpu"
            and {weight.dtype, operands.gradient.dtype} <= {torch.float32, torch.bfloat16}
            and operands.exp_avg.dtype == format.moment_dtype
            and master == format.master_dtype(weight.dtype)
        )

    def function(
        self, name: str, operands: Operands, arguments: Sequence[type], returns: type | None = None
    ) -> ctypes._CFuncPtr:
        """Returns the function `name` for the dtypes of weight and gradient, which takes `arguments`."""
        kinds = (operands.weight.dtype, operands.gradient.dtype)
        function = getattr(self.functions, "_".join([name, *(str(kind).removeprefix("torch.") for kind in kinds)]))
        if function.argtypes is None:
            function.argtypes, function.restype = arguments, returns
        return function


class NativeUpdate:
    """The C loop of adamw_kernel.c on `threads` cores, called without Python's lock.

    Operands that the library does not support (a device's, float16, other formats) go to the fused kernel.
    """

    name = "native"

    def __init__(self, library: NativeLibrary, threads: int):
        self._library = library
        self._threads = threads
        self._other = FusedUpdate(threads)

    def __call__(self, operands: Operands, step: Tensor, hyperparameters: HyperParameters, scale: float = 1.0) -> None:
        if not self._library.supports(operands):
            self._other(operands, step, hyperparameters, scale)
            return
        tensors, scalars = [ctypes.c_void_p] * 7, [ctypes.c_float] * 8
        arguments = [ctypes.c_int64, ctypes.c_int64, ctypes.c_int, ctypes.c_int32, *tensors, *scalars]
        self._library.function("adamw", operands, arguments)(
            operands.weight.numel(),
            operands.start,
            self._threads,
            noise_key(operands.seed, step).item() if operands.takes_noise else 0,
            *addresses(operands, *EACH, *SCALES),
            scale,
            *factors(hyperparameters, step),
        )


def addresses(operands: Operands, *names: str) -> list[int | None]:
    """Returns the address of each of these tensors' memory; None for none."""
    tensors = (getattr(operands, name) for name in names)
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


def factors(hyperparameters: HyperParameters, step: Tensor) -> tuple[float, ...]:
    """Returns the factors of the rule in update number `step`, in the order in which the C functions take them."""
    lr, beta1, beta2, eps, weight_decay = hyperparameters
    count = step.item()
    return (
        1 - lr * weight_decay,
        1 - beta1,
        beta2,
        1 - beta2,
        math.sqrt(1 - beta2**count),
        eps,
        lr / (1 - beta1**count),
    )


@functools.cache
def native_library(format: StateFormat, source: Path = SOURCE, *definitions: str) -> NativeLibrary | None:
    """Compiles `source` for this processor and these formats and loads it, once a process each; None where that fails.

    `definitions` are further options of the compiler: $CC, else cc, gcc or clang. Nothing is left on disk.
    """
    compiler = _compiler()
    if compiler is None:
        logger.info("no C compiler found: AdamW takes torch's fused kernel, about a tenth as fast")
        return None
    try:
        begun = _begun.pop(format, None) if source == SOURCE and not definitions else None
        library = NativeLibrary((begun or _Compilation(compiler, format, source, *definitions)).library(), format)
    except (OSError, subprocess.SubprocessError) as error:
        logger.info(
            "%s cannot make %s: torch's operations take its place, about a tenth as fast", compiler, source.name
        )
        logger.debug("the compiler's error: %s", getattr(error, "stderr", None) or error)
        return None
    if format.state_dtype == "int8":
        # Held by a name until the call has returned: addresses keep no tensor alive.
        tables = torch.cat([dynamic_map(True), dynamic_map(False)]), bins()
        library.functions.set_maps(*(ctypes.c_void_p(table.data_ptr()) for table in tables))
    return library


def begin_compiling(format: StateFormat) -> None:
    """Has the compiler make beside the caller what `native_library` will be asked for. It may take five seconds."""
    # What fails here fails again, and is told, when the library is needed.
    with suppress(OSError):
        if (compiler := _compiler()) is not None and format not in _begun:
            _begun[format] = _Compilation(compiler, format, SOURCE)


class _Compilation:
    """A compiler that runs. It is ended, and its directory removed, with this process."""

    def __init__(self, compiler: str, format: StateFormat, source: Path, *definitions: str):
        options = [f"-I{SOURCE.parent}", f"-DMASTER={format.master}", f"-DMOMENT={format.state_dtype}"]
        options += [f"-DQUANTISED={int(format.state_dtype == 'int8')}"]
        options += [f"-DFIRST_BIN={FIRST_BIN}", f"-DLAST_BIN={LAST_BIN}", *definitions]
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._target = Path(self._folder.name) / "adamw.so"
        command = [compiler, *FLAGS, *options, "-o", str(self._target), str(source), "-lm"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        self._end = weakref.finalize(self, _end, self._process, self._folder)

    def library(self) -> ctypes.CDLL:
        """Waits for the compiler and loads what it has made. Raises OSError or SubprocessError where it has failed."""
        with self._folder:
            _, errors = self._process.communicate(timeout=60)
            self._end.detach()
            if self._process.returncode:
                raise subprocess.CalledProcessError(self._process.returncode, self._process.args, stderr=errors)
            return ctypes.CDLL(str(self._target))


def _end(compiler: subprocess.Popen, folder: tempfile.TemporaryDirectory) -> None:
    compiler.kill()
    compiler.wait()
    folder.cleanup()


_begun: dict[StateFormat, _Compilation] = {}


def _compiler() -> str | None:
    names = [os.environ.get("CC"), "cc", "gcc", "clang"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def bins() -> Tensor:
    """Returns the bins of positive, negative and unsigned numbers, one after the other, as int32."""
    signed, unsigned = midpoints(True), midpoints(False)
    return torch.cat([_bins(signed, 1), _bins(signed, -1), _bins(unsigned, 1)])


def _bins(middles: Tensor, sign: int) -> Tensor:
    """Returns for each bin of magnitudes the entry of the map at its beginning and the last number that it is for.

    A bin holds the numbers of this sign whose magnitudes begin with the same 16 bits, and at most one of `middles`. The
    entry is in the upper half of an int32, in the lower the low 16 bits of the last number, or all where no midpoint
    is.
    """
    beginnings = (torch.arange(FIRST_BIN, LAST_BIN + 1, dtype=torch.int32) << 16).view(torch.float32)
    entries = torch.bucketize(sign * beginnings, middles, out_int32=True)
    last = torch.full_like(entries, 0xFFFF)
    bits = (sign * middles)[sign * middles > 0].view(torch.int32)
    # A midpoint belongs to the lower entry, which of negative numbers is the one behind it.
    bits = bits if sign > 0 else bits - 1
    last[(bits >> 16) - FIRST_BIN] = bits & 0xFFFF
    return entries << 16 | last
