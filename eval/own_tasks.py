"""Task definitions of ``eval.include_path``: whose code may run, and the remark on their scores."""

from __future__ import annotations

import re

from conf.eval_rules import require_own_tasks
from eval import source
from eval.catalog import Definition
from eval.model import package_folder
from hlatctl.run.errors import ConfigError

_NAME = re.compile(r"\w[\w.+-]{0,127}")


def note(definition: Definition) -> str:
    """Return the remark on the scores of one's own definition, after a check of the files whose code would run.

    Raises:
        StorageError: another user may write to the folder or to one of the task's files.
    """
    assert definition.own is not None
    if not _NAME.fullmatch(definition.name):
        raise ConfigError(
            f"{definition.path}: task={definition.name!r:.80}: files are named after the task, so it must have only "
            "letters, digits and . _ + -, and begin with a letter, digit or _",
            hint="rename it",
        )
    files = source.files_of(definition.path)
    harness = package_folder("lm_eval", "lm-eval")
    for place in (definition.own, *files):
        if not place.is_relative_to(harness):
            require_own_tasks(place, definition.own)
    if not any(file.suffix == ".py" for file in files):
        return f"{definition.name}: own definition ({definition.path})"
    return f"{definition.name}: own definition ({definition.path}), which runs Python code of {definition.own}"
