"""The benchmark beside TRL runs on the CPU: its rows are of the same model, chats and number of tokens."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench_trl import write_chats
from tests import ROOT


def test_chats_are_the_same_each_time(tmp_path: Path):
    for name in "ab":
        write_chats(tmp_path / name, 20)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    rows = [json.loads(line)["messages"] for line in (tmp_path / "a").read_text().splitlines()]
    assert len(rows) == 20
    assert all([m["role"] for m in row] == ["user", "assistant"] * (len(row) // 2) for row in rows)


def test_answers_of_long_chats_have_as_many_letters(tmp_path: Path):
    write_chats(tmp_path / "long", 3, 5000)
    rows = [json.loads(line)["messages"] for line in (tmp_path / "long").read_text().splitlines()]
    assert {len(turn["content"]) for row in rows for turn in row[1::2]} == {5000}
    assert all(20 <= len(turn["content"]) <= 3000 for row in rows for turn in row[::2])


@pytest.mark.slow
def test_every_row_is_measured():
    pytest.importorskip("trl")
    small = (
        "--device cpu --model tiny_qwen3 --modes none --steps 2 --warmup 1 --chats 40 --set seq_len=256 batch_size=2"
    )
    command = [sys.executable, "scripts/bench_trl.py", *small.split(), "--long"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    _, _, none, trl = done.stdout.strip().splitlines()
    assert none.startswith("none ")
    assert trl.startswith("TRL, sdpa ")
    assert all(float(cell) > 0 for row in (none, trl) for cell in row[24:].split()[:3])
