"""Spikes, alarms and stragglers by the paper's definitions; a real curve's noise is no alarm, and its spike is one.

``noisy_gradient_norms.json`` has the first 700 norms of the quickstart's model with batches of 512 tokens
(``train.global_batch_size=4 train.seq_len=128 optimizer.lr=3e-3``).
"""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

import pytest
import torch

from trainer.step.monitor import (
    ALARM_WINDOW_STEPS,
    PRODUCT_EVERY_STEPS,
    RANK_TIMES_EVERY_STEPS,
    UPDATE_DEVIATIONS,
    UPDATE_LEAST_STEPS,
    UPDATE_WINDOW_STEPS,
    Monitor,
    MonitorEvent,
    NormAlarm,
    Product,
    RankTimes,
    UpdateLimits,
    drift_alarm,
)


def _observe(monitor: Monitor, norms: list[float], *, first_step: int = 1, loss: float = 3.0) -> list[MonitorEvent]:
    return [event for at, norm in enumerate(norms, first_step) for event in monitor.observe(at, loss, norm)]


def test_no_spike_before_twenty_steps_are_known() -> None:
    assert not _observe(Monitor(), [1.0] * 19 + [100.0])


def test_spike_is_more_than_a_tenth_above_the_mean_of_the_last_twenty() -> None:
    assert not _observe(Monitor(), [1.0] * 20 + [1.09])
    (spike,) = _observe(Monitor(), [1.0] * 20 + [1.11])
    assert spike == MonitorEvent("gradient_spike", {"step": 21, "grad_norm": 1.11, "mean": 1.0})


def test_window_forgets_what_is_older_than_twenty_steps() -> None:
    (spike,) = _observe(Monitor(), [9.0] * 20 + [1.0] * 20 + [1.2])
    assert spike.fields["mean"] == 1.0


def test_a_spike_is_reported_with_its_length_when_it_ends() -> None:
    events = _observe(Monitor(), [1.0] * 20 + [1.5, 2.5, 1.9] + [1.0] * 5)
    assert [event.kind for event in events] == ["gradient_spike", "gradient_spike_ended"]
    assert events[1].fields == {"step": 21, "peak_grad_norm": 2.5, "length_steps": 3}


def test_restored_monitor_continues_like_the_saved_one() -> None:
    norms = [0.5 + 0.13 * (step % 7) for step in range(60)]
    expected = _observe(Monitor(), norms)
    assert expected
    for cut in range(len(norms)):
        first = Monitor()
        before = _observe(first, norms[:cut])
        second = Monitor(json.loads(json.dumps(first.state)))
        assert before + _observe(second, norms[cut:], first_step=cut + 1) == expected


def test_a_loss_that_goes_to_zero_is_an_alarm_once() -> None:
    monitor = Monitor()
    assert not _observe(monitor, [1.0] * 50, loss=1.2)
    (alarm,) = _observe(monitor, [1.0] * 50, first_step=51, loss=0.1)
    assert (alarm.kind, alarm.fields["what"]) == ("alarm", "loss_to_zero")
    assert "too good to be true" in alarm.fields["message"]


def test_weights_may_differ_by_rounding_but_not_by_more() -> None:
    assert not drift_alarm(100, 1e-6)
    (alarm,) = drift_alarm(100, 2e-3)
    assert (
        "step 100: copies of a weight that should be equal on several processes differ by 2.0e-03"
        in (alarm.fields["message"])
    )


def _compare(times: RankTimes, step: int, *own_s: float) -> list[MonitorEvent]:
    places = [(f"node-{rank // 2}", "cpu") for rank in range(len(own_s))]
    return times.compare(step, torch.tensor(own_s, dtype=torch.float64), places)


def test_a_process_that_stays_slower_than_the_median_is_named_once_with_its_host() -> None:
    times, stragglers = RankTimes(1.5, 100), []
    for window in range(1, 9):
        events = _compare(times, 20 * window, 1.0, 1.1, 0.9, 2.2)
        assert events[0] == MonitorEvent(
            "rank_times",
            {
                "step": 20 * window,
                "what": "own_work",
                "median_s": 1.0,
                "slowest_rank": 3,
                "host": "node-1",
                "ratio": 2.2,
                "max_s": 2.2,
                "min_s": 0.9,
            },
        )
        stragglers += [(window, event) for event in events[1:]]
    ((window, straggler),) = stragglers
    assert window == 5, "after 100 steps"
    assert (straggler.kind, straggler.fields["rank"], straggler.fields["host"]) == ("straggler", 3, "node-1")
    assert straggler.fields["message"] == (
        "step 100: rank 3 on node-1 has taken 2.2 times the median process's time for 100 steps; all others wait for it"
    )


def test_a_process_that_is_slow_now_and_then_is_not_a_straggler() -> None:
    times = RankTimes(1.5, 40)
    for window in range(10):
        events = _compare(times, window, 1.0, 1.0, 9.0 if window % 2 else 1.0)
        assert [event.kind for event in events] == ["rank_times"]


def test_of_two_processes_the_slow_one_is_measured_against_the_other() -> None:
    (rank_times, straggler) = _compare(RankTimes(1.5, 20), 20, 4.0, 1.0)
    assert (rank_times.fields["ratio"], straggler.fields["rank"]) == (4.0, 0)


@pytest.mark.parametrize(
    ("flops_per_step", "size"), [(1e9, None), (1.1e9, 64), (1e10, 128), (3.4e13, 1024), (3.5e13, 2048), (1e15, 2048)]
)
def test_products_add_at_most_a_thousandth_to_the_arithmetic_of_training(
    flops_per_step: float, size: int | None
) -> None:
    product = Product.beside(flops_per_step, torch.device("cpu"))
    assert (product._left.shape[0] if product else None) == size
    assert 8 * 2 * (size or 0) ** 3 <= 1e-3 * PRODUCT_EVERY_STEPS * flops_per_step


def test_a_slow_device_is_named_by_its_products() -> None:
    times = RankTimes(1.5, 20, of_product=True)
    for _ in range(RANK_TIMES_EVERY_STEPS // PRODUCT_EVERY_STEPS):
        assert not times.full
        times.add(2e-4)
    assert times.full
    places = [("n0", f"cuda:{rank}") for rank in range(4)]
    (event, straggler) = times.compare(20, torch.tensor([2e-4, 2e-4, 4e-4, 2e-4]), places)
    assert (event.fields["what"], straggler.fields["device"]) == ("product", "cuda:2")
    assert straggler.fields["message"] == (
        "step 20: rank 2 (cuda:2) on n0 has taken 2.0 times the median process's time for a matrix product for 20 "
        "steps; all others wait for it"
    )


def test_the_time_of_a_window_is_its_median_step_and_then_begins_anew() -> None:
    times = RankTimes(1.5, 20)
    for own_s in [1.0] * 19:
        times.add(own_s)
    assert not times.full
    times.add(50.0)
    assert times.full
    assert times.take_s() == 1.0
    assert not times.full


REAL: list[float] = json.loads((Path(__file__).parent / "noisy_gradient_norms.json").read_text(encoding="utf-8"))
#: Before the spike at step 608.
NOISY = REAL[:600]


def _alarms(norms: list[float], alarm: NormAlarm | None = None, first_step: int = 1) -> list[str]:
    alarm = alarm or NormAlarm()
    messages = (alarm.observe(step, norm) for step, norm in enumerate(norms, first_step))
    return [message for message in messages if message]


def test_a_real_noisy_curve_has_many_spikes_by_the_papers_rule_and_one_alarm() -> None:
    monitor = Monitor()
    events = [event for step, norm in enumerate(REAL, 1) for event in monitor.observe(step, 3.0, norm)]
    assert sum(event.kind == "gradient_spike" for event in events) == 88
    (alarm,) = (event.fields for event in events if event.kind == "alarm")
    assert (alarm["step"], alarm["what"]) == (608, "gradient_norm")
    assert alarm["message"].startswith(
        "step 608: the gradient norm is 4.48, 25 deviations above the median of the last"
    )


def test_bumps_of_half_a_unit_are_no_alarm_and_a_spike_is_one() -> None:
    for bump in (0.4, 0.5):
        assert not _alarms([norm + bump if step % 50 == 0 else norm for step, norm in enumerate(NOISY)])
        quiet = [0.2 + 0.01 * (step % 5) for step in range(300)]
        assert not _alarms([*quiet, bump, *quiet])
    spiked = [*NOISY[:300], 12.0, *NOISY[300:]]
    (message,) = _alarms(spiked)
    assert message.startswith("step 301: the gradient norm is 12, ")
    assert "deviations above the median of the last 100 steps, 1." in message


def test_there_is_no_alarm_before_the_window_is_full() -> None:
    assert not _alarms([1.0] * (ALARM_WINDOW_STEPS - 1) + [100.0])
    assert len(_alarms([1.0] * ALARM_WINDOW_STEPS + [100.0])) == 1


def test_a_long_spike_is_one_alarm_and_norms_that_are_not_finite_are_left_to_others() -> None:
    long = [1.0] * ALARM_WINDOW_STEPS + [50.0] * 40 + [1.0] * ALARM_WINDOW_STEPS
    assert len(_alarms(long)) == 1
    assert not _alarms([1.0] * ALARM_WINDOW_STEPS + [float("nan"), float("inf")])
    assert not _alarms([0.0] * 200)


def test_a_restored_alarm_continues_like_the_saved_one() -> None:
    norms = [*NOISY[:250], 30.0, *NOISY[250:300], 40.0, *NOISY[300:400], 50.0]
    expected = _alarms(norms)
    assert len(expected) == 2, "the second comes too soon after the first"
    for cut in (90, 251, 300):
        first = NormAlarm()
        before = _alarms(norms[:cut], first)
        second = NormAlarm(json.loads(json.dumps(first.state)))
        assert before + _alarms(norms[cut:], second, cut + 1) == expected


def test_limits_of_an_update_follow_the_last_steps_and_survive_a_checkpoint() -> None:
    limits = UpdateLimits()
    for step in range(UPDATE_LEAST_STEPS):
        assert limits.limits == (math.inf, math.inf)
        limits.observe(2.0 + step % 2, 0.5)
    loss, norm = limits.limits
    assert loss == pytest.approx(2.5 + UPDATE_DEVIATIONS * statistics.stdev([2.0, 3.0] * 32))
    assert norm == 0.5
    assert UpdateLimits(limits.state).limits == (loss, norm)
    for _ in range(UPDATE_WINDOW_STEPS):
        limits.observe(1.0, 1.0)
    assert limits.limits == (1.0, 1.0)
