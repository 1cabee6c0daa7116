"""``torchrun -m trainer.preflight --run-dir RUN``: measure every worker before training starts.

Each process measures itself. Rank 0 writes all measurements to ``preflight.json`` and names the ones below a limit.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.load import load
from conf.of_run import of_run
from conf.schema import Config, ParallelConfig
from conf.sizes import FAST_CHECKPOINTS, fast_dir_bytes, runs_dir_bytes
from hlatctl.node import NODES_ENV
from hlatctl.run import files, node_copy
from hlatctl.run.errors import DependencyError, PreflightError, StorageError, run_main
from hlatctl.run.host import node_name
from hlatctl.run.manifest import checkpoint_steps, steps_in
from hlatctl.run.paths import RunPaths
from hlatctl.run.reading import reading
from hlatctl.run.scratch import JOB_FOLDER_ENV
from trainer import preflight_nodes
from trainer.checkpoint.tiers import Tiers
from trainer.process import follow_launcher

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.backends.base import Backend

_MATMUL_SIZE = 1024
_ALLREDUCE_MIB = 16
_REPEATS = 3
_POLL_S = 0.2
#: File in a node's private folder: all nodes are checked.
_CHECKED = "nodes-checked"

Worker = dict[str, Any]


def measure(config: Config, run: RunPaths, backend: Backend) -> Worker:
    """Return this process's measurements, and under ``failures`` those that miss a limit."""
    preflight = config.preflight
    worker: Worker = {
        "host": node_name(),
        "rank": backend.rank,
        "device": str(backend.device),
        "matmul_gflops_per_s": _matmul_gflops_per_s(backend),
        "allreduce_mib_per_s": _allreduce_mib_per_s(backend),
        "clock_skew_s": _clock_skew_s(backend),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "free_disk_bytes": shutil.disk_usage(run.root).free,
        "checkpoints_bytes": checkpoints_bytes(config, run),
    }
    least = ("matmul_gflops_per_s", "allreduce_mib_per_s", "open_files")
    failures = [
        f"{name}={worker[name]:g}: below preflight.min_{name}={getattr(preflight, f'min_{name}'):g}"
        for name in least
        if worker[name] < getattr(preflight, f"min_{name}")
    ]
    if worker["clock_skew_s"] > preflight.max_clock_skew_s:
        failures.append(
            f"clock_skew_s={worker['clock_skew_s']:.3f}: above "
            f"preflight.max_clock_skew_s={preflight.max_clock_skew_s:g}"
        )
    if worker["free_disk_bytes"] < worker["checkpoints_bytes"]:
        failures.append(
            f"free_disk_bytes={worker['free_disk_bytes']}: below the {worker['checkpoints_bytes']} bytes that "
            f"the run's checkpoints still need (checkpoint.keep={config.checkpoint.keep}, {len(config.milestones)} "
            f"milestones, {len(config.permanent_steps)} permanent)"
        )
    own_versions, differences = preflight_nodes.compare(run, backend, preflight.timeout_s)
    failures += differences
    if config.backend.device == "neuron":
        failures += node_failures(run, backend)
    if _first_of_node():
        failures += _folder_failures(config, run) + _mirror_failures(config, run)
    return {**worker, **({"versions": own_versions} if own_versions else {}), "failures": failures}


def check_node(config: Config, run: RunPaths) -> None:
    """Check each node's Neuron devices in one of its processes, while the others wait: checks need unused devices."""
    own, job = run.preflight_nodes / f"{node_name()}.json", os.environ.get(JOB_FOLDER_ENV)
    told = Path(job) / _CHECKED if job is not None else None
    if _first_of_node():
        from trainer.neuron import node

        first_node = os.environ.get("GROUP_RANK", "0") == "0"
        checks = [dataclasses.asdict(check) for check in node.look(config, across_nodes=first_node)]
        files.write_json(own, {"v": 1, "host": node_name(), "checks": checks})
    elif told is not None:
        _wait_for_nodes(config, run, told.exists)  # not every process looks at storage that all nodes share
        return
    _wait_for_nodes(config, run, lambda: len(_checked_nodes(run)) >= config.cluster.nodes)
    if told is not None:
        told.touch()


def _wait_for_nodes(config: Config, run: RunPaths, done: Callable[[], bool]) -> None:
    """Wait until all nodes are checked: the first one may still be testing the connection between them."""
    deadline = time.monotonic() + preflight_nodes.PATIENCE * config.preflight.timeout_s
    while not done():
        if time.monotonic() > deadline:
            raise PreflightError(
                f"preflight.timeout_s={config.preflight.timeout_s:g}: not every node was checked in that time; "
                f"done: {', '.join(_checked_nodes(run)) or 'none'}",
                hint="read the logs of the other nodes, or set a longer preflight.timeout_s",
            )
        time.sleep(_POLL_S)


def _checked_nodes(run: RunPaths) -> list[str]:
    return sorted(path.stem for path in run.preflight_nodes.glob("*.json"))


def node_failures(run: RunPaths, backend: Backend) -> list[str]:
    """Return this node's failed checks, and how its software differs from that of most nodes.

    Each node reads its own record. All processes call this; the result is empty for all but one of a node.
    """
    from trainer.neuron import versions

    checks: list[dict[str, Any]] = []
    if _first_of_node():
        path = run.preflight_nodes / f"{node_name()}.json"
        with reading(path):
            checks = files.read_json(path)["checks"]
    own = next((check["values"] for check in checks if check["name"] == versions.NAME), None)
    by_host = {host: values for host, values in backend.gather([node_name(), own]) if values is not None}
    failures = [f"{check['name']}: {check['shows']}" for check in checks if check["status"] == "fail"]
    other = versions.disagreement(by_host).get(node_name()) if own is not None else None
    return [*failures, *([other] if other else [])]


def _first_of_node() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def checkpoints_bytes(config: Config, run: RunPaths) -> int:
    """Return the free space that the run's checkpoints still need, less those that earlier attempts have written."""
    return runs_dir_bytes(config, existing=len(checkpoint_steps(run)))


def _folder_failures(config: Config, run: RunPaths) -> list[str]:
    """Return which folders this node can't write to, or lack space."""
    folders = {"run directory": run.root, "cluster.worker_cache_dir": Path(config.cluster.worker_cache_dir)}
    failures = []
    if config.checkpoint.fast_dir is not None:
        folders["checkpoint.fast_dir"] = Path(config.checkpoint.fast_dir)
        failures += _fast_dir_failures(config, run)
    return [*failures, *filter(None, (_why_not_writable(name, at.expanduser()) for name, at in folders.items()))]


def _fast_dir_failures(config: Config, run: RunPaths) -> list[str]:
    """Compare the free space of ``checkpoint.fast_dir`` with what its checkpoints still need."""
    folder = Tiers(config, run).folders[0]
    existing = len(steps_in(folder))
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free, needed = shutil.disk_usage(there).free, fast_dir_bytes(config, existing)
    if free >= needed:
        return []
    return [
        f"checkpoint.fast_dir={config.checkpoint.fast_dir}: {free} bytes are free, but its checkpoints need {needed} "
        f"more ({FAST_CHECKPOINTS} at once, {existing} there)"
    ]


def _mirror_failures(config: Config, run: RunPaths) -> list[str]:
    """Return why this node can't write the mirror. A run that has begun continues without it."""
    url = config.checkpoint.mirror_url
    if url is None or checkpoint_steps(run):
        return []
    from hlatctl.cache.mirror import check_writable

    try:
        check_writable(url)
    except (StorageError, DependencyError) as error:
        return [error.message]
    return []


def conclude(run: RunPaths, workers: list[Worker]) -> None:
    """Write ``preflight.json``.

    Raises:
        PreflightError: a worker failed.
    """
    failures = [f"worker {w['host']} (rank {w['rank']}): {text}" for w in workers for text in w["failures"]]
    files.write_json(run.preflight, {"v": 1, "workers": workers, "ok": not failures})
    if failures:
        more = f"; and {len(failures) - 1} more, see {run.preflight}" if len(failures) > 1 else ""
        raise PreflightError(failures[0] + more, hint="repair or replace the worker, or change the limit")


def _matmul_gflops_per_s(backend: Backend) -> float:
    import torch

    a = torch.ones(_MATMUL_SIZE, _MATMUL_SIZE, device=backend.device)
    best_s = min(_timed_s(lambda: a @ a) for _ in range(_REPEATS + 1))
    return 2 * _MATMUL_SIZE**3 / best_s / 1e9


def _allreduce_mib_per_s(backend: Backend) -> float:
    """Return the payload per second of an all-reduce; with one process it only tests the allocation."""
    import torch

    payload = torch.ones(_ALLREDUCE_MIB << 18, device=backend.device)

    def reduce() -> Tensor:
        backend.reduce_sum(payload)
        return payload

    best_s = min(_timed_s(reduce) for _ in range(_REPEATS + 1))
    return _ALLREDUCE_MIB / best_s


def _clock_skew_s(backend: Backend) -> float:
    """Return the difference to rank 0's clock, minus the time of the exchange itself."""
    backend.gather(None)
    before = time.time()
    theirs = backend.from_rank0(time.time())
    after = time.time()
    return max(0.0, before - float(theirs), float(theirs) - after)


def _timed_s(work: Callable[[], Tensor]) -> float:
    started = time.perf_counter()
    work().flatten()[0].item()  # reading one number waits for any device
    return max(time.perf_counter() - started, 1e-9)


def _why_not_writable(name: str, folder: Path) -> str:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        return f"{name} {folder}: can't be written ({error.strerror})"
    return ""


def _on_all_nodes(config: Config) -> Config:
    """Return the configuration for the nodes that are measured: spare ones too, which no layout of training fits."""
    nodes = int(os.environ.get(NODES_ENV, config.cluster.nodes))
    if nodes == config.cluster.nodes:
        return config
    return dataclasses.replace(
        config, cluster=dataclasses.replace(config.cluster, nodes=nodes), parallel=ParallelConfig()
    )


def main(argv: list[str] | None = None) -> int:
    """Measure this worker; an error names the worker that failed."""
    parser = argparse.ArgumentParser(prog="trainer.preflight", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--config", type=Path, help="configuration to measure for; none: the run's newest")
    arguments = parser.parse_args(argv)
    run, read = RunPaths(arguments.run_dir.absolute()), node_copy.read_text
    config = _on_all_nodes(load(arguments.config, read=read) if arguments.config else of_run(run, read=read))

    if config.backend.device == "neuron":
        check_node(config, run)

    from trainer.backends import make_backend

    backend = make_backend(config)
    try:
        workers = backend.gather(measure(config, run, backend))
        backend.gather(None)
        if backend.rank == 0:
            conclude(run, workers)
    finally:
        backend.close()
    return 0


if __name__ == "__main__":
    follow_launcher()
    sys.exit(run_main(main))
