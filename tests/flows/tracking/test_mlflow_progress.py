from __future__ import annotations

from flows.tracking.mlflow_progress import Progress


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
