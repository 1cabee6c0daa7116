"""The first minutes on an accelerator: is training right, how fast is it, and what do the switches do?

The checks come first (``gpu_checks``), then tokens/s, MFU and memory, compared with named peers. Each check and each
case is a separate process with its own limit, so that its peak of memory is its own, and prints a line of JSON when
it is done. All train on the same packed text from this interpreter's library: the trainer with the real loop, the peers
from tokens in memory. The cases that are compared take turns. A peer whose package is missing has the reason in its row
(``HLATCTL_BENCH_PEERS``: folders with packages for the peers alone). Without a GPU the same cases run on the CPU with a
small model, which shows that they work and nothing else. ``HLATCTL_BENCH_SECONDS`` (540) limits the whole,
``HLATCTL_BENCH_CASES`` names some checks and cases (parts of names, with commas between).
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_cases import OURS, Case, config_of, schedule
from benchmarks.gpu_checks import CHECKS
from benchmarks.gpu_checks import prepare as prepare_checks
from benchmarks.measured import COUNTING, Measured, compared, head, reason, row
from conf import load
from conf.devices import DEVICES
from conf.schema import Config
from hlatctl.run import files
from hlatctl.run.paths import RunPaths
from trainer.model.precision import PRECISIONS

_ROOT = Path(__file__).parents[1]
_LIMIT_S = float(os.environ.get("HLATCTL_BENCH_SECONDS", "540"))
#: No case may use up the time of all others.
_CASE_LIMIT_S = _LIMIT_S / 3
_CHECK_LIMIT_S = min(120.0, _CASE_LIMIT_S)
_LEAST_S = 20
#: Programs that train a prepared run; the others get its tokens.
_OF_RUNS = ("gpu_case", "titan_loop")


@dataclass(frozen=True)
class _Device:
    """The measured device.

    Args:
        kind: "cuda" or "cpu".
        name: the device's name; None: a CPU.
        memory_bytes: memory of the device; None: a CPU.
    """

    kind: str
    name: str | None = None
    memory_bytes: int | None = None

    @classmethod
    def found(cls) -> _Device:
        if not torch.cuda.is_available():
            return cls("cpu")
        return cls("cuda", torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory)

    def peak_flops_per_s(self, config: Config) -> float | None:
        """Return the peak for a configuration's number format; None: the table of devices lacks it."""
        return DEVICES[self.kind].peak(self.name, PRECISIONS[config.precision.name].fastest) if self.name else None


def run() -> None:
    """Print a line of JSON as soon as a check or a case is done, and the table and the comparison at the end."""
    end_s = time.monotonic() + _LIMIT_S
    device = _Device.found()
    wanted = [part.strip() for part in os.environ.get("HLATCTL_BENCH_CASES", "").split(",") if part.strip()]
    results: dict[str, Measured | str] = {}
    rates: dict[str, float] = {}
    table: list[str] = []
    _print_line(device=device.name or "cpu", memory_bytes=device.memory_bytes, torch=torch.__version__)
    with tempfile.TemporaryDirectory(prefix="hlatctl-gpu-") as folder:
        bench = _Bench(Path(folder), device)
        failed = bench.check([name for name in CHECKS if not wanted or any(part in name for part in wanted)], end_s)
        for number, case in enumerate(schedule(wanted, device.memory_bytes)):
            earlier, left_s, config = results.get(case.name), end_s - time.monotonic(), bench.config(case)
            if isinstance(earlier, str):
                continue  # it would fail again
            measured = bench.measure(case, number, left_s) if left_s > _LEAST_S else "not run: no time is left"
            if isinstance(measured, Measured) and measured.steps_s:
                measured = earlier.and_round(measured) if earlier else measured
                if config.model == bench.config(OURS).model:
                    rates[case.name] = measured.tokens_per_s(config)
            results[case.name] = measured
            told = {"problem": measured} if isinstance(measured, str) else dataclasses.asdict(measured)
            _print_line(case=case.name, **told)
            table += _rows(case, measured, config, device)
    print("\n".join([*_introduction(device), *table, *compared(rates, OURS.name)]))
    print(f"failed checks: {', '.join(failed) or 'none'}", flush=True)


def _print_line(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def _introduction(device: _Device) -> list[str]:
    what = "No GPU: a small model on the CPU, to see that the cases run. The figures mean nothing for a GPU."
    if device.name and device.memory_bytes:
        memory_gib = device.memory_bytes / 2**30
        what = f"{device.name}, {memory_gib:.1f} GiB, torch {torch.__version__}; sequences of 4,096 tokens"
    return [what, COUNTING, "A second row of a name is of both rounds.", head()]


class _Bench:
    def __init__(self, folder: Path, device: _Device) -> None:
        from trainer.data.loader import Loader
        from trainer.data.prepare import prepare

        self._folder, self._device = folder, device
        config = self.config(OURS)
        prepare(config, folder / "data")
        self._dataset = (folder / "data" / "dataset.json").read_text(encoding="utf-8")
        loader = Loader(config, json.loads(self._dataset), rank=0, size=1)
        steps = [loader.next() for _ in range(config.total_steps)]
        loader.close()
        tokens = [torch.cat((inputs, targets[:, -1:]), dim=1).int().numpy() for inputs, targets in steps]
        np.save(folder / "tokens.npy", np.stack(tokens))

    def check(self, names: list[str], end_s: float) -> list[str]:
        """Run checks, print a line of each, and return the names of those that failed."""
        folder, failed = self._folder / "checks", list[str]()
        if names:
            folder.mkdir()
            prepare_checks(folder)
        for name in names:
            started_s = time.monotonic()
            limit_s = min(_CHECK_LIMIT_S, end_s - started_s)
            command = [sys.executable, "-m", "benchmarks.gpu_checks", name, self._device.kind, os.fspath(folder)]
            figures = _printed(command, self._environment(1), limit_s) if limit_s > _LEAST_S else "not run: no time"
            told = {"problem": figures} if isinstance(figures, str) else figures
            _print_line(check=name, ok=not isinstance(figures, str), seconds=time.monotonic() - started_s, **told)
            failed += [name] * isinstance(figures, str)
        return failed

    def _environment(self, threads: int) -> dict[str, str]:
        cache = {"TORCHINDUCTOR_CACHE_DIR": os.fspath(self._folder / "inductor")}
        return {**cache, **os.environ, "OMP_NUM_THREADS": str(threads)}

    def config(self, case: Case) -> Config:
        return config_of(case, self._folder, self._device.kind)

    def measure(self, case: Case, number: int, left_s: float) -> Measured | str:
        """Run a case's process; return what it measured, or why it measured nothing.

        Args:
            number: different for each process.
            left_s: time limit.
        """
        config, run = self.config(case), RunPaths(self._folder / f"run-{number}")
        files.write_text(run.config, files.seal_lines(load.dump(config)))
        files.write_text(run.dataset, self._dataset)
        own = [os.fspath(run.root)]
        if case.program not in _OF_RUNS:
            own = ["--config", os.fspath(run.config), "--steps", str(config.total_steps), "--device", self._device.kind]
            own += ["--tokens", os.fspath(self._folder / "tokens.npy")]
        environment = self._environment(config.cluster.threads_per_process)
        command = [sys.executable, "-m", f"benchmarks.{case.program}", *own, *case.flags]
        printed = _printed(command, environment, min(left_s, _CASE_LIMIT_S))
        if isinstance(printed, str):
            return printed
        measured = Measured.of(printed)
        return measured if case.program == "loss_case" else measured.problem(config) or measured


def _printed(command: list[str], environment: dict[str, str], limit_s: float) -> dict[str, object] | str:
    """Return the JSON that a program printed last, or why there is none."""
    try:
        done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return f"not finished in {limit_s:.0f} s"
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return reason(done.stderr)
    result: dict[str, object] = json.loads(lines[-1])
    return result


def _rows(case: Case, measured: Measured | str, config: Config, device: _Device) -> list[str]:
    if isinstance(measured, str):
        return [f"{case.name:36s} {measured}"]
    title = f"{case.name}:"
    if measured.steps_s:
        title = row(case.name, measured, config, device.peak_flops_per_s(config))
    return [title, *(f"    {line}" for line in measured.notes)]


if __name__ == "__main__":
    run()
