"""Check where a model comes from before it is loaded: a folder, a hub id, or the address of a server."""

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
    """Return whether this can be a name on the hub: `owner/name`, or one of the few names without an owner.

    >>> is_hub_id("Qwen/Qwen3-4B"), is_hub_id("../model")
    (True, False)
    """
    return _HUB_ID.fullmatch(location) is not None


def model_name(model: str) -> str:
    """Return the name of a model: that of a local file or folder without its path, any other as it is.

    >>> model_name("/models/SmolLM2.gguf"), model_name("Qwen/Qwen3-4B")
    ('SmolLM2.gguf', 'Qwen/Qwen3-4B')
    """
    path = PureWindowsPath(model)  # reads both kinds of slashes
    if path.root and path.name:
        return path.name
    return model


def check_model(location: str | Path) -> None:
    """Raise DataError if this is neither a folder with a model nor the form of a hub id. The hub is not asked."""
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
        raise DataError(location, None, "no such folder, and not a hub id, which is owner/name")


def _check_model_folder(folder: Path) -> None:
    """Raise DataError unless the folder has the configuration of a model or an adapter."""
    for name in CONFIG_FILES:
        config = folder / name
        if config.exists():
            if not isinstance(read_json(config), dict):
                raise DataError(config, None, "expected a JSON object")
            return
    raise DataError(folder, None, f"not a model: neither {' nor '.join(CONFIG_FILES)} in this folder")


def check_hub(location: str | Path) -> None:
    """Raise DataError if a hub id is not in the local cache, and the hub lacks it or cannot be reached.

    One request is made, without retries: loading a model would repeat it for half a minute before it fails. An existing
    path is not checked. Any other failure is left to the library that loads the model.
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
        if isinstance(try_to_load_from_cache(name, config), str):
            return
    try:
        get_hf_file_metadata(hf_hub_url(name, CONFIG_FILES[0]), timeout=HUB_TIMEOUT_SECONDS)
    except GatedRepoError:
        return
    except RepositoryNotFoundError:
        raise DataError(location, None, "no such folder, and the hub has no such model, or it is private") from None
    except HfHubHTTPError:
        return
    except Exception:  # the errors of a missing connection share no class
        reason = "no such folder, not in the local cache, and the hub cannot be reached"
        raise DataError(location, None, reason) from None


class ServerAddress(NamedTuple):
    """The address of a server without user and password, and those two if the address has them."""

    url: str
    login: tuple[str, str] | None


def server_address(url: str) -> ServerAddress:
    """Split user and password off the address of a server.

    Raises:
        ValueError: It is not an address. The message shows neither user nor password.

    >>> server_address("http://me:secret@localhost:8000/v1/")
    ServerAddress(url='http://localhost:8000/v1', login=('me', 'secret'))
    """
    try:
        parts = urlsplit(url)
        is_complete = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_complete = False
    if not is_complete or parts.query or parts.fragment:
        may_hold_secrets = "@" in url or "?" in url
        shown = "another" if may_hold_secrets else repr(url)
        raise ValueError(f"expected an address such as http://localhost:8000/v1, got {shown}")
    login = None
    if "@" in parts.netloc:
        login = (unquote(parts.username or ""), unquote(parts.password or ""))
    host = parts.netloc.rpartition("@")[2]
    without_login = parts._replace(netloc=host, path=parts.path.rstrip("/"))
    return ServerAddress(urlunsplit(without_login), login)
