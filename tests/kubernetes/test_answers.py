"""The stand-in answers as a real API server did: ``answers.json`` has the answers of Kubernetes 1.36."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kubernetes.answers import RECORDED, Object, all_answers
from tests.kubernetes.lab import Lab

pytestmark = pytest.mark.processes

REAL: dict[str, Object] = json.loads(RECORDED.read_text(encoding="utf-8"))
#: Of conditions: everything else in them is time.
FACTS = ("status", "reason", "message")
COUNTS = ("active", "failed", "succeeded", "terminating")


@pytest.fixture(scope="module")
def answers(lab: Lab) -> dict[str, Object]:
    return all_answers(lab)


def inventions(real: Any, other: Any, place: str = "") -> Iterator[str]:
    """Fields that only the other value has, or has with another type. Counts of 0 are not shown by a real server."""
    if isinstance(other, dict) and isinstance(real, dict):
        for key, value in other.items():
            if key in real:
                yield from inventions(real[key], value, f"{place}.{key}")
            elif value:
                yield f"{place}.{key}={value!r}: a real server has no such field here"
    elif isinstance(other, list) and isinstance(real, list):
        for number, value in enumerate(other):
            if not any(not list(inventions(one, value)) for one in real):
                yield f"{place}[{number}]={value!r}: a real server has no such element"
    elif type(real) is not type(other):
        yield f"{place}={other!r}: {real!r} is of another type"


def facts(one: Object) -> Object:
    """What the launcher and the nodes read of an object."""
    meta, status = one["metadata"], one.get("status", {})
    conditions = [each for each in status.get("conditions") or [] if each["type"] in READ]
    states = [each["state"] for each in status.get("containerStatuses") or []]
    return {
        "labels": meta.get("labels"),
        "annotations": meta.get("annotations"),
        "finalizers": meta.get("finalizers") or [],
        "grace": meta.get("deletionGracePeriodSeconds"),
        "deleting": "deletionTimestamp" in meta,
        "owners": [(each["kind"], each["name"]) for each in meta.get("ownerReferences", [])],
        "phase": status.get("phase"),
        "counts": {key: status.get(key, 0) for key in COUNTS},
        "conditions": {each["type"]: tuple(_said(each.get(key)) for key in FACTS) for each in conditions},
        "states": [{key: value.get("exitCode") for key, value in state.items()} for state in states],
        "involved": {key: one.get("involvedObject", {}).get(key) for key in ("kind", "namespace", "name")},
        "event": (one.get("type"), one.get("reason"), _said(one.get("message"))),
    }


def _said(text: str | None) -> str:
    """Return the first sentence; a scheduler adds more about preemption."""
    return (text or "").removesuffix(".").partition(". ")[0]


#: Kubelets set others too, which nobody reads.
READ = ("Suspended", "FailureTarget", "Failed", "SuccessCriteriaMet", "Complete", "PodScheduled", "DisruptionTarget")


@pytest.mark.parametrize("name", REAL)
def test_the_stand_in_answers_as_a_real_server(name: str, answers: dict[str, Object]) -> None:
    real, found = REAL[name], answers[name]
    assert found["code"] == real["code"]
    body, wanted = found["body"], real["body"]
    assert (body["kind"], body["apiVersion"]) == (wanted["kind"], wanted["apiVersion"])
    if wanted["kind"] == "Status":
        # The details of a refusal repeat its message.
        assert {**body, "details": None} == {**wanted, "details": None}
        return
    assert list(inventions(wanted, body)) == []
    if "items" in wanted:
        assert [facts(one) for one in body["items"]] == [facts(one) for one in wanted["items"]]
    else:
        assert facts(body) == facts(wanted)


def test_every_recorded_answer_is_asked_for_and_every_answer_recorded(answers: dict[str, Object]) -> None:
    assert list(answers) == list(REAL)


def test_an_invented_field_and_another_type_are_found() -> None:
    real = {"a": {"b": 1}, "c": [{"d": "x"}]}
    assert list(inventions(real, {"a": {"b": 2}, "c": [{"d": "y"}], "e": 0})) == []
    assert list(inventions(real, {"a": {"new": 2}})) == [".a.new=2: a real server has no such field here"]
    assert list(inventions(real, {"a": {"b": "2"}})) == [".a.b='2': 1 is of another type"]
    assert len(list(inventions(real, {"c": [{"d": 1}]}))) == 1
