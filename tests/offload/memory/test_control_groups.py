"""The control groups that hold this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from offload.memory import control_groups as module
from offload.memory.control_groups import control_groups


@pytest.mark.parametrize(
    ("own", "inner"),
    [
        ("0::/user.slice/run.scope\n", ["user.slice", "user.slice/run.scope"]),
        ("3:memory:/other\n0::/job_7\n", ["job_7"]),
        ("0::/\n", []),
        ("3:memory:/other\n", []),
        (None, []),
    ],
)
def test_groups_go_from_the_outermost_to_the_innermost(
    own: str | None, inner: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(module, "OWN_GROUPS", tmp_path / "own")
    if own is not None:
        (tmp_path / "own").write_text(own)
    assert control_groups() == [module.ROOT, *(module.ROOT / name for name in inner)]
