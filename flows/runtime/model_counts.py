"""Counts of a model of ``model.module``: a process of the engine asks the module, because its code is foreign."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

from conf.environment import can_train
from conf.schema import Config, ModelConfig
from flows.runtime.programs import ask_about
from hlatctl.run.errors import ConfigError, LaunchError

_TIMEOUT_S = 300.0


def counted(config: Config, *, timeout_s: float = _TIMEOUT_S) -> Config:
    """Return a configuration with the parameters, FLOPs and shape of the model of ``model.module``.

    It is unchanged where the engine's package isn't installed.

    Raises:
        ConfigError: there is no such module or flavor, its code fails or hangs, or a key of the shape has another
            value than the model.
        DependencyError: the module needs a package that isn't installed.
    """
    if not can_train(config):
        return config
    model, default = config.model, ModelConfig()
    asked = _asked(config.backend.name, config.backend.device, model.module or "", model.flavor or "", timeout_s)
    for key, value in asked.items():
        given = getattr(model, key)
        if given not in (value, getattr(default, key)):
            raise ConfigError(
                f"model.{key}={given}: model.flavor={model.flavor} of {model.module} has {value}",
                hint=f"leave model.{key} out; model=torchtitan has no shape of its own",
            )
    return replace(config, model=replace(model, **asked))


@cache
def _asked(backend: str, device: Any, module: str, flavor: str, timeout_s: float) -> dict[str, Any]:
    default = Config()
    config = replace(
        default,
        model=replace(default.model, module=module, flavor=flavor),
        backend=replace(default.backend, name=backend, device=device),
    )
    here = f"model.module={module}"
    try:
        answer = json.loads(ask_about(config.backend.kind.own_settings, config, "--counts", timeout_s=timeout_s))
    except LaunchError as error:
        raise ConfigError(
            f"{here}: model.flavor={flavor} can't be counted: {error.message}",
            hint=f'check that `python -c "import {module}"` ends, or set model.total_parameters',
        ) from None
    except ValueError:
        raise ConfigError(f"{here}: its process ended without the counts", hint="set model.total_parameters") from None
    return dict(answer)
