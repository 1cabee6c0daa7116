"""A small disk that can be filled: a tmpfs made by bubblewrap, which every process of this user can use."""

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
    """Return why this machine can't have one, and what helps; empty if it can."""
    bwrap = shutil.which("bwrap")
    if not sys.platform.startswith("linux") or bwrap is None:
        return "needs bubblewrap (apt-get install bubblewrap)"
    tried = subprocess.run([bwrap, "--dev-bind", "/", "/", "--", "/bin/true"], capture_output=True, check=False)
    return "" if tried.returncode == 0 else "bubblewrap does not work here (sysctl user.max_user_namespaces)"


@contextmanager
def under(folder: Path, size_bytes: int) -> Iterator[None]:
    """Move a folder to a disk of its own; at the end it is a plain folder again.

    Bubblewrap mounts the disk for a process that keeps it mounted. Meanwhile the folder is a link to the disk, through
    that process's root in /proc.
    """
    mount = folder.with_name(f".{folder.name}.disk")
    mount.mkdir()
    words = ["bwrap", "--dev-bind", "/", "/", "--die-with-parent", "--size", str(size_bytes), "--tmpfs", str(mount)]
    with subprocess.Popen([*words, "--", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as keeper:
        assert keeper.stdin
        assert keeper.stdout
        keeper.stdin.write(b"\n")
        keeper.stdin.flush()
        keeper.stdout.readline()  # its answer means that the disk is mounted
        pid = (processes.descendants(keeper.pid) or [keeper.pid])[-1]
        on_disk = Path(f"/proc/{pid}/root") / mount.relative_to("/") / folder.name
        _replace(folder, on_disk)
        try:
            yield
        finally:
            folder.unlink()
            shutil.copytree(on_disk, folder)
            keeper.stdin.close()  # ends the process, which removes the disk
    mount.rmdir()


def fill(ballast: Path) -> None:
    """Append to a file until its disk is full."""
    with ballast.open("ab", buffering=0) as file, suppress(OSError):
        while file.write(_BLOCK):
            pass


def _replace(folder: Path, on_disk: Path) -> None:
    shutil.copytree(folder, on_disk)
    shutil.rmtree(folder)
    folder.symlink_to(on_disk)
