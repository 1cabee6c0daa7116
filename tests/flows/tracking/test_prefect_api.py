"""A flow finds an API that answers, needs no network, and leaves no server behind. Prefect is real."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.error import HTTPError

import pytest

from flows.tracking import local_server, prefect_api, ui_record
from flows.tracking.ui_record import UiRecord
from hlatctl.run import files
from tests.ports import free_port
from tests.waiting import wait_for

FLOW = """
import json, os, signal, sys, threading
from contextvars import copy_context
from pathlib import Path
from flows.tracking import prefect_api

prefect_api.configure(Path(sys.argv[1]))
from prefect import flow, task

@task(name="stage", task_run_name="stage")
def stage(number):
    return number

@flow(name="pretrain", flow_run_name="run-" + sys.argv[2])
def pipeline():
    stage(1)
    server = prefect_api._own_server
    print(json.dumps({"api": os.environ["PREFECT_API_URL"], "server": server.pid}), flush=True)
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[2] == "lonely":
        server.kill()
        server.wait()
    thread = threading.Thread(target=copy_context().run, args=(stage, 2))
    thread.start()
    thread.join()
    print("body ended", flush=True)

pipeline()
"""


def run_flow(
    runs_dir: Path, name: str, *, before: tuple[str, ...] = (), env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
    # A proxy that doesn't answer: loopback must be reached without it.
    environment |= {"http_proxy": "http://127.0.0.1:9", "PYTHONPATH": os.getcwd(), **(env or {})}
    return subprocess.run(
        [*before, sys.executable, "-c", FLOW, str(runs_dir), name],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
        check=False,
    )


def query(runs_dir: Path, sql: str) -> list[tuple[str, ...]]:
    database = sqlite3.connect(runs_dir / ".prefect" / "prefect.db")
    try:
        return database.execute(sql).fetchall()
    finally:
        database.close()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory: pytest.TempPathFactory, prefect_home: Path) -> Path:
    """Shared by the flows here."""
    folder = tmp_path_factory.mktemp("runs")
    shutil.copytree(prefect_home, prefect_api.home(folder))
    return folder


def without_network() -> tuple[str, ...]:
    command = ("unshare", "--net", "--map-root-user", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
    works = shutil.which("unshare") and subprocess.run([*command, "true"], capture_output=True, check=False)
    return command if works and works.returncode == 0 else ()


@pytest.mark.processes
def test_a_flow_runs_without_any_network_quietly_and_leaves_no_server(runs_dir: Path) -> None:
    done = run_flow(runs_dir, "alone", before=without_network())
    assert (done.returncode, done.stderr) == (0, "")
    assert not is_alive(json.loads(done.stdout.splitlines()[0])["server"])
    assert query(runs_dir, "SELECT name, state_type FROM flow_run") == [("run-alone", "COMPLETED")]
    assert query(runs_dir, "SELECT name, state_type FROM task_run") == [("stage", "COMPLETED")] * 2


@pytest.mark.processes
def test_the_api_of_a_killed_flow_ends_by_itself(runs_dir: Path) -> None:
    done = run_flow(runs_dir, "killed")
    assert done.returncode == -signal.SIGKILL
    wait_for(lambda: not is_alive(json.loads(done.stdout)["server"]))


@pytest.mark.processes
def test_the_body_of_a_flow_continues_without_its_api(runs_dir: Path) -> None:
    done = run_flow(runs_dir, "lonely", env={"PREFECT_CLIENT_MAX_RETRIES": "0"})
    assert done.stdout.splitlines()[-1] == "body ended"
    # Prefect raises its own error at the end; flows.tracking.prefect_flow distinguishes it from a stage's error.
    assert "httpx.ConnectError" in done.stderr


class _Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/api/health" else 404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Say nothing."""


@pytest.fixture
def someones_api() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Health)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def nobody() -> str:
    return f"http://127.0.0.1:{free_port()}"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The process's environment without Prefect's variables; restored afterwards."""
    before = dict(os.environ)
    for name in before:
        if name.startswith("PREFECT_") or name == "DO_NOT_TRACK":
            del os.environ[name]
    yield os.environ  # type: ignore[misc]
    prefect_api.stop()
    os.environ.clear()
    os.environ.update(before)


AUTH = "hlatctl:its-password"


@pytest.fixture
def open_ui(tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """Returns a function that pretends that a `hlatctl ui` with Prefect at an address is running."""
    with ExitStack() as stack:
        stack.enter_context(ui_record.only_ui(tmp_path))
        yield lambda url: ui_record.write(tmp_path, UiRecord(auth=AUTH, prefect=url))


def test_the_users_api_comes_first(
    tmp_path: Path, environment: dict[str, str], someones_api: str, nobody: str, open_ui: Callable[[str], None]
) -> None:
    open_ui(nobody)
    environment["PREFECT_API_URL"] = f"{someones_api}/api"
    prefect_api.begin(tmp_path)
    assert environment["PREFECT_API_URL"] == f"{someones_api}/api"
    assert "PREFECT_API_AUTH_STRING" not in environment


def test_a_named_api_has_time_to_answer_on_a_busy_machine(
    tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefect_api, "answers", lambda url, timeout_s=1.0: timeout_s > 10)
    environment["PREFECT_API_URL"] = "http://busy/api"
    assert prefect_api.begin(tmp_path, start=False)
    assert environment["PREFECT_API_URL"] == "http://busy/api"


def test_an_open_ui_shows_the_flow_which_knows_its_password(
    tmp_path: Path, environment: dict[str, str], someones_api: str, open_ui: Callable[[str], None]
) -> None:
    open_ui(someones_api)
    prefect_api.begin(tmp_path)
    assert environment["PREFECT_API_URL"] == f"{someones_api}/api"
    assert environment["PREFECT_API_AUTH_STRING"] == AUTH


def test_without_starting_one_only_an_api_that_is_running_is_used(
    tmp_path: Path, environment: dict[str, str], someones_api: str, nobody: str, open_ui: Callable[[str], None]
) -> None:
    said: list[str] = []
    assert not prefect_api.configure(tmp_path, said.append, start=False)
    environment["PREFECT_API_URL"] = f"{nobody}/api"
    assert not prefect_api.begin(tmp_path, said.append, start=False)
    assert not prefect_api.begin(tmp_path, said.append, start=False)
    assert said == [f"PREFECT_API_URL={nobody}/api does not answer; continuing without Prefect"]
    assert not prefect_api.home(tmp_path).exists()
    open_ui(someones_api)
    assert prefect_api.begin(tmp_path, start=False)
    assert environment["PREFECT_API_URL"] == f"{someones_api}/api"


def test_an_open_ui_is_known_to_its_own_user_only(tmp_path: Path, open_ui: Callable[[str], None]) -> None:
    open_ui("http://127.0.0.1:4200")
    assert ui_record.read(tmp_path) == UiRecord(auth=AUTH, prefect="http://127.0.0.1:4200")
    assert ui_record.ui_file(tmp_path).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("spoiled", ["others can read it", "somebody else's", "a link", "torn", "not an object", "old"])
def test_a_record_that_another_user_may_have_written_is_ignored(
    tmp_path: Path, open_ui: Callable[[str], None], spoiled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_ui("http://127.0.0.1:4200")
    path = ui_record.ui_file(tmp_path)
    if spoiled == "others can read it":
        path.chmod(0o644)
    elif spoiled == "somebody else's":
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    elif spoiled == "a link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.write_text({"torn": "torn {", "not an object": "[]"}.get(spoiled, '{"pid": 1, "prefect": "http://x"}'))
    assert ui_record.read(tmp_path) is None
    path.unlink()


def test_a_ui_that_is_gone_is_not_used(tmp_path: Path) -> None:
    record = {"auth": AUTH, "prefect": "http://127.0.0.1:4200", "mlflow": None, "pid": os.getpid()}
    files.write_json(ui_record.ui_file(tmp_path), record, private=True)
    assert ui_record.read(tmp_path) is None


@pytest.mark.processes
def test_a_users_api_that_does_not_answer_is_named_without_its_password(
    tmp_path: Path, environment: dict[str, str], nobody: str
) -> None:
    said: list[str] = []
    address = nobody.removeprefix("http://")
    environment["PREFECT_API_URL"] = f"http://ann:secret@{address}/api"
    prefect_api.begin(tmp_path, said.append)
    assert said == [f"PREFECT_API_URL=http://***@{address}/api does not answer; starting one beside this flow"]
    assert environment["PREFECT_API_URL"] != f"{nobody}/api"


@pytest.mark.processes
def test_the_api_beside_a_flow_answers_nobody_without_its_password(runs_dir: Path, environment: dict[str, str]) -> None:
    prefect_api.configure(runs_dir)
    url, auth = environment["PREFECT_API_URL"], environment["PREFECT_API_AUTH_STRING"]
    assert local_server.get(f"{url}/admin/version", auth, timeout_s=60)
    with pytest.raises(HTTPError, match="401"):
        local_server.get(f"{url}/admin/version", "hlatctl:wrong", timeout_s=60)
    assert prefect_api._own_server is not None
    argv = Path(f"/proc/{prefect_api._own_server.pid}/cmdline").read_text()
    assert auth.partition(":")[2] not in argv


def test_the_users_settings_are_kept_and_telemetry_is_off(tmp_path: Path, environment: dict[str, str]) -> None:
    environment["PREFECT_CLIENT_MAX_RETRIES"] = "7"
    environment["PREFECT_HOME"] = "/elsewhere"
    values = prefect_api.settings(tmp_path)
    assert (values["PREFECT_CLIENT_MAX_RETRIES"], values["PREFECT_HOME"]) == ("7", "/elsewhere")
    assert (values["DO_NOT_TRACK"], values["PREFECT_SERVER_ANALYTICS_ENABLED"]) == ("true", "false")
    assert values["PREFECT_RESULTS_DEFAULT_SERIALIZER"] == "json"


@pytest.mark.processes
def test_prefect_knows_every_setting(tmp_path: Path, environment: dict[str, str]) -> None:
    code = "import json, prefect.settings as s; print(json.dumps(s.get_current_settings().to_environment_variables()))"
    asked = prefect_api.settings(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment | asked, check=True
    )
    taken_up = json.loads(done.stdout)
    logging_handlers_and_others = {name for name in asked if "HANDLERS" in name} | {"DO_NOT_TRACK"}
    for name in sorted(set(asked) - logging_handlers_and_others):
        assert (name, taken_up.get(name, "").lower()) == (name, asked[name].lower())


def test_what_is_waited_for_is_named_after_two_seconds_and_then_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, said = 0.0, list[str]()
    monkeypatch.setattr("flows.tracking.local_server.time.monotonic", lambda: now_s)
    wait = local_server.Wait(said.append)
    for now_s in (1.0, 2.5, 3.0, 10.0, 18.0):  # noqa: B007 (read by the clock)
        wait.so_far_s("Prefect's API")
    assert said == ["waiting for Prefect's API to start", "waiting for Prefect's API to start, 18 s so far"]
