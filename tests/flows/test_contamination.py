"""Which checkpoint says what a run has read, which runs have a corpus, and what the two processes are asked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conf.load import dump
from conf.schema import Config
from flows import contamination
from hlatctl.cli.main import main
from hlatctl.run.checkpoint import write_manifest
from hlatctl.run.errors import CheckpointError, ConfigError, DataError, EvaluationError
from hlatctl.run.journal import FLOW_WRITER, JournalWriter
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import MilestoneState, RunState
from hlatctl.units import duration

_STATE = RunState(milestones={n * 1000: MilestoneState(milestone_tokens=n * 1000, step=n) for n in (1, 2)})
_HIT = {"ngrams": 3, "found": 3, "example": "to be", "file": "hamlet.txt", "row": 3}
_ANSWER = {
    "complete": False,
    "documents": 7,
    "text_bytes": 2_000_000,
    "total_documents": 14,
    "total_bytes": 62_000_000,
    "cpu_s": 1.0,
    "wall_s": 1.0,
    "processes": 2,
    "ngrams": 5,
    "tasks": {"quiz": {"words": 13, "items": 4, "short": 1, "overlapping": {"0": _HIT}}},
}


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    """A run that has reached two milestones; the checkpoint of the first is gone."""
    run = RunPaths(tmp_path / "runs" / "base")
    run.root.mkdir(parents=True)
    run.config.write_text(dump(replace(Config(), runs_dir=str(run.root.parent))), encoding="utf-8")
    run.dataset.write_text("{}", encoding="utf-8")
    with JournalWriter(run, FLOW_WRITER) as journal:
        journal.append("run_created", run_id="base", simulated=False, argv=[])
        for tokens, milestone in _STATE.milestones.items():
            journal.append("milestone", milestone_tokens=tokens, tokens=tokens, step=milestone.step)
    write_manifest(run.checkpoint(2), step=2, tokens=2000, world={})
    return run


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    calls: list[tuple[str, ...]] = []

    def ask_about(module: str, config: Config, *argv: str, show_talk: bool, yields: bool) -> str:
        assert yields
        calls.append((module, config.eval.suite, *argv))
        Path(argv[-1]).parent.mkdir(parents=True, exist_ok=True)
        Path(argv[-1]).write_text(config.eval.suite, encoding="utf-8")
        return ""

    def ask(module: str, *argv: str, show_talk: bool, yields: bool) -> str:
        assert yields
        calls.append((module, *argv))
        return json.dumps(_ANSWER)

    monkeypatch.setattr("flows.contamination.ask_about", ask_about)
    monkeypatch.setattr("flows.contamination.ask", ask)
    return calls


def test_a_milestone_without_a_checkpoint_takes_the_next_one(run: RunPaths) -> None:
    newest = contamination.upto(run, _STATE, None)
    assert (newest.milestone_tokens, newest.step, newest.is_later) == (2000, 2, False)
    first = contamination.upto(run, _STATE, 1000)
    assert (first.milestone_tokens, first.step, first.is_later) == (1000, 2, True)


def test_runs_without_a_corpus_or_a_checkpoint_are_refused(run: RunPaths) -> None:
    cases: list[tuple[RunState, int | None, type[Exception], str]] = [
        (RunState(evaluates="/models/llama", milestones=_STATE.milestones), None, DataError, "external model"),
        (RunState(simulated=True, milestones=_STATE.milestones), None, DataError, "simulated"),
        (RunState(), None, EvaluationError, "no milestone"),
        (_STATE, 9000, ConfigError, "no milestone of 9,000 tokens"),
        (RunState(milestones={3000: MilestoneState(milestone_tokens=3000, step=3)}), None, CheckpointError, "step 3"),
    ]
    for state, tokens, error, message in cases:
        with pytest.raises(error, match=message):
            contamination.upto(run, state, tokens)
    run.dataset.unlink()
    with pytest.raises(DataError, match=r"dataset\.json"):
        contamination.upto(run, _STATE, None)


def test_the_command_asks_for_items_and_then_for_a_scan(
    run: RunPaths, asked: list[tuple[str, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", "contamination", "base", "eval.suite=smoke", "--runs-dir", str(run.root.parent)]
    assert main([*words, "--at", "1000", "--workers", "2", "--shard", "3/8"]) == 0
    out, err = capsys.readouterr()
    items, scan = asked
    assert items[:2] == ("eval.item_texts", "smoke")
    assert Path(items[-1]).parent == run.contamination(1000)
    assert scan[0] == "trainer.data.overlap"
    given = dict(zip(scan[1::2], scan[2::2], strict=True))
    assert (given["--step"], given["--workers"], given["--shard"]) == ("2", "2", "3/8")
    assert Path(given["--items"]).read_text(encoding="utf-8") == "smoke"
    assert out.splitlines()[1].split()[:8] == ["quiz", "1K", "13", "4", "1", "1", "(25.0%)", "1"]
    assert "what was read up to step 2 is scanned" in err
    assert "60.0 MB of text are left: 30 s of one process, 15 s of 2" in err
    whole_s = Config().total_tokens / 1000 * 62 / 2
    assert f"{duration(whole_s)} of one process, {duration(whole_s / 2)} of 2" in err.splitlines()[-1]


def test_a_scan_of_other_items_keeps_the_items_of_the_first(run: RunPaths, asked: list[tuple[str, ...]]) -> None:
    for suite in ("smoke", "early", "smoke"):
        words = ["eval", "contamination", "base", f"eval={suite}", "--plan"]
        assert main([*words, "--runs-dir", str(run.root.parent)]) == 0
    first, other, again = (call[call.index("--items") + 1] for call in asked[1::2])
    assert first == again != other
    assert Path(first).read_text(encoding="utf-8") == "smoke"
    assert sorted(run.contamination(2000).iterdir()) == sorted([Path(first), Path(other)])


def test_a_plan_scans_one_chunk_and_prints_json(
    run: RunPaths, asked: list[tuple[str, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "contamination", "base", "--plan", "--json", "--runs-dir", str(run.root.parent)]) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert asked[1][-2:] == ("--chunks", "1")
    assert (printed["milestone_tokens"], printed["step"], printed["complete"]) == (2000, 2, False)
    assert printed["means"]["quiz"] == {"metric": "", "everything": None, "clean": None}


@pytest.mark.parametrize("words", [["--workers", "0"], ["--at", "many"], ["model.vocab_size=3"]])
def test_wrong_options_are_refused(run: RunPaths, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "contamination", "base", *words, "--runs-dir", str(run.root.parent)]) != 0
    assert "error: " in capsys.readouterr().err
