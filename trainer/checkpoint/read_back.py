"""The hash of a shard as it comes back from storage, computed while the shard is still being written.

Verifying a checkpoint after it is written takes as long again as writing it. Storage that writes and reads at the same
time has both done at about the same time.
"""

from __future__ import annotations

import hashlib
import os
import threading
from contextlib import suppress
from pathlib import Path

#: Read at once, after it has reached storage. Two may remain when the file is complete: 7 % of a shard of 70B on 2,048
#: ranks.
PIECE_BYTES = 16 << 20
_BLOCK_BYTES = 8 << 20
_POLL_S = 0.05


class ReadBack:
    """Follows a file that another thread writes from beginning to end. Linux only; elsewhere it reads nothing.

    Args:
        path: of the file, which may not exist yet. It may be renamed once :meth:`written` was called.
    """

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self._path, self._digest = path, hashlib.sha256()
        self._written = threading.Event()
        self._result: str | None = None
        # A daemon thread, so that a process can exit while its storage doesn't answer.
        self._thread = threading.Thread(target=self._run, name="checkpoint-read-back", daemon=True)
        if hasattr(os, "posix_fadvise"):
            self._thread.start()

    def written(self) -> None:
        """Note that the file is complete, or will never be."""
        self._written.set()

    def sha256(self) -> str | None:
        """Wait until all of a written file has come back; return its SHA-256. None: it could not be read."""
        if self._thread.ident:
            self._thread.join()
        return self._result

    def _run(self) -> None:
        with suppress(OSError):  # the usual verification reads the file again, and names the error
            while not self._path.exists() and not self._written.wait(_POLL_S):
                pass
            self._follow(os.open(self._path, os.O_RDONLY))

    def _follow(self, descriptor: int) -> None:
        at = 0
        try:
            while True:
                is_whole = self._written.wait(_POLL_S)
                size = os.fstat(descriptor).st_size
                while size - at >= (1 if is_whole else PIECE_BYTES):
                    at = self._read(descriptor, at, min(size, at + PIECE_BYTES))
                if is_whole:
                    self._result = self._digest.hexdigest()
                    return
        finally:
            os.close(descriptor)

    def _read(self, descriptor: int, begin: int, end: int) -> int:
        """Read a piece from storage, not from the page cache; return where it ended."""
        os.fdatasync(descriptor)  # pages that aren't on storage yet can't be dropped
        os.posix_fadvise(descriptor, begin, end - begin, os.POSIX_FADV_DONTNEED)
        while begin < end:
            block = os.pread(descriptor, min(_BLOCK_BYTES, end - begin), begin)
            if not block:
                raise OSError(f"{self._path}: has become shorter")
            self._digest.update(block)
            begin += len(block)
        return begin
