"""Load `catto serve` on loopback in front of a stub upstream that answers in 20 ms and fails 5 % of the requests.

First 8 clients at 100 requests a second in all, straight to the upstream and through the gateway in turns of half a
second, so that other work on the machine slows both alike: the difference of the medians is what the gateway adds.
Then 200 clients as fast as they can: every request has a word of its own, which must come back; a 429 is sent again.
Then bodies of 100 MB, and an upstream that is killed and started again.
The last line is one JSON object.

    python benchmarks/serve.py --requests 5000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

ANSWER_SECONDS, FAULTS = 0.02, 0.05
MODEL = "stub"


async def serve_stub(port: int) -> None:
    """Chat completions that repeat the last word of the prompt; faults after the first 20 requests."""
    draws, count = random.Random(0), 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(
                    next(line for line in head.lower().split(b"\r\n") if b"content-length:" in line).split()[1]
                )
                body = json.loads(await reader.readexactly(length))
                count += 1
                await asyncio.sleep(ANSWER_SECONDS)
                fault = draws.choice(("500", "503", "cut", "torn")) if draws.random() < FAULTS and count > 20 else ""
                status, payload = ("200 OK", reply(body)) if not fault.isdigit() else (f"{fault} Fault", b"{}")
                if fault == "torn":
                    payload = payload[: len(payload) // 2]
                if fault == "cut":
                    break
                writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(payload)}\r\n\r\n".encode() + payload)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


def reply(body: dict[str, Any]) -> bytes:
    word = (body["messages"][-1]["content"].split() or ["nothing"])[-1]
    texts = ("<think>\n", word, "\n</think>\n<answer>\n", "B", "\n</answer>")
    rivals = [{"token": letter, "logprob": -2.0} for letter in "ACD"]
    content = [{"token": text, "logprob": -0.25, "top_logprobs": rivals if text == "B" else []} for text in texts]
    message = {"role": "assistant", "content": "".join(texts)}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": {"content": content}}
    usage = {"prompt_tokens": 9, "completion_tokens": len(texts)}
    return json.dumps({"model": MODEL, "object": "chat.completion", "choices": [choice], "usage": usage}).encode()


class Connection:
    """One client with one connection, opened again when the server closed it."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.reader: asyncio.StreamReader | None = None

    async def post(self, data: bytes) -> tuple[int, bytes]:
        """Send a request; its status and body."""
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        if self.reader is None:
            self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            self.writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            lines = (await self.reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
            length = int(next(line for line in lines if line.startswith(b"content-length:")).split()[1])
            return int(lines[0].split()[1]), await self.reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.close()
            raise

    def close(self) -> None:
        """Hang up."""
        if self.reader is not None:
            self.writer.close()
            self.reader = None


class Load:
    """What became of the requests of one phase."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.seconds: list[float] = []
        self.statuses: Counter[int] = Counter()
        self.lost = self.crossed = self.torn = 0

    async def one(self, connection: Connection, word: str, again: bool) -> None:
        """Send one request, after a 429 once more if `again`, and look for its word in the reply."""
        content = f"Which of four? {word}"
        data = json.dumps(
            {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 64}
        ).encode()
        while True:
            started = time.perf_counter()
            try:
                status, body = await asyncio.wait_for(connection.post(data), 60)
            except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
                self.lost += 1
                return
            self.statuses[status] += 1
            if status != 429 or not again:
                break
            await asyncio.sleep(0.2)
        if status == 200:
            try:
                text = json.loads(body)["choices"][0]["message"]["content"]
            except ValueError:
                self.torn += 1
                return
            self.seconds.append(time.perf_counter() - started)
            self.crossed += f"\n{word}\n" not in text

    async def run(self, clients: int, requests: int, rate: float | None = None) -> Load:
        """Send the requests, at `rate` a second in all or as fast as they are answered."""
        numbers, begun = iter(range(requests)), time.perf_counter()

        async def work() -> None:
            connection = Connection(self.port)
            for number in numbers:
                if rate is not None:
                    await asyncio.sleep(max(0.0, begun + number / rate - time.perf_counter()))
                await self.one(connection, f"w{number}", rate is None)
            connection.close()

        await asyncio.gather(*(work() for _ in range(clients)))
        return self

    def at(self, share: float) -> float:
        """A quantile in milliseconds."""
        return 1000 * statistics.quantiles(self.seconds, n=1000, method="inclusive")[round(1000 * share) - 1]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def start_stub(port: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, "--stub", str(port)])


async def wait_for(port: int) -> None:
    for _ in range(600):
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return
        except OSError:
            await asyncio.sleep(0.1)
    raise SystemExit(f"nothing listens at port {port}")


def memory(process: subprocess.Popen[bytes]) -> float:
    """Resident megabytes."""
    line = next(one for one in Path(f"/proc/{process.pid}/status").read_text().splitlines() if one.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


async def send_huge_bodies(port: int) -> dict[str, Any]:
    """Announce three bodies of 100 MB, which the gateway must refuse."""
    statuses = Counter[int]()
    for _ in range(3):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n"
        writer.write(head + bytes(100_000))
        status_line = await reader.readline() or b"x 0"
        statuses[int(status_line.split()[1])] += 1
        writer.close()
    return {"huge_refused": statuses[413]}


async def outage(port: int, stub: subprocess.Popen[bytes], stub_port: int) -> dict[str, Any]:
    """Kill the upstream under load and start it again."""
    load = Load(port)
    running = asyncio.ensure_future(load.run(8, 400, rate=50))
    await asyncio.sleep(1)
    stub.kill()
    stub.wait()
    await asyncio.sleep(3)
    again = start_stub(stub_port)
    await wait_for(stub_port)
    started, back = time.perf_counter(), Load(port)
    while not back.statuses[200]:
        await back.one(Connection(port), "w", False)
    seconds = time.perf_counter() - started
    await running
    again.send_signal(signal.SIGTERM)
    return {"outage_statuses": dict(load.statuses), "outage_lost": load.lost, "recovered_seconds": round(seconds, 2)}


async def main(requests: int) -> None:
    stub_port, port = free_port(), free_port()
    stub = start_stub(stub_port)
    await wait_for(stub_port)
    command = [
        sys.executable,
        "-m",
        "catto",
        "serve",
        "--upstream",
        f"http://127.0.0.1:{stub_port}/v1",
        "--task",
        "mmlu",
    ]
    options = ["--model", MODEL, "--port", str(port), "--concurrency", "128", "--deadline", "20"]
    gateway = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        await wait_for(port)
        await Load(port).run(8, 200)
        direct, paced = Load(stub_port), Load(port)
        for _ in range(requests // 250):
            await direct.run(8, 50, rate=100)
            await paced.run(8, 50, rate=100)
        print(
            f"direct p50 {direct.at(0.5):.1f} ms, p99 {direct.at(0.99):.1f}; {dict(paced.statuses)} through the gateway"
        )
        await Load(port).run(200, requests // 5)  # every connection and buffer exists before memory is compared
        before, started = memory(gateway), time.perf_counter()
        crowd = await Load(port).run(200, requests)
        seconds, growth = time.perf_counter() - started, memory(gateway) - before
        print(f"200 clients: {dict(crowd.statuses)} in {seconds:.1f} s, memory {before:.0f} MB + {growth:.1f}")
        huge = await send_huge_bodies(port)
        print(huge)
        failed = await outage(port, stub, stub_port)
    finally:
        for process in (gateway, stub):
            process.terminate()
            process.wait()
    numbers = {
        "p50_added_ms": paced.at(0.5) - direct.at(0.5),
        "p99_added_ms": paced.at(0.99) - direct.at(0.99),
        "crowd_p50_ms": crowd.at(0.5),
        "crowd_p99_ms": crowd.at(0.99),
        "answers_a_second": len(crowd.seconds) / seconds,
        "memory_growth_mb": growth,
    }
    counts = {
        "lost": paced.lost + paced.torn + crowd.lost + crowd.torn,
        "crossed": paced.crossed + crowd.crossed,
        "answered": len(paced.seconds) + len(crowd.seconds),
        "status_429": crowd.statuses[429],
        "status_5xx": sum(load.statuses[status] for load in (paced, crowd) for status in (500, 502, 503, 504)),
        "status_500": sum(load.statuses[500] for load in (paced, crowd)),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
    }
    print(json.dumps({**{name: round(value, 2) for name, value in numbers.items()}, **counts, **huge, **failed}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--stub", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    asyncio.run(serve_stub(given.stub) if given.stub else main(given.requests))
