"""The comparison as a table: its columns, and the table on the terminal, in CSV and in Markdown."""

import csv
import io

import pytest

from training.comparison.rows import Row
from training.comparison.table import COLUMNS, MISSING, cells, explanations, print_tables, to_csv, to_latex, to_markdown
from training.metric_names import METRIC_KEYS, SUMMARY_KEYS


@pytest.fixture
def rows(write_run) -> list[Row]:
    metrics = {
        "perf__tokens_per_s": 12345.6,
        "perf__mfu": 0.4567,
        "memory__vram_peak_gib": 20.25,
        "transfer__h2d_gib": 24.5,
        "transfer__stall_ms": 180.0,
    }
    write_run("none", seed=0, step_ms=99.0)
    write_run("none", seed=1, step_ms=101.0)
    write_run("layer_stream", seed=0, step_ms=150.0, knobs={"include": ["a|b", "<i>"]}, **metrics)
    write_run("layer_stream", seed=0, knobs={"include": []}, status="failed", reason="a [broken] | line", losses=None)
    return write_run.rows()


def text_in(row: Row, title: str) -> str:
    return next(column for column in COLUMNS if column.title == title).text(row)


def markdown_rows(text: str) -> list[dict[str, str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    split = [[cell.strip() for cell in line.replace("\\|", "\0").strip("|").split("|")] for line in lines]
    return [dict(zip(split[0], cells, strict=True)) for cells in split[2:]]


def test_csv_reads_back_with_plain_numbers(rows: list[Row]):
    resident, stream, failed = csv.DictReader(io.StringIO(to_csv(rows)))
    assert (float(resident["step_ms"]), float(resident["step_ms_std"])) == (100.0, pytest.approx(2**0.5))
    assert (resident["seeds"], resident["curve"], resident["compared_with"]) == ("0, 1", "reference", "none")
    expected = {"step_ms": 150.0, "ratio_to_none": 1.5, "mfu": 0.4567, "tokens_per_s": 12345.6, "h2d_gib": 24.5}
    assert {key: float(stream[key]) for key in expected} == expected
    assert (stream["curve"], stream["compared_with"], stream["step_ms_std"]) == ("equal", "none", "")
    assert (failed["status"], failed["why"], failed["step_ms"]) == ("failed", "a [broken] | line", "")
    assert {column.name for column in COLUMNS} <= resident.keys()


def test_markdown_reads_back(rows: list[Row]):
    text = to_markdown(rows, "a sweep", "model=tiny")
    resident, stream, failed = markdown_rows(text)
    assert (resident["run"], resident["step ms"], resident["to none"]) == ("none", "100.0 ± 1.4", "1.00")
    assert (stream["tokens/s"], stream["MFU %"], stream["stall ms"]) == ("12,346", "45.7", "180.0")
    assert "<i>" not in stream["run"]
    assert "a\0b" in stream["run"]
    assert (failed["status"], failed["step ms"]) == ("failed", "\N{EN DASH}")
    assert "- layer_stream include=[]: failed: a [broken] \\| line" in text
    assert "model=tiny" in text


def test_latex_shows_text_as_it_is(rows: list[Row]):
    head, *lines = [line for line in to_latex(rows).splitlines() if line.endswith(r" \\")]
    assert head.startswith("run & step ms & to none &")
    assert "MFU \\%" in head
    assert [line.partition(" & ")[0] for line in lines] == [
        "none", r"layer\_stream include={[}a$|$b,$<$i$>$]", r"layer\_stream include={[}]"
    ]  # fmt: skip
    assert lines[0].split(" & ")[1] == r"100.0 $\pm$ 1.4"


def test_latex_leaves_out_words_that_are_the_same_in_all_rows(write_run):
    for batch_size in (8, 16):
        write_run("none", top={"batch_size": batch_size})
        write_run("layer_stream", top={"batch_size": batch_size})
    rows = write_run.rows()
    assert {"compared with", "curve", "seeds", "status"} <= cells(rows)[0].keys()
    head = next(line for line in to_latex(rows).splitlines() if line.startswith("run &"))
    assert head.endswith(r"& curve \\")


@pytest.mark.parametrize("width", [60, 100, 240])
def test_the_terminal_shows_every_value_whole_at_any_width(rows: list[Row], width: int):
    stream = io.StringIO()
    print_tables(rows, "a sweep", stream=stream, width=width)
    lines = stream.getvalue().splitlines()
    explained = [line for line in lines if "a [broken] | line" in line]
    assert len(explained) == 1
    assert max(len(line) for line in lines if line not in explained) <= width
    of_resident = " ".join(line for line in lines if line.startswith("none"))
    for value in ("100.0 ± 1.4", "1.00", "2.5000", "reference", "0, 1", "ok"):
        assert value in of_resident


def test_the_resident_run_is_named_if_there_are_several(write_run):
    for batch_size in (8, 16):
        write_run("none", top={"batch_size": batch_size})
        write_run("layer_stream", top={"batch_size": batch_size})
    rows = write_run.rows()
    named = [row["compared with"] for row in markdown_rows(to_markdown(rows, "a sweep", ""))]
    assert named == ["none batch_size=8", "none batch_size=16"] * 2
    stream = io.StringIO()
    print_tables(rows, "a sweep", stream=stream, width=60)
    assert max(map(len, stream.getvalue().splitlines())) <= 60
    assert "compared with" not in to_markdown(rows[::2], "a sweep", "")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("files=texts/*.txt,*norm*", r"files=texts/\*.txt,\*norm\*"),
        ("layer_stream _a_ __b__", r"layer_stream \_a\_ \_\_b\_\_"),
        ("include=[a] [b](http://c) `d`", r"include=[a] [b]\(http://c) \`d\`"),
        ("files=$A/x $B", r"files=\$A/x \$B"),
        ("a & <b>\nc\\|", r"a &amp; &lt;b> c\\\|"),
    ],
)
def test_markdown_shows_text_as_it_is(rows: list[Row], text: str, expected: str):
    assert to_markdown(rows, text, "").splitlines()[0] == f"**{expected}**"


def test_every_column_has_a_value_where_everything_was_measured(write_run):
    keys = [key for key in (*METRIC_KEYS, *SUMMARY_KEYS) if "/" in key and not key.startswith("train/")]
    metrics = {key.replace("/", "__"): 1.0 for key in keys} | {"devices": 2, "checkpoint__best_step": 3}
    metrics.pop("perf__step_ms")
    write_run(**metrics)
    (row,) = write_run.rows()
    assert [column.title for column in COLUMNS if column.text(row) == MISSING] == []


def test_what_was_not_measured_is_a_dash(write_run):
    write_run(losses=None, step_ms=None)
    (row,) = write_run.rows()
    assert {column.text(row) for column in COLUMNS if column.name != "devices"} == {MISSING}


@pytest.mark.parametrize(
    ("loss", "expected"), [(9999.5, "9999.5000"), (12345.678, "12346"), (-1e300, "-1e+300"), (float("inf"), "inf")]
)
def test_a_large_loss_is_written_with_its_exponent(write_run, loss: float, expected: str):
    write_run(losses=(4.0, loss))
    (row,) = write_run.rows()
    assert text_in(row, "final loss") == expected


@pytest.mark.parametrize(("times", "text"), [((100.0, 100.01), "100.0"), ((90.0, 110.0), "100.0 ± 14.1")])
def test_a_spread_that_rounds_to_zero_is_left_out_and_ratios_have_none(write_run, times, text: str):
    for seed, step_ms in enumerate(times):
        write_run(seed=seed, step_ms=step_ms)
    (row,) = write_run.rows()
    assert (text_in(row, "step ms"), text_in(row, "to none")) == (text, "1.00")


def test_what_is_said_of_several_rows_is_one_line(write_run):
    for slots in range(2, 7):
        write_run("layer_stream", knobs={"slots": slots}, status="failed", reason="the disk is full")
    write_run("none", status="failed", reason="no room")
    assert explanations(write_run.rows()) == [
        "none: failed: no room",
        "layer_stream slots=2, layer_stream slots=3, layer_stream slots=4 and 2 more: failed: the disk is full",
    ]
