"""Check the location of a model before it is loaded: a folder, a hub id or the address of a server."""

from __future__ import annotations

import re
from pathlib import Path, PureWindowsPath
from typing import NamedTuple
from urllib.parse import unquote, urlsplit, urlunsplit

from catto.errors import DataError
from catto.io.text_files import read_json

HUB_TIMEOUT_SECONDS = 10
CONFIG_FILES = ("config.json", "adapter_config.json")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)


def is_hub_id(location: str) -> bool:
    """Return whether this can be the id of a model on the hub: `owner/name`, or one of the few names without an owner.

    >>> is_hub_id("Qwen/Qwen3-4B"), is_hub_id("../model")
    (True, False)
    """
    return _HUB_ID.fullmatch(location) is not None


def model_name(model: str) -> str:
    """Return the name of a model: the last part of a path to a local file or folder; any other name unchanged.

    >>> model_name("/models/SmolLM2.gguf"), model_name("Qwen/Qwen3-4B")
    ('SmolLM2.gguf', 'Qwen/Qwen3-4B')
    """
    path = PureWindowsPath(model)  # splits at slashes and at backslashes
    if path.root and path.name:
        return path.name
    return model


def check_model(location: str | Path) -> None:
    """Raise DataError if this is neither a folder with a model nor written like a hub id. The hub is not contacted."""
    path = Path(location)
    if not str(location).strip():
        raise DataError("model", None, "expected a folder with a model or a hub id, got an empty name")
    if path.is_dir():
        _check_model_folder(path)
    elif path.exists():
        hint = ""
        if path.suffix == ".gguf":
            hint = "; convert it first with examples/import_gguf.py"
        raise DataError(path, None, f"expected a folder with a model, got a file{hint}")
    elif not is_hub_id(str(location)):
        raise DataError(location, None, "no such folder, and not a hub id (owner/name)")


def _check_model_folder(folder: Path) -> None:
    """Raise DataError unless the folder has the configuration of a model or an adapter."""
    for name in CONFIG_FILES:
        config = folder / name
        if config.exists():
            if not isinstance(read_json(config), dict):
                raise DataError(config, None, "expected a JSON object")
            return
    raise DataError(folder, None, f"not a model: neither {' nor '.join(CONFIG_FILES)} is in this folder")


def check_hub(location: str | Path) -> None:
    """Raise DataError if a model is not in the local cache, and the hub does not have it or cannot be reached.

    A single request is made, without retries: loading the model would retry for half a minute before it fails. A path
    that exists is not checked. Every other failure is left to the library that loads the model, which explains it
    better.
    """
    if Path(location).exists():
        return
    try:
        from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
        from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError
    except ImportError:
        return
    name = str(location)
    for config in CONFIG_FILES:
        cached_path = try_to_load_from_cache(name, config)  # not a text if the file is not cached
        if isinstance(cached_path, str):
            return
    try:
        get_hf_file_metadata(hf_hub_url(name, CONFIG_FILES[0]), timeout=HUB_TIMEOUT_SECONDS)
    except GatedRepoError:  # a RepositoryNotFoundError, although the model exists: it needs a login
        return
    except RepositoryNotFoundError:
        raise DataError(location, None, "no such folder, and the hub has no such model, or it is private") from None
    except HfHubHTTPError:  # the hub answered, for example that an adapter has no config.json
        return
    except Exception:  # the errors that a missing connection causes share no base class
        reason = "no such folder, not in the local cache, and the hub cannot be reached"
        raise DataError(location, None, reason) from None


class ServerAddress(NamedTuple):
    """The address of a server, split from its login.

    Attributes:
        url: The address without user and password.
        login: User and password; None if the address had none.
    """

    url: str
    login: tuple[str, str] | None


def server_address(url: str) -> ServerAddress:
    """Split the user and password off the address of a server.

    Args:
        url: The address, which may contain `user:password@`.

    Returns:
        The address without a login and without a slash at the end, and the login.

    Raises:
        ValueError: This is not an HTTP address, or it has a query or a fragment. The message shows no user, password or
            query, because these may be secrets.

    >>> server_address("http://me:secret@localhost:8000/v1/")
    ServerAddress(url='http://localhost:8000/v1', login=('me', 'secret'))
    """
    try:
        parts = urlsplit(url)
        is_complete = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # brackets in the host do not match, or the port is not a number up to 65535
        is_complete = False
    if not is_complete or parts.query or parts.fragment:
        may_contain_secrets = "@" in url or "?" in url
        shown = "something else" if may_contain_secrets else repr(url)
        raise ValueError(f"expected an address such as http://localhost:8000/v1, got {shown}")
    login = None
    if "@" in parts.netloc:
        login = (unquote(parts.username or ""), unquote(parts.password or ""))
    host = parts.netloc.rpartition("@")[2]
    without_login = parts._replace(netloc=host, path=parts.path.rstrip("/"))
    return ServerAddress(urlunsplit(without_login), login)
