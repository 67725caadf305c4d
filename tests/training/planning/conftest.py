"""Plans made within this process."""

from collections.abc import Callable

import pytest

from tests.training.helpers.in_process import components_of
from training.planning.machine import machine_of
from training.planning.plan import plan_filled
from training.planning.report import RunPlan


@pytest.fixture
def planned() -> Callable[..., RunPlan]:
    """A plan made in this process."""

    def planned(*overrides: str, has_gpu: bool = True) -> RunPlan:
        components = components_of("hardware=h200", "seq_len=64", *overrides)
        return plan_filled(components, machine_of(components), has_gpu)[1]

    return planned
