"""A headless Chromium driven through the DevTools protocol with the standard library alone."""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-port=0",
)


def executable() -> str | None:
    """Where Chromium is, if it is."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Socket:
    """A WebSocket client that speaks as much of RFC 6455 as DevTools does: text frames, unfragmented or not."""

    def __init__(self, url: str) -> None:
        place = urlsplit(url)
        assert place.hostname is not None
        self.link = socket.create_connection((place.hostname, place.port or 80), timeout=300)
        self.kept = b""
        key = base64.b64encode(os.urandom(16)).decode()
        self.link.sendall(
            f"GET {place.path} HTTP/1.1\r\nHost: {place.netloc}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        while b"\r\n\r\n" not in self.kept:
            self.kept += self.link.recv(4096)
        head, self.kept = self.kept.split(b"\r\n\r\n", 1)
        assert b" 101 " in head.splitlines()[0], head

    def send(self, text: str) -> None:
        body, mask = text.encode(), os.urandom(4)
        size = len(body)
        # A length of 127 says that eight bytes of length follow; DevTools takes them for short messages too.
        head = bytes([0x81, 0xFF]) + struct.pack(">Q", size)
        masked = bytes(byte ^ mask[place % 4] for place, byte in enumerate(body))
        self.link.sendall(head + mask + masked)

    def receive(self) -> str:
        parts = []
        while True:
            first, second = self._read(2)
            size = second & 0x7F
            if size == 126:
                size = struct.unpack(">H", self._read(2))[0]
            elif size == 127:
                size = struct.unpack(">Q", self._read(8))[0]
            parts.append(self._read(size))
            if first & 0x80:
                return b"".join(parts).decode()

    def _read(self, size: int) -> bytes:
        while len(self.kept) < size:
            found = self.link.recv(1 << 20)
            if not found:
                raise ConnectionError("Chromium closed the connection")
            self.kept += found
        data, self.kept = self.kept[:size], self.kept[size:]
        return data

    def close(self) -> None:
        self.link.close()


class Page:
    """One tab: what it asked for, what it complained about, and what its scripts answer."""

    def __init__(self, link: Socket) -> None:
        self.link, self.last, self.session = link, 0, None
        self.requests: list[str] = []
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Performance.enable", timeDomain="threadTicks")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.last += 1
        message: dict[str, Any] = {"id": self.last, "method": method, "params": parameters}
        if self.session is not None:
            message["sessionId"] = self.session
        self.link.send(json.dumps(message))
        while True:
            found = json.loads(self.link.receive())
            if found.get("id") == self.last:
                assert "error" not in found, found
                return dict(found["result"])
            self._note(found)

    def _note(self, event: dict[str, Any]) -> None:
        name, body = event.get("method"), event.get("params", {})
        if name == "Network.requestWillBeSent":
            self.requests.append(body["request"]["url"])
        elif name == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(body["exceptionDetails"]))
        elif name == "Runtime.consoleAPICalled" and body["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(body["args"]))
        elif name == "Log.entryAdded" and body["entry"]["level"] in ("error", "warning"):
            self.complaints.append(body["entry"]["text"])

    def run(self, script: str) -> Any:
        """The value of an expression, awaited."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def milliseconds(self) -> float:
        """Processor time of the page's main thread so far: unlike the clock, it does not count the load of others."""
        metrics = self.call("Performance.getMetrics")["metrics"]
        return 1000 * float(next(one["value"] for one in metrics if one["name"] == "ThreadTime"))

    def open(self, path: Path) -> None:
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait("document.readyState === 'complete' && location.protocol === 'file:'")

    def wait(self, condition: str, seconds: float = 300.0) -> None:
        end = time.monotonic() + seconds
        while not self.run(f"!!({condition})"):
            assert time.monotonic() < end, f"still not true: {condition}"
            time.sleep(0.02)

    def resize(self, width: int, height: int, mobile: bool = False) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def prefer(self, scheme: str) -> None:
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEYS[key])

    def shot(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


KEYS = {"ArrowDown": 40, "ArrowUp": 38, "End": 35, "Home": 36, "Enter": 13, "Escape": 27, "Tab": 9}


@contextmanager
def chromium(profile: Path) -> Iterator[Page]:
    """Start Chromium with a fresh profile, yield one page, and end it."""
    found = executable()
    assert found is not None
    command = [found, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    link = None
    try:
        link = Socket(_address(profile / "DevToolsActivePort", process))
        yield Page(link)
    finally:
        if link is not None:
            link.close()
        process.terminate()
        process.wait(timeout=120)


def _address(port_file: Path, process: subprocess.Popen[bytes]) -> str:
    end = time.monotonic() + 300
    while time.monotonic() < end and process.poll() is None:
        lines = port_file.read_text().split() if port_file.exists() else []
        if len(lines) == 2:
            return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
        time.sleep(0.05)
    raise TimeoutError(f"Chromium did not open its port (exit code {process.poll()})")
