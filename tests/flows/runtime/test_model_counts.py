"""Counts of a model of ``model.module``: foreign code runs in a process of its own, which has limits."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from conf.compose import compose
from conf.schema import BackendConfig, Config, ModelConfig
from flows.runtime.model_counts import counted
from hlatctl.run.errors import ConfigError

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(find_spec("torchtitan") is None, reason="torchtitan is not installed"),
]

_NOISY = """
import os
print("a package that talks")
os.write(1, b"and talks\\n")
from torchtitan.models.deepseek_v3 import model_registry
"""


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a package that child processes find."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "lab_of_tests").mkdir()
    return tmp_path / "lab_of_tests"


def test_a_configuration_has_the_counts_of_a_module_of_another_package(lab: Path) -> None:
    (lab / "noisy.py").write_text(_NOISY)
    chosen = ["backend=torchtitan", "model=torchtitan", "model.module=lab_of_tests.noisy", "model.flavor=16B"]
    config = compose(chosen)
    assert (config.model.total_parameters, config.model.active_parameters) == (15_706_484_224, 2_661_150_208)
    assert (config.model.vocab_size, config.model.num_experts, config.model.kv_lora_rank) == (102_400, 64, 512)
    with pytest.raises(ConfigError, match=r"model\.num_layers=26: model\.flavor=16B of lab_of_tests\.noisy has 27\n"):
        compose([*chosen, "model.num_layers=26"])  # asks nobody again


def _of(module: str) -> Config:
    return Config(model=ModelConfig(module=module, flavor="1B"), backend=BackendConfig(name="torchtitan", device="cpu"))


def test_a_module_that_ends_or_hangs_is_an_error_and_no_crash(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (lab / "__init__.py").write_text("")
    (lab / "hangs.py").write_text("import time\ntime.sleep(1000)")
    with pytest.raises(ConfigError, match=r"model\.module=lab_of_tests\.hangs: .*no answer after 0\.5 s"):
        counted(_of("lab_of_tests.hangs"), timeout_s=0.5)
    (lab / "sitecustomize.py").write_text("import os, sys\n'--counts' in sys.orig_argv and os._exit(0)")
    monkeypatch.setenv("PYTHONPATH", str(lab))
    with pytest.raises(ConfigError, match=r"model\.module=ends: its process ended without the counts"):
        counted(_of("ends"))


def test_without_torchtitan_the_counts_stay_to_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conf.environment.package_versions", lambda names: {})
    config = _of("gpt_oss")
    assert counted(config) == config
