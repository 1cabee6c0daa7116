"""The report of a made-up run: golden numbers, summary and page; reproducible figures."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import conf.load
from hlatctl.report import build as report_page
from hlatctl.report.build import build
from hlatctl.report.contamination import Hit, Overlap, Overlaps, Scanned
from hlatctl.report.figures.figure import Figure
from hlatctl.report.numbers import Numbers
from hlatctl.report.record import Record, read_record
from hlatctl.report.summary import summary_markdown
from hlatctl.run import continuations, labels
from hlatctl.run.continuations import Continuation, Kept
from hlatctl.run.journal import JournalWriter, train_writer
from hlatctl.run.paths import RunPaths
from tests.hlatctl.conftest import MakeRun

GOLDEN = Path(__file__).parents[2] / "golden" / "report"
#: Set to rewrite the golden files; check the difference before you commit it.
UPDATE_ENV = "HLATCTL_UPDATE_GOLDEN"
#: The second text comes from a model that would like to be markup.
_TEXTS = [
    Kept(
        milestone_tokens=tokens,
        step=1,
        continuations=[
            Continuation(prompt="def __init__(self", text=text, stop="max_new_tokens"),
            Continuation(prompt="Once upon a time", text="\n\n\n", stop="max_new_tokens"),
        ],
    )
    for tokens, text in ((833_333, "(((\n\n\n\n("), (1_666_666, "</code><script>alert(1)</script>{{ title }}\x1b[2J"))
]


def compare(name: str, text: str) -> None:
    if os.environ.get(UPDATE_ENV):
        (GOLDEN / name).write_text(text, encoding="utf-8")
    assert text == (GOLDEN / name).read_text(encoding="utf-8")


def record_of(run: RunPaths) -> Record:
    return read_record(run, conf.load.load(run.config))


def numbers_of(run: RunPaths) -> Numbers:
    return record_of(run).numbers


def test_page_equals_the_golden_file(make_run: MakeRun) -> None:
    # Without figures, because their text depends on matplotlib's version; with a short configuration, because
    # a new key is no change of the page.
    record = replace(record_of(make_run()), texts=_TEXTS)
    compare("index.html", report_page.render_page(record, {}, "run_name: a <b>\ntrain:\n  max_steps: 20\n"))


def test_numbers_and_summary_equal_the_golden_files_and_the_same_journal_gives_the_same_bytes(
    make_run: MakeRun,
) -> None:
    run = make_run()
    first = build(run).read_bytes()
    compare("numbers.json", (run.report / "numbers.json").read_text(encoding="utf-8"))
    compare("summary.md", (run.report / "summary.md").read_text(encoding="utf-8"))
    figures = {path.name: path.read_bytes() for path in (run.report / "figures").iterdir()}
    assert build(run).read_bytes() == first
    assert {path.name: path.read_bytes() for path in (run.report / "figures").iterdir()} == figures
    names = "loss gradient_norm parameter_norm learning_rate throughput data_wait time"
    names += " evaluation_smoke_humaneval evaluation_smoke_mmlu"
    assert set(figures) == {f"{name}.{suffix}" for name in names.split() for suffix in ("svg", "csv")}


def test_a_report_can_keep_the_figures_whose_data_are_unchanged(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    build(run)
    (run.report / "figures" / "loss.csv").write_text("other data", encoding="utf-8")
    before = {path: path.read_bytes() for path in run.report.rglob("*.*") if path.name != "loss.csv"}
    drawn, svg = list[str](), Figure.svg

    def draw(figure: Figure) -> str:
        drawn.append(figure.name)
        return svg(figure)

    monkeypatch.setattr(Figure, "svg", draw)
    build(run, redraws=False)
    assert drawn == ["loss"]
    assert {path: path.read_bytes() for path in before} == before


def test_markdown_comes_with_its_figures_as_pictures(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Figure, "picture", lambda _figure, suffix: suffix.encode())
    page = build(make_run(), {"markdown"}, tmp_path / "out")
    text = page.read_text(encoding="utf-8")
    linked = re.findall(r"!\[Figure \d+\]\((.*)\)", text)
    assert "figures/loss.png" in linked
    assert {f"figures/{path.name}" for path in (tmp_path / "out" / "figures").iterdir()} == set(linked)


def test_tables_of_a_paper_name_tasks_as_papers_do(make_run: MakeRun) -> None:
    record = record_of(make_run())
    milestone = record.numbers.milestones[-1]
    scores = [replace(milestone.scores[0], task=task) for task in ("mmlu_stem", "leaderboard_bbh", "word_error")]
    numbers = replace(record.numbers, milestones=[replace(milestone, scores=scores)], name="The first")
    tables = report_page.latex_tables(replace(record, numbers=numbers))
    text = tables["milestones"]
    assert r"\caption{Scores of run The first at its milestones.}" in text
    assert r"\label{tab:example:milestones}" in text
    assert [row.partition(" &")[0] for row in text.splitlines()[9:12]] == ["BBH", "MMLU, stem", r"word\_error"]


def test_redone_steps_are_counted_once(make_run: MakeRun) -> None:
    run = numbers_of(make_run())
    assert run.step == 306
    assert [(a.from_step, a.last_step, a.lost_steps) for a in run.attempts] == [(0, 130, 30), (100, 306, 0)]


@pytest.mark.parametrize("until", ["created", "stages", "killed"])
def test_an_unfinished_run_has_a_report(make_run: MakeRun, until: str) -> None:
    run = make_run(until=until)
    html = build(run).read_text(encoding="utf-8")
    assert ("No steps yet." in html) == (until != "killed")
    assert ("data:image/svg+xml" in html) == (until == "killed")


def test_simulated_runs_are_marked_in_page_and_summary(make_run: MakeRun) -> None:
    run = make_run(simulated=True)
    html = build(run).read_text(encoding="utf-8")
    assert '<p class="banner"><strong>SIMULATED</strong>' in html
    assert "**SIMULATED**" in summary_markdown(run, conf.load.load(run.config))
    assert "SIMULATED" not in (GOLDEN / "index.html").read_text(encoding="utf-8")


def test_text_of_a_run_is_neither_markup_nor_template(make_run: MakeRun) -> None:
    run = make_run("<script>{{331*337}}", until="killed")
    with JournalWriter(run, "flow") as journal:
        journal.append("warning", message="<script>alert({{331*337}})</script>")
        journal.append("run_finished", outcome="failed", message="a <b> & c | d")
    provenance = json.loads(run.provenance.read_text(encoding="utf-8"))
    provenance["argv"] = ["hlatctl", "train", "experiment_name=<script>{{331*337}}</script>"]
    run.provenance.write_text(json.dumps(provenance), encoding="utf-8")
    html = build(run).read_text(encoding="utf-8")
    assert "<script>" not in html
    assert "111547" not in html
    assert "<h1>&lt;script&gt;{{331*337}}</h1>" in html
    assert "&lt;script&gt;alert({{331*337}})&lt;/script&gt;" in html
    assert "experiment_name=&lt;script&gt;{{331*337}}&lt;/script&gt;" in html
    assert "a \\<b> & c \\| d" in (run.report / "summary.md").read_text(encoding="utf-8")


def test_a_loss_that_is_not_finite_is_left_out(make_run: MakeRun) -> None:
    run = make_run("diverged", until="killed")
    step: dict[str, Any] = {"step": 131, "tokens": 131 * 8192, "lr": 1e-3, "step_s": 0.5, "data_wait_s": 0.0}
    with JournalWriter(run, "train-rank00000", attempt=1) as journal:
        nan = float("nan")
        journal.append("step", loss=nan, grad_norm=float("inf"), param_norm=nan, tokens_per_s=16384.0, **step)
    numbers = numbers_of(run)
    assert numbers.step == 131
    assert numbers.last_loss == pytest.approx(3.75, abs=0.2)


def test_scores_under_another_contract_have_their_own_column_a_mark_and_no_point_in_the_figure(
    make_run: MakeRun,
) -> None:
    run = make_run()
    with JournalWriter(run, "eval-900000") as journal:
        for contract, value in (("a" * 64, 4.0), ("b" * 64, 3.0)):
            score = {"metric": "loss_nats_per_token", "value": value, "stderr": 0.1, "n": 9, "contract": contract}
            journal.append(
                "eval_finished",
                milestone_tokens=900_000,
                step=1,
                contract=contract,
                skipped={},
                scores={"validation_loss": score},
            )
    record = numbers_of(run)
    own = [milestone for milestone in record.milestones if milestone.tokens == 900_000]
    assert [(m.contract[:1], m.is_own) for m in own] == [("a", True), ("b", False)]
    summary = summary_markdown(run, conf.load.load(run.config))
    row = next(line for line in summary.splitlines() if line.startswith("| validation_loss"))
    header = next(line for line in summary.splitlines() if line.startswith("| task"))
    assert "| 900K tokens | 900K tokens, contract 3 |" in header
    assert "3.000 ± 0.100 † |" in row
    assert "†: its contract differs from that of the first score of its row; not comparable." in summary
    page = build(run).read_text(encoding="utf-8")
    assert "its contract differs from that of the first score" in page
    drawn = (run.report / "figures" / "loss.svg").read_text(encoding="utf-8")
    assert ">3.000<" not in drawn


def test_a_page_has_at_most_twelve_milestones_of_texts_from_the_first_to_the_last(make_run: MakeRun) -> None:
    run = make_run(until="stages")
    kept = [Kept(milestone_tokens=10**6 * n, step=n, continuations=_TEXTS[0].continuations) for n in range(1, 101)]
    html = report_page.render_page(replace(record_of(run), texts=kept), {}, "")
    rows = [line for line in html.splitlines() if line.startswith('<tr><td class="number">') and "((" in line]
    shown = [int(row.partition('"number">')[2].partition("M<")[0]) for row in rows]
    assert (len(shown), shown[0], shown[-1]) == (12, 1, 100)
    assert "88 more milestones: <code>hlatctl generate example --history</code>" in html


def test_the_report_reads_the_texts_of_milestones(make_run: MakeRun) -> None:
    run = make_run()
    texts = [{"prompt": "a", "text": "b < c", "stop": "max_new_tokens"}]
    continuations.write(run, 833_333, {"step": 102}, texts)
    assert "<code>b &lt; c</code>" in build(run).read_text(encoding="utf-8")


def test_labels_are_text_in_the_summary(make_run: MakeRun) -> None:
    run = make_run()
    labels.write_label(run, labels.change(name="<img src=x> | \\<b>", note="</td>\n<script>"), by="someone")
    summary = summary_markdown(run, conf.load.load(run.config))
    assert "| name | \\<img src=x> \\| \\\\\\<b> |\n" in summary
    assert "| notes | \\</td> \\<script> |\n" in summary


def test_the_first_and_the_last_loss_of_a_short_run_are_of_different_steps(make_run: MakeRun) -> None:
    run = make_run(until="stages")
    with JournalWriter(run, train_writer(0), 1) as train:
        for step in range(1, 5):
            train.append("step", step=step, tokens=step * 8192, loss=float(10 - step), step_s=0.5)
    found = numbers_of(run)
    assert (found.first_loss, found.last_loss) == (8.5, 6.5)


def test_the_page_shows_evaluation_items_in_the_corpus(make_run: MakeRun) -> None:
    hits = {name: Hit(ngrams=3, found=1, example="to be", file="hamlet.txt", row=3) for name in ("3", "7")}
    scanned = Scanned(milestone_tokens=833_333, words=13, items=40, short=1, overlapping=hits)
    found = Overlap(task="<b>quiz", scanned=scanned, mostly=1)
    record = replace(record_of(make_run()), overlaps=Overlaps(rows=[found], unscanned=["<i>other"]))
    page = report_page.render_page(record, {}, "")
    assert "Evaluation items in the corpus" in page
    assert "833.3K" in page
    assert "Not scanned: &lt;i&gt;other." in page
    assert "&lt;b&gt;quiz" in page
    assert "2 (5.0%)" in page
    assert "Evaluation items in the corpus" not in report_page.render_page(replace(record, overlaps=None), {}, "")
