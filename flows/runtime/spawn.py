"""Start Python processes that are not jobs, with the packages of this process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from flows.launch.local import BESIDE_TRAINING_NICE
from hlatctl.run import child


def command(module: str, *argv: str) -> list[str]:
    """Return the words of ``python -m module argv``, which imports nothing from the working directory."""
    return [sys.executable, "-P", "-m", module, *argv]


def yielding(words: Sequence[str]) -> list[str]:
    """Return the words that run a command at low priority, so that it doesn't slow training on the same machine.

    The command must be started in a session of its own. A kernel with autogroups (sched(7)) weighs sessions: there
    ``nice`` alone would change nothing.
    """
    level = BESIDE_TRAINING_NICE
    script = f'{{ echo {level} >/proc/self/autogroup; }} 2>/dev/null; exec nice -n {level} "$@"'
    return ["sh", "-c", script, "sh", *words]


def beside(
    words: Sequence[str],
    output: Any,
    *,
    env: Mapping[str, str] | None = None,
    stdin: int = subprocess.DEVNULL,
    **options: Any,
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, so that Ctrl-C reaches only the flow.

    Args:
        words: see :func:`command`.
        output: open file for stdout and stderr.
        env: the whole environment; by default this process's.
        stdin: see ``subprocess.Popen``.
        options: further options of ``subprocess.Popen``.
    """
    return subprocess.Popen(
        words, stdin=stdin, stdout=output, stderr=output, start_new_session=True, env=child.environment(env), **options
    )
