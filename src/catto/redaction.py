"""Keep secrets in free-form settings out of files: detect them, and store a digest in their place.

People put keys into the body of requests to a server. Such a value is sent but never stored. Files get a digest of it,
so that a changed value is detected. To make the files sufficient for sending the value again, write it as `${NAME}`,
the name of an environment variable.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from catto.records import content_hash

# Words that occur in the names of settings with secrets. `tokens` is not one of them, because of max_tokens.
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
# The words of a name in snake_case or camelCase.
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
# A reference to an environment variable: `${NAME}`, or `${NAME:-default}`.
_REFERENCE = re.compile(r"\$\{\w+(?::-(?P<default>[^}]*))?\}")
# What `redact` puts in the place of a secret.
_DIGEST = re.compile(r"sha256:[0-9a-f]{16}")
# A login in an address, `//user:password@host`, or the value of an `Authorization` header.
_LOGIN = re.compile(r"//[^/\s]*@|^(?:Basic|Bearer|Token)\s+\S", re.IGNORECASE)
_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
# A sequence of letters and digits looks like a key if it has both and is at least this long. The sequences of a name
# such as `Llama-3-70B-Instruct` are shorter.
MIN_MIXED_CHARACTERS = 10
# The same for a sequence of letters alone or of digits alone. The date in `claude-3-opus-20240229` is not a key.
MIN_UNMIXED_CHARACTERS = 28


def redact(value: Any, *, is_secret: bool = False) -> Any:
    """Return a JSON value in which every text or number that may be a secret is replaced by a digest.

    Redacting the result again does not change it, so a value that is read back from a file has the same hash.

    Args:
        value: Any JSON value. Inside a dict, every setting is judged by its own name too.
        is_secret: Whether the name of the setting says that the value is a secret. Every text and number in it is then
            replaced, except for references to environment variables.

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
    """Return whether the value of a setting with this name is a secret.

    >>> names_secret("apiKey"), names_secret("X-Auth-Token"), names_secret("max_tokens")
    (True, True, False)
    """
    return any(word.lower() in SECRET_WORDS for word in _WORDS.findall(name))


def looks_like_secret(text: str) -> bool:
    """Return whether a text has the form of a key, whatever the setting is called.

    Such a text contains a login, a UUID, or a long sequence of letters and digits.

    >>> looks_like_secret("sk-5f2c81d09ab34e67"), looks_like_secret("meta-llama/Llama-3-70B-Instruct")
    (True, False)
    """
    if _LOGIN.search(text) or _UUID.search(text):
        return True
    for sequence in re.findall(r"[A-Za-z0-9+]+", text):
        is_mixed = not sequence.isalpha() and not sequence.isdecimal()
        min_length = MIN_MIXED_CHARACTERS if is_mixed else MIN_UNMIXED_CHARACTERS
        if len(sequence) >= min_length:
            return True
    return False


def _may_be_secret(value: object, is_secret: bool) -> bool:
    """Return whether a text or a number may be a secret; False for any other value.

    Args:
        value: The value of a setting.
        is_secret: Whether the name of the setting says that it is a secret.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return False
    if not isinstance(value, str):
        return is_secret
    is_redacted_already = _DIGEST.fullmatch(value) is not None
    if not value or is_redacted_already:
        return False
    if _REFERENCE.search(value):
        # The name of a variable is not a secret, even in a secret setting. Its default and the text around it may be.
        literal_text = _REFERENCE.sub(lambda match: match["default"] or "", value)
        return looks_like_secret(literal_text)
    return is_secret or looks_like_secret(value)


def find_redacted(value: Any, place: str) -> Iterator[str]:
    """Yield the paths of digests, such as `extra_body.api_key`, in a value that was read back from a file.

    Args:
        value: Any JSON value.
        place: The path of the value itself, with which the paths begin.

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
    """Yield the texts that no message may show: those that redaction replaces, and values of environment variables.

    Args:
        written: A setting as the user wrote it, with references such as `${NAME}`.
        sent: The same setting with the variables filled in.

    >>> list(secret_texts({"user": "${NAME}", "top_k": 5}, {"user": "me", "top_k": 5}))
    ['me']
    """
    return _texts_that_differ(redact(written), sent)


def _texts_that_differ(stored: Any, sent: Any) -> Iterator[str]:
    """Yield the texts in `sent` that differ from those at the same place in `stored`, which has the same structure."""
    if isinstance(sent, dict):
        for name, item in sent.items():
            yield from _texts_that_differ(stored[name], item)
    elif isinstance(sent, list | tuple):
        for stored_item, item in zip(stored, sent, strict=True):
            yield from _texts_that_differ(stored_item, item)
    elif isinstance(sent, str) and sent != stored:
        yield sent
