"""Errors whose message is meant for the person who started the run."""


class UserError(Exception):
    """A mistake or a missing resource that the user can mend.

    The message is one line: it names the key or file, the value found, and what to do. The entry point prints it
    without a traceback and exits non-zero.
    """
