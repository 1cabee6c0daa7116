"""Progress: one live line on a terminal, few plain ones elsewhere."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

import conf.load
from conf.schema import Config
from hlatctl.cli.progress import LiveObserver, PlainObserver, describe, observer_for
from hlatctl.run.fold import fold
from hlatctl.run.journal import read_events
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import RunState
from tests.hlatctl.conftest import MakeRun, example_config


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def states(run: RunPaths) -> list[RunState]:
    """The state after every event."""
    events = read_events(run)
    return [fold(events[:end]) for end in range(1, len(events) + 1)]


@pytest.fixture
def run(make_run: MakeRun) -> RunPaths:
    return make_run(until="killed")


@pytest.fixture
def config(run: RunPaths) -> Config:
    return conf.load.load(run.config)


def test_the_line_names_step_tokens_loss_speed_time_left_and_the_next_milestone(run: RunPaths, config: Config) -> None:
    state = fold(read_events(run))
    assert describe(state, config) == (
        "step 130/306 · 1.06M tokens · loss 3.757 · 16.4K tok/s · 1 min 28 s left · milestone at 1.67M"
    )


def test_before_the_first_step_the_line_names_the_stage(run: RunPaths, config: Config) -> None:
    lines = [describe(state, config) for state in states(run)]
    for expected in ("starting", "data", "compile", "training, attempt 1: no step yet"):
        assert expected in lines


def test_an_evaluation_that_runs_is_named(run: RunPaths, config: Config) -> None:
    assert any("evaluating 833.3K" in describe(state, config) for state in states(run))


def test_plain_lines_come_at_every_tenth_and_not_at_every_step(
    run: RunPaths, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 0.0)
    stream = io.StringIO()
    observer = PlainObserver(stream)
    for state in states(run):
        observer.update(state, config)
        observer.update(state, config)
    steps = [line.split(" ")[1] for line in stream.getvalue().splitlines()]
    assert steps == ["1/306", "31/306", "62/306", "92/306", "123/306"]


def test_plain_lines_come_every_ten_seconds_of_a_slow_run(
    config: Config, run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now_s[0])
    stream = io.StringIO()
    observer = PlainObserver(stream)
    for state in states(run)[-130:]:
        now_s[0] += 1.0
        observer.update(state, config)
    assert 12 <= len(stream.getvalue().splitlines()) <= 17


def test_a_pipe_gets_plain_lines_and_a_terminal_a_live_one(
    run: RunPaths, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    pipe, terminal = io.StringIO(), Terminal()
    state = fold(read_events(run))
    for stream, kind in ((pipe, PlainObserver), (terminal, LiveObserver)):
        with observer_for(stream) as observer:
            assert isinstance(observer, kind)
            observer.message("data: done in 7.9 s [not markup]")
            observer.update(state, config)
        assert "data: done in 7.9 s [not markup]" in stream.getvalue()
        assert "130/306" in stream.getvalue()
    assert "\x1b" not in pipe.getvalue()


def test_no_color_is_honoured(run: RunPaths, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    coloured = r"\x1b\[[0-9;]*3[0-9]"

    def shown() -> str:
        terminal = Terminal()
        with observer_for(terminal) as observer:
            observer.update(fold(read_events(run)), config)
        return terminal.getvalue()

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert re.search(coloured, shown())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(coloured, shown())


def test_a_state_without_numbers_has_a_line_too() -> None:
    config = example_config(Path("/runs"))
    step = {"kind": "step", "step": 1, "tokens": 8192, "seq": 1, "time_unix_s": 1.0, "attempt": 1, "loss": "nan"}
    assert describe(fold([step]), config) == "step 1/306 · 8.19K tokens · loss nan · milestone at 833.3K"
