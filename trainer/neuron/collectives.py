"""``nccom-test``: the bandwidth of an all-reduce, inside a node and across nodes ("NCCOM-TEST User Guide")."""

from __future__ import annotations

import json
import os
from pathlib import Path

from hlatctl.run.checks import Check
from hlatctl.run.scratch import private_folder
from trainer.neuron import tools

#: Large enough for bandwidth to count and latency not to (the guide's own table levels off above).
_SIZE = "256MB"
_TIMEOUT_S = 600
#: Slurm's own name for the job that this process is part of.
_SLURM_JOB = "SLURM_JOB_ID"


def command(cores: int, nodes: int, report: Path, slurm_job_id: str = "") -> tuple[str, ...]:
    """The command line: results are checked, not only timed.

    Args:
        cores: NeuronCores of all nodes together.
        nodes: more than one needs a Slurm job.
    """
    across = ("-N", str(nodes), "--slurm-mode", "--slurm-job-id", slurm_job_id) if nodes > 1 else ()
    return (
        "nccom-test",
        "-r",
        str(cores),
        *across,
        "allr",
        "-b",
        _SIZE,
        "-e",
        _SIZE,
        "-d",
        "fp32",
        "--check",
        "--non-interactive",
        "--report-to-json-file",
        os.fspath(report),
    )


def parse(text: str) -> dict[int, float]:
    """Bus bandwidth, GiB/s, by size in bytes, of ``--report-to-json-file``.

    The tool writes GB/s and means 2^30 bytes.

    Raises:
        ToolError: it is another format, or empty.
    """
    try:
        found = {int(row["size(B)"]): float(row["busbw(GB/s)"]) for row in json.loads(text)["results"]}
    except (ValueError, KeyError, TypeError) as error:
        raise tools.ToolError(f"nccom-test: its report can't be read ({type(error).__name__}: {error})") from None
    if not found:
        raise tools.ToolError("nccom-test: its report holds no result")
    return found


def check(cores_per_node: int, nodes: int, least_gib_per_s: float, *, key: str) -> Check:
    """An all-reduce over all cores is right, and as fast as it has to be.

    Args:
        nodes: 1, or all nodes of the Slurm job that this process is part of.
        least_gib_per_s: bus bandwidth.
        key: that says so, for the message.
    """
    name = "nccom-test in the node" if nodes == 1 else f"nccom-test over {nodes} nodes"
    slurm_job_id = os.environ.get(_SLURM_JOB, "")
    if nodes > 1 and not slurm_job_id:
        return Check(
            name=name,
            status="skip",
            shows=f"not inside a Slurm job ({_SLURM_JOB} is not set); preflight's "
            "own all-reduce over all processes is judged",
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
