"""Prepared Arrow files as one list of documents, mapped into memory: nothing is read before it is asked for."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import overload

import pyarrow as pa

from hlatctl.run.errors import DataError


class Documents(Sequence[str]):
    """The documents of prepared files, by position.

    Args:
        paths: uncompressed Arrow IPC files whose first column is text.

    Raises:
        DataError: a file is missing or damaged.
    """

    def __init__(self, paths: list[Path]) -> None:
        self._columns: list[pa.Array] = []
        self._starts: list[int] = []
        self._count = 0
        for path in paths:
            try:
                reader = pa.ipc.open_file(pa.memory_map(str(path)))
                columns = [reader.get_batch(i).column(0) for i in range(reader.num_record_batches)]
            except (OSError, pa.ArrowException) as error:
                raise DataError(
                    f"{path}: prepared corpus is missing or damaged ({error})",
                    hint="remove its folder under .cache/data and run again",
                ) from None
            for column in columns:
                self._columns.append(column)
                self._starts.append(self._count)
                self._count += len(column)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, position: int) -> str: ...

    @overload
    def __getitem__(self, position: slice) -> list[str]: ...

    def __getitem__(self, position: int | slice) -> str | list[str]:
        if isinstance(position, slice):
            return [self[i] for i in range(*position.indices(self._count))]
        if not 0 <= position < self._count:
            raise IndexError(position)
        batch = bisect_right(self._starts, position) - 1
        return str(self._columns[batch][position - self._starts[batch]])

    def __iter__(self) -> Iterator[str]:
        return (self[position] for position in range(self._count))
