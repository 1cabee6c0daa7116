"""The arithmetic of the table of ``python -m benchmarks gpu``, and the order of its cases."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from benchmarks.gpu_cases import OURS, config_of, schedule
from benchmarks.gpu_packages import packages
from benchmarks.measured import SKIP_STEPS, Measured, compared, reason, row
from conf import sizes
from conf.environment import torchtitan_problem
from conf.validate import validate

CONFIG = config_of(OURS, Path("unused"), "cuda")
PARAMETERS = sizes.parameters(CONFIG.model).total


def _steps(*counted_s: float) -> list[float]:
    return [60.0] * SKIP_STEPS + list(counted_s)


def test_the_first_steps_are_not_counted_and_rounds_are_pooled() -> None:
    first = Measured.of({"steps_s": _steps(0.5, 0.4), "peak_bytes": 7})
    both = first.and_round(Measured.of({"steps_s": _steps(0.6), "peak_bytes": 5, "loss": 2.5}))
    assert both.steps_s == (0.5, 0.4, 0.6)
    assert (both.peak_bytes, both.loss) == (7, 2.5)
    assert both.tokens_per_s(CONFIG) == pytest.approx(8 * 4096 / 0.5)


def test_a_measurement_is_read_again_from_the_line_that_tells_it() -> None:
    measured = Measured.of({"steps_s": _steps(0.5, 0.25), "peak_bytes": 7, "notes": ["a note"]})
    line = json.dumps({"case": "hlatctl", **dataclasses.asdict(measured)})
    assert Measured.kept(json.loads(line)) == measured


@pytest.mark.parametrize(("torch", "works"), [("2.13", True), ("2.11", False)])
def test_gathered_packages_train_with_torchtitan_where_torch_is_new_enough(torch: str, works: bool) -> None:
    pinned = (re.fullmatch(r"([\w-]+)(?:[=>]=([\d.]+).*)?", package) for package in packages(torch))
    gathered = {found[1]: found[2] or "1" for found in pinned if found}
    on_most_images = dict.fromkeys(("einops", "pillow", "tensorboard"), "1")
    assert (torchtitan_problem(CONFIG, gathered | on_most_images) == "") == works


def test_the_mfu_of_a_row_follows_from_the_shape_alone() -> None:
    """22 layers of TinyLlama's shape: 2048 x (2048 x 2 + 2 x 256 + 3 x 5632) each, and the output projection."""
    multiplied = 22 * (2048 * (2 * 2048 + 2 * 256 + 3 * 5632) + 2 * 2048) + 2048 + 32000 * 2048
    flops = 6 * multiplied + 12 * 22 * 2048 * 4096
    seconds = 8 * 4096 * flops / 989e12 / 0.4  # of a step with 40 % MFU on a device with 989 TFLOP/s
    cells = row("torchtitan", Measured(steps_s=(seconds, 2 * seconds, seconds)), CONFIG, 989e12).split()
    assert cells[0] == "torchtitan"
    assert cells[4] == "40.0%"
    assert float(cells[1]) == float(cells[2]) == pytest.approx(seconds, abs=1e-4)


def test_a_device_without_a_known_peak_has_no_mfu() -> None:
    assert row("hlatctl", Measured(steps_s=(0.5,)), CONFIG, None).split()[4:] == ["?"] * 4


def test_a_peer_with_another_model_is_refused() -> None:
    assert Measured(steps_s=(1.0,), parameters=PARAMETERS).problem(CONFIG) is None
    problem = Measured(steps_s=(1.0,), parameters=PARAMETERS + 1).problem(CONFIG)
    assert problem == f"its model has {PARAMETERS + 1:,} parameters, not {PARAMETERS:,}"
    assert "not counted" in str(Measured(steps_s=()).problem(CONFIG))


def test_the_comparison_says_how_many_times_the_tokens_of_the_base() -> None:
    lines = compared({"plain": 50_000.0, "hlatctl": 100_000.0}, "hlatctl")
    assert [line.split()[-1] for line in lines[2:]] == ["0.50", "1.00"]
    assert compared({"plain": 50_000.0}, "hlatctl") == []


@pytest.mark.parametrize(
    ("stderr", "expected"),
    [
        ("Traceback\n  File\nModuleNotFoundError: No module named 'x'\n", "ModuleNotFoundError: No module named 'x'"),
        ("torch._dynamo.exc.BackendCompilerFailed: no\ntorch.OutOfMemoryError: full\n\nSet TORCH_LOGS=1\n",
         "torch.OutOfMemoryError: full"),
        ("[rank0]: ValueError: bad\nError running lspci: none\n", "[rank0]: ValueError: bad"),
        ("Killed\n", "Killed"),
        ("", "it printed nothing"),
    ],
)  # fmt: skip
def test_the_reason_of_a_failure_is_the_line_that_names_the_error(stderr: str, expected: str) -> None:
    assert reason(stderr) == expected


def test_the_compared_cases_take_turns_before_the_switches() -> None:
    names = [case.name for case in schedule([], 80 << 30)]
    first, second = (i for i, name in enumerate(names) if name == "hlatctl")
    compared_ones = {"plain PyTorch loop", "torchtitan by itself", "hlatctl, backend=torchtitan"}
    assert compared_ones | {"the loss alone"} <= set(names[first:second])
    assert names.index("not compiled") > second
    assert [name for name in names if name.startswith("llama_")] == ["llama_3b, all recomputed"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_cases_have_configurations_that_could_be_trained(device: str) -> None:
    for case in schedule([], 80 << 30):
        validate(config_of(case, Path("unused"), device))


def test_parts_of_names_choose_cases() -> None:
    assert [case.name for case in schedule(["muon", "the loss"], None)] == ["the loss alone", "optimizer=muon"]
