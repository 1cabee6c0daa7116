"""The ranks' own states of a checkpoint, in one file, and in one per rank as older releases wrote them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from hlatctl.run import files
from hlatctl.run.errors import DamagedFileError
from hlatctl.run.manifest import write_manifest
from hlatctl.run.rank_states import RANK_STATES, RankStates, read_rank_states

_RANKS: list[dict[str, Any]] = [
    {"loader": [[5, 0], [5, 1]], "rng": {"torch": "aa"}},
    {"loader": [], "rng": {"torch": "aa"}},
    {"loader": [[5, 2]], "rng": {"torch": "bb"}},
]


def test_equal_random_states_are_stored_once_and_each_rank_gets_its_own() -> None:
    states = RankStates.of(_RANKS)
    assert states.loader == [[5, 0], [5, 1], [5, 2]]
    assert states.rng == [{"torch": "aa"}, {"torch": "bb"}]
    assert [states.rng_for(rank)["torch"] for rank in range(5)] == ["aa", "aa", "bb", "aa", "aa"]


@pytest.mark.parametrize("release", ["this", "an older one"])
def test_they_are_read_back(tmp_path: Path, release: str) -> None:
    if release == "this":
        files.write_json(tmp_path / RANK_STATES, asdict(RankStates.of(_RANKS)))
    else:
        for rank, state in enumerate(_RANKS):
            files.write_json(tmp_path / f"rank-{rank:05d}.json", state)
        write_manifest(tmp_path, step=1, tokens=1, world={"world_size": 3})
    assert read_rank_states(tmp_path) == RankStates.of(_RANKS)


@pytest.mark.parametrize("text", ["{}", "[", '{"loader": 1, "rng": [], "rng_of_rank": []}', "null"])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / RANK_STATES).write_text(text)
    with pytest.raises(DamagedFileError, match=r"ranks\.json: can't be used"):
        read_rank_states(tmp_path)


def test_a_rank_without_a_state_is_named(tmp_path: Path) -> None:
    record = asdict(RankStates.of(_RANKS)) | {"rng_of_rank": [0, 0, 2]}
    files.write_json(tmp_path / RANK_STATES, record)
    with pytest.raises(DamagedFileError, match=r"rng_of_rank names a state that rng doesn't have"):
        read_rank_states(tmp_path)
