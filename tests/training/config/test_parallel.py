"""The keys of `parallel`."""

from __future__ import annotations

import pytest
from hydra.errors import CompactHydraException

from tests.training.helpers.in_process import composed
from training.config.parallel import Homes, Reduction
from training.config.validation import check
from training.errors import UserError
from training.parallel.reduce import SUMS


def test_each_choice_is_a_way_to_add():
    assert {str(choice) for choice in Reduction} == set(SUMS)


def test_the_default_is_the_order_of_the_ranks_which_share_what_they_can():
    config, _ = composed()
    check(config)
    assert (config.devices, config.parallel.reduction) == (1, Reduction.ordered)
    assert config.parallel.homes == Homes.auto


def test_other_values_are_refused():
    with pytest.raises(CompactHydraException, match="slow"):
        composed("parallel.reduction=slow")
    with pytest.raises(UserError, match=r"parallel\.timeout_s"):
        check(composed("parallel.timeout_s=0")[0])
    with pytest.raises(UserError, match="devices=0"):
        check(composed("devices=0")[0])
