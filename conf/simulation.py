"""Settings of a simulated cluster: from ``simulation.*`` on the command line, and of a run or sweep that exists.

They describe the cluster, not the run, so a run's configuration doesn't have them. A simulated run keeps them in its
``simulation.yaml``; without that file it has the defaults.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from conf import folders
from conf.amendments import with_changes
from conf.constraints import violations
from conf.load import dotted_keys, dump, flatten, load_dataclass, parse_yaml
from conf.schema import SimulationConfig
from conf.space import parse_override
from hlatctl.run import files
from hlatctl.run.errors import ConfigError, suggest
from hlatctl.run.paths import RunPaths

#: Simulates the jobs of a run, whose stages and journal are real; ``--dry-run`` adds it.
OVERRIDE = "cluster.launcher=simulated"
_LISTED = "`hlatctl config keys simulation` lists the keys"


def split(overrides: Iterable[str]) -> tuple[list[str], SimulationConfig]:
    """Return the overrides of a simulated run, of which ``OVERRIDE`` is the last, and the settings of its cluster.

    Args:
        overrides: ``simulation=NAME`` stands for the values in ``conf/simulation/NAME.yaml``; later values win.

    Raises:
        ConfigError: an unknown key or profile, a wrong value, or bad grammar.
    """
    others: list[str] = []
    values: dict[str, Any] = {}
    for text in overrides:
        key, equals, value = text.lstrip("+~").partition("=")
        if key.partition(".")[0] != folders.SIMULATION:
            others.append(text)
        elif text.startswith("~"):
            raise ConfigError(f"{text}: can't be removed", hint=f"leave it out, or give it a value; {_LISTED}")
        elif not equals:
            raise ConfigError(f"OVERRIDES={text}: must be KEY=VALUE", hint=f"such as simulation.seed=2; {_LISTED}")
        elif key == folders.SIMULATION:
            values |= _profile(value)
        else:
            values |= _typed(f"{key}={value}")
    return [*others, OVERRIDE], _settings(values)


def _profile(name: str) -> dict[str, Any]:
    folders.checked_folders()
    path = folders.file_of(folders.SIMULATION, name)
    if path is None:
        hint = suggest(name, folders.names(folders.SIMULATION), prefix="simulation=")
        raise ConfigError(f"simulation={name}: no such profile", hint=hint)
    values = dotted_keys(parse_yaml(files.read_text(path)) or {}, "simulation.")
    try:
        for key, value in list(values.items()):
            if isinstance(value, str):  # YAML 1.1 reads 1e3 as text, Hydra as a number
                values |= _typed(f"{key}={value}")
        _settings(values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", hint=error.hint) from None
    return values


def _typed(text: str) -> dict[str, Any]:
    override = parse_override(text)
    if override.is_sweep_override():
        raise ConfigError(
            f"{text}: is a setting of the simulated cluster, and can't be an axis",
            hint="give it one value; `hlatctl forecast` simulates the same run several times",
        )
    return dotted_keys({str(override.key_or_group): override.value()})


def _settings(values: dict[str, Any]) -> SimulationConfig:
    known = [f"simulation.{key}" for key in flatten(SimulationConfig())]
    for key in (key for key in values if key not in known):
        hint = suggest(key, known, otherwise=_LISTED)
        raise ConfigError(f"{key}: unknown key", hint=hint)
    settings = with_changes(SimulationConfig(), values, "simulation.")
    for error in violations(settings, "simulation."):
        raise error
    return settings


def write(run: RunPaths, settings: SimulationConfig) -> None:
    """Write the settings of a run or sweep, for its drivers.

    Raises:
        StorageError: the file can't be written.
    """
    files.write_text(run.simulation, files.seal_lines(dump(settings)))


def of_run(run: RunPaths) -> SimulationConfig:
    """Return the settings of a simulated run or sweep.

    Raises:
        ConfigError: its file is damaged.
    """
    if not os.path.lexists(run.simulation):
        return SimulationConfig()
    try:
        return load_dataclass(SimulationConfig, run.simulation)
    except ConfigError as error:
        hint = "restore it from a copy, or remove it: the cluster then has the default settings"
        raise ConfigError(error.message, hint=hint) from None
