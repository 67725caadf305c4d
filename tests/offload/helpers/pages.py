"""Counts the pages of a range of addresses that are in memory."""

import ctypes
import mmap


def pages_in_memory(address: int, nbytes: int) -> int:
    """Returns how many pages of `nbytes` at `address`, the start of a page, the system has made."""
    made = (ctypes.c_ubyte * (-(-nbytes // mmap.PAGESIZE)))()
    ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), made)
    return sum(each & 1 for each in made)
