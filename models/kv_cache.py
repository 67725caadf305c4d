"""The keys and values of the positions that a model has computed, so that each new token costs one position."""

from __future__ import annotations

import torch
from torch import Tensor


class LayerCache:
    """Keys and values of one attention layer, in two buffers for `capacity` positions.

    The first `append` makes the buffers, with the dtype and on the device of its keys.
    """

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self.length = 0
        """positions that are stored"""

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Stores key and value, [batch, heads, new positions, head_dim] each, behind the earlier ones.

        Returns views of all that is stored: [batch, heads, length, head_dim] each. Raises ValueError if the positions
        are more than the capacity.
        """
        start, end = self.length, self.length + key.shape[2]
        if end > self._capacity:
            raise ValueError(f"{end} positions are more than the {self._capacity} of the key/value cache")
        if self._keys is None:
            batch, heads, _, head_dim = key.shape
            self._keys = key.new_empty(batch, heads, self._capacity, head_dim)
            self._values = torch.empty_like(self._keys)
        self._keys[:, :, start:end] = key
        self._values[:, :, start:end] = value
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]


class KeyValueCache:
    """The caches of all layers of a model, in order. One forward stores the same positions in each.

    Args:
        num_layers: attention layers of the model.
        capacity: the most positions that can be stored.
    """

    def __init__(self, num_layers: int, capacity: int):
        self.layers = [LayerCache(capacity) for _ in range(num_layers)]

    @property
    def length(self) -> int:
        """The positions that are stored; those of the first layer while a forward runs."""
        return self.layers[0].length
