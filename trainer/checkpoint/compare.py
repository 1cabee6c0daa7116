"""``python -m trainer.checkpoint.compare CHECKPOINT OTHER``: compare the tensors of two checkpoints.

Weights and moments are compared bit by bit, by name, whatever layout wrote them. Files with the same checksum in both
manifests aren't read. Otherwise one process reads each tensor of both, one at a time. Of DCP's, the name is that of the
state dict, such as ``optimizer.state.norm.weight.exp_avg``. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hlatctl.run import processes
from hlatctl.run.checkpoint import read_manifest
from hlatctl.run.errors import run_main

if TYPE_CHECKING:
    from torch import Tensor

#: Elements subtracted in one operation.
_BLOCK = 1 << 24


@dataclass(kw_only=True)
class Compared:
    """How two checkpoints differ.

    Args:
        tensors: number of tensors.
        equal: number of tensors with exactly the same bits.
        first_different: name of the first tensor that differs, in order of names; None: all are equal.
        largest: largest relative difference of a tensor: the norm of the difference, divided by the tensor's norm.
        largest_in: the name of that tensor.
    """

    tensors: int = 0
    equal: int = 0
    first_different: str | None = None
    largest: float = 0.0
    largest_in: str | None = None

    def add(self, name: str, difference: float | None) -> None:
        """Add a tensor and its relative difference; None: all bits are equal."""
        self.tensors += 1
        if difference is None:
            self.equal += 1
            return
        self.first_different = self.first_different or name
        if self.largest_in is None or difference > self.largest:
            self.largest, self.largest_in = difference, name


def compare(folder: Path, other: Path) -> Compared:
    """Compare the checkpoint of a folder with another one. Raises a CheckpointError if one can't be read."""
    ours, theirs = _tensors(folder), _tensors(other)
    sums, other_sums = ({str(e["path"]): e["sha256"] for e in read_manifest(path).files} for path in (folder, other))
    same = {name for name, checksum in sums.items() if other_sums.get(name) == checksum}
    found = Compared()
    for name in sorted({*ours, *theirs}):
        one, two = ours.get(name), theirs.get(name)
        if one is None or two is None or one.kind != two.kind:
            found.add(name, math.inf)
        elif one.places == two.places and one.files <= same:
            found.add(name, None)
        else:
            found.add(name, _difference(one.read().reshape(-1), two.read().reshape(-1)))
    return found


class _Stored(NamedTuple):
    """A tensor of a checkpoint: ``kind`` is its dtype and shape, ``places`` where its parts are in ``files``."""

    kind: tuple[str, list[int]]
    places: list[Any]
    files: set[str]
    read: Callable[[], Tensor]


def _tensors(folder: Path) -> dict[str, _Stored]:
    return _of_dcp(folder) if read_manifest(folder).format == "dcp" else _of_shards(folder)


def _of_shards(folder: Path) -> dict[str, _Stored]:
    from trainer.checkpoint.shards import read_index, read_tensors

    def read(name: str) -> Tensor:
        return read_tensors(folder, lambda other: other == name)[name]

    return {
        one.name: _Stored((one.dtype, one.shape), one.chunks, {file for file, _ in one.chunks}, partial(read, one.name))
        for one in read_index(folder).tensors()
    }


def _of_dcp(folder: Path) -> dict[str, _Stored]:
    from trainer.checkpoint import dcp

    metadata = dcp.read_metadata(folder)
    tensors = {}
    for name, (empty, places) in dcp.describe_tensors(metadata).items():
        read = partial(dcp.read_tensor, folder, metadata, name)
        kind = (str(empty.dtype), list(empty.shape))
        tensors[name] = _Stored(kind, places, {file for file, *_ in places}, read)
    return tensors


def _difference(ours: Tensor, theirs: Tensor) -> float | None:
    """Return the relative difference of two flat tensors; None if all bits are equal."""
    import torch

    if torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)):
        return None
    squares = [0.0, 0.0]
    for one, two in zip(torch.split(ours, _BLOCK), torch.split(theirs, _BLOCK), strict=True):
        squares[0] += float((one.double() - two.double()).square().sum())
        squares[1] += float(one.double().square().sum())
    difference = math.sqrt(squares[0] / squares[1]) if squares[1] else math.inf
    return difference if math.isfinite(difference) else math.inf


def main(argv: list[str] | None = None) -> int:
    """Compare, and print the result as JSON."""
    parser = argparse.ArgumentParser(prog="trainer.checkpoint.compare", description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="folder of a checkpoint")
    parser.add_argument("other", type=Path, help="folder of the checkpoint to compare it with")
    options = parser.parse_args(argv)
    if argv is None:
        processes.end_with_parent()
    print(json.dumps(asdict(compare(options.checkpoint, options.other))))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
