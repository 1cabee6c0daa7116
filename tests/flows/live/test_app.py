"""The page's answers: rows, runs, curves, comparisons, logs and errors, from folders as they are."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from flows.live import answers
from flows.live.app import plotly_js
from flows.runtime import programs
from hlatctl.run.errors import LaunchError
from hlatctl.run.journal import FLOW_WRITER, JournalWriter, train_writer
from hlatctl.run.lease import driver_token, hold
from hlatctl.run.paths import RunPaths
from tests.flows.live.conftest import OWN, MakePage, Page, make_sweep
from tests.hlatctl.conftest import MakeRun

CONTROL = {"Origin": OWN, "X-Hlatctl": "1"}


def _get(page: Page, path: str) -> Any:
    answer = page.browser.get(path)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_folder_whose_name_is_not_unicode_hides_no_run(page: Page) -> None:
    shutil.copytree(page.runs_dir / "a", page.runs_dir / "c\udcff")
    page.index.poll()
    assert [row["run_id"] for row in _get(page, "/api/runs")["rows"]][-1] == "c?"
    assert _get(page, "/api/runs/a")["row"]["run_id"] == "a"


def test_rows_and_what_is_served(page: Page) -> None:
    found = _get(page, "/api/runs")
    assert found["complete"]
    assert {row["run_id"]: row["status"] for row in found["rows"]} == {"a": "finished", "b": "interrupted"}
    info = _get(page, "/api/info")
    assert info["runs_dir"] == str(page.runs_dir)
    assert info["servers"]["prefect"]["state"] == "off"
    assert page.browser.get("/api/runs").headers["content-encoding"] == "gzip"


def test_a_run_with_everything(page: Page) -> None:
    found = _get(page, "/api/runs/a")
    assert found["row"]["step"] == 306
    assert [attempt["cause"] for attempt in found["attempts"]] == ["killed", "finished"]
    assert found["attempts"][0]["lost_steps"] == 30
    assert found["attempts"][0]["lost_tokens"] == 30 * 8192
    assert [milestone["step"] for milestone in found["milestones"]] == [102, 204, 306]
    scores = found["milestones"][0]["scores"]
    assert scores["validation_loss"] == {"value": 4.31, "stderr": 0.021, "n": 65536, "chance": None, "headline": True}
    assert not scores["validation_perplexity"]["headline"]
    lanes = {lane["name"]: lane for lane in found["timeline"]}
    (compiled,) = lanes["compile"]["bars"]
    assert compiled["ended_unix_s"] - compiled["started_unix_s"] == pytest.approx(41)
    assert [bar["of"] for bar in lanes["training"]["bars"]] == ["attempt 1", "attempt 2"]
    assert [bar["status"] for bar in lanes["evaluation"]["bars"]] == ["finished"] * 3
    assert sum(found["goodput"]["seconds"].values()) == pytest.approx(found["goodput"]["wall_s"])
    assert found["config"]["train.tokens"] == 2_500_000
    assert found["links"] == {"prefect": None, "mlflow": None, "report": None}


def test_a_damaged_run_still_has_a_page(page: Page) -> None:
    (page.runs_dir / "a" / "config.yaml").write_text("{", encoding="utf-8")
    found = _get(page, "/api/runs/a")
    assert found["row"]["status"] == "damaged"
    assert found["problem"]
    assert found["config"] == {}
    assert _get(page, "/api/runs/a/curves?keys=loss,mfu&x=flops")["series"]["loss"]["y"]


def test_damaged_steps_are_named_with_their_line(page: Page) -> None:
    path = page.runs_dir / "a" / "journal" / "train-rank00000.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:39], b"garbage" + lines[39], *lines[40:]]))
    assert _get(page, "/api/runs/a")["damage"] == {
        "count": 1,
        "lines": ["journal/train-rank00000.jsonl: line 40 is damaged and ignored"],
    }


def test_a_journal_of_nonsense_is_no_failure_of_the_server(page: Page) -> None:
    with (page.runs_dir / "a" / "journal" / "flow.jsonl").open("ab") as file:
        file.write(
            b'{"kind": 3}\n\xff\xfe\n{"kind":"attempt_ended"}\n{"seq":9,"time_unix_s":1e99,"attempt":1,"kind":"x"}\n'
        )
    for path in ("", "/curves", "/ranks", "/logs", "/prompts"):
        _get(page, f"/api/runs/a{path}")


def test_a_run_that_is_removed_while_it_is_open_is_not_found(page: Page) -> None:
    _get(page, "/api/runs/a")
    shutil.rmtree(page.runs_dir / "a")
    answer = page.browser.get("/api/runs/a")
    assert answer.status_code == 404
    assert set(answer.json()) == {"error", "hint"}


def test_curves_follow_a_running_run(page: Page) -> None:
    path = "/api/runs/b/curves?keys=loss,grad_norm&points=50"
    before = _get(page, path)
    assert before["newest_step"] == 130
    with JournalWriter(RunPaths(page.runs_dir / "b"), train_writer(0), 1) as train:
        train.append("step", step=131, tokens=131 * 8192, loss=0.5, grad_norm=float("nan"))
    after = _get(page, f"{path}&from=131")
    assert (after["xs"], after["series"]["loss"]["y"]) == ([131], [0.5])
    assert after["series"]["grad_norm"] == {"y": [None], "low": [None], "high": [None]}


def test_columns_of_the_runs_asked_for_last_are_kept(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "_COLUMNS_BYTES", 1)
    for run_id in ("a", "b", "a"):
        _get(page, f"/api/runs/{run_id}/curves")
    monkeypatch.undo()
    for run_id, newest in (("a", 306), ("b", 130)):
        assert _get(page, f"/api/runs/{run_id}/curves?points=3")["steps"][-1] == newest


@pytest.mark.parametrize(
    ("path", "status", "error"),
    [
        ("/api/runs/a/curves?keys=los", 400, "keys=los: no such curve"),
        ("/api/runs/a/curves?points=-1", 400, "points=-1: must be a whole number"),
        ("/api/runs/a/curves?from=" + "9" * 5000, 400, "from=9"),
        ("/api/runs/a/curves?from=١", 400, "from="),
        ("/api/runs/nothing", 404, "nothing: no such run"),
        ("/api/runs/..%2Fa", 404, ""),
        ("/api/runs/%2e%2e", 404, ""),
        ("/api/nothing", 404, ""),
        ("/api/runs/a/stop", 405, ""),
        ("/api/runs/a/documents", 400, "step: is missing"),
        ("/api/runs/a/documents?step=999999999999999999", 400, "step=999999999999999999: the run has steps 1 to"),
        ("/api/runs/a/logs?lines=1000000", 400, "lines=1000000: must be 1 to"),
        ("/api/compare?runs=a,zzz", 404, "zzz: no such run"),
        ("/api/compare?runs=a&baselines=x", 400, "--baselines=x"),
        ("/static/../app.py", 404, ""),
        ("/static/%2e%2e/app.py", 404, ""),
        ("/runs/a/report", 404, "no report yet"),
        ("/api/sweeps/a", 404, "a: no such sweep"),
        ("/api/runs/a/labels", 405, ""),
    ],
)
def test_errors_are_json_with_a_hint(page: Page, path: str, status: int, error: str) -> None:
    answer = page.browser.get(path)
    assert answer.status_code == status, answer.text
    assert error in answer.json()["error"]
    assert "hint" in answer.json()


def test_a_failure_of_the_server_is_json_too(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(run_id: str) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(page.index, "open", fail)
    answer = page.browser.get("/api/runs/a")
    assert answer.status_code == 500
    assert "ZeroDivisionError" in answer.json()["error"]


def test_plotly_is_served_from_the_installed_package(page: Page) -> None:
    assert plotly_js().is_file()
    answer = page.browser.get("/static/plotly.min.js")
    assert answer.headers["content-type"].startswith("text/javascript")
    assert len(answer.content) == plotly_js().stat().st_size


def test_a_report_cannot_act_as_the_page(page: Page) -> None:
    report = page.runs_dir / "a" / "report"
    report.mkdir()
    (report / "index.html").write_text("<h1>report</h1>")
    answer = page.browser.get("/runs/a/report")
    assert answer.text == "<h1>report</h1>"
    assert "sandbox" in answer.headers["content-security-policy"]
    assert "allow-same-origin" not in answer.headers["content-security-policy"]
    assert _get(page, "/api/runs/a")["links"]["report"] == "/runs/a/report"


def test_a_report_that_is_a_link_out_of_the_run_is_not_served(page: Page, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    report = page.runs_dir / "a" / "report"
    report.mkdir()
    (report / "index.html").symlink_to(secret)
    assert page.browser.get("/runs/a/report").status_code == 404


def test_a_stage_that_ran_again_has_a_bar_for_each_time(page: Page) -> None:
    with JournalWriter(RunPaths(page.runs_dir / "a"), "flow") as journal:
        journal.append("stage_started", stage="compile", fingerprint="")
        journal.append("stage_failed", stage="compile", fingerprint="", message="no compiler")
    lane = next(lane for lane in _get(page, "/api/runs/a")["timeline"] if lane["name"] == "compile")
    assert [(bar["status"], bar["message"]) for bar in lane["bars"]] == [("finished", ""), ("failed", "no compiler")]


def test_a_sweep_has_its_arms_best_first_and_links_to_its_trials(page: Page) -> None:
    sweep = make_sweep(page.runs_dir, "grid", {0: 3.5, 1: 3.1, 2: None})
    found = _get(page, "/api/sweeps/grid")
    assert [(arm["arm"], arm["mean"]) for arm in found["arms"]] == [(1, 3.1), (0, 3.5), (2, None)]
    assert found["arms"][1]["difference"] == pytest.approx(0.4)
    assert [trial["run_id"] for trial in found["trials"]] == ["grid-t0000", "grid-t0001", "grid-t0002"]
    assert found["trials"][2]["status"] == "pruned"
    assert (found["importances"], found["links"]["report"]) == ({}, None)
    sweep.report.mkdir()
    (sweep.report / "numbers.json").write_text('{"importances": {"optimizer.lr": 1.0}}')
    (sweep.report / "index.html").write_text("the report")
    found = _get(page, "/api/sweeps/grid")
    assert found["importances"] == {"optimizer.lr": 1.0}
    assert page.browser.get(found["links"]["report"]).text == "the report"
    (sweep.report / "numbers.json").write_text("[")
    assert _get(page, "/api/sweeps/grid")["importances"] == {}


def test_names_tags_and_notes_are_changed_by_the_page(make_run: MakeRun, make_page: MakePage) -> None:
    make_run("a")
    page = make_page(allow_control=True)
    words = "name=first&tag=model=tiny&tag=old=1&note=it%20works"
    assert page.browser.post(f"/api/runs/a/labels?{words}", headers=CONTROL).status_code == 202
    assert page.browser.post("/api/runs/a/labels?untag=old", headers=CONTROL).status_code == 202
    found = _get(page, "/api/runs/a")
    assert (found["name"], found["tags"]) == ("first", {"model": "tiny"})
    assert [note["text"] for note in found["notes"]] == ["it works"]
    refused = page.browser.post("/api/runs/a/labels?tag=%20=1", headers=CONTROL)
    assert (refused.status_code, "its key must be" in refused.json()["error"]) == (400, True)


def test_comparison(page: Page) -> None:
    config = page.runs_dir / "b" / "config.yaml"
    config.write_text(config.read_text().replace("lr: 0.003", "lr: 0.002"))
    found = _get(page, "/api/compare?runs=a,b,a&baselines=hlat")
    assert [row["run_id"] for row in found["runs"]] == ["a", "b"]
    assert found["config"] == [{"key": "optimizer.lr", "values": [0.003, 0.002]}]
    assert "HLAT-7B" in found["baselines"]
    row = next(row for row in found["scores"] if row["id"] == "smoke_mmlu")
    assert [value["value"] for value in row["values"]] == [pytest.approx(32.5), pytest.approx(25.0)]


def test_comparison_with_a_run_that_has_no_score(page: Page, make_run: MakeRun) -> None:
    make_run("c", until="stages")
    found = _get(page, "/api/compare?runs=c,a")
    assert all(row["values"][0] is None and row["values"][1] for row in found["scores"])
    assert any("c: has no evaluated milestone" in note for note in found["notes"])


def test_logs_are_only_those_of_the_run(page: Page, tmp_path: Path) -> None:
    folder = page.runs_dir / "a" / "logs" / "attempt-0002"
    folder.mkdir(parents=True)
    lines = [f"[rank{number % 2}]: line {number}" for number in range(100)]
    (folder / "train.log").write_text("\n".join(lines) + "\n")
    (tmp_path / "secret.log").write_text("secret")
    (folder / "link.log").symlink_to(tmp_path / "secret.log")
    (folder.parent / "outside").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe.log")
    found = _get(page, "/api/runs/a/logs?lines=3")
    assert [file["name"] for file in found["files"]] == ["attempt-0002/train.log"]
    assert found["lines"] == lines[-3:]
    assert _get(page, "/api/runs/a/logs?rank=1&lines=2")["lines"] == ["line 97", "line 99"]
    for name in ("attempt-0002/link.log", "../config.yaml", "/etc/passwd", "outside/secret.log"):
        assert page.browser.get("/api/runs/a/logs", params={"file": name}).status_code == 400


def test_ranks_show_who_was_slowest(page: Page) -> None:
    assert _get(page, "/api/runs/b/ranks") is None
    with JournalWriter(RunPaths(page.runs_dir / "b"), train_writer(0), 1) as train:
        for step, rank in ((20, 3), (40, 1), (60, 3)):
            times: Any = {"median_s": 0.1, "max_s": 0.2, "slowest_rank": rank, "host": "n", "ratio": 2.0}
            train.append("rank_times", step=step, what="product", **times)
    found = _get(page, "/api/runs/b/ranks")
    assert (found["what"], found["steps"], found["ranks"]) == ("product", [20, 40, 60], [1, 3])
    assert found["seconds"] == [[None, 0.2, None], [0.2, None, 0.2]]
    with JournalWriter(RunPaths(page.runs_dir / "b"), train_writer(0), 2) as train:
        train.append("train_started", resumed_from_step=30, tokens=0)
    assert _get(page, "/api/runs/b/ranks")["steps"] == [20]


def test_a_stop_is_journalled(make_run: MakeRun, make_page: MakePage) -> None:
    run = make_run("b", until="killed")
    page = make_page(allow_control=True)
    with hold(run.driver_lock, lambda holder: pytest.fail(str(holder))):
        with JournalWriter(run, FLOW_WRITER) as flow:
            flow.append("head_started", token=driver_token(run))
        answer = page.browser.post("/api/runs/b/stop", headers=CONTROL)
        assert (answer.status_code, answer.json()["status"]) == (202, "stopping")
    written = [json.loads(line) for line in (run.journal / "operator.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in written] == ["stop_requested"]


def test_a_run_that_has_ended_cannot_be_stopped(make_run: MakeRun, make_page: MakePage) -> None:
    make_run("a")
    answer = make_page(allow_control=True).browser.post("/api/runs/a/stop", headers=CONTROL)
    assert (answer.status_code, answer.json()["error"]) == (409, "run a: is already finished")


def test_a_resume_starts_a_driver(make_run: MakeRun, make_page: MakePage, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run("b", until="killed")
    started: list[str] = []

    class Driver:
        pid = 77

    def start(paths: RunPaths) -> Driver:
        started.append(paths.run_id)
        return Driver()

    monkeypatch.setattr(programs, "start_driver", start)
    page = make_page(allow_control=True)
    answer = page.browser.post("/api/runs/b/resume", headers=CONTROL)
    assert (answer.status_code, answer.json()["pid"], started) == (202, 77, ["b"])
    with hold(run.driver_lock, lambda holder: pytest.fail(str(holder))):
        assert page.browser.post("/api/runs/b/resume", headers=CONTROL).status_code == 409

    def fail(paths: RunPaths) -> Driver:
        raise LaunchError("no driver after 60 s", hint="see a log")

    monkeypatch.setattr(programs, "start_driver", fail)
    answer = page.browser.post("/api/runs/b/resume", headers=CONTROL)
    assert (answer.status_code, answer.json()) == (409, {"error": "no driver after 60 s", "hint": "see a log"})


def test_a_finished_run_cannot_be_resumed(make_run: MakeRun, make_page: MakePage) -> None:
    make_run("a")
    answer = make_page(allow_control=True).browser.post("/api/runs/a/resume", headers=CONTROL)
    assert (answer.status_code, answer.json()["error"]) == (409, "run a: is finished")
