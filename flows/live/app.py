"""The web application of the page: its files, and the runs as JSON.

Handlers that read files are plain functions: Starlette runs them in threads, so that a slow disk delays only its own
request.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from flows.live.json_response import as_json
from flows.live.session import HEALTH, Session
from flows.live.stream import Watcher, changes
from flows.tracking.local_server import Gate
from hlatctl.run.errors import ConfigError, HlatctlError, RunNotFoundError

if TYPE_CHECKING:
    from flows.live.answers import Answers

#: What the page can do to a run and to a sweep, with the functions of ``flows.live.actions``.
ACTIONS = ("stop", "resume", "labels", "amend", "archive")
SWEEP_ACTIONS = ("stop", "resume", "labels")
STATIC = Path(__file__).with_name("static")


@dataclass
class Service:
    """What the handlers need.

    Args:
        watcher: watches the runs.
        servers: returns the states of Prefect's and MLflow's servers, as in ``/api/info``.
        allow_control: whether the page may change runs.
    """

    watcher: Watcher
    servers: Callable[[], dict[str, Any]]
    allow_control: bool = False

    def info(self, _request: Request) -> Response:
        """Return the version, the settings and the servers' states."""
        return as_json(
            {
                "runs_dir": str(self.watcher.index.runs_dir),
                "allow_control": self.allow_control,
                "version": version("hlatctl"),
                "servers": self.servers(),
            }
        )

    def runs(self, _request: Request) -> Response:
        """Return the known rows."""
        index = self.watcher.index
        revision, complete = index.revision, index.complete
        return as_json({"complete": complete, "rows": index.rows(), "revision": revision})

    async def events(self, request: Request) -> Response:
        """Return a stream of changes."""
        given = request.query_params
        since = given.get("since", "")
        revision = int(since) if since.isdecimal() and since.isascii() and len(since) < 18 else None
        stream = changes(self.watcher, self.servers, given.get("run") or None, revision)
        return StreamingResponse(stream, media_type="text/event-stream")

    def late(self, name: str) -> Callable[[Request], Response]:
        """Return the handler of this name in ``flows.live.answers``, which is imported when it is first needed."""

        def handler(request: Request) -> Response:
            found: Response = getattr(self.answers, name)(request)
            return found

        return handler

    @cached_property
    def answers(self) -> Answers:
        """The object that answers requests about runs."""
        from flows.live.answers import Answers

        return Answers(self.watcher, self.servers)


def make_app(service: Service, *, token: str, port: int) -> ASGIApp:
    """Return the application, with its checks of host, origin and token."""
    late = service.late
    routes = [
        Route("/", lambda _request: FileResponse(STATIC / "index.html")),
        Route(HEALTH, lambda _request: PlainTextResponse("OK")),
        Route("/static/plotly.min.js", lambda _request: FileResponse(plotly_js())),
        Mount("/static", StaticFiles(directory=STATIC)),
        Route("/api/info", service.info),
        Route("/api/runs", service.runs),
        Route("/api/events", service.events),
        Route("/api/runs/{run_id}", late("run")),
        Route("/api/runs/{run_id}/curves", late("curves")),
        Route("/api/runs/{run_id}/ranks", late("ranks")),
        Route("/api/runs/{run_id}/logs", late("logs")),
        Route("/api/runs/{run_id}/prompts", late("prompts")),
        Route("/api/runs/{run_id}/items", late("items")),
        Route("/api/runs/{run_id}/documents", late("documents")),
        Route("/api/runs/{run_id}/alerts", late("alerts")),
        *(Route(f"/api/runs/{{run_id}}/{name}", late("act"), methods=["POST"]) for name in ACTIONS),
        Route("/api/sweeps/{sweep_id}", late("sweep")),
        *(Route(f"/api/sweeps/{{sweep_id}}/{name}", late("act_on_sweep"), methods=["POST"]) for name in SWEEP_ACTIONS),
        Route("/api/compare", late("compare")),
        Route("/api/paired", late("paired")),
        Route("/api/share", late("share")),
        Route("/api/markdown", late("markdown")),
        Route("/runs/{run_id}/report", late("report")),
        Route("/sweeps/{sweep_id}/report", late("sweep_report")),
    ]
    # 5,000 rows are 4 MB of JSON, which matters behind a forwarded port. The stream of events is not compressed.
    app = GZipMiddleware(Starlette(routes=routes, exception_handlers=_HANDLERS), compresslevel=1)
    return Gate(Session(app, token, port, allow_control=service.allow_control), port)


def plotly_js() -> Path:
    """Return Plotly's script in the installed package."""
    spec = importlib.util.find_spec("plotly")
    folders = list(spec.submodule_search_locations or []) if spec else []
    return Path(folders[0] if folders else ".") / "package_data" / "plotly.min.js"


async def _failed(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HlatctlError)
    status = 404 if isinstance(error, RunNotFoundError) else 400 if isinstance(error, ConfigError) else 409
    return as_json({"error": error.message, "hint": error.hint}, status)


async def _http_failed(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return as_json({"error": str(error.detail), "hint": ""}, error.status_code)


async def _broken(_request: Request, error: Exception) -> Response:
    # Starlette raises it again, so that the log has the traceback.
    return as_json({"error": f"the server failed ({type(error).__name__})", "hint": "see .ui/page.log"}, 500)


_HANDLERS: dict[Any, Any] = {HlatctlError: _failed, HTTPException: _http_failed, Exception: _broken}
