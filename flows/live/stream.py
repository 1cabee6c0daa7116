"""Watches the runs folder and sends changes to pages as Server-Sent Events, at most once a second.

One thread polls the folder and wakes the pages. A page that falls behind gets the newest state.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from flows.live.json_response import to_json
from hlatctl.report.live.index import LiveIndex
from hlatctl.run.errors import HlatctlError

_LOG = logging.getLogger("uvicorn.error")
#: Seconds between two polls while a page is open, and otherwise.
POLL_S, IDLE_POLL_S = 1.0, 5.0
#: Seconds between two polls while unindexed runs are read, which takes about 50 ms for each.
_READING_PAUSE_S = 0.02
#: A poll takes at most this share of the time.
_SHARE = 4


class Watcher:
    """Polls an index of runs."""

    def __init__(self, index: LiveIndex) -> None:
        self.index = index
        self._followed: Counter[str] = Counter()
        self._waiting: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}
        self._lock, self._wake, self._stopped = threading.Lock(), threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)

    def start(self) -> None:
        """Start polling."""
        self._thread.start()

    def stop(self) -> None:
        """Stop polling, and wait for a running poll."""
        self._stopped = True
        self._wake.set()
        self._thread.join()

    @contextmanager
    def page(self, run_id: str | None) -> Iterator[asyncio.Event]:
        """Yield an event that is set when something changes, for a page that follows a run (or none)."""
        changed, loop = asyncio.Event(), asyncio.get_running_loop()
        with self._lock:
            self._waiting[changed] = loop
            if run_id:
                self._followed[run_id] += 1
        self._wake.set()
        try:
            yield changed
        finally:
            with self._lock:
                del self._waiting[changed]
                if run_id:
                    self._followed[run_id] -= 1
                    self._followed += Counter()  # drops zeros

    def tell(self) -> None:
        """Wake all pages."""
        with self._lock:
            for changed, loop in self._waiting.items():
                with suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(changed.set)

    def _run(self) -> None:
        versions: dict[str, int] = {}
        while not self._stopped:
            began_s = time.monotonic()
            with self._lock:
                followed, is_watched = list(self._followed), bool(self._waiting)
            try:
                changed = self.index.poll(followed)
                now = {run_id: self.version(run_id) for run_id in followed}
                if changed or now != versions:
                    self.tell()
                versions = now
            except Exception:  # such as a folder that can't be listed for a while
                _LOG.exception("the runs can't be read; trying again")
            took_s = time.monotonic() - began_s
            pause_s = max((POLL_S if is_watched else IDLE_POLL_S) - took_s, took_s * (_SHARE - 1), 0.0)
            self._wake.wait(pause_s if self.index.complete else _READING_PAUSE_S)
            self._wake.clear()

    def version(self, run_id: str | None) -> int:
        """Return a number that grows when a run changes; 0 for one that can't be read, and for none."""
        with suppress(HlatctlError):
            return self.index.open(run_id).version if run_id else 0
        return 0


#: A comment is sent at least this often, so that proxies and browsers keep the connection.
KEEP_ALIVE_S = 15.0
_LEAST_S = 1.0


async def changes(
    watcher: Watcher, servers: Callable[[], dict[str, Any]], run_id: str | None, since: int | None = None
) -> AsyncIterator[bytes]:
    """Yield events until the page goes away.

    Args:
        watcher: watches the runs.
        servers: returns the states of Prefect's and MLflow's servers.
        run_id: the run that the page follows; None: none. The first event has its version, since the page may have
            read it before.
        since: the revision of the rows that the page has; None: the newest. Events of rows have theirs as their id.
    """
    index = watcher.index
    revision, is_complete, shown = index.revision, index.complete, _without_times(servers())
    with watcher.page(run_id) as changed:
        if since is not None and since < revision:
            revision = since
            changed.set()
        version = await asyncio.to_thread(watcher.version, run_id)
        yield b"retry: 2000\n\n"
        if run_id:
            yield message("run", {"run_id": run_id, "version": version, "curves_from_step": None})
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), KEEP_ALIVE_S)
            if not changed.is_set():
                yield b": still here\n\n"
                continue
            changed.clear()
            revision, rows, removed = index.changed_since(revision)
            if rows:
                yield message("rows", rows, revision)
            if removed:
                yield message("removed", removed, revision)
            if index.complete and not is_complete:
                is_complete = True
                yield message("complete", True)
            if run_id:
                now, from_step = await asyncio.to_thread(_news, watcher, run_id, version)
                if now != version:
                    version = now
                    yield message("run", {"run_id": run_id, "version": now, "curves_from_step": from_step})
            if _without_times(state := servers()) != shown:
                shown = _without_times(state)
                yield message("servers", state)
            await asyncio.sleep(_LEAST_S)


def message(event: str, data: Any, revision: int | None = None) -> bytes:
    """Return an event as bytes in the format of Server-Sent Events, with a revision of the rows as its id."""
    named = b"" if revision is None else b"id: %d\n" % revision
    return named + b"event: " + event.encode() + b"\ndata: " + to_json(data) + b"\n\n"


def _without_times(servers: dict[str, Any]) -> dict[str, Any]:
    return {name: {**state, "waited_s": None} for name, state in servers.items()}


def _news(watcher: Watcher, run_id: str, version: int) -> tuple[int, int | None]:
    with suppress(HlatctlError):
        opened = watcher.index.open(run_id)
        with opened.lock:
            return opened.version, opened.changed_from_step(version)
    return version, None
