"""``python -m flows.drill.on_node BASE NODE WHAT SIGNAL``: signals a job's process on the node that runs this command.

Uses only the standard library, like the program that it signals.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from hlatctl import node
from hlatctl.run import files, processes
from hlatctl.run.files import DAMAGED

#: Choices of WHAT: the training process of the node's last rank, or the node's program itself.
RANK, PROGRAM = "rank", "program"


def main(argv: list[str]) -> int:
    """Send the signal; return 0 if there was a process to send it to."""
    base, number, what, name = argv
    try:
        record = files.read_json(node.record(Path(base), "pid", int(number)))
        program = processes.Identity(
            pid=int(record["pid"]), started=str(record["started"]), boot_id=str(record["boot_id"])
        )
    except (OSError, *DAMAGED) as error:
        print(f"{base}: node {number} has no record of its start ({error})", file=sys.stderr)
        return 1
    ranks = processes.ranks(program.pid)
    if not ranks and len(parents := Path(base).parents) > 2:
        for waits in processes.with_words("--run-dir", os.fspath(parents[2])):  # it has forked them (hlatctl.warm)
            ranks |= processes.ranks(waits.pid)
    target = program if what == PROGRAM else ranks[max(ranks)] if ranks else None
    if target is None or not processes.send(target, signal.Signals[name]):
        print(f"{base}: node {number} has no such process", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
