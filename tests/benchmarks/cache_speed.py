"""Bringing a cache of compiled graphs to a disk: ours, ``cp -r``, and the method of HLAT's script, same files, in turn.

2,000 synthetic modules in Neuron's layout, 1 MB each. Before each copy the target is deleted, nothing is left to be
written, and the source is put out of the page cache (``posix_fadvise``): all read it from the disk. None waits until
what it has written is on the disk. HLAT's script copied the whole cache for each process of a node, one after another,
and again what was there; here for two of a trn1's 32.
"""

from __future__ import annotations

import os
import shutil
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
    """Print seconds of wall and processor time of each, and the ratios."""
    with tempfile.TemporaryDirectory(prefix="hlatctl-bench-") as folder:
        source, target = Path(folder) / "shared", Path(folder) / "local"
        _fill(source)
        ours = [sys.executable, "-m", "trainer.cache", "--from", os.fspath(source), "--to", os.fspath(target)]
        copy = ["cp", "-r", os.fspath(source), os.fspath(target)]
        methods: dict[str, Callable[[], tuple[float, float]]] = {
            "hlatctl, compared": lambda: _timed([ours]),
            "cp -r": lambda: _timed([copy]),
            f"rank by rank, {_RANKS} ranks": lambda: _timed(
                [["cp", "-r", f"{source}/.", os.fspath(target)] for _ in range(_RANKS)]
            ),
        }
        walls: dict[str, list[float]] = {name: [] for name in methods}
        processors: dict[str, list[float]] = {name: [] for name in methods}
        again: list[float] = []
        for _ in range(_ROUNDS):
            for name, method in methods.items():
                _make_cold(source, target)
                wall_s, processor_s = method()
                walls[name].append(wall_s)
                processors[name].append(processor_s)
                if name == "hlatctl, compared":
                    again.append(_timed([ours])[0])
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


def _make_cold(source: Path, target: Path) -> None:
    """The source on the disk alone, no target, and nothing left to be written."""
    shutil.rmtree(target, ignore_errors=True)
    os.sync()
    for file in Folder(source).files():
        descriptor = os.open(source / file.path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _timed(commands: list[list[str]]) -> tuple[float, float]:
    """Wall and processor seconds of commands, one after another."""
    before, start = os.times(), time.perf_counter()
    for command in commands:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    wall_s, after = time.perf_counter() - start, os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return wall_s, used
