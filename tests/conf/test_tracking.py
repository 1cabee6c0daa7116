"""What tracking.mirrors needs is checked before a run exists."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from conf import tracking as mirrors
from conf.schema import Config, MirrorName, TrackingConfig
from conf.validate import validate
from hlatctl.run.errors import ConfigError, DependencyError


@pytest.fixture(autouse=True)
def no_credential(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)


def config(*names: MirrorName, **tracking: Any) -> Config:
    return Config(tracking=TrackingConfig(mirrors=list(names), **tracking))


def test_a_run_has_no_mirrors_by_default() -> None:
    assert Config().tracking.mirrors == []
    mirrors.check_mirrors(Config())


def test_a_mirror_that_is_listed_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tracking\.mirrors\[1\]=wandb: is listed twice\nhint: list it once"):
        validate(config("wandb", "wandb"))


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_refused(name: MirrorName, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "wandb").mkdir()  # a run's folder of that name in the working directory is no package
    (tmp_path / "tensorboard").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(DependencyError) as refused:
        mirrors.check_mirrors(config(name))
    assert str(refused.value) == (
        f"tracking.mirrors contains {name}: the package {name} is not installed\n"
        f"hint: pip install 'hlatctl[{name}]', or tracking.mirrors=[]"
    )


def test_wandb_needs_a_credential_only_online() -> None:
    mirrors.check_mirrors(config("wandb", wandb_mode="offline"))
    with pytest.raises(ConfigError, match="needs an API key, and there is none here\nhint: `export WANDB_API_KEY=KEY`"):
        mirrors.check_mirrors(config("wandb"))


@pytest.mark.parametrize(
    ("variable", "machine"), [("", "api.wandb.ai"), ("https://wandb.example.org:8080", "wandb.example.org")]
)
def test_a_credential_can_be_in_netrc(
    variable: str, machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", variable)
    netrc = tmp_path / ".netrc"
    netrc.write_text("machine other\n  login user\n  password hunter2\n")
    with pytest.raises(ConfigError):
        mirrors.check_mirrors(config("wandb"))
    netrc.write_text(f"{netrc.read_text()}machine {machine}\n  login user\n  password hunter2\n")
    mirrors.check_mirrors(config("wandb"))


def test_a_credential_can_be_in_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    mirrors.check_mirrors(config("wandb"))
