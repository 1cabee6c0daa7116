from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.compose import amend
from conf.fork import check_continues, decay, have_same_tensors, is_of_data, of_stage
from conf.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    ForkConfig,
    OptimizerConfig,
    SourceConfig,
    StageConfig,
    TrainConfig,
)
from conf.sizes import checkpoints_kept
from conf.training_rules import learning_rate
from hlatctl.run.errors import ConfigError

PARENT = Config(train=TrainConfig(tokens=1_000_000, seq_len=512, global_batch_size=8))


def forked(step: int, *, seq_len: int = 512, tokens: int = 1_000_000) -> Config:
    origin = ForkConfig(run="parent", step=step, tokens=step * PARENT.tokens_per_step)
    return replace(PARENT, fork=origin, train=replace(PARENT.train, seq_len=seq_len, tokens=tokens))


@given(step=st.integers(0, 200), tokens=st.integers(0, 2_000_000))
def test_a_fork_of_equal_steps_counts_like_its_parent(step: int, tokens: int) -> None:
    fork = forked(step)
    assert fork.tokens_at(step + 7) == PARENT.tokens_at(step + 7)
    assert fork.step_reaching(tokens) == PARENT.step_reaching(tokens) == -(-tokens // PARENT.tokens_per_step)
    assert (fork.total_steps, fork.total_tokens) == (PARENT.total_steps, PARENT.total_tokens)


@given(step=st.integers(1, 200), seq_len=st.sampled_from([64, 512, 4096]), tokens=st.integers(1_000_000, 9_000_000))
def test_the_step_that_reaches_a_number_of_tokens_is_the_first_one(step: int, seq_len: int, tokens: int) -> None:
    fork = forked(step, seq_len=seq_len)
    reached = fork.step_reaching(tokens)
    assert fork.tokens_at(reached - 1) < tokens <= fork.tokens_at(reached)


def test_milestones_and_permanent_checkpoints_before_the_fork_belong_to_the_parent() -> None:
    parent = replace(
        PARENT, eval=EvalConfig(every_tokens=250_000), checkpoint=CheckpointConfig(keep_every_tokens=400_000, keep=2)
    )
    fork = replace(parent, fork=ForkConfig(run="parent", step=130, tokens=130 * parent.tokens_per_step))
    assert list(parent.milestones.values()) == [250_000, 500_000, 750_000, parent.total_tokens]
    assert fork.milestones == {s: t for s, t in parent.milestones.items() if t > 532_480}
    assert (parent.permanent_steps, fork.permanent_steps) == ([98, 196], [196])
    assert all(fork.is_permanent(step) == (step == 196) for step in range(131, 246))
    assert checkpoints_kept(fork) < checkpoints_kept(parent)


@pytest.mark.parametrize(
    ("data", "seed", "same"),
    [
        (DataConfig(path="/a", prefetch_batches=9, mask_across_documents=True), 1234, True),
        (DataConfig(sources=[SourceConfig(path="/a", weight=7.0)]), 1234, True),
        (DataConfig(path="/b"), 1234, False),
        (DataConfig(path="/a"), 1, False),
        (DataConfig(path="/a", validation_fraction=0.5), 1234, False),
    ],
)
def test_a_position_has_its_meaning_in_the_same_documents_and_order_only(
    data: DataConfig, seed: int, same: bool
) -> None:
    assert is_of_data(replace(PARENT, data=DataConfig(path="/a")), replace(PARENT, data=data, seed=seed)) is same


def instead(with_weights: bool) -> str:
    return f"a new run, with the weights: {with_weights}"


def test_longer_sequences_and_another_base_of_rotation_continue() -> None:
    fork = forked(100, seq_len=4096, tokens=9_000_000)
    llama3 = replace(fork.model, rope_scaling="llama3", rope_original_seq_len=512)
    for model in (replace(fork.model, rope_theta=5e5), llama3):
        check_continues(PARENT, replace(fork, model=model), anew=instead)


def test_a_tied_embedding_has_other_tensors() -> None:
    fork = forked(100)
    with pytest.raises(ConfigError, match="tie_embeddings") as caught:
        check_continues(PARENT, replace(fork, model=replace(fork.model, tie_embeddings=True)), anew=instead)
    assert caught.value.hint == "a new run, with the weights: False"


def test_another_optimizer_has_other_moments() -> None:
    fork = forked(100)
    with pytest.raises(ConfigError, match=r"optimizer\.name=muon: the checkpoint has the moments of adamw") as caught:
        check_continues(PARENT, replace(fork, optimizer=replace(fork.optimizer, name="muon")), anew=instead)
    assert caught.value.hint == "a new run, with the weights: True"


def test_an_average_of_the_weights_continues_and_can_end_but_not_begin() -> None:
    def averaged(config: Config, decay: float | None) -> Config:
        return replace(config, optimizer=replace(config.optimizer, ema_decay=decay))

    fork = forked(100)
    check_continues(averaged(PARENT, 0.99), averaged(fork, 0.999), anew=instead)
    check_continues(averaged(PARENT, 0.99), averaged(fork, None), anew=instead)
    with pytest.raises(ConfigError, match=r"optimizer\.ema_decay=0\.99: the checkpoint has no average") as caught:
        check_continues(averaged(PARENT, None), averaged(fork, 0.99), anew=instead)
    assert caught.value.hint == "a new run, with the weights: True"


def test_formats_with_master_weights_continue_each_other() -> None:
    assert have_same_tensors("fp32", "mixed")
    assert have_same_tensors("bf16", "bf16_sr")
    assert not have_same_tensors("mixed", "bf16_sr")


STABLE = replace(PARENT, optimizer=OptimizerConfig(schedule="wsd", lr=1e-3, warmup_steps=10))


@given(step=st.integers(10, 200), share=st.sampled_from([0.01, 0.1, 0.2, 1 / 3, 0.5]))
def test_a_branch_decays_from_its_checkpoint_on_over_the_share_of_its_steps(step: int, share: float) -> None:
    origin = ForkConfig(run="parent", step=step, tokens=STABLE.tokens_at(step))
    branch = amend(STABLE, decay(STABLE, replace(STABLE, fork=origin), share))
    branch = replace(branch, fork=origin)
    last = branch.total_steps
    rates = [learning_rate(each, branch) for each in range(step, last + 1)]
    assert rates[0] == STABLE.optimizer.lr
    assert rates == sorted(set(rates), reverse=True), "it decays at each step"
    assert rates[-1] == STABLE.optimizer.lr * STABLE.optimizer.min_lr_fraction
    assert abs((last - step) - share * last) <= 1


@pytest.mark.parametrize(
    ("step", "lr", "message"),
    [
        (5, 1e-3, r"at step 5 of parent it is 0\.0005 there, and its peak 0\.001"),
        (240, 1e-3, r"at step 240 of parent it is"),
        (100, 2e-3, r"it is 0\.001, here 0\.002"),
    ],
)
def test_a_branch_begins_at_the_peak_of_the_learning_rate(step: int, lr: float, message: str) -> None:
    origin = ForkConfig(run="parent", step=step, tokens=STABLE.tokens_at(step))
    after = replace(STABLE, fork=origin, optimizer=replace(STABLE.optimizer, lr=lr))
    with pytest.raises(ConfigError, match=message) as caught:
        decay(STABLE, after, 0.1)
    assert "--at" in str(caught.value.hint)


def test_a_fork_of_a_stage_has_its_values_and_ends_with_it() -> None:
    stages = [
        StageConfig(name="pre", tokens=409_600),
        StageConfig(name="mid", tokens=81_920, set={"optimizer.lr": 1e-5}),
        StageConfig(name="long", tokens=81_920, set={"train.global_batch_size": 4, "train.seq_len": 1024}),
    ]
    parent = replace(PARENT, train=replace(PARENT.train, stages=stages))
    child = of_stage(parent, 110, restart_data=False)
    assert (child.stages, child.optimizer.lr, child.train.tokens) == ((), 1e-5, 491_520)
    assert of_stage(PARENT, 110, restart_data=False) == PARENT
    with pytest.raises(ConfigError, match="stage long reads the corpus in the first stage's 8 rows"):
        of_stage(parent, 130, restart_data=False)
    assert of_stage(parent, 130, restart_data=True).train.seq_len == 1024


def test_a_fork_with_other_weights_of_its_sources_reads_them_from_the_beginning() -> None:
    sources = [SourceConfig(path="a"), SourceConfig(path="b", weight=3)]
    parent = replace(PARENT, data=DataConfig(sources=sources))
    assert is_of_data(parent, replace(parent, data=DataConfig(sources=sources, weights={"a": 2, "b": 6})))
    assert not is_of_data(parent, replace(parent, data=DataConfig(sources=sources, weights={"a": 1, "b": 1})))
