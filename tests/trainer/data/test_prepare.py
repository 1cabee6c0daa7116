"""The prepared folder: what is in it, what is held out, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from conf.load import dump
from conf.schema import Config
from hlatctl.run.errors import ConfigError, DataError
from trainer.data.documents import sources_of
from trainer.data.prepare import main, prepare
from trainer.data.survey import survey

MakeConfig = Callable[..., Config]


def _prepared(config: Config, target: Path) -> tuple[dict[str, Any], list[str], list[str]]:
    """dataset.json, the training documents, and those held out."""
    prepare(config, target)
    dataset = json.loads((target / "dataset.json").read_text())
    train = [str(text) for text in sources_of(dataset)[0].documents]
    held_out = [json.loads(line)["text"] for line in Path(dataset["validation"]["path"]).read_text().splitlines()]
    return dataset, train, held_out


def _jsonl(path: Path, texts: list[str | None]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_every_document_is_trained_on_or_held_out(make_config: MakeConfig, corpus: Path, tmp_path: Path) -> None:
    config = make_config(data={"validation_fraction": 0.1})
    dataset, train, held_out = _prepared(config, tmp_path / "d")
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    assert sorted(train + held_out) == sorted(texts)
    assert train == [text for text in texts if text not in set(held_out)], "training keeps the order of the files"
    assert 10 <= len(held_out) <= 45
    assert (dataset["documents"], dataset["validation"]["documents"]) == (len(train), len(held_out))
    assert dataset["text_bytes"] == sum(len(text.encode()) for text in train)
    (source,) = dataset["sources"]
    assert (source["path"], source["rows"], source["documents"]) == (os.fspath(corpus), 240, len(train))
    assert [p.name for p in tmp_path.iterdir()] == ["d"], "no temporary folder is left"


def test_same_documents_are_held_out_whatever_the_tokenizer(make_config: MakeConfig, tmp_path: Path) -> None:
    first = _prepared(make_config(), tmp_path / "a")
    second = _prepared(make_config(tokenizer={"train_vocab_size": 300}), tmp_path / "b")
    assert first[2] == second[2]
    assert first[0]["fingerprint"] != second[0]["fingerprint"]


@pytest.mark.parametrize("fraction", [0.0, 0.5, 0.999])
def test_neither_side_is_ever_empty(make_config: MakeConfig, tmp_path: Path, fraction: float) -> None:
    path = _jsonl(tmp_path / "two.jsonl", ["only this one", "and that one"])
    config = make_config(data={"path": os.fspath(path), "validation_fraction": fraction})
    _, train, held_out = _prepared(config, tmp_path / "d")
    assert (train, held_out) == (["only this one"], ["and that one"])


def test_one_document_is_too_few(make_config: MakeConfig, tmp_path: Path) -> None:
    path = _jsonl(tmp_path / "one.jsonl", ["alone", "", None])
    with pytest.raises(DataError, match="1 documents with text; one to train on and one to hold out"):
        prepare(make_config(data={"path": os.fspath(path)}), tmp_path / "d")
    assert not (tmp_path / "d").exists()


def test_rows_without_text_are_skipped_and_counted(make_config: MakeConfig, tmp_path: Path) -> None:
    path = _jsonl(tmp_path / "gaps.jsonl", ["a b c", None, " \n", "\ud800 is half a character", "d e f"])
    dataset, train, held_out = _prepared(make_config(data={"path": os.fspath(path)}), tmp_path / "d")
    assert sorted(train + held_out) == ["a b c", "d e f"]
    assert dataset["skipped_rows"] == 3


def test_prepared_folder_is_reused_and_an_incomplete_one_is_replaced(make_config: MakeConfig, tmp_path: Path) -> None:
    target = tmp_path / "d"
    target.mkdir()
    (target / "part-00000.arrow").write_text("half of something")
    prepare(make_config(), target)
    before = {p: p.stat().st_mtime_ns for p in target.rglob("*")}
    prepare(make_config(), target)
    assert {p: p.stat().st_mtime_ns for p in target.rglob("*")} == before


def test_a_tokenizer_file_larger_than_the_model_is_refused_before_anything_is_made(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    dataset, _, _ = _prepared(make_config(), tmp_path / "d")
    path = f"{dataset['tokenizer']['path']}/tokenizer.json"
    for given in (path, dataset["tokenizer"]["path"]):
        config = make_config(tokenizer={"path": given}, model={"vocab_size": 350}, parallel={"tensor_parallel_size": 3})
        (tmp_path / "config.yaml").write_text(dump(config))
        with pytest.raises(ConfigError, match=r"model\.vocab_size=350: below the 400 tokens") as caught:
            main(["--config", os.fspath(tmp_path / "config.yaml")])
        assert caught.value.hint == "set model.vocab_size=402 or more"


def test_files_that_are_not_read_are_counted_and_markdown_is_read_but_for_the_card(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    folder = tmp_path / "corpus"
    (folder / "more").mkdir(parents=True)
    for name in ("README.md", "page.md", "more/README.md", "a.pdf", "b.pdf", "LICENSE", ".hidden"):
        (folder / name).write_text(f"This is {name}.")
    config = make_config(data={"path": os.fspath(folder)})
    dataset, train, held_out = _prepared(config, tmp_path / "d")
    assert sorted(train + held_out) == ["This is more/README.md.", "This is page.md."]
    assert dataset["warnings"][0] == f"data: 4 files in {folder} are not read: 2 .pdf, 1 .md, 1 LICENSE"


def test_a_tokenizer_smaller_than_configured_is_a_warning(make_config: MakeConfig, tmp_path: Path) -> None:
    path = _jsonl(tmp_path / "small.jsonl", ["a page", "another page"])
    config = make_config(data={"path": os.fspath(path)})
    dataset, _, _ = _prepared(config, tmp_path / "d")
    size = dataset["tokenizer"]["vocab_size"]
    assert size < 400
    assert dataset["warnings"] == [
        f"data: the corpus gives a tokenizer of {size} tokens, fewer than tokenizer.train_vocab_size=400"
    ]
    assert _prepared(make_config(), tmp_path / "e")[0]["warnings"] == []


def test_the_tokens_of_a_source_are_estimated(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config()
    dataset, _, _ = _prepared(config, tmp_path / "d")
    counted = survey(config, dataset, documents=10_000)["tokens"]
    assert dataset["sources"][0]["estimated_tokens"] == pytest.approx(counted, rel=0.02)


def test_tokenizer_larger_than_the_model_is_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.vocab_size=350: below the 400 tokens of the tokenizer") as caught:
        prepare(make_config(model={"vocab_size": 350}), tmp_path / "d")
    assert caught.value.hint == "set model.vocab_size=400 or more"


def test_standard_library_is_a_corpus(make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "lib"
    (library / "site-packages").mkdir(parents=True)
    for name in ("a.py", "b.py", "site-packages/other.py"):
        (library / name).write_text(f"# {name}\n" * 300)
    monkeypatch.setattr("sysconfig.get_path", lambda name: os.fspath(library))
    _, train, held_out = _prepared(make_config(data={"path": None}), tmp_path / "d")
    assert sorted(text.splitlines()[0] for text in train + held_out) == ["# a.py", "# b.py"]


def test_real_standard_library_passes_the_check(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(dump(make_config(data={"path": None})))
    assert main(["--config", os.fspath(tmp_path / "config.yaml")]) == 0


@pytest.mark.processes
def test_check_refuses_what_prepare_would_and_needs_no_torch(make_config: MakeConfig, tmp_path: Path) -> None:
    pq.write_table(__import__("pyarrow").table({"body": ["x"]}), tmp_path / "a.parquet")
    (tmp_path / "config.yaml").write_text(dump(make_config(data={"path": os.fspath(tmp_path / "a.parquet")})))
    code = (
        "import sys; from hlatctl.run.errors import run_main; from trainer.data.prepare import main; "
        "code = run_main(main); print({'torch', 'transformers'} & set(sys.modules)); sys.exit(code)"
    )
    argv = [sys.executable, "-c", code, "--config", os.fspath(tmp_path / "config.yaml")]
    result = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3])
    assert result.returncode == DataError.exit_code
    assert "data.text_column='text' is not there; it has: body" in result.stderr
    assert "hint: set data.text_column=body" in result.stderr
    assert result.stdout.strip() == "set()"


def test_books_with_the_llama_tokenizer(make_config: MakeConfig, real_data: Path, tmp_path: Path) -> None:
    config = make_config(
        data={"path": os.fspath(real_data / "corpora" / "books-valid.parquet")},
        tokenizer={"path": os.fspath(real_data / "tokenizers" / "llama2-tokenizer.model")},
        model={"vocab_size": 32_000},
    )
    dataset, train, _ = _prepared(config, tmp_path / "d")
    assert dataset["tokenizer"]["vocab_size"] == 32_000
    assert (dataset["tokenizer"]["bos_id"], dataset["tokenizer"]["eos_id"]) == (1, 2)
    assert len(train) > 10


def test_sources_of_a_mixture_stay_apart_with_their_origins(mixed: dict[str, Any], corpus: Path) -> None:
    large, few = sources_of(mixed)
    assert large.name == os.fspath(corpus)
    assert large.fingerprint != few.fingerprint
    held_out = mixed["validation"]["documents"]
    assert len(large.documents) + len(few.documents) + held_out == 260
    for source in (large, few):
        lines = Path(source.name).read_text().splitlines()
        for position, text in enumerate(source.documents):
            origin = source.origin(position)
            assert (origin.file, json.loads(lines[origin.row - 1])["text"]) == (source.name, text)


def test_modules_cut_into_pieces_lead_back_to_file_and_piece(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lib").mkdir()
    for name in ("a.py", "b.py"):
        (tmp_path / "lib" / name).write_text(f"# {name}\n" * 3000)
    monkeypatch.setattr("sysconfig.get_path", lambda name: os.fspath(tmp_path / "lib"))
    dataset, _, _ = _prepared(make_config(data={"path": None, "validation_fraction": 0.0}), tmp_path / "d")
    (source,) = sources_of(dataset)
    origins = [source.origin(i) for i in range(len(source.documents))]
    assert [(Path(o.file).name, o.row) for o in origins] == [
        ("a.py", 1),
        ("a.py", 2),
        ("a.py", 3),
        ("b.py", 1),
        ("b.py", 2),
    ]


def test_damage_fails_by_default_and_is_skipped_and_counted_when_asked(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    lines = _jsonl(folder / "a.jsonl", [f"text {i}" for i in range(9)])
    lines.write_text(lines.read_text() + "{torn\n")
    (folder / "b.parquet").write_bytes(b"PAR1 and nothing more")
    with pytest.raises(DataError, match=r"b\.parquet: truncated or damaged"):
        prepare(make_config(data={"path": os.fspath(folder)}), tmp_path / "d")
    config = make_config(data={"path": os.fspath(folder), "on_corrupt": "skip"})
    dataset, train, held_out = _prepared(config, tmp_path / "d")
    assert len(train) + len(held_out) == 9
    assert dataset["corrupt_count"] == 2
    assert dataset["corrupt"][0].startswith(f"{folder}/a.jsonl:10: not a JSON value")
    assert dataset["corrupt"][1].startswith(f"{folder}/b.parquet: truncated or damaged")
    assert capsys.readouterr().err.count("skipped: ") == 2
    (folder / "a.jsonl").unlink()
    with pytest.raises(DataError, match=r"b\.parquet: truncated or damaged"):
        prepare(config, tmp_path / "none")


def test_fingerprint_depends_on_the_content_and_not_on_the_path(make_config: MakeConfig, tmp_path: Path) -> None:
    fingerprints = []
    for name, texts in (("a", ["x y", "z"] * 20), ("b", ["x y", "z"] * 20), ("c", ["x y", "w"] * 20)):
        (tmp_path / name).mkdir()
        path = _jsonl(tmp_path / name / f"{name}.jsonl", list(texts))
        dataset, _, _ = _prepared(make_config(data={"path": os.fspath(path)}), tmp_path / name / "d")
        fingerprints.append((dataset["fingerprint"], dataset["sources"][0]["fingerprint"]))
    assert fingerprints[0] == fingerprints[1]
    assert fingerprints[0][0] != fingerprints[2][0]
    assert fingerprints[0][1] != fingerprints[2][1]


def test_document_of_any_of_many_files_is_found(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.data.corpus._FILE_BYTES", 300)
    monkeypatch.setattr("trainer.data.corpus._BATCH_BYTES", 60)
    monkeypatch.setattr("trainer.data.arrow_index._MOST_OPEN", 2)
    texts = [f"text number {i}" for i in range(200)]
    path = _jsonl(tmp_path / "many.jsonl", list(texts))
    config = make_config(data={"path": os.fspath(path), "validation_fraction": 0.0})
    dataset, train, _ = _prepared(config, tmp_path / "d")
    assert len(dataset["files"]) > 5
    assert train == texts[:-1]
    (source,) = sources_of(dataset)
    assert [source.origin(i).row for i in (0, 150, 3, 198)] == [1, 151, 4, 199]
    Path(dataset["files"][0]["path"]).write_bytes(b"")
    with pytest.raises(
        DataError, match=r"part-00000-000\.arrow: prepared corpus is missing or damaged \(it ends before"
    ):
        sources_of(dataset)[0].documents[0]
