"""Names of models on the Hugging Face Hub, and one request to it, whose failures are explained in a line."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from training.errors import UserError, first_line

# Without network the client alone would retry for half a minute.
TIMEOUT_S = 5.0


class HubName(NamedTuple):
    """The name of a model on the Hub, and the branch, tag or commit that is taken; None: the newest."""

    name: str
    revision: str | None = None

    @classmethod
    def of(cls, given: str) -> HubName | None:
        """Reads OWNER/NAME or OWNER/NAME@REVISION; None for anything else. A path of two parts looks the same."""
        found = re.fullmatch(r"([\w-][\w.-]*/[\w.-]+)(?:@([\w][\w./-]*))?", given)
        return found and cls(*found.groups())

    def by_hand(self, key: str) -> str:
        """Returns what to do where the Hub cannot be reached, for the key that the name was given for."""
        revision = f" --revision {self.revision}" if self.revision else ""
        command = f"hf download {self.name}{revision} --local-dir DIR"
        return f"or run `{command}` where there is a network, and give {key}=DIR"


def ask_hub(request: Callable[..., Any], name: str, given: str, kind: str, otherwise: str) -> Any:
    """Calls `request(name, timeout=...)` of the Hub's client and returns its answer.

    Args:
        given: the key with its value, with which a message begins.
        kind: what `name` is the name of, such as dataset.
        otherwise: what to do where the Hub cannot be reached.

    Raises:
        UserError: no network, no such repository or revision, or no permission to read it.
    """
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return request(name, timeout=TIMEOUT_S)
    except GatedRepoError as error:
        raise UserError(
            f"{given}: needs its owner's permission; ask for it on huggingface.co, then set HF_TOKEN"
        ) from error
    except (HFValidationError, RepositoryNotFoundError) as error:
        raise UserError(
            f"{given}: no such {kind} on the Hub; check the spelling (OWNER/NAME), and set HF_TOKEN if it is private"
        ) from error
    except RevisionNotFoundError as error:
        raise UserError(f"{given}: that {kind} has no such revision: give a branch, a tag or a commit of it") from error
    except Exception as error:  # each release of the client may use another HTTP library, with other errors
        raise UserError(
            f"{given}: the Hugging Face Hub did not answer ({first_line(error)}); check the network, {otherwise}"
        ) from error
