"""The configuration of an existing run with its amendments; all other code reads it through this module.

``config.yaml`` never changes. The ``config_amended`` events of the operator's journal record the changes.
``config-<n>.yaml`` has the whole configuration after amendment n, for the jobs of an attempt and for people. It is
derived: a missing or damaged one is made again from ``config.yaml`` and the events. If an event is damaged instead, the
file is used.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from conf.amendments import with_changes
from conf.load import dump, load
from conf.schema import Config
from hlatctl.run import files
from hlatctl.run.errors import ConfigError
from hlatctl.run.files import read_text
from hlatctl.run.journal import OPERATOR_WRITER, writer_events
from hlatctl.run.paths import RunPaths

CONFIG_AMENDED = "config_amended"


def of_run(run: RunPaths, *, number: int | None = None, read: Callable[[Path], str] = read_text) -> Config:
    """Return a run's configuration.

    Args:
        run: the run directory.
        number: apply the amendments up to this one; None: apply all, including those that have not begun.
        read: returns a file's text.

    Raises:
        ConfigError: as :func:`conf.load.load`; or an amendment is lost.
        StorageError: the journal can't be read.
    """
    wanted = newest_amendment(run) if number is None else number
    if wanted == 0:
        return load(run.config, read=read)
    with suppress(ConfigError):
        return load(run.amended_config(wanted), read=read)
    return _replayed(run, wanted)


def check_step(config: Config, step: int, name: str) -> None:
    """Refuse a step that a run doesn't train.

    Raises:
        ConfigError: names the first and the last step.
    """
    if not config.fork.step < step <= config.total_steps:
        raise ConfigError(f"{name}={step}: the run has steps {config.fork.step + 1} to {config.total_steps}")


def newest_amendment(run: RunPaths) -> int:
    """Return the number of a run's newest amendment; 0 if it has none."""
    return max([*_changes(run), *run.amended_configs()], default=0)


def write_amended(run: RunPaths, number: int) -> Path:
    """Return the file with a run's configuration after an amendment; write it if it is missing or damaged.

    Raises:
        ConfigError: as :func:`of_run`.
        StorageError: it can't be written.
    """
    if number == 0:
        return run.config
    path = run.amended_config(number)
    try:
        load(path)
    except ConfigError:
        files.write_text(path, files.seal_lines(dump(_replayed(run, number))))
    return path


def _replayed(run: RunPaths, number: int) -> Config:
    config, changes = load(run.config), _changes(run)
    for n in range(1, number + 1):
        if n not in changes:
            raise ConfigError(
                f"{run.journal / OPERATOR_WRITER}.jsonl: amendment {n} is lost, and {run.amended_config(number)} is "
                "missing or damaged",
                hint="restore one of the files from a copy",
            )
        config = with_changes(config, changes[n])
    return config


def _changes(run: RunPaths) -> dict[int, dict[str, Any]]:
    events = (event for event in writer_events(run, OPERATOR_WRITER) if event["kind"] == CONFIG_AMENDED)
    return {event["number"]: {key: new for key, (_, new) in event["changes"].items()} for event in events}
