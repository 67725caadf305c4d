"""Makes text of foreign origin safe to print and to write into reports."""

import logging
import unicodedata

ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"


def visible(text: object) -> str:
    r"""Returns `str(text)` with an escape such as `\x1b` in place of each character that is not printable.

    Names of files, values and errors may have any characters: control codes, line breaks, marks that reverse the order
    of letters, surrogates. The result is one line that can be encoded; bytes of names that are not UTF-8 are escaped
    as bytes.
    """
    text = str(text)
    return text if text.isprintable() else "".join(map(_escaped, text))


def visible_lines(text: str) -> str:
    """Returns text of several lines, each as `visible` makes it."""
    return "\n".join(map(visible, text.split("\n")))


def shortened(text: str, longest: int) -> str:
    """Cuts the middle out of a text of more than `longest` characters."""
    kept = longest - len(ELLIPSIS)
    return text if len(text) <= longest else f"{text[: kept - kept // 2]}{ELLIPSIS}{text[len(text) - kept // 2 :]}"


def _escaped(character: str) -> str:
    # Spaces of other widths count as not printable, and do no harm.
    if character.isprintable() or unicodedata.category(character) == "Zs":
        return character
    code = ord(character)
    # Python's surrogateescape for names of files.
    if 0xDC80 <= code <= 0xDCFF:
        return f"\\x{code - 0xDC00:02x}"
    return character.encode("unicode_escape").decode("ascii")


class VisibleFormatter(logging.Formatter):
    """Formats log records, which may quote names of files and texts of errors, with `visible_lines`."""

    def format(self, record: logging.LogRecord) -> str:
        return visible_lines(super().format(record))
