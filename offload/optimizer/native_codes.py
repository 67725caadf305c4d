"""The tables with which the C loop finds the codes of moments in 8 bits: those of adamw_codes.h and adamw_codes_vbmi.h.

Both forms of the loop count the boundaries below a number's magnitude. Without noise these are the midpoints of the
map's entries, with noise the entries.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from offload.optimizer.block_quantise import dynamic_map, midpoints

# The general form looks a magnitude up by its first 16 bits, from 2^-23 to 1.
FIRST_BIN, LAST_BIN = 0x3400, 0x3F80
# The other one guesses from its first 16 bits, from 2^-31 to 2: 256 bins of 16 places.
FIRST_PLACE, PLACES = 0x3000, 16
MAP_SIZE = 256
# With this number every bin of both maps has a line, with noise and without.
GUESS_BEGINS = 112
# Its quotients are that much too large, and with them the boundaries.
ENLARGED = 2.0**64
NEVER = 0x7FFFFFFF


def set_maps(functions: ctypes.CDLL, rounds_moments: bool) -> None:
    """Gives a library for 8-bit moments its tables; `rounds_moments` says that it rounds them with noise."""
    values = torch.cat([dynamic_map(True), dynamic_map(False)])
    planes = torch.cat([vector_tables(signed, rounds_moments) for signed in (True, False)])
    # Held by a name until the call has returned: addresses keep no tensor alive.
    tables = (values, bins(), planes)
    functions.set_maps(*(ctypes.c_void_p(table.data_ptr()) for table in tables))


def bins() -> Tensor:
    """Returns the bins of positive, negative and unsigned numbers, one after the other, as int32."""
    signed, unsigned = midpoints(True), midpoints(False)
    return torch.cat([_bins(signed, 1), _bins(signed, -1), _bins(unsigned, 1)])


def _bins(middles: Tensor, sign: int) -> Tensor:
    """Returns for each bin of magnitudes the entry of the map at its beginning and the last number that it is for.

    A bin holds the numbers of this sign whose magnitudes begin with the same 16 bits, and at most one of `middles`. The
    entry is in the upper half of an int32, the low 16 bits of the last number in the lower: all of them, where no
    midpoint lies in the bin.
    """
    beginnings = (torch.arange(FIRST_BIN, LAST_BIN + 1, dtype=torch.int32) << 16).view(torch.float32)
    entries = torch.bucketize(sign * beginnings, middles, out_int32=True)
    last = torch.full_like(entries, 0xFFFF)
    bits = (sign * middles)[sign * middles > 0].view(torch.int32)
    # A midpoint belongs to the lower entry, which of negative numbers is the one behind it.
    bits = bits if sign > 0 else bits - 1
    last[(bits >> 16) - FIRST_BIN] = bits & 0xFFFF
    return entries << 16 | last


def vector_tables(signed: bool, rounds_moments: bool) -> Tensor:
    """Returns the struct of adamw_codes_vbmi.h for one kind of numbers: uint8 [18, 256], planes of bytes."""
    entries = dynamic_map(signed)[127 if signed else 0 :]
    here, following, middles = entries[:-1], entries[1:], (entries[:-1] + entries[1:]) / 2
    if rounds_moments:
        # The largest entry is no number's lower one.
        edges = following[:-1]
        beyond = following if signed else torch.cat([torch.zeros(1), (following - here)[1:]])
    else:
        # A second moment above zero never becomes zero.
        edges, beyond = middles if signed else torch.cat([torch.zeros(1), middles[1:]]), following
    stored = torch.full((MAP_SIZE,), NEVER, dtype=torch.int32)
    stored[: len(edges)] = (edges * ENLARGED).view(torch.int32)
    parts = [_planes(dynamic_map(signed)), guesses(edges, len(here) - 1), _planes(stored)]
    return torch.cat([*parts, *(_planes(_padded(values * ENLARGED)) for values in (here, beyond))])


def guesses(edges: Tensor, last: int) -> Tensor:
    """Returns a line for each bin: uint8 [2, 256], its guess at the bin's beginning, and its slope.

    A line begins GUESS_BEGINS 256ths above that guess, and rises by as many 256ths as its slope from place to place. On
    all numbers of a place in the bin, its whole part is how many of `edges` (float32, ascending) lie below the number,
    or one less; and no more than `last`. Raises ValueError where no line is so.
    """
    places = torch.arange(FIRST_PLACE, FIRST_PLACE + MAP_SIZE * PLACES, dtype=torch.int32) << 16
    # No quotient is above one.
    begin, end = (bits.view(torch.float32).clamp(max=1) for bits in (places, places | 0xFFFF))
    begin[0] = 0
    most = torch.bucketize(begin, edges).clamp(max=last).view(MAP_SIZE, 1, PLACES)
    least = (torch.bucketize(end, edges, right=True) - 1).clamp(min=0).view(MAP_SIZE, 1, PLACES)
    rises = GUESS_BEGINS + torch.arange(MAP_SIZE).view(1, MAP_SIZE, 1) * torch.arange(PLACES) >> 8
    low, high = (least - rises).amax(dim=2).clamp(min=0), (most - rises).amin(dim=2)
    room, slope = (high - low).max(dim=1)
    if (room < 0).any():
        raise ValueError(f"no line guesses the codes of bin {int(room.argmin())} of the map of 8-bit moments")
    return torch.stack([low.gather(1, slope[:, None]).squeeze(1), slope]).to(torch.uint8)


def _planes(values: Tensor) -> Tensor:
    """Returns uint8 [4, 256]: each byte of these numbers of 32 bits, the lowest first."""
    bits = values.contiguous().view(torch.int32)
    return torch.stack([(bits >> shift) & 0xFF for shift in (0, 8, 16, 24)]).to(torch.uint8)


def _padded(values: Tensor) -> Tensor:
    return torch.cat([values, torch.zeros(MAP_SIZE - len(values))])
