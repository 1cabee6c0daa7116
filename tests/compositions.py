"""Hydra composes each choice of options once for all tests: that takes 0.1 to 0.2 s of processor time."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

import conf.compose
from conf.folders import user_folders

compose_with_hydra = hydra.compose
_store_node, _composed_files = ConfigStore.store, conf.compose.composed_files
#: The nodes of the ConfigStore, by name, and what was composed from them, by options.
_stored: dict[str, Any] = {}
_composed: dict[tuple[object, ...], bytes] = {}
_files: dict[tuple[object, ...], list[tuple[Path, str]]] = {}


def install() -> None:
    """Use this module where conf.compose calls Hydra."""
    hydra.compose = compose  # type: ignore[assignment]
    conf.compose.composed_files = composed_files
    ConfigStore.store = _store  # type: ignore[method-assign,assignment]


def compose(name: str, overrides: list[str]) -> DictConfig:
    """Compose as Hydra does: first the options of groups, which are kept, then Hydra's own code sets the values.

    Everything else of a composition happens each time: defaults of the user, resolvers, types and rules.
    """
    options = _options(overrides)
    values = OverridesParser.create().parse_overrides([text for text in overrides if text not in options])
    if any("{" in text for text in options) or any(value.is_sweep_override() for value in values):
        return compose_with_hydra(name, overrides=overrides)
    key = _key(name, options)
    if key not in _composed:
        _composed[key] = pickle.dumps(compose_with_hydra(name, overrides=options))
    composed: DictConfig = pickle.loads(_composed[key])
    ConfigLoaderImpl._apply_overrides_to_config(values, composed)
    return composed


def composed_files(overrides: list[str], root: str = "config") -> list[tuple[Path, str]]:
    """Return what ``conf.compose.composed_files`` has found for the same options of groups."""
    key = _key(root, _options(overrides))
    if key not in _files:
        _files[key] = _composed_files(overrides, root)
    return list(_files[key])


def _options(overrides: list[str]) -> list[str]:
    folders = [conf.compose.CONF_DIR, *user_folders()]
    groups = {path.name for folder in folders for path in folder.iterdir()} | {"hydra.searchpath"}
    return [text for text in overrides if text.lstrip("+~").partition("=")[0].partition("@")[0] in groups]


def _key(name: str, options: list[str]) -> tuple[object, ...]:
    users = [(path, path.read_bytes()) for folder in user_folders() for path in sorted(folder.rglob("*.yaml"))]
    return (conf.compose.CONF_DIR, *users, name, repr(_stored.get("schema")), *options)


def _store(store: ConfigStore, name: str, node: Any, *arguments: Any, **options: Any) -> None:
    if _stored.get(name) != node:
        _store_node(store, name, node, *arguments, **options)
        _stored[name] = node
