"""``python -m benchmarks.object_server FOLDER LATENCY_S``: a folder by the S3 protocol, read only, on loopback.

Prints its port. It answers listings, ``HEAD`` and ``GET`` with a range, each after the latency, in parallel.
moto's server, which the tests use, answers too few requests a second to measure a reader.
"""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

_BUCKET = "/bucket"
_TIME = "2026-01-01T00:00:00.000Z"
_TYPE = {"Content-Type": "application/octet-stream", "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}


async def _serve(folder: Path, latency_s: float) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                request = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                await asyncio.sleep(latency_s)
                writer.write(_answer(folder, request))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def _answer(folder: Path, request: str) -> bytes:
    method, target, _ = request.split(" ", 2)
    place = urlsplit(target)
    path = folder / unquote(place.path).removeprefix(_BUCKET).lstrip("/")
    if "list-type" in parse_qs(place.query):
        return _response("200 OK", _listing(folder, parse_qs(place.query).get("prefix", [""])[0]), {})
    if not path.is_file():
        return _response("404 Not Found", b"<Error><Code>NoSuchKey</Code></Error>", {})
    size = path.stat().st_size
    about = {**_TYPE, "ETag": f'"{size}"'}
    if method == "HEAD":
        return _response("200 OK", b"", {**about, "Content-Length": str(size)})
    wanted = re.search(r"(?i)^range: bytes=(\d+)-(\d+)", request, re.MULTILINE)
    start, end = (int(wanted[1]), int(wanted[2]) + 1) if wanted else (0, size)
    with path.open("rb") as file:
        file.seek(start)
        content = file.read(end - start)
    return _response("206 Partial Content", content, {**about, "Content-Range": f"bytes {start}-{end - 1}/{size}"})


def _listing(folder: Path, prefix: str) -> bytes:
    names = [(path.relative_to(folder).as_posix(), path.stat().st_size) for path in folder.rglob("*") if path.is_file()]
    items = "".join(
        f"<Contents><Key>{name}</Key><LastModified>{_TIME}</LastModified><ETag>&quot;{size}&quot;</ETag>"
        f"<Size>{size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
        for name, size in sorted(names)
        if name.startswith(prefix)
    )
    head = "<Name>bucket</Name><MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>"
    return f'<?xml version="1.0"?><ListBucketResult>{head}{items}</ListBucketResult>'.encode()


def _response(status: str, content: bytes, headers: dict[str, str]) -> bytes:
    lines = {"Content-Length": str(len(content)), **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + content


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]), float(sys.argv[2])))
