from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from conf.mlflow_steps import MOST_STEPS, copied_steps
from flows.tracking.mlflow_steps import Shown


@given(st.integers(1, 400_000))
def test_the_planner_counts_the_steps_that_mlflow_gets(total: int) -> None:
    shown = Shown(total)
    counted = total if shown.every == 1 else sum(map(shown.step, range(1, total + 1)))
    assert copied_steps(total) == counted <= MOST_STEPS + 1_001
