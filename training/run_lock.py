"""One run at a time in a directory."""

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from training.errors import UserError
from training.run_files import LOCK_FILE, refuse_links

logger = logging.getLogger(__name__)


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Holds the directory for this process; the system releases it however the process ends.

    The file stays: were it removed, two that wait for it could each hold another file of that name. Raises UserError
    where another process holds the directory, or a file that a run writes there is a link.
    """
    refuse_links(run_dir)
    path = run_dir / LOCK_FILE
    # A link made since would have another file cut to nothing.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
    with open(descriptor, "a+b", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read(20).decode(errors="replace").strip()
            raise UserError(
                f"{run_dir}: another run writes to this directory{f' (process {holder})' if holder else ''}: wait until"
                " it has ended, or choose another place with hydra.run.dir=PATH"
            ) from None
        except OSError as error:
            logger.warning("%s: cannot be locked (%s), so two runs at once would go unnoticed", run_dir, error.strerror)
        # For the message above; a full disk is for the run to report.
        with suppress(OSError):
            file.truncate(0)
            file.write(f"{os.getpid()}\n".encode())
        yield
