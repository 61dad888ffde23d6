"""Secrets in settings of a free form: which values may be one, what is stored in their place, and what is sent.

People put keys into the body that goes to a server. Such a value is used and never stored: files get a digest of it, so
that a changed value is noticed. Where files must suffice to send it again, it is written as `${NAME}`, the name of an
environment variable.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from catto.records import content_hash

# Words in the name of a setting that holds a secret; `tokens` is not among them, as in max_tokens.
SECRET_WORDS = frozenset(
    {
        "apikey",
        "auth",
        "authentication",
        "authorization",
        "bearer",
        "cookie",
        "cookies",
        "credential",
        "credentials",
        "key",
        "keys",
        "passphrase",
        "passwd",
        "password",
        "pwd",
        "secret",
        "secrets",
        "session",
        "signature",
        "token",
    }
)
# The words of snake_case and camelCase.
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_REFERENCE = re.compile(r"\$\{\w+(?::-(?P<default>[^}]*))?\}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{16}")
_LOGIN = re.compile(r"//[^/\s]*@|^(?:Basic|Bearer|Token)\s+\S", re.IGNORECASE)
_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
# So many letters and digits mixed without a break are a key and not a name: `Llama-3-70B-Instruct` is a name.
MIN_MIXED_CHARACTERS = 10
# The same for letters alone or digits alone: the date in `claude-3-opus-20240229` is no key.
MIN_UNMIXED_CHARACTERS = 28


def redact(value: Any, *, is_secret: bool = False) -> Any:
    """Return a JSON value in which a digest replaces every text or number that may be a secret.

    Redacting twice changes nothing more, so a value that is read back from a file has the hash of the original.

    Args:
        value: Any JSON value.
        is_secret: Whether the value belongs to a setting whose name says that it holds a secret.

    >>> redact({"thinking": {"type": "disabled"}, "auth": "${MY_KEY}"})
    {'thinking': {'type': 'disabled'}, 'auth': '${MY_KEY}'}
    >>> redact({"api_key": "abc"})
    {'api_key': 'sha256:6cc43f858fbb7633'}
    """
    if isinstance(value, dict):
        return {name: redact(item, is_secret=is_secret or names_secret(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item, is_secret=is_secret) for item in value]
    if _may_be_secret(value, is_secret):
        return f"sha256:{content_hash(value)}"
    return value


def names_secret(name: str) -> bool:
    """Whether a setting of this name holds a secret.

    >>> names_secret("apiKey"), names_secret("X-Auth-Token"), names_secret("max_tokens")
    (True, True, False)
    """
    return any(word.lower() in SECRET_WORDS for word in _WORDS.findall(name))


def looks_like_secret(text: str) -> bool:
    """Whether a text has the form of a key, whatever the setting is called.

    >>> looks_like_secret("sk-5f2c81d09ab34e67"), looks_like_secret("meta-llama/Llama-3-70B-Instruct")
    (True, False)
    """
    if _LOGIN.search(text) or _UUID.search(text):
        return True
    for part in re.findall(r"[A-Za-z0-9+]+", text):
        is_mixed = not part.isalpha() and not part.isdecimal()
        least = MIN_MIXED_CHARACTERS if is_mixed else MIN_UNMIXED_CHARACTERS
        if len(part) >= least:
            return True
    return False


def _may_be_secret(value: object, is_secret: bool) -> bool:
    """Whether a value must not be stored. is_secret: whether the name of its setting says so."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return False
    if not isinstance(value, str):
        return is_secret
    is_redacted_already = _DIGEST.fullmatch(value) is not None
    if not value or is_redacted_already:
        return False
    if _REFERENCE.search(value):
        # The name of a variable is no secret, but its default and the text around it may be.
        literal_text = _REFERENCE.sub(lambda match: match["default"] or "", value)
        return looks_like_secret(literal_text)
    return is_secret or looks_like_secret(value)


def find_redacted(value: Any, place: str) -> Iterator[str]:
    """Yield the places of digests, such as `extra_body.api_key`, in a value that was read back from a file.

    >>> list(find_redacted({"api_key": "sha256:6cc43f858fbb7633"}, "extra_body"))
    ['extra_body.api_key']
    """
    if isinstance(value, dict):
        for name, item in value.items():
            yield from find_redacted(item, f"{place}.{name}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from find_redacted(item, f"{place}.{number}")
    elif isinstance(value, str) and _DIGEST.fullmatch(value):
        yield place


def secret_texts(written: Any, sent: Any) -> Iterator[str]:
    """Yield the texts that no message may show: what redaction replaces, and the values of environment variables.

    Args:
        written: A setting as the user wrote it, with references such as `${NAME}`.
        sent: The same setting with the variables filled in.

    >>> list(secret_texts({"user": "${NAME}", "top_k": 5}, {"user": "me", "top_k": 5}))
    ['me']
    """
    return _texts_that_differ(redact(written), sent)


def _texts_that_differ(stored: Any, sent: Any) -> Iterator[str]:
    """Yield the texts of `sent` that `stored`, a value of the same shape, does not hold at their places."""
    if isinstance(sent, dict):
        for name, item in sent.items():
            yield from _texts_that_differ(stored[name], item)
    elif isinstance(sent, list | tuple):
        for stored_item, item in zip(stored, sent, strict=True):
            yield from _texts_that_differ(stored_item, item)
    elif isinstance(sent, str) and sent != stored:
        yield sent
