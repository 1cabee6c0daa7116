"""Search: what fits, cheapest first, and the layout that HLAT's authors chose."""

from __future__ import annotations

import dataclasses

import pytest

from conf.compose import compose
from conf.schema import BackendConfig, Config, ModelConfig
from hlatctl.plan.search import search
from hlatctl.run.errors import ConfigError
from tests.hlatctl.plan.conftest import on_nodes, with_hardware


def test_hlat_s_layout_of_7b_comes_first(hlat_7b: Config) -> None:
    candidates = search(hlat_7b)
    layouts = [(c.config.parallel.tensor_parallel_size, c.config.parallel.pipeline_parallel_size) for c in candidates]
    assert layouts[0] == (8, 1)
    assert len(candidates) == 10


def test_candidates_fit_are_ranked_by_time_and_keep_the_batch(hlat_70b: Config) -> None:
    candidates = search(on_nodes(hlat_70b, 16), count=30)
    assert candidates
    assert all(candidate.memory.fits for candidate in candidates)
    times = [candidate.time.total_s for candidate in candidates]
    assert times == sorted(times)
    for candidate in candidates:
        config = candidate.config
        assert config.micro_batch_size * config.grad_accum_steps * config.data_parallel_size == 1024
    kinds = {(c.config.precision.name, c.config.parallel.activation_checkpointing) for c in candidates}
    assert len(kinds) > 1, "precision and recomputation vary"


def test_there_is_no_candidate_if_nothing_fits(hlat_70b: Config) -> None:
    assert search(on_nodes(hlat_70b, 1)) == []


def test_a_ranking_needs_known_hardware(hlat_7b: Config) -> None:
    with pytest.raises(ConfigError) as caught:
        search(with_hardware(hlat_7b, memory_bytes=None))
    assert caught.value.message == "cluster.hardware.memory_bytes=null: a ranking needs it"
    with pytest.raises(ConfigError, match=r"cluster\.hardware\.fp32_flops_per_s=null: a ranking needs it"):
        search(Config())
    with pytest.raises(ConfigError, match=r"model\.module=acme: a ranking needs the model's shape"):
        search(Config(model=ModelConfig(module="acme", flavor="1B", total_parameters=10**9)))


def test_a_search_on_gpus_tries_all_kinds_of_sharding(hlat_7b: Config) -> None:
    cluster = compose(["cluster=slurm_h100"]).cluster
    config = dataclasses.replace(hlat_7b, cluster=cluster, backend=BackendConfig(device="cuda"))
    candidates = search(config, count=200)
    assert {c.config.parallel.data_parallel for c in candidates} == {"replicate", "zero1", "fsdp"}
    assert "budget" not in {c.config.parallel.activation_checkpointing for c in candidates}


def test_a_search_tries_what_torchtitan_can_train_on_trn2() -> None:
    candidates = search(compose(["experiment=hlat_7b_trn2"]), count=200)
    assert {c.config.parallel.data_parallel for c in candidates} <= {"replicate", "fsdp"}
    assert {c.config.precision.name for c in candidates} == {"fp32", "mixed"}
    assert max(c.config.parallel.tensor_parallel_size for c in candidates) == 4, "of a chip"


def test_a_search_of_a_mixture_tries_sizes_of_expert_parallelism_that_torchtitan_has() -> None:
    layout = ["backend=torchtitan", "model=qwen3_moe_tiny", "backend.device=cuda", "cluster=slurm_h100"]
    candidates = search(compose([*layout, "cluster.nodes=1", "train.global_batch_size=8"]), count=100)
    assert {c.config.parallel.expert_parallel_size for c in candidates} == {1, 2, 4, 8}
    assert {c.config.parallel.data_parallel for c in candidates} == {"replicate", "fsdp"}
    assert "selective" not in {c.config.parallel.activation_checkpointing for c in candidates}
