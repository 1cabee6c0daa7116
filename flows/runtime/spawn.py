"""Python processes of ours that are no jobs: they find the packages that this process has, and no others."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hlatctl


def command(module: str, *argv: str) -> list[str]:
    """``python -m module argv``, which imports nothing from the working directory."""
    return [sys.executable, "-P", "-m", module, *argv]


def environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """An environment, this process's by default, in which Python finds the packages that this process has."""
    env = os.environ if env is None else env
    package_root = os.fspath(Path(hlatctl.__file__).parent.parent)
    search_path = os.pathsep.join(filter(None, [package_root, env.get("PYTHONPATH")]))
    return {**env, "PYTHONPATH": search_path}


def beside(
    words: Sequence[str],
    output: Any,
    *,
    env: Mapping[str, str] | None = None,
    stdin: int = subprocess.DEVNULL,
    **options: Any,
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own: Ctrl-C is for the flow, which then has something to finish.

    Args:
        words: as ``command`` gives them.
        output: open file that stdout and stderr go to.
        env: the whole environment; this process's by default.
        stdin: as ``subprocess.Popen`` takes it.
        options: further ones of ``subprocess.Popen``.
    """
    return subprocess.Popen(
        words, stdin=stdin, stdout=output, stderr=output, start_new_session=True, env=environment(env), **options
    )
