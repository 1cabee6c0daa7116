"""Each message is sent once: after restarts, crashes, outages and repetitions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from conf.of_run import of_run
from flows import amendments
from flows.tracking.notify import notifier
from flows.tracking.notify.notes import Message
from flows.tracking.notify.notifier import PER_HOUR, Forecast, Notifier, only_notifier
from hlatctl.run.errors import RunBusyError, StorageError
from hlatctl.run.fold import read_state
from hlatctl.run.journal import JournalWriter, read_events, train_writer
from hlatctl.run.paths import RunPaths
from tests.flows.tracking.notify.conftest import ENTRY, MakeRun, fail, journal


class Service:
    """A service that records messages, or fails."""

    def __init__(self) -> None:
        self.got: list[Message] = []
        self.problem = ""
        self.now_unix_s = 1e9
        self.dies = False

    def send(self, _entry: str, message: Message) -> str:
        if not self.problem:
            self.got.append(message)
        if self.dies:
            raise SystemExit(137)
        return self.problem

    def of(self, run: RunPaths) -> Notifier:
        """A notifier as a new process has it."""
        return Notifier(run, of_run(run), send=self.send, now_unix_s=lambda: self.now_unix_s)

    @property
    def titles(self) -> list[str]:
        return [message.title for message in self.got]


@pytest.fixture
def service() -> Service:
    return Service()


def test_a_failure_is_told_with_what_happened_what_to_do_and_where_the_run_is(
    make_run: MakeRun, service: Service
) -> None:
    run = make_run()
    with JournalWriter(run, train_writer(0), 1) as steps:
        steps.append("step", step=7, tokens=70, loss=2.5, step_s=1.0)
    fail(run)
    service.of(run).poll()
    (message,) = service.got
    assert message.title == "one: failed at step 7"
    assert message.body.splitlines()[:5] == [
        "What happened: no node",
        "What was decided: the run has ended, because a restart can't fix this",
        "What is asked of you: repair a node",
        "Command: hlatctl resume one",
        f"Now: step 7 of {of_run(run).total_steps:,}, 70 tokens, loss 2.5000",
    ]


def test_no_message_is_sent_twice_after_a_resume(make_run: MakeRun, service: Service) -> None:
    run = make_run()
    fail(run)
    service.of(run).poll()
    journal(run, "head_started", pid=2, host="here")
    service.of(run).poll()
    journal(run, "run_finished", outcome="finished", step=9, tokens=90, message="")
    service.of(run).poll()
    service.of(run).poll()
    assert service.titles == ["one: failed at step 7", "one: finished at step 9"]


def test_a_kill_between_send_and_note_repeats_that_message_only(make_run: MakeRun, service: Service) -> None:
    run = make_run()
    journal(run, "alarm", step=1, what="weight_drift", message="drift")
    service.of(run).poll()
    fail(run)
    service.dies = True
    with pytest.raises(SystemExit):
        service.of(run).poll()
    service.dies = False
    service.of(run).poll()
    assert service.titles == ["one: alarm weight drift at step 1", *2 * ["one: failed at step 7"]]


def test_an_outage_is_one_warning_and_its_messages_arrive_later(make_run: MakeRun, service: Service) -> None:
    run, service.problem = make_run(), f"{ENTRY}: the service doesn't answer"
    fail(run)
    watching = service.of(run)
    for _ in range(5):
        watching.poll()
        service.now_unix_s += 700
    service.problem = ""
    watching.poll()
    assert service.titles == ["one: failed at step 7"]
    assert [e["kind"] for e in read_events(run) if e.get("what") == "notify"] == ["tracking_lost", "tracking_back"]


def test_many_events_after_an_outage_become_one_summary_with_the_urgent_one_first(
    make_run: MakeRun, service: Service
) -> None:
    run = make_run()
    for number in range(500):
        journal(run, "eval_finished", milestone_tokens=number + 1, step=1, scores={"x": {"value": 0.5}}, skipped={})
    fail(run)
    service.of(run).poll()
    (message,) = service.got
    assert message.title == "one: failed at step 7 (summary of 501 messages)"
    assert message.kind == "failed"
    assert "What is asked of you: repair a node" in message.body
    assert "486 earlier messages are left out" in message.body
    assert len(message.body) < 5000


def test_at_most_twenty_messages_an_hour_but_urgent_ones_at_once(make_run: MakeRun, service: Service) -> None:
    run = make_run()
    watching = service.of(run)
    for number in range(PER_HOUR + 5):
        journal(run, "eval_finished", milestone_tokens=number + 1, step=1, scores={}, skipped={})
        watching.poll()
    assert len(service.got) == PER_HOUR
    fail(run)
    watching.poll()
    assert len(service.got) == PER_HOUR + 1
    assert service.got[-1].title == "one: failed at step 7 (summary of 2 messages)"


@pytest.mark.parametrize(
    ("event", "kind", "title"),
    [
        ({"kind": "alarm", "step": 9, "what": "update_skipped", "message": "m"}, "loss_spike", "alarm update skipped"),
        ({"kind": "alarm", "step": 9, "what": "gradient_norm", "message": "m"}, "loss_spike", "alarm gradient norm"),
        ({"kind": "alarm", "step": 9, "what": "budget", "message": "budget.usd=5: 90 %"}, "budget", "nearly used up"),
        ({"kind": "hang", "evidence": "no step for 9 min", "stacks": "s", "path": "p"}, "stall", "makes no progress"),
    ],
)
def test_spikes_stalls_and_budgets_are_switched_apart_and_at_once(
    make_run: MakeRun, service: Service, event: dict[str, Any], kind: str, title: str
) -> None:
    run = make_run(on=[kind])
    notifier = service.of(run)
    journal(run, **event)
    notifier.poll()
    (message,) = service.got
    assert (message.kind, title in message.title) == (kind, True)
    amendments.amend(run, ["notify.on=[finished]"], by="ana")
    service.now_unix_s += 100_000
    journal(run, **event)
    notifier.poll()
    assert len(service.got) == 1
    amendments.amend(run, [f"notify.on=[{kind}]"], by="ana")
    journal(run, **{**event, "message": "another budget.usd=6"})
    notifier.poll()
    assert len(service.got) == 2


def test_a_repeated_alarm_is_told_once_a_day_and_kinds_that_nobody_asked_for_never(
    make_run: MakeRun, service: Service
) -> None:
    run = make_run()
    watching = service.of(run)
    for hour in range(26):
        journal(run, "alarm", step=hour, what="weight_drift", message="drift")
        journal(run, "straggler", step=hour, rank=1, host="n1", ratio=2.0, message="slow")
        watching.poll()
        service.now_unix_s += 3600
    assert service.titles == ["one: alarm weight drift at step 0", "one: alarm weight drift at step 24"]


def test_a_message_has_no_control_characters_no_secret_and_short_lines(make_run: MakeRun, service: Service) -> None:
    run = make_run()
    evil = "\x1b[2Jgone\r\nTitle: fake HF_TOKEN=abcdefgh12345 " + "x" * 9000
    journal(run, "run_finished", outcome="failed", step=1, tokens=1, message=evil)
    service.of(run).poll()
    body = service.got[0].body
    assert all(line.isprintable() and len(line) <= 500 for line in body.splitlines())
    assert "abcdefgh12345" not in body
    assert not any(line.startswith("Title:") for line in body.splitlines())


def test_a_secret_at_the_end_of_what_is_read_is_not_shown(make_run: MakeRun, service: Service) -> None:
    run, hidden = make_run(), f"HF_TOKEN={'a' * 1970} "
    secret = "hf_" + "Zq7" * 14
    journal(run, "run_finished", outcome="failed", step=1, tokens=1, message=f"{hidden}{secret} {'x' * 9000}")
    service.of(run).poll()
    assert "Zq7" not in service.got[0].body


def test_an_old_run_that_gets_its_first_service_is_told_only_of_its_newest_driver(
    make_run: MakeRun, service: Service
) -> None:
    run = make_run()
    fail(run)
    journal(run, "head_started", pid=2, host="here")
    journal(run, "alarm", step=1, what="disk_full", message="full")
    service.of(run).poll()
    assert service.titles == ["one: the disk is full"]


def test_what_was_read_when_the_storage_failed_is_read_again(
    make_run: MakeRun, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    fail(run)
    watching = service.of(run)
    with monkeypatch.context() as broken:
        broken.setattr(notifier, "read_state", lambda run: (_ for _ in ()).throw(StorageError("gone")))
        with pytest.raises(StorageError):
            watching.poll()
    watching.poll()
    assert service.titles == ["one: failed at step 7"]


def test_summaries_of_summaries_stay_short(make_run: MakeRun, service: Service) -> None:
    run, service.problem = make_run(), f"{ENTRY}: the service doesn't answer"
    fail(run)
    watching = service.of(run)
    for number in range(1200):
        journal(run, "eval_finished", milestone_tokens=number + 1, step=1, scores={}, skipped={})
        if number % 30 == 0:
            watching.poll()
    service.problem, service.now_unix_s = "", service.now_unix_s + 700
    watching.poll()
    (message,) = service.got
    assert "What is asked of you: repair a node" in message.body
    assert len(message.body) <= 6000
    assert len(message.title) <= 120


def test_a_damaged_book_begins_anew(make_run: MakeRun, service: Service) -> None:
    run = make_run()
    fail(run)
    service.of(run).poll()
    run.notify.write_text(json.dumps({"offsets": 3}), encoding="utf-8")
    service.of(run).poll()
    assert len(service.got) == 2


def test_two_processes_do_not_send_the_messages_of_one_run(make_run: MakeRun) -> None:
    run = make_run()
    with only_notifier(run), pytest.raises(RunBusyError, match="is sending its messages"), only_notifier(run):
        pass


def test_a_digest_a_day_compares_with_the_one_before(make_run: MakeRun, service: Service) -> None:
    run = make_run(digest_hour=8)
    service.now_unix_s = 86_400 * 10_000 + 7 * 3600.0
    watching = service.of(run)
    watching.poll()
    with JournalWriter(run, train_writer(0), 1) as steps:
        steps.append("step", step=2, tokens=4096, loss=2.25, step_s=1.0)
    for _ in range(30):
        service.now_unix_s += 3600
        watching.poll()
    assert service.titles == ["one: digest of 1997-05-19", "one: digest of 1997-05-20"]
    assert "4.1K of" in service.got[0].body
    assert "+4.1K since the last digest" in service.got[0].body
    assert "loss 2.2500 (before: 2.2500)" in service.got[1].body


def test_a_predicted_end_that_is_a_day_later_for_an_hour_is_told_once(make_run: MakeRun) -> None:
    run = make_run()
    config = of_run(run)
    with JournalWriter(run, train_writer(0), 1) as steps:
        for step in range(1, 30):
            steps.append("step", step=step, tokens=step, loss=1.0, step_s=1.0)
    state, told = read_state(run), []
    forecast: Forecast | None = None
    for hour in range(80):  # no step for 80 hours: the end moves with the clock
        forecast, happened = notifier.slip(forecast, state, config, 3600.0 * hour)
        told += [hour] if happened else []
    assert told == [26, 52, 78]
