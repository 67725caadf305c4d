"""The random generators that a forward may draw from: torch's, Python's, and NumPy's where it is imported."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RandomState:
    """The states of generators at one moment: those of Python and NumPy, and of torch on the host and a device."""

    python: tuple
    numpy: dict | None
    host: torch.Tensor | None = None
    device: tuple[torch.device, torch.Tensor] | None = None

    @classmethod
    def of_python(cls) -> RandomState:
        """Returns the states of Python's generator and NumPy's."""
        numpy = sys.modules.get("numpy")
        return cls(random.getstate(), None if numpy is None else numpy.random.get_state(legacy=False))

    @classmethod
    def of(cls, device: torch.device) -> RandomState:
        """Returns the states of all generators, that of `device` among them."""
        python = cls.of_python()
        on_device = (device, torch.cuda.get_rng_state(device)) if device.type == "cuda" else None
        return cls(python.python, python.numpy, torch.get_rng_state(), on_device)

    def restore(self) -> None:
        """Gives the generators these states."""
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        if self.host is not None:
            torch.set_rng_state(self.host)
        if self.device is not None:
            device, state = self.device
            torch.cuda.set_rng_state(state, device)
