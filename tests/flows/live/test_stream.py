"""Pages that wait are told what has changed, the newest state only."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from flows.live import stream
from flows.live.stream import Watcher, changes
from hlatctl.report.live import index as live_index
from hlatctl.report.live.index import LiveIndex
from hlatctl.run.journal import JournalWriter, train_writer
from hlatctl.run.paths import RunPaths
from tests.flows.live.conftest import states
from tests.hlatctl.conftest import MakeRun
from tests.waiting import WAIT_S, wait_for


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "POLL_S", 0.02)
    monkeypatch.setattr(stream, "_LEAST_S", 0.0)
    monkeypatch.setattr(live_index, "SCAN_S", 0.0)
    monkeypatch.setattr(live_index, "_SCAN_SHARE", 0)
    monkeypatch.setattr(live_index, "_READ_S", 60.0)


def _append(run: RunPaths, *steps: int) -> None:
    with JournalWriter(run, train_writer(0), 1) as train:
        for step in steps:
            train.append("step", step=step, tokens=step * 8192, loss=1.0)


async def _next(source: AsyncIterator[bytes], name: str) -> Any:
    async with asyncio.timeout(WAIT_S):
        async for text in source:
            if f"event: {name}\n".encode() in text:
                return json.loads(text.split(b"data: ", 1)[1])
    raise AssertionError("the stream ended")


def _watch(run: RunPaths, play: Callable[[Watcher], Any], run_id: str | None) -> None:
    index = LiveIndex(run.root.parent)
    index.poll()
    watching = Watcher(index)
    watching.start()
    try:
        asyncio.run(play(watching))
    finally:
        watching.stop()


def test_a_followed_run_tells_from_which_step_to_read(make_run: MakeRun) -> None:
    run = make_run("b", until="killed")

    async def play(watching: Watcher) -> None:
        source = changes(watching, states, "b")
        assert (await anext(source)).startswith(b"retry:")
        assert (await _next(source, "run"))["curves_from_step"] is None
        _append(run, 131, 132)
        told = await _next(source, "run")
        assert (told["run_id"], told["curves_from_step"]) == ("b", 131)
        await source.aclose()  # type: ignore[attr-defined]

    _watch(run, play, "b")


def test_changed_rows_and_removed_runs_are_told(make_run: MakeRun) -> None:
    make_run("a")
    run = make_run("b", until="killed")

    async def play(watching: Watcher) -> None:
        source = changes(watching, states, None)
        await anext(source)
        _append(run, 131)
        rows = await _next(source, "rows")
        assert [(row["run_id"], row["step"]) for row in rows] == [("b", 131)]
        since = watching.index.revision - 1
        again = changes(watching, states, None, since)  # a page that changes streams: its former one told it no more
        assert [row["step"] for row in await _next(again, "rows")] == [131]
        await again.aclose()  # type: ignore[attr-defined]
        shutil.rmtree(run.root)
        assert await _next(source, "removed") == ["b"]
        await source.aclose()  # type: ignore[attr-defined]

    _watch(run, play, None)


def test_a_page_that_is_behind_gets_the_newest_state_once(make_run: MakeRun) -> None:
    run = make_run("b", until="killed")

    async def play(watching: Watcher) -> None:
        source = changes(watching, states, None)
        await anext(source)
        for step in range(131, 141):
            _append(run, step)
            await asyncio.to_thread(_polled_until, watching.index, step)
        rows = await _next(source, "rows")
        assert [row["step"] for row in rows] == [140]
        await source.aclose()  # type: ignore[attr-defined]

    _watch(run, play, None)


def _polled_until(index: LiveIndex, step: int) -> None:
    wait_for(lambda: index.row("b")["step"] == step)


def test_a_server_that_ends_is_told_and_time_that_passes_is_not(make_run: MakeRun) -> None:
    run, now = make_run("a"), states()

    async def play(watching: Watcher) -> None:
        source = changes(watching, lambda: now, None)
        await anext(source)
        now["prefect"]["waited_s"] = 5.0
        watching.tell()
        pending = asyncio.create_task(_next(source, "servers"))
        await asyncio.sleep(0.1)
        assert not pending.done()
        now["prefect"] = {**now["prefect"], "state": "failed"}
        watching.tell()
        assert (await pending)["prefect"]["state"] == "failed"
        await source.aclose()  # type: ignore[attr-defined]

    _watch(run, play, None)


def test_a_quiet_stream_is_kept_open(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "KEEP_ALIVE_S", 0.02)
    run = make_run("a")

    async def play(watching: Watcher) -> None:
        source = changes(watching, states, None)
        await anext(source)
        async with asyncio.timeout(WAIT_S):
            while await anext(source) != b": still here\n\n":
                pass
        await source.aclose()  # type: ignore[attr-defined]

    _watch(run, play, None)


def test_a_run_that_does_not_exist_is_followed_without_an_error(make_run: MakeRun) -> None:
    run = make_run("b", until="killed")

    async def play(watching: Watcher) -> None:
        source = changes(watching, states, "nothing")
        await anext(source)
        _append(run, 131)
        assert await _next(source, "rows")
        await source.aclose()  # type: ignore[attr-defined]

    _watch(run, play, "nothing")


def test_a_page_that_goes_away_is_forgotten(make_run: MakeRun) -> None:
    run = make_run("b")

    async def play(watching: Watcher) -> None:
        with watching.page("b"), watching.page("b"):
            assert watching._followed == {"b": 2}
        assert (watching._followed, watching._waiting) == ({}, {})

    _watch(run, play, None)


def test_a_folder_that_cannot_be_read_for_a_while_is_read_again(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run("b", until="killed")
    failures, poll = iter([True, True]), LiveIndex.poll

    def fail_twice(index: LiveIndex, *followed: Any) -> bool:
        if next(failures, False):
            raise PermissionError
        return poll(index, *followed)

    async def play(watching: Watcher) -> None:
        monkeypatch.setattr(LiveIndex, "poll", fail_twice)
        source = changes(watching, states, None)
        await anext(source)
        _append(run, 131)
        assert await _next(source, "rows")
        await source.aclose()  # type: ignore[attr-defined]

    _watch(run, play, None)


def test_text_that_is_not_unicode_and_a_huge_number_are_sent() -> None:
    _, data, *_ = stream.message("rows", [{"run_id": "a\udcff", "tokens": 1 << 70, "loss": float("nan")}]).split(b"\n")
    assert json.loads(data.removeprefix(b"data: ")) == [{"run_id": "a?", "tokens": str(1 << 70), "loss": None}]
