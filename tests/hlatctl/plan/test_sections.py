from __future__ import annotations

from dataclasses import replace

import pytest

from conf.schema import Config, OptimizerConfig, TrainConfig
from conf.training_rules import learning_rate
from hlatctl.plan.sections import continuation_section, rate_chart

RUN = Config(
    train=TrainConfig(tokens=400 * 4096, global_batch_size=8, seq_len=512),
    optimizer=OptimizerConfig(lr=1e-3, warmup_steps=40),
)
LONGER = replace(RUN, train=replace(RUN.train, tokens=800 * 4096))


def texts(before: Config, after: Config, step: int) -> dict[str, str]:
    return {figure.name: figure.text for figure in continuation_section(before, after, step).figures}


def test_an_unchanged_run_goes_on() -> None:
    found = texts(RUN, RUN, 200)
    assert found["steps left"] == "200, 819.2K tokens"
    assert found["last step"] == "400"
    assert found["learning rate of the next step"].endswith("continues that of step 200")


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (replace(RUN, optimizer=replace(RUN.optimizer, lr=5e-4)), "jumps down from"),
        (LONGER, "jumps up from"),
        (replace(RUN, optimizer=replace(RUN.optimizer, warmup_steps=300)), "the warm-up goes on"),
        (replace(RUN, optimizer=replace(RUN.optimizer, schedule="wsd")), "jumps up from"),
    ],
)
def test_a_jump_of_the_learning_rate_is_named(after: Config, expected: str) -> None:
    text = texts(RUN, after, 200)["learning rate of the next step"]
    assert text.startswith(f"{learning_rate(201, after):.3e}")
    assert expected in text


def test_the_chart_shows_both_schedules_and_the_newest_step() -> None:
    chart = rate_chart(RUN, LONGER, 200).splitlines()
    assert chart[0].startswith("9.98e-04 |")
    assert all(len(line) <= 80 for line in chart)
    drawn = [line[10:] for line in chart[:10]]
    assert any("." in line for line in drawn), "the planned end differs"
    assert max(len(line) for line in drawn) == 64, "the changed run reaches the last column"
    assert chart[-1].index("^") == 10 + round(199 * 63 / 799)
    assert chart[-1].endswith("step 800")


def test_a_run_at_its_last_step_has_a_chart() -> None:
    assert "step 400" in rate_chart(RUN, RUN, 400)
    assert "^ step 0" in rate_chart(RUN, RUN, 0)
