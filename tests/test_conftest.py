"""The number of worker processes that `-n auto` gives to a pytest run, and the tests that a run leaves out."""

import logging
import os
from types import SimpleNamespace

import pytest
import torch

from tests import ROOT
from tests.conftest import pytest_collection_modifyitems, pytest_xdist_auto_num_workers

TEST_FILE = str(ROOT / "tests" / "test_conftest.py")


@pytest.mark.parametrize(
    ("args", "marks", "gpu", "workers"),
    [
        (["tests"], "", False, None),
        (["tests"], "", True, 0),
        (["tests"], "gpu", True, 0),
        (["tests"], "not gpu", True, None),
        ([TEST_FILE], "", False, 0),
        ([f"{TEST_FILE}::test_a", TEST_FILE], "not gpu", False, 0),
        ([TEST_FILE, str(ROOT / "tests" / "models")], "", False, None),
    ],
)
def test_workers_are_for_folders_without_tests_of_a_gpu(monkeypatch, args, marks, gpu, workers):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    config = SimpleNamespace(args=args, option=SimpleNamespace(markexpr=marks))
    assert pytest_xdist_auto_num_workers(config) == workers


@pytest.mark.parametrize(
    ("args", "marks", "slow_ones_run"),
    [(["tests"], "", False), (["tests"], "slow", True), (["tests"], "not gpu", True), ([TEST_FILE], "", True)],
)
def test_slow_tests_are_left_out_of_folders(args, marks, slow_ones_run):
    def item(slow: bool) -> SimpleNamespace:
        return SimpleNamespace(nodeid="", get_closest_marker=lambda name: slow if name == "slow" else None)

    quick, slow = item(False), item(True)
    left_out, items = [], [quick, slow]
    hook = SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
    config = SimpleNamespace(args=args, option=SimpleNamespace(markexpr=marks), hook=hook)
    pytest_collection_modifyitems(config, items)
    assert (items, left_out) == (([quick, slow], []) if slow_ones_run else ([quick], [slow]))


def test_of_a_sampled_test_four_fifths_are_slow():
    class Item(SimpleNamespace):
        def get_closest_marker(self, name: str) -> bool:
            return name in self.marks

        def add_marker(self, mark: pytest.MarkDecorator) -> None:
            self.marks.add(mark.name)

    items = [Item(nodeid=f"test_a[{number}]", marks={"sampled"}) for number in range(300)]
    pytest_collection_modifyitems(SimpleNamespace(args=[TEST_FILE], option=SimpleNamespace(markexpr="")), items)
    assert 210 < sum("slow" in item.marks for item in items) < 270
    assert "slow" not in items[0].marks


def test_tests_compute_in_one_thread():
    assert torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"])


@pytest.fixture
def apart() -> logging.Logger:
    logger = logging.getLogger(f"{__name__}.apart")
    logger.propagate = False
    return logger


def test_loggers_that_hand_nothing_on_are_heard(apart: logging.Logger, caplog: pytest.LogCaptureFixture):
    apart.warning("to nobody else")
    logging.getLogger(__name__).warning("to all")
    assert caplog.messages == ["to nobody else", "to all"]
