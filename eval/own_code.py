"""Errors and output of one's own definitions, whose functions the harness calls inside of this process."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from eval.suites import Task
from hlatctl.run.errors import ConfigError, EvaluationError, HlatctlError

#: What the harness and :mod:`eval.catalog` raise for values of a wrong type.
_WRONG_VALUE = (TypeError, AttributeError, KeyError, ValueError, IndexError)


@contextlib.contextmanager
def reading(own: Path | None) -> Iterator[None]:
    """Report values of a wrong type in the definitions of a folder.

    Args:
        own: of ``eval.include_path``; None: only the harness's definitions are read, and nothing is reported.

    Raises:
        ConfigError: names the folder.
    """
    try:
        yield
    except _WRONG_VALUE as error:
        if own is None:
            raise
        raise ConfigError(
            f"eval.include_path={own}: a definition has a key with a value of a wrong type ({_text(error)})",
            hint=f"`{sys.executable} -m lm_eval validate --include_path {own} --tasks NAME` checks a definition",
        ) from error


@contextlib.contextmanager
def running(task: Task, *, everything: bool = True) -> Iterator[None]:
    """Report errors of a task's own definition and functions as such; what they print goes to stderr.

    Args:
        task: from ``eval.include_path``; nothing happens for any other.
        everything: every error is the definition's; else those that come from code of its folder.

    Raises:
        EvaluationError: names the definition and the error.
    """
    if task.own is None:
        yield
        return
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except HlatctlError:
        raise
    except (Exception, SystemExit) as error:
        if not everything and not _is_from(error, task.own):
            raise
        raise EvaluationError(
            f"{task.definition}: {task.name} can't be evaluated ({_text(error)})",
            hint="correct the definition, its data or its functions",
        ) from error


def _is_from(error: BaseException, folder: Path) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return any(Path(frame.filename).is_relative_to(folder) for frame in frames)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"
