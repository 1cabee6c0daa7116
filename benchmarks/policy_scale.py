"""Dry runs of thousands of nodes, and 100 of HLAT 7B: outcome, effective time, restarts, minutes lost by cause."""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from collections.abc import Sequence

from conf.compose import compose
from conf.schema import Config, SimulationConfig
from conf.simulation import split
from flows.forecast import play
from hlatctl.report import goodput as measured
from hlatctl.report.forecast import Simulation

#: HLAT, arXiv 2404.10630, Table 1, and half of its downtime.
_PAPER, _GOAL = 98.81, 99.3
_LIMIT_S = 60.0
#: Llama 3 405B (arXiv 2407.21783): the shape is that of table 3; 54 days of its steps are 750,000.
_LLAMA_3 = (
    "experiment=llama_tiny tracking=none eval.enabled=false cluster=simulated cluster.nodes=2048 "
    "cluster.processes_per_node=8 model.hidden_size=16384 model.intermediate_size=53248 model.num_layers=126 "
    "model.num_heads=128 model.num_kv_heads=8 model.vocab_size=128256 tokenizer.train_vocab_size=128256 "
    "parallel.tensor_parallel_size=8 parallel.pipeline_parallel_size=2 train.seq_len=8192 train.global_batch_size=2048 "
    "train.micro_batch_size=1 train.tokens=15.6T train.max_steps=750000 train.on_nonfinite=rollback "
    "checkpoint.every_steps=50 simulation=llama3_405b"
)


def run() -> None:
    """Print each dry run, then the mean of 100 of HLAT 7B."""
    _one("Llama 3 405B on 2,048 nodes, its published rates", _LLAMA_3.split(), goodput=93.0)
    _one("HLAT 70B on 512 nodes", ["experiment=hlat_70b", "cluster.nodes=512"])
    _hundred(compose(["experiment=hlat_7b"]), int(os.environ.get("HLATCTL_BENCH_SEEDS", "100")))


def _one(name: str, overrides: Sequence[str], goodput: float | None = None) -> None:
    others, settings = split(overrides)
    config = compose(others)
    began_s, computed_s = time.monotonic(), time.process_time()
    simulation = play(config, settings)
    wall_s, cpu_s = time.monotonic() - began_s, time.process_time() - computed_s
    share = simulation.steps / config.total_steps
    print(f"{name}: {_outcome(simulation)} after {100 * share:.1f} % of the steps, {simulation.failures} failures")
    goal = f" (goal {goodput:g} %)" if goodput else ""
    print(f"  effective time {100 * simulation.goodput_fraction:.2f} %{goal}")
    _print_minutes([simulation])
    print(f"  simulated in {wall_s:.1f} s (goal {_LIMIT_S:g} s), {cpu_s:.1f} s of a core", flush=True)


def _hundred(config: Config, seeds: int) -> None:
    began_s = time.monotonic()
    simulations = [play(config, SimulationConfig(seed=seed)) for seed in range(1, seeds + 1)]
    wall_s = time.monotonic() - began_s
    uptimes = [100 * simulation.uptime_fraction for simulation in simulations]
    half = 1.96 * statistics.stdev(uptimes) / len(uptimes) ** 0.5
    outcomes = Counter(map(_outcome, simulations))
    print(f"HLAT 7B on 64 nodes, {seeds} seeds: {', '.join(f'{n} {what}' for what, n in outcomes.most_common())}")
    mean, median = statistics.mean(uptimes), statistics.median(uptimes)
    print(f"  uptime {mean:.2f} ± {half:.2f} % (median {median:.2f}; goal {_GOAL}; the paper's {_PAPER})")
    goodput = 100 * statistics.mean(simulation.goodput_fraction for simulation in simulations)
    failures = statistics.mean(simulation.failures for simulation in simulations)
    print(f"  effective time {goodput:.2f} %, {failures:.1f} failures")
    _print_minutes(simulations)
    print(f"  simulated in {wall_s / seeds:.1f} s each", flush=True)


def _outcome(simulation: Simulation) -> str:
    return f"given up ({simulation.message})" if simulation.message else "finished"


def _print_minutes(simulations: Sequence[Simulation]) -> None:
    """Print the mean minutes that were not productive, by cause, and their share of the whole time."""
    whole_s = sum(simulation.wall_s for simulation in simulations)
    seconds: Counter[str] = Counter()
    for simulation in simulations:
        seconds.update(simulation.seconds)
    del seconds[measured.PRODUCTIVE]
    for cause, lost_s in seconds.most_common():
        print(f"  {lost_s / 60 / len(simulations):9.1f} min  {100 * lost_s / whole_s:6.3f} %  {cause}")
