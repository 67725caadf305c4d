"""The groups of the folder conf/, and its offload modes: files, described by the comment that these begin with."""

from pathlib import Path

from tests import ROOT
from training.config.modes import ModeOption, all_options, is_group, mode_options, modes_table, options_of


def test_every_file_is_an_option_and_none_is_the_first():
    options = all_options()
    assert set(options) == {path.stem for path in (ROOT / "conf" / "offload").glob("*.yaml")}
    assert next(iter(options)) == "none"
    assert all(option.description.endswith(".") for option in options.values())


def test_systems_of_others_are_no_modes_of_this_repository():
    others = all_options().keys() - mode_options().keys()
    assert {"fsdp2", "ramtorch"} <= others
    assert others == {name for name, option in all_options().items() if (option.target or "").startswith("peers.")}


def test_an_option_is_read_from_its_file(tmp_path: Path):
    (tmp_path / "mine.yaml").write_text(
        "# Does this\n# and that.\ndefaults: [a]\n_target_: my.Mode\n# Not this.\nslots: 3\n"
    )
    (tmp_path / "based.yaml").write_text("# Builds on mine.\ndefaults:\n  - mine\n")
    assert mode_options(tmp_path) == {
        "based": ModeOption("based", "Builds on mine.", None),
        "mine": ModeOption("mine", "Does this and that.", "my.Mode"),
    }


def test_the_table_has_a_line_for_each():
    table = modes_table({"a": ModeOption("a", "Does this.", None), "b": ModeOption("b", "Does that.", "x.Y")})
    assert table.splitlines() == [
        "| `offload=` | what it does |",
        "|---|---|",
        "| `a` | Does this. |",
        "| `b` | Does that. |",
    ]


def test_groups_and_their_options_are_those_of_the_folder():
    assert is_group("offload")
    assert not is_group("steps")
    assert not is_group("offload/none")
    assert {"none", "layer_stream"} <= {*options_of("offload")}
    assert options_of("steps") == []
