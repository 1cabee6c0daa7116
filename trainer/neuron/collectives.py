"""``nccom-test``: measure the bandwidth of an all-reduce, within a node and across nodes ("NCCOM-TEST User Guide")."""

from __future__ import annotations

import json
import os
from pathlib import Path

from hlatctl.run.checks import Check
from hlatctl.run.files import private_folder
from trainer.neuron import tools

#: Large enough that bandwidth, not latency, dominates (the guide's own table levels off above).
_SIZE = "256MB"
_TIMEOUT_S = 600
#: Slurm sets this variable to the id of this process's job.
_SLURM_JOB = "SLURM_JOB_ID"


def command(cores: int, nodes: int, report: Path, slurm_job_id: str = "") -> tuple[str, ...]:
    """Return the command line, which also checks the results.

    Args:
        cores: total NeuronCores of all nodes.
        nodes: number of nodes; more than one needs a Slurm job.
    """
    across = f"-N {nodes} --slurm-mode --slurm-job-id {slurm_job_id}" if nodes > 1 else ""
    options = f"-r {cores} {across} allr -b {_SIZE} -e {_SIZE} -d fp32 --check --non-interactive"
    return ("nccom-test", *options.split(), "--report-to-json-file", os.fspath(report))


def parse(text: str) -> dict[int, float]:
    """Parse ``--report-to-json-file``; return the bus bandwidth in GiB/s, by size in bytes.

    The tool writes GB/s and means 2^30 bytes.

    Raises:
        ToolError: the format is unknown, or there are no results.
    """
    try:
        results = {int(row["size(B)"]): float(row["busbw(GB/s)"]) for row in json.loads(text)["results"]}
    except (ValueError, KeyError, TypeError) as error:
        raise tools.ToolError(f"nccom-test: its report can't be read ({type(error).__name__}: {error})") from None
    if not results:
        raise tools.ToolError("nccom-test: its report has no results")
    return results


def check(cores_per_node: int, nodes: int, least_gib_per_s: float, *, key: str) -> Check:
    """Check the result and the speed of an all-reduce over all cores.

    Args:
        nodes: 1, or the number of nodes of this process's Slurm job.
        least_gib_per_s: required bus bandwidth.
        key: configuration key that requires it, for the message.
    """
    name = "nccom-test in the node" if nodes == 1 else f"nccom-test over {nodes} nodes"
    slurm_job_id = os.environ.get(_SLURM_JOB, "")
    if nodes > 1 and not slurm_job_id:
        return Check(
            name=name,
            status="skip",
            shows=f"not in a Slurm job ({_SLURM_JOB} is not set); preflight measures its own all-reduce instead",
        )
    with private_folder("nccom") as own:
        report = own.path / "report.json"
        words = command(cores_per_node * nodes, nodes, report, slurm_job_id)
        shown = " ".join(words[:-2])
        try:
            tools.output(*words, timeout_s=_TIMEOUT_S)
            measured = max(parse(report.read_text(encoding="utf-8")).values())
        except OSError:
            return Check(name=name, status="fail", shows="nccom-test: left no report", command=shown)
        except tools.ToolError as error:
            return Check(name=name, status="fail", shows=str(error), command=shown)
    text = f"all-reduce of {_SIZE}: {measured:.1f} GiB/s"
    problem = f"{text}, below {key}={least_gib_per_s:g}" if measured < least_gib_per_s else ""
    return Check.of(name, problem, text, command=shown, values={"nccom_gib_per_s": measured})
