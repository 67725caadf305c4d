"""The protocol of what makes an optimizer's updates beside the step."""

from __future__ import annotations

from offload.optimizer.deferral import Deferral
from offload.optimizer.overlap import Overlap
from tests.offload.weights.gradients.test_updates import methods


def test_overlap_has_every_method_of_the_protocol():
    assert methods(Deferral).items() <= methods(Overlap).items()
