"""A speed test's results: kept for its user, fitted by the planner, and used for the same conditions only."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from conf.compose import compose
from conf.schema import Config
from hlatctl.plan.calibration import Point, SpeedTest, calibrated, conditions, fit, keep, place, speed_section
from hlatctl.plan.published import nearest
from hlatctl.plan.step_time import step_time_s
from hlatctl.run.errors import StorageError

_RUN = ("cluster=slurm_h100", "backend.device=cuda", "precision=mixed", "parallel=fsdp", "model=llama31_8b")


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def config(nodes: int, **hardware: float) -> Config:
    made = compose([*_RUN, f"cluster.nodes={nodes}", f"train.global_batch_size={8 * nodes}", "eval.enabled=false"])
    own = dataclasses.replace(made.cluster.hardware, **hardware)  # type: ignore[arg-type]
    return dataclasses.replace(made, cluster=dataclasses.replace(made.cluster, hardware=own))


def measured(nodes: int, **hardware: float) -> tuple[Config, float]:
    """A configuration, and its time of a step on hardware that differs from what it says."""
    step_s = step_time_s(config(nodes, **hardware))
    assert step_s
    return config(nodes), step_s


def a_test(fitted: dict[str, float]) -> SpeedTest:
    of_one = {"step_s": 1.0, "mfu_fraction": 0.4, "planned_tokens_per_s": 1000.0}
    point = Point(nodes=1, devices=8, tokens_per_s=900.0, exchanges={}, **of_one)
    four = dataclasses.replace(point, nodes=4, devices=32, tokens_per_s=3240.0, exchanges={"allreduce_mib_per_s": 5.0})
    return SpeedTest(
        cluster="slurm_h100",
        unix_s=1_790_000_000.0,
        conditions=conditions(config(1)),
        model="llama31_8b",
        points=[point, four],
        fitted=fitted,
    )


def test_the_shares_with_which_the_planner_gives_the_measured_times_are_found() -> None:
    real = {"compute_efficiency": 0.41, "collective_efficiency": 0.3}
    found = fit([measured(4, **real), measured(1, **{**real, "collective_efficiency": 0.75})])
    assert found["compute_efficiency"] == pytest.approx(0.41, abs=0.01)
    assert found["collective_efficiency"] == pytest.approx(0.3, abs=0.02)
    assert set(fit([measured(1, **real)])) == {"compute_efficiency"}


def test_unknown_hardware_is_not_fitted() -> None:
    unknown = compose(["cluster=slurm", "eval.enabled=false"])
    assert fit([(unknown, 1.0)]) == {}


def test_a_kept_test_changes_plans_of_its_cluster_with_the_same_conditions() -> None:
    assert calibrated(config(2)) == (config(2), None)
    test = a_test({"compute_efficiency": 0.5})
    keep(test)
    planned, found = calibrated(config(2))
    assert found == test
    assert planned == config(2, compute_efficiency=0.5)
    typed = config(2, compute_efficiency=0.9)
    assert calibrated(typed, ["compute_efficiency"])[0] == typed
    other = dataclasses.replace(config(2), precision=dataclasses.replace(config(2).precision, name="fp8"))
    assert calibrated(other) == (other, None)
    place("slurm_h100").write_text("{}")
    with pytest.raises(StorageError, match=r"slurm_h100\.json: is damaged \('points' is missing\)\nhint: rm "):
        calibrated(config(2))


def test_its_section_shows_scaling_how_far_the_plan_was_off_and_the_nearest_published_speed() -> None:
    on_two = config(2)
    published = nearest(on_two, compose)
    assert published is not None
    assert published.config.model.name == "Llama 3.1 8B"
    section = speed_section(a_test({"compute_efficiency": 0.5}), published=published)
    assert section.title == "speed test of slurm_h100 on 2026-09-21"
    texts = {figure.name: figure.text for figure in section.figures}
    assert texts["llama31_8b, nodes: 1"] == (
        "900 tokens/s, 112 a device, a step 1 s, MFU 40.0%; the plan then: 1,000 tokens/s (+11%)"
    )
    assert re.match(
        r"[\d,]+ tokens/s a device, MFU [\d.]+%: Llama 3.1 8B on [\d,]+ of H100 500 W, precision mixed \(\w",
        texts["published, nearest"],
    )
    unknown = dataclasses.replace(on_two, cluster=compose(["cluster=lumi_g"]).cluster)
    assert nearest(unknown, compose) is None, "no run on such devices is published"
    assert "90% of linear scaling" in texts["llama31_8b, nodes: 4"]
    assert texts["allreduce_mib_per_s, nodes: 4"] == "5.0"
    assert texts["cluster.hardware.compute_efficiency"] == "0.5, fitted to it"
