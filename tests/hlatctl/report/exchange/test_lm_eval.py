"""Scores in the form of lm-evaluation-harness's results file, read by the harness itself."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hlatctl.cli.main import main
from hlatctl.report.exchange import lm_eval
from hlatctl.run.paths import RunPaths
from tests.hlatctl.exported_runs import TOKENS, exported_run
from tests.hlatctl.scored_runs import FIELDS


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return exported_run(tmp_path / "runs")


def export(run: RunPaths, capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(["eval", "export", run.run_id, *argv, "--runs-dir", os.fspath(run.root.parent)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_harness_makes_its_table_of_an_export(run: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    utils = pytest.importorskip("lm_eval.utils")
    code, out, _ = export(run, capsys)
    table = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in utils.make_table(json.loads(out)).splitlines()
    ]
    assert code == 0
    rows = {line[0] or line[2]: line for line in table}
    assert [rows["strict"][place] for place in (2, 3, 4, 6, 8)] == ["strict", "8", "exact_match", "0.0940", "0.0080"]
    assert [rows["humaneval"][place] for place in (4, 6, 8)] == ["pass@1", "0.0762", "0.0140"]
    assert [rows["mmlu"][place] for place in (4, 6)] == ["acc", "0.4130"]
    assert "validation" not in out
    assert "chance" not in out, "the harness would show it as a metric"


def test_an_export_says_what_was_measured_and_where_it_is_from(
    run: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    found = json.loads(export(run, capsys)[1])
    assert found["n-samples"]["gsm8k"] == {"original": FIELDS["tasks"]["gsm8k"]["items"], "effective": 1_319}
    assert found["lm_eval_version"] == "0.4.13"
    assert found["group_subtasks"]["mmlu"] == ["mmlu_abstract_algebra"]
    assert (found["hlatctl"]["run_id"], found["hlatctl"]["step"], found["hlatctl"]["tokens"]) == (
        "base",
        95_368,
        TOKENS,
    )


def test_a_milestone_without_files_and_a_damaged_one_are_errors(
    run: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, error = export(run, capsys, "--at", "200B")
    assert (code, out) == (21, "")
    assert error.startswith("error: run base: no task of 200,000,000,000 tokens has a file of results\nhint: ")
    (run.eval(TOKENS) / "tasks" / "gsm8k.json").write_text("{", encoding="utf-8")
    code, out, error = export(run, capsys)
    assert (code, out) == (21, "")
    assert "gsm8k.json: can't be read" in error


@pytest.mark.parametrize("chat", [{"chat_template": "{{ messages }}"}, {"system_instruction": "Answer briefly."}])
def test_the_version_of_a_task_that_a_chat_was_asked_is_not_taken(chat: dict[str, str]) -> None:
    plain = {"results": {"piqa": {"acc,none": 0.5}}, "versions": {"piqa": 1.0}}
    assert lm_eval.read(plain).figures["piqa"].version == "1.0"
    assert lm_eval.read({**plain, **chat}).figures["piqa"].version is None


@pytest.mark.parametrize("version", ["Yaml", "N/A", None])
def test_a_task_without_a_version_has_none(version: str | None) -> None:
    found = lm_eval.read({"results": {"piqa": {"acc,none": 0.5}}, "versions": {"piqa": version}})
    assert found.figures["piqa"].version is None
