"""What is found in the evidence of planted faults: the cause, the node and the decision."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from flows.drill.pool import FAULTS, Fault
from tests.flows.drill.replay import HOSTS, Found, replay

_ROOT = Path(__file__).parents[3]
_PAGE = _ROOT / "docs" / "operations.md"
_BEGIN, _END = "<!-- confusions: begin -->\n", "<!-- confusions: end -->\n"
_GOAL = 0.95


@dataclass(frozen=True)
class _Row:
    fault: Fault
    found: Found

    @property
    def expected(self) -> Found:
        return Found.expected(self.fault)

    @property
    def blames_healthy(self) -> bool:
        return not set(self.found.hosts).issubset(HOSTS[1:])

    def cells(self) -> list[str]:
        """Return the row of the table; what is wrong is in bold."""
        expected, found, evidence = self.expected, self.found, self.fault.evidence
        cause = f"`{found.cause}`" if found.cause else "training continues"
        if found.cause != expected.cause:
            cause = f"**{cause}**, not `{expected.cause}`"
        node = "its node" if found.hosts == HOSTS[1:] else "none" if not found.hosts else "another node"
        if found.hosts != expected.hosts:
            node = f"**{node}**"
        action = found.action.replace("_", " ") or "–"
        if found.action != expected.action:
            action = f"**{action}**, not {expected.action.replace('_', ' ')}"
        return [self.fault.title, evidence.recorded or "published texts", cause, node, action]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[_Row]:
    return [_Row(FAULTS[name], replay(FAULTS[name], tmp_path_factory.mktemp(name))) for name in FAULTS.built_in]


def test_causes_nodes_and_decisions_are_right(rows: list[_Row]) -> None:
    assert len(rows) >= 34
    wrong = [row.cells() for row in rows if row.found != row.expected]
    assert _share(row.found.cause == row.expected.cause for row in rows) >= _GOAL, wrong
    assert _share(row.found.hosts == row.expected.hosts for row in rows) >= _GOAL, wrong
    assert _share(row.found.action == row.expected.action for row in rows) >= _GOAL, wrong
    assert not [row.fault.title for row in rows if row.blames_healthy], "healthy nodes were blamed"


def test_the_documentation_has_the_table_of_confusions(rows: list[_Row]) -> None:
    """HLATCTL_UPDATE_GOLDEN=1 writes it."""
    before, rest = _PAGE.read_text(encoding="utf-8").split(_BEGIN)
    documented, after = rest.split(_END)
    if os.environ.get("HLATCTL_UPDATE_GOLDEN"):
        _PAGE.write_text(f"{before}{_BEGIN}{_table(rows)}{_END}{after}", encoding="utf-8")
    else:
        assert documented == _table(rows)


@pytest.mark.parametrize("name", list(FAULTS.built_in))
def test_every_fault_has_evidence_of_its_own(name: str) -> None:
    fault = FAULTS[name]
    assert fault.evidence.recorded or fault.evidence.source, "neither recorded nor published"
    assert bool(fault.code) != bool(fault.needs), "it is planted by code, or needs something else"
    assert fault.evidence.live or len(fault.evidence.nodes) == len(HOSTS)
    if fault.code:
        assert callable(FAULTS.part(name))
        assert not fault.skip or callable(FAULTS.part(name, "skip"))


def _share(right: Iterable[bool]) -> float:
    counted = list(right)
    return sum(counted) / len(counted)


def _table(rows: list[_Row]) -> str:
    causes, nodes, actions = (
        sum(getattr(row.found, field) == getattr(row.expected, field) for row in rows)
        for field in ("cause", "hosts", "action")
    )
    recorded = sum(bool(row.fault.evidence.recorded) for row in rows)
    healthy = sum(row.blames_healthy for row in rows)
    lines = [
        f"Of {len(rows)} faults, {recorded} were recorded in real runs. The cause is right for {causes}, the node for "
        f"{nodes},",
        f"and the decision for {actions}. Healthy nodes that were blamed: {healthy}. Mistakes are in bold.",
        "",
        "| fault | evidence | cause | blamed | decision |",
        "|---|---|---|---|---|",
        *(f"| {' | '.join(row.cells())} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"
