"""The statistics that sum up a run."""

import weakref

from training.metrics.run_summary import RunSummary, summarise


def record(step, **values):
    return {"train/step": step, "train/loss": 10.0 - step} | {k.replace("__", "/"): v for k, v in values.items()}


def test_summarise_leaves_warm_up_out_of_times_but_not_of_peaks():
    records = [
        record(1, perf__step_ms=900.0, memory__vram_peak_gib=9.0, transfer__h2d_gib=50.0),
        record(4, perf__step_ms=800.0, memory__vram_peak_gib=8.0, transfer__h2d_gib=40.0),
        record(5, perf__step_ms=30.0, memory__vram_peak_gib=2.0, transfer__h2d_gib=4.0),
        record(6, perf__step_ms=10.0, memory__vram_peak_gib=3.0, transfer__h2d_gib=8.0),
        record(7, perf__step_ms=20.0, memory__vram_peak_gib=1.0, transfer__h2d_gib=3.0),
    ]
    assert summarise(records, warmup_steps=4, total_steps=9) == {
        "steps": 9,
        "train/first_loss": 9.0,
        "train/final_loss": 3.0,
        "perf/step_ms": 20.0,
        "memory/vram_peak_gib": 9.0,
        "transfer/h2d_gib": 5.0,
    }


def test_a_record_over_the_end_of_the_warm_up_counts_only_where_no_later_one_is():
    records = [record(10, perf__step_ms=90.0, transfer__h2d_gib=5.0)]
    assert summarise(records, warmup_steps=5, total_steps=10)["transfer/h2d_gib"] == 5.0
    records += [{"train/step": 10, "eval/loss": 3.0}, record(20, perf__step_ms=20.0, transfer__h2d_gib=4.0)]
    records += [record(30, perf__step_ms=30.0, transfer__h2d_gib=4.0)]
    summary = summarise(records, warmup_steps=5, total_steps=30)
    assert (summary["perf/step_ms"], summary["transfer/h2d_gib"]) == (25.0, 4.0)
    # The last step of the warm-up ends a record.
    assert summarise(records, warmup_steps=10, total_steps=30)["perf/step_ms"] == 25.0
    assert summarise(records, warmup_steps=0, total_steps=30)["perf/step_ms"] == 30.0


def summary_of_resumed(start: int, *records, warmup_steps: int = 2) -> float:
    summary = RunSummary(warmup_steps, start)
    for each in records:
        summary.add(each)
    return summary.values()["perf/step_ms"]


def test_a_run_that_resumes_and_ends_in_its_warm_up_counts_the_steps_behind_the_first():
    earlier = [record(step, perf__step_ms=ms) for step, ms in enumerate((900.0, 800.0, 10.0, 30.0), 1)]
    warming_up = [record(5, perf__step_ms=700.0), record(6, perf__step_ms=600.0)]
    assert summary_of_resumed(4, *earlier, *warming_up) == 20.0
    assert summary_of_resumed(4, *earlier, *warming_up, record(7, perf__step_ms=40.0)) == 40.0
    # One that ends behind this run's warm-up is of this run's steps.
    assert summary_of_resumed(4, *earlier, record(8, perf__step_ms=50.0)) == 50.0
    # Both end in a warm-up: there is nothing better than all.
    assert summary_of_resumed(1, earlier[0], record(2, perf__step_ms=700.0)) == 800.0
    # The steps before are in one record, which spans the end of their warm-up.
    assert summary_of_resumed(4, record(4, perf__step_ms=100.0), *warming_up) == 100.0
    # It was saved between two records: the steps of its first one are its own.
    own = [record(step, perf__step_ms=ms) for step, ms in ((10, 30.0), (20, 50.0))]
    assert summary_of_resumed(7, *own, warmup_steps=0) == 40.0


def test_summarise_short_and_empty_runs():
    assert summarise([record(2, perf__step_ms=7.0)], warmup_steps=5, total_steps=2)["perf/step_ms"] == 7.0
    assert summarise([], warmup_steps=5, total_steps=0) == {"steps": 0}


def test_a_summary_keeps_no_record():
    class Record(dict):
        """A dict that can be weakly referenced."""

    summary = RunSummary(warmup_steps=0)
    kept = Record(record(1, perf__step_ms=7.0, memory__rss_gib=2.0))
    gone = weakref.ref(kept)
    summary.add(kept)
    del kept
    assert gone() is None
    assert summary.values()["perf/step_ms"] == 7.0


def test_the_first_loss_is_that_of_the_first_step_and_evaluations_are_no_logged_steps():
    records = [
        {"train/step": 0, "eval/loss": 8.0, "eval/ms": 5.0},
        record(4, train__first_loss=9.5, perf__step_ms=7.0),
        {"train/step": 7, "eval/loss": 3.0, "eval/ms": 7.0},
    ]
    assert summarise(records, warmup_steps=5, total_steps=7) == {
        "steps": 7,
        "eval/final_loss": 3.0,
        "train/first_loss": 9.5,
        "train/final_loss": 6.0,
        "perf/step_ms": 7.0,
        "eval/ms": 6.0,
    }
