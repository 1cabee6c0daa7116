"""A run of three stages, trained here: mixture, batch, length of sequences and rotation change, and nothing is lost."""

from __future__ import annotations

import itertools
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conf.load import load
from conf.schema import SourceConfig, StageConfig
from conf.training_rules import EXIT_CODES, learning_rate
from hlatctl.report.appendix import sources_of_stages
from hlatctl.report.record import read_record
from hlatctl.run.checkpoint import checkpoint_steps, read_rank_states
from hlatctl.run.journal import read_events
from hlatctl.run.paths import RunPaths
from tests.trainer.conftest import MakeRun
from trainer.data.at import documents_at

STAGES = [
    StageConfig(name="pre", tokens=6 * 128, set={"data": {"weights": {"corpus.jsonl": 1}}}),
    StageConfig(
        name="mid", tokens=8 * 128, set={"data": {"weights": {"corpus.jsonl": 1, "few.jsonl": 1}}, "optimizer.lr": 1e-3}
    ),
    StageConfig(
        name="long",
        tokens=6 * 128,
        set={
            "train": {"seq_len": 64, "global_batch_size": 2},
            "model": {"rope_scaling": "yarn", "rope_original_seq_len": 32},
            "parallel.activation_checkpointing": "full",
        },
    ),
]
Train = Callable[[RunPaths, int], int]
MakeStaged = Callable[[str], RunPaths]


@pytest.fixture(scope="module")
def make_staged(mixed: dict[str, Any], make_run: MakeRun, tmp_path_factory: pytest.TempPathFactory) -> MakeStaged:
    def make(name: str) -> RunPaths:
        run = make_run(
            tmp_path_factory.mktemp(name) / "run",
            data={"path": None, "sources": [SourceConfig(path=source["path"]) for source in mixed["sources"]]},
            train={"stages": STAGES},
            checkpoint={"every_steps": 3, "keep": 99},
        )
        shutil.copyfile(Path(mixed["tokenizer"]["path"]).with_name("dataset.json"), run.dataset)
        return run

    return make


@pytest.fixture(scope="module")
def undisturbed(make_staged: MakeStaged, train_here: Train) -> RunPaths:
    run = make_staged("undisturbed")
    assert [train_here(run, attempt) for attempt in (1, 2, 3)] == [
        EXIT_CODES[o] for o in ("amend", "amend", "finished")
    ]
    return run


def steps_of(run: RunPaths) -> dict[int, tuple[float, ...]]:
    """Return the numbers of each step; a step that was trained again must have the same ones."""
    found: dict[int, tuple[float, ...]] = {}
    for event in (event for event in read_events(run) if event["kind"] == "step"):
        numbers = tuple(event[name] for name in ("tokens", "batch", "lr", "loss", "grad_norm", "param_norm"))
        assert found.setdefault(event["step"], numbers) == numbers
    return found


def lose(run: RunPaths, *, after: int) -> None:
    for step in checkpoint_steps(run):
        if step > after:
            shutil.rmtree(run.checkpoint(step))


def test_each_stage_has_its_tokens_rates_and_checkpoints(undisturbed: RunPaths) -> None:
    config, steps = load(undisturbed.config), steps_of(undisturbed)
    assert [steps[step][0] for step in sorted(steps)] == [128 * step for step in range(1, 21)]
    assert [steps[step][2] for step in sorted(steps)] == [learning_rate(step, config) for step in range(1, 21)]
    assert checkpoint_steps(undisturbed) == [3, 6, 9, 12, 14, 15, 18, 20]
    started = [event for event in read_events(undisturbed) if event["kind"] == "training_stage_started"]
    assert [(e["attempt"], e["name"], e["number"], e["step"]) for e in started] == [
        (1, "pre", 1, 1),
        (2, "mid", 2, 7),
        (3, "long", 3, 15),
    ]


def test_attempts_that_end_in_any_stage_change_no_bit(
    undisturbed: RunPaths, make_staged: MakeStaged, train_here: Train
) -> None:
    run = make_staged("disturbed")
    attempts = itertools.count(1)
    assert train_here(run, next(attempts)) == EXIT_CODES["amend"]
    assert train_here(run, next(attempts)) == EXIT_CODES["amend"]
    lose(run, after=6)  # an attempt that died in the second stage before its first checkpoint
    assert train_here(run, next(attempts)) == EXIT_CODES["amend"]
    lose(run, after=3)  # and one whose checkpoints were all damaged back to the first stage
    codes = [train_here(run, next(attempts)) for _ in range(3)]
    assert codes == [EXIT_CODES["amend"], EXIT_CODES["amend"], 0]
    assert steps_of(run) == steps_of(undisturbed)
    last, expected = (read_rank_states(each.checkpoint(20)).loader for each in (run, undisturbed))
    assert last == expected
    shards = [next(each.checkpoint(20).glob("*.safetensors")).read_bytes() for each in (run, undisturbed)]
    assert shards[0] == shards[1]


def test_a_source_of_several_stages_goes_on_where_it_was(undisturbed: RunPaths) -> None:
    shapes, tokens, read = [], [Counter[str]() for _ in STAGES], Counter[tuple[str, int, int]]()
    for step in range(1, 21):
        sequences = documents_at(undisturbed, step)["sequences"]
        shapes.append((len(sequences), sum(part["tokens"] for part in sequences[0])))
        for part in itertools.chain(*sequences):
            name = Path(part["file"]).name
            tokens[(step > 6) + (step > 14)][name] += part["tokens"]
            read.update(
                (name, part["row"], token) for token in range(part["first_token"], part["first_token"] + part["tokens"])
            )
    assert shapes == [(4, 32)] * 14 + [(2, 64)] * 6
    assert tokens[0] == {"corpus.jsonl": 6 * 128}, "its share of the first stage is all"
    assert min(tokens[1].values()) > 0
    rows = sources_of_stages(read_record(undisturbed, load(undisturbed.config)))
    counted = {(stage, source): int(read) for stage, source, _, _, read, _ in rows}
    names = [stage.name for stage in STAGES]
    assert counted == {(names[at], name): read for at, own in enumerate(tokens) for name, read in own.items()}
    assert {n for (name, *_), n in read.items() if name == "corpus.jsonl"} == {1}, "no token was read twice"
