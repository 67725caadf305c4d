"""The error that users can fix themselves."""

from collections.abc import Iterator
from contextlib import contextmanager


class UserError(Exception):
    """A mistake or a missing resource that the user can fix.

    The message is one line: it names the key or file, the value found, and what to do. The entry point prints it
    without a traceback and exits non-zero. `status` goes into the run's summary.
    """

    status = "failed"


@contextmanager
def as_user_error(before: str, errors: type | tuple[type, ...] = ValueError, *, after: str = "") -> Iterator[None]:
    """Raises errors of the block as a UserError, whose message has texts `before` and `after` theirs.

    Of any `Exception`, which may be long, the first line is taken.
    """
    try:
        yield
    except UserError:
        raise
    except errors as error:
        raise UserError(f"{before}{first_line(error) if errors is Exception else error}{after}") from error


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or the name of its type if there is no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
