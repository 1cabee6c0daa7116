from __future__ import annotations

from typing import Any

from conf.schema import Config
from trainer.step_line import StepLine

CONFIG = Config()
EVENT: dict[str, Any] = {
    "step": 20,
    "tokens": 81920,
    "loss": 3.5,
    "grad_norm": 0.25,
    "lr": 1e-3,
    "step_s": 0.5,
    "data_wait_s": 0.05,
    "tokens_per_s": 8192.0,
    "mfu": 0.4,
    "peak_memory_bytes": 3 << 29,
}


def test_the_first_step_every_tenth_and_the_last_one_get_a_line() -> None:
    line = StepLine(CONFIG)
    total = CONFIG.total_steps
    assert [step for step in (13, 14, 20, 21, 30, total) if line.is_due(step)] == [13, 20, 30, total]


def test_a_line_says_what_a_reader_looks_for() -> None:
    assert StepLine(CONFIG).text(EVENT).split("  ") == [
        f"step 20/{CONFIG.total_steps}",
        "tokens 81,920",
        "loss 3.5000",
        "grad norm 0.250",
        "lr 1.00e-03",
        "8,192 tokens/s",
        "MFU 40.0%",
        "data wait 10%",
        "memory 1.50 GiB",
    ]


def test_a_line_leaves_out_what_is_unknown() -> None:
    line = StepLine(CONFIG).text({**EVENT, "mfu": None, "peak_memory_bytes": None})
    assert "MFU" not in line
    assert "memory" not in line
