"""What tracking.mirrors and notify.urls need is checked before a run exists, and no URL of a service is repeated."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf import tracking
from conf.compose import compose
from conf.schema import Config, NotifyConfig, TrackingConfig
from conf.tracking import MOST_STEPS, copied_steps
from conf.validate import validate
from flows.tracking.mirrors.base import Shown
from hlatctl.run.errors import ConfigError, DependencyError, install


@pytest.fixture(autouse=True)
def no_credential(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)


def config(*names: str, **settings: Any) -> Config:
    return Config(tracking=TrackingConfig(mirrors=list(names), **settings))


def test_a_run_has_no_mirrors_by_default() -> None:
    assert Config().tracking.mirrors == []
    tracking.check_mirrors(Config())


def test_a_mirror_that_is_listed_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tracking\.mirrors\[1\]=wandb: is listed twice\nhint: list it once"):
        validate(config("wandb", "wandb"))


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_refused(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "wandb").mkdir()  # a run's folder of that name in the working directory is no package
    (tmp_path / "tensorboard").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(DependencyError) as refused:
        tracking.check_mirrors(config(name))
    assert str(refused.value) == (
        f"tracking.mirrors contains {name}: the package {name} is not installed\n"
        f"hint: {install(name)}, or tracking.mirrors=[]"
    )


def test_wandb_needs_a_credential_only_online() -> None:
    tracking.check_mirrors(config("wandb", wandb_mode="offline"))
    with pytest.raises(ConfigError, match="needs an API key, and there is none here\nhint: `export WANDB_API_KEY=KEY`"):
        tracking.check_mirrors(config("wandb"))


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
        tracking.check_mirrors(config("wandb"))
    netrc.write_text(f"{netrc.read_text()}machine {machine}\n  login user\n  password hunter2\n")
    tracking.check_mirrors(config("wandb"))


def test_a_credential_can_be_in_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    tracking.check_mirrors(config("wandb"))


@given(st.integers(1, 400_000))
def test_the_planner_counts_the_steps_that_mlflow_gets(total: int) -> None:
    shown = Shown(total)
    counted = total if shown.every == 1 else sum(map(shown.step, range(1, total + 1)))
    assert copied_steps(total) == counted <= MOST_STEPS + 1_001


TOKEN = "Secret4711Token"


@pytest.mark.parametrize(
    "override",
    [
        f"notify.urls=[slack://{TOKEN}/b/c]",
        f"notify.urls=['json://user:{TOKEN}@host']",
        f"notify.urls=slack://{TOKEN}",
        f"notify.urls=[env:A,tgram://{TOKEN}]",
        f"++notify.urls=[discord://{TOKEN}]",
        f"notify={{urls:['slack://{TOKEN}']}}",
        f"notify.urls=[{TOKEN}]",
        "notify.urls=[file:relative/path]",
    ],
)
def test_a_url_in_the_configuration_is_refused_and_not_repeated(override: str) -> None:
    with pytest.raises(ConfigError, match="must be env:NAME or file:/PATH") as caught:
        compose([override])
    assert TOKEN not in str(caught.value)
    assert "hint" in str(caught.value)


def test_a_kind_that_is_not_known_is_refused_with_all_kinds() -> None:
    with pytest.raises(ConfigError, match=r"notify.on\[0\]=fail: not known") as caught:
        compose(["notify.on=[fail]"])
    assert "forecast_slip" in caught.value.hint


def test_an_entry_that_is_listed_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="listed twice"):
        compose(["notify.urls=[env:A,env:A]"])


def test_what_an_entry_names_must_be_there_private_and_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def problem(entry: str) -> str:
        with pytest.raises(ConfigError) as caught:
            tracking.check_notify_urls(Config(notify=NotifyConfig(urls=[entry])))
        assert caught.value.hint
        return caught.value.message

    monkeypatch.delenv("HOOK", raising=False)
    assert problem("env:HOOK") == "notify.urls[0]=env:HOOK: the variable is not set"
    monkeypatch.setenv("HOOK", TOKEN)
    assert problem("env:HOOK") == "notify.urls[0]=env:HOOK: contains no URL"
    path = tmp_path / "url"
    assert "No such file" in problem(f"file:{path}")
    path.write_text(f"json://{TOKEN}", encoding="utf-8")
    path.chmod(0o604)
    assert "others can read it (mode 604" in problem(f"file:{path}")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo, 0o600)
    assert "is not a regular file" in problem(f"file:{fifo}")
    path.chmod(0o600)
    tracking.check_notify_urls(Config(notify=NotifyConfig(urls=[f"file:{path}"])))
