"""Every call of the Neuron libraries fits their recorded signatures; tests/nxd checks that these are the libraries'."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest

from conf.schema import BackendConfig, Config
from hlatctl.run.errors import ConfigError, DependencyError
from tests.nxd.calls import GOLDEN, calls, fits
from trainer.backends import make_backend


def test_every_call_fits_the_recorded_signature() -> None:
    signatures = json.loads(GOLDEN.read_text(encoding="utf-8"))
    source_calls = calls()
    assert len(source_calls) >= 25, "the source was read"
    assert {call.name for call in source_calls} == signatures.keys(), (
        "HLATCTL_UPDATE_GOLDEN=1 pytest tests/nxd/test_signatures.py"
    )
    assert [why for call in source_calls if (why := fits(call, signatures[call.name]))] == []


def test_a_call_that_does_not_fit_is_reported() -> None:
    signatures = json.loads(GOLDEN.read_text(encoding="utf-8"))
    name = "neuronx_distributed.save_checkpoint"
    call = next(call for call in calls() if call.name == name)
    wrong = type(call)(name, call.positional, (*call.keywords, "num_kept"), call.where)
    assert "unexpected keyword argument 'num_kept'" in str(fits(wrong, signatures[name]))
    assert "missing a required argument" in str(fits(type(call)(name, 0, (), call.where), signatures[name]))


@pytest.mark.skipif(importlib.util.find_spec("neuronx_distributed") is not None, reason="it is installed here")
def test_a_missing_library_is_an_error_of_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))  # the backend sets variables for the library
    with pytest.raises(DependencyError, match=r"backend\.name=nxd: neuronx_distributed is not installed\nhint: .*SDK"):
        make_backend(Config(backend=BackendConfig(name="nxd", device="neuron")))


@pytest.mark.skipif(importlib.util.find_spec("neuronx_distributed") is not None, reason="it is installed here")
@pytest.mark.parametrize("name", ["XLA_USE_BF16", "XLA_DOWNCAST_BF16"])
def test_switches_of_number_formats_are_unset_for_the_library(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also 0 is one: NxD's attention then keeps its softmax's sums in BF16."""
    config = Config(backend=BackendConfig(name="nxd", device="neuron"))
    monkeypatch.setattr(os, "environ", os.environ | {name: "0"})
    with pytest.raises(DependencyError):
        make_backend(config)
    assert name not in os.environ
    os.environ[name] = "1"
    with pytest.raises(ConfigError, match=rf"{name} is set in the environment: .*\nhint: unset {name}"):
        make_backend(config)


@pytest.mark.skipif(importlib.util.find_spec("neuronx_distributed") is not None, reason="it is installed here")
def test_a_transformers_that_the_library_can_not_import_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer.backends.nxd import import_library

    text = "raise ModuleNotFoundError(\"No module named 'transformers.utils.fx'\", name='transformers.utils.fx')\n"
    (tmp_path / "neuronx_distributed.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DependencyError, match=r"imports transformers\.utils\.fx, .*lacks\nhint: pip install '.*<5'"):
        import_library()
