"""The plan as lists: the rest of a run, its learning rate, and what is measured of this machine."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest

from conf.compose import compose
from conf.schema import Config, OptimizerConfig, TrainConfig
from conf.training_rules import learning_rate
from hlatctl.machine_speed import Speed
from hlatctl.plan.memory import memory
from hlatctl.plan.sections import TIME, continuation_section, measured, rate_chart, sections
from hlatctl.plan.step_time import missing, step_time, step_time_s

RUN = Config(
    train=TrainConfig(tokens=400 * 4096, global_batch_size=8, seq_len=512),
    optimizer=OptimizerConfig(lr=1e-3, warmup_steps=40),
)
LONGER = replace(RUN, train=replace(RUN.train, tokens=800 * 4096))


def texts(before: Config, after: Config, step: int) -> dict[str, str]:
    return {figure.name: figure.text for figure in continuation_section(before, after, step).figures}


def test_an_unchanged_run_goes_on() -> None:
    found = texts(RUN, RUN, 200)
    assert found["steps left"] == "200, 819.2K tokens"
    assert found["last step"] == "400"
    assert found["learning rate of the next step"].endswith("continues that of step 200")


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (replace(RUN, optimizer=replace(RUN.optimizer, lr=5e-4)), "jumps down from"),
        (LONGER, "jumps up from"),
        (replace(RUN, optimizer=replace(RUN.optimizer, warmup_steps=300)), "the warm-up goes on"),
        (replace(RUN, optimizer=replace(RUN.optimizer, schedule="wsd")), "jumps up from"),
    ],
)
def test_a_jump_of_the_learning_rate_is_named(after: Config, expected: str) -> None:
    text = texts(RUN, after, 200)["learning rate of the next step"]
    assert text.startswith(f"{learning_rate(201, after):.3e}")
    assert expected in text


def test_the_chart_shows_both_schedules_and_the_newest_step() -> None:
    chart = rate_chart(RUN, LONGER, 200).splitlines()
    assert chart[0].startswith("9.98e-04 |")
    assert all(len(line) <= 80 for line in chart)
    drawn = [line[10:] for line in chart[:10]]
    assert any("." in line for line in drawn), "the planned end differs"
    assert max(len(line) for line in drawn) == 64, "the changed run reaches the last column"
    assert chart[-1].index("^") == 10 + round(199 * 63 / 799)
    assert chart[-1].endswith("step 800")


def test_a_run_at_its_last_step_has_a_chart() -> None:
    assert "step 400" in rate_chart(RUN, RUN, 400)
    assert "^ step 0" in rate_chart(RUN, RUN, 0)


Shape = tuple[int, int, int]


def speed(shape: Shape, processes: int, threads: int) -> Speed:
    return Speed(
        shape=shape,
        fp32_flops_per_s=5e10,
        memory_bytes_per_s=1e10,
        link_bytes_per_s=2e9,
        processes=processes,
        threads=threads,
    )


def never(shape: Shape, processes: int, threads: int) -> Speed:
    raise AssertionError("nothing is to be measured")


def unable(shape: Shape, processes: int, threads: int) -> None:
    return None


def test_only_unknown_values_are_replaced_by_measured_ones() -> None:
    config = compose(["cluster.processes_per_node=2", "+cluster.hardware.link_bytes_per_s=7e9"])
    planned, found = measured(config, speed)
    assert found is not None
    assert (found.shape, found.processes, found.threads) == ((8 * 512, 128, 352), 2, 1)
    hardware = planned.cluster.hardware
    assert (hardware.fp32_flops_per_s, hardware.memory_bytes_per_s, hardware.link_bytes_per_s) == (5e10, 1e10, 7e9)
    assert (missing(config), missing(planned)) == (["cluster.hardware.fp32_flops_per_s"], [])


def test_the_plan_says_whether_a_budget_is_enough() -> None:
    config = compose(["experiment=hlat_7b", "budget.usd=100000", "budget.node_hours=1e6"])
    found = {figure.name: figure.text for figure in sections(config, compose)[0].figures}
    assert found["budget.usd"] == "100,000 USD; the run needs 584 % of it: the run stops at about step 73,469"
    assert found["budget.node_hours"] == "1,000,000 node-hours; the run needs 3 % of it: enough"


def test_the_plan_of_stages_adds_their_times_and_takes_the_largest_memory() -> None:
    config = compose(["experiment=olmo3_7b"])
    plan = {section.title: {figure.name: figure for figure in section.figures} for section in sections(config, compose)}
    times = [step_time_s(stage.config) or 0 for stage in config.stages]
    seconds = sum(step_s * stage.steps for step_s, stage in zip(times, config.stages, strict=True))
    assert plan["memory, time and cost"]["training time"].value == pytest.approx(seconds)
    largest = max(memory(stage.config).need_bytes for stage in config.stages)
    assert plan["memory of a process"]["needed"].value == largest
    assert list(plan["its stages"]) == ["pretraining", "midtraining", "long_context"]
    # The steps of OLMo 3 7B's published checkpoints: stage1/step1413814, stage2/step47684.
    assert [stage.steps for stage in config.stages[:2]] == pytest.approx([1_413_814, 47_684], rel=1e-5)


def test_the_plan_says_that_it_was_measured_and_how() -> None:
    planned, found = measured(compose(["cluster.processes_per_node=2"]), speed)
    plan = {
        section.title: {figure.name: figure for figure in section.figures}
        for section in sections(planned, compose, found)
    }
    time = step_time(planned)
    assert time is not None
    training = plan["memory, time and cost"]["training time"]
    assert (training.kind, training.value) == ("measured", 306 * time.total_s)
    how = plan[TIME]["measured on this machine"].text
    assert how == "NumPy, in 2 processes at once, 1 thread each; the fastest repetition"
    assert plan[TIME]["product in FP32, a process"].text == "50 GFLOP/s (4,096 x 128 by 128 x 352)"
    assert "MFU" not in plan[TIME]
    assert not any(figure.kind == "calibrated" for figures in plan.values() for figure in figures.values())


@pytest.mark.parametrize(
    "overrides",
    [
        ["experiment=hlat_7b"],
        ["cluster=slurm"],
        ["cluster=simulated"],
        ["backend.device=cuda"],
        ["+cluster.hardware.fp32_flops_per_s=1e11", "+cluster.hardware.link_bytes_per_s=1e9"],
    ],
)
def test_other_hardware_and_known_hardware_is_not_measured(overrides: list[str]) -> None:
    config = compose(overrides, to_start=False)
    assert measured(config, never) == (config, None)


def test_what_cant_be_measured_stays_unknown() -> None:
    config = compose([])
    assert measured(config, unable) == (config, None)
    assert {
        figure.kind for section in sections(config, compose) if section.title == TIME for figure in section.figures
    } == {"given"}


def test_the_plan_shows_the_share_of_checks_for_wrong_numbers() -> None:
    keys = ["cluster=slurm_h100", "backend.device=cuda", "recovery.corruption_check_steps=1000"]
    config = compose([*keys, "train.global_batch_size=64", "cluster.nodes=1"], to_start=False)
    share = 2 / config.grad_accum_steps / 1000
    (figure,) = [
        figure
        for section in sections(config, compose)
        for figure in section.figures
        if figure.name == "checks for wrong numbers"
    ]
    assert figure.value == share
    assert figure.text == f"at most {share:.2%} of the time: a micro-batch twice, every 1,000 steps"


def test_the_measurement_is_part_of_no_fingerprint() -> None:
    config = compose([])
    before = dataclasses.asdict(config)
    measured(config, speed)
    assert dataclasses.asdict(config) == before


def test_with_mup_the_plan_has_the_learning_rates_that_follow_the_width() -> None:
    figures = sections(compose(["experiment=ladder_tiny", "model.mup_base_width=32"]), compose)[1].figures
    rates = next(figure for figure in figures if figure.name == "peak learning rates (muP)")
    assert rates.value == pytest.approx(5e-3 / 3)
    assert rates.text.endswith("at 3 times the base width; 0.005 for all others")
