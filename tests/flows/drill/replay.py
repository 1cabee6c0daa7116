"""What the real classifier and policy find in the evidence of a fault, with files and without processes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from conf.schema import ClusterConfig, Config
from flows.drill.pool import Evidence, Fault, NodeEvidence
from flows.launch import endings
from flows.launch.base import Job, Launcher, Status
from flows.recovery import node_ledger, policy
from flows.recovery.node_ledger import Entry, Nodes
from flows.stages.attempt import ending_of_attempt
from hlatctl import node
from hlatctl.run import rank_output
from hlatctl.run.errors import load_error
from hlatctl.run.fold import apply
from hlatctl.run.paths import RunPaths, stacks_name
from hlatctl.run.state import AttemptState, RunState

#: The nodes of the run, of which the last one has the fault, and a spare one.
HOSTS, SPARE = ("n1", "n2"), "n3"
_CHECKPOINTS = [5, 10]


@dataclass(frozen=True)
class Found:
    """The cause of an attempt's end, the hosts to blame and what follows; ``continues``: it has not ended."""

    cause: str
    hosts: tuple[str, ...]
    action: str

    @classmethod
    def expected(cls, fault: Fault) -> Found:
        """Return what must be found."""
        expects = fault.expects
        return cls(expects.cause, HOSTS[1:] if expects.blames_node else (), expects.action)


def replay(fault: Fault, folder: Path) -> Found:
    """Write a fault's evidence into a folder, and return what is found in it."""
    evidence, run = fault.evidence, RunPaths(folder / "drilled")
    config = Config(cluster=ClusterConfig(launcher="slurm", nodes=2, processes_per_node=1))
    state = _state(evidence)
    if evidence.live:
        hang = policy.hanging(state, evidence.silent_s, config.recovery)
        return Found("hang" if hang and evidence.live == "running" else "", (), "")
    job = Job(name="train", run_dir=run.root, argv=(), launch_dir=run.launch(1), log_dir=run.logs(1), nodes=2)
    status = _left_behind(evidence, job, run)
    nodes = Nodes(folder / "nodes.jsonl", cast(Launcher, _Three()), len(HOSTS), lambda: 1.0)
    kills = sum(each.oom_kills for each in evidence.nodes)
    error = None if status.verdict else load_error(job.error_file)
    ending = ending_of_attempt(job, status, error, state, config, nodes=nodes, oom_kills=kills)
    kind = node_ledger.KIND_OF_CAUSE.get(ending.cause, "failure")
    common: dict[str, Any] = {"time_unix_s": 1.0, "kind": kind, "run_id": "drilled", "attempt": 1}
    node_ledger.record(nodes.ledger, [Entry(host=host, **common) for host in ending.hosts])
    decision = policy.decide(
        state, ending, config.recovery, batch=15, left_out=nodes.place().left_out, several=True, here=False
    )
    return Found(ending.cause, ending.hosts, decision.action)


class _Three:
    """A launcher with a spare node."""

    def hosts(self, nodes: int) -> tuple[str, ...]:
        return (*HOSTS, SPARE)


def _state(evidence: Evidence) -> RunState:
    began = evidence.last_step > 0
    attempt = AttemptState(1, {}, 0.0, resumed_from_step=0 if began else None, oom_kills=0, hosts=list(HOSTS))
    state = RunState(attempts=[attempt])
    for step in range(1, evidence.last_step + 1):
        numbers = {"loss": 1.0, "grad_norm": 1.0, "step_s": 0.5, "tokens": step}
        apply(state, _event({"kind": "step", "step": step, **numbers}))
        if step in _CHECKPOINTS:
            apply(state, _event({"kind": "checkpoint_committed", "step": step}))
    for event in evidence.events:
        apply(state, _event(event))
    state.train_stopped = evidence.train_stopped or state.train_stopped
    return state


def _event(event: dict[str, Any]) -> dict[str, Any]:
    return {"v": 1, "time_unix_s": 1.0, "writer": "train-rank-0", "attempt": 1, **event}


def _left_behind(evidence: Evidence, job: Job, run: RunPaths) -> Status:
    base = job.launch_dir / job.name
    for folder in (job.launch_dir, job.log_dir, run.hang(1)):
        folder.mkdir(parents=True, exist_ok=True)
    job.log.touch()
    for rank, each in enumerate(evidence.nodes):
        _write_records(base, rank, each)
        if each.log:
            rank_output.node_log(job.log, rank).write_text(each.log, encoding="utf-8")
        if each.stacks is not None:
            (run.hang(1) / stacks_name(rank)).write_text(each.stacks, encoding="utf-8")
    if evidence.error:
        job.error_file.write_text(json.dumps(evidence.error), encoding="utf-8")
    records = endings.node_records(base, len(HOSTS))
    verdict = cast(Any, evidence.verdict)
    return endings.conclude(verdict, evidence.exit_code, records, evidence.down, evidence.reason, HOSTS)


def _write_records(base: Path, rank: int, each: NodeEvidence) -> None:
    common = {"v": 1, "host": HOSTS[rank]}
    if each.starts:
        node.record(base, "pid", rank).write_text(json.dumps({**common, "time_unix_s": 0.0}))
    end = {**common, "asked_to_stop": each.asked_to_stop}
    if each.code is None:
        node.reserved(base, "exit_code", rank).write_text(json.dumps(end))
    else:
        end |= {"code": each.code, "oom_kills": each.oom_kills, "time_unix_s": 1.0 + each.ended_s}
        node.record(base, "exit_code", rank).write_text(json.dumps(end))


def as_dict(found: Found) -> dict[str, Any]:
    """Return what was found, for a message."""
    return asdict(found)
