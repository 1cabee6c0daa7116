"""Running one of Neuron's command-line tools."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

#: Where the package aws-neuronx-tools puts them.
_BIN = "/opt/aws/neuron/bin"


class ToolError(Exception):
    """A tool is missing, failed, took too long, or printed what can't be read; the message says which."""


def find(name: str) -> str:
    """Path of a tool: on PATH, beside this interpreter, or where Neuron's packages put it.

    Raises:
        ToolError: it is nowhere.
    """
    places = [os.environ.get("PATH", ""), os.fspath(Path(sys.executable).parent), _BIN]
    found = shutil.which(name, path=os.pathsep.join(filter(None, places)))
    if found is None:
        package = "torch-neuronx" if name == "neuron_parallel_compile" else "aws-neuronx-tools"
        raise ToolError(f"{name}: not found on PATH or in {_BIN}; the package {package} brings it")
    return found


def output(*command: str, timeout_s: float, env: dict[str, str] | None = None) -> str:
    """What a tool prints.

    Args:
        command: its name and arguments.
        timeout_s: for all of it.
        env: variables besides those of this process.

    Raises:
        ToolError: it did not end well in time.
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
        raise ToolError(f"{command[0]}: no end after {timeout_s:g} s") from None
    except OSError as error:
        raise ToolError(f"{command[0]}: can't be run ({error.strerror})") from None
    if result.returncode:
        told = (result.stderr.strip() or result.stdout.strip() or "no output").splitlines()[-1]
        raise ToolError(f"{command[0]}: ended with {result.returncode} ({told})")
    return result.stdout


def first_line(*command: str, timeout_s: float) -> str:
    """The first line of a tool that goes on printing until it is ended.

    Raises:
        ToolError: none came in time.
    """
    try:
        result = subprocess.run([find(command[0]), *command[1:]], capture_output=True, timeout=timeout_s, check=False)
        text = result.stdout
    except subprocess.TimeoutExpired as timeout:
        text = timeout.stdout or b""
    except OSError as error:
        raise ToolError(f"{command[0]}: can't be run ({error.strerror})") from None
    lines = text.decode(errors="replace").splitlines()
    if not lines:
        raise ToolError(f"{command[0]}: printed nothing in {timeout_s:g} s")
    return lines[0]
