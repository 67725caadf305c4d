import io
import logging
import math
import os
import pty
import re
import select
import sys
import termios

import pytest

from training.metric_names import METRIC_KEYS
from training.metrics.progress import Progress, format_value, phase, print_brief, print_plan, print_summary

RECORD = {"train/loss": 5.25, "perf/tokens_per_s": 12345.6, "memory/vram_peak_gib": 3.21, "memory/rss_gib": 1.5}


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    for variable in ("FORCE_COLOR", "TTY_COMPATIBLE", "NO_COLOR"):
        monkeypatch.delenv(variable, raising=False)


def line_of(record):
    stream = io.StringIO()
    Progress(9, stream=stream).update(1, RECORD | record)
    return stream.getvalue()


def report_of(summary, run_dir):
    stream = io.StringIO()
    print_summary(summary, run_dir, stream=stream)
    return stream.getvalue()


def test_into_a_file_one_plain_line_for_each_logged_step():
    stream = io.StringIO()
    progress = Progress(200, stream=stream)
    for step in range(1, 201):
        progress.update(step, RECORD if step % 100 == 0 else None)
    progress.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("step 100/200  loss 5.2500  12.3k tokens/s  VRAM 3.21 GiB  ETA 00:")
    assert lines[1].startswith("step 200/200")
    assert stream.getvalue().isascii()
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", stream.getvalue())


def test_pairs_of_answers_have_a_margin():
    line = line_of({"train/reward_margin": -0.25, "train/reward_accuracy": 0.5})
    assert "  loss 5.2500  margin -0.250 (50% right)  12.3k tokens/s" in line


def test_eta_is_the_time_that_the_steps_left_will_take(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("training.metrics.progress.time.monotonic", lambda: now[0])
    stream = io.StringIO()
    progress = Progress(50, initial_step=10, stream=stream)
    now[0] += 20.0  # 10 steps of 2 s, 30 to go
    progress.update(20, RECORD)
    assert stream.getvalue().rstrip().endswith("ETA 01:00")


def test_without_a_gpu_host_memory_is_shown_and_a_diverged_loss_as_it_is():
    line = line_of({"memory/vram_peak_gib": 0.0, "train/loss": math.nan})
    assert "RSS 1.50 GiB" in line
    assert "VRAM" not in line
    assert "loss nan" in line


def test_on_a_terminal_a_bar_within_80_columns():
    controller, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 80))
    with open(terminal, "w") as stream:
        progress = Progress(1000, stream=stream)
        for step in (1, 500, 1000):
            progress.update(step, RECORD)
        progress.close()
        shown = b""
        # A busy terminal gives it in pieces.
        while b"1000/1000" not in shown or not shown.endswith(b"\n"):
            assert select.select([controller], [], [], 300)[0], shown
            shown += os.read(controller, 2**16)
        drawn = re.split(r"[\r\n]+", shown.decode())
    os.close(controller)
    last = [line for line in drawn if "1000/1000" in line][-1]
    for part in ("training 1000/1000 |", "ETA 00:00", "loss 5.2500", "12.3k tokens/s", "VRAM 3.21 GiB"):
        assert part in last
    assert max(len(line) for line in drawn) <= 80


def test_the_bar_moves_at_steps_that_are_not_logged(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    stream, plain = Terminal(), io.StringIO()
    bars = [Progress(10, stream=stream), Progress(10, stream=plain)]
    for bar in bars:
        bar.update(1)
    now[0] += 2
    for bar in bars:
        bar.update(2, RECORD)
    now[0] += 2
    for bar in bars:
        bar.update(3)
        bar.close()
    last = stream.getvalue().strip().splitlines()[-1].rsplit("\r", 1)[-1]
    assert re.search(r"3/10 \|.*\| ETA 00:\d\d, loss 5.2500", last), last
    assert plain.getvalue().count("\n") == 1


def test_a_phase_is_shown_on_a_terminal_until_it_ends():
    stream, plain = Terminal(), io.StringIO()
    for output in (stream, plain):
        with phase("planning", stream=output):
            shown = output.getvalue()
    assert "planning ..." in stream.getvalue()
    assert not stream.getvalue().rsplit("\r", 1)[-1].strip()
    assert shown == plain.getvalue() == ""


def test_a_resumed_bar_starts_where_the_run_was():
    stream = Terminal()
    progress = Progress(100, initial_step=60, stream=stream)
    assert "60/100" in stream.getvalue()
    progress.update(61, RECORD)
    progress.close()
    progress.close()
    assert "61/100" in stream.getvalue()


def test_log_lines_do_not_run_through_the_bar(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    handler = logging.StreamHandler(stream)
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [handler])
    progress = Progress(10, stream=stream)
    progress.update(3, RECORD)
    before_line = stream.tell()
    root.warning("disk nearly full")
    added = stream.getvalue()[before_line:]
    progress.close()
    before, after = added.split("disk nearly full\n")
    assert not before.rsplit("\r", 1)[-1].strip()  # the line starts on an emptied row
    assert "3/10" in after  # and the bar is drawn again below
    assert root.handlers == [handler]


def test_plan_shows_every_row_and_folds_long_values():
    stream = io.StringIO()
    path = "/somewhere/" + "long/" * 30
    print_plan({"model": "tiny", "run directory": path}, stream=stream)
    lines = stream.getvalue().splitlines()
    assert max(len(line) for line in lines) <= 120
    assert "".join(re.findall(r"[\w/]+(?= +│$)", "\n".join(lines[3:]), re.MULTILINE)) == path
    assert "\x1b" not in stream.getvalue()


def test_a_brief_plan_has_a_line_for_each_note_and_folds_other_values():
    stream = io.StringIO()
    print_brief({"chosen": "lr 1, " * 30, "note 1": "of a weight, " * 30}, "Plan: [x]", stream=stream)
    title, *lines = stream.getvalue().splitlines()
    assert title.startswith("Plan: [x] (plan=true ")
    assert max(map(len, lines)) <= 120
    assert [line[:6] for line in lines] == ["chosen", "      ", "note 1"]
    assert lines[-1].rstrip().endswith("…")


def test_report_has_every_figure_with_its_unit_and_where_to_look(tmp_path):
    run_dir = tmp_path / ("deep " * 20)
    (run_dir / "wandb").mkdir(parents=True)
    summary = {key: 1234.5 for key, metric in METRIC_KEYS.items() if metric.summary}
    summary |= {"steps": 100, "train/final_loss": 2.5, "status": "ok", "reason": None}
    text = report_of(summary, run_dir)
    for key in summary.keys() - {"status", "reason"}:
        (row,) = [line for line in text.splitlines() if line.startswith(f"│ {key} ")]
        assert len(row) <= 80
        if key in METRIC_KEYS:
            assert METRIC_KEYS[key].unit in row
            assert METRIC_KEYS[key].summary in row
    assert re.search(r"perf/step_ms +│ +1,234 │ ms, median", text)
    assert f"files   {run_dir}\n" in text
    assert f"wandb leet '{run_dir}/wandb'\n" in text
    assert "run ok\n" in text


def test_report_leaves_out_metrics_of_zero(tmp_path):
    summary = {"steps": 0, "memory/vram_peak_gib": 0.0, "transfer/h2d_gib": 0.0, "planned/transfer/h2d_gib": 1.0}
    text = report_of(summary, tmp_path)
    assert "steps" in text
    assert "h2d_gib" in text
    assert "vram" not in text


def test_report_of_a_failed_run_says_why(tmp_path):
    reason = "out of memory on cuda:0 [7.9 of 8.0 GiB]"
    text = report_of({"steps": 0, "status": "out_of_memory", "reason": reason}, tmp_path)
    assert f"run out_of_memory: {reason}\n" in text
    assert "wandb" not in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (100, "100"),
        (123456, "123,456"),
        (123456.7, "123,457"),
        (12.3456, "12.35"),
        (1e-5, "1e-05"),
        (math.nan, "nan"),
        ("ok", "ok"),
    ],
)
def test_format_value(value, text):
    assert format_value(value) == text


def test_names_are_shown_as_they_are(tmp_path):
    name = "[/x] [red]a :boom: \x1b[2J\u202e"
    shown = r"[/x] [red]a :boom: \x1b[2J\u202e"
    stream = io.StringIO()
    print_plan({name: name}, title=name, stream=stream)
    assert stream.getvalue().count(shown) == 3
    report = report_of({"status": "stopped", "reason": name}, tmp_path / "[b]")
    assert report.count(shown) == 1
    assert f"files   {tmp_path}/[b]" in report


def test_a_note_is_one_line_whatever_is_in_it():
    stream = io.StringIO()
    Progress(9, stream=stream).note("sample: a\nb\x1b[31m\tc")
    assert stream.getvalue() == "sample: a\\nb\\x1b[31m\\tc\n"
