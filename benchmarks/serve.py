"""Load `catto serve` on loopback, with a stub upstream that answers in 20 ms and fails 5 % of the requests.

1. 8 clients send 100 requests per second in total, half a second straight to the upstream and half a second through the
   gateway in turn, so that other work on the machine slows both alike. The difference of the medians is the time that
   the gateway adds.
2. 200 clients send requests as fast as they can. Every request has its own word, which the reply must repeat. After a
   429, the request is sent again.
3. Three clients announce bodies of 100 MB.
4. The upstream is killed and started again.

The last line is a JSON object.

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

MODEL = "stub"
# The stub upstream: seconds per answer, share of faulty answers, and the number of requests before the first fault.
ANSWER_SECONDS = 0.02
FAULT_RATE = 0.05
REQUESTS_WITHOUT_FAULT = 20
# A status code, a connection closed without a reply, or a reply whose body is cut in half.
FAULTS = ("500", "503", "cut", "torn")

STEADY_CLIENTS = 8
STEADY_RATE = 100.0
REQUESTS_PER_TURN = 50
CROWD_CLIENTS = 200
# The steady load has one round, a turn each for upstream and gateway, per this many requests of the 200 clients.
CROWD_REQUESTS_PER_ROUND = 250
REQUEST_TIMEOUT_SECONDS = 60
RETRY_SECONDS = 0.2


# ---- the stub upstream


async def serve_stub(port: int) -> None:
    """Serve chat completions that repeat the last word of the prompt, with faults after the first requests."""
    generator = random.Random(0)
    requests = 0

    async def answer_requests(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                body = json.loads(await reader.readexactly(read_content_length(head)))
                requests += 1
                await asyncio.sleep(ANSWER_SECONDS)
                fault = ""
                if generator.random() < FAULT_RATE and requests > REQUESTS_WITHOUT_FAULT:
                    fault = generator.choice(FAULTS)
                if fault == "cut":
                    break
                writer.write(make_response(body, fault))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answer_requests, "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


def read_content_length(head: bytes) -> int:
    """Return the content length that the head of a request or response states."""
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.split()[1])
    raise ValueError(f"no content length in {head!r}")


def make_response(body: dict[str, Any], fault: str) -> bytes:
    """Return the HTTP response to a request.

    Args:
        body: The request.
        fault: A status code to fail with, `torn` for half a body, or an empty string for no fault.
    """
    if fault.isdigit():
        status = f"{fault} Fault"
        payload = b"{}"
    else:
        status = "200 OK"
        payload = make_completion(body)
    if fault == "torn":
        payload = payload[: len(payload) // 2]
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(payload)}\r\n\r\n"
    return head.encode() + payload


def make_completion(body: dict[str, Any]) -> bytes:
    """Return a chat completion that thinks the last word of the prompt and answers B."""
    words = body["messages"][-1]["content"].split() or ["nothing"]
    texts = ("<think>\n", words[-1], "\n</think>\n<answer>\n", "B", "\n</answer>")
    rivals = [{"token": letter, "logprob": -2.0} for letter in "ACD"]
    content = []
    for text in texts:
        content.append({"token": text, "logprob": -0.25, "top_logprobs": rivals if text == "B" else []})
    message = {"role": "assistant", "content": "".join(texts)}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": {"content": content}}
    usage = {"prompt_tokens": 9, "completion_tokens": len(texts)}
    return json.dumps({"model": MODEL, "object": "chat.completion", "choices": [choice], "usage": usage}).encode()


# ---- clients


class Connection:
    """A client with one connection, which is opened again if the server has closed it."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.reader: asyncio.StreamReader | None = None

    async def post(self, data: bytes) -> tuple[int, bytes]:
        """Send a request and return the status and body of the response."""
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        if self.reader is None:
            self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            self.writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            response_head = await self.reader.readuntil(b"\r\n\r\n")
            status = int(response_head.split()[1])
            return status, await self.reader.readexactly(read_content_length(response_head))
        except (asyncio.IncompleteReadError, ConnectionError):
            self.close()
            raise

    def close(self) -> None:
        """Close the connection."""
        if self.reader is not None:
            self.writer.close()
            self.reader = None


class Load:
    """Sends the requests of one phase and counts their outcomes.

    Attributes:
        port: Port of the server.
        seconds: Time of every answered request.
        statuses: Status code -> number of responses.
        lost: Number of requests without a response.
        crossed: Number of replies that repeat the word of a different request.
        torn: Number of replies that cannot be parsed.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self.seconds: list[float] = []
        self.statuses: Counter[int] = Counter()
        self.lost = 0
        self.crossed = 0
        self.torn = 0

    async def send(self, connection: Connection, word: str, *, retry: bool) -> None:
        """Send one request and check that the reply repeats its word.

        Args:
            connection: The connection of the client.
            word: The word.
            retry: Whether to send the request again after a 429.
        """
        message = {"role": "user", "content": f"Which of four? {word}"}
        data = json.dumps({"model": MODEL, "messages": [message], "max_tokens": 64}).encode()
        while True:
            start = time.perf_counter()
            try:
                status, body = await asyncio.wait_for(connection.post(data), REQUEST_TIMEOUT_SECONDS)
            except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
                self.lost += 1
                return
            self.statuses[status] += 1
            if status != 429 or not retry:
                break
            await asyncio.sleep(RETRY_SECONDS)
        if status == 200:
            try:
                text = json.loads(body)["choices"][0]["message"]["content"]
            except ValueError:
                self.torn += 1
                return
            self.seconds.append(time.perf_counter() - start)
            if f"\n{word}\n" not in text:
                self.crossed += 1

    async def run(self, clients: int, requests: int, rate: float | None = None) -> Load:
        """Send requests from several clients.

        Args:
            clients: Number of clients.
            requests: Number of requests of all clients.
            rate: Requests per second of all clients; None sends them as fast as they are answered, with retries.

        Returns:
            This object.
        """
        numbers = iter(range(requests))
        start = time.perf_counter()

        async def work() -> None:
            connection = Connection(self.port)
            for number in numbers:
                if rate is not None:
                    due = start + number / rate
                    await asyncio.sleep(max(0.0, due - time.perf_counter()))
                await self.send(connection, f"w{number}", retry=rate is None)
            connection.close()

        await asyncio.gather(*(work() for _ in range(clients)))
        return self

    def quantile_ms(self, share: float) -> float:
        """Return a quantile of the request times in milliseconds."""
        cut_points = statistics.quantiles(self.seconds, n=1000, method="inclusive")
        return 1000 * cut_points[round(1000 * share) - 1]


# ---- processes


def find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def start_stub(port: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, "--stub", str(port)])


def start_gateway(port: int, stub_port: int) -> subprocess.Popen[bytes]:
    upstream = f"http://127.0.0.1:{stub_port}/v1"
    command = [sys.executable, "-m", "catto", "serve", "--upstream", upstream, "--task", "mmlu"]
    options = ["--model", MODEL, "--port", str(port), "--concurrency", "128", "--deadline", "20"]
    return subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


async def wait_for_server(port: int) -> None:
    """Wait until a server accepts connections at a port, for at most a minute."""
    for _ in range(600):
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return
        except OSError:
            await asyncio.sleep(0.1)
    raise SystemExit(f"no server listens at port {port}")


def read_resident_mb(process: subprocess.Popen[bytes]) -> float:
    """Return the resident memory of a process in MB."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    memory_line = next(line for line in lines if line.startswith("VmRSS"))
    return int(memory_line.split()[1]) / 1024


# ---- phases


async def compare_steady_load(port: int, stub_port: int, rounds: int) -> tuple[Load, Load]:
    """Send requests at a steady rate in turn: straight to the upstream, and through the gateway."""
    direct = Load(stub_port)
    gateway = Load(port)
    for _ in range(rounds):
        await direct.run(STEADY_CLIENTS, REQUESTS_PER_TURN, rate=STEADY_RATE)
        await gateway.run(STEADY_CLIENTS, REQUESTS_PER_TURN, rate=STEADY_RATE)
    return direct, gateway


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


async def restart_upstream(port: int, stub: subprocess.Popen[bytes], stub_port: int) -> dict[str, Any]:
    """Kill the upstream under load, start it again, and time how long the gateway takes to recover."""
    load = Load(port)
    running = asyncio.ensure_future(load.run(8, 400, rate=50))
    await asyncio.sleep(1)
    stub.kill()
    stub.wait()
    await asyncio.sleep(3)
    new_stub = start_stub(stub_port)
    await wait_for_server(stub_port)
    start = time.perf_counter()
    recovery = Load(port)
    while not recovery.statuses[200]:
        await recovery.send(Connection(port), "w", retry=False)
    seconds = time.perf_counter() - start
    await running
    new_stub.send_signal(signal.SIGTERM)
    return {"outage_statuses": dict(load.statuses), "outage_lost": load.lost, "recovered_seconds": round(seconds, 2)}


async def run_benchmark(requests: int) -> None:
    """Run all phases and print their results.

    Args:
        requests: Number of requests of the 200 clients; the number in the other phases depends on it.
    """
    stub_port = find_free_port()
    port = find_free_port()
    stub = start_stub(stub_port)
    await wait_for_server(stub_port)
    gateway = start_gateway(port, stub_port)
    try:
        await wait_for_server(port)
        # Warm up, so that imports and the first connections are not timed.
        await Load(port).run(STEADY_CLIENTS, 200)
        direct, steady = await compare_steady_load(port, stub_port, rounds=requests // CROWD_REQUESTS_PER_ROUND)
        direct_text = f"direct p50 {direct.quantile_ms(0.5):.1f} ms, p99 {direct.quantile_ms(0.99):.1f}"
        print(f"{direct_text}; {dict(steady.statuses)} through the gateway")
        # Warm up again, so that every connection and buffer exists before memory is compared.
        await Load(port).run(CROWD_CLIENTS, requests // 5)
        memory_before = read_resident_mb(gateway)
        start = time.perf_counter()
        crowd = await Load(port).run(CROWD_CLIENTS, requests)
        seconds = time.perf_counter() - start
        growth = read_resident_mb(gateway) - memory_before
        print(f"200 clients: {dict(crowd.statuses)} in {seconds:.1f} s, memory {memory_before:.0f} MB + {growth:.1f}")
        huge = await send_huge_bodies(port)
        print(huge)
        outage = await restart_upstream(port, stub, stub_port)
    finally:
        for process in (gateway, stub):
            process.terminate()
            process.wait()
    measured = {
        "p50_added_ms": steady.quantile_ms(0.5) - direct.quantile_ms(0.5),
        "p99_added_ms": steady.quantile_ms(0.99) - direct.quantile_ms(0.99),
        "crowd_p50_ms": crowd.quantile_ms(0.5),
        "crowd_p99_ms": crowd.quantile_ms(0.99),
        "answers_a_second": len(crowd.seconds) / seconds,
        "memory_growth_mb": growth,
    }
    rounded = {name: round(value, 2) for name, value in measured.items()}
    print(json.dumps({**rounded, **count_outcomes(steady, crowd), **huge, **outage}))


def count_outcomes(steady: Load, crowd: Load) -> dict[str, Any]:
    """Count the outcomes of the requests that went through the gateway, and describe the machine."""
    both = (steady, crowd)
    status_5xx = 0
    for load in both:
        status_5xx += sum(load.statuses[status] for status in (500, 502, 503, 504))
    return {
        "lost": sum(load.lost + load.torn for load in both),
        "crossed": sum(load.crossed for load in both),
        "answered": sum(len(load.seconds) for load in both),
        "status_429": crowd.statuses[429],
        "status_5xx": status_5xx,
        "status_500": sum(load.statuses[500] for load in both),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=5000, help="number of requests of the 200 clients")
    parser.add_argument("--stub", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stub:
        asyncio.run(serve_stub(options.stub))
    else:
        asyncio.run(run_benchmark(options.requests))


if __name__ == "__main__":
    main()
