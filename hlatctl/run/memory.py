"""Where a run keeps copies of its newest steps in the memory of its nodes, and which of them may still be used.

The folder is in /dev/shm: it survives the processes of an attempt, and ends with the node.
``trainer.checkpoint.memory`` has what is in it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import sys
import time
from contextlib import suppress
from pathlib import Path

from hlatctl.run.paths import RunPaths
from hlatctl.run.processes import node_name
from hlatctl.run.state import RunState

ROOT = Path("/dev/shm")
#: Folders that no process has changed for so long belong to runs that ended without removing them.
_FORGOTTEN_S = 86_400.0
#: Causes of an attempt's end that say nothing against the numbers that it had computed. After any other, a checkpoint
#: has been written, or the policy chooses one.
SAYS_NOTHING = frozenset(
    {
        "preempted",
        "reclaimed",
        "time_limit",
        "storage_away",
        "hang",
        "out_of_memory",
        "shared_memory",
        "system_limit",
        "device_failed",
        "network",
        "collective_timeout",
        "port_in_use",
        "node_failed",
        "killed",
        "crashed",
        "lost",
    }
)
_RESTARTS = ("restart", "restart_without")


def _of_user() -> Path:
    return ROOT / f"hlatctl-memory-{os.geteuid()}"


def of_run(run: RunPaths) -> Path:
    """Return the folder of a run. Runs in different runs folders may have the same id."""
    return _of_user() / f"{run.run_id}-{hashlib.sha256(os.fsencode(run.root)).hexdigest()[:8]}"


def of_node(run: RunPaths) -> Path:
    """Return the folder of a run on this node: the nodes of a test's cluster share a machine."""
    return of_run(run) / node_name()


def remove(run: RunPaths) -> None:
    """Remove a run's copies from this node."""
    shutil.rmtree(of_node(run), ignore_errors=True)
    with suppress(OSError):  # other nodes of a test's cluster still have some
        of_run(run).rmdir()


def remove_all(run: RunPaths) -> None:
    """Remove a run's copies from this machine."""
    shutil.rmtree(of_run(run), ignore_errors=True)


def remove_forgotten() -> None:
    """Remove the copies of this user's runs that nothing has used for a day."""
    with suppress(OSError):
        if _of_user().lstat().st_uid != os.geteuid():
            return
        for folder in _of_user().glob("*/*"):
            status = folder.lstat()
            if stat.S_ISDIR(status.st_mode) and time.time() - status.st_mtime > _FORGOTTEN_S:
                shutil.rmtree(folder, ignore_errors=True)
        for folder in _of_user().iterdir():
            with suppress(OSError):
                folder.rmdir()


def usable(state: RunState, attempt: int) -> dict[int, int]:
    """Return the newest step of each earlier attempt that an attempt may restore from memory, by its number.

    An attempt that starts from a step supersedes the later steps of those before it, as in the journal. Nothing from
    before an end that may have been the numbers' fault is used, nor from before one that a person has seen.
    """
    found, limit = dict[int, int](), sys.maxsize
    for before in reversed(state.attempts):
        if before.number >= attempt:
            continue
        if before.cause not in SAYS_NOTHING or before.decision not in _RESTARTS:
            break
        found[before.number] = limit
        if before.resumed_from_step is not None:
            limit = min(limit, before.resumed_from_step)
    return found
