"""The cost of evaluating a milestone: published sizes, measured work, devices and shares of training."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from conf.compose import compose, groups
from conf.schema import Config
from conf.sizes import parameters
from hlatctl.plan.evaluation import (
    CHARACTERS_PER_TOKEN,
    UTILISATION,
    check_shared_devices,
    evaluation_cost,
    evaluation_section,
)
from hlatctl.run.errors import ConfigError
from tests.hlatctl.plan.conftest import with_hardware


def evaluated(config: Config, **keys: Any) -> Config:
    return dataclasses.replace(config, eval=dataclasses.replace(config.eval, **keys))


def texts(config: Config, step_s: float | None = 3.5, **keys: Any) -> dict[str, str]:
    section = evaluation_section(config, evaluation_cost(config, step_s, **keys), measured=False)
    return {figure.name: figure.text for figure in section.figures}


def test_the_groups_of_a_suite_have_the_published_items(hlat_7b: Config) -> None:
    cost = evaluation_cost(hlat_7b, 3.5)
    items = {work.group: (work.items, work.requests) for work in cost.groups}
    assert items["mmlu"] == (14_042, 56_168)
    assert items["math"] == (1_319, 1_319)
    assert list(items) == ["mmlu", "bbh", "math", "code", "bias", "validation"]
    assert not cost.unknown


def test_flops_are_twice_the_parameters_for_each_token(hlat_7b: Config) -> None:
    cost = evaluation_cost(evaluated(hlat_7b, tasks=["validation"]), 3.5)
    assert cost.flops == {"validation": 2.0 * parameters(hlat_7b.model).total * hlat_7b.eval.validation_tokens}
    peak = hlat_7b.cluster.hardware.fp32_flops_per_s
    assert peak is not None
    assert cost.total_s == pytest.approx(cost.flops["validation"] / (UTILISATION * peak))


def test_shots_limits_and_samples_change_the_work(hlat_7b: Config) -> None:
    def work(config: Config, group: str) -> Any:
        return next(each for each in evaluation_cost(config, 3.5).groups if each.group == group)

    groups = dict(hlat_7b.eval.groups)
    groups["mmlu"] = dataclasses.replace(groups["mmlu"], shots=0)
    few, many = work(evaluated(hlat_7b, groups=groups), "mmlu"), work(hlat_7b, "mmlu")
    assert few.prompt_tokens < many.prompt_tokens / 5
    assert work(evaluated(hlat_7b, limit=10), "mmlu").items == 570
    assert work(evaluated(hlat_7b, limit=0.1), "math").items == 132
    assert work(evaluated(hlat_7b, items={"gsm8k": [1, 5]}), "math").items == 2
    assert work(evaluated(hlat_7b, limit=0.1), "mmlu").items == math.ceil(0.1 * work(hlat_7b, "mmlu").items)
    code = dataclasses.replace(hlat_7b.eval.code, samples_per_problem=200)
    assert work(evaluated(hlat_7b, code=code), "code").requests == 164 * 200


def test_generation_takes_at_least_the_time_to_read_the_weights(hlat_7b: Config) -> None:
    slow = with_hardware(evaluated(hlat_7b, tasks=["math"]), memory_bytes_per_s=1e9)
    times_s = evaluation_cost(slow, 3.5).times_s
    assert times_s is not None
    assert isinstance(slow.eval.batch_size, int)
    passes = -(-1_319 // slow.eval.batch_size) * 256
    assert times_s["math"] > passes * 4 * parameters(slow.model).total / 1e9


def test_number_format_devices_and_replicas_change_the_time(hlat_7b: Config) -> None:
    config = evaluated(hlat_7b, tasks=["mmlu"])
    one_s = evaluation_cost(config, 3.5).total_s
    assert one_s is not None
    for changed, factor in (({"tensor_parallel_size": 2}, 2), ({"replicas": 3}, 3), ({"dtype": "bfloat16"}, 4)):
        assert evaluation_cost(evaluated(config, **changed), 3.5).total_s == pytest.approx(one_s / factor)
    assert evaluation_cost(evaluated(config, batch_size="auto"), 3.5).total_s == pytest.approx(one_s)


def test_a_task_without_a_published_size_is_named(hlat_7b: Config) -> None:
    text = texts(evaluated(hlat_7b, tasks=["logiqa", "validation"]))["tasks of unknown size"]
    assert text == "logiqa: left out, not among the published sizes; with eval.data_dir they are measured"


@pytest.mark.parametrize("suite", groups()["eval"])
def test_the_size_of_every_task_of_our_suites_is_known(suite: str) -> None:
    assert evaluation_cost(compose([f"eval={suite}"]), None).unknown == []


def test_work_that_was_measured_replaces_the_published_sizes(hlat_7b: Config) -> None:
    record = {"group": "logic", "items": 10, "requests": 4, "sequences": 1, "characters": 330, "generated_tokens": 0}
    (logic, _) = evaluation_cost(hlat_7b, 3.5, [record]).groups
    assert (logic.group, logic.items, logic.requests, logic.sequences) == ("logic", 10, 40, 10)
    assert logic.prompt_tokens == pytest.approx(10 * 330 / CHARACTERS_PER_TOKEN)


def test_a_model_that_does_not_fit_a_device_names_the_keys_that_share_it(hlat_70b: Config) -> None:
    assert "DOES NOT FIT in 16 GiB; eval.tensor_parallel_size devices share it" in texts(hlat_70b)["evaluated model"]
    shared = texts(evaluated(hlat_70b, runner="neuron", tensor_parallel_size=32))["evaluated model"]
    assert shared == "4.01 GiB on each of 32 devices (eval.runner=neuron): fits in 16 GiB"


def test_the_export_and_the_checkpoint_of_a_70b_milestone_are_named(hlat_70b: Config) -> None:
    text = texts(evaluated(hlat_70b, runner="vllm"))["export of a milestone"]
    assert text == "257 GiB, removed after the evaluation; its checkpoint has 771.4 GiB"
    text = texts(hlat_70b)["export of a milestone"]
    assert text == "none: its weights are read directly; its checkpoint has 771.4 GiB"


def test_evaluation_slower_than_training_is_said_unless_training_waits(hlat_7b: Config) -> None:
    fast = texts(hlat_7b, 0.01)["share of training's time"]
    assert fast.endswith("evaluation falls behind training")
    assert not texts(evaluated(hlat_7b, placement="between"), 0.01)["share of training's time"].endswith("training")
    assert texts(hlat_7b, 0.01) != texts(evaluated(hlat_7b, concurrent=4), 0.01)


def on_one_machine(trains_on: str, **keys: Any) -> Config:
    """Return a run of a small model on this machine's own devices."""
    config = compose(["backend.device=" + trains_on, "cluster.hardware.memory_bytes=67108864"])
    return evaluated(config, **keys)


@pytest.mark.parametrize(
    ("device", "keys", "expected"),
    [
        ("cuda", {}, "between"),
        ("cuda", {"placement": "beside"}, "beside"),
        ("cuda", {"device": "cpu"}, "beside"),
        ("cuda", {"runner": "vllm"}, "between"),
        ("cpu", {}, "beside"),
        ("cpu", {"device": "cuda"}, "between"),
    ],
)
def test_one_machines_devices_evaluate_only_while_they_dont_train(
    device: str, keys: dict[str, Any], expected: str
) -> None:
    assert on_one_machine(device, **keys).eval_placement == expected


def test_jobs_of_a_cluster_evaluate_during_training(hlat_7b: Config) -> None:
    assert evaluated(hlat_7b, device="cuda").eval_placement == "beside"


def test_sharing_a_device_with_training_is_refused_if_both_dont_fit() -> None:
    small = on_one_machine("cuda", placement="beside")
    with pytest.raises(ConfigError, match=r"eval\.placement=beside: training needs .* has no room for both") as caught:
        check_shared_devices(small)
    assert caught.value.hint == "set eval.placement=between, or eval.device=cpu"
    for fits in (
        on_one_machine("cuda"),
        on_one_machine("cuda", placement="beside", device="cpu"),
        on_one_machine("cpu"),
        with_hardware(small, memory_bytes=None),
        with_hardware(small, memory_bytes=1 << 40),
    ):
        check_shared_devices(fits)


def test_without_a_peak_the_time_is_unknown(hlat_7b: Config) -> None:
    text = texts(with_hardware(hlat_7b, fp32_flops_per_s=None))["a milestone"]
    assert text.endswith("time unknown: set cluster.hardware.fp32_flops_per_s")
