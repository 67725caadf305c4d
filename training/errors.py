"""What a run that ends early tells its user: one line where he can mend the cause, a traceback where he cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


class UserError(Exception):
    """A mistake or a missing resource that the user can mend.

    The message is one line: it names the key or file, the value found, and what to do. The entry point prints it
    without a traceback and exits non-zero. `status` is that of the run's summary.
    """

    status = "failed"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type's name where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
