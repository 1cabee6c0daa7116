"""A disk small enough to be filled: a tmpfs of bubblewrap's, which only the processes started inside see."""

from __future__ import annotations

import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

_BLOCK = bytes(1 << 20)


def why_unavailable() -> str:
    """Why there can be none here, with what helps; empty if there can."""
    bwrap = shutil.which("bwrap")
    if not sys.platform.startswith("linux") or bwrap is None:
        return "needs bubblewrap (apt-get install bubblewrap)"
    tried = subprocess.run([bwrap, "--dev-bind", "/", "/", "--", "/bin/true"], capture_output=True, check=False)
    return "" if tried.returncode == 0 else "bubblewrap does not work here (sysctl user.max_user_namespaces)"


def command(folder: Path, size_bytes: int) -> list[str]:
    """Words that run the words after them where a folder is such a disk, and everything else is as it was."""
    return ["bwrap", "--dev-bind", "/", "/", "--size", str(size_bytes), "--tmpfs", str(folder), "--"]


def seen_from_outside(pid: int | None, folder: Path) -> Path:
    """The folder as a process sees it that runs inside."""
    return Path(f"/proc/{pid}/root") / folder.relative_to("/")


def fill(ballast: Path) -> None:
    """Write a file until its disk has not a byte left."""
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(_BLOCK):
            pass
