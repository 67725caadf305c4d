import errno
import json
import math
import os

import pytest

from training.errors import UserError
from training.runs.records import MetricsWriter, read_metrics, read_summary, write_summary


def test_records_are_read_back_in_order(tmp_path):
    records = [{"train/step": step, "train/loss": 1 / step} for step in (1, 2, 3)]
    writer = MetricsWriter(tmp_path)
    for written, record in enumerate(records, start=1):
        writer.write(record)
        assert read_metrics(tmp_path) == records[:written]  # in the file at once


def test_a_loss_that_diverged_stays_visible_in_strict_json(tmp_path):
    MetricsWriter(tmp_path).write({"train/step": 7, "train/loss": math.nan, "train/grad_norm": -math.inf})

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=refuse) == {
        "train/step": 7,
        "train/loss": None,
        "train/grad_norm": None,
        "nonfinite": {"train/loss": "nan", "train/grad_norm": "-inf"},
    }
    (record,) = read_metrics(tmp_path)
    assert math.isnan(record["train/loss"])
    assert record["train/grad_norm"] == -math.inf
    assert "nonfinite" not in record


def test_an_unfinished_last_line_is_no_record(tmp_path):
    MetricsWriter(tmp_path).write({"train/step": 1})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"train/step": 2}')  # valid JSON, but a killed run may have meant 25
    assert read_metrics(tmp_path) == [{"train/step": 1}]

    MetricsWriter(tmp_path, after_step=1).write({"train/step": 3})  # the run resumed
    assert read_metrics(tmp_path) == [{"train/step": 1}, {"train/step": 3}]


@pytest.mark.parametrize("damage", ["{", "[1]", "NaN"])
def test_a_damaged_line_is_named(tmp_path, damage):
    (tmp_path / "metrics.jsonl").write_text(f'{{"train/step": 1}}\n{damage}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl: line 2 is not a record"):
        read_metrics(tmp_path)


BROKEN = ["\0\0\0\0", "{", "[1]", '{"train/step": "4"}', '{"nonfinite": 3}', "\udc80"]


def lines_of(*steps_or_lines: int | str) -> bytes:
    lines = [line if isinstance(line, str) else json.dumps({"train/step": line}) for line in steps_or_lines]
    return "".join(f"{line}\n" for line in lines).encode(errors="surrogateescape")


@pytest.mark.parametrize("broken", BROKEN, ids=[repr(line[:12]) for line in BROKEN])
@pytest.mark.parametrize("after", [(), (6,), ("\0", 6, 8)], ids=str)
def test_a_resumed_run_cuts_a_broken_line_and_makes_again_what_followed(tmp_path, caplog, broken, after):
    (tmp_path / "metrics.jsonl").write_bytes(lines_of(1, 2, broken, *after))
    MetricsWriter(tmp_path, after_step=3)
    assert read_metrics(tmp_path) == [{"train/step": 1}, {"train/step": 2}]
    assert (tmp_path / "metrics.jsonl").read_bytes() == lines_of(1, 2)
    assert "metrics.jsonl: line 3 is not a record: it is cut off" in caplog.text


@pytest.mark.parametrize("broken", BROKEN, ids=[repr(line[:12]) for line in BROKEN])
def test_a_broken_line_before_records_that_would_be_lost_is_refused(tmp_path, broken):
    content = lines_of(1, broken, 6, 2, 8)
    (tmp_path / "metrics.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=r"metrics\.jsonl: line 2 is not a record; the file is damaged"):
        MetricsWriter(tmp_path, after_step=3)
    assert (tmp_path / "metrics.jsonl").read_bytes() == content


@pytest.mark.parametrize(("step", "left"), [(0, 0), (2, 2), (3, 2), (8, 4)])
def test_a_resumed_run_drops_later_records(tmp_path, caplog, step, left):
    (tmp_path / "metrics.jsonl").write_bytes(lines_of(1, 2, 6, 8) + b'{"train')
    MetricsWriter(tmp_path, after_step=step)
    assert (tmp_path / "metrics.jsonl").read_bytes() == lines_of(*(1, 2, 6, 8)[:left])
    assert not caplog.text


def test_missing_files_are_named(tmp_path):
    with pytest.raises(UserError, match=r"metrics\.jsonl: no such file"):
        read_metrics(tmp_path)
    with pytest.raises(UserError, match=r"summary\.json: no such file"):
        read_summary(tmp_path)


def test_a_line_that_fits_in_part_is_taken_back(tmp_path, monkeypatch):
    writer = MetricsWriter(tmp_path)
    writer.write({"train/step": 1})
    real_open = open

    def open_on_a_nearly_full_disk(*args, **kwargs):
        file = real_open(*args, **kwargs)

        class NearlyFull:
            def __enter__(self):
                return self

            def __exit__(self, *exception):
                file.close()

            def tell(self):
                return file.tell()

            def write(self, line):
                return file.write(line[:5])

        return NearlyFull()

    monkeypatch.setattr("builtins.open", open_on_a_nearly_full_disk)
    with pytest.raises(UserError, match="full"):
        writer.write({"train/step": 2})
    monkeypatch.undo()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"train/step": 1}\n'


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    missing = tmp_path / "gone"
    for write in (lambda: MetricsWriter(missing), lambda: write_summary(missing, {})):
        with pytest.raises(UserError, match=f"{missing}: cannot write"):
            write()


def test_summary_is_replaced_whole(tmp_path, monkeypatch):
    write_summary(tmp_path, {"status": "ok", "train/final_loss": 2.5})
    assert read_summary(tmp_path) == {"status": "ok", "train/final_loss": 2.5}

    def full(file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="full"):
        write_summary(tmp_path, {"status": "failed"})
    assert read_summary(tmp_path)["status"] == "ok"
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_the_evaluation_before_the_first_step_is_made_again(tmp_path):
    MetricsWriter(tmp_path).write({"train/step": 0, "eval/loss": math.inf})
    assert read_metrics(tmp_path) == [{"train/step": 0, "eval/loss": math.inf}]
    MetricsWriter(tmp_path, after_step=2)
    assert len(read_metrics(tmp_path)) == 1
    MetricsWriter(tmp_path, after_step=-1)
    assert read_metrics(tmp_path) == []
