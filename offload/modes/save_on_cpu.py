"""save_on_cpu: torch's own `torch.autograd.graph.save_on_cpu` around the model, a baseline to compare with.

It copies every saved tensor when it is saved, parameters too, and back when it is used, on the stream that computes.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu

from offload.activation_mode import ActivationMode, Mode
from offload.regions import Opener
from offload.weight_mode import one_of


class SaveOnCpu(ActivationMode):
    """Saved tensors wait on the host, weights are `weights`'s. `pin` is "auto" (page-lock host memory) or "off".

    Its copies are torch's, so no counter has them.
    """

    def __init__(self, weights: Mode, pin: str = "auto"):
        super().__init__(weights)
        self._pin = one_of("pin", pin, "auto", "off") == "auto" and torch.cuda.is_available()

    def openers(self, model: nn.Module) -> Iterable[tuple[nn.Module, Opener]]:
        yield model, lambda arguments, keywords: save_on_cpu(pin_memory=self._pin)
