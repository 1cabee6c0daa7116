"""``python -m trainer.neuron.parallel_compile --to DIR -- COMMAND``: extract a node's graphs and compile them.

Runs once on each node, around the node's torchrun. The node's cache is a folder of its own in DIR, because Neuron's
cache locks files and a shared file system does not (Neuron "Troubleshooting for Training"); the head brings the nodes'
caches together. ``neuron_parallel_compile`` ends with a report in its output, which is read and judged here.
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
from hlatctl.run.host import node_name
from trainer.neuron import tools

_TOOL = "neuron_parallel_compile"
_MARK = "||NEURON_PARALLEL_COMPILE||: {"
#: The logger of the tool may begin each line of the report.
_PREFIX = re.compile(r"^(?:INFO:\s?)")
_LOG_TAIL_BYTES = 4000


@dataclass(frozen=True, kw_only=True)
class Report:
    """What became of the graphs: their paths (of the HLO, in the cache), and the slowest's time where it is told."""

    compiled: tuple[str, ...]
    failed: tuple[str, ...]
    slowest_graph_s: float


def parse(lines: Iterable[str]) -> Report | None:
    """The report in the tool's output; all of them, if more than one was printed; None without one."""
    graphs: dict[str, Any] = {}
    found = False
    for text in _objects(lines):
        try:
            graphs.update(json.loads(text)["compilation_report"])
        except (ValueError, KeyError, TypeError):
            continue  # another message of the tool that begins with a brace
        found = True
    if not found:
        return None
    return Report(
        compiled=tuple(path for path, graph in graphs.items() if graph["status"] is True),
        failed=tuple(path for path, graph in graphs.items() if graph["status"] is not True),
        slowest_graph_s=max((float(graph.get("compile_time", 0.0)) for graph in graphs.values()), default=0.0),
    )


def _objects(lines: Iterable[str]) -> Iterator[str]:
    """The texts from each mark to the brace that closes it, at the beginning of a line."""
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
    """Run the command under the tool, its output passed through.

    Raises:
        DependencyError: the tool is missing.
        CompileError: a graph failed, none was found, or the tool broke off.
    """
    cache = folder / f"node-{node_name()}"
    cache.mkdir(parents=True, exist_ok=True)
    try:
        words = [tools.find(_TOOL), *command]
    except tools.ToolError as error:
        raise DependencyError(str(error), hint="backend.name=nxd needs the Neuron SDK: docs/neuron.md") from None
    env = {**os.environ, "NEURON_COMPILE_CACHE_URL": os.fspath(cache), "NEURON_PARALLEL_COMPILE_DUMP_RESULTS": "1"}
    told = []
    with subprocess.Popen(
        words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            told.append(line)
    report = parse(told)
    _judge(report, process.returncode)
    assert report is not None
    files.write_json(
        cache / "report.json",
        {"v": 1, "host": node_name(), "graphs": len(report.compiled), "slowest_graph_s": report.slowest_graph_s},
    )
    return report


def _judge(report: Report | None, exit_code: int) -> None:
    here = f"{_TOOL} on {node_name()}"
    if report is not None and report.failed:
        first = Path(report.failed[0])
        raise CompileError(
            f"{here}: {len(report.failed)} of {len(report.failed) + len(report.compiled)} graphs failed, the first "
            f"{first.parent.name}{_reason(first.parent)}",
            hint="every failed graph and the compiler's messages are in the job's log",
        )
    if exit_code:
        raise CompileError(f"{here}: ended with {exit_code}", hint="its messages are in the job's log")
    if report is None:
        raise CompileError(f"{here}: printed no report", hint="its messages are in the job's log")
    if not report.compiled:
        raise CompileError(f"{here}: no graph was extracted", hint="does training use device neuron?")


def _reason(module: Path) -> str:
    """The last line of what the compiler left beside a graph that failed."""
    try:
        text = (module / "model.log").read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f" ({lines[-1]})" if lines else ""


def main(argv: list[str] | None = None) -> int:
    """Compile; what the trainer itself left as an error is not told over."""
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
