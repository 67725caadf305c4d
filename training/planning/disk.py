"""The speed at which weights are read from their files, for plans of runs with `source=mapped`."""

from __future__ import annotations

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from time import perf_counter

from offload.planning import Forecast, bounded_by_files

# Pieces that are read at a time, by as many threads as a mode has by default, and the bytes that are read in all.
PIECE_BYTES = 8 * 2**20
THREADS = 4
MOST_BYTES = 512 * 2**20


@cache
def disk_gb_s(path: Path) -> float | None:
    """Measures how fast the disk gives the file at `path`, in GB/s: up to 512 MiB of it, past the page cache.

    Returns None where the file is small or its file system does not read past the cache: then nothing is known.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except (OSError, AttributeError):
        return None
    try:
        pieces = range(0, min(os.fstat(fd).st_size, MOST_BYTES) - PIECE_BYTES + 1, PIECE_BYTES)
        memory = [mmap.mmap(-1, PIECE_BYTES) for _ in range(THREADS)]
        start = perf_counter()
        with ThreadPoolExecutor(THREADS) as pool:
            read = [pool.submit(_read, fd, memory[thread], pieces[thread::THREADS]) for thread in range(THREADS)]
            nbytes = sum(each.result() for each in read)
        seconds = perf_counter() - start
    except OSError:
        return None
    finally:
        os.close(fd)
    return nbytes / seconds / 1e9 if nbytes >= THREADS * PIECE_BYTES else None


def _read(fd: int, memory: mmap.mmap, offsets: range) -> int:
    return sum(os.preadv(fd, [memory], offset) for offset in offsets)


def with_reads(
    forecast: Forecast, read_bytes: float, file_bytes: int, room_bytes: float, gb_s: float | None
) -> tuple[Forecast, str]:
    """Returns the forecast of a step that reads `read_bytes` of its weights from files, and a line about it.

    `file_bytes` are those of the weights; what the page cache has room for (`room_bytes`) is read once. `gb_s` is the
    speed of the disk.
    """
    if file_bytes <= room_bytes:
        return forecast, "weights in files: the page cache has room for them, so the disk is read in the first step"
    if gb_s is None:
        unknown = "the disk's speed is not known, and the step may be longer: give hardware.disk_gb_s=GB/s"
        return forecast, f"weights in files: read from the disk in every step; {unknown}"
    line = f"weights in files: read from the disk in every step, at {gb_s:.2f} GB/s"
    return bounded_by_files(forecast, read_bytes / gb_s / 1e6), line
