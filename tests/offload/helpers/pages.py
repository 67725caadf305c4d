"""Pages of a range of addresses that are in memory, huge ones among them, and the files that this process has open."""

import ctypes
import mmap
import os
import platform
import re
from contextlib import suppress
from pathlib import Path

SETTING = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def pages_in_memory(address: int, nbytes: int) -> int:
    """Returns how many pages of `nbytes` at `address`, the start of a page, the system has made."""
    made = (ctypes.c_ubyte * (-(-nbytes // mmap.PAGESIZE)))()
    ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), made)
    return sum(each & 1 for each in made)


def can_collapse() -> bool:
    """Tells whether this system makes huge pages of a file in memory for a process that asks for each."""
    version = re.match(r"(\d+)\.(\d+)", platform.release())
    is_new = version is not None and tuple(map(int, version.groups())) >= (6, 1)
    return is_new and SETTING.is_file() and "[deny]" not in SETTING.read_text()


def huge_bytes(address: int, nbytes: int) -> int:
    """Returns the bytes that this process has mapped by huge pages of files in memory, of `nbytes` at `address`."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            start, end = (int(bound, 16) for bound in bounds.groups())
            inside = address <= start and end <= address + nbytes
        elif inside and line.startswith("ShmemPmdMapped:"):
            found += 1024 * int(line.split()[1])
    return found


def open_files() -> set[tuple[str, str]]:
    """Returns the number of each open file, with what it is.

    What a test leaves is what is here and was not before it. The number of files may fall meanwhile: what earlier tests
    have dropped is closed when the collector runs.
    """
    found = set()
    for number in os.listdir("/proc/self/fd"):
        # That of the listing itself is closed by now.
        with suppress(FileNotFoundError):
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found
