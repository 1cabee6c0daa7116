"""What the cluster and the run directory have of a job, and how it has ended by both."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import yaml

from flows.launch.endings import NodeRecord
from flows.launch.kubernetes.pods import Pod
from hlatctl import node
from hlatctl.run import files
from hlatctl.run.reading import DAMAGED

Object = dict[str, Any]


class Seen:
    """What the cluster has of a job.

    Args:
        work: the Job; None: there is none.
        pods: of the job.
        lost: those on nodes that don't answer, after the cluster has asked them to end.
        gone: those that were there before and said why they were ended.
    """

    def __init__(self, work: Object | None, pods: list[Pod], lost: list[Pod], gone: list[Pod]) -> None:
        self.work, self.pods, self.lost = work, pods, lost
        self.time_s, self.took_s = time.monotonic(), 0.0
        now = {pod.name: pod for pod in (*gone, *pods) if pod.verdict}
        self.disrupted = sorted(now.values(), key=lambda pod: pod.rank)

    @property
    def name(self) -> str:
        """The Job's name."""
        return str(self.work["metadata"]["name"]) if self.work else ""

    @property
    def version(self) -> str:
        """The Job's version."""
        return version_of(self.work) if self.work else ""

    @property
    def exists(self) -> bool:
        """Whether the cluster still has anything of the job."""
        return self.work is not None or bool(self.pods)

    @property
    def alive(self) -> bool:
        """Whether the Job was not asked to end."""
        return self.work is not None and "deletionTimestamp" not in self.work["metadata"]

    @property
    def suspended(self) -> bool:
        """Whether the Job waits to be admitted."""
        return bool(self.work and self.work["spec"].get("suspend"))

    @property
    def failed(self) -> bool:
        """Whether a pod has failed, or the Job has: its other pods are being ended."""
        conditions = (self.work or {}).get("status", {}).get("conditions") or []
        over = any(one["type"] in ("Failed", "FailureTarget") and one["status"] == "True" for one in conditions)
        return over or self.work is None or not self.alive or any(pod.phase == "Failed" for pod in self.pods)


def version_of(one: Object) -> str:
    """Return the version of an object, which changes with each change of it."""
    return str(one["metadata"]["resourceVersion"])


def all_good(records: list[NodeRecord], nodes: int) -> bool:
    """Whether all nodes have ended well."""
    return len(records) == nodes and all(record.code == 0 for record in records)


def code_of(pods: list[Pod], records: list[NodeRecord], nodes: int) -> int | None:
    """Return the exit code of a whole job: 0 only if all of its nodes have ended well."""
    codes = [pod.exit_code for pod in pods if pod.exit_code is not None]
    failed = next((code for code in codes if code), None)
    return failed if failed is not None else 0 if len(codes) == nodes or all_good(records, nodes) else None


def was_asked(records: list[NodeRecord]) -> bool:
    """Whether the first node that ended was asked to. After a failure, the cluster asks the others."""
    ended = [record for record in records if record.code is not None]
    return bool(ended) and min(ended, key=lambda record: record.ended_unix_s).asked_to_stop


def is_ours(base: Path) -> bool:
    """Whether a driver has asked the job to stop or to end."""
    return ordered(base) in ("stop", "end")


def ordered(base: Path) -> str:
    """Return the newest order to the nodes; empty if there is none."""
    try:
        return str(files.read_json(node.orders(base)).get("what"))
    except (OSError, *DAMAGED):
        return ""


def nodes_of(base: Path) -> int:
    """Return on how many nodes a job runs, from its manifest."""
    try:
        work = list(yaml.safe_load_all(base.with_name(f"{base.name}.yaml").read_text(encoding="utf-8")))[-1]
        return int(work["spec"]["completions"])
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError, IndexError):
        return 1
