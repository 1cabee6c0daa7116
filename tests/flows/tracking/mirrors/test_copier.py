"""The cursor, the progress of a copy, mirrors of other packages; ``test_contract`` has what is copied."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conf.of_run import of_run
from conf.tracking import mirrors_of
from conf.validate import validate
from flows.tracking.mirrors import sync
from flows.tracking.mirrors.copier import Cursor, Progress
from hlatctl.run.errors import ConfigError
from tests.flows.tracking.mirrors.make import make_run, train
from tests.foreign import install


def test_a_mirror_at_another_address_starts_over(tmp_path: Path) -> None:
    written = Cursor("here", offsets={"flow": 9}, last_step=3, kept={"run_id": "a"})
    written.write(tmp_path / "cursor.json")
    assert Cursor.read(tmp_path / "cursor.json", "here") == written
    assert Cursor.read(tmp_path / "cursor.json", "there") == Cursor("there")


def test_a_long_copy_says_every_five_seconds_how_far_it_is() -> None:
    said: list[str] = []
    times = iter([0.0, 2.0, 10.0, 12.0, 20.0])
    progress = Progress(1000, said.append, lambda: next(times))
    for step in (0, 100, 500, 600, 1000):
        progress.reached(step, step)
    assert said == [
        "step 500 (50% of the journal), 50 steps/s, 10 s left",
        "step 1,000 (100% of the journal), 50 steps/s, 0.0 s left",
    ]


_FOREIGN = """
import json
from conf.tracking import MirrorKind
from flows.tracking.mirrors.base import Mirror, Service

class Listed(Mirror):
    def __init__(self, path, kept):
        self.path, self.rows, self.last_step = path, [], kept.get("last_step", 0)
    def steps(self, points):
        self.rows += [[point.step, point.values["loss"]] for point in points]
        self.last_step = points[-1].step
    def rewind(self, step, tokens):
        self.last_step = step
        return False
    def scores(self, scores): ...
    labels = outcome = scores
    def flush(self):
        self.path.write_text(json.dumps(self.rows))
        return {"last_step": self.last_step}
    def close(self): ...

class List(Service):
    target = "a list"
    def open(self, about, kept, last_step):
        return Listed(about.root / "list.json", kept)

ROW = MirrorKind(code="acme_list:List", title="a list")
"""


def test_a_mirror_of_another_package_is_chosen_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "acme-list", {"acme_list.py": _FOREIGN}, {"hlatctl.mirrors": {"list": "acme_list:ROW"}})
    monkeypatch.syspath_prepend(tmp_path)
    run = make_run(tmp_path / "runs", mirrors=["list"])
    train(run, 1, 3)
    validate(of_run(run))
    assert mirrors_of(of_run(run)) == ["list"]
    assert sync.sync(run, "list") == 3 + 2
    assert json.loads((run.root / "list.json").read_text()) == [[1, 0.125], [2, 0.25], [3, 0.375]]
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"tracking\.mirrors\[0\]=list: not known\nhint: use one of: mlflow, "):
        validate(of_run(run))
