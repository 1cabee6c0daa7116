from __future__ import annotations

from trainer.monitor import SpikeMonitor


def test_no_spike_before_twenty_steps_are_known() -> None:
    monitor = SpikeMonitor()
    assert [monitor.observe(norm) for norm in [1.0] * 19 + [100.0]] == [None] * 20


def test_spike_is_more_than_a_tenth_above_the_mean_of_the_last_twenty() -> None:
    monitor = SpikeMonitor([1.0] * 20)
    assert monitor.observe(1.09) is None
    assert SpikeMonitor([1.0] * 20).observe(1.11) == 1.0


def test_window_forgets_what_is_older_than_twenty_steps() -> None:
    monitor = SpikeMonitor([9.0] * 20)
    for _ in range(20):
        monitor.observe(1.0)
    assert monitor.observe(1.2) == 1.0


def test_restored_monitor_goes_on_like_the_one_that_was_saved() -> None:
    norms = [0.5 + 0.13 * (step % 7) for step in range(60)]
    whole = SpikeMonitor()
    expected = [whole.observe(norm) for norm in norms]
    first = SpikeMonitor()
    before = [first.observe(norm) for norm in norms[:33]]
    second = SpikeMonitor(first.recent)
    assert before + [second.observe(norm) for norm in norms[33:]] == expected
