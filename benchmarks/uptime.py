"""Uptime of simulated HLAT 7B runs over 100 seeds, with automatic restarts and with manual ones, and what lowers it."""

from __future__ import annotations

import multiprocessing
import os
import statistics
from concurrent.futures import ProcessPoolExecutor

from conf.compose import compose
from conf.schema import SimulationConfig
from flows.forecast import play
from hlatctl.cli.common import columns
from hlatctl.report.forecast import LOSSES_HEADER, loss_rows

SEEDS = 100
#: HLAT, arXiv 2404.10630, Table 1.
_PAPER = {True: 98.81, False: 77.83}


def run() -> None:
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        for restarts, paper in _PAPER.items():
            config = compose(["experiment=hlat_7b", f"recovery.enabled={str(restarts).lower()}"])
            seeded = [SimulationConfig(seed=seed) for seed in range(1, SEEDS + 1)]
            simulations = list(pool.map(play, [config] * SEEDS, seeded))
            uptimes = sorted(100 * one.uptime_fraction for one in simulations)
            given_up = sum(bool(one.message) for one in simulations)
            half = 1.96 * statistics.stdev(uptimes) / len(uptimes) ** 0.5
            print(
                f"automatic restarts {'on' if restarts else 'off'}: uptime {statistics.mean(uptimes):.2f} ± {half:.2f} "
                f"% (median {statistics.median(uptimes):.2f}, from {uptimes[0]:.2f} to {uptimes[-1]:.2f}), the paper's "
                f"{paper} %; {statistics.mean(one.failures for one in simulations):.1f} failures a run, "
                f"{given_up} of {SEEDS} given up, which count up to their end",
                flush=True,
            )
            print(columns([list(LOSSES_HEADER), *loss_rows(simulations)]), flush=True)
