"""A service's URL is refused wherever it can be written, without being repeated."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf import tracking
from conf.compose import compose
from conf.schema import Config, NotifyConfig
from conf.tracking import MOST_STEPS, copied_steps
from flows.tracking.mlflow_steps import Shown
from hlatctl.run.errors import ConfigError


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
