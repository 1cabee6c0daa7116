"""Preflight between nodes: whether all see one run directory, and whether all have the same software.

One process of each node takes part; the others do nothing.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hlatctl.run import files
from hlatctl.run.host import node_name
from hlatctl.run.paths import RunPaths
from hlatctl.run.provenance import package_versions, versions_of
from hlatctl.run.reading import reading

if TYPE_CHECKING:
    from trainer.backends.base import Backend

#: A client of NFS may show a new file of another machine only after this time (nfs(5), acdirmin).
_VISIBLE_S = 30.0
_POLL_S = 0.2
#: Share of the job's time limit after which missing nodes or files are named, before the job is ended.
PATIENCE = 0.8
_STARTED_S = time.monotonic()


def versions() -> dict[str, str]:
    """Return the versions that must be the same on all nodes, by name."""
    return {**package_versions(("hlatctl", "torch")), "python": platform.python_version()}


def compare(run: RunPaths, backend: Backend, timeout_s: float) -> tuple[dict[str, str], list[str]]:
    """Return this node's versions, and what is wrong with it; for all but one of its processes, nothing.

    Each node writes a token into the run directory and reads the first node's; the first node reads all. A node whose
    folder differs from the first node's fails, before the job's time-out hides why.

    Args:
        run: the run directory.
        backend: of this process.
        timeout_s: of the job.
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
    seen_by_first = backend.gather(unseen)[0]  # from here on, nobody reads a token
    if not first_of_node:
        return {}, failures
    with contextlib.suppress(OSError):
        Path(own["path"]).unlink()
    if backend.rank and not failures and (text := seen_by_first.get(node_name())):
        failures.append(text)
    return own["versions"], [*failures, *_other_software(run, own["versions"], [node["versions"] for node in nodes])]


def _other_software(run: RunPaths, own: dict[str, str], nodes: list[dict[str, str]]) -> list[str]:
    """Return what is not as on most nodes; of two versions on as many nodes, the driver's is the right one."""
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
    """Write this node's token; returns what the others need to know, and the problem, if any."""
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
