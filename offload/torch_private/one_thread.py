"""One thread at a time runs forwards of a model that a mode has: they share its slots, and its record of the step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from offload.torch_private.running_microbatch import running_microbatch
from offload.torch_private.torch_internals import is_in_backward


class OneThread:
    """Refuses forwards of a second thread while one runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Surrounds the outermost forward of a thread. Raises RuntimeError while another runs one.

        Microbatches side by side take turns by themselves. A recompute may run in a thread of autograd, while the
        forward that has called backward waits.
        """
        if running_microbatch() is not None or is_in_backward():
            yield
            return
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                "two threads run forwards of one model at the same time, which an offload mode cannot keep apart: let"
                " them take turns (threading.Lock), or give each a copy of the model"
            )
        try:
            yield
        finally:
            self._lock.release()
