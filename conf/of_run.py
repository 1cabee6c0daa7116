"""The configuration of a run that exists: the one place that reads it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from conf.load import load
from conf.schema import Config
from hlatctl.run.paths import RunPaths
from hlatctl.run.reading import read_text


def of_run(run: RunPaths, *, read: Callable[[Path], str] = read_text) -> Config:
    """Return a run's configuration.

    Args:
        run: the run directory.
        read: returns a file's text.

    Raises:
        ConfigError: as :func:`conf.load.load`.
    """
    return load(run.config, read=read)
