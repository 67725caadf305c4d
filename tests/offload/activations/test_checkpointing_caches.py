"""Caches as they were before a block: their structure is copied, their tensors are not, and changes are noticed."""

import threading

import pytest
import torch
from torch import nn

from offload.activations.checkpointing import CacheBefore


class Layer:
    def __init__(self, keys: torch.Tensor):
        self.keys = keys


class KeyCache:
    def __init__(self, *extra: object):
        self.layers = [Layer(torch.zeros(2)), Layer(torch.ones(2, requires_grad=True) * 2)]
        self.extra = extra


def test_each_copy_is_the_cache_as_it_was_with_the_same_tensors():
    module, parameter = nn.Linear(2, 2), nn.Parameter(torch.ones(1))
    cache = KeyCache(module, parameter, KeyCache, len, test_each_copy_is_the_cache_as_it_was_with_the_same_tensors)
    keys = [layer.keys for layer in cache.layers]
    before = CacheBefore.of(cache)
    cache.layers.append(Layer(torch.zeros(3)))
    cache.layers[0].keys = torch.cat([keys[0], keys[0]])
    for _ in range(2):
        again = before.again()
        assert type(again) is KeyCache
        assert again is not cache
        assert [layer.keys is tensor for layer, tensor in zip(again.layers, keys, strict=True)] == [True, True]
        assert all(one is other for one, other in zip(again.extra, cache.extra, strict=True))
        again.layers.clear()


def test_tensors_that_were_written_to_are_noticed():
    cache = KeyCache()
    before = CacheBefore.of(cache)
    cache.layers[0].keys.add_(1)
    with pytest.raises(RuntimeError, match=r"tensors of a KeyCache in place.* use_cache=False$") as refused:
        before.again()
    assert "\n" not in str(refused.value)


def test_what_is_no_cache_is_passed_on():
    class Progress:
        """Not a cache, and nothing to copy."""

        def __init__(self):
            self.lock = threading.Lock()

        def update(self) -> None: ...

    for argument in (
        torch.ones(2),
        nn.Linear(2, 2),
        nn.ModuleDict(),
        3,
        None,
        "text",
        Layer(torch.ones(2)),
        Progress(),
    ):
        assert CacheBefore.of(argument) is argument
    assert isinstance(CacheBefore.of({1, 2}), CacheBefore)


def test_a_cache_that_cannot_be_copied_is_refused_in_one_line():
    with pytest.raises(
        RuntimeError, match=r"KeyCache, which cannot be copied \(TypeError: .* use_cache=False$"
    ) as refused:
        CacheBefore.of(KeyCache(threading.Lock()))
    assert "\n" not in str(refused.value)


def test_tensors_made_in_inference_mode_have_no_version():
    with torch.inference_mode():
        cache = KeyCache()
    assert CacheBefore.of(cache).again().layers[0].keys is cache.layers[0].keys
