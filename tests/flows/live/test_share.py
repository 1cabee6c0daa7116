"""A shared file: what is inside, what is masked, and what its script may contain."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from flows.live.share import MARK, bundle
from hlatctl.cli.main import main
from hlatctl.report.compare import evaluated_milestone
from hlatctl.report.items import folder_of
from hlatctl.run.files import write_json
from hlatctl.run.fold import read_state
from hlatctl.run.journal import JournalWriter
from hlatctl.run.paths import RunPaths
from tests.flows.live.conftest import Page, make_sweep
from tests.hlatctl.conftest import MakeRun
from tests.hlatctl.item_rows import row, write_items


def content_of(html: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="shared">(.*?)</script>', html, re.S)
    assert found is not None
    content: dict[str, Any] = json.loads(found[1])
    return content


def test_a_file_has_the_answers_of_the_page_and_loads_nothing(page: Page) -> None:
    answer = page.browser.get("/api/share?runs=a,b&view=%23/compare?runs%3Da,b%26x%3Dtime")
    assert answer.status_code == 200
    assert "default-src 'none'; script-src 'sha256-" in answer.text
    assert not re.search(r'(src|href)="(?!#|data:)', answer.text.partition("<script>")[0])
    content = content_of(answer.text)
    assert content["view"] == "#/compare?runs=a,b&x=time"
    asked = page.browser.get("/api/runs/a/curves?keys=loss&points=3000").json()
    found = content["runs"]["a"]["curves"]
    assert found["all"]["series"]["loss"]["y"] == pytest.approx(asked["series"]["loss"]["y"], rel=1e-5)
    assert found["axes"]["step"]["xs"] == asked["xs"]
    assert set(found["axes"]) == {"step", "tokens", "time", "flops"}
    assert content["compared"][""]["scores"] == page.browser.get("/api/compare?runs=a,b").json()["scores"]


def test_secrets_are_masked_and_text_can_not_end_the_data(page: Page) -> None:
    with JournalWriter(RunPaths(page.runs_dir / "a"), "operator") as journal:
        note = "</script><b> https://me:hunter2@host/x and hf_abcdefghijklmnopqrstuvwxyz123456"
        journal.append("labelled", by="tester", tags={}, untag=[], note=note)
    html = page.browser.get("/api/share?runs=a").text
    assert "hunter2" not in html
    assert "hf_abcdef" not in html
    (note,) = [
        each["text"] for each in content_of(html)["runs"]["a"]["details"]["notes"] if "</script>" in each["text"]
    ]
    assert note == "</script><b> https://***@host/x and ***"


def test_a_file_does_not_say_where_runs_are(page: Page) -> None:
    for run_id in ("a", "b"):
        path = RunPaths(page.runs_dir / run_id).config
        found = path.read_text(encoding="utf-8")
        path.write_text(found.replace("runs_dir: /runs", f"runs_dir: /runs/{run_id}"), encoding="utf-8")
    assert "/runs/b" in page.browser.get("/api/compare?runs=a,b").text
    html = page.browser.get("/api/share?runs=a,b").text
    assert not [folder for folder in ("/runs/a", "/runs/b", os.fspath(page.runs_dir)) if f'"{folder}' in html]


def test_the_numbers_of_a_run_a_comparison_and_a_sweep_are_copied_as_markdown(page: Page) -> None:
    make_sweep(page.runs_dir, "s", {0: 3.5, 1: 3.1})
    with JournalWriter(RunPaths(page.runs_dir / "b"), "operator") as journal:
        journal.append(
            "labelled", by="tester", name="br|anch", tags={}, untag=[], note="hf_abcdefghijklmnopqrstuvwxyz1234"
        )
    config = RunPaths(page.runs_dir / "b").config
    config.write_text(config.read_text(encoding="utf-8").replace("lr: 0.003", "lr: 0.005"), encoding="utf-8")
    one, both, sweep = (
        page.browser.get(f"/api/markdown?{asked}").json()["markdown"] for asked in ("runs=b", "runs=a,b", "sweep=s")
    )
    assert one.startswith("# b\n")
    assert "| notes | *** |" in one
    assert "| br\\|anch | interrupted |" in both
    assert "| optimizer.lr | 0.003 | 0.005 |" in both
    assert sweep.startswith("# s\n")
    assert "3.1000" in sweep
    refused = page.browser.get("/api/markdown")
    assert (refused.status_code, refused.json()["error"]) == (400, "runs: 0 are given, must be 1 to 20")


def test_a_sweep_s_file_has_the_pages_of_its_best_trials(page: Page, make_run: MakeRun) -> None:
    make_sweep(page.runs_dir, "s", {0: 3.5, 1: 3.1, 2: None})
    make_run("s-t0001")
    content = content_of(page.browser.get("/api/share?sweep=s").text)
    assert content["view"] == "#/sweep/s"
    assert list(content["runs"]) == ["s-t0001"]
    assert content["sweeps"]["s"]["arms"][0]["arm"] == 1
    assert "It has the pages of the best 1 trial of 3." in content["notes"]


def test_two_runs_are_compared_question_by_question(page: Page) -> None:
    for run_id, right in (("a", 60), ("b", 70)):
        run = RunPaths(page.runs_dir / run_id)
        milestone = evaluated_milestone(run, read_state(run).milestones, None)
        rows = [row(str(n), float(n < right), document=json.dumps({"q": n})) for n in range(100)]
        write_items(run, milestone.milestone_tokens, "gsm8k", rows)
        scores = {"scores": {"gsm8k": {"metric": "exact_match"}}}
        write_json(folder_of(run, milestone) / "tasks" / "gsm8k.json", scores)
    (found,) = page.browser.get("/api/paired?runs=a,b").json()["rows"]
    assert (found["items"], found["gained"], found["lost"], found["is_real"]) == (100, 10, 0, True)
    assert page.browser.get("/api/paired?runs=a").status_code == 400
    assert content_of(page.browser.get("/api/share?runs=a,b").text)["paired"]["a,b"]["rows"] == [found]


@pytest.mark.parametrize(
    ("query", "message"), [("runs=", "must be 1 to 20"), ("runs=nowhere", "no such run"), ("sweep=x", "no such sweep")]
)
def test_what_can_t_be_shared(page: Page, query: str, message: str) -> None:
    answer = page.browser.get(f"/api/share?{query}")
    assert answer.status_code in (400, 404)
    assert message in answer.json()["error"]


def test_the_command_writes_a_file_and_replaces_only_its_own(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run("a")
    monkeypatch.chdir(tmp_path)
    runs_dir = ["--runs-dir", os.fspath(tmp_path / "runs")]
    for _ in range(2):
        assert main(["share", "a", *runs_dir]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == os.fspath(tmp_path / "a.html")
    text = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert MARK in text
    assert content_of(text)["view"] == "#/run/a"
    (tmp_path / "other.html").write_text("mine", encoding="utf-8")
    assert main(["share", "a", "--output", "other.html", *runs_dir]) != 0
    assert "was not written by `hlatctl share`" in capsys.readouterr().err
    os.mkfifo(tmp_path / "pipe.html")  # reading it would block
    assert main(["share", "a", "--output", "pipe.html", *runs_dir]) != 0
    assert "pipe.html: can't be written (is not a regular file)" in capsys.readouterr().err
    assert main(["share", "a", "--output", "a.txt", *runs_dir]) != 0
    assert "must be the name of an HTML file" in capsys.readouterr().err


def test_modules_become_one_script_and_unknown_forms_are_refused() -> None:
    script = bundle(
        {
            "a.js": 'import { one as two } from "./b.js";\nexport const three = two() + 1;\n',
            "b.js": '/** @param {import("./a.js").A} a */\nexport function one() {\n  return 1;\n}\n',
        }
    )
    assert 'const { one: two } = use("b.js");' in script
    assert "Object.assign(exports, { three });" in script
    with pytest.raises(ValueError, match=r"a\.js: has an import or export"):
        bundle({"a.js": 'export * from "./b.js";\n'})
