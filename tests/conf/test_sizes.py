"""Parameters, checkpoints and disk space, against counts made by hand or step by step."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.schema import (
    BackendConfig,
    CheckpointConfig,
    ClusterConfig,
    Config,
    EvalConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    PrecisionName,
    TrainConfig,
)
from conf.sizes import (
    checkpoint_bytes,
    checkpoints_kept,
    fast_dir_bytes,
    flops_per_token,
    layer_parameters,
    memory_copies_bytes,
    parameters,
    process_layers,
    process_stages,
    runs_dir_bytes,
    stage_layers,
    stage_parameters,
)
from hlatctl.run.errors import ConfigError

LLAMA_7B = ModelConfig(
    vocab_size=32_000, hidden_size=4096, intermediate_size=11_008, num_layers=32, num_heads=32, num_kv_heads=32
)
LLAMA2_70B = ModelConfig(
    vocab_size=32_000, hidden_size=8192, intermediate_size=28_672, num_layers=80, num_heads=64, num_kv_heads=8
)


def test_parameters_of_the_published_shapes() -> None:
    assert parameters(LLAMA_7B).total == 6_738_415_616
    assert parameters(LLAMA2_70B).total == 68_976_648_192


def test_parameters_of_a_model_small_enough_to_add_up_by_hand() -> None:
    model = ModelConfig(vocab_size=10, hidden_size=8, intermediate_size=12, num_layers=2, num_heads=4, num_kv_heads=2)
    counts = parameters(model)
    assert (counts.embedding, counts.lm_head) == (80, 80)
    assert counts.attention == 2 * (8 * 8 + 8 * 4 + 8 * 4 + 8 * 8)
    assert counts.feed_forward == 2 * 3 * 8 * 12
    assert counts.norms == 5 * 8


@pytest.mark.parametrize(("qk_norm", "norms"), [("none", 0), ("head", 2 * 6), ("all", (4 + 2) * 6)])
def test_heads_of_a_given_width_and_their_norms_are_counted_by_hand(
    qk_norm: Literal["none", "head", "all"], norms: int
) -> None:
    shape: dict[str, int] = {"hidden_size": 8, "intermediate_size": 12, "num_layers": 2, "num_heads": 4}
    model = ModelConfig(vocab_size=10, num_kv_heads=2, head_dim=6, qk_norm=qk_norm, **shape)  # type: ignore[arg-type]
    assert parameters(model).attention == 2 * (8 * 24 + 8 * 12 + 8 * 12 + 24 * 8)
    assert parameters(model).norms == 5 * 8 + 2 * norms
    # A token's products, and 2 x 2 FLOPs for each of 24 entries of the queries and each of 7 positions, three times.
    multiplied = parameters(model).total - 80
    assert flops_per_token(model, 7) == 6 * multiplied + 3 * 2 * 4 * 24 * 7
    halves = Config(model=model, parallel=ParallelConfig(tensor_parallel_size=2))
    shared = 2 * 8 + (norms if qk_norm == "head" else norms // 2)
    assert layer_parameters(halves) == (2 * 8 * 24 + 2 * 8 * 12 + 3 * 8 * 12) // 2 + shared


MIXTURE = ModelConfig(
    vocab_size=10,
    hidden_size=8,
    intermediate_size=12,
    num_layers=3,
    num_heads=2,
    num_kv_heads=2,
    num_experts=4,
    experts_per_token=2,
    expert_intermediate_size=6,
    num_shared_experts=1,
    num_dense_layers=1,
    kv_lora_rank=5,
    q_lora_rank=7,
    qk_nope_head_dim=4,
    qk_rope_head_dim=2,
    v_head_dim=3,
)


def test_a_mixture_with_latent_attention_small_enough_to_add_up_by_hand() -> None:
    counts = parameters(MIXTURE)
    assert counts.attention == 3 * (8 * 7 + 7 * 2 * 6 + 8 * (5 + 2) + 5 * 2 * (4 + 3) + 2 * 3 * 8)
    assert counts.norms == 7 * 8 + 3 * (7 + 5)
    assert counts.feed_forward == 3 * 8 * (12 + 2 * 6)
    assert counts.routers == 2 * 8 * 4
    assert (counts.experts, counts.active_experts) == (2 * 4 * 3 * 8 * 6, 2 * 2 * 3 * 8 * 6)
    assert counts.total - counts.active == counts.experts - counts.active_experts
    # Scores have the width of queries, and their products with values that of values.
    assert flops_per_token(MIXTURE, 7) == 6 * (counts.active - 80) + 6 * 3 * 2 * (6 + 3) * 7


@pytest.mark.parametrize(("tensor", "experts"), [(1, 1), (1, 4), (2, 1), (2, 4)])
def test_the_processes_of_a_mixture_have_their_share_of_its_experts(tensor: int, experts: int) -> None:
    parallel = ParallelConfig(tensor_parallel_size=tensor, expert_parallel_size=experts, pipeline_parallel_size=2)
    config = Config(model=MIXTURE, parallel=parallel)
    whole = 3 * 8 * 6 * 4
    assert layer_parameters(config, mixture=True) - layer_parameters(config) == (
        whole // (experts if experts > 1 else tensor) + 8 * 4 + 3 * 8 * (6 - 12) // tensor
    )
    if tensor == 1 and experts == 1:
        assert sum(stage_parameters(config, stage) for stage in range(2)) == parameters(MIXTURE).total
        assert checkpoint_bytes(config) == 12 * parameters(MIXTURE).total + config.world_size * 65_536


def test_a_model_of_a_module_has_the_given_counts_with_or_without_a_shape() -> None:
    described = replace(MIXTURE, module="acme", total_parameters=parameters(MIXTURE).total + 10, active_parameters=900)
    assert (parameters(described).total, parameters(described).active) == (parameters(MIXTURE).total + 10, 900)
    unknown = replace(described, total_parameters=10**9, active_parameters=None)
    assert (parameters(unknown).total, parameters(unknown).active, flops_per_token(unknown, 7)) == (10**9, 10**9, 6e9)
    counted = replace(unknown, flops_per_token=5_000, score_flops_per_token=30)
    assert flops_per_token(counted, 7) == 5_000 + 30 * 7
    halves = Config(model=unknown, parallel=ParallelConfig(pipeline_parallel_size=2))
    assert [stage_parameters(halves, stage) for stage in range(2)] == [5 * 10**8] * 2
    with pytest.raises(ConfigError, match=r"model\.total_parameters=null: unknown for model\.module=acme"):
        parameters(replace(MIXTURE, module="acme"))


def test_the_pipeline_stages_have_all_parameters_and_layers() -> None:
    config = Config(model=replace(LLAMA_7B, num_layers=30), parallel=ParallelConfig(pipeline_parallel_size=4))
    assert [len(stage_layers(config, stage)) for stage in range(4)] == [8, 8, 7, 7]
    assert [layer for stage in range(4) for layer in stage_layers(config, stage)] == list(range(30))
    assert sum(stage_parameters(config, stage) for stage in range(4)) == parameters(config.model).total


def test_a_process_has_every_fourth_stage_of_an_interleaved_pipeline() -> None:
    parallel = ParallelConfig(pipeline_parallel_size=4, pipeline_schedule="interleaved_1f1b", pipeline_chunks=2)
    config = Config(model=replace(LLAMA_7B, num_layers=18), parallel=parallel)
    assert process_stages(config, 0) == [range(3), range(10, 12)]
    assert sorted(layer for rank in range(4) for layer in process_layers(config, rank)) == list(range(18))
    assert sum(stage_parameters(config, rank) for rank in range(4)) == parameters(config.model).total


@pytest.mark.parametrize(
    ("backend", "precision", "per_parameter"),
    [
        (BackendConfig(), "fp32", 12),
        (BackendConfig(), "mixed", 12),
        (BackendConfig(), "bf16_sr", 6),
        (BackendConfig(name="nxd"), "mixed", 12),  # the masters, not the BF16 weights made from them
        (BackendConfig(name="nxd"), "bf16", 6),
    ],
)
def test_a_checkpoint_has_weights_two_moments_and_a_little_for_each_process(
    backend: BackendConfig, precision: PrecisionName, per_parameter: int
) -> None:
    cluster = ClusterConfig(processes_per_node=32)
    config = Config(model=LLAMA_7B, backend=backend, precision=PrecisionConfig(name=precision), cluster=cluster)
    assert checkpoint_bytes(config) == per_parameter * 6_738_415_616 + 32 * 65_536


@pytest.mark.parametrize(("precision", "moment"), [("fp32", 4), ("bf16_sr", 2)])
def test_muon_has_one_moment_for_the_matrices_of_layers(precision: PrecisionName, moment: int) -> None:
    adamw = Config(model=LLAMA_7B, precision=PrecisionConfig(name=precision))
    muon = replace(adamw, optimizer=OptimizerConfig(name="muon"))
    matrices = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11_008)
    assert checkpoint_bytes(adamw) - checkpoint_bytes(muon) == moment * matrices


def test_checkpoints_of_pending_milestones_are_kept_besides_the_newest() -> None:
    config = Config(
        train=TrainConfig(tokens=1000, global_batch_size=1, seq_len=1),
        checkpoint=CheckpointConfig(every_steps=100, keep=3),
        eval=EvalConfig(every_tokens=250),
    )
    # Written: every 100th and 250, 500, 750, 1000. Kept: 700, 800, 900 and 250, 500, 750, 1000.
    assert checkpoints_kept(config) == 7
    assert runs_dir_bytes(config) == 8 * checkpoint_bytes(config)
    assert runs_dir_bytes(config, existing=3) == 5 * checkpoint_bytes(config)
    assert runs_dir_bytes(config, existing=9) == checkpoint_bytes(config)


@given(
    total=st.integers(1, 60),
    every=st.integers(1, 12),
    keep=st.integers(1, 5),
    milestone=st.integers(5, 70) | st.none(),
    permanent=st.integers(3, 70) | st.none(),
)
def test_no_moment_of_a_run_has_more_checkpoints_than_counted(
    total: int, every: int, keep: int, milestone: int | None, permanent: int | None
) -> None:
    config = Config(
        train=TrainConfig(tokens=3 * total, global_batch_size=1, seq_len=3),
        checkpoint=CheckpointConfig(every_steps=every, keep=keep, keep_every_tokens=permanent),
        eval=EvalConfig(enabled=milestone is not None, every_tokens=milestone or 1),
    )
    stored: list[int] = []
    most = 0
    for step in range(1, total + 1):
        protected = step in config.milestones or config.is_permanent(step)
        if protected or step % every == 0 or step == total:
            stored.append(step)
            rolling = [old for old in stored if old not in config.milestones and not config.is_permanent(old)]
            stored = [old for old in stored if old not in rolling[:-keep]]
            most = max(most, len(stored))
    assert checkpoints_kept(config) == most


def test_the_fast_folder_has_two_checkpoints_at_once() -> None:
    config = Config(checkpoint=CheckpointConfig(fast_dir="/mnt/nvme"))
    assert fast_dir_bytes(config) == 2 * checkpoint_bytes(config)
    assert fast_dir_bytes(config, existing=1) == checkpoint_bytes(config)
    assert fast_dir_bytes(Config()) == 0


def test_a_nodes_memory_has_two_copies_of_its_own_share_and_two_of_its_partners() -> None:
    checkpoint = CheckpointConfig(memory_every_steps=10)
    config = Config(checkpoint=checkpoint, cluster=ClusterConfig(nodes=4))
    assert memory_copies_bytes(config) == pytest.approx(checkpoint_bytes(config), abs=4)
    alone = Config(checkpoint=checkpoint)
    assert memory_copies_bytes(alone) == 2 * checkpoint_bytes(alone), "it has no partner"
    assert memory_copies_bytes(Config()) == 0
