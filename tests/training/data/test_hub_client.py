"""Requests to the Hugging Face Hub, with a client that is not asked."""

import pytest

from training.data.hub_client import TIMEOUT_S, HubName, ask_hub
from training.errors import UserError


def test_the_answer_is_returned_within_a_short_time():
    assert ask_hub(lambda name, timeout: (name, timeout), "me/x", "KEY=me/x", "model", "") == ("me/x", TIMEOUT_S)


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("me/x", ("me/x", None)),
        ("me/x-1.5@v2", ("me/x-1.5", "v2")),
        ("me/x@refs/pr/1", ("me/x", "refs/pr/1")),
        ("me/x@", None),
        ("me/x@-v", None),
        ("me", None),
        ("me/x/y", None),
        ("./x", None),
    ],
)
def test_a_name_may_have_a_revision(given: str, read: tuple | None):
    assert HubName.of(given) == read


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("GatedRepoError", "KEY=me/x: needs its owner's permission"),
        ("RepositoryNotFoundError", "KEY=me/x: no such model on the Hub; check the spelling"),
        ("RevisionNotFoundError", "KEY=me/x: that model has no such revision: give a branch, a tag or a commit of it"),
        ("OSError", r"KEY=me/x: the Hugging Face Hub did not answer \(down\); check the network, or stay at home"),
    ],
)
def test_a_failure_is_one_line(kind: str, message: str):
    from huggingface_hub import errors

    error = getattr(errors, kind, OSError)

    def refuses(name: str, timeout: float):
        # The client's errors want the response of its HTTP library.
        raise error("down\nmore") if error is OSError else error.__new__(error)

    with pytest.raises(UserError, match=message) as raised:
        ask_hub(refuses, "me/x", "KEY=me/x", "model", "or stay at home")
    assert "\n" not in str(raised.value)
