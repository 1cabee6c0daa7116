"""Processes of Python that this one starts: their environment, and pipes to them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

import hlatctl
from hlatctl.run.processes import PARENT_ENV

#: Variables of OpenMP, and of libraries that follow it.
THREADS, WAITS = "OMP_NUM_THREADS", "OMP_WAIT_POLICY"
#: A thread that waits for others gives its core away. By default it spins for a while, and beside other work the
#: others need that core.
GIVES_CORE_AWAY = "passive"


def environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment for a process that this one starts, by default a copy of this one's.

    Python finds the packages of this process there, and the new process can end with this one
    (:func:`hlatctl.run.processes.end_with_parent`).
    Threads of OpenMP give their core away while they wait, unless the user has set another policy.
    """
    env = os.environ if env is None else env
    package_root = os.fspath(Path(hlatctl.__file__).parent.parent)
    search_path = os.pathsep.join(filter(None, [package_root, env.get("PYTHONPATH")]))
    return {WAITS: GIVES_CORE_AWAY, **env, "PYTHONPATH": search_path, PARENT_ENV: str(os.getpid())}


def pipe_in(process: subprocess.Popen[bytes]) -> IO[bytes]:
    """Return the pipe to a process that was started with one."""
    assert process.stdin is not None
    return process.stdin


def pipe_out(process: subprocess.Popen[bytes]) -> IO[bytes]:
    """Return the pipe from a process that was started with one."""
    assert process.stdout is not None
    return process.stdout


def wait_and_close(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a process, and close the pipes to and from it."""
    process.wait()
    for stream in (pipe_in(process), pipe_out(process)):
        with suppress(BrokenPipeError):
            stream.close()
