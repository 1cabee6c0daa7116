"""The first minutes on an accelerator: is training right, how fast is it, does a run survive, what do the switches do?

The checks come first (``gpu_checks``), then tokens/s, MFU and memory, compared with named peers, then a run that is
killed, resumed and evaluated (``gpu_runs``), and the switches last. Each of them is a separate process with its own
limit, so that its peak of memory is its own, and prints a line of JSON when it is done. All train on the same packed
text from this interpreter's library: the trainer with the real loop, the peers from tokens in memory. The cases that
are compared take turns. A peer whose package is missing has the reason in its row (``HLATCTL_BENCH_PEERS``: folders
with packages for the peers alone). Without a GPU everything runs on the CPU with a small model, which shows that it
works and nothing else.

``HLATCTL_BENCH_SECONDS`` (540) limits the whole. ``HLATCTL_BENCH_CASES`` names some of the parts (parts of names, with
commas between). ``HLATCTL_BENCH_FOLDER`` is kept: it has the results, logs and compiled graphs, and a later call
continues with what has no result yet.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_cases import OURS, Case, config_of, prepare, schedule
from benchmarks.gpu_checks import CHECKS
from benchmarks.gpu_checks import prepare as prepare_checks
from benchmarks.gpu_runs import RUNS
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
_CHECK_LIMIT_S = _LIMIT_S / 4
_LEAST_S = 20
#: Checks that run at the same time need this many processors each: they import and compile for longer than they train.
_PROCESSORS = 4
#: Programs that train a prepared run; the others get its tokens.
_OF_RUNS = ("gpu_case", "titan_loop")
_NO_TIME = "not run: no time is left"


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
    """Print a line of JSON as soon as a part is done, and the table and the comparison at the end."""
    end_s = time.monotonic() + _LIMIT_S
    wanted = [part.strip() for part in os.environ.get("HLATCTL_BENCH_CASES", "").split(",") if part.strip()]
    with _folder() as folder:
        bench = _Bench(folder, _Device.found(), end_s, wanted)
        cases = schedule(wanted, bench.device.memory_bytes)
        rounds = [(case, cases[:number].count(case)) for number, case in enumerate(cases)]
        first = next((place for place, (_, number) in enumerate(rounds) if number), len(rounds))
        bench.check("gpu_checks", CHECKS)
        bench.measure(rounds[:first])
        bench.check("gpu_runs", RUNS)
        bench.measure(rounds[first:])
        print("\n".join(bench.table({case.name: case for case in cases}.values())), flush=True)


@contextmanager
def _folder() -> Iterator[Path]:
    if kept := os.environ.get("HLATCTL_BENCH_FOLDER"):
        Path(kept).mkdir(parents=True, exist_ok=True)
        yield Path(kept).absolute()
        return
    with tempfile.TemporaryDirectory(prefix="hlatctl-gpu-") as folder:
        yield Path(folder)


class _Bench:
    """Runs the parts, and keeps their results in ``results.jsonl``.

    Args:
        end_s: monotonic time at which everything ends.
        wanted: parts of names; empty: all that have no result yet.
    """

    def __init__(self, folder: Path, device: _Device, end_s: float, wanted: Sequence[str]) -> None:
        self.device = device
        self._folder, self._end_s, self._wanted = folder, end_s, wanted
        self._results = folder / "results.jsonl"
        lines = self._results.read_text(encoding="utf-8").splitlines() if self._results.exists() else []
        #: Results by name, the newest last: of this call and earlier ones.
        self._told: dict[str, list[dict[str, Any]]] = {}
        for line in lines:
            self._keep(json.loads(line))
        self._tell(device=device.name or "cpu", memory_bytes=device.memory_bytes, torch=torch.__version__)
        (folder / "logs").mkdir(exist_ok=True)
        self._running = set[subprocess.Popen[bytes]]()
        signal.signal(signal.SIGTERM, self._end_all)

    def _keep(self, result: dict[str, Any]) -> None:
        self._told.setdefault(result.get("check") or result.get("case") or "", []).append(result)

    def _tell(self, **result: Any) -> None:
        line = json.dumps(result)
        print(line, flush=True)
        with self._results.open("a", encoding="utf-8") as results:
            results.write(line + "\n")
        self._keep(result)

    def _good(self, name: str) -> list[dict[str, Any]]:
        return [result for result in self._told.get(name, []) if "problem" not in result]

    def check(self, module: str, checks: dict[str, Callable[..., Any]]) -> None:
        """Run the functions of a module that are wanted, and print a line of each."""
        names = [n for n in checks if (any(part in n for part in self._wanted) if self._wanted else not self._good(n))]
        if not names:
            return
        at_once = 1
        if module == "gpu_checks":
            (self._folder / "checks").mkdir(exist_ok=True)
            prepare_checks(self._folder / "checks")
            at_once = max(1, min(4, (os.cpu_count() or 1) // _PROCESSORS))
        else:
            prepare(self._folder, self.device.kind)
        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(lambda name: self._check(module, name), names))

    def _check(self, module: str, name: str) -> None:
        started_s = time.monotonic()
        folder = self._folder / "checks" if module == "gpu_checks" else self._folder
        words = [f"benchmarks.{module}", name, self.device.kind, os.fspath(folder)]
        is_small = module == "gpu_checks"
        threads = 1 if is_small else self._config(OURS).cluster.threads_per_process
        figures = self._run(name, words, threads, _CHECK_LIMIT_S if is_small else _CASE_LIMIT_S)
        told = {"problem": figures} if isinstance(figures, str) else figures
        self._tell(check=name, ok=not isinstance(figures, str), seconds=time.monotonic() - started_s, **told)

    def _run(self, name: str, words: list[str], threads: int, limit_s: float) -> dict[str, Any] | str:
        """Run a module; return the JSON that it printed last, or why there is none. Its output is in ``logs``."""
        limit_s = min(limit_s, self._end_s - time.monotonic())
        if limit_s < _LEAST_S:
            return _NO_TIME
        caches = {f"{kind}_CACHE_DIR": os.fspath(self._folder / kind.lower()) for kind in ("TORCHINDUCTOR", "TRITON")}
        environment = {**caches, **os.environ, "OMP_NUM_THREADS": str(threads)}
        number = len(self._told.get(name, []))
        log = self._folder / "logs" / "".join(c if c.isalnum() else "_" for c in f"{name} {number}")
        out, err = log.with_suffix(".out"), log.with_suffix(".err")
        with out.open("w") as stdout, err.open("w") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", *words],
                cwd=_ROOT,
                env=environment,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
            self._running.add(process)
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                return f"not finished in {limit_s:.0f} s"
            finally:
                self._end(process)
        lines = [line for line in out.read_text(errors="replace").splitlines() if line.startswith("{")]
        if code or not lines:
            return reason(err.read_text(errors="replace"))
        result: dict[str, Any] = json.loads(lines[-1])
        return result

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Kill what is left of a part's processes."""
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._running.discard(process)

    def _end_all(self, *_: object) -> None:
        for process in list(self._running):
            self._end(process)
        os._exit(1)

    def _config(self, case: Case) -> Config:
        return config_of(case, self._folder, self.device.kind)

    def measure(self, rounds: Sequence[tuple[Case, int]]) -> None:
        """Measure rounds of cases, numbered from 0, and print a line of each. A case that failed isn't repeated."""
        failed = set[str]()
        for case, number in rounds:
            if case.name in failed or (not self._wanted and len(self._good(case.name)) > number):
                continue
            measured = self._measured(case)
            failed |= {case.name} if isinstance(measured, str) else set()
            told = {"problem": measured} if isinstance(measured, str) else dataclasses.asdict(measured)
            self._tell(case=case.name, **told)

    def _measured(self, case: Case) -> Measured | str:
        """Run a case's process; return what it measured, or why it measured nothing."""
        prepare(self._folder, self.device.kind)
        config, folder = self._config(case), self._folder
        run = RunPaths(Path(tempfile.mkdtemp(prefix="run-", dir=folder)))
        files.write_text(run.config, files.seal_lines(load.dump(config)))
        shutil.copy(folder / "data" / "dataset.json", run.dataset)
        own = [os.fspath(run.root)]
        if case.program not in _OF_RUNS:
            own = ["--config", os.fspath(run.config), "--steps", str(config.total_steps), "--device", self.device.kind]
            own += ["--tokens", os.fspath(folder / "tokens.npy")]
        words = [f"benchmarks.{case.program}", *own, *case.flags]
        printed = self._run(case.name, words, config.cluster.threads_per_process, _CASE_LIMIT_S)
        shutil.rmtree(run.root, ignore_errors=True)  # its checkpoints are large
        if isinstance(printed, str):
            return printed
        measured = Measured.of(printed)
        return measured if case.program == "loss_case" else measured.problem(config) or measured

    def table(self, cases: Iterable[Case]) -> Iterator[str]:
        """Yield the lines of the table, of all rounds so far, the comparison, and the checks that failed."""
        what = "No GPU: a small model on the CPU, to see that the parts run. The figures mean nothing for a GPU."
        if self.device.name and self.device.memory_bytes:
            memory_gib = self.device.memory_bytes / 2**30
            what = f"{self.device.name}, {memory_gib:.1f} GiB, torch {torch.__version__}; sequences of 4,096 tokens"
        yield from (what, COUNTING, head())
        rates: dict[str, float] = {}
        for case in cases:
            config, results = self._config(case), self._told.get(case.name, [])
            good = [Measured.kept(result) for result in results if "problem" not in result]
            if not good:
                yield f"{case.name:36s} {results[-1]['problem'] if results else _NO_TIME}"
                continue
            measured = functools.reduce(Measured.and_round, good)
            if measured.steps_s and config.model == self._config(OURS).model:
                rates[case.name] = measured.tokens_per_s(config)
            peak = self.device.peak_flops_per_s(config)
            yield row(case.name, measured, config, peak) if measured.steps_s else f"{case.name}:"
            yield from (f"    {line}" for line in measured.notes)
        yield from compared(rates, OURS.name)
        told = [(name, results[-1]) for name, results in self._told.items() if name and "check" in results[-1]]
        for state, names in (
            ("skipped", [f"{name} ({result['skipped']})" for name, result in told if "skipped" in result]),
            ("failed", [f"{name} ({result['problem']})" for name, result in told if "problem" in result]),
        ):
            yield f"{state} checks: {', '.join(names) or 'none'}"


if __name__ == "__main__":
    run()
