"""A disk that takes no byte more: the system refuses what a process writes to files."""

import contextlib
import io
import resource
import signal
from collections.abc import Iterator

from kvbits import files


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """Files may be made and none may grow (EFBIG, an OSError as ENOSPC is); what was warned of is warned of again."""
    files._not_kept.clear()
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # pytest keeps what is printed in a file
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
        files._not_kept.clear()
