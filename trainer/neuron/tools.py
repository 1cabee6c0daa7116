"""Run Neuron's command-line tools."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

#: Where the package aws-neuronx-tools installs the tools.
_BIN = "/opt/aws/neuron/bin"


class ToolError(Exception):
    """A tool is missing, failed, timed out, or printed an unknown format; the message states which."""


def find(name: str) -> str:
    """Return the path of a tool: on PATH, next to this interpreter, or in Neuron's folder.

    Raises:
        ToolError: it was not found.
    """
    places = [os.environ.get("PATH", ""), os.fspath(Path(sys.executable).parent), _BIN]
    path = shutil.which(name, path=os.pathsep.join(filter(None, places)))
    if path is None:
        package = "torch-neuronx" if name == "neuron_parallel_compile" else "aws-neuronx-tools"
        raise ToolError(f"{name}: not found on PATH or in {_BIN}; install the package {package}")
    return path


def output(*command: str, timeout_s: float, env: dict[str, str] | None = None) -> str:
    """Return what a tool prints.

    Args:
        command: the tool's name and arguments.
        timeout_s: time limit of the whole command.
        env: variables in addition to those of this process.

    Raises:
        ToolError: it failed, or did not end in time.
    """
    try:
        result = subprocess.run(
            [find(command[0]), *command[1:]],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
            env={**os.environ, **(env or {})},
        )
    except subprocess.TimeoutExpired:
        raise ToolError(f"{command[0]}: not finished after {timeout_s:g} s") from None
    except OSError as error:
        raise ToolError(f"{command[0]}: can't be run ({error.strerror})") from None
    if result.returncode:
        last = (result.stderr.strip() or result.stdout.strip() or "no output").splitlines()[-1]
        raise ToolError(f"{command[0]}: exit code {result.returncode} ({last})")
    return result.stdout


def first_line(*command: str, timeout_s: float) -> str:
    """Return the first line of a tool that prints until it is killed.

    Raises:
        ToolError: it printed nothing in time.
    """
    argv = [find(command[0]), *command[1:]]
    try:
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError as error:
        raise ToolError(f"{command[0]}: can't be run ({error.strerror})") from None
    timer = threading.Timer(timeout_s, process.kill)
    timer.start()
    with process:
        line = process.stdout.readline() if process.stdout else b""
        timer.cancel()
        process.kill()
    if not line:
        raise ToolError(f"{command[0]}: printed nothing in {timeout_s:g} s")
    return line.decode(errors="replace").rstrip("\n")
