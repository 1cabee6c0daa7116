"""A module of a room that the head must not import, run to its end in a process of its own; nothing is journalled."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import hlatctl
from hlatctl.run.errors import ERROR_FILE_ENV, LaunchError, load_error


def run_module(module: str, *argv: str, timeout_s: float | None = None) -> str:
    """Run ``python -m MODULE ARGV…`` and give what it printed.

    Raises:
        HlatctlError: the error that the process left.
        LaunchError: it failed without one, or ran out of time.
    """
    # The process must find the packages that this one has, and no folder of the same name in the working directory.
    package_root = os.fspath(Path(hlatctl.__file__).parent.parent)
    search_path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory(prefix="hlatctl-") as folder:
        error_file = Path(folder) / "error.json"
        try:
            result = subprocess.run(
                [sys.executable, "-P", "-m", module, *argv],
                env={**os.environ, ERROR_FILE_ENV: os.fspath(error_file), "PYTHONPATH": search_path},
                capture_output=True, text=True, timeout=timeout_s, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise LaunchError(f"{module}: not finished after {timeout_s:g} s") from None
        if result.returncode:
            last_line = (result.stderr.strip().splitlines() or ["no output"])[-1]
            raise load_error(error_file) or LaunchError(
                f"{module}: failed with exit code {result.returncode} ({last_line})"
            )
        return result.stdout
