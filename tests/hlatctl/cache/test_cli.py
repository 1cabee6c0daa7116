"""`hlatctl cache`: the same cache listed, verified, moved to another machine and cleaned up."""

from __future__ import annotations

import io
import json
import os
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hlatctl.cache import graphs
from hlatctl.cache.store import MANIFEST
from hlatctl.cli.main import main
from tests.hlatctl.cache.conftest import VERSION, MakeModule, tree

Hlatctl = Callable[..., tuple[int, str, str]]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """One of the runs' caches."""
    return tmp_path / "runs" / ".cache" / "compile" / "0123456789abcdef"


@pytest.fixture
def hlatctl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Hlatctl:
    def run(*argv: str | Path) -> tuple[int, str, str]:
        code = main(["cache", *[os.fspath(word) for word in argv], "--runs-dir", os.fspath(tmp_path / "runs")])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_ls_lists_caches_and_modules(source: Path, make_module: MakeModule, hlatctl: Hlatctl) -> None:
    assert hlatctl("ls") == (0, "", f"{source.parent} contains no compiled graphs\n")
    make_module(1)
    make_module(2, done=False)
    graphs.write_manifest(source)
    code, out, _ = hlatctl("ls", "--json")
    (record,) = json.loads(out)
    assert code == 0
    assert {key: record[key] for key in ("name", "layouts", "modules", "incomplete")} == {
        "name": source.name,
        "layouts": ["neuron"],
        "modules": 2,
        "incomplete": 1,
    }
    assert source.name in hlatctl("ls")[1]
    rows = hlatctl("ls", source.name)[1].splitlines()
    assert rows[0].split() == ["MODULE", "LAYOUT", "FILES", "SIZE", "STATE"]
    assert rows[1].endswith("ok")
    assert rows[2].endswith("has no model.done: its compilation did not finish")


def test_verify_names_what_is_broken_and_moves_it_aside_when_asked(
    source: Path, make_module: MakeModule, hlatctl: Hlatctl
) -> None:
    for number in range(3):
        make_module(number)
    graphs.write_manifest(source)
    code, out, _ = hlatctl("verify")
    assert (code, out) == (0, f"{source}: 3 good modules, 12 files match their checksums\n")
    flipped = source / VERSION / f"MODULE_{1:020d}+39f12043" / "model.hlo_module.pb.gz"
    flipped.write_bytes(b"Graph")
    code, out, err = hlatctl("verify", source.name)
    assert code == 14
    assert out.splitlines()[0] == f"{source}: {flipped.relative_to(source)}: checksum differs"
    assert err.startswith("error: 1 modules are broken or incomplete")
    code, _, err = hlatctl("verify", source, "--quarantine")
    assert (code, err) == (0, f"{source}: 1 modules moved to {source / '.quarantine'}\n")
    assert hlatctl("verify")[1] == f"{source}: 2 good modules, 8 files match their checksums\n"
    assert hlatctl("warm", source.name, "--to", source.parent.parent / "local")[0] == 0


def test_archive_moves_the_same_graphs_to_another_machine(
    source: Path, tmp_path: Path, make_module: MakeModule, hlatctl: Hlatctl
) -> None:
    for number in range(2):
        make_module(number)
    make_module(2, done=False)
    complete = {path: content for path, content in tree(source).items() if "MODULE_" + f"{2:020d}" not in path}
    archives = [tmp_path / "one" / "graphs.tar", tmp_path / "two" / "graphs.tar"]
    for archive in archives:
        archive.parent.mkdir()
        assert hlatctl("export", source.name, "--to", archive)[:2] == (0, f"{archive}\n")
    assert archives[0].read_bytes() == archives[1].read_bytes()
    code, out, err = hlatctl("import", archives[0])
    imported = source.parent / "graphs"
    assert (code, out) == (0, f"{imported}\n")
    assert err.startswith("2 modules, 2 of them copied")
    assert tree(imported) == complete
    content = bytearray(archives[1].read_bytes())
    content[content.index(b"program")] ^= 1
    archives[1].write_bytes(bytes(content))
    code, _, err = hlatctl("import", archives[1], "--to", tmp_path / "other")
    assert code == 14
    assert "1 of 2 modules are broken, and were not copied" in err
    assert "checksum differs" in err


def test_archive_never_writes_outside_its_folder(tmp_path: Path, hlatctl: Hlatctl) -> None:
    archive, target = tmp_path / "bad.tar", tmp_path / "target"
    with tarfile.open(archive, "w") as tar:
        # The first looks like a hidden file, and counts for nothing at all.
        for name in (f"{VERSION}/MODULE_1/../../../model.neff", "/absolute/x.neff"):
            member = tarfile.TarInfo(name)
            member.size = 5
            tar.addfile(member, io.BytesIO(b"wrong"))
        link = tarfile.TarInfo("link.neff")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    code, _, err = hlatctl("import", archive, "--to", target)
    assert code == 14
    assert "contains no complete module (2 incomplete" in err
    assert not target.exists()
    (tmp_path / "text.tar").write_text("no archive")
    code, _, err = hlatctl("import", tmp_path / "text.tar")
    assert (code, "can't be read as an archive" in err) == (14, True)


def test_gc_deletes_unused_caches_and_keeps_the_rest(
    source: Path, tmp_path: Path, make_module: MakeModule, hlatctl: Hlatctl
) -> None:
    long_ago = time.time() - 40 * 86400
    make_module(1)
    abandoned = make_module(2, done=False)
    for file in abandoned.iterdir():
        os.utime(file, (long_ago,) * 2)
    lock = source / VERSION / "graph.lock"
    lock.touch()
    os.utime(lock, (long_ago,) * 2)
    graphs.write_manifest(source)
    for name in ("unused", "used"):
        (source.parent / name / "ab").mkdir(parents=True)
        graphs.write_manifest(source.parent / name)
        os.utime(source.parent / name / MANIFEST, (long_ago,) * 2)
    run = tmp_path / "runs" / "run-1"
    run.mkdir()
    (run / "compile_cache.json").write_text('{"fingerprint": "used"}')
    code, out, err = hlatctl("gc", "--dry-run")
    assert code == 0
    assert f"{source.parent / 'unused'}: " in out
    assert "no run has used it for 40 days" in out
    assert "would be freed" in err
    assert (source.parent / "unused").exists()
    assert hlatctl("gc")[0] == 0
    assert [path.name for path in sorted(source.parent.iterdir())] == [source.name, "used"]
    assert not lock.exists()
    assert not list(abandoned.iterdir())
    assert len(tree(source)) == 4


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["ls", "nowhere"], "no such folder or archive"),
        (["verify", "/nowhere"], "no such folder or archive"),
        (["warm", "bogus://x", "--to", "/tmp/x"], "Protocol not known"),
        (["export", "nowhere", "--to", "x.tar"], "no such folder or archive"),
        (["import", "nowhere.tar"], "no such folder or archive"),
        (["gc", "/nowhere"], "/nowhere: no such folder"),
    ],
)
def test_missing_caches_are_named(argv: list[str], error: str, hlatctl: Hlatctl) -> None:
    if "://" in argv[1]:
        pytest.importorskip("fsspec", reason="the extra s3 is not installed")
    code, out, err = hlatctl(*argv)
    assert (code, out) == (14, "")
    assert err.startswith("error: ")
    assert error in err
