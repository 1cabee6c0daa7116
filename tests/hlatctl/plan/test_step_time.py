"""The roofline, against HLAT's points and against steps worked out by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.compose import compose
from conf.schema import (
    BackendConfig,
    ClusterConfig,
    Config,
    HardwareConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainConfig,
)
from conf.sizes import flops_per_token
from hlatctl.plan.execution import Execution
from hlatctl.plan.memory import memory
from hlatctl.plan.published import points
from hlatctl.plan.search import changed
from hlatctl.plan.step_time import (
    GROUPED_EFFICIENCY,
    Device,
    Product,
    StepTime,
    expected_largest,
    missing,
    step_time,
    step_time_s,
)
from hlatctl.plan.step_time import OVERLAP_SLOWDOWN_FRACTION as _SLOWDOWN
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
        cluster=ClusterConfig(launcher="simulated", nodes=nodes, processes_per_node=processes, hardware=_HARDWARE),
    )


#: FLOPs of attention's core per token, forward: half of 4 x 4 x 60 x 100, as flash attention skips the masked half.
_CORE = 4 * 2 * 60 * 100
#: FLOPs of a token: 6 x (4 x 12 x 60^2 + 100 x 60), and the core, whose backward pass is two and a half forward ones.
_FLOPS = 6 * (4 * 12 * 3600 + 6000) + 3.5 * _CORE
#: MFU counts the whole core three times and the norms' nine weights of 60, as its definition does.
_MFU_FLOPS = 6 * (4 * 12 * 3600 + 6000) + 6 * _CORE + 6 * 9 * 60


def test_one_process_only_computes() -> None:
    time = step_time(small())
    assert time is not None
    assert time.compute_s == pytest.approx(800 * _FLOPS / 0.5e12)
    assert time.total_s == time.compute_s, "the memory's bandwidth is not known: no time is made up for it"
    assert time.mfu_fraction == pytest.approx(0.5 * _MFU_FLOPS / _FLOPS)


@pytest.mark.parametrize("experiment", ["qwen3_8b_trn2", "hlat_7b_trn2"])
def test_experiments_on_trn2_fit_their_devices_and_have_a_step_time_and_a_price(experiment: str) -> None:
    config = compose([f"experiment={experiment}"])
    need, time = memory(config), step_time(config)
    assert need.fits
    assert missing(config) == []
    assert time is not None
    assert 0.2 < time.mfu_fraction < 0.6
    assert config.cluster.price_usd_per_node_hour


def test_recomputation_takes_time_and_does_not_count_in_mfu() -> None:
    full = step_time(small(activation_checkpointing="full"))
    selective = step_time(small(activation_checkpointing="selective"))
    assert full is not None
    assert selective is not None
    layers = 4 * 12 * 3600 * 2
    assert selective.compute_s == pytest.approx(800 * (_FLOPS + _CORE) / 0.5e12)
    assert full.compute_s == pytest.approx(800 * (_FLOPS + _CORE + layers) / 0.5e12)
    assert full.mfu_fraction < selective.mfu_fraction < 0.5 * _MFU_FLOPS / _FLOPS


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
    last = 100 * (6 * (2 * 12 * 3600 + 6000) + 3.5 * _CORE / 2) / 0.5e12
    send = 2 * 100 * 60 * 4 / 0.25e9
    assert time.compute_s == pytest.approx(8 * last), "the last stage has the head too"
    assert time.pipeline_s == pytest.approx((last + send) + 8 * send)


#: The layers have 8 experts of width 40 instead, of which a token uses 2, and a shared one; the first layer is dense.
_MIXTURE = dataclasses.replace(
    _MODEL, num_experts=8, experts_per_token=2, expert_intermediate_size=40, num_shared_experts=1, num_dense_layers=1
)


def mixture(**settings: Any) -> Config:
    return dataclasses.replace(small(**settings), model=_MIXTURE, backend=BackendConfig(name="torchtitan"))


def test_a_mixture_computes_with_the_experts_of_a_token_only() -> None:
    time = step_time(mixture())
    assert time is not None
    each = 3 * 60 * 40
    others = 4 * 4 * 3600 + 3 * 60 * 160 + 3 * (60 * 8 + each) + 6000
    flops = 6 * others + 6 * 3 * 2 * each / GROUPED_EFFICIENCY + 3.5 * _CORE
    assert time.compute_s == pytest.approx(800 * flops / 0.5e12)
    assert time.mfu_fraction == pytest.approx(flops_per_token(_MIXTURE, 100) * 800 / (time.total_s * 1e12))


@pytest.mark.parametrize("layout", [{}, {"data_parallel": "fsdp"}, {"data_parallel": "fsdp", "fsdp_size": 2}])
def test_expert_parallel_processes_exchange_tokens_and_share_the_work(layout: dict[str, object]) -> None:
    tensor = 1 if layout else 4
    layout = {**layout, "tensor_parallel_size": tensor}
    alone, shared = (
        step_time(mixture(processes=4, expert_parallel_size=size, **layout)) for size in (1, 2 if layout else 4)
    )
    assert alone is not None
    assert shared is not None
    assert alone.expert_parallel_s == 0.0
    assert shared.compute_s == pytest.approx(alone.compute_s)
    micro_batches = 8 if tensor == 4 else 2
    # Two copies of each token; half of them leave the process; forward and backward, there and back; three layers.
    sent = 100 / tensor * 2 * 60 * 4 / 2
    assert shared.expert_parallel_s == pytest.approx(micro_batches * 3 * 4 * sent / 0.25e9)


def test_exchanges_with_experts_on_other_nodes_wait_for_the_network() -> None:
    layout = {"processes": 2, "nodes": 2, "expert_parallel_size": 4, "data_parallel": "fsdp"}
    config = with_hardware(mixture(**layout), link_bytes_per_s=1e12)
    other = Execution(sends_once_per_node=True)
    times = [step_time(config), step_time(config, other)]
    assert times[0] is not None
    assert times[1] is not None
    # Half of the copies go to the other node, with half of its 1 GB/s; or one copy to it for 3 of 4 tokens.
    sent = 100 * 60 * 4 / 0.5e9
    assert times[0].expert_parallel_s == pytest.approx(2 * 3 * 4 * sent)
    assert times[1].expert_parallel_s == pytest.approx(2 * 3 * 4 * sent * 3 / 4)


def test_latent_attention_multiplies_by_its_compressed_keys_and_values() -> None:
    latent = dataclasses.replace(
        _MODEL, kv_lora_rank=20, q_lora_rank=30, qk_nope_head_dim=10, qk_rope_head_dim=6, v_head_dim=12
    )
    config = dataclasses.replace(small(), model=latent, backend=BackendConfig(name="torchtitan"))
    time = step_time(config)
    assert time is not None
    layer = 60 * (30 + 26) + 30 * 4 * 16 + 20 * 4 * 22 + 4 * 12 * 60 + 3 * 60 * 160
    core = 4 * 2 * 100 * 4 * (16 + 12) / 2
    assert time.compute_s == pytest.approx(800 * (6 * (4 * layer + 6000) + 3.5 * core) / 0.5e12)


def test_without_the_shape_of_a_module_s_model_there_is_no_time() -> None:
    model = ModelConfig(module="acme.models", flavor="1B", total_parameters=10**9)
    config = dataclasses.replace(small(), model=model)
    assert step_time(config) is None
    assert missing(config) == ["model.hidden_size and the other keys of the shape"]


def test_products_with_a_small_dimension_reach_less_of_the_peak() -> None:
    # 8 TFLOP/s of products, 1 TB/s of memory, FP32: 2 m^3 / 8e12 s and 3 m^2 x 4 / 1e12 s are equal at m = 48.
    device = Device(flops_per_s=8e12, s_per_byte=1e-12, entry_bytes=4, fp8_flops_per_s=16e12)
    cube = Product(48, 48, 48)
    assert cube.time_s(device) == pytest.approx(2 * cube.flops / 8e12)
    large, thin = Product(9600, 9600, 9600), Product(9600, 48, 9600)
    assert large.time_s(device) == pytest.approx(large.flops / 8e12, rel=0.01)
    assert thin.time_s(device) / thin.flops > 1.3 * large.time_s(device) / large.flops
    assert large.time_s(device, fp8=True) == pytest.approx(large.time_s(device) / 2, rel=0.01)


def test_element_wise_operations_take_the_memory_s_time_and_compiled_ones_less() -> None:
    times = [
        step_time(
            dataclasses.replace(
                with_hardware(small(), memory_bytes_per_s=1e12), backend=BackendConfig(compile=compiled)
            )
        )
        for compiled in (True, False)
    ]
    compiled, eager = times
    assert compiled is not None
    assert eager is not None
    # 4 layers of 9 passes over 60, 2 over queries and keys (120), 3 over 160, forward and twice backward; and the loss.
    passes = 4 * 3 * 4 * (9 * 60 + 2 * 120 + 3 * 160)
    assert compiled.elementwise_s == pytest.approx(800 * (passes + 24 * 100) / 1e12)
    assert eager.elementwise_s > 2 * compiled.elementwise_s
    assert compiled.compute_s == eager.compute_s


_EMBEDDING, _HEAD, _LAYER = 6000, 6000 + 60, 12 * 3600 + 120
_ENDS = _EMBEDDING + _HEAD
#: Seconds of a micro-batch in one layer.
_LAYER_S = 100 * (6 * 12 * 3600 + 3.5 * _CORE / 4) / 0.5e12


def planned(config: Config, **other: object) -> StepTime:
    """Return the step time, as if the configuration had other values."""
    time = step_time(config, dataclasses.replace(Execution.of(config), **other))  # type: ignore[arg-type]
    assert time is not None
    return time


def with_links(config: Config, bytes_per_s: float) -> Config:
    """Return the configuration with links that are this fast in collectives."""
    return with_hardware(config, link_bytes_per_s=bytes_per_s, collective_efficiency=1.0)


def test_fsdp_hides_its_collectives_behind_computation_but_for_the_ends_and_a_layer() -> None:
    config = small(processes=4, data_parallel="fsdp")
    hidden, slow = (planned(with_links(config, rate)) for rate in (1e12, 1e7))
    # In each of two micro-batches a gather and a scatter, in FP32.
    visible_s = 2 * 3 / 4 * 8 * (_EMBEDDING + _LAYER) / 1e12
    # Of three layers, two gathers and a scatter, and one of each of the head: they slow what hides them.
    slowing_s = 2 * 3 / 4 * (3 * 12 * _LAYER + 8 * _HEAD) / 1e12
    assert hidden.data_parallel_s == pytest.approx(visible_s + _SLOWDOWN * slowing_s)
    # All layers but the last are gathered twice. Four compute while weights or gradients of others are sent.
    sent_s = 2 * 3 / 4 * (4 * (4 + 3 + 4) * _LAYER + 8 * _ENDS) / 1e7
    assert slow.data_parallel_s == pytest.approx(sent_s - (1 - _SLOWDOWN) * 2 * 4 * _LAYER_S)


def test_weights_that_are_kept_are_gathered_once_and_zero1_scatters_gradients_once_too() -> None:
    config = small(processes=4, data_parallel="fsdp")
    never, zero1 = (
        planned(with_links(changed(config, **layout), 1e7))
        for layout in ({"reshard_after_forward": "never"}, {"data_parallel": "zero1"})
    )
    whole_s = 3 / 4 * 4 * (4 * _LAYER + _ENDS) / 1e7
    hidden_s = 3 * whole_s - never.data_parallel_s, 2 * whole_s - zero1.data_parallel_s
    # Four layers' forward passes of the first micro-batch, and their backward passes of both or of the last one.
    assert hidden_s[1] == pytest.approx((1 - _SLOWDOWN) * 4 * _LAYER_S)
    assert hidden_s[0] == pytest.approx((1 - _SLOWDOWN) * 4 * (_LAYER_S + _LAYER_S * 2 / 3), rel=0.01)


def test_replicas_sum_gradients_while_the_last_backward_pass_runs_and_on_nxd_after_it() -> None:
    large = dataclasses.replace(small(processes=4), model=dataclasses.replace(_MODEL, hidden_size=6000, num_layers=40))
    config = with_links(large, 1e11)
    after = dataclasses.replace(config, backend=BackendConfig(name="nxd"))
    visible, whole = planned(config), planned(after, flash_attention=True)
    assert 0 < visible.data_parallel_s < whole.data_parallel_s / 2
    slow = planned(with_links(large, 1e8))
    slow_whole = planned(with_links(after, 1e8), flash_attention=True)
    backward_s = visible.compute_s / 2 * 2 / 3
    saved_s = slow_whole.data_parallel_s - slow.data_parallel_s
    assert saved_s == pytest.approx((1 - _SLOWDOWN) * backward_s, rel=0.01)


def test_hybrid_sharding_gathers_within_nodes_and_sums_shards_across() -> None:
    config = with_links(small(processes=4, nodes=2, data_parallel="fsdp"), 1e13)  # moves so fast that it slows nothing
    config = with_hardware(config, network_bytes_per_s=1e11)
    across, hybrid = planned(config), planned(changed(config, fsdp_size=4))
    # All eight processes: one ring through the nodes. Hybrid: four rings of a quarter of the gradients each.
    assert across.data_parallel_s == pytest.approx(7 / 8 * 8 * (_EMBEDDING + _LAYER) / 1e11, rel=0.01)
    within, summed = 3 / 4 * 8 / 1e13, 4 * 2 * (1 / 2) * 4 / 4 / 1e11
    assert hybrid.data_parallel_s == pytest.approx((within + summed) * (_EMBEDDING + _LAYER), rel=0.02)
    # torch_native sums over the copies once a step, torchtitan in each micro-batch.
    twice = dataclasses.replace(config, train=dataclasses.replace(config.train, global_batch_size=16))
    native = planned(changed(twice, fsdp_size=4))
    assert native.data_parallel_s == pytest.approx((2 * within + summed) * (_EMBEDDING + _LAYER), rel=0.03)
    titan = planned(dataclasses.replace(changed(twice, fsdp_size=4), backend=BackendConfig(name="torchtitan")))
    assert titan.data_parallel_s == pytest.approx(2 * hybrid.data_parallel_s, rel=0.02)


def test_a_ring_takes_a_step_for_each_process_however_few_bytes_it_sends() -> None:
    config = with_links(small(processes=4, nodes=2, data_parallel="fsdp"), 1e13)
    config = with_hardware(config, network_bytes_per_s=1e13)
    late = with_hardware(config, link_latency_s=1e-8, network_latency_s=1e-6)
    # Nothing hides a gather of the embedding and of a layer, and their scatters: seven steps each, one between nodes.
    # Two gathers and a scatter of each of the other three layers, and one of each of the head, slow what hides them.
    steps_s = planned(late).data_parallel_s - planned(config).data_parallel_s
    assert steps_s == pytest.approx((4 + _SLOWDOWN * 11) * (6e-8 + 1e-6), rel=0.01)


def test_a_ring_that_takes_longer_than_a_layer_shows_with_many_nodes_only() -> None:
    def loss_s(nodes: int) -> float:
        config = small(processes=8, nodes=nodes, batch=8 * nodes, data_parallel="fsdp")
        fast = with_hardware(with_links(config, 1e13), network_bytes_per_s=1e13)
        return planned(with_hardware(fast, network_latency_s=1e-6)).data_parallel_s - planned(fast).data_parallel_s

    assert loss_s(16) == pytest.approx((4 + _SLOWDOWN * 11) * 15e-6, rel=0.01), "the rest is hidden"
    assert loss_s(512) > 3 * 4 * 511e-6, "no layer takes as long as a ring of 512 nodes"


def test_a_step_takes_as_long_as_on_the_slowest_device() -> None:
    alone, together = small(), small(processes=128, batch=128)
    varied = [with_hardware(config, speed_deviation_fraction=0.02) for config in (alone, together)]
    assert planned(varied[0]).compute_s == planned(alone).compute_s, "one device is as fast as the mean"
    assert planned(varied[1]).compute_s / planned(together).compute_s == pytest.approx(1 + 0.02 * 2.59, abs=0.001)


def test_expected_largest_of_normal_values_is_that_of_samples() -> None:
    random = Random(0)
    for count in (8, 128):
        samples = [max(random.gauss(0, 1) for _ in range(count)) for _ in range(2000)]
        assert expected_largest(count) == pytest.approx(sum(samples) / 2000, abs=0.05)
    assert expected_largest(1) == 0


def test_chunks_of_a_stage_shorten_the_wait_of_a_pipeline() -> None:
    config = small(processes=2, pipeline_parallel_size=2)
    plain, interleaved = planned(config), planned(config, chunks=2)
    send = 2 * 100 * 60 * 4 / 0.25e9
    assert plain.pipeline_s - 8 * send == pytest.approx(2 * (interleaved.pipeline_s - 2 * 8 * send))


def test_context_parallel_processes_share_a_sequence_and_gather_its_keys_and_values() -> None:
    alone = planned(small(batch=4))
    shared = planned(small(processes=2, batch=4), context_parallel_size=2)
    assert shared.compute_s == pytest.approx(alone.compute_s / 2)
    # Keys and values of 100 tokens in FP32, gathered once and scattered once per layer and micro-batch.
    assert shared.context_parallel_s == pytest.approx(4 * 4 * 2 * (1 / 2) * 2 * 60 * 4 * 100 / 0.25e9)
    assert shared.data_parallel_s > 0, "both have gradients of the same weights"


def test_layers_products_take_fp8_s_time_and_its_gathers_half_the_bytes() -> None:
    config = with_hardware(small(processes=4, batch=4, data_parallel="fsdp"), fp8_flops_per_s=4e12)
    with_fp8: list[dict[str, Any]] = [{}, {"fp8": "rowwise"}, {"fp8": "tensorwise", "gathers_fp8": True}]
    plain, rowwise, tensorwise = (planned(with_links(config, 1e12), **execution) for execution in with_fp8)
    layers_s = 100 * 4 * 6 * 12 * 3600 / 0.5e12
    assert plain.compute_s - rowwise.compute_s == pytest.approx(layers_s * 3 / 4)
    assert rowwise.data_parallel_s - tensorwise.data_parallel_s == pytest.approx(
        3 / 4 * (3 + _SLOWDOWN * 2 * 3 * 3) * _LAYER / 1e12
    )
    precision = PrecisionConfig(name="fp8", fp8_scaling="tensorwise")
    assert Execution.of(dataclasses.replace(config, precision=precision)).gathers_fp8
    unknown = with_hardware(config, fp8_flops_per_s=None)
    assert missing(unknown, Execution(fp8="rowwise")) == ["cluster.hardware.fp8_flops_per_s"]


def test_processes_divide_muon_s_products_and_replicas_exchange_the_results() -> None:
    muon = OptimizerConfig(name="muon")
    one, four = (planned(dataclasses.replace(small(processes=count), optimizer=muon)).optimizer_s for count in (1, 4))
    # Newton-Schulz: of a matrix of m rows and n >= m columns, 4 m^2 n + 2 m^3 FLOPs in each of five iterations.
    flops = 5 * 4 * (4 * 6 * 60**3 + 3 * (4 * 60 * 60 * 160 + 2 * 60**3))
    assert one == pytest.approx(flops / 0.5e12)
    assert four - one / 4 == pytest.approx(3 / 4 * 2 * 4 * 12 * 3600 / 0.25e9)


def test_a_budget_recomputes_between_nothing_and_everything_and_keeps_the_slowest() -> None:
    config = small()
    times = [planned(config, recomputed="budget", memory_budget=share).compute_s for share in (0.0, 0.1, 0.9, 1.0)]
    assert times == sorted(times, reverse=True)
    assert times[-1] == pytest.approx(planned(config).compute_s)
    assert times[0] < planned(config, recomputed="full").compute_s, (
        "the last product's result is the next layer's input"
    )
    assert times[0] - times[1] > times[2] - times[3], "attention saves most per byte"


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
    errors = {
        name: point.error_fraction
        for name, point in by_name.items()
        if not point.calibrates and point.unit == "%"  # test_published_runs has the others
    }
    assert errors == {
        "7B on 32 nodes, of the speed of 4": pytest.approx(-0.052, abs=0.002),
        "7B on 64 nodes, of the speed of 4": pytest.approx(-0.046, abs=0.002),
        "cost of 7B on 64 nodes, of p4d's": pytest.approx(0.27, abs=0.01),
    }, "what docs/planning.md says"
    one = step_time_s(on_nodes(hlat_7b, 1))
    two = step_time_s(on_nodes(hlat_7b, 2))
    assert one is not None
    assert two is not None
    assert one / 2 < two < one
