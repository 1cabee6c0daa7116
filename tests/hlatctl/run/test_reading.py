"""Files in every state that a disk, a person or another program can leave them in: one kind of error."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlatctl.run import files
from hlatctl.run.errors import DamagedFileError
from hlatctl.run.reading import check_size, lines, parse_json, read_bytes, read_text, reading

BAD_JSON = [b"", b"{", b"\xff", b"[" * 100_000, b'{"a":' * 100_000, b"[" * 200 + b"]" * 200]
OUT_OF_RANGE = ["1e999", "-1e999", "9" * 5000, "9" * 400, str(2**64 + 1), "NaN", "Infinity", "-Infinity"]


@pytest.mark.parametrize("content", BAD_JSON, ids=range(len(BAD_JSON)))
def test_invalid_or_deeply_nested_json_is_a_value_error(content: bytes) -> None:
    for any_number in (False, True):
        with pytest.raises(ValueError, match=r"."):
            parse_json(content, any_number=any_number)


@pytest.mark.parametrize("text", OUT_OF_RANGE, ids=lambda text: text[:10])
def test_a_number_out_of_range_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(f'{{"a": {text}}}')


def test_files_of_other_programs_may_hold_such_numbers() -> None:
    value = parse_json('{"model_max_length": 1000000000000000019884624838656, "a": 1e999}', any_number=True)
    assert value == {"model_max_length": 1000000000000000019884624838656, "a": float("inf")}


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_written_values_are_read_back_unchanged(value: Any) -> None:
    assert parse_json(json.dumps(value)) == value


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("nowhere")])
def test_a_file_that_is_not_regular_is_an_error_and_does_not_block(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    path = tmp_path / "a.json"
    make(path)
    with pytest.raises(OSError, match=r"."):
        files.read_json(path)
    with pytest.raises(DamagedFileError, match=r"a\.json: can't be used \("), reading(path):
        files.read_json(path)


@pytest.mark.parametrize("content", ["[]", "{}", "null", '{"a": {}}', '{"a": [1e999]}', '{"a": [[]]}'])
def test_a_file_that_holds_something_else_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(DamagedFileError, match=r"a\.json: can't be used") as caught, reading(path, hint="remove it"):
        int(files.read_json(path)["a"][0])
    assert caught.value.hint == "remove it"


def test_a_file_that_is_too_large_is_named_with_its_size_and_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with path.open("wb") as file:
        file.truncate(8 << 30)
    for read in (files.read_json, read_bytes, read_text, check_size):
        with pytest.raises(DamagedFileError, match=r"has 8,589,934,592 bytes, the limit is 67,108,864"), reading(path):
            read(path)
    with pytest.raises(OSError, match="the limit is 5"):
        read_bytes(Path("/proc/self/status"), 5)  # the kernel says that it has 0 bytes


def test_lines_are_yielded_with_their_length_and_only_the_beginning_of_long_ones() -> None:
    content = b"short\n" + b"x" * 20 + b"\n\n1234567890\n" + b"y" * 30
    found = list(lines(io.BytesIO(content), 10))
    assert found == [(b"short\n", 6), (b"x" * 11 + b"\n", 21), (b"\n", 1), (b"1234567890\n", 11), (b"y" * 11, 30)]
