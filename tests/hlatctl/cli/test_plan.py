"""What `hlatctl plan` says of HLAT's runs; that it touches nothing is in ``test_train``."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from conf.schema import Config, SimulationConfig
from flows.forecast import variants
from hlatctl.cli.main import main
from hlatctl.plan import calibration
from hlatctl.report.forecast import Simulation

_70B_ON_4_NODES = ["experiment=hlat_70b", "cluster.nodes=4", "parallel.pipeline_parallel_size=4"]


def lines_of(text: str) -> dict[str, list[str]]:
    """The lines of a plan's figures, by their first words."""
    rows = (line.split("  ", maxsplit=1) for line in text[: text.index("# stages")].splitlines() if "  " in line)
    return {name.strip(): rest.split(maxsplit=1) for name, rest in rows}


def test_a_plan_of_hlat_7b_shows_its_needs_and_the_source_of_each_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "experiment=hlat_7b"]) == 0
    lines = lines_of(capsys.readouterr().out)
    assert lines["training time"] == ["calibrated", "17 d 16 h, if nothing breaks: 429,154 steps of 3.56 s"]
    assert lines["training cost"] == ["calibrated", "$584,126, if nothing breaks"]
    assert lines["parameters"] == ["derived", "6,738,415,616"]
    assert lines["verdict"] == ["calibrated", "fits"]
    assert lines["workspace"] == ["calibrated", "4.38 GiB"]
    assert lines["MFU"] == ["calibrated", "27.9%"]
    assert lines["price of a node-hour"] == ["given", "$21.50"]
    assert lines["of the cost on p4d.24xlarge"] == ["calibrated", "54%"]
    assert lines["journal"][0] == "measured"
    assert lines["MFU of 7B on 32 nodes"] == ["calibrated", "33.5%, published 33.5%, off by +0.0%"]
    assert lines["cost of 7B on 64 nodes, of p4d's"][0] == "check"
    seventy = "57 tokens/s a device, published 60 tokens/s a device, off by -5.2%"
    assert lines["Llama 3.1 70B on 32 trn1 nodes, TP 32 x PP 8"] == ["check", seventy]
    assert lines["70B fits 4 nodes at TP 32 x PP 4"] == ["calibrated", "no, as published"]


def test_a_plan_that_does_not_fit_suggests_changes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *_70B_ON_4_NODES, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["plan"]["memory of a process"]
    assert [(f["name"], f["value"], f["text"]) for f in figures if f["name"] == "verdict"] == [
        ("verdict", False, "DOES NOT FIT")
    ]
    remedies = [figure["value"] for figure in figures if figure["name"] == "would fit with"]
    assert "cluster.nodes=8 parallel.pipeline_parallel_size=8" in remedies


def test_a_run_that_does_not_fit_is_refused_before_anything_is_made(
    runs_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--dry-run", *_70B_ON_4_NODES]) == 10
    assert capsys.readouterr().err.startswith(
        "error: cluster.hardware.memory_bytes=17179869184 (16 GiB): a process needs "
    )
    assert not runs_dir.exists()


def test_a_search_ranks_layouts_by_cost(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "experiment=hlat_7b", "--search", "--json"]) == 0
    layouts = json.loads(capsys.readouterr().out)
    assert (layouts[0]["tensor_parallel_size"], layouts[0]["pipeline_parallel_size"]) == (8, 1)
    assert [one["usd"] for one in layouts] == sorted(one["usd"] for one in layouts)
    assert main(["plan", "experiment=hlat_7b", "--search"]) == 0
    text = capsys.readouterr().out.splitlines()
    assert (text[0].split()[:3], len(text)) == (["TP", "PP", "EP"], 11)
    assert main(["plan", "--search"]) == 10
    assert "cluster.hardware.fp32_flops_per_s=null: a ranking needs it" in capsys.readouterr().err
    assert main(["plan", "experiment=olmo3_7b", "--search"]) == 10
    assert "hint: search for the stage with the longest sequences: train.stages=[] train.seq_len=65536" in (
        capsys.readouterr().err.replace("\n", " ")
    )


@pytest.mark.processes  # the plan asks Slurm for reservations
@pytest.mark.parametrize(
    ("overrides", "nodes", "about"),
    [
        (["experiment=hlat_7b"], 64, "is for Slurm"),
        (["cluster=slurm", "cluster.nodes=4", "train.global_batch_size=4", "train.micro_batch_size=1"], 4, ""),
        (["cluster=simulated"], 0, "is for one machine"),
    ],
)
def test_the_script_of_several_nodes_is_that_of_slurm_which_need_not_be_here(
    overrides: list[str], nodes: int, about: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["plan", *overrides]) == 0
    plan = capsys.readouterr().out
    assert ("--standalone" in plan, f"#SBATCH --nodes={nodes}\n" in plan) == (False, nodes > 0)
    assert ("simulation only" in plan) == bool(about)
    assert about in plan


def test_a_plan_for_kubernetes_shows_the_manifest_and_what_a_start_still_needs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("HLATCTL_RUNS_DIR", raising=False)
    monkeypatch.setattr("flows.stages.validate.ask_about", lambda module, config, timeout_s: "")
    cluster = ["cluster=eks_trn1", "experiment=hlat_7b"]
    assert main(["plan", *cluster]) == 0
    plan = capsys.readouterr().out
    needed = plan[: plan.index("# memory, time and cost")]
    assert "# needed before `hlatctl train`\ncluster.kubernetes.image=null: " in needed
    assert "hint: use runs_dir=/fsx/runs\n" in needed
    assert "kind: Job\n" in plan
    assert "image: IMAGE\n" in plan

    assert main(["train", *cluster]) == 10
    assert "cluster.kubernetes.image=null" in capsys.readouterr().err

    assert main(["plan", *cluster, "cluster.kubernetes.image=r/i@sha256:0", "runs_dir=/fsx/runs"]) == 0
    assert "needed before" not in capsys.readouterr().out


@pytest.mark.processes  # the plan asks Slurm for reservations
def test_a_layout_that_the_backend_can_not_train_is_planned_and_refused_by_train(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sharded_stages = [
        *("cluster=slurm_h100", "model=llama31_8b", "backend.device=cuda", "precision=mixed", "eval.enabled=false"),
        *("parallel=fsdp", "parallel.pipeline_parallel_size=4", "train.global_batch_size=64"),
        *("train.micro_batch_size=1", "train.seq_len=8192"),
    ]
    assert main(["plan", *sharded_stages]) == 0
    plan = capsys.readouterr().out
    problem = "parallel.pipeline_parallel_size=4 and parallel.data_parallel=fsdp: can't be combined"
    assert f"# needed before `hlatctl train`\n{problem}" in plan
    assert "\ngradients not exchanged yet " in plan
    assert "\npipeline " in plan

    assert main(["train", *sharded_stages]) == 10
    assert problem in capsys.readouterr().err


@pytest.mark.processes
def test_a_plan_says_what_train_would_refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["experiment=quickstart", f"tokenizer.path={tmp_path}/neither", f"runs_dir={tmp_path}/runs"]
    assert main(["train", *overrides]) == 11
    refusal = capsys.readouterr().err.removeprefix("error: ")
    assert main(["plan", *overrides]) == 0
    assert capsys.readouterr().out.startswith(f"# needed before `hlatctl train`\n{refusal}\n")


def test_a_plan_warns_of_a_small_vocabulary_and_of_repeated_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = "data: the corpus gives a tokenizer of 293 tokens, fewer than tokenizer.train_vocab_size=8,192"
    prepared = {"sources": [{"path": "/data/books", "estimated_tokens": 20_000}], "warnings": [small]}
    monkeypatch.setattr("flows.stages.data.prepared_dataset", lambda config: prepared)
    assert main(["plan", "cluster=simulated"]) == 0
    text = capsys.readouterr().out
    warned = text[text.index("# warnings") : text.index("# the run")].splitlines()
    assert warned[1] == small
    assert warned[2].startswith("data: the run trains on /data/books about 125 times: 2,506,752 tokens from a corpus ")
    assert main(["plan", "cluster=simulated", "train.tokens=50K", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == [small]


def test_a_plan_warns_of_a_key_without_effect(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "cluster=simulated", "optimizer.momentum=0.9", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == [
        "optimizer.momentum: has no effect without optimizer=muon"
    ]


def test_a_plan_says_which_tasks_this_machine_will_skip(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    skipped = "smoke_humaneval: will be skipped, because there is no sandbox"
    monkeypatch.setattr("hlatctl.machine_checks.skipped_code_tasks", lambda config: skipped)
    assert main(["plan", "cluster=simulated", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == [skipped]


def played(config: Config, settings: SimulationConfig, seeds: int, say: object) -> dict[str, list[Simulation]]:
    """Long simulations of a large run, in the place of real ones."""
    one = Simulation(
        seed=1,
        message="",
        wall_s=200.9 * 86400,
        uptime_fraction=0.99123,
        goodput_fraction=0.96123,
        lost_s=35.5 * 3600,
        failures=120,
        cost_usd=6_102_570.0,
    )
    return {name: [one] * seeds for name in variants(config, settings)}


SMALL = ["model=llama_tiny", "train.max_steps=200", "checkpoint.every_steps=40", "eval.enabled=false"]


def test_a_forecast_is_a_table_of_variants_and_leaves_only_its_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    figure = tmp_path / "simulations.svg"
    assert main(["forecast", *SMALL, "--seeds", "1", "--json", "--figure", os.fspath(figure)]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["simulated"] is True
    assert list(record["variants"]) == [
        "as configured",
        "checkpoint.every_steps=10",
        "checkpoint.every_steps=160",
        "simulation.start_s=960",
        "recovery.enabled=false",
    ]
    assert record["variants"]["as configured"]["courses"] == 1
    assert "as configured" in figure.read_text(encoding="utf-8")
    assert list(tmp_path.iterdir()) == [figure]


def test_the_table_fits_100_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("flows.forecast.play_all", played)
    assert main(["forecast", "experiment=hlat_7b", "--seeds", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["VARIANT", "DURATION", "P95", "UPTIME", "GOODPUT", "LOST", "WORK", "FAILURES", "USD"]
    assert max(map(len, lines)) <= 100
    assert "simulated             2 simulations of each of 7 variants, 14 in all" in lines


def test_a_forecast_checks_its_configuration_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["forecast", "train.global_batch_size=7", "cluster.processes_per_node=2"]) == 10
    assert "train.global_batch_size=7: not divisible" in capsys.readouterr().err


@pytest.mark.processes
def test_a_simulated_speed_test_agrees_with_the_plan_and_is_not_kept(
    runs_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("cluster=slurm_h100", "cluster.nodes=2", "backend.device=cuda", "precision=mixed", "parallel=fsdp")
    size = ("model=llama31_8b", "train.global_batch_size=16", "parallel.activation_checkpointing=selective")
    assert main(["speedtest", "--dry-run", "--json", "--steps=10", *where, *size]) == 0
    test = json.loads(capsys.readouterr().out)
    assert [point["nodes"] for point in test["points"]] == [1, 2]
    assert all(p["tokens_per_s"] == pytest.approx(p["planned_tokens_per_s"]) for p in test["points"])
    assert test["fitted"] == pytest.approx({"compute_efficiency": 0.6699, "collective_efficiency": 0.75}, abs=0.01)
    assert calibration.kept("slurm_h100") is None


@pytest.mark.processes
def test_a_speed_test_is_confirmed_like_a_run_and_its_runs_share_a_budget(
    runs_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["speedtest", "cluster=slurm", "cluster.nodes=2"]) == 10
    told = capsys.readouterr().err
    assert "cluster.confirm_above_node_hours=100: the speed test takes unknown node-hours at an unknown price" in told
    assert "hint: pass --yes to confirm, or set budget.node_hours" in told
    assert not runs_dir.exists()
    where = ("cluster=slurm_h100", "cluster.nodes=2", "backend.device=cuda", "precision=mixed", "parallel=fsdp")
    size = ("model=llama31_8b", "train.global_batch_size=16", "parallel.activation_checkpointing=selective")
    assert main(["speedtest", "--dry-run", "--steps=10", *where, *size, "budget.node_hours=1.5"]) == 26
    told = capsys.readouterr().err
    assert re.search(r"1 of slurm_h100: run .*speedtest", told), "the first run, on two nodes, is within the budget"
