"""Pages from templates: values are escaped, missing values and a missing jinja2 are errors."""

from __future__ import annotations

import sys

import jinja2
import pytest

from hlatctl.report import html_pages, sweep
from hlatctl.report.sweep import Winner
from hlatctl.run.errors import DependencyError
from hlatctl.run.sweep import SweepState, TrialState

HOSTILE = "<script>{{331*337}}</script>"
SHOWN = "&lt;script&gt;{{331*337}}&lt;/script&gt;"


def test_text_of_a_sweep_is_neither_markup_nor_template() -> None:
    trial = TrialState(0, HOSTILE, 0, {"optimizer.lr": HOSTILE}, [], status="failed", why=HOSTILE)
    state = SweepState(sweep_id=HOSTILE, axes=[{"key": "optimizer.lr"}], trials={0: trial}, message=HOSTILE)
    html = sweep.render(state, {}, Winner(text=HOSTILE, command=f"hlatctl train {HOSTILE}", experiment=HOSTILE))
    assert "<script>" not in html
    assert "111547" not in html
    for shown in (
        f"<h1>{SHOWN}</h1>",
        f"created: {SHOWN}</dd>",
        f"<td>{SHOWN}</td>",
        f"hlatctl train {SHOWN}</pre>",
        f"<pre>{SHOWN}</pre>",
    ):
        assert shown in html


def test_a_missing_value_is_an_error() -> None:
    with pytest.raises(jinja2.UndefinedError, match="'title' is undefined"):
        html_pages.fill("sweep.html")


def test_a_missing_jinja2_is_reported_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(DependencyError, match=r"(?s)pages need jinja2\nhint: .*pip install .*\[head\]"):
        html_pages.fill("sweep.html")
