"""Datasets of the Hugging Face Hub: read at one commit, which is recorded, with clear errors without a network."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("huggingface_hub")

from huggingface_hub import HfFileSystem, constants

from conf.schema import Config
from hlatctl.run.errors import DataError
from tests.trainer.hub import Hub
from trainer.data import remote
from trainer.data.loader import Loader
from trainer.data.prepare import check, prepare
from trainer.data.remote import RemoteObject, list_corpus

MakeConfig = Callable[..., Config]

_URL = "hf://datasets/org/texts"


def _lines(count: int, word: str) -> bytes:
    return "".join(json.dumps({"text": f"{word} {number} " * 9}) + "\n" for number in range(count)).encode()


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    """Answers until the last test's end, for requests that were sent ahead of need."""
    served = Hub()
    yield served
    served.close()


@pytest.fixture
def hub(server: Hub, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    # As HF_ENDPOINT does before the package is imported.
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(remote, "_PATIENCE_S", 0.0)
    server.commits.clear()
    HfFileSystem.clear_instance_cache()
    yield server
    HfFileSystem.clear_instance_cache()


def test_batches_are_those_of_the_files_on_a_disk_and_the_commit_is_recorded(
    hub: Hub, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.data.workers.os.sched_getaffinity", lambda _: {0})
    folder = tmp_path / "corpus"
    folder.mkdir()
    pq.write_table(pa.table({"text": [f"page {number} " * 9 for number in range(300)]}), folder / "a.parquet")
    commit = hub.commit({f"sample/{path.name}": path.read_bytes() for path in folder.iterdir()})
    found = []
    for number, path in enumerate((f"{_URL}/sample", os.fspath(folder))):
        config = make_config(runs_dir=os.fspath(tmp_path), data={"path": path, "validation_fraction": 0.1})
        check(config)
        target = tmp_path / str(number)
        prepare(config, target)
        dataset = json.loads((target / "dataset.json").read_text())
        loader = Loader(config, dataset, rank=0, size=1)
        found.append((dataset, [loader.next()[0].tolist() for _ in range(40)]))
        loader.close()
    (there, batches), (here, expected) = found
    assert batches == expected
    assert there["fingerprint"] == here["fingerprint"]
    assert there["sources"][0]["path"] == f"{_URL}@{commit}/sample"
    (entry,) = list_corpus(str(tmp_path), f"{_URL}/sample").entries
    hub.ranges.clear()
    content = (folder / "a.parquet").read_bytes()
    assert RemoteObject(f"{_URL}@{commit}/sample/a.parquet", entry).read(5, 20) == content[5:25]
    assert hub.ranges == ["bytes=5-24"], "and not a block"


def test_a_dataset_is_listed_and_read_at_the_commit_that_its_revision_names(hub: Hub, tmp_path: Path) -> None:
    first = hub.commit({"sample/a.jsonl": _lines(40, "old"), "other/b.jsonl": b"{}"})
    listed = list_corpus(str(tmp_path), f"{_URL}/sample")
    assert (listed.folder, [entry.path for entry in listed.entries]) == (f"{_URL}@{first}/sample", ["a.jsonl"])
    second = hub.commit({"sample/a.jsonl": _lines(50, "new")})
    assert list_corpus(str(tmp_path), f"{_URL}/sample").folder == f"{_URL}@{second}/sample"
    assert list_corpus(str(tmp_path), f"{_URL}@{first}/sample") == listed, "a revision can be given"


@pytest.mark.parametrize(
    ("path", "offline", "says"),
    [
        ("org/texts", True, "OfflineModeIsEnabled: .*offline mode is enabled"),
        ("org/nothing", False, "can't be listed .*FileNotFoundError"),
        ("org/texts@nowhere", False, "can't be listed .*FileNotFoundError"),
        ("org/texts/nothing", False, "can't be listed"),
    ],
)
def test_what_can_t_be_read_is_named_with_a_way_out(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, offline: bool, says: str
) -> None:
    hub.commit({"a.jsonl": b"{}"})
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    with pytest.raises(DataError, match=rf"data\.path=hf://datasets/{path}: .*{says}") as caught:
        list_corpus(str(tmp_path), f"hf://datasets/{path}")
    assert "HF_HUB_OFFLINE" in str(caught.value.hint)
    assert "\n" not in caught.value.message
