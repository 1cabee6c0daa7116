"""Answers of the page about one run or several: details, curves, comparisons, logs, documents, and changes.

Importing this module takes a second, because of numpy, so the page is served before. The documents of a step come from
the trainer's data loader, in a separate process that takes seconds.
"""

from __future__ import annotations

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response

from conf.of_run import check_step, of_run
from flows.live import actions, share
from flows.live.json_response import as_json
from flows.live.stream import Watcher
from flows.runtime import programs
from flows.tracking import links
from hlatctl.report.live import curves, details, items, sweeps
from hlatctl.report.live import index as ranks
from hlatctl.report.live.curves import StepColumns
from hlatctl.report.live.index import OpenRun
from hlatctl.report.run_view import is_simulated
from hlatctl.run.errors import ConfigError, DataError, RunBusyError, RunNotFoundError
from hlatctl.run.paths import RunPaths, SweepPaths
from hlatctl.run.runs import list_sweeps

_TIMEOUT_S = 300.0
#: Seconds until a page gets a preview of the curves of a run that is being read.
_PATIENCE_S = 0.3
#: One at a time, because each one imports PyTorch and may replay thousands of batches.
_one = threading.Lock()


def documents(run: RunPaths, step: int) -> dict[str, Any]:
    """Return the documents that a step was trained on, with the beginning of each text.

    Raises:
        ConfigError: the run has no such step.
        DataError: the run is simulated, or its corpus is missing.
        RunBusyError: another request is being answered.
        LaunchError: finding them takes too long.
    """
    if is_simulated(run):
        raise DataError(f"run {run.run_id}: is simulated, so it has no corpus", hint="choose another run")
    check_step(of_run(run), step, "step")  # before a process is started that imports PyTorch
    if not _one.acquire(blocking=False):
        raise RunBusyError("the documents of another step are being read", hint="wait a few seconds, then retry")
    try:
        answer = json.loads(
            programs.ask(
                "trainer.data.at",
                "--run-dir",
                os.fspath(run.root),
                "--step",
                str(step),
                timeout_s=_TIMEOUT_S,
                yields=True,
            )
        )
    finally:
        _one.release()
    return {
        "step": step,
        "batch": answer["batch"],
        "trained": answer["trained"],
        "documents": [
            {
                "sequence": index,
                "source": document.get("source"),
                "id": f"{document['file']}:{document['row']}",
                "first_token": document["first_token"],
                "tokens": document["tokens"],
                "text": document["text"],
            }
            for index, sequence in enumerate(answer["sequences"])
            for document in sequence
        ],
    }


#: Memory limit of the cached columns of steps: five runs of 2 M steps.
_COLUMNS_BYTES = 512 << 20
#: A report is a separate page: its scripts may run, but not with the rights of this page.
_REPORT_POLICY = (
    "sandbox allow-scripts allow-popups; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:"
)


@dataclass
class Columns:
    """A cache of the columns of steps, for the most recently requested runs."""

    _kept: OrderedDict[Path, tuple[int, StepColumns]] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, opened: OpenRun) -> StepColumns:
        """Return the up-to-date columns of a run; the caller must hold the run's lock."""
        with self._lock:
            course, columns = self._kept.pop(opened.run.root, (0, StepColumns()))
            if course != opened.course:
                columns = StepColumns()
            self._kept[opened.run.root] = opened.course, columns
        columns.update(opened.state.steps)
        with self._lock:
            while len(self._kept) > 1 and sum(kept.nbytes for _, kept in self._kept.values()) > _COLUMNS_BYTES:
                self._kept.popitem(last=False)
        return columns


@dataclass
class Answers:
    """Answers requests about runs. Its methods run in threads.

    Args:
        watcher: watches the runs.
        servers: returns the states of Prefect's and MLflow's servers, as in ``/api/info``.
    """

    watcher: Watcher
    servers: Callable[[], dict[str, Any]]
    columns: Columns = field(default_factory=Columns)

    def run(self, request: Request) -> Response:
        """Return everything about a run except its curves."""
        opened = self._opened(request)
        report = f"/runs/{opened.run.run_id}/report" if _report(opened.run) else None
        servers = self.servers()
        found = {
            "prefect": links.in_prefect(opened.run, servers["prefect"]["url"]),
            "mlflow": links.in_mlflow(opened.run, servers["mlflow"]["url"]),
            "report": report,
        }
        return as_json({**details.details(opened), "links": found})

    def curves(self, request: Request) -> Response:
        """Return curves; of a run that takes long to read, a preview."""
        wanted = _wanted(request)
        opened = self.watcher.index.opened(request.path_params["run_id"])
        if not opened.read_within(_PATIENCE_S) and (some := curves.preview(opened, wanted)):
            return as_json({**some, "version": 0})
        opened.refresh()
        with opened.lock:
            found = curves.curves(self.columns.of(opened), opened.state, opened.config, wanted)
            found["version"] = opened.version
        return as_json(found)

    def sweep(self, request: Request) -> Response:
        """Return everything about a sweep."""
        paths = self._sweep(request.path_params["sweep_id"])
        report = f"/sweeps/{paths.run_id}/report" if _report(paths) else None
        return as_json({**sweeps.details(paths), "links": {"report": report}})

    def report(self, request: Request) -> Response:
        """Return the page of a run's report."""
        return _report_page(self._run(request))

    def sweep_report(self, request: Request) -> Response:
        """Return the page of a sweep's report."""
        return _report_page(self._sweep(request.path_params["sweep_id"]))

    def compare(self, request: Request) -> Response:
        """Return a comparison of several runs."""
        ids, index = _ids(request, details.MOST_COMPARED + 1), self.watcher.index
        rows, runs = [index.row(run_id) for run_id in ids], [index.find(run_id) for run_id in ids]
        return as_json({"runs": rows, **details.compared(runs, request.query_params.get("baselines") or None)})

    def paired(self, request: Request) -> Response:
        """Return how two runs differ question by question."""
        ids = _ids(request, 3)
        if len(ids) != 2:
            raise ConfigError(f"runs: {len(ids)} are given, must be 2", hint="?runs=a,b")
        return as_json(details.paired(*map(self.watcher.index.find, ids)))

    def share(self, request: Request) -> Response:
        """Return a file with a sweep or several runs."""
        given = request.query_params
        name = given.get("sweep")
        sweep = self._sweep(name) if name else None
        ids = [run.run_id for run in share.best_trials(sweep)] if sweep else _ids(request, share.MOST_RUNS + 1)
        runs = [self.watcher.index.open(run_id) for run_id in ids]
        return HTMLResponse(share.page(runs, sweep, given.get("view", "")))

    def markdown(self, request: Request) -> Response:
        """Return the numbers of a run, a comparison or a sweep as Markdown."""
        given = request.query_params
        name = given.get("sweep")
        runs = [] if name else [self.watcher.index.find(run_id) for run_id in _ids(request, share.MOST_RUNS + 1)]
        sweep = self._sweep(name) if name else None
        return as_json({"markdown": share.markdown(runs, sweep, given.get("baselines") or None)})

    def ranks(self, request: Request) -> Response:
        """Return the heat map of the processes' times; null without any."""
        points = _whole(request.query_params.get("points"), "points") or ranks.DEFAULT_POINTS
        return as_json(self._opened(request).heat_map(min(points, curves.MOST_POINTS)))

    def logs(self, request: Request) -> Response:
        """Return the end of a log."""
        given, run = request.query_params, self._run(request)
        attempt, rank, lines = (_whole(given.get(name), name) for name in ("attempt", "rank", "lines"))
        found = details.log_tail(
            run, name=given.get("file") or None, attempt=attempt, rank=rank, lines=lines or details.DEFAULT_LINES
        )
        return as_json(found)

    def prompts(self, request: Request) -> Response:
        """Return the prompts, and how the milestones continue them."""
        opened = self._opened(request)
        return as_json({"samples": details.samples(opened)})

    def items(self, request: Request) -> Response:
        """Return the items of a task or, without a task, which tasks have items."""
        opened, given = self._opened(request), request.query_params
        with opened.lock:
            milestones = sorted(opened.refresh().state.milestones)
        if not given.get("task"):
            return as_json({"milestones": items.files(opened.run, milestones)})
        tokens, since, offset, count = (
            _whole(given.get(name), name) for name in ("tokens", "since", "offset", "count")
        )
        wanted = items.ItemsRequest(
            task=given["task"],
            tokens=max(milestones, default=0) if tokens is None else tokens,
            since=since,
            shown=given.get("show") or items.ALL,
            offset=offset or 0,
            count=items.DEFAULT_COUNT if count is None else count,
        )
        return as_json(items.page(opened.run, wanted))

    def documents(self, request: Request) -> Response:
        """Return the documents of a step."""
        step = _whole(request.query_params.get("step"), "step")
        if not step:
            raise ConfigError("step: is missing", hint="?step=1000")
        return as_json(documents(self._run(request), step))

    def act(self, request: Request) -> Response:
        """Change a run, or return what a person must confirm first."""
        given, name = request.query_params, str(request.scope["path"]).rpartition("/")[2]
        answer: dict[str, Any] = getattr(actions, name)(self._run(request), given)
        return as_json(answer, 200 if "check" in given else 202)

    def act_on_sweep(self, request: Request) -> Response:
        """Change a sweep, or return what a person must confirm first."""
        given, name = request.query_params, str(request.scope["path"]).rpartition("/")[2]
        does = {"stop": actions.stop_sweep, "resume": actions.resume_sweep, "labels": actions.labels}[name]
        return as_json(does(self._sweep(request.path_params["sweep_id"]), given), 200 if "check" in given else 202)

    def alerts(self, request: Request) -> Response:
        """Return which messages a run sends, and where."""
        return as_json(actions.alerts(self._run(request)))

    def _sweep(self, name: str) -> SweepPaths:
        found = next((sweep for sweep in list_sweeps(self.watcher.index.runs_dir) if sweep.run_id == name), None)
        if found is None:
            raise RunNotFoundError(f"{name:.100}: no such sweep", hint="`hlatctl runs` lists them")
        return found

    def _run(self, request: Request) -> RunPaths:
        return self.watcher.index.find(request.path_params["run_id"])

    def _opened(self, request: Request) -> OpenRun:
        return self.watcher.index.open(request.path_params["run_id"])


def _wanted(request: Request) -> curves.CurvesRequest:
    given = request.query_params
    keys = tuple(dict.fromkeys(key for key in given.get("keys", "").split(",") if key))
    return curves.CurvesRequest(
        keys=keys or None,
        points=_whole(given.get("points"), "points") or curves.DEFAULT_POINTS,
        every=_whole(given.get("every"), "every"),
        first_step=_whole(given.get("from"), "from"),
        last_step=_whole(given.get("to"), "to"),
        x=given.get("x", "step"),
    )


def _ids(request: Request, most: int) -> list[str]:
    return list(dict.fromkeys(name for name in request.query_params.get("runs", "").split(",") if name))[:most]


def _whole(text: str | None, name: str) -> int | None:
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise ConfigError(f"{name}={text:.40}: must be a whole number", hint=f"{name}=1000")
    return int(text)


def _report_page(run: RunPaths) -> Response:
    path = _report(run)
    if path is None:
        raise RunNotFoundError(f"{run.run_id} has no report yet", hint="it is written at the end")
    return FileResponse(path, media_type="text/html", headers={"content-security-policy": _REPORT_POLICY})


def _report(run: RunPaths) -> Path | None:
    path = run.report / "index.html"
    inside = path.is_file() and path.resolve().is_relative_to(run.root.resolve())
    return path if inside else None
