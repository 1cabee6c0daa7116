"""The pipeline under a real Prefect: tasks and states are recorded, and a run continues if Prefect disappears.

Prefect keeps settings and an engine for the whole process, so each test drives its run in a separate process.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from conf import load
from conf.schema import Config
from flows import pretrain
from flows.tracking import links, prefect_api
from hlatctl.run import runs
from hlatctl.run.journal import FLOW_WRITER, JournalWriter, read_events
from hlatctl.run.lease import hold_driver
from hlatctl.run.paths import RunPaths

pytestmark = pytest.mark.processes

Ask = Callable[[str], list[Any]]

DRIVE = """
import os, signal, sys, time
from pathlib import Path
from flows import pretrain
from flows.tracking import follower, links, prefect_api, prefect_flow
from hlatctl.run.errors import StoppedError
from hlatctl.run.journal import OPERATOR_WRITER, JournalWriter, read_events
from hlatctl.run.paths import RunPaths

follower.start = lambda ctx: []  # no MLflow
RUN, WHAT = RunPaths(Path(sys.argv[1])), sys.argv[2:]

def request_stop():
    with JournalWriter(RUN, OPERATOR_WRITER) as journal:
        journal.append("stop_requested", by="a test")

def requests():
    return sum(event["kind"] == "stop_requested" for event in read_events(RUN))

def flow_run():
    # Training doesn't wait for Prefect, but these tests do.
    while not (found := links.in_prefect(RUN, "http://p")):
        time.sleep(0.05)
    return found.rpartition("/")[2]

def cancel_in_prefect():
    # What the Cancel button of Prefect's page does.
    prefect_flow._POLL_S = 0.1
    flow_run_id = flow_run()
    from prefect.client.orchestration import get_client
    from prefect.states import Cancelling

    with get_client(sync_client=True) as client:
        client.set_flow_run_state(flow_run_id, Cancelling())
    while not requests():
        time.sleep(0.05)

def suspend_in_prefect():
    # What the Suspend button of Prefect's page does.
    prefect_flow._POLL_S = 0.1
    known, flow_run_id = requests(), flow_run()
    from prefect.client.orchestration import get_client
    from prefect.states import Suspended

    with get_client(sync_client=True) as client:
        while not client.read_flow_run(flow_run_id).state.is_running():  # the resumed run has not reached it yet
            time.sleep(0.05)
        client.set_flow_run_state(flow_run_id, Suspended(timeout_seconds=300), force=True)
    while requests() == known:
        time.sleep(0.05)

def lose_prefect():
    # Prefect knows the tasks so far: it names a task run only after it has created it.
    from uuid import UUID
    from prefect.client.orchestration import get_client
    from flows.tracking import prefect_stale

    flow_run_id = UUID(flow_run())
    if prefect_api._own_server.poll() is not None:
        return  # the second attempt
    with get_client(sync_client=True) as client:
        known = {}
        while "train attempt 1" not in known or not all(known[name] for name in set(known) - {"train attempt 1"}):
            time.sleep(0.05)
            known = {one.name: one.state and one.state.is_final() for one in prefect_stale._tasks(client, flow_run_id)}
    prefect_api._own_server.kill()
    prefect_api._own_server.wait()

def killed():
    flow_run()
    os.kill(os.getpid(), signal.SIGKILL)

if WHAT and WHAT[0] in ("cancelled", "suspended"):  # else two threads import it at the same time
    prefect_api.configure(RUN.root.parent)
    import prefect.client.orchestration, prefect.states

HAPPENS = {"cancelled": cancel_in_prefect, "suspended": suspend_in_prefect}
HAPPENS |= {"lost": lose_prefect, "stopped": request_stop, "killed": killed}

class Talk:
    def update(self, state, config): pass
    def message(self, text):
        print(text, flush=True)
        if WHAT and text.startswith("attempt ") and ": started" in text:
            HAPPENS[WHAT[0]]()

try:
    pretrain.drive(RUN, Talk())
except StoppedError:
    print("stopped")
"""


@pytest.fixture
def config(simulated_config: Config) -> Config:
    return dataclasses.replace(simulated_config, tracking=dataclasses.replace(simulated_config.tracking, enabled=True))


def run_python(*argv: str, api: str = "") -> subprocess.CompletedProcess[str]:
    """Run Python; processes without an ``api`` start their own."""
    environment = {name: value for name, value in os.environ.items() if api or not name.startswith("PREFECT_")}
    environment |= {"PREFECT_API_URL": api} if api else {}
    argv = (sys.executable, *argv)
    return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=600, check=False)


def drive(run: RunPaths, *arguments: str, api: str = "", code: int = 0) -> str:
    result = run_python("-c", DRIVE, os.fspath(run.root), *arguments, api=api)
    assert result.returncode == code, result.stderr
    return result.stdout


@pytest.fixture
def database(prefect_folder: Path, config: Config) -> Ask:
    """Query the database of the API that tests share, about this test's runs folder alone."""
    lock = f"%{config.runs_dir}/%"

    def ask(what: str) -> list[Any]:
        with closing(sqlite3.connect(prefect_api.home(prefect_folder) / "prefect.db")) as connection:
            return connection.execute(
                "with run as (select * from flow_run where parameters like ?), "
                f"task as (select * from task_run where flow_run_id in (select id from run)) {what}",
                (lock,),
            ).fetchall()

    return ask


TASKS = {
    "validate",
    "provenance",
    "data",
    "preflight",
    "compile",
    "warm cache",
    "coverage",
    "train attempt 1",
    "train attempt 2",
    "evaluate 833,333 tokens",
    "evaluate 1,666,666 tokens",
    "evaluate 2,506,752 tokens",
    "report",
}


def test_stages_attempts_and_evaluations_are_tasks_of_one_flow_run(
    config: Config, prefect_api_url: str, database: Ask
) -> None:
    run = pretrain.create(config, argv=[], run_id="seen")
    drive(run, api=prefect_api_url)
    (flow,) = database("select name, state_name from run")
    tasks = database("select name, state_name from task")
    lines = [text for (text,) in database("select message from log where flow_run_id in (select id from run)")]
    assert "attempt 1: started" in lines
    artifacts = {key for (key,) in database("select key from artifact where flow_run_id in (select id from run)")}
    assert flow == ("seen (SIMULATED)", "Completed")
    assert {name for name, _ in tasks} == TASKS
    assert {state for _, state in tasks} == {"Completed"}
    nested = database("select name from task where task_inputs like '%__parents__%'")
    assert nested == [], "Prefect's timeline shows no task that is inside another one"
    assert {"summary", "training"} <= artifacts


def bring_up_to_date(runs_dir: Path, api: str = "") -> str:
    """Do what `hlatctl sync` and `hlatctl ui` do for Prefect; return what is printed."""
    done = run_python("-m", "flows.tracking.prefect_stale", os.fspath(runs_dir), api=api)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_a_run_continues_when_prefect_disappears_and_is_copied_to_it_later(config: Config, prefect_home: Path) -> None:
    runs_dir = Path(config.runs_dir)
    shutil.copytree(prefect_home, prefect_api.home(runs_dir))
    run = pretrain.create(config, argv=[], run_id="alone")
    output = drive(run, "lost")
    kinds = [event["kind"] for event in read_events(run)]
    assert kinds.count("eval_finished") == 3
    assert kinds.count("attempt_started") == 2
    assert "run_finished" in kinds
    assert "Prefect" in output
    assert states(runs_dir) != {"alone (SIMULATED)": "Completed"}
    assert links.is_missed(run)
    assert "alone: copied to Prefect what it has missed" in bring_up_to_date(runs_dir)
    assert states(runs_dir) == {"alone (SIMULATED)": "Completed"}
    assert states(runs_dir, "task_run") == dict.fromkeys(TASKS, "Completed")
    assert not links.is_missed(run), "it isn't copied again"


SWEEP = """
import sys
from pathlib import Path
import httpx
from flows.tracking.prefect_sweep import PrefectView
from hlatctl.run.paths import SweepPaths

SWEEP, AWAY = SweepPaths(Path(sys.argv[1])), [True]
view = PrefectView(SWEEP, print, start=True)
from flows.tracking import prefect_api
prefect_api.configure(SWEEP.root.parent)
from prefect.client.orchestration import SyncPrefectClient

def sometimes_busy(answer):
    def call(*args, **options):
        if AWAY[0]:
            response = httpx.Response(503, request=httpx.Request("POST", "http://prefect"))
            raise httpx.HTTPStatusError("503 Service Unavailable", request=response.request, response=response)
        return answer(*args, **options)
    return call

for name in ("create_flow_run", "set_task_run_state"):
    setattr(SyncPrefectClient, name, sometimes_busy(getattr(SyncPrefectClient, name)))
view.begin()
assert view.trial_environment(0, "rates-t0000")
view._reports.join()
AWAY[0] = False
assert view.trial_environment(1, "rates-t0001")
view._reports.join()
AWAY[0] = True
for number in (0, 1):
    view.trial_ended(number, "finished")
view._reports.join()
AWAY[0] = False
view.end("finished", 300.0)
"""


def test_a_sweep_and_its_trials_are_in_prefect_once_although_it_was_busy_in_between(
    config: Config, prefect_api_url: str, database: Ask
) -> None:
    sweep = runs.create_sweep(Path(config.runs_dir), "rates", "overrides: []\n")
    with JournalWriter(sweep, FLOW_WRITER) as journal:
        settings: dict[str, Any] = {
            "folder": "/",
            "overrides": [],
            "objective": "loss",
            "direction": "min",
            "accelerators": False,
        }
        of: dict[str, Any] = {"axes": [{"key": "optimizer.lr"}], "settings": {}, "arms": 2, "trials": 2}
        journal.append("sweep_created", sweep_id="rates", simulated=False, **settings, **of)
        for n in range(2):
            run = runs.create_run(sweep.root.parent, sweep.trial(n).run_id, load.dump(config))
            with JournalWriter(run, FLOW_WRITER) as trial:
                trial.append("run_created", run_id=run.run_id, simulated=False, sweep="rates", trial=n)
                trial.append("run_finished", outcome="finished", step=0, tokens=0, message="")
            links.keep_missed(run, missed=n == 0)
            point = {"optimizer.lr": f"0.{n + 1}"}
            journal.append("trial_asked", trial=n, run_id=run.run_id, arm=n, point=point, seed=None, overrides=[])
            hours: dict[str, Any] = {"process_hours": 1.0, "saved_process_hours": 0.0}
            journal.append("trial_ended", trial=n, outcome="finished", why="", value=1.0, tokens=1, **hours)
        journal.append("sweep_finished", outcome="finished", message="")
    done = run_python("-c", SWEEP, os.fspath(sweep.root), api=prefect_api_url)
    assert done.returncode == 0, done.stderr
    assert sorted(database("select name, state_name from run")) == [
        ("rates", "Completed"),
        ("rates-t0000", "Completed"),
    ]
    assert sorted(database("select name, state_name from task")) == [
        ("rates-t0000", "Completed"),
        ("rates-t0001", "Completed"),
    ]
    assert database("select task.name from run join task on run.parent_task_run_id = task.id") == [("rates-t0000",)]


def states(runs_dir: Path, table: str = "flow_run") -> dict[str, str]:
    with sqlite3.connect(prefect_api.home(runs_dir) / "prefect.db") as database:
        return dict(database.execute(f"select name, state_name from {table}").fetchall())


def test_a_stopped_run_is_cancelled_and_one_whose_process_has_died_is_crashed(
    config: Config, prefect_api_url: str, database: Ask
) -> None:
    def states() -> dict[str, str]:
        return dict(database("select name, state_name from run"))

    dead = pretrain.create(config, argv=[], run_id="dead")
    drive(dead, "killed", api=prefect_api_url, code=-signal.SIGKILL)
    assert states() == {"dead (SIMULATED)": "Running"}
    stopped = pretrain.create(config, argv=[], run_id="stopped")
    with hold_driver(dead):  # as long as it has a driver, it is alive
        assert drive(stopped, "stopped", api=prefect_api_url).endswith("stopped\n")
    assert states() == {"dead (SIMULATED)": "Running", "stopped (SIMULATED)": "Cancelled"}
    assert ("Failed",) not in database("select state_name from task")
    said = bring_up_to_date(Path(config.runs_dir), prefect_api_url)
    assert "dead (SIMULATED): its process has died; it is marked as Crashed in Prefect" in said
    assert states() == {"dead (SIMULATED)": "Crashed", "stopped (SIMULATED)": "Cancelled"}
    assert ("Running",) not in database("select state_name from task")


def test_without_tracking_no_prefect_is_started(simulated_config: Config) -> None:
    run = pretrain.create(simulated_config, argv=[], run_id="quiet")
    assert "Prefect" not in drive(run)
    assert read_events(run)[-1]["outcome"] == "finished"
    assert not prefect_api.home(Path(simulated_config.runs_dir)).exists()


def test_cancelling_or_suspending_in_prefect_stops_the_run_and_resuming_continues_the_flow_run(
    config: Config, prefect_api_url: str, database: Ask
) -> None:
    run = pretrain.create(config, argv=[], run_id="cancelled")
    assert drive(run, "cancelled", api=prefect_api_url).endswith("stopped\n")
    asked = [event["by"] for event in read_events(run) if event["kind"] == "stop_requested"]
    assert asked == ["a person in Prefect"]
    assert database("select name, state_name from run") == [("cancelled (SIMULATED)", "Cancelled")]
    assert drive(run, "suspended", api=prefect_api_url).endswith("stopped\n")
    assert [event["by"] for event in read_events(run) if event["kind"] == "stop_requested"] == 2 * asked
    assert database("select name, state_name from run") == [("cancelled (SIMULATED)", "Cancelled")]
    drive(run, api=prefect_api_url)
    assert read_events(run)[-1]["outcome"] == "finished"
    (flow,) = database("select name, state_name, run_count, tags, id from run")
    tasks = [name for (name,) in database("select name from task where state_name = 'Completed'")]
    assert flow[:2] == ("cancelled (SIMULATED)", "Completed")
    assert flow[2] >= 2, "a request that was sent again also counts"
    assert links.in_prefect(run, "http://p") == f"http://p/runs/flow-run/{UUID(flow[4])}"
    assert set(json.loads(flow[3])) == {f"experiment: {config.experiment_name}", "cluster: simulated", "simulated"}
    assert sorted(name for name in tasks if name.startswith("train")) == ["train attempt 3"]
