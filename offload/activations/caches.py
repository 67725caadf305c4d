"""Caches among the arguments of a block, such as keys and values of attention, to which its forward adds.

A recompute must find such an object as it was before forward, and must not add to it a second time.
"""

from __future__ import annotations

import io
import pickle
from types import BuiltinFunctionType, FunctionType

from torch import Tensor, nn

# Shared between a cache and its copies, and not looked into.
SHARED = (Tensor, nn.Module, type, FunctionType, BuiltinFunctionType)


class CacheBefore:
    """A cache as it is now: its structure, and the tensors in it themselves, which are not copied."""

    def __init__(self, cache: object):
        self._name = type(cache).__name__
        self._shared: list = []
        file = io.BytesIO()
        _Pickler(file, self._shared).dump(cache)
        self._structure = file.getvalue()
        self._versions = [_version(value) for value in self._shared]

    @classmethod
    def of(cls, argument: object) -> object:
        """Returns `argument`, or if it is a cache what it is now.

        An object is taken for a cache if it has a method `update`, or is called a cache. Raises RuntimeError for a
        cache whose structure cannot be copied.
        """
        called_cache = "Cache" in type(argument).__name__
        if isinstance(argument, SHARED) or not (called_cache or hasattr(argument, "update")):
            return argument
        try:
            return cls(argument)
        except Exception as error:  # whatever the object's own way to be pickled raises
            if not called_cache:
                return argument
            raise RuntimeError(
                f"a block that is computed again got a {type(argument).__name__}, which cannot be copied"
                f" ({type(error).__name__}: {error}): call the model with use_cache=False"
            ) from error

    def again(self) -> object:
        """Returns a copy of the cache as it was, for one recompute.

        Raises RuntimeError where its tensors were written to in place since.
        """
        if [_version(value) for value in self._shared] != self._versions:
            raise RuntimeError(
                f"forward wrote to the tensors of a {self._name} in place, so that its block cannot be computed again:"
                " call the model with use_cache=False"
            )
        return _Unpickler(io.BytesIO(self._structure), self._shared).load()


def _version(value: object) -> int | None:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else None


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, shared: list):
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._shared = shared

    def persistent_id(self, value: object) -> int | None:
        if not isinstance(value, SHARED):
            return None
        self._shared.append(value)
        return len(self._shared) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, shared: list):
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, number: int) -> object:
        return self._shared[number]
