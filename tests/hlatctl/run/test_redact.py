"""Secrets are recognized, and masked in recorded text."""

from __future__ import annotations

import time

import pytest

from hlatctl.run.redact import hide, is_secret_name, secret_in


@pytest.mark.parametrize(
    "name",
    ["MY_PAT", "HF_TOKEN", "apiKey", "AWS_SECRET_ACCESS_KEY", "DB_PWD", "X-Amz-Signature", "GITHUBTOKEN", "password"],
)
def test_names_of_secrets_are_known(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    ["PWD", "TOKENIZERS_PARALLELISM", "max_tokens", "HF_TOKEN_PATH", "KEY_FILE", "PATH", "PATTERN", "HTTPS_PROXY"],
)
def test_other_names_are_left_alone(name: str) -> None:
    assert not is_secret_name(name)


_BEGIN = "-----BEGIN PRIVATE KEY-----"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("see http://u:p@h/x", "see http://***@h/x"),
        ("http://u:p@ss@h", "http://***@h"),
        ("http://token@h", "http://***@h"),
        ("npm_" + "a1B2" * 9, "***"),
        ("AIza" + "a1B-" * 9 + "x", "***"),
        ("postgresql://h/d?a=1&password=pw", "postgresql://h/d?a=1&password=***"),
        ("+backend.env.MY_PAT=abcdefgh", "+backend.env.MY_PAT=***"),
        ('+password = "hunter22"', '+password = "***"'),
        ("+export API_KEY=abcdefgh\n", "+export API_KEY=***\n"),
        ("eyJhbGciOiJub25lIn0.eyJzdWIiOiJhYmMifQ.x-_1 y", "*** y"),
        (f"{_BEGIN}\nabc {_BEGIN}\nabc", "***\nabc ***\nabc"),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----\nx", "***\nx"),
    ],
)
def test_secrets_in_a_text_are_masked(text: str, shown: str) -> None:
    assert hide(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "ssh://git@host/repo",
        "abfss://container@account/x",
        "sqlite:////a/b.db",
        "me@example.org",
        'pad_token="<pad>"',
        "token = next(tokens)",
        "train.tokens=10000000",
        "def f(key=default_value, token=something_else):",
    ],
)
def test_other_text_stays_as_it_is(text: str) -> None:
    assert (hide(text), secret_in(text)) == (text, "")


@pytest.mark.parametrize(("part", "length"), [("x", 60_000), ("a-", 60_000), ("eyJ-", 60_000), (_BEGIN, 240_000)])
def test_the_time_of_a_long_text_is_that_of_its_length(part: str, length: int) -> None:
    text = part * (length // len(part))
    start_s = time.process_time()
    hide(text)
    assert time.process_time() - start_s < 2, "each beginning searched the rest of the text: three seconds and more"
