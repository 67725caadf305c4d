"""Functions in several threads: results in order, the first error, and systems that grant no threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from training.runs.side_by_side import side_by_side


@pytest.fixture
def granted(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Lets the system start so many more threads, and then none."""

    def granted(count: int) -> None:
        start, started = threading.Thread.start, []

        def start_or_fail(thread: threading.Thread) -> None:
            if len(started) == count:
                raise RuntimeError("can't start new thread")
            started.append(thread)
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", start_or_fail)

    return granted


@pytest.mark.parametrize("threads", [1, 3, 9])
def test_results_are_in_the_order_of_the_functions(threads: int):
    functions = [lambda number=number: (time.sleep(0.01 * (5 - number)), number)[1] for number in range(5)]
    assert side_by_side(functions, threads) == [0, 1, 2, 3, 4]
    assert side_by_side([], threads) == []


def test_they_run_side_by_side_and_the_caller_is_one_of_them():
    together = threading.Barrier(3, timeout=300)
    names = side_by_side([lambda: (together.wait(), threading.current_thread())[1]] * 3, 3)
    assert threading.current_thread() in names
    assert len(set(names)) == 3


@pytest.mark.parametrize("count", [0, 1])
def test_with_fewer_threads_the_same_is_done_and_it_is_one_warning(granted, caplog, count: int):
    granted(count)
    assert side_by_side([lambda number=number: number for number in range(6)], 4) == list(range(6))
    expected = f"can't start new thread: files are written and read in {count + 1} threads of 4"
    assert [record.message for record in caplog.records] == [expected]


@pytest.mark.parametrize("threads", [1, 3])
def test_the_first_error_ends_the_others_and_is_raised(threads: int):
    given_up = threading.Event()
    begun = []

    def wait_to_give_up() -> None:
        begun.append(None)
        given_up.wait(600)
        raise InterruptedError

    def fail() -> None:
        raise IndexError("the cause")

    with pytest.raises(IndexError, match="the cause"):
        side_by_side([fail, *[wait_to_give_up] * 20], threads, given_up)
    assert len(begun) <= threads
    assert not [thread for thread in threading.enumerate() if thread.name == "side by side"]


def test_an_interrupt_of_the_caller_ends_all_of_them(monkeypatch: pytest.MonkeyPatch):
    given_up = threading.Event()
    caller = threading.current_thread()

    def work() -> None:
        if threading.current_thread() is caller:
            raise KeyboardInterrupt
        given_up.wait(600)

    with pytest.raises(KeyboardInterrupt):
        side_by_side([work] * 8, 3, given_up)
    assert not [thread for thread in threading.enumerate() if thread.name == "side by side"]
