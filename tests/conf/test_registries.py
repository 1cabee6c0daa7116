from __future__ import annotations

from dataclasses import fields
from importlib.util import find_spec
from typing import Any

import pytest

from conf import registries
from conf.tracking import MIRRORS
from hlatctl.run.registry import Registry

_ALL = [registries.LAUNCHERS, registries.BACKENDS, registries.OPTIMIZERS, registries.SCHEDULES, MIRRORS]


@pytest.mark.parametrize("registry", _ALL, ids=lambda registry: registry.group)
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # PyTorch itself, for torchtitan
def test_every_reference_of_a_built_in_row_can_be_imported(registry: Registry[Any]) -> None:
    for name, row in registry.built_in.items():
        if name == "torchtitan" and find_spec("torchtitan") is None:
            continue
        texts = {each.name: getattr(row, each.name) for each in fields(row) if each.type == "str"}
        for field in [field for field, text in texts.items() if ":" in text]:
            assert callable(registry.part(name, field)), f"{name}: {field}={texts[field]}"
