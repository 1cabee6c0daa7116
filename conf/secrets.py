"""Refuse secrets in a configuration before anything is created, because config.yaml stores every value.

Errors name the key and never repeat the value. ``hlatctl.run.redact`` defines what looks like a secret.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from conf import tracking
from hlatctl.run.errors import ConfigError
from hlatctl.run.redact import is_secret_name, secret_in


def check_overrides(overrides: Sequence[str]) -> None:
    """Refuse overrides that contain a secret, even if a later override replaces them: the command line is stored.

    Raises:
        ConfigError: names the override's key.
    """
    for override in overrides:
        key, _, value = override.partition("=")
        key = key.lstrip("+~")
        variable = key.removeprefix("backend.env.")
        if variable != key and is_secret_name(variable) and value not in ("", "null") and not override.startswith("~"):
            raise _named(key)
        tracking.check_notify_override(key, value)
        for error in _problem(key, override):
            raise error


def check_values(plain: dict[str, Any]) -> None:
    """Refuse composed values that contain a secret.

    Raises:
        ConfigError: names the key.
    """
    for key, text in _strings(plain, ""):
        tracking.check_notify_override(key, text)
        for error in _problem(key, text):
            raise error
    for name, value in (plain["backend"].get("env") or {}).items():
        if value is not None and is_secret_name(name):
            raise _named(f"backend.env.{name}")


def _problem(key: str, value: str) -> Iterator[ConfigError]:
    kind = secret_in(value)
    if kind and key == "tracking.mlflow_uri":
        yield ConfigError(
            f"{key}: contains {kind}, which would be written into config.yaml and the journal",
            hint="remove it and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
        )
    elif kind:
        yield ConfigError(
            f"{key}: contains {kind}, which would be written into config.yaml and the journal",
            hint="remove it and set it in the shell that starts the run",
        )


def _named(key: str) -> ConfigError:
    return ConfigError(
        f"{key}: has the name of a secret, and its value would be written into config.yaml and the journal",
        hint="remove it and set it in the shell that starts the run",
    )


def _strings(value: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _strings(item, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _strings(item, f"{key}[{index}]")
    elif isinstance(value, str):
        yield key, value
