"""The keys of datasets that contradict each other or are of no use."""

import pytest

from tests.training.helpers.in_process import composed
from training.config.validation import check
from training.errors import UserError


@pytest.mark.parametrize(
    "overrides",
    [
        ("dataset.files=a.jsonl",),
        ("dataset.files=[a.jsonl,b.json]", "dataset.eval_files=c.parquet"),
        ("dataset.name=owner/name", "dataset.columns={messages: chat, system: null}"),
    ],
)
def test_what_is_right_passes(overrides: tuple[str, ...]) -> None:
    check(composed("dataset=chat", *overrides)[0])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((), r"^dataset.files=null dataset.name=null: give one of them: files=PATH of .jsonl, .json or .parquet files"),
        (
            ("dataset.files=a.jsonl", "dataset.name=a/b"),
            "dataset.files=a.jsonl dataset.name=a/b: give one of them, and",
        ),
        (("dataset.files=a.jsonl", "dataset.split=test"), "dataset.split=test: has no effect on dataset.files"),
        (("dataset.files=3",), r"dataset.files=3: must be a path or pattern \(chats/\*.jsonl\), or a list of them"),
        (("dataset.files=a.jsonl", "dataset.eval_files=[]"), r"dataset.eval_files=\[\]: must be a path or pattern"),
        (("dataset.files=a.jsonl", "dataset.columns=chat"), "dataset.columns=chat: must be names by names"),
        (("dataset.files=a.jsonl", "dataset.columns={messages: 3}"), "dataset.columns=.*: must be names by names"),
    ],
)
def test_mistakes_are_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        check(composed("dataset=chat", *overrides)[0])

    assert "\n" not in str(caught.value)
