"""Recognizes secrets in text.

``secret_in`` finds them in values that a person can correct; ``hide`` masks them in text that is recorded. Secrets that
look like ordinary words are not recognized.
"""

from __future__ import annotations

import re

MASK = "***"

_SECRET_WORDS = {
    "AUTH",
    "AUTHORIZATION",
    "CREDENTIAL",
    "CREDENTIALS",
    "PASS",
    "PASSPHRASE",
    "PASSWD",
    "PASSWORD",
    "PASSWORDS",
    "SECRET",
    "SECRETS",
    "SIG",
    "SIGNATURE",
    "TOKEN",
}
#: These mean a secret only at the end of a name: KEY_FILE and PATCH_SIZE don't.
_SECRET_LAST_WORDS = {"KEY", "KEYS", "PAT", "PWD"}
#: Endings of names without separators: GITHUBTOKEN, apikey.
_SECRET_ENDINGS = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "APIKEY", "ACCESSKEY", "SECRETKEY")
#: A name that ends with one of these is a path, not a secret.
_PLACES = {"DIR", "FILE", "PATH"}
#: The shell's working directories.
_NOT_SECRET = {"PWD", "OLDPWD"}

_ADDRESS_USER = re.compile(r"\b([A-Za-z][A-Za-z0-9+.-]{0,30})://([^/\s'\"]+)@")
#: A user name alone is not a secret: it is a login name, or the container in an Azure address.
_PUBLIC_USER_SCHEMES = {"ssh", "git+ssh", "svn+ssh", "sftp", "abfs", "abfss", "wasb", "wasbs"}
_QUERY_ITEM = re.compile(r"([?&;])([A-Za-z0-9_.-]+)=([^&;\s'\"#]+)")
#: Prefixes that GitHub, GitLab, Hugging Face, OpenAI, npm, Google, Slack and AWS give their tokens; JSON web tokens;
#: private keys. Each of many beginnings is tried, so the parts have limits, and nothing is tried twice: otherwise a
#: text of 60,000 letters took seconds.
_TOKEN = re.compile(
    r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|hf_[A-Za-z0-9]{20,}|sk-[\w-]{20,}|npm_[A-Za-z0-9]{30,}|AIza[\w-]{30,}"
    r"|xox[abprs]-[\w-]{10,}|A[KS]IA[0-9A-Z]{16}|eyJ[\w-]{10,1024}+\.eyJ[\w-]{10,}+(?:\.[\w-]*)?)"
    r"|-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----(?:(?:(?!-----).){0,32768}+-----END [A-Z ]{0,40}PRIVATE KEY-----)?",
    re.DOTALL,
)
#: ``NAME=value`` as in a shell, and quoted values as in programs. Special tokens of a tokenizer (``<pad>``) and
#: expressions are not secrets. A name begins where its characters do, nothing is tried twice, and a value has a limit:
#: otherwise a word of 60,000 letters took minutes.
_ASSIGNMENT = re.compile(
    r"(?<![A-Za-z0-9_.-])(?P<name>[A-Za-z0-9_.-]++)(?P<between>=|[\"']?\s*[:=]\s*(?P<quote>[\"']))"
    r"(?P<value>[^\s\"'<>\[\](){}$,]{6,2048}+)(?(quote)(?P=quote)|(?=\s|$))"
)


def is_secret_name(name: str) -> bool:
    """Return whether a variable or query parameter of this name holds a secret.

    ``MY_PAT``, ``HF_TOKEN`` and ``apiKey`` are such names; ``TOKENIZERS_PARALLELISM`` and ``max_tokens`` are not.
    """
    words = [word.upper() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]
    if not words or name.upper() in _NOT_SECRET or words[-1] in _PLACES:
        return False
    return (
        bool(_SECRET_WORDS.intersection(words))
        or words[-1] in _SECRET_LAST_WORDS
        or any(word.endswith(_SECRET_ENDINGS) for word in words)
    )


def secret_in(text: str) -> str:
    """Return the kind of secret that a value contains, without the secret. Empty if none is recognized."""
    if any(_is_secret_user(match) for match in _ADDRESS_USER.finditer(text)):
        return "an address with a user name or password"
    if any(is_secret_name(match[2]) for match in _QUERY_ITEM.finditer(text)):
        return "an address with a secret in its query"
    return "an access token or private key" if _TOKEN.search(text) else ""


def hide(text: str) -> str:
    """Return the text with every recognized secret replaced by ``***``."""
    text = _TOKEN.sub(MASK, text)
    text = _ADDRESS_USER.sub(lambda match: f"{match[1]}://{MASK}@" if _is_secret_user(match) else match[0], text)
    text = _QUERY_ITEM.sub(lambda match: f"{match[1]}{match[2]}={MASK}" if is_secret_name(match[2]) else match[0], text)
    return _ASSIGNMENT.sub(_hide_assignment, text)


def _is_secret_user(match: re.Match[str]) -> bool:
    return ":" in match[2] or match[1].lower() not in _PUBLIC_USER_SCHEMES


def _hide_assignment(match: re.Match[str]) -> str:
    name, value = match["name"].rpartition(".")[2], match["value"]
    if not is_secret_name(name) or (match["quote"] is None and name != name.upper()):
        return match[0]
    return match[0].replace(value, MASK) if value != MASK else match[0]
