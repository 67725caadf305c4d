"""Writes a file so that a reader sees its old content or its new one, and never a part."""

import os
from pathlib import Path

from training.runs.files import partial_path


def write_whole(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Writes `content` to a temporary file, and renames that to `path`.

    `durable`: the content is on the disk before it takes the place of the old one, so that a power failure leaves one
    of the two as well. Raises OSError; then `path` is as it was, and the temporary file is gone.
    """
    partial = partial_path(path)
    # A leftover may be a pipe or a link, to which the content must not go.
    partial.unlink(missing_ok=True)
    try:
        with open(partial, "xb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
