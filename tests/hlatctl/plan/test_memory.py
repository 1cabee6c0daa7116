"""Memory by part, against figures worked out by hand and what fits according to HLAT.

``tests/trainer/test_planned_memory.py`` compares it with what training really takes.
"""

from __future__ import annotations

import dataclasses

import pytest

from conf.compose import compose, groups
from conf.schema import (
    BackendConfig,
    CheckpointConfig,
    ClusterConfig,
    Config,
    HardwareConfig,
    ParallelConfig,
    PrecisionConfig,
)
from conf.sizes import parameters
from hlatctl.plan.execution import Execution, in_flight
from hlatctl.plan.memory import Memory, check_memory, layer_bytes, memory, unrecomputed_bytes
from hlatctl.plan.search import changed, remedies
from hlatctl.run.errors import ConfigError
from tests.conf.test_sizes import LLAMA_7B
from tests.hlatctl.plan.conftest import on_nodes, with_hardware

_PARAMETERS_7B = 6_738_415_616


def parts(need: Memory) -> dict[str, int]:
    return {part.name: part.value_bytes for part in need.parts}


def test_7b_at_tp_8_fits_and_has_the_bytes_of_each_parameter(hlat_7b: Config) -> None:
    need = memory(hlat_7b)
    assert need.fits
    # An eighth of the products, and all of the 65 norms.
    held = (_PARAMETERS_7B - 65 * 4096) // 8 + 65 * 4096
    assert parts(need)["weights"] == parts(need)["gradients"] == 2 * held
    assert parts(need)["moments"] == 4 * held // 256, "ZeRO-1 over 256 replicas"
    # 16 h of norms in FP32, and in BF16 2 h of inputs, 3 h of the group, h of output, 4 f: cut by eight, 32 layers.
    per_token = 16 * 4096 + 2 * (2 * 4096 + 3 * 4096 + 4096 + 4 * 11008)
    assert parts(need)["activations"] == 32 * 4096 * per_token // 8


def test_experts_are_sharded_over_the_processes_that_have_the_same_ones() -> None:
    """Weights, gradients and moments are divided by all processes either way; what is gathered is not."""
    layout = ["backend=torchtitan", "model=qwen3_moe_tiny", "parallel=fsdp", "train.global_batch_size=8"]
    layout += ["cluster=simulated", "cluster.processes_per_node=8", "cluster.nodes=1", "train.micro_batch_size=1"]
    one, four = (compose([*layout, f"parallel.expert_parallel_size={size}"]) for size in (1, 4))
    alone, shared = parts(memory(one)), parts(memory(four))
    for part in ("weights", "gradients", "moments"):
        assert shared[part] == alone[part] == (8 if part == "moments" else 4) * parameters(one.model).total // 8, part
    experts = 3 * 128 * 128 * 8
    assert alone["gathered weights"] - shared["gathered weights"] == 4 * 2 * experts * 3 // 4
    assert memory(one).need_bytes > memory(four).need_bytes


def test_the_memory_of_a_model_without_a_shape_is_that_of_its_state() -> None:
    layout = ["backend=torchtitan", "model=torchtitan", "model.module=acme", "model.flavor=1B"]
    need = parts(memory(compose([*layout, "model.total_parameters=1000000000"])))
    assert (need["weights"], need["moments"]) == (4 * 10**9, 8 * 10**9)
    assert "activations" not in need


def test_70b_does_not_fit_four_nodes_and_fits_eight_and_more(hlat_70b: Config) -> None:
    four = on_nodes(hlat_70b, 4)
    for tensor, stages in ((32, 4), (8, 16), (16, 8)):
        layout = changed(four, tensor_parallel_size=tensor, pipeline_parallel_size=stages)
        assert memory(layout).fits is False, (tensor, stages)
    assert all(memory(on_nodes(hlat_70b, nodes)).fits for nodes in (8, 16, 32, 64, 128, 256))


def test_the_workspace_is_in_the_middle_of_hlat_s_bounds(hlat_7b: Config, hlat_70b: Config) -> None:
    def rest(config: Config) -> int:
        return (config.cluster.hardware.memory_bytes or 0) - memory(with_hardware(config, workspace_bytes=0)).need_bytes

    least = rest(changed(on_nodes(hlat_70b, 4), pipeline_parallel_size=4))
    most = min(rest(hlat_7b), rest(on_nodes(hlat_70b, 8)))
    assert 0 < least < most
    workspace = hlat_7b.cluster.hardware.workspace_bytes
    assert abs(workspace - (least + most) / 2) < 0.1 * (most - least)


def test_a_run_that_does_not_fit_is_refused_with_need_and_memory(hlat_70b: Config) -> None:
    with pytest.raises(ConfigError) as caught:
        check_memory(changed(on_nodes(hlat_70b, 4), pipeline_parallel_size=4))
    assert caught.value.message == (
        "cluster.hardware.memory_bytes=17179869184 (16 GiB): a process needs 18.4 GiB, of which moments 4.28 GiB"
    )
    assert "hlatctl plan" in caught.value.hint


@pytest.mark.parametrize("experiment", groups()["experiment"])
def test_every_experiment_fits(experiment: str) -> None:
    check_memory(compose([f"experiment={experiment}"]))


def test_no_run_is_refused_if_the_device_s_memory_is_unknown(hlat_70b: Config) -> None:
    unknown = with_hardware(changed(on_nodes(hlat_70b, 4), pipeline_parallel_size=4), memory_bytes=None)
    assert memory(unknown).fits is None
    check_memory(unknown)


def test_remedies_are_valid_and_fit(hlat_70b: Config) -> None:
    four = changed(on_nodes(hlat_70b, 4), pipeline_parallel_size=4)
    fixes = remedies(four)
    texts = [text for text, _ in fixes]
    assert "parallel.activation_checkpointing=full" in texts
    assert "cluster.nodes=8 parallel.pipeline_parallel_size=8" in texts, "what HLAT did"
    assert all(need.fits for _, need in fixes)
    assert texts == sorted(texts, key=lambda text: len(text.split()))


def test_fsdp_shards_state_and_zero1_moments_only() -> None:
    cluster = ClusterConfig(launcher="simulated", processes_per_node=32)
    config = Config(model=LLAMA_7B, cluster=cluster, checkpoint=CheckpointConfig(mode="sync"))
    config = dataclasses.replace(
        config, train=dataclasses.replace(config.train, global_batch_size=32, micro_batch_size=1)
    )
    whole = parts(memory(config))
    assert (whole["weights"], whole["gradients"], whole["moments"]) == tuple(n * _PARAMETERS_7B for n in (4, 4, 8))
    shards = parts(memory(dataclasses.replace(config, parallel=ParallelConfig(data_parallel="fsdp"))))
    assert shards["weights"] == 4 * _PARAMETERS_7B // 32
    assert shards["moments"] == 8 * _PARAMETERS_7B // 32
    embedding, head = 32_000 * 4096, 32_000 * 4096 + 4096
    layers = _PARAMETERS_7B - embedding - head
    assert shards["gathered weights"] == 4 * (head + 2 * layers // 32), "the embedding is freed before the last layer"


def test_fsdp_has_no_copies_of_weights_and_its_gradients_once(hlat_7b: Config) -> None:
    replicated, shards = sharded(hlat_7b, data_parallel="replicate"), sharded(hlat_7b)
    assert shards.grad_accum_steps == 2
    layer = (_PARAMETERS_7B - 2 * 32_000 * 4096 - 4096) // 32
    kept = [unrecomputed_bytes(one, Execution.of(one)) for one in (replicated, shards)]
    assert kept[0] - kept[1] == 2 * layer, "BF16 copies of a layer's FP32 weights"
    assert parts(memory(shards))["gradients"] == 4 * _PARAMETERS_7B // 32


def test_the_loss_of_a_split_sequence_normalizes_slices(hlat_7b: Config) -> None:
    large = dataclasses.replace(hlat_7b, model=dataclasses.replace(hlat_7b.model, vocab_size=320_000))
    whole, split = (
        parts(memory(changed(large, sequence_parallel=parallel)))["logits and loss"] for parallel in (False, True)
    )
    # Twice 6 bytes for the norm, of which an eighth is left, and twice 2 for the whole sequence.
    assert whole - split == 4096 * 4096 * 13 // 2


def test_recomputed_activations_are_not_kept(hlat_7b: Config) -> None:
    kept = [
        parts(memory(changed(hlat_7b, activation_checkpointing=level)))["activations"]
        for level in ("none", "selective", "full")
    ]
    assert kept[0] > kept[1] > kept[2] == 32 * 4096 * 2 * 4096 // 8, "fully: a layer's input alone"


def test_a_pipeline_s_first_stage_holds_as_many_micro_batches_as_there_are_stages(hlat_70b: Config) -> None:
    eight = parts(memory(hlat_70b))["activations"]
    assert eight == parts(memory(changed(hlat_70b, pipeline_parallel_size=4)))["activations"], "4 x 20 layers: 8 x 10"
    few = dataclasses.replace(hlat_70b, train=dataclasses.replace(hlat_70b.train, global_batch_size=32 * 2))
    assert parts(memory(few))["activations"] == eight // 4, "two micro-batches are all there are"


def test_a_cpu_s_memory_holds_the_copy_that_checkpoints_are_written_from() -> None:
    config = Config(precision=PrecisionConfig(name="fp32"), cluster=ClusterConfig(hardware=HardwareConfig()))
    assert parts(memory(config))["copy of a checkpoint"] == parts(memory(config))["weights"] * 3
    synchronous = dataclasses.replace(config, checkpoint=CheckpointConfig(mode="sync"))
    assert "copy of a checkpoint" not in parts(memory(synchronous))


def sharded(hlat_7b: Config, **layout: object) -> Config:
    """Return 7B on 32 GPUs, with mixed precision and two micro-batches."""
    cluster = dataclasses.replace(hlat_7b.cluster, hardware=HardwareConfig(), nodes=1)
    train = dataclasses.replace(hlat_7b.train, global_batch_size=64)
    config = dataclasses.replace(
        hlat_7b,
        precision=PrecisionConfig(name="mixed"),
        backend=BackendConfig(device="cuda"),
        cluster=cluster,
        train=train,
    )
    return changed(config, **{"tensor_parallel_size": 1, "sequence_parallel": False, "data_parallel": "fsdp", **layout})


def test_weights_that_are_kept_for_the_step_are_whole_and_so_are_zero1_s_gradients(hlat_7b: Config) -> None:
    never = parts(memory(sharded(hlat_7b, reshard_after_forward="never")))
    zero1 = parts(memory(sharded(hlat_7b, data_parallel="zero1")))
    for need in (never, zero1):
        assert need["gathered weights"] == 2 * _PARAMETERS_7B, "in BF16"
        assert (need["weights"], need["moments"]) == (4 * _PARAMETERS_7B // 32, 8 * _PARAMETERS_7B // 32)
    assert zero1["gradients not exchanged yet"] == 4 * _PARAMETERS_7B
    assert "gradients not exchanged yet" not in never


def test_hybrid_sharding_divides_by_the_shards_of_a_copy(hlat_7b: Config) -> None:
    hybrid = parts(memory(sharded(hlat_7b, fsdp_size=8)))
    assert hybrid["weights"] == 4 * _PARAMETERS_7B // 8
    assert hybrid["gradients not exchanged yet"] == 4 * _PARAMETERS_7B // 8, "of the first of two micro-batches"


def test_context_parallel_processes_share_activations_and_the_state(hlat_7b: Config) -> None:
    config = sharded(hlat_7b, activation_checkpointing="full")
    alone = parts(memory(config))
    shared = parts(memory(config, dataclasses.replace(Execution.of(config), context_parallel_size=4)))
    assert shared["activations"] == alone["activations"] // 4
    assert shared["moments"] == alone["moments"], "the shards are those of all 32 processes"


def test_muon_has_one_moment_of_the_layers_matrices(hlat_7b: Config) -> None:
    config = sharded(hlat_7b, data_parallel="replicate")
    adamw = parts(memory(config))["moments"]
    optimizer = dataclasses.replace(config.optimizer, name="muon")
    muon = parts(memory(dataclasses.replace(config, optimizer=optimizer)))["moments"]
    assert adamw - muon == 4 * (_PARAMETERS_7B - 2 * 32_000 * 4096 - 65 * 4096)


def test_a_budget_keeps_its_share_between_full_and_no_recomputation(hlat_7b: Config) -> None:
    config = sharded(hlat_7b)
    kept = [
        layer_bytes(config, dataclasses.replace(Execution.of(config), recomputed=recomputed, memory_budget=share))  # type: ignore[arg-type]
        for recomputed, share in (("full", 1.0), ("budget", 0.0), ("budget", 0.5), ("budget", 1.0), ("none", 1.0))
    ]
    assert kept[0] == kept[1]
    assert kept[3] == kept[4]
    assert kept[2] == pytest.approx((kept[0] + kept[4]) / 2)


@pytest.mark.parametrize(("chunks", "alive"), [(1, 8), (2, (8 + 2 * 7 + 1) / 2), (4, 39 / 4)])
def test_micro_batches_in_flight_follow_the_chunks_of_a_stage(hlat_70b: Config, chunks: int, alive: float) -> None:
    execution = dataclasses.replace(Execution.of(hlat_70b), chunks=chunks)
    assert hlat_70b.parallel.pipeline_parallel_size == 8
    assert in_flight(hlat_70b, execution, 0) == pytest.approx(alive)


def test_the_last_stage_has_one_micro_batch_of_1f1b(hlat_70b: Config) -> None:
    assert in_flight(hlat_70b, Execution.of(hlat_70b), 7) == 1


def test_torchtitan_s_selective_recomputation_is_operators_here_and_fits_as_published() -> None:
    overrides = [
        *("model=llama31_8b", "cluster=slurm_h100", "cluster.nodes=1", "parallel=fsdp", "precision=mixed"),
        *("backend.device=cuda", "backend.compile=true", "train.seq_len=8192", "train.micro_batch_size=2"),
        *("train.global_batch_size=16", "eval.enabled=false"),
    ]
    need = {
        level: memory(
            compose([*overrides, f"backend={backend}", f"parallel.activation_checkpointing={level}"])
        ).need_bytes
        / 2**30
        for backend, level in (("torchtitan", "operators"), ("torch_native", "selective"))
    }
    assert need["operators"] == pytest.approx(77.0, rel=0.06), "benchmarks/llama3_h100_202412_torchtitan.md, table 1"
    assert need["selective"] > 90, "keeps the results of all products"
