"""The signatures that tests/trainer/test_nxd_calls.py checks our calls against are the libraries'."""

from __future__ import annotations

import importlib
import json
import os
import warnings
from typing import Any

from tests.nxd.calls import GOLDEN, calls, recorded


def test_the_recorded_signatures_are_the_librarys() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the libraries' own, at import
        real = {name: recorded(_find(name)) for name in sorted({call.name for call in calls()})}
    if os.environ.get("HLATCTL_UPDATE_GOLDEN"):
        rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(rows)}" for name, rows in real.items())
        GOLDEN.write_text(f"{{\n{rows}\n}}\n", encoding="utf-8")
    assert json.loads(GOLDEN.read_text(encoding="utf-8")) == real


def _find(name: str) -> Any:
    module, rest = name, list[str]()
    while True:
        try:
            found: Any = importlib.import_module(module)
        except ModuleNotFoundError:
            module, _, last = module.rpartition(".")
            rest.insert(0, last)
            assert module.startswith(("neuronx_distributed", "torch_xla"))
        else:
            for part in rest:
                found = getattr(found, part)
            return found
