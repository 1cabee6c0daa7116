"""Hydra composes each choice of options once for all tests: that takes 0.1 to 0.2 s of processor time."""

from __future__ import annotations

import pickle
from typing import Any

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

import conf.compose

compose_with_hydra = hydra.compose
_store_node = ConfigStore.store
#: The nodes of the ConfigStore, by name, and what was composed from them, by options.
_stored: dict[str, Any] = {}
_composed: dict[tuple[object, ...], bytes] = {}


def install() -> None:
    """Use this module where conf.compose calls Hydra."""
    hydra.compose = compose  # type: ignore[assignment]
    ConfigStore.store = _store  # type: ignore[method-assign,assignment]


def compose(name: str, overrides: list[str]) -> DictConfig:
    """Compose as Hydra does: first the options of groups, which are kept, then Hydra's own code sets the values.

    Everything else of a composition happens each time: defaults of the user, resolvers, types and rules. Hydra composes
    all of it where a user's folder has options too.
    """
    groups = {path.name for path in conf.compose.CONF_DIR.iterdir()}
    options = [text for text in overrides if text.lstrip("+~").partition("=")[0].partition("@")[0] in groups]
    values = OverridesParser.create().parse_overrides([text for text in overrides if text not in options])
    alone = any(text.startswith("hydra.") for text in overrides) or any("{" in text for text in options)
    if alone or any(value.is_sweep_override() for value in values):
        return compose_with_hydra(name, overrides=overrides)
    key = (conf.compose.CONF_DIR, name, repr(_stored.get("schema")), *options)
    if key not in _composed:
        _composed[key] = pickle.dumps(compose_with_hydra(name, overrides=options))
    composed: DictConfig = pickle.loads(_composed[key])
    ConfigLoaderImpl._apply_overrides_to_config(values, composed)
    return composed


def _store(store: ConfigStore, name: str, node: Any, *arguments: Any, **options: Any) -> None:
    if _stored.get(name) != node:
        _store_node(store, name, node, *arguments, **options)
        _stored[name] = node
