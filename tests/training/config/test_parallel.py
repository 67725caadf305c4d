"""The keys of `parallel`."""

from __future__ import annotations

import pytest
from hydra.errors import CompactHydraException

from tests.training.helpers.in_process import composed
from training.config.parallel import Homes
from training.config.validation import check
from training.errors import UserError


def test_by_default_ranks_share_what_they_can():
    config, _ = composed()
    check(config)
    assert config.devices == 1
    assert config.parallel.homes == Homes.auto


def test_other_values_are_refused():
    with pytest.raises(CompactHydraException, match="slow"):
        composed("parallel.homes=slow")
    with pytest.raises(UserError, match=r"parallel\.timeout_s"):
        check(composed("parallel.timeout_s=0")[0])
    with pytest.raises(UserError, match="devices=0"):
        check(composed("devices=0")[0])
