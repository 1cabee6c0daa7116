"""One HTML file of a run, of several runs or of a sweep: the page's own code, and the answers that it needs, inside.

A browser opens the file from a disk, without a server and without a network. Browsers refuse to import modules from
``file://``, and a policy with hashes refuses modules from ``data:`` addresses. So the page's modules become functions
of one plain script (:func:`bundle`). The file's policy allows only its own scripts, by their hashes, and no request at
all. Styles need no hash, because Plotly adds some while it draws.

A file has Plotly (4.8 MB) and about 0.3 MB for each run. The points of all curves of all runs have a limit together.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from conf.of_run import of_run
from flows.live.app import STATIC, plotly_js
from flows.live.json_response import to_json
from flows.tracking import ui
from hlatctl.report import baselines
from hlatctl.report.live import curves, details, sweeps
from hlatctl.report.live.curves import AXES, CurvesRequest, StepColumns
from hlatctl.report.live.index import DEFAULT_POINTS, OpenRun
from hlatctl.report.summary import summary_markdown
from hlatctl.run.errors import ConfigError, HlatctlError
from hlatctl.run.files import open_regular
from hlatctl.run.paths import RunPaths, SweepPaths
from hlatctl.run.redact import hide
from hlatctl.units import counted

#: Maximum number of runs in a file. The page compares as many.
MOST_RUNS = 20
#: Points of each curve of a run alone, and of all runs of a file together.
_POINTS, _ALL_POINTS = 3000, 24_000
#: Significant digits of values; float32 has seven.
_DIGITS = 6
#: Key of the configuration with a folder of this machine in which runs are.
_RUNS_DIR = "runs_dir"


def best_trials(sweep: SweepPaths) -> list[RunPaths]:
    """Return the trials of a sweep's best arms that a file has room for."""
    return [run for run in sweeps.best_first(sweep) if run.config.is_file()][:MOST_RUNS]


def page(runs: Sequence[OpenRun], sweep: SweepPaths | None, view: str) -> str:
    """Return the file's HTML text.

    Args:
        runs: the runs whose pages are in the file.
        view: the part of the page's address after ``#`` that the file shows first; empty: that of the sweep, the run
            or the comparison.

    Raises:
        ConfigError: there are no runs and no sweep, or too many runs.
    """
    if runs or not sweep:
        _check_number(runs)
    content = _redacted(_content(runs, sweep, view or _view(runs, sweep)))
    data = to_json(content).decode().replace("<", "\\u003c")  # text of a run can't end the element
    scripts = [
        plotly_js().read_text(encoding="utf-8"),
        bundle({path.name: path.read_text(encoding="utf-8") for path in sorted(STATIC.glob("*.js"))}),
    ]
    html = (STATIC / "index.html").read_text(encoding="utf-8")
    html = re.sub(r'<link rel="stylesheet".*\n<script .*</script>\n', "", html)
    style = f"<style>\n{(STATIC / 'style.css').read_text(encoding='utf-8')}</style>\n"
    policy = f'<meta http-equiv="content-security-policy" content="{_policy(scripts)}">\n{MARK}\n'
    body = f'<script type="application/json" id="shared">{data}</script>\n'
    body += "".join(f"<script>{script}</script>\n" for script in scripts)
    return (
        html.replace('<meta charset="utf-8">\n', f'<meta charset="utf-8">\n{policy}')
        .replace("</head>", f"{style}</head>")
        .replace("</body>", f"{body}</body>")
    )


def markdown(runs: Sequence[RunPaths], sweep: SweepPaths | None, published: str | None = None) -> str:
    """Return the numbers of a sweep, a run, or several runs as Markdown, without secrets.

    It is the text of `hlatctl report`, `compare` and `sweep-report` without their figures.

    Args:
        published: a set of published scores to compare runs with; None: none.

    Raises:
        ConfigError: there are no runs and no sweep, or too many runs, or no such set.
        HlatctlError: a run is damaged.
    """
    if sweep:
        return hide(sweeps.markdown(sweep))
    _check_number(runs)
    return hide(summary_markdown(runs[0], of_run(runs[0])) if len(runs) == 1 else details.markdown(runs, published))


def _check_number(runs: Sequence[object]) -> None:
    if not 1 <= len(runs) <= MOST_RUNS:
        hint = "choose fewer runs" if runs else "choose a run"
        raise ConfigError(f"runs: {len(runs)} are given, must be 1 to {MOST_RUNS}", hint=hint)


#: The beginning of each file tells it from other files.
MARK = '<meta name="generator" content="hlatctl share">'


def is_ours(path: Path) -> bool:
    """Return whether a file is one of these. Raises an OSError if it isn't a regular file, or can't be read."""
    with open(path, "rb", opener=open_regular) as file:
        return MARK.encode() in file.read(2000)


def _view(runs: Sequence[OpenRun], sweep: SweepPaths | None) -> str:
    if sweep:
        return f"#/sweep/{sweep.run_id}"
    ids = [opened.run.run_id for opened in runs]
    return f"#/run/{ids[0]}" if len(ids) == 1 else f"#/compare?runs={','.join(ids)}"


def _content(runs: Sequence[OpenRun], sweep: SweepPaths | None, view: str) -> dict[str, Any]:
    notes: list[str] = []
    points = min(_POINTS, _ALL_POINTS // max(1, len(runs)))
    every = max(1, math.ceil(max((opened.state.step for opened in runs), default=1) / points))
    found = {opened.run.run_id: _run(opened, every, notes) for opened in runs}
    rows = [run["details"]["row"] for run in found.values()]
    notes.append(f"Curves have at most {points:,} points. Logs, documents and items of evaluations are not in it.")
    if sweep and len(runs) < (trials := len(sweeps.best_first(sweep))):
        notes.append(f"It has the pages of the best {counted(len(runs), 'trial')} of {trials}.")
    return {
        "made_unix_s": time.time(),
        "view": view,
        "notes": notes,
        "info": {
            "version": version("hlatctl"),
            "runs_dir": "",
            "allow_control": False,
            "servers": {name: {**ui.OFF, "auth": None} for name in ui.NAMES},
        },
        "rows": rows,
        "runs": found,
        "sweeps": {sweep.run_id: {**sweeps.details(sweep), "links": {"report": None}}} if sweep else {},
        "compared": {
            name: {"runs": rows, **_compared([opened.run for opened in runs], name or None)}
            for name in ("", *baselines.names())
        },
        "paired": _paired([opened.run for opened in runs]),
    }


def _compared(runs: Sequence[RunPaths], baselines_name: str | None) -> dict[str, Any]:
    found = details.compared(runs, baselines_name)
    return {**found, "config": [row for row in found["config"] if row["key"] != _RUNS_DIR]}


def _paired(runs: Sequence[RunPaths]) -> dict[str, Any]:
    """Return the first of several runs against each other one, by their ids; without runs that have no scores."""
    found = {}
    for run in runs[1:]:
        with suppress(HlatctlError):
            found[f"{runs[0].run_id},{run.run_id}"] = details.paired(runs[0], run)
    return found


def _run(opened: OpenRun, every: int, notes: list[str]) -> dict[str, Any]:
    """Return what the page asks of a run. Names of processes and folders of this machine are left out."""
    found = {**details.details(opened), "driver": None, "evaluator": None, "links": {}}
    found["row"] = {**found["row"], "path": ""}
    found["config"] = {key: value for key, value in found["config"].items() if key != _RUNS_DIR}
    answers: dict[str, Any] = {"details": found, "prompts": {"samples": details.samples(opened)}}
    try:
        answers |= {"ranks": opened.heat_map(DEFAULT_POINTS), "curves": _curves(opened, every)}
    except HlatctlError as error:
        notes.append(f"{opened.run.run_id} has no curves: {error.message}.")
    return answers


def _curves(opened: OpenRun, every: int) -> dict[str, Any]:
    """Return all curves of a run over its steps, and what the other axes have in their place."""
    with opened.lock:
        columns, state, config = StepColumns(), opened.state, opened.config
        columns.update(state.steps)
        keys = [key for key in curves.available(columns, state, config) if key != "validation_loss"]
        whole = curves.curves(columns, state, config, CurvesRequest(keys=tuple(keys), every=every))
        asked = ("validation_loss",) if "validation_loss" in whole["available"] else ()
        axes = {x: curves.curves(columns, state, config, CurvesRequest(keys=asked, every=every, x=x)) for x in AXES}
    changing = ("x_unit", "xs", "series", "milestones", "spikes", "skipped")
    return {
        "all": {
            **{name: value for name, value in whole.items() if name not in ("x", *changing)},
            "series": {key: _series(series) for key, series in whole["series"].items()},
        },
        "axes": {x: {name: axis[name] for name in changing} for x, axis in axes.items()},
    }


def _series(series: Mapping[str, Any]) -> dict[str, list[float | None]]:
    """Return a curve with few digits; its range is left out if each point is one step."""
    found = {name: _short(values) for name, values in series.items()}
    return found if found["low"] != found["high"] else {"y": found["y"]}


def _short(values: Iterable[float]) -> list[float | None]:
    return [float(f"{value:.{_DIGITS}g}") if np.isfinite(value) else None for value in values]


def _redacted(value: Any) -> Any:
    """Return a value with the secrets in its texts masked, as the journals mask them."""
    if isinstance(value, str):
        return hide(value)
    if isinstance(value, dict):
        return {key: _redacted(each) for key, each in value.items()}
    return [_redacted(each) for each in value] if isinstance(value, list | tuple) else value


def _policy(scripts: Iterable[str]) -> str:
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    hashes = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


_IMPORT = re.compile(r'^import (?:\* as (?P<all>\w+)|(?P<some>\{[^}]*\})) from "\./(?P<module>\w+\.js)";$', re.M)
_EXPORT = re.compile(r"^export (?P<what>(?:async )?function|class|const) (?P<name>\w+)", re.M)
_COMMENT = re.compile(r"/\*.*?\*/", re.S)
_LOADER = """"use strict";
(() => {
const defined = {}, loaded = {};
const use = (name) => {
  if (!loaded[name]) { loaded[name] = {}; defined[name](loaded[name]); }
  return loaded[name];
};
"""


def bundle(modules: Mapping[str, str]) -> str:
    """Return a plain script that does what the modules do; ``main.js`` is the one that a page starts.

    Functions are exported before a module's imports, because modules that import each other use only these while they
    are loaded.

    Raises:
        ValueError: a module has another form of import or export than the page's modules.
    """
    parts = [_LOADER]
    for name, code in modules.items():
        exports = [(found["what"], found["name"]) for found in _EXPORT.finditer(code)]
        functions, others = ([each for what, each in exports if ("function" in what) == kind] for kind in (True, False))
        body = _EXPORT.sub(lambda found: f"{found['what']} {found['name']}", _IMPORT.sub(_used, code))
        # In comments, `import("./module.js").Class` names a type.
        if re.search(r"^(import|export)\b|\bimport\(", _COMMENT.sub("", body), re.M) or "</script" in body:
            raise ValueError(f"{name}: has an import or export that can't be bundled")
        parts.append(
            f'defined["{name}"] = (exports) => {{\nObject.assign(exports, {{ {", ".join(functions)} }});\n{body}'
            f"Object.assign(exports, {{ {', '.join(others)} }});\n}};\n"
        )
    return "".join([*parts, 'use("main.js");\n})();\n'])


def _used(found: re.Match[str]) -> str:
    names = found["all"] or re.sub(r"(\w+) as (\w+)", r"\1: \2", found["some"])
    return f'const {names} = use("{found["module"]}");'
