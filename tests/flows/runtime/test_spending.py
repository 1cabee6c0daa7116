"""What a submission costs, when a person must confirm it, and what a run has used of its budget."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from conf.compose import compose
from conf.schema import BudgetConfig, ClusterConfig, Config
from flows.runtime.spending import (
    Expense,
    of_evaluations,
    of_several,
    of_training,
    spent,
    typed_hardware,
    typed_in,
    used_up,
    warning,
)
from hlatctl.plan.calibration import SpeedTest, conditions, keep
from hlatctl.run import files
from hlatctl.run.errors import ConfigError
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import RunState


@pytest.mark.parametrize(
    ("expense", "why"),
    [
        (Expense(node_hours=3.0), ""),
        (Expense(node_hours=300.0), "cluster.confirm_above_node_hours=100: it takes 300 node-hours"),
        (Expense(node_hours=3.0, usd=99.0, priced=True), ""),
        (Expense(node_hours=3.0, usd=101.5, priced=True), "cluster.confirm_above_usd=50: it costs 101.50 USD"),
        (Expense(priced=True), "cluster.confirm_above_usd=50: it has an unknown cost"),
        (Expense(), ""),
    ],
)
def test_only_an_expensive_submission_or_one_of_unknown_price_is_confirmed(expense: Expense, why: str) -> None:
    limit = 100.0 if expense.usd == 99.0 else 50.0
    assert expense.why_ask(ClusterConfig(confirm_above_usd=limit), "it") == why


def test_an_unknown_time_on_a_cluster_without_a_price_is_confirmed_unless_a_budget_limits_it(tmp_path: Path) -> None:
    config = compose(["cluster=slurm", f"runs_dir={tmp_path}", "eval.enabled=false"])
    unknown, asks = of_training(config), "cluster.confirm_above_node_hours=100: the run takes unknown node-hours at"
    assert unknown.why_ask(config.cluster, "the run") == f"{asks} an unknown price"
    assert "set budget.node_hours" in unknown.hint
    assert Expense().why_ask(config.cluster, "the sweep").startswith("cluster.confirm_above_node_hours=100: the sweep")
    limited = dataclasses.replace(config, budget=BudgetConfig(node_hours=5.0))
    assert of_training(limited).why_ask(config.cluster, "the run") == ""
    assert of_training(limited).text().startswith("5 node-hours (the whole budget); no price: set cluster.price_usd")
    known = on_p5(tmp_path)
    assert of_training(dataclasses.replace(known, budget=BudgetConfig(usd=55.04))).node_hours == 1.0
    assert of_several([of_training(known), of_training(config)]).node_hours is None
    assert of_several([of_training(known)] * 2).usd == 2 * (of_training(known).usd or 0.0)


def test_a_missing_price_is_named_with_the_key_that_sets_it() -> None:
    assert Expense(node_hours=12.0).text() == (
        "12 node-hours; no price: set cluster.price_usd_per_node_hour for dollars"
    )
    assert Expense().text().endswith("set cluster.price_usd_per_node_hour for dollars")
    assert Expense(node_hours=2.0, usd=110.08, priced=True).text() == "2 node-hours, 110.08 USD"


def on_p5(runs_dir: Path) -> Config:
    model = ("model=llama31_8b", "backend.device=cuda", "precision=mixed", "parallel=fsdp", "train.seq_len=4096")
    size = ("train.tokens=10B", "train.global_batch_size=128", "eval.every_tokens=1B")
    return compose(["cluster=slurm_p5", *model, *size, f"runs_dir={runs_dir}"], to_start=False)


def test_training_costs_its_remaining_steps(tmp_path: Path) -> None:
    config = on_p5(tmp_path)
    whole, half = of_training(config), of_training(config, done=config.total_steps // 2)
    assert whole.usd
    assert half.usd
    assert whole.node_hours
    assert whole.usd == pytest.approx(whole.node_hours * 55.04)
    assert half.usd == pytest.approx(whole.usd / 2, rel=0.01)
    assert of_evaluations(config, 2).usd == pytest.approx(2 * (of_evaluations(config, 1).usd or 0.0))


def test_a_speed_test_of_the_cluster_changes_the_prediction_as_it_changes_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    config = on_p5(tmp_path)
    before = of_training(config).node_hours
    assert before
    half = {"compute_efficiency": (config.cluster.hardware.compute_efficiency or 0.0) / 2}
    same = {"cluster": "slurm_p5", "model": "llama31_8b", "conditions": conditions(config)}
    keep(SpeedTest(unix_s=0.0, points=[], fitted=half, **same))  # type: ignore[arg-type]
    tested = of_training(config)
    assert (tested.node_hours or 0.0) > 1.3 * before
    assert tested.source == "the plan's speed with the speed test of 1970-01-01"
    name = "cluster.hardware.compute_efficiency"
    typed = of_training(config, typed=[f"{name}={config.cluster.hardware.compute_efficiency}"])
    assert typed.node_hours == before, "a typed number has priority over the speed test"
    assert typed.source == f"the plan's speed with {name} as given"


def test_a_typed_number_of_the_hardware_is_known_when_the_run_is_resumed(tmp_path: Path) -> None:
    assert typed_hardware(["cluster.hardware={link_latency_s: 1e-6}", "cluster.nodes=2"]) == ["link_latency_s"]
    run = RunPaths(tmp_path / "run")
    run.root.mkdir()
    assert typed_in(run) == []
    keys = {"cluster.hardware.link_bytes_per_s": "command line", "cluster.nodes": "command line"}
    files.write_json(run.provenance, {"origins": {"keys": keys}})
    assert typed_in(run) == ["cluster.hardware.link_bytes_per_s="]


def test_this_machine_is_free_without_a_price() -> None:
    assert of_training(Config()) == of_evaluations(Config(), 3) == Expense(node_hours=0.0)


def test_the_part_of_a_budget_that_is_used() -> None:
    cluster = ClusterConfig(nodes=2, spare_nodes=1, price_usd_per_node_hour=10.0, launcher="slurm")
    config = dataclasses.replace(Config(), cluster=cluster, budget=BudgetConfig(usd=100.0, node_hours=100.0))
    state = RunState(held_s={0: 3 * 3600.0}, has_nodes=True, worked_unix_s=1000.0)
    assert [one.used for one in spent(state, config)] == [9.0, 90.0]
    text = "budget.usd=100: 90 % is used; the run stops with a checkpoint at 100 %"
    assert warning(state, config, 1000.0) == text
    assert warning(dataclasses.replace(state, warnings=[text]), config, 1000.0) == ""
    assert used_up("r", state, config, 1000.0) is None
    over = used_up("r", state, config, 1000.0 + 1200.0)
    assert over
    assert over.message == "run r: budget.usd=100: 100.00 USD are used, 100 %"
    assert over.exit_code == 26
    assert over.hint.startswith("`hlatctl resume r budget.usd=VALUE`")


def test_a_submission_that_nobody_can_confirm_is_refused_with_the_option_that_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from hlatctl.cli.common import confirm

    cluster, expense = ClusterConfig(launcher="slurm"), Expense(node_hours=200.0, usd=9000.0, priced=True)
    with pytest.raises(ConfigError, match=r"the run costs 9,000\.00 USD; that must be confirmed") as caught:
        confirm(expense, cluster, "the run", yes=False)
    assert "--yes" in caught.value.hint
    confirm(expense, cluster, "the run", yes=True)
    assert capsys.readouterr().err.count("cost of the run: 200 node-hours, 9,000.00 USD") == 2
