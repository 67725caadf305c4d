"""One request to the Hugging Face Hub, whose failures are explained in a line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from training.errors import UserError, first_line

# Without network the client alone would retry for half a minute.
TIMEOUT_S = 5.0


def ask_hub(request: Callable[..., Any], name: str, given: str, kind: str, otherwise: str) -> Any:
    """Calls `request(name, timeout=...)` of the Hub's client and returns its answer.

    Args:
        given: the key with its value, with which a message begins.
        kind: what `name` is the name of, such as dataset.
        otherwise: what to do where the Hub cannot be reached.

    Raises:
        UserError: no network, no such repository, or no permission to read it.
    """
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

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
    except Exception as error:  # each release of the client may use another HTTP library, with other errors
        raise UserError(
            f"{given}: the Hugging Face Hub did not answer ({first_line(error)}); check the network, {otherwise}"
        ) from error
