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


@pytest.mark.parametrize("text", ["x" * 60_000, "a-" * 30_000])
def test_a_long_word_takes_no_longer_than_a_text_of_its_length(text: str) -> None:
    start_s = time.process_time()
    assert hide(text) == text
    assert (
        time.process_time() - start_s < 5
    )  # it took minutes, because each letter was tried as the beginning of a name
