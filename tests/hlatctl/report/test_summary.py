"""The main facts and scores: the same texts on the page, in the Markdown summary, numbers.json and the terminal."""

from __future__ import annotations

import html
import json

from hlatctl.cli.status import end_lines
from hlatctl.report.build import HTML, build
from hlatctl.report.numbers import Milestone, Score
from hlatctl.report.record import read_record
from hlatctl.report.run_view import view_run
from hlatctl.report.summary import headline, score_table
from tests.hlatctl.conftest import MakeRun


def test_page_summary_numbers_and_terminal_have_the_same_facts(make_run: MakeRun) -> None:
    run = make_run()
    page = html.unescape(build(run, [HTML]).read_text(encoding="utf-8"))
    assert "quickstart · finished · made" in page
    view = view_run(run)
    assert view.config is not None
    facts = headline(read_record(run, view.config))
    names = [name for name, _ in facts]
    assert names[:4] == ["model", "tokens", "hardware", "wall time"]
    assert {"goodput", "training loss", "validation loss", "smoke_mmlu"} <= set(names)
    summary = (run.report / "summary.md").read_text(encoding="utf-8")
    lines = [line.split(maxsplit=1) for line in end_lines(view)]
    for name, text in facts:
        assert f"<dt>{name}</dt><dd>{text}</dd>" in page
        assert f"| {name} | {text} |" in summary
        assert " ".join([name, text]) in [" ".join(" ".join(line).split()) for line in lines]
    numbers = json.loads((run.report / "numbers.json").read_text(encoding="utf-8"))
    assert numbers["headline"] == [list(fact) for fact in facts]


def milestone(*scores: Score) -> Milestone:
    about = {"tokens": 1000, "step": 1, "status": "evaluated", "message": "", "contract": "c", "is_own": True}
    return Milestone(scores=list(scores), skipped={}, **about)  # type: ignore[arg-type]


def score(task: str, chance: float | None) -> Score:
    return Score(task=task, metric="acc", value=0.31, stderr=0.02, n=4, contract="c", chance=chance)


def test_guessing_has_a_column_if_some_score_of_it_is_known() -> None:
    header, rows = score_table([milestone(score("a", 0.25), score("b", None))])
    assert header == ["task", "metric", "guessing", "1K tokens"]
    assert rows == [["a", "acc", "0.250", "0.310 ± 0.020"], ["b", "acc", "–", "0.310 ± 0.020"]]
    header, rows = score_table([milestone(score("b", None))])
    assert (header[2:], rows[0][2:]) == (["1K tokens"], ["0.310 ± 0.020"])
