"""Reads objects of a corpus in object storage by ranges. Which objects there are: ``trainer.data.listing``.

Credentials come from the environment or the machine's role, as for the mirror of checkpoints.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, TypeVar

from conf.listing import Entry
from hlatctl.cache.objects import connect
from hlatctl.run.errors import STORAGE_AWAY, DataError
from hlatctl.run.redact import hide
from trainer.data.read_ahead import IN_FLIGHT

_T = TypeVar("_T")
#: A failing request is repeated for this long; well below ``recovery.hang_floor_s``.
_PATIENCE_S = 240.0
#: Pause after the first failure; it doubles up to the last.
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.2, 15.0
#: What changes with an object's content, by the names that fsspec's packages give it; the first that is there counts.
_VERSIONS = ("ETag", "etag", "generation", "md5Hash", "content_md5", "mtime", "last_modified", "created")
_CHANGED_HINT = "restore the object; or index the changed corpus: `hlatctl resume`, which compares it with the run's"
#: botocore's options: a connection for each request in flight, and no repetitions besides those here.
_S3_OPTIONS = {"config_kwargs": {"max_pool_connections": IN_FLIGHT, "retries": {"total_max_attempts": 1}}}


def connect_corpus(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for reading a corpus with many requests in flight, and the path in it.

    Raises:
        StorageError, DependencyError: as :func:`hlatctl.cache.objects.connect`.
    """
    return connect(url, **(_S3_OPTIONS if url.startswith(("s3://", "s3a://")) else {}))


def version_of(info: Mapping[str, Any]) -> str:
    """Return what changes with an object's content; empty if the storage tells nothing of the kind."""
    value = next((info[name] for name in _VERSIONS if info.get(name)), "")
    value = value.timestamp() if isinstance(value, datetime) else value  # listings of some packages have numbers
    return f"{value:.6f}" if isinstance(value, float) else str(value)


class RemoteObject:
    """An object that was listed; threads may share it.

    Args:
        url: of the object.
        entry: its entry in the listing.

    Raises:
        StorageError, DependencyError: the URL is invalid, or a package is missing.
    """

    def __init__(self, url: str, entry: Entry) -> None:
        self.url, self.size, self._version = url, entry.size, entry.version
        self._system, self._path = connect_corpus(url)
        self._checked = False

    @property
    def time_ns(self) -> int:
        """A time of change that is made of the version: it changes with it."""
        return int.from_bytes(hashlib.sha256(self._version.encode()).digest()[:7], "little")

    def read(self, start: int, size: int) -> bytes:
        """Return bytes of the object. A failing request is repeated with growing pauses, for a bounded time.

        Raises:
            DataError: the object has changed or is missing; or the storage doesn't answer (code ``STORAGE_AWAY``).
        """
        if not 0 <= start <= start + size <= self.size:
            raise DataError(f"{self.url}: bytes {start:,} to {start + size:,} are outside of the object")
        content = self._patiently(lambda: self._range(start, size)) if size else b""
        if len(content) != size:
            raise self._changed("it is shorter")
        return content

    def _range(self, start: int, size: int) -> bytes:
        if hasattr(self._system, "_call_s3"):
            return self._range_of_s3(start, size)
        self._check()
        content: bytes = self._system.cat_file(self._path, start=start, end=start + size)
        return content

    def _range_of_s3(self, start: int, size: int) -> bytes:
        """Read a range on the condition that the object has the listed ETag: one request."""
        import fsspec.asyn

        bucket, key, _ = self._system.split_path(self._path)
        extent = f"bytes={start}-{start + size - 1}"

        async def get() -> bytes:
            answer = await self._system._call_s3(
                "get_object", Bucket=bucket, Key=key, Range=extent, IfMatch=self._version
            )
            async with answer["Body"] as body:
                content: bytes = await body.read()
                return content

        result: bytes = fsspec.asyn.sync(self._system.loop, get)
        return result

    def _check(self) -> None:
        """Compare size and version with the listing, once in a process: the protocol can't do it in the request."""
        if not self._checked:
            info = self._system.info(self._path)
            if int(info["size"]) != self.size:
                raise self._changed(f"{int(info['size']):,} bytes, was {self.size:,}")
            if version_of(info) != self._version:
                raise self._changed("its version")
            self._checked = True

    def _patiently(self, request: Callable[[], _T]) -> _T:
        pause_s, failed_s = _FIRST_PAUSE_S, 0.0
        while True:
            try:
                return request()
            except DataError:
                raise
            except FileNotFoundError:
                raise DataError(
                    f"{self.url}: is missing, and was there when it was listed", hint=_CHANGED_HINT
                ) from None
            except Exception as error:  # whatever the service's own package raises
                if _code(error) in ("PreconditionFailed", "412"):
                    raise self._changed("its ETag") from None
                now_s = time.monotonic()
                failed_s = failed_s or now_s
                if now_s - failed_s >= _PATIENCE_S:
                    raise away(self.url, f"can't be read for {now_s - failed_s:.0f} s", error) from None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    def _changed(self, what: str) -> DataError:
        return DataError(f"{self.url}: has changed since it was listed ({what})", hint=_CHANGED_HINT)


@lru_cache(maxsize=1 << 16)
def remote_object(url: str, entry: Entry) -> RemoteObject:
    """Return an object, the same one each time, so that it is checked once."""
    return RemoteObject(url, entry)


def away(url: str, what: str, error: Exception) -> DataError:
    """Return the error of storage that fails; it contains no credentials."""
    hint = (
        "check the URL, the network, and that the environment has credentials that may list and read it "
        "(s3://: AWS_PROFILE, AWS_ACCESS_KEY_ID or the machine's role)"
    )
    return DataError(f"{url}: {what} ({type(error).__name__}: {hide(str(error))})", hint=hint, code=STORAGE_AWAY)


def _code(error: Exception) -> str:
    """Return the S3 error code of an exception; empty if it has none."""
    response = getattr(error.__cause__, "response", None) or getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""
