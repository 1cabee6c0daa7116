"""What the page does to a run: the same checks and confirmations as the commands, and no lever for a thief."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conf.amendments import fields_of, is_harmless
from conf.of_run import of_run
from conf.schema import Config
from hlatctl.driver_job import DriverJob
from hlatctl.report.run_view import view_sweep
from hlatctl.run.fold import read_state
from hlatctl.run.journal import JournalWriter
from hlatctl.run.lease import driver_token, hold_driver, hold_evaluator
from hlatctl.run.paths import RunPaths, SweepPaths
from tests.flows.live.conftest import OWN, MakePage, Page, make_sweep
from tests.hlatctl.conftest import MakeRun

CONTROL = {"Origin": OWN, "X-Hlatctl": "1"}


@pytest.fixture
def page(make_run: MakeRun, make_page: MakePage) -> Page:
    """A page that may change an interrupted run ``a``."""
    config = make_run("a", until="killed").config
    config.write_text(config.read_text().replace("~/.cache", "/cache"))  # as composing makes it
    return make_page(allow_control=True)


def post(page: Page, action: str, status: int = 202, /, **given: Any) -> dict[str, Any]:
    answer = page.browser.post(f"/api/runs/a/{action}", params=given, headers=CONTROL)
    assert answer.status_code == status, answer.text
    found: dict[str, Any] = answer.json()
    return found


def run_of(page: Page) -> RunPaths:
    return page.index.find("a")


def test_an_amendment_is_checked_then_confirmed_then_made(page: Page) -> None:
    found = post(page, "amend", 200, set="optimizer.lr=1e-4", check=1)
    assert found["lines"][0] == "optimizer.lr: 0.003 -> 0.0001"
    assert found["lines"][-1].startswith("amendment 1 begins when the run continues")
    assert of_run(run_of(page)).optimizer.lr == 0.003
    post(page, "amend", set="optimizer.lr=1e-4", number=found["number"], why="slower")
    (made,) = read_state(run_of(page)).amendments
    assert (made.changes, made.why) == ({"optimizer.lr": [0.003, 0.0001]}, "slower")


def test_of_two_browsers_that_amend_the_second_must_check_again(page: Page) -> None:
    one = post(page, "amend", 200, set="optimizer.lr=1e-4", check=1)
    two = post(page, "amend", 200, set="optimizer.lr=2e-4", check=1)
    post(page, "amend", set="optimizer.lr=1e-4", number=one["number"])
    refused = post(page, "amend", 409, set="optimizer.lr=2e-4", number=two["number"])
    assert "another amendment was made meanwhile" in refused["error"]
    assert of_run(run_of(page)).optimizer.lr == 1e-4


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ("notify.urls=[env:PATH]", "notify.urls: can't be changed from the page"),
        ("backend.env={LD_PRELOAD:/tmp/x.so}", "backend.env: can't be changed from the page"),
        ("eval.include_path=/tmp", "eval.include_path: can't be changed from the page"),
        ("eval.code.allow_unsandboxed=true", "eval.code.allow_unsandboxed: can't be changed from the page"),
        ("+notify.urls=[env:PATH]", "+notify.urls: no such key"),
        ("notify={urls:[env:PATH]}", "notify: no such key"),
        ("backend=nxd", "backend: no such key"),
        ("hydra.searchpath=[/tmp]", "hydra.searchpath: no such key"),
        ("optimizer.lr", "optimizer.lr: has no value"),
        ("optimizer.lr=${oc.env:HOME}", "optimizer.lr"),
        ("optimizer.lr=2e-4,notify.urls=[env:PATH]", "mismatched input"),
        ("model.num_layers=3", "model.num_layers=3: can't change in a run that exists"),
        ("optimizer.lr=-1", "optimizer.lr=-1"),
    ],
)
def test_an_amendment_that_names_code_or_an_address_or_breaks_a_rule_is_refused(
    page: Page, given: str, error: str
) -> None:
    for more in ({"check": 1}, {"number": 1}):
        assert error in post(page, "amend", 400, set=given, **more)["error"]
    assert read_state(run_of(page)).amendments == []


def test_an_amendment_that_was_not_checked_is_refused(page: Page) -> None:
    assert "number=" in post(page, "amend", 400, set="optimizer.lr=1e-4")["error"]


def test_harmless_keys_hold_no_text() -> None:
    harmless = {key: value for key, value in fields_of(Config()).items() if is_harmless(key)}
    assert {"optimizer.lr", "notify.on", "train.on_spike", "cluster.nodes", "budget.usd"} <= set(harmless)
    assert not {key for key in harmless if key.endswith(("path", "dir", "url", "urls", "env", "extra", "image"))}
    assert not any(isinstance(value, dict) for value in harmless.values())
    assert not is_harmless("nothing")
    assert not is_harmless("optimizer.lr.more")
    assert not is_harmless("optimizer")


def test_alerts_are_shown_and_switched_by_an_amendment_that_begins_at_once(page: Page) -> None:
    found = page.browser.get("/api/runs/a/alerts").json()
    kinds = {kind["name"]: kind["on"] for kind in found["kinds"]}
    assert (found["services"], kinds["loss_spike"], kinds["stall"], kinds["budget"]) == ([], True, True, True)
    with hold_driver(run_of(page)):
        lines = post(page, "amend", 200, set="notify.on=[milestone,straggler]", check=1)["lines"]
        assert lines[-1] == "amendment 1 begins immediately, without a restart"
    post(page, "amend", set="notify.on=[milestone,straggler]", number=found["number"])
    kinds = {kind["name"]: kind["on"] for kind in page.browser.get("/api/runs/a/alerts").json()["kinds"]}
    assert [name for name, on in kinds.items() if on] == ["milestone", "straggler"]


def test_an_archived_run_keeps_what_was_confirmed(page: Page) -> None:
    run = run_of(page)
    run.checkpoint(4).mkdir(parents=True)
    found = post(page, "archive", 200, check=1)
    assert "1 checkpoint" in found["lines"][0]
    assert run.checkpoint(4).is_dir()
    assert "its newest checkpoint has changed" in post(page, "archive", 409, keeps="none")["error"]
    with hold_driver(run):
        assert "drives it" in post(page, "archive", 409, keeps=found["keeps"])["error"]
    post(page, "archive", keeps=found["keeps"])
    assert page.browser.get("/api/runs/a").json()["row"]["status"] == "archived"
    assert "archived" in post(page, "resume", 409)["error"]


def test_stop_and_resume_say_what_they_do_before_they_do_it(page: Page) -> None:
    assert "newest checkpoint" in post(page, "resume", 200, check=1)["lines"][0]
    run = run_of(page)
    with hold_driver(run):
        assert "writes a checkpoint and stops" in post(page, "stop", 200, check=1)["lines"][0]
        assert "drives it" in post(page, "resume", 409, check=1)["error"]
    assert not read_state(run).stop_requested


class Jobs:
    """A scheduler with one job, which evaluates a run."""

    def state(self, place: Path) -> str:
        return "Slurm job 7 runs on node-1, time left 3:00"

    def interrupt(self, place: Path) -> None:
        place.unlink()


def test_a_job_that_evaluates_a_finished_run_is_shown_and_stopped(
    make_run: MakeRun, make_page: MakePage, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run("a")
    page = make_page(allow_control=True)
    with hold_evaluator(run):
        assert "is already finished" in post(page, "stop", 409, check=1)["error"]
        assert f"process {os.getpid()}" in post(page, "stop", 409)["hint"]
        monkeypatch.setattr("flows.control.drivers_for", lambda name: Jobs())
        DriverJob(launcher="slurm", token="t").write(run.evaluator_job)
        shown = page.browser.get("/api/runs/a").json()["evaluator"]
        assert shown["is_job"]
        assert f"process {os.getpid()}" in shown["process"]
        (line,) = post(page, "stop", 200, check=1)["lines"]
        assert "Finished tasks are kept. Its state: Slurm job 7 runs on node-1" in line
        assert run.evaluator_job.exists()
        post(page, "stop")
    assert not run.evaluator_job.exists()
    assert read_state(run).stop_by == "", "the run itself has finished"
    assert page.browser.get("/api/runs/a").json()["evaluator"] is None


def test_a_run_whose_budget_is_used_up_is_not_resumed(page: Page) -> None:
    run = run_of(page)
    with JournalWriter(run, "operator") as journal:
        changes = {"budget.node_hours": [None, 1e-9]}
        journal.append(
            "config_amended", number=1, changes=changes, at_step=None, newest_step=0, by="ana", why=""
        )  # fmt: skip
    assert "budget.node_hours" in post(page, "resume", 409, check=1)["error"]


@pytest.mark.parametrize("action", ["amend", "archive", "labels", "nothing", "alerts"])
def test_nothing_is_changed_or_checked_without_the_pages_own_headers(page: Page, action: str) -> None:
    for headers in ({}, {"Origin": OWN}, {**CONTROL, "Origin": "http://127.0.0.1:4200"}, {**CONTROL, "Cookie": ""}):
        answer = page.browser.post(f"/api/runs/a/{action}?check=1&set=optimizer.lr=1", headers=headers)
        assert answer.status_code in (401, 403)


def sweep_page(make_page: MakePage, folder: Path) -> tuple[SweepPaths, Callable[..., dict[str, Any]]]:
    """Return a sweep with a trial that runs, one that has ended and one to come, and how a page changes it."""
    (folder / "runs").mkdir()
    sweep = make_sweep(folder / "runs", "rates", {0: 3.5, 1: 3.1})
    with JournalWriter(sweep, "flow") as journal:
        journal.append("head_started", pid=1, host="node-0", token="")
        fields: dict[str, Any] = {"axes": [], "settings": {"parallel": 2}, "arms": 4, "trials": 4}
        journal.append("sweep_extended", argv=[], **fields)
        trial: dict[str, Any] = {"trial": 2, "run_id": "rates-t0002"}
        journal.append("trial_asked", arm=2, point={}, seed=None, overrides=[], **trial)
        journal.append("trial_started", **trial)
    page = make_page(allow_control=True)

    def act(name: str, status: int = 202, /, **given: Any) -> dict[str, Any]:
        answer = page.browser.post(f"/api/sweeps/rates/{name}", params=given, headers=CONTROL)
        assert answer.status_code == status, answer.text
        return dict(answer.json())

    return sweep, act


def test_a_sweep_without_a_driver_is_stopped_by_asking_its_trials_and_says_so(
    tmp_path: Path, make_page: MakePage, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("flows.control.request_stop", lambda run, by, wait_s: asked.append(run.run_id))
    sweep, act = sweep_page(make_page, tmp_path)
    assert view_sweep(sweep)[0].status == "interrupted"
    assert act("stop", 200, check=1)["lines"] == [
        "Running trials: 1. Each one writes a checkpoint and stops.",
        "Trials that have not started: 1 of 4. None of them starts.",
        "You can resume the sweep later.",
        "Its driver is dead, so the trials are asked directly.",
    ]
    assert asked == []
    assert act("stop")["status"] == "stopped"
    assert asked == ["rates-t0002"]
    assert act("stop", 409, check=1)["error"] == "sweep rates: is already stopped"


def test_a_sweep_with_a_driver_is_asked_to_stop_and_resumed_only_without_one(
    tmp_path: Path, make_page: MakePage, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep, act = sweep_page(make_page, tmp_path)
    with hold_driver(sweep):
        with JournalWriter(sweep, "flow") as journal:
            journal.append("head_started", pid=1, host="node-0", token=driver_token(sweep))
        assert act("stop")["status"] == "stopping"
        assert "drives it" in act("resume", 409)["error"]
    started: list[str] = []

    def start(run: RunPaths) -> SimpleNamespace:
        started.append(run.run_id)
        return SimpleNamespace(pid=77)

    monkeypatch.setattr("flows.runtime.programs.start_driver", start)
    assert act("resume", 200, check=1)["lines"][0] == "Trials that are left: 2 of 4. At most 2 run at the same time."
    assert (act("resume")["pid"], started) == (77, ["rates"])


def test_a_sweep_has_a_name_and_notes_from_the_page(tmp_path: Path, make_page: MakePage) -> None:
    sweep, act = sweep_page(make_page, tmp_path)
    act("labels", name="learning rates", note="the corpus is too small")
    labels = view_sweep(sweep)[0].labels
    assert (labels.name, [note.text for note in labels.notes]) == ("learning rates", ["the corpus is too small"])
