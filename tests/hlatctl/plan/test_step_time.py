"""The roofline, against HLAT's points and against steps worked out by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.compose import compose
from conf.schema import ClusterConfig, Config, HardwareConfig, ModelConfig, ParallelConfig, TrainConfig
from hlatctl.plan.published import points
from hlatctl.plan.step_time import missing, step_time, step_time_s
from tests.hlatctl.plan.conftest import on_nodes, with_hardware

_HARDWARE = HardwareConfig(
    fp32_flops_per_s=1e12,
    link_bytes_per_s=1e9,
    network_bytes_per_s=4e9,
    compute_efficiency=0.5,
    collective_efficiency=0.25,
)
#: A layer of 12 x 60^2 multiplied parameters: 4 x 60^2 of attention, 3 x 60 x 160 of the feed-forward layer.
_MODEL = ModelConfig(vocab_size=100, hidden_size=60, intermediate_size=160, num_layers=4, num_heads=4, num_kv_heads=4)


def small(*, processes: int = 1, nodes: int = 1, batch: int = 8, micro: int = 1, **layout: object) -> Config:
    return Config(
        model=_MODEL,
        train=TrainConfig(global_batch_size=batch, micro_batch_size=micro, seq_len=100),
        parallel=ParallelConfig(**layout),  # type: ignore[arg-type]
        cluster=ClusterConfig(launcher="mock", nodes=nodes, processes_per_node=processes, hardware=_HARDWARE),
    )


#: FLOPs of a token: 6 x (4 x 12 x 60^2 + 100 x 60) and attention's core, 12 x 4 x 60 x 100.
_FLOPS = 6 * (4 * 12 * 3600 + 6000) + 12 * 4 * 60 * 100
#: MFU counts the norms' nine weights of 60 too, as its definition does.
_MFU_FLOPS = _FLOPS + 6 * 9 * 60


def test_one_process_only_computes() -> None:
    time = step_time(small())
    assert time is not None
    assert time.compute_s == pytest.approx(800 * _FLOPS / 0.5e12)
    assert time.total_s == time.compute_s, "the memory's bandwidth is not known: no time is made up for it"
    assert time.mfu_fraction == pytest.approx(0.5 * _MFU_FLOPS / _FLOPS)


def test_recomputation_takes_time_and_does_not_count_in_mfu() -> None:
    full = step_time(small(activation_checkpointing="full"))
    selective = step_time(small(activation_checkpointing="selective"))
    assert full is not None
    assert selective is not None
    layers, core = 4 * 12 * 3600 * 2, 4 * 4 * 60 * 100
    assert selective.compute_s == pytest.approx(800 * (_FLOPS + core) / 0.5e12)
    assert full.compute_s == pytest.approx(800 * (_FLOPS + core + layers) / 0.5e12)
    assert full.mfu_fraction < selective.mfu_fraction < 0.5


def test_replicas_sum_their_gradients_by_a_ring_over_the_slowest_link() -> None:
    parameters = 4 * (12 * 3600 + 120) + 2 * 6000 + 60
    within = step_time(small(processes=4))
    across = step_time(small(processes=4, nodes=2))
    assert within is not None
    assert across is not None
    assert within.data_parallel_s == pytest.approx(2 * 3 / 4 * 4 * parameters / 0.25e9)
    # One ring through four processes of each node: it leaves a node once, and has the network's 1 GB/s to itself.
    assert across.data_parallel_s == pytest.approx(2 * 7 / 8 * 4 * parameters / 0.25e9)


def test_tensor_parallel_processes_exchange_four_all_reduces_a_layer() -> None:
    time = step_time(small(processes=2, tensor_parallel_size=2))
    assert time is not None
    assert time.tensor_parallel_s == pytest.approx(8 * 4 * 4 * 2 * (1 / 2) * 100 * 60 * 4 * 2 / 2 / 0.25e9)
    assert time.compute_s == pytest.approx(800 * _FLOPS / 2 / 0.5e12)


def test_a_pipeline_waits_for_its_first_and_last_micro_batches() -> None:
    time = step_time(small(processes=2, pipeline_parallel_size=2))
    assert time is not None
    last = 100 * (6 * (2 * 12 * 3600 + 6000) + 12 * 2 * 60 * 100) / 0.5e12
    send = 2 * 100 * 60 * 4 / 0.25e9
    assert time.compute_s == pytest.approx(8 * last), "the last stage has the head too"
    assert time.pipeline_s == pytest.approx((last + send) + 8 * send)


@pytest.mark.parametrize(
    ("lacks", "config"),
    [
        ("fp32_flops_per_s", small()),
        ("link_bytes_per_s", small(processes=2)),
        ("network_bytes_per_s", small(processes=2, nodes=2)),
    ],
)
def test_unknown_hardware_has_no_step_time(lacks: str, config: Config) -> None:
    unknown = with_hardware(config, **{lacks: None})
    assert step_time(unknown) is None
    assert step_time_s(unknown) is None
    assert missing(unknown) == [f"cluster.hardware.{lacks}"]


@given(nodes=st.sampled_from([1, 2, 4]), tensor=st.sampled_from([1, 2, 4]), stages=st.sampled_from([1, 2, 4]))
def test_mfu_stays_below_the_share_that_products_reach(nodes: int, tensor: int, stages: int) -> None:
    time = step_time(
        small(processes=16, nodes=nodes, batch=256, tensor_parallel_size=tensor, pipeline_parallel_size=stages)
    )
    assert time is not None
    assert 0 < time.mfu_fraction <= 0.5 * _MFU_FLOPS / _FLOPS + 1e-9
    times = (getattr(time, field.name) for field in dataclasses.fields(time))
    assert all(time_s >= 0 for time_s in times)


def test_there_are_no_points_without_the_hardware_s_figures() -> None:
    def without_link(overrides: Sequence[str]) -> Config:
        return with_hardware(compose(overrides), link_bytes_per_s=None)

    assert points(without_link) == []


def test_the_model_is_fitted_to_two_points_and_has_the_documented_errors_elsewhere(hlat_7b: Config) -> None:
    by_name = {point.name: point for point in points(compose)}
    for name, point in by_name.items():
        error = point.error_fraction
        if error is None:
            assert point.predicted == point.published, name
        elif point.calibrates:
            assert abs(error) < 0.001, name
    errors = {name: point.error_fraction for name, point in by_name.items() if not point.calibrates}
    assert errors == {
        "7B on 32 nodes, of the speed of 4": pytest.approx(-0.052, abs=0.002),
        "7B on 64 nodes, of the speed of 4": pytest.approx(-0.046, abs=0.002),
        "cost of 7B on 64 nodes, of p4d's": pytest.approx(0.21, abs=0.01),
    }, "what docs/planning.md says"
    one = step_time_s(on_nodes(hlat_7b, 1))
    two = step_time_s(on_nodes(hlat_7b, 2))
    assert one is not None
    assert two is not None
    assert one / 2 < two < one
