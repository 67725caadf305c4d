"""The key/value cache stores positions in their order, and no more than it has room for."""

from __future__ import annotations

import pytest
import torch

from models.kv_cache import KeyValueCache, LayerCache


def test_positions_are_stored_behind_each_other():
    cache, key = LayerCache(4), torch.rand(2, 3, 4, 5)
    cache.append(key[:, :, :3], -key[:, :, :3])
    keys, values = cache.append(key[:, :, 3:], -key[:, :, 3:])
    assert torch.equal(keys, key)
    assert torch.equal(values, -key)
    with pytest.raises(ValueError, match="5 positions are more than the 4 of the key/value cache"):
        cache.append(key[:, :, :1], key[:, :, :1])
    assert cache.length == 4


def test_each_layer_has_its_own():
    cache = KeyValueCache(2, 3)
    cache.layers[0].append(torch.zeros(1, 1, 2, 2, dtype=torch.bfloat16), torch.zeros(1, 1, 2, 2))
    assert (cache.length, cache.layers[1].length) == (2, 0)
