"""Copying a cache of compiled graphs: ours, ``cp -r`` and the method of HLAT's script, with the same files, in turn.

2,000 synthetic modules in Neuron's layout, 1 MB each. Before each copy, pending writes are flushed and the source is
dropped from the page cache (``posix_fadvise``), so that all read it from the disk. None waits for its writes to reach
the disk. Each copy goes to a new folder, and none is deleted before the end (20 GB): for half a minute after a deletion
ext4 skips the inodes of deleted files one by one, which would take most of the measured time. HLAT's script copied the
whole cache for each process of a node, one after another, even if it was there; here for two of a trn1's 32.
"""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from hlatctl.cache.store import Folder

_MODULES, _NEFF_BYTES, _GRAPH_BYTES = 2000, 900 << 10, 100 << 10
_ROUNDS = 3
_RANKS = 2
_GOAL, _GOAL_AGAIN_S = 2.0, 0.5


def run() -> None:
    """Print the wall time and processor time of each in seconds, and the ratios."""
    with tempfile.TemporaryDirectory(prefix="hlatctl-bench-") as folder:
        source = Path(folder) / "shared"
        _fill(source)
        methods: dict[str, Callable[[Path], list[list[str]]]] = {
            "hlatctl, compared": lambda target: [_ours(source, target)],
            "cp -r": lambda target: [["cp", "-r", os.fspath(source), os.fspath(target)]],
            f"rank by rank, {_RANKS} ranks": lambda target: (
                [["cp", "-r", f"{source}/.", os.fspath(target)] for _ in range(_RANKS)]
            ),
        }
        walls: dict[str, list[float]] = {name: [] for name in methods}
        processors: dict[str, list[float]] = {name: [] for name in methods}
        again: list[float] = []
        for number, (name, method) in itertools.product(range(_ROUNDS), methods.items()):
            target = Path(folder) / f"local-{name}-{number}"
            _make_cold(source)
            wall_s, processor_s = _timed(method(target))
            walls[name].append(wall_s)
            processors[name].append(processor_s)
            if name == "hlatctl, compared":
                again.append(_timed([_ours(source, target)])[0])
    for name in methods:
        wall_s, processor_s = statistics.median(walls[name]), statistics.median(processors[name])
        print(f"{name:24s} {wall_s:6.2f} s, {processor_s:5.2f} s of processor time")
    first, second, third = (statistics.median(each) for each in walls.values())
    print(f"cp -r / hlatctl, cold: {second / first:.2f} (goal {_GOAL:g}); rank by rank: {third / first:.2f}")
    print(f"once more, warm: {statistics.median(again):.2f} s (goal {_GOAL_AGAIN_S:g} s)")


def _fill(source: Path) -> None:
    noise = os.urandom(4 << 20)
    for number in range(_MODULES):
        folder = source / "neuronxcc-2.16.372.0+4a9b2326" / f"MODULE_{number:020d}+39f12043"
        folder.mkdir(parents=True)
        start = number * 4099 % (3 << 20)
        mark = number.to_bytes(8, "little")
        (folder / "model.neff").write_bytes(mark + noise[start : start + _NEFF_BYTES])
        (folder / "model.hlo_module.pb.gz").write_bytes(mark + noise[start : start + _GRAPH_BYTES])
        (folder / "compile_flags.json").write_text('["--target=trn1"]')
        (folder / "model.done").touch()


def _ours(source: Path, target: Path) -> list[str]:
    return [sys.executable, "-m", "trainer.cache", "--from", os.fspath(source), "--to", os.fspath(target)]


def _make_cold(source: Path) -> None:
    os.sync()
    for file in Folder(source).files():
        descriptor = os.open(source / file.path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _timed(commands: list[list[str]]) -> tuple[float, float]:
    before, start = os.times(), time.perf_counter()
    for command in commands:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    wall_s, after = time.perf_counter() - start, os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return wall_s, used
