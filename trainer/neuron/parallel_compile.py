"""``python -m trainer.neuron.parallel_compile --to DIR -- COMMAND``: extract a node's graphs and compile them.

Runs once on each node, around the node's torchrun. Each node has its own cache folder in DIR, because Neuron's cache
locks files and a shared file system does not support that (Neuron "Troubleshooting for Training"). The driver merges
the nodes' caches. ``neuron_parallel_compile`` ends with a report in its output, which is parsed and checked here.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hlatctl.run import files
from hlatctl.run.errors import ERROR_FILE_ENV, CompileError, DependencyError, load_error, run_main
from hlatctl.run.processes import node_name
from trainer.neuron.node import ToolError, find_tool

_TOOL = "neuron_parallel_compile"
_MARK = "||NEURON_PARALLEL_COMPILE||: {"
#: The tool's logger may add this prefix to each line of the report.
_PREFIX = re.compile(r"^(?:INFO:\s?)")
_LOG_TAIL_BYTES = 4000


@dataclass(frozen=True, kw_only=True)
class Report:
    """The paths of compiled and failed graphs' HLO in the cache, and the longest compile time, if reported."""

    compiled: tuple[str, ...]
    failed: tuple[str, ...]
    slowest_graph_s: float


def parse(lines: Iterable[str]) -> Report | None:
    """Return the merged reports of the tool's output; None if there is none."""
    graphs: dict[str, Any] = {}
    reported = False
    for text in _objects(lines):
        try:
            graphs.update(json.loads(text)["compilation_report"])
        except (ValueError, KeyError, TypeError):
            continue  # another message of the tool that begins with a brace
        reported = True
    if not reported:
        return None
    return Report(
        compiled=tuple(path for path, graph in graphs.items() if graph["status"] is True),
        failed=tuple(path for path, graph in graphs.items() if graph["status"] is not True),
        slowest_graph_s=max((float(graph.get("compile_time", 0.0)) for graph in graphs.values()), default=0.0),
    )


def _objects(lines: Iterable[str]) -> Iterator[str]:
    """Yield the texts from each mark to the closing brace at the beginning of a line."""
    collected: list[str] | None = None
    for line in lines:
        text = _PREFIX.sub("", line.rstrip("\n"))
        if _MARK in text:
            collected = ["{"]
        elif collected is not None:
            collected.append(text)
            if text == "}":
                yield "\n".join(collected)
                collected = None


def compile_node(folder: Path, command: list[str]) -> Report:
    """Run the command under the tool, and print its output.

    Raises:
        DependencyError: the tool is missing.
        CompileError: a graph failed, none was extracted, or the tool failed.
    """
    cache = folder / f"node-{node_name()}"
    cache.mkdir(parents=True, exist_ok=True)
    try:
        words = [find_tool(_TOOL), *command]
    except ToolError as error:
        raise DependencyError(str(error), hint="backend.name=nxd needs the Neuron SDK: docs/neuron.md") from None
    env = {**os.environ, "NEURON_COMPILE_CACHE_URL": os.fspath(cache), "NEURON_PARALLEL_COMPILE_DUMP_RESULTS": "1"}
    lines = []
    with subprocess.Popen(
        words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    report = parse(lines)
    _check(report, process.returncode)
    assert report is not None
    files.write_json(
        cache / "report.json",
        {"v": 1, "host": node_name(), "graphs": len(report.compiled), "slowest_graph_s": report.slowest_graph_s},
    )
    return report


def _check(report: Report | None, exit_code: int) -> None:
    here = f"{_TOOL} on {node_name()}"
    if report is not None and report.failed:
        first = Path(report.failed[0])
        raise CompileError(
            f"{here}: {len(report.failed)} of {len(report.failed) + len(report.compiled)} graphs failed, the first "
            f"{first.parent.name}{_reason(first.parent)}",
            hint="every failed graph and the compiler's messages are in the job's log",
        )
    if exit_code:
        raise CompileError(f"{here}: exit code {exit_code}", hint="its messages are in the job's log")
    if report is None:
        raise CompileError(f"{here}: printed no report", hint="its messages are in the job's log")
    if not report.compiled:
        raise CompileError(f"{here}: no graph was extracted", hint="does training use device neuron?")


def _reason(module: Path) -> str:
    """Return the last line of the compiler's log for a failed graph."""
    try:
        text = (module / "model.log").read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f" ({lines[-1]})" if lines else ""


def main(argv: list[str] | None = None) -> int:
    """Compile; an error that the trainer recorded takes precedence."""
    parser = argparse.ArgumentParser(prog="trainer.neuron.parallel_compile", description=__doc__)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args(argv)
    try:
        compile_node(arguments.to, arguments.command)
    except CompileError:
        own = os.environ.get(ERROR_FILE_ENV)
        trainers = load_error(Path(own)) if own else None
        if trainers is None:
            raise
        return trainers.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
