"""The cursor and the progress of a copy; ``test_contract`` has what is copied."""

from __future__ import annotations

from pathlib import Path

from flows.tracking.mirrors.copier import Cursor, Progress


def test_a_mirror_at_another_address_starts_over(tmp_path: Path) -> None:
    written = Cursor("here", offsets={"flow": 9}, last_step=3, kept={"run_id": "a"})
    written.write(tmp_path / "cursor.json")
    assert Cursor.read(tmp_path / "cursor.json", "here") == written
    assert Cursor.read(tmp_path / "cursor.json", "there") == Cursor("there")


def test_a_long_copy_says_every_five_seconds_how_far_it_is() -> None:
    said: list[str] = []
    times = iter([0.0, 2.0, 10.0, 12.0, 20.0])
    progress = Progress(1000, said.append, lambda: next(times))
    for step in (0, 100, 500, 600, 1000):
        progress.reached(step, step)
    assert said == [
        "step 500 (50% of the journal), 50 steps/s, 10 s left",
        "step 1,000 (100% of the journal), 50 steps/s, 0.0 s left",
    ]
