"""Gradients on their way out: from where autograd made them to the host, added to what is there already."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from offload.departures import Departing, Departures
from offload.transfer import Transfer
from offload.unit import UnitTensor


class GradientOffloader:
    """Copies gradients out on the d2h stream while backward goes on.

    At most `limit_bytes` of them wait on the device; beyond that compute waits for the oldest to leave. A gradient
    that meets an earlier one (`parameter.grad` is set: accumulation) fetches it, adds it on the device and sends the
    sum home, so that the host never adds and the order of additions is autograd's own.
    """

    def __init__(self, transfer: Transfer, limit_bytes: int):
        self._transfer = transfer
        self._streams = transfer.streams
        self._departures = Departures(transfer, limit_bytes)
        # Whether to take the norm of each gradient on the way, where the device's memory bandwidth is at hand.
        self.takes_norms = False

    def land(self, tensor: UnitTensor, leaf: nn.Parameter, hold: Callable[..., None] | None = None) -> None:
        """Takes the gradient off `leaf` and starts it home; afterwards `tensor.host.grad` is its host view.

        The bytes are there once the host has synchronised with the d2h stream. `hold`, of the tensor and its
        departing gradient, takes charge of the device's copy, which else goes behind the copy out.
        """
        gradient, leaf.grad = leaf.grad, None
        streams = self._streams
        leaving = Departing(gradient, streams.event(), f"device gradient of {tensor.name}", streams.compute)
        streams.writes(streams.compute, leaving, "backward")
        earlier = tensor.host.grad
        if earlier is None:
            self._take_norm(tensor, gradient)
            self._transfer.after_compute(streams.d2h)
        else:
            self._fetch_and_add(earlier, leaving, tensor)
            with streams.on(streams.d2h):
                self._take_norm(tensor, gradient)
        streams.reads(streams.d2h, leaving, "copy out")
        streams.writes(streams.d2h, tensor, "copy out")
        self._transfer.copy_out(tensor.gradient, gradient, done=leaving.done, what=f"gradient of {tensor.name}")
        tensor.landed = leaving.done
        tensor.host.grad = tensor.gradient
        if hold is None:
            self._departures.add(leaving)
        else:
            hold(tensor, leaving)

    def let_go(self) -> None:
        """Hands the device memory of every gradient back, for use behind its copy."""
        self._departures.let_go()

    def _take_norm(self, tensor: UnitTensor, gradient: torch.Tensor) -> None:
        if self.takes_norms:
            tensor.norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)

    def _fetch_and_add(self, earlier: torch.Tensor, leaving: Departing, tensor: UnitTensor) -> None:
        streams = self._streams
        h2d, d2h = streams.h2d, streams.d2h
        name = f"earlier gradient of {tensor.name}"
        fetched = Departing(torch.empty_like(leaving.tensor), streams.event(), name, streams.compute)
        streams.writes(streams.compute, fetched, "what this memory was used for before")
        self._transfer.after_compute(h2d, d2h)
        if tensor.landed is not None:
            h2d.wait_event(tensor.landed)
        streams.reads(h2d, tensor, "accumulation")
        streams.writes(h2d, fetched, "copy in")
        arrived = streams.event()
        self._transfer.copy_in(fetched.tensor, earlier, done=arrived, what=name)
        d2h.wait_event(arrived)
        streams.reads(d2h, fetched, "accumulation")
        streams.writes(d2h, leaving, "accumulation")
        with streams.on(d2h), torch.no_grad():
            leaving.tensor.add_(fetched.tensor)
        fetched.done.record(d2h)
        self._departures.add(fetched)
