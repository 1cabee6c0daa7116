"""The backends: the software and device that train, chosen by name."""

from __future__ import annotations

from conf.registries import BACKENDS
from conf.schema import Config
from hlatctl.run import startup
from trainer.backends.base import Backend


def make_backend(config: Config) -> Backend:
    """Return the backend that ``backend.name`` selects, with its process groups.

    Raises a DependencyError if the environment lacks what the backend needs, and a LaunchError if another user's
    process is connected.
    """
    if check_software := BACKENDS.part(config.backend.name, "software"):
        check_software(config)
    BACKENDS.part(config.backend.name, "code")  # imported now: the next line is timed
    startup.reached("imported")
    backend: Backend = BACKENDS.create(config.backend.name, config)
    startup.reached("connected")
    return backend
