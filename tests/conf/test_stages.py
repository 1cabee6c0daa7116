"""Stages of a run: where they begin and end, what they set, and that nothing half-said is accepted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from conf.load import decode, dump, parse_yaml
from conf.schema import (
    BackendConfig,
    Config,
    DataConfig,
    EvalConfig,
    OptimizerConfig,
    SourceConfig,
    StageConfig,
    TrainConfig,
)
from conf.stages import source_tokens, stage_errors
from conf.training_rules import CheckpointPolicy, learning_rate
from conf.validate import validate
from hlatctl.run.errors import ConfigError

SOURCES = [SourceConfig(path="/data/web"), SourceConfig(path="/data/math", weight=3)]
RATE = {"optimizer": {"lr": 1e-4, "schedule": "linear", "min_lr_fraction": 0}}


def staged(*stages: StageConfig, max_steps: int | None = None) -> Config:
    """A run of 512 tokens a step, whose stages the test names."""
    return Config(
        train=TrainConfig(stages=[*stages], global_batch_size=8, seq_len=64, max_steps=max_steps),
        data=DataConfig(sources=SOURCES),
        optimizer=OptimizerConfig(lr=1e-3, warmup_steps=2, min_lr_fraction=0.5),
        eval=EvalConfig(every_tokens=4096, suite="smoke"),
    )


def a(tokens: int, name: str = "a", /, **values: Any) -> StageConfig:
    return StageConfig(name=name, tokens=tokens, set=values)


THREE = staged(
    a(5000, "pre", **{"data.weights": {"web": 1}}),
    a(2048, "mid", **RATE, data={"weights": {"math": 1, "web": 1}}),
    a(4096, "long", train={"seq_len": 256, "global_batch_size": 2}, model={"rope_theta": 5e5}),
)


def test_a_stage_ends_with_the_first_step_that_reaches_its_tokens() -> None:
    assert [(s.name, s.after_step, s.last_step, s.after_tokens, s.last_tokens) for s in THREE.stages] == [
        ("pre", 0, 10, 0, 5120),
        ("mid", 10, 14, 5120, 7168),
        ("long", 14, 22, 7168, 11264),
    ]
    assert (THREE.total_steps, THREE.total_tokens) == (22, 11264)
    assert [step for step in range(25) if THREE.ends_stage(step)] == [10, 14]


def test_steps_and_tokens_are_inverse_over_stages_with_other_batches() -> None:
    config = staged(a(2048, "small"), a(9000, "large", train={"global_batch_size": 16}), a(100, "short"))
    tokens = [config.tokens_at(step) for step in range(config.total_steps + 1)]
    assert tokens[:6] == [0, 512, 1024, 1536, 2048, 3072]
    for step, reached in enumerate(tokens[1:], 1):
        assert config.step_reaching(reached) == step
        assert config.step_reaching(reached - 1) == step
    assert config.milestones == {4: 2048, 6: 4096, 10: 8192, 13: 11264, 14: 12288}, "16 sequences in the last one too"
    assert list(config.milestones) == sorted(config.milestones), "also those of the ends of stages"


def test_a_stage_keeps_what_the_stage_before_it_has_set() -> None:
    pre, mid, long = (stage.config for stage in THREE.stages)
    assert [each.data.source_weights for each in (pre, mid, long)] == [[1.0, 0.0], [1.0, 1.0], [1.0, 1.0]]
    assert [each.optimizer.lr for each in (pre, mid, long)] == [1e-3, 1e-4, 1e-4]
    assert [each.train.seq_len for each in (pre, mid, long)] == [64, 64, 256]
    assert [each.model.rope_theta for each in (pre, mid, long)] == [1e4, 1e4, 5e5]
    assert [THREE.during(step).train.seq_len for step in (0, 1, 14, 15, 22, 99)] == [64, 64, 64, 256, 256, 256]


def test_each_stages_configuration_counts_the_whole_run_like_the_runs_own() -> None:
    for stage in THREE.stages:
        again = decode(parse_yaml(dump(stage.config)))
        for config in (stage.config, again):
            assert [(s.after_step, s.last_step) for s in config.stages] == [(0, 10), (10, 14), (14, 22)]
            assert (config.total_steps, config.milestones) == (THREE.total_steps, THREE.milestones)
            assert config.permanent_steps == THREE.permanent_steps == [10, 14, 22]
            assert config.data_rows == THREE.data_rows == 8
            assert [config.tokens_at(s) for s in range(23)] == [THREE.tokens_at(s) for s in range(23)]
            assert [learning_rate(s, config) for s in range(1, 23)] == [learning_rate(s, THREE) for s in range(1, 23)]
            assert config.during(22).train.seq_len == 256


def test_a_stage_that_sets_the_rate_begins_a_schedule_without_a_warm_up() -> None:
    pre = replace(THREE, train=replace(THREE.train, stages=[], tokens=5120))
    assert [learning_rate(s, THREE) for s in range(1, 11)] == [learning_rate(s, pre) for s in range(1, 11)]
    rates = [learning_rate(step, THREE) for step in range(11, 23)]
    assert rates == pytest.approx([1e-4 * (1 - n / 12) for n in range(1, 13)]), "over both stages, by steps"


def test_a_stage_may_continue_or_begin_a_schedule_and_warm_up_again() -> None:
    warm = a(1024, "mid", optimizer={"lr": 1e-3, "warmup_steps": 2})
    assert [learning_rate(s, staged(a(1024), warm)) for s in (2, 3, 4)] == pytest.approx([1e-3, 5e-4, 1e-3])
    again = replace(a(1024, "mid"), continues_schedule=False)
    assert [learning_rate(s, staged(a(2048), again)) for s in (2, 4, 6)] == pytest.approx([1e-3, 5e-4, 5e-4])
    assert learning_rate(4, staged(a(1024), a(1024, "mid"))) == learning_rate(4, staged(a(2048)))


def test_the_last_step_of_each_stage_is_saved_and_kept() -> None:
    policy = CheckpointPolicy(THREE)
    assert [policy.reason_to_save(step) for step in (9, 10, 14, 22)] == [None, "stop", "stop", "final"]
    assert policy.next_save(9) == 10
    kept = policy.to_delete([10, 11, 12, 13, 14, 15], verified=[], is_evaluated=lambda _: True)
    assert kept == {11} - {11} or not {10, 14} & kept


def test_max_steps_ends_a_run_in_any_stage() -> None:
    cut = replace(THREE, train=replace(THREE.train, max_steps=12))
    assert [(s.name, s.last_step) for s in cut.stages] == [("pre", 10), ("mid", 12)]
    assert (cut.total_steps, cut.total_tokens) == (12, 6144)
    assert learning_rate(12, cut) == 0, "its schedule ends there too"


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([a(512, "a b")], "train.stages[0].name='a b': must be"),
        ([a(512), a(512)], "train.stages[1].name=a: another stage has this name"),
        ([a(512, optimizer={"rate": 1})], "train.stages[0].set.optimizer.rate: unknown key"),
        ([a(512, **{"optimizer.name": "muon"})], "train.stages[0].set.optimizer.name=muon: a stage can't change it"),
        ([a(512, **{"cluster.nodes": 2})], "`hlatctl amend RUN cluster.nodes=2 --at STEP`"),
        ([a(512, optimizer={"lr": "high"})], "train.stages[0].set.optimizer.lr='high': must be a number"),
        ([a(512, optimizer={"lr": -1.0})], "train.stages[0].set.optimizer.lr=-1.0: must be greater than 0"),
        (
            [a(512), replace(a(512, "b", optimizer={"lr": 2.0}), continues_schedule=True)],
            "train.stages[1].set.optimizer.lr=2.0: the stage continues the schedule",
        ),
        ([a(512, optimizer=3)], "train.stages[0].set.optimizer: unknown key"),
        ([a(512), a(512, "b", train={"seq_len": 0})], "train.stages[1].set.train.seq_len=0: must be greater than 0"),
        ([a(512), a(512, "b", train={"global_batch_size": 12})], "must divide that of the first stage, 8"),
        ([a(512, data={"weights": {"web": 1, "code": 1}})], "data.weights.code: means 0 of the data.sources"),
        ([a(512, data={"weights": {"web": 0}})], "data.weights: all are 0"),
        ([a(512), a(512, "b", train={"micro_batch_size": 3})], "train.stages[1] (b): train.global_batch_size=8"),
        ([a(512, str(n)) for n in range(101)], "train.stages: has 101 stages, must have"),
    ],
)
def test_a_stage_that_cannot_be_is_refused(stages: list[StageConfig], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(replace(staged(*stages), eval=EvalConfig(enabled=False)))
    assert message in f"{caught.value.message}\n{caught.value.hint}"
    assert caught.value.hint


def test_a_backend_that_compiles_before_the_run_has_the_same_graphs_in_all_stages() -> None:
    longer = staged(a(512), a(512, "b", train={"seq_len": 128}), a(512, "c", optimizer={"lr": 1e-5}))
    neuron = replace(longer, eval=EvalConfig(enabled=False), backend=BackendConfig(name="nxd", device="neuron"))
    error = next(stage_errors(neuron, []))
    assert error.message.startswith("train.stages[1].set.train.seq_len=128: with backend.name=nxd all stages have")
    assert not list(stage_errors(replace(neuron, backend=BackendConfig()), []))


def test_a_fork_has_no_stages() -> None:
    forked = replace(THREE, eval=EvalConfig(enabled=False), fork=replace(THREE.fork, run="parent", step=3, tokens=1536))
    with pytest.raises(ConfigError, match="a fork has no stages"):
        validate(forked)


def test_the_tokens_of_a_source_are_those_of_the_stages_that_read_it() -> None:
    assert source_tokens(THREE, 2000) == [2000, 0]
    assert source_tokens(THREE, 11_264) == [5120 + 3072, 3072]
    assert source_tokens(replace(THREE, train=replace(THREE.train, stages=[])), 400) == [100, 300]


def test_a_source_is_named_by_its_path_or_the_end_of_it() -> None:
    for name in ("web", "/data/web", "data/web/"):
        assert DataConfig(sources=SOURCES, weights={name: 2}).source_weights == [2, 0]
    named = [replace(SOURCES[0], name="crawl"), SOURCES[1]]
    assert DataConfig(sources=named, weights={"crawl": 2, "math": 1}).source_weights == [2, 1]
    assert DataConfig(sources=named, weights={"web": 2}).source_weights == [0, 0]
    assert DataConfig(sources=SOURCES).source_weights == [1, 3]
    assert DataConfig().source_weights == [1]


def test_a_wrong_value_outside_of_the_stages_is_not_a_stages() -> None:
    config = replace(THREE, optimizer=replace(THREE.optimizer, name="unknown"), eval=EvalConfig(enabled=False))
    with pytest.raises(ConfigError, match=r"^optimizer.name=unknown: not known"):
        validate(config)
    assert [stage.name for stage in config.stages] == ["pre", "mid", "long"]
