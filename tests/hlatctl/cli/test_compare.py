"""What `hlatctl compare` prints in each format, and its errors."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from hlatctl.cli.main import main
from hlatctl.run import files
from hlatctl.run.journal import JournalWriter
from hlatctl.run.paths import RunPaths
from tests.hlatctl.conftest import MakeRun
from tests.hlatctl.item_rows import row, write_items
from tests.hlatctl.scored_runs import CONTRACT, FIELDS, OTHER_FIELDS, hlat_scores, score, scored_run

GOLDEN = Path(__file__).parents[2] / "golden" / "compare"
#: Set to write the golden files anew; look at the difference before it is committed.
UPDATE_ENV = "HLATCTL_UPDATE_GOLDEN"
Compare = Callable[..., str]


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    """Runs: two that can be compared, one under another contract, one that is simulated."""
    folder = tmp_path / "runs"
    scored_run(folder, "base_1", hlat_scores())
    lacking = {name: kept for name, kept in hlat_scores(0.006).items() if name != "arc_easy"}
    scored_run(folder, "longer-2", lacking)
    scored_run(folder, "other-3", hlat_scores(0.1), whole=OTHER_FIELDS)
    scored_run(folder, "dry-4", {"mmlu": score("acc", 0.9, 0.001, 14_042)}, simulated=True)
    return folder


@pytest.fixture
def compare(runs_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Compare:
    """Runs `compare`, which must succeed, and gives its stdout."""
    monkeypatch.setenv("HLATCTL_RUNS_DIR", os.fspath(runs_dir))

    def call(*argv: str) -> str:
        code = main(["compare", *argv])
        captured = capsys.readouterr()
        assert (code, captured.err) == (0, "")
        return captured.out

    return call


@pytest.mark.parametrize(
    ("output", "name"),
    [("text", "table.txt"), ("markdown", "table.md"), ("json", "table.json"), ("latex", "table.tex")],
)
def test_every_format_is_the_golden_one(compare: Compare, output: str, name: str) -> None:
    text = compare("base_1", "longer-2", "other-3", "dry-4", "--baselines", "hlat", "--format", output)
    if os.environ.get(UPDATE_ENV):
        (GOLDEN / name).write_text(text, encoding="utf-8")
    assert text == (GOLDEN / name).read_text(encoding="utf-8")


def test_the_example_in_the_documents_is_what_is_printed() -> None:
    text = (Path(__file__).parents[3] / "docs" / "howto" / "evaluate.md").read_text(encoding="utf-8")
    section = text[text.index("The rows are those of HLAT") : text.index("The best value of a row")]
    shown = [line for line in section.splitlines() if line.startswith(("| ", "- "))]
    printed = (GOLDEN / "table.md").read_text(encoding="utf-8").splitlines()
    assert len(shown) > 10
    assert [line for line in shown if line not in printed] == []


def test_latex_is_balanced_and_every_row_has_every_column(compare: Compare) -> None:
    text = compare("base_1", "other-3", "dry-4", "--baselines", "hlat", "--format", "latex")
    bare = re.sub(r"\\[{}&%$#_]", "", text)
    depths = [bare[:end].count("{") - bare[:end].count("}") for end in range(len(bare) + 1)]
    assert (min(depths), depths[-1]) == (0, 0)
    assert bare.count("$") % 2 == 0
    assert "_" not in bare
    begun, ended = re.findall(r"\\begin\{(\w+)}", text), re.findall(r"\\end\{(\w+)}", text)
    assert (begun, ended) == (["table", "tabular"], ["tabular", "table"])
    (columns,) = re.findall(r"\\begin\{tabular}\{([lr]+)}", text)
    rows = [line for line in bare.splitlines() if line.endswith("\\\\") and "multicolumn" not in line]
    assert {row.count("&") for row in rows} == {len(columns) - 1} == {5 + 3 + 5 - 1}
    assert r"base\_1" in text
    assert bare.isascii()


def test_a_table_for_readers_has_names_and_no_hashes(runs_dir: Path, compare: Compare, tmp_path: Path) -> None:
    with JournalWriter(RunPaths(runs_dir / "base_1"), "operator") as journal:
        journal.append("labelled", by="me", tags={}, untag=[], note="", name="The first")
    text = compare("base_1", "other-3", "--format", "latex")
    assert r"\caption{Scores of The first and other-3, $\pm$ standard error.}" in text
    assert r"\label{tab:comparison}" in text
    assert r"contract &  &  &  &  & A & B \\" in text
    assert "base_" not in text
    assert "base_1" in compare("base_1", "other-3")
    written = compare("base_1", "other-3", "--format", "markdown", "--output", os.fspath(tmp_path / "out"))
    table = Path(written.strip())
    assert table.name == "comparison.md"
    assert "![Figure 1](figures/losses.png)" in table.read_text(encoding="utf-8")
    assert (table.parent / "figures" / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert main(["compare", "base_1", "--output", "x", "--runs-dir", os.fspath(runs_dir)]) == 10


def test_json_has_a_stable_form(compare: Compare) -> None:
    record = json.loads(compare("base_1", "--baselines", "hlat", "--format", "json"))
    assert list(record) == ["v", "columns", "rows", "notes"]
    assert record["v"] == 1
    columns = [
        "name",
        "title",
        "kind",
        "tokens",
        "step",
        "contracts",
        "limits",
        "data",
        "simulated",
        "imported",
        "source",
    ]
    rows = ["id", "section", "group", "part", "shots", "metric", "unit", "best", "cells"]
    assert all(list(column) == columns for column in record["columns"])
    assert all(list(row) == rows and len(row["cells"]) == 6 for row in record["rows"])
    cells = [cell for row in record["rows"] for cell in row["cells"] if cell]
    assert all(
        list(cell) == ["value", "stderr", "n", "conditions", "contract", "standing", "remark", "chance"]
        for cell in cells
    )
    assert all(list(cell["conditions"]) == ["shots", "limit", "whole", "data", "definition"] for cell in cells)
    mine, hlat = next(row for row in record["rows"] if row["id"] == "mmlu")["cells"][:2]
    assert (mine["value"], mine["stderr"]) == pytest.approx((41.3, 0.41))
    assert (mine["n"], len(mine["contract"]), mine["standing"], mine["remark"]) == (14_042, 64, "", "")
    assert (hlat["value"], hlat["stderr"], hlat["remark"]) == (41.318, 3.602, "published")


@pytest.mark.parametrize("output", ["text", "markdown", "latex"])
def test_every_format_shows_how_a_run_was_measured_and_marks_different_published_scores(
    runs_dir: Path, compare: Compare, output: str
) -> None:
    changed = {**FIELDS["tasks"], "gsm8k": {**FIELDS["tasks"]["gsm8k"], "shots": 1}}
    fields = {**FIELDS, "limit": 40, "tasks": changed}
    scored_run(runs_dir, "small-7", {"gsm8k": score("exact_match", 0.2, 0.06, 40)}, whole=fields)
    text = compare("small-7", "base_1", "--baselines", "hlat", "--format", output)
    between, mark = {"text": (" +", "¶"), "markdown": (r" \| +", "¶"), "latex": (" & ", r"\\P\{\}")}[output]
    row = between.join(["GSM8K", "1", "40", "accuracy"])
    assert re.search(rf"{row}.*20\.00 .* 6\.00.* 9\.40 .*\(shots 8, n 1319\).* {mark} \(shots 8, n 1319\)", text)
    assert "40 items" in text
    name = "base_1" if output == "text" else r"base\_1"
    assert f"{name} has another contract for GSM8K: limit is null, elsewhere 40" in text


def test_with_a_damaged_record_of_contracts_their_fields_are_unknown(
    runs_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs_dir / "base_1" / "evals" / "contract.json").write_text("{", encoding="utf-8")
    assert main(["compare", "base_1", "--runs-dir", os.fspath(runs_dir)]) == 0
    shown = capsys.readouterr()
    assert re.search(r"^limit +unknown$", shown.out, re.MULTILINE)
    assert shown.err.startswith(f"warning: {runs_dir}/base_1/evals/contract.json: can't be read")


def test_a_milestone_is_named_by_its_tokens(compare: Compare) -> None:
    for tokens in ("200B", "200000000000", "0.2T"):
        (cell,) = json.loads(compare("base_1", "--at", tokens, "--format", "json"))["rows"][0]["cells"]
        assert cell["value"] == 25.0
    newest = json.loads(compare("base_1", "--format", "json"))
    assert newest["columns"][0]["tokens"] == 400_000_000_000


def test_a_milestone_may_be_named_as_it_is_printed(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    make_run()
    argv = ["compare", "example", "--at", "2.51M", "--format", "json", "--runs-dir", os.fspath(tmp_path / "runs")]
    assert main(argv) == 0
    assert json.loads(capsys.readouterr().out)["columns"][0]["tokens"] == 306 * 8192


def test_a_run_of_the_smoke_suite_is_shown_too(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    make_run()
    assert main(["compare", "latest", "--runs-dir", os.fspath(tmp_path / "runs")]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^smoke_mmlu +\? +40 +acc +32\.50 ± 6\.84", text, re.MULTILINE)
    assert "its contract is unknown" in text


def test_scores_that_name_no_contract_have_that_of_their_event(runs_dir: Path, compare: Compare) -> None:
    def contracts() -> list[str]:
        (column,) = json.loads(compare("named-5", "--format", "json"))["columns"]
        return list(column["contracts"])

    run = scored_run(runs_dir, "named-5", {"boolq": score("acc", 0.7, 0.008, 3_270)}, whole=None)
    assert contracts() == []
    kept = {"boolq": score("acc", 0.7, 0.008, 3_270)}
    with JournalWriter(run, "eval-400000000000") as journal:
        journal.append("eval_finished", milestone_tokens=400_000_000_000, step=95_368, scores=kept, contract=CONTRACT)
    assert contracts() == [CONTRACT]


def test_scores_of_equal_task_contracts_compare_whatever_else_was_measured(runs_dir: Path, compare: Compare) -> None:
    subset = {**FIELDS, "tasks": {name: FIELDS["tasks"][name] for name in ("boolq", "gsm8k")}, "figures": {}}
    subset["tasks"] = {**subset["tasks"], "gsm8k": {**FIELDS["tasks"]["gsm8k"], "shots": 1}}
    scored_run(runs_dir, "some-8", {name: hlat_scores()[name] for name in ("boolq", "gsm8k")}, whole=subset)
    table = json.loads(compare("base_1", "some-8", "--format", "json"))
    remarks = {row["id"]: row["cells"][1]["remark"] for row in table["rows"] if row["cells"][1]}
    assert remarks == {"boolq": "", "gsm8k": "another_contract"}
    assert table["notes"] == ["some-8 has another contract for GSM8K: shots is 1, elsewhere 8"]


def test_bold_is_for_terminals_that_want_it(runs_dir: Path, compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    scored_run(runs_dir, "better-6", {"mmlu": score("acc", 0.9, 0.0041, 14_042)})
    plain = compare("base_1", "better-6")
    assert "\x1b" not in plain
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    shown = compare("base_1", "better-6")
    assert "\x1b[1m" in shown
    assert re.sub("\x1b\\[[0-9]*m", "", shown) == plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert compare("base_1", "better-6") == plain


@pytest.mark.parametrize(
    ("argv", "code", "error"),
    [
        (["nope"], 13, "error: nope: no run of that name in {runs}\nhint: `hlatctl runs` lists them\n"),
        (["base_1", "base"], 10, "error: RUN=base: base_1 is named twice\nhint: name every run once\n"),
        (
            ["base_1", "--baselines", "hlta"],
            10,
            "error: --baselines=hlta: no set of published scores has this name\nhint: did you mean hlat? known: hlat\n",
        ),
        (
            ["base_1", "--baselines", "rows"],
            10,
            "error: --baselines=rows: no set of published scores has this name\nhint: known: hlat\n",
        ),
        (
            ["base_1", "--at", "300B"],
            10,
            "error: --at=300B: base_1 has no evaluated milestone of 300,000,000,000 tokens\n"
            "hint: nearest: 200B (200000000000), 400B (400000000000)\n",
        ),
        (
            ["base_1", "--at", "600B"],
            10,
            "error: --at=600B: base_1 has no evaluated milestone of 600,000,000,000 tokens (its status is due)\n"
            "hint: nearest: 200B (200000000000), 400B (400000000000)\n",
        ),
        (
            ["base_1", "--at", "soon"],
            10,
            "error: --at='soon': is not a token count\nhint: write a whole number, or 500K, 2.5M, 200B, 1.8T\n",
        ),
        ([], 2, "error: missing argument 'RUN'\n"),
        (["base_1", "--format", "html"], 2, "error: invalid value for '--format': "),
    ],
)
def test_bad_input_gives_an_error(
    runs_dir: Path, argv: list[str], code: int, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *argv, "--runs-dir", os.fspath(runs_dir)]) == code
    captured = capsys.readouterr()
    assert captured.err.startswith(error.format(runs=runs_dir))
    assert captured.out == ""


def test_a_run_without_an_evaluated_milestone_is_an_error(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(until="stages")
    argv = ["compare", "example", "--runs-dir", os.fspath(tmp_path / "runs")]
    hint = "hint: `hlatctl status example` shows the run's state\n"
    assert main(argv) == 21
    assert capsys.readouterr().err == f"error: example: has no evaluated milestone\n{hint}"
    with JournalWriter(run, "flow") as journal:
        journal.append("milestone", milestone_tokens=833_333, tokens=835_584, step=102)
        journal.append("eval_failed", milestone_tokens=833_333, step=102, message="no", final=True)
    assert main(argv) == 21
    assert capsys.readouterr().err == f"error: example: has no evaluated milestone (833.3K failed)\n{hint}"


def answered(runs_dir: Path, run_id: str, tokens: int, right: int) -> None:
    """Write items of `boolq`, of which the first are right."""
    run = RunPaths(runs_dir / run_id)
    kept = {"target": "no", "answer": "yes", "filter": "none", "document": "{}"}
    write_items(
        run, tokens, "boolq", [row(str(n), 0.0, metrics=[("acc", float(n < right))], **kept) for n in range(12)]
    )
    files.write_json(run.eval(tokens) / "tasks" / "boolq.json", {"scores": {"boolq": score("acc", 0.0, None, 12)}})


def test_two_runs_and_two_milestones_are_compared_item_by_item(runs_dir: Path, compare: Compare) -> None:
    answered(runs_dir, "base_1", 200_000_000_000, 1)
    answered(runs_dir, "base_1", 400_000_000_000, 3)
    answered(runs_dir, "longer-2", 400_000_000_000, 12)
    shown = compare("base_1", "longer-2", "--paired", "--flips", "1")
    assert shown.startswith("first: base_1 at 400B tokens\nsecond: longer-2 at 400B tokens\n")
    assert "* more than chance" in shown
    assert shown.endswith("boolq: gained\n  boolq 3, right: no: 0 (yes) -> 1 (yes)\n")
    found = json.loads(compare("base_1:200B", "base_1:400B", "--paired", "--format", "json"))
    assert [(row["name"], row["items"], len(row["gained"])) for row in found["rows"]] == [("boolq", 12, 2)]
    assert found["rows"][0]["holm"] == 0.5
    assert found["rows"][0]["contracts"]["status"] == "unknown", "the first milestone has no score of it"
    (row,) = json.loads(compare("base_1", "longer-2", "--paired", "--format", "json"))["rows"]
    assert row["contracts"] == {"status": "equal", "differences": {}}


def test_a_paired_row_under_different_contracts_names_what_differs(runs_dir: Path, compare: Compare) -> None:
    for run_id, right in (("base_1", 3), ("other-3", 12)):
        answered(runs_dir, run_id, 400_000_000_000, right)
    shown = compare("base_1", "other-3", "--paired")
    assert "boolq  acc     different     12" in shown
    assert (
        "\nboolq: not only the models differ, so the difference may come from this: "
        'versions.lm_eval ("0.4.13", "0.4.12")\n'
    ) in shown


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (
            ["base_1", "--paired"],
            "error: --paired: 1 runs are named, must be two\nhint: name a milestone with RUN:200B\n",
        ),
        (["base_1", "longer-2", "--flips", "2"], "error: --flips=2: items are compared with --paired only\n"),
        (
            ["base_1", "longer-2", "--paired", "--baselines", "hlat"],
            "error: --baselines=hlat: published scores have no",
        ),
        (["base_1", "longer-2", "--paired", "--format", "latex"], "error: --format=latex: not with --paired\n"),
        (["base_1:x", "longer-2", "--paired"], "error: RUN:TOKENS='x': is not a token count\n"),
        (["base_1", "longer-2", "--paired"], "error: --paired: the two have no item in common"),
    ],
)
def test_what_can_not_be_paired_is_an_error(
    runs_dir: Path, argv: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *argv, "--runs-dir", os.fspath(runs_dir)]) in (10, 21)
    captured = capsys.readouterr()
    assert captured.err.startswith(error)
    assert captured.out == ""
