"""``torchrun -m trainer.preflight --run-dir RUN``: measure every worker before training starts.

Each process measures itself. Rank 0 writes all measurements to ``preflight.json`` and names the workers that miss a
limit. One process of each node also checks that all nodes see the same run directory and have the same software.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import os
import platform
import resource
import shutil
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.devices import DEVICES
from conf.environment import TORCHTITAN_PACKAGES
from conf.load import load
from conf.of_run import of_run
from conf.schema import Config, ParallelConfig
from conf.sizes import FAST_CHECKPOINTS, fast_dir_bytes, runs_dir_bytes
from hlatctl.node import NODES_ENV
from hlatctl.run import files
from hlatctl.run.checkpoint import checkpoint_steps, steps_in
from hlatctl.run.errors import DependencyError, PreflightError, StorageError
from hlatctl.run.files import JOB_FOLDER_ENV, reading
from hlatctl.run.paths import RunPaths
from hlatctl.run.processes import node_name
from hlatctl.run.provenance import package_versions, versions_of
from trainer.checkpoint.trust import Tiers
from trainer.process import follow_launcher, run_rank

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.backends.base import Backend


#: An NFS client may see another machine's new file only after this time (nfs(5), acdirmin).
_VISIBLE_S = 30.0
_POLL_S = 0.2
#: Share of the job's time limit after which missing nodes or files are reported, before the job is ended.
PATIENCE = 0.8
_STARTED_S = time.monotonic()


def versions() -> dict[str, str]:
    """Return the versions that must be the same on all nodes, by name."""
    from trainer.gpu_node import runtime

    packages = package_versions(("hlatctl", "torch", *TORCHTITAN_PACKAGES))
    return {**packages, **runtime(), "python": platform.python_version()}


def compare_nodes(run: RunPaths, backend: Backend, timeout_s: float) -> tuple[dict[str, str], list[str]]:
    """Return this node's versions and its problems; for all but one of its processes, both are empty.

    Each node writes a token into the run directory and reads the first node's; the first node reads all. A node whose
    folder differs from the first node's fails, before the job's timeout hides the reason.
    """
    first_of_node = os.environ.get("LOCAL_RANK", "0") == "0"
    own, problem = _write_token(run) if first_of_node else ({}, "")
    nodes = [node for node in backend.gather(own) if node]
    failures = [problem] if problem else []
    wanted = nodes[1:] if backend.rank == 0 else nodes[:1]
    deadline = min(time.monotonic() + _VISIBLE_S, _STARTED_S + PATIENCE * timeout_s)
    unseen = {node["host"]: _why_not_visible(run, node, deadline) for node in wanted if first_of_node}
    if backend.rank:
        failures += filter(None, unseen.values())
    seen_by_first = backend.gather(unseen)[0]  # no process reads a token after this
    if not first_of_node:
        return {}, failures
    with contextlib.suppress(OSError):
        Path(own["path"]).unlink()
    if backend.rank and not failures and (text := seen_by_first.get(node_name())):
        failures.append(text)
    return own["versions"], [*failures, *_other_software(run, own["versions"], [node["versions"] for node in nodes])]


def _other_software(run: RunPaths, own: dict[str, str], nodes: list[dict[str, str]]) -> list[str]:
    """Return the differences from most nodes' software; if two versions are equally common, the driver's is correct."""
    with reading(run.provenance):
        driver = versions_of(files.read_json(run.provenance) if run.provenance.is_file() else {})
    failures = []
    for name, version in own.items():
        there = [node.get(name, "none") for node in nodes]
        usual = max(sorted(set(there)), key=lambda each: (there.count(each), each == driver.get(name)))
        if version != usual:
            failures.append(f"{name} {version}: {there.count(usual)} of {len(nodes)} nodes have {usual}")
    return failures


def _write_token(run: RunPaths) -> tuple[dict[str, Any], str]:
    """Write this node's token; return what the others need to know, and the problem, if any."""
    path = run.preflight_nodes / f"{node_name()}.node-{os.environ.get('GROUP_RANK', '0')}.token"
    token = uuid.uuid4().hex
    own: dict[str, Any] = {"host": node_name(), "path": os.fspath(path), "token": token, "versions": versions()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(path, token)
    except OSError as error:
        return own, f"run directory {run.root}: can't be written ({error.strerror})"
    return own, ""


def _why_not_visible(run: RunPaths, node: dict[str, Any], deadline: float) -> str:
    """Wait until the token of a node can be read here; return the problem if it can't."""
    while True:
        try:
            if Path(node["path"]).read_text(encoding="utf-8") == node["token"]:
                return ""
            problem = "has another content"
        except OSError as error:
            problem = f"can't be read ({error.strerror})"
        if time.monotonic() > deadline:
            return (
                f"run directory {run.root}: is not the same folder on {node_name()} and {node['host']}: what "
                f"{node['host']} wrote there {problem}; runs_dir must be on storage that all nodes share"
            )
        time.sleep(_POLL_S)


_MATMUL_SIZE = 1024
_ALLREDUCE_MIB = 16
_REPEATS = 3
#: Measurements of a device (``trainer.gpu_node.measure``) that are compared with a limit and with the job's median.
COMPARED = ("gpu_tflops_per_s", "gpu_node_gib_per_s", "gpu_nodes_gib_per_s")
#: File in a node's private folder that marks that all nodes are checked.
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
        **(checks.measure(backend) if (checks := _node_checks(config)) else {}),
    }
    least = [name for name in ("matmul_gflops_per_s", "allreduce_mib_per_s", "open_files", *COMPARED) if name in worker]
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
    own_versions, differences = compare_nodes(run, backend, preflight.timeout_s)
    failures += differences
    if "slowed" in worker:
        failures.append(f"slowed down during matrix products: {', '.join(worker['slowed'])}")
    if _first_of_node():
        failures += _folder_failures(config, run) + _remote_failures(config, run)
    return {**worker, **({"versions": own_versions} if own_versions else {}), "failures": failures}


def below_median(config: Config, workers: Sequence[Worker]) -> dict[int, list[str]]:
    """Return, by rank, which measurements of devices are far below the median of all workers."""
    fraction, failures = config.preflight.min_median_fraction, dict[int, list[str]]()
    for name in COMPARED:
        values = {worker["rank"]: worker[name] for worker in workers if name in worker}
        median = statistics.median_high(values.values()) if values else 0.0  # of two, the faster one
        for rank, value in values.items():
            if value < fraction * median:
                failures.setdefault(rank, []).append(
                    f"{name}={value:.4g}: {value / median:.0%} of the job's median of {median:.4g}, less than "
                    f"preflight.min_median_fraction={fraction:g}"
                )
    return failures


def _node_checks(config: Config) -> Any:
    """Return the module that checks the devices of a node; None: there is nothing to check."""
    module = DEVICES[config.backend.device].node_checks
    return importlib.import_module(module) if module else None


def check_node(config: Config, run: RunPaths) -> list[str]:
    """Check each node's devices in one of its processes, while the others wait: checks need unused devices.

    Returns:
        On the first node, what could not be checked, one sentence for all nodes with the same reason.

    Raises:
        PreflightError: on the first node, names the nodes that failed. Devices that are broken can't be measured.
    """
    own, job = run.preflight_nodes / f"{node_name()}.json", os.environ.get(JOB_FOLDER_ENV)
    told = Path(job) / _CHECKED if job is not None else None
    first_node = os.environ.get("GROUP_RANK", "0") == "0"
    if _first_of_node():
        checks = [dataclasses.asdict(check) for check in _node_checks(config).look(config, across_nodes=first_node)]
        files.write_json(own, {"v": 1, "host": node_name(), "checks": checks})
        for check in checks:
            print(f"{node_name()}: {check['status']}  {check['name']}: {check['shows']}", flush=True)
    elif told is not None:
        _wait_for_nodes(config, run, told.exists)  # not every process may poll storage that all nodes share
        return []
    _wait_for_nodes(config, run, lambda: len(_checked_nodes(run)) >= config.cluster.nodes)
    if told is not None:
        told.touch()
    return _judge_nodes(config, run) if first_node and _first_of_node() else []


def _wait_for_nodes(config: Config, run: RunPaths, done: Callable[[], bool]) -> None:
    """Wait until all nodes are checked: the first one may still be testing the connection between nodes."""
    deadline = time.monotonic() + PATIENCE * config.preflight.timeout_s
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


def _judge_nodes(config: Config, run: RunPaths) -> list[str]:
    """Read the records of all nodes; return what could not be checked. Raises a PreflightError if a node failed."""
    software = _node_checks(config).SOFTWARE
    by_host: dict[str, list[dict[str, Any]]] = {}
    for name in _checked_nodes(run):
        path = run.preflight_nodes / f"{name}.json"
        with reading(path):
            by_host[name] = files.read_json(path)["checks"]
    known = {host: check["values"] for host, checks in by_host.items() for check in checks if check["name"] == software}
    other = disagreement({host: values for host, values in known.items() if values})
    workers, unchecked = [], dict[str, list[str]]()
    for host, checks in by_host.items():
        failures = [f"{check['name']}: {check['shows']}" for check in checks if check["status"] == "fail"]
        failures += [other[host]] if host in other else []
        if failures:
            workers.append({"host": host, "rank": None, "failures": failures})
        if checks and checks[0]["status"] == "skip":
            unchecked.setdefault(f"{checks[0]['name']}: {checks[0]['shows']}", []).append(host)
    if workers:
        conclude(run, workers)
    return [f"{_named(hosts)}: {text}" for text, hosts in unchecked.items()]


def _named(hosts: list[str]) -> str:
    return hosts[0] if len(hosts) == 1 else f"{hosts[0]} and {len(hosts) - 1} more"


def disagreement(by_host: dict[str, dict[str, str]]) -> dict[str, str]:
    """Return the problem of each host whose versions, by name, differ from most hosts'; empty if all agree."""
    problems: dict[str, str] = {}
    for name in sorted({name for versions in by_host.values() for name in versions}):
        all_versions = [versions.get(name, "none") for versions in by_host.values()]
        usual = max(sorted(set(all_versions)), key=all_versions.count)
        for host, versions in by_host.items():
            if (own := versions.get(name, "none")) != usual:
                problems.setdefault(
                    host, f"{name} {own}: {all_versions.count(usual)} of {len(all_versions)} nodes have {usual}"
                )
    return problems


def _first_of_node() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def checkpoints_bytes(config: Config, run: RunPaths) -> int:
    """Return the free space that the run's checkpoints still need, less those that earlier attempts have written."""
    return runs_dir_bytes(config, existing=len(checkpoint_steps(run)))


def _folder_failures(config: Config, run: RunPaths) -> list[str]:
    folders = {"run directory": run.root, "cluster.worker_cache_dir": Path(config.cluster.worker_cache_dir)}
    failures = []
    if config.checkpoint.fast_dir is not None:
        folders["checkpoint.fast_dir"] = Path(config.checkpoint.fast_dir)
        failures += _fast_dir_failures(config, run)
    return [*failures, *filter(None, (_why_not_writable(name, at.expanduser()) for name, at in folders.items()))]


def _fast_dir_failures(config: Config, run: RunPaths) -> list[str]:
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


def _remote_failures(config: Config, run: RunPaths) -> list[str]:
    """Return why this node can't write to the remote folder. A run that has already begun continues without it."""
    url = config.checkpoint.remote_url
    if url is None or checkpoint_steps(run):
        return []
    from hlatctl.cache.remote import check_writable

    try:
        check_writable(url)
    except (StorageError, DependencyError) as error:
        return [error.message]
    return []


def conclude(run: RunPaths, workers: list[Worker], unchecked: Sequence[str] = ()) -> None:
    """Write ``preflight.json``. Raises a PreflightError if a worker failed.

    Args:
        workers: a worker without a rank is a node whose devices can't be used.
        unchecked: what could not be checked, one sentence each.
    """
    failures = [f"{_place(worker)}: {text}" for worker in workers for text in worker["failures"]]
    record = {"v": 1, "workers": workers, "unchecked": list(unchecked), "ok": not failures}
    files.write_json(run.preflight, record)
    if failures:
        more = f"; and {len(failures) - 1} more, see {run.preflight}" if len(failures) > 1 else ""
        raise PreflightError(failures[0] + more, hint="repair or replace the worker, or change the limit")


def _place(worker: Worker) -> str:
    if worker["rank"] is None:
        return f"node {worker['host']}"
    device = f", {worker['device']}" if ":" in worker["device"] else ""
    return f"worker {worker['host']} (rank {worker['rank']}{device})"


def _matmul_gflops_per_s(backend: Backend) -> float:
    import torch

    a = torch.ones(_MATMUL_SIZE, _MATMUL_SIZE, device=backend.device)
    best_s = min(_timed_s(lambda: a @ a) for _ in range(_REPEATS + 1))
    return 2 * _MATMUL_SIZE**3 / best_s / 1e9


def _allreduce_mib_per_s(backend: Backend) -> float:
    """Return the payload in MiB/s of an all-reduce; with one process it only tests the allocation."""
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
    """Return a configuration for all measured nodes, including spare ones, which no training layout uses."""
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
    run, read = RunPaths(arguments.run_dir.absolute()), files.read_shared_text
    config = _on_all_nodes(load(arguments.config, read=read) if arguments.config else of_run(run, read=read))

    unchecked = check_node(config, run) if DEVICES[config.backend.device].node_checks else []

    from trainer.backends import make_backend

    backend = make_backend(config)
    module = config.backend.kind.own_settings
    if module and config.cluster.jobs_run != "here":  # there `flows.stages.validate` has asked it, in this environment
        importlib.import_module(module).settings(config)
    workers = backend.gather(measure(config, run, backend))
    backend.gather(None)
    if backend.rank == 0:
        for rank, failures in below_median(config, workers).items():
            workers[rank]["failures"] += failures
        conclude(run, workers, unchecked)
    backend.close()  # not after an error: see `run_rank`
    return 0


if __name__ == "__main__":
    follow_launcher()
    run_rank(main)
