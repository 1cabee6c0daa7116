"""A disk small enough to be filled: a tmpfs of bubblewrap's, which every process of this user can use."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hlatctl.run import processes

_BLOCK = bytes(1 << 20)


def why_unavailable() -> str:
    """Why there can be none here, with what helps; empty if there can."""
    bwrap = shutil.which("bwrap")
    if not sys.platform.startswith("linux") or bwrap is None:
        return "needs bubblewrap (apt-get install bubblewrap)"
    tried = subprocess.run([bwrap, "--dev-bind", "/", "/", "--", "/bin/true"], capture_output=True, check=False)
    return "" if tried.returncode == 0 else "bubblewrap does not work here (sysctl user.max_user_namespaces)"


@contextmanager
def under(folder: Path, size_bytes: int) -> Iterator[None]:
    """Put a folder, with all that it holds, on a disk of its own; afterwards it is a plain folder again.

    Bubblewrap mounts the disk for a process that only keeps it. Others reach it through that process's root in /proc,
    which is where the folder's path leads meanwhile.
    """
    mount = folder.with_name(f".{folder.name}.disk")
    mount.mkdir()
    words = ["bwrap", "--dev-bind", "/", "/", "--die-with-parent", "--size", str(size_bytes), "--tmpfs", str(mount)]
    with subprocess.Popen([*words, "--", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as keeper:
        assert keeper.stdin
        assert keeper.stdout
        keeper.stdin.write(b"\n")
        keeper.stdin.flush()
        keeper.stdout.readline()  # it answers: the disk is there
        pid = (processes.descendants(keeper.pid) or [keeper.pid])[-1]
        on_disk = Path(f"/proc/{pid}/root") / mount.relative_to("/") / folder.name
        _replace(folder, on_disk)
        try:
            yield
        finally:
            folder.unlink()
            shutil.copytree(on_disk, folder)
            keeper.stdin.close()  # its end is the disk's
    mount.rmdir()


def fill(ballast: Path) -> None:
    """Add to a file until its disk has not a byte left."""
    with ballast.open("ab", buffering=0) as file, suppress(OSError):
        while file.write(_BLOCK):
            pass


def _replace(folder: Path, on_disk: Path) -> None:
    shutil.copytree(folder, on_disk)
    shutil.rmtree(folder)
    folder.symlink_to(on_disk)
