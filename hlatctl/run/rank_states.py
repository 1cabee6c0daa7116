"""``ranks.json`` of a checkpoint: the own states of all ranks in one file. One process reads it for all.

Checkpoints of older releases have a file per rank instead, ``rank-00000.json`` and so on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hlatctl.run import files
from hlatctl.run.manifest import read_manifest
from hlatctl.run.reading import reading

RANK_STATES = "ranks.json"
#: Key of a manifest's ``world``: how many ranks wrote the checkpoint.
WORLD_SIZE = "world_size"
_OLD_NAME = "rank-{rank:05d}.json"


@dataclass(frozen=True, kw_only=True)
class RankStates:
    """The states of the ranks that wrote a checkpoint. The number of ranks may be different now.

    Args:
        loader: rows of the data loaders, in the order of ranks.
        rng: the distinct random states: ranks usually have equal ones.
        rng_of_rank: for each rank, its place in ``rng``.
    """

    loader: list[list[int]]
    rng: list[dict[str, str]]
    rng_of_rank: list[int]

    @classmethod
    def of(cls, ranks: Sequence[dict[str, Any]]) -> RankStates:
        """Make them from each rank's ``{"loader": rows, "rng": state}``."""
        places: dict[str, int] = {}
        of_rank = [places.setdefault(json.dumps(rank["rng"], sort_keys=True), len(places)) for rank in ranks]
        loader = [row for rank in ranks for row in rank["loader"]]
        return cls(loader=loader, rng=[json.loads(state) for state in places], rng_of_rank=of_rank)

    def rng_for(self, rank: int) -> dict[str, str]:
        """Return the random state that a rank continues with."""
        return self.rng[self.rng_of_rank[rank % len(self.rng_of_rank)]]


def read_rank_states(checkpoint: Path) -> RankStates:
    """Read the states of a checkpoint's ranks.

    Raises:
        CheckpointError: it has no readable manifest.
        DamagedFileError: the states are missing or can't be read.
    """
    path = checkpoint / RANK_STATES
    if not path.exists():
        return _from_a_file_per_rank(checkpoint)
    with reading(path):
        record = files.read_json(path)
        states = RankStates(**{key: list(record[key]) for key in ("loader", "rng", "rng_of_rank")})
        if not states.rng_of_rank or not all(0 <= place < len(states.rng) for place in states.rng_of_rank):
            raise ValueError("rng_of_rank names a state that rng doesn't have")
        return states


def first_states_file(checkpoint: Path) -> Path:
    """Return the file whose key ``loader`` begins with the rows of rank 0."""
    path = checkpoint / RANK_STATES
    return path if path.exists() else checkpoint / _OLD_NAME.format(rank=0)


def _from_a_file_per_rank(checkpoint: Path) -> RankStates:
    ranks = []
    for rank in range(read_manifest(checkpoint).world.get(WORLD_SIZE, 1)):
        path = checkpoint / _OLD_NAME.format(rank=rank)
        with reading(path):
            record = files.read_json(path)
            ranks.append({"loader": list(record["loader"]), "rng": record.get("rng", {})})
    return RankStates.of(ranks)
