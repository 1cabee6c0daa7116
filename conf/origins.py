"""Where each value of a configuration came from, according to the list of files that Hydra composed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf import folders
from conf.compose import RUNS_DIR_ENV, composed_files, with_defaults
from conf.load import dotted_keys, flatten, parse_yaml
from conf.schema import Config
from conf.space import parse_override
from hlatctl.run.files import read_bytes

SCHEMA = "default"
COMMAND_LINE = "command line"


@dataclass(frozen=True, kw_only=True)
class Origins:
    """The origins of a configuration's values.

    Args:
        keys: a file or ``command line``, by dotted key; keys that have the schema's default are missing. Built-in
            files are written as ``conf/GROUP/OPTION.yaml``, the user's as absolute paths.
        files: the SHA-256 of each user file that was used.
    """

    keys: dict[str, str]
    files: dict[str, str]


def origins(typed: Sequence[str], config: Config) -> Origins:
    """Return where the values of a composed configuration came from.

    Args:
        typed: the overrides that it was composed from.

    Raises:
        ConfigError: as ``conf.compose.compose``.
    """
    project = folders.project_overrides(typed)
    texts = with_defaults(list(typed))
    setters: dict[str, str] = {}
    used: dict[str, str] = {}
    for path, package in composed_files(texts):
        name = _name(path)
        content = read_bytes(path)
        if name == os.fspath(path):
            used[name] = hashlib.sha256(content).hexdigest()
        for key in _keys(parse_yaml(content.decode()) or {}, package):
            setters[key] = name
    if os.environ.get(RUNS_DIR_ENV):
        setters["runs_dir"] = f"${RUNS_DIR_ENV}"
    for text in texts:
        file = project.get(text) or (None if text in typed else _file_of_runs_dir())
        if file:
            used[os.fspath(file)] = hashlib.sha256(read_bytes(file)).hexdigest()
        setters |= {key: os.fspath(file) if file else COMMAND_LINE for key in overridden_keys(text)}
    found = {key: _setter(key, setters) for key in flatten(config)}
    return Origins(keys={key: origin for key, origin in found.items() if origin != SCHEMA}, files=used)


def _file_of_runs_dir() -> Path | None:
    places = (folder for folder in folders.user_folders() if folders.project_file(folder).runs_dir)
    return next((place / folders.PROJECT_FILE for place in places), None)


def _setter(key: str, setters: dict[str, str]) -> str:
    """Return the origin of a key. A replaced mapping or list is the origin of everything below it."""
    parts = key.split(".")
    own = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((setters[name] for name in own if name in setters), SCHEMA)


def _keys(values: dict[str, Any], package: str) -> list[str]:
    prefix = f"{package}." if package else ""
    return [f"{prefix}{key}" for key in dotted_keys({k: v for k, v in values.items() if k != "defaults"})]


def overridden_keys(text: str) -> list[str]:
    """Return the keys that an override sets; empty if it chooses an option."""
    override = parse_override(text)
    key = str(override.key_or_group)
    if key in folders.group_names() and not isinstance(override.value(), dict):
        return []
    value = override.value()
    return list(dotted_keys(value, f"{key}.")) if isinstance(value, dict) else [key]


def _name(path: Path) -> str:
    return f"conf/{path.relative_to(folders.OURS)}" if path.is_relative_to(folders.OURS) else os.fspath(path)
