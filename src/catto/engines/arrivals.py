"""An asynchronous producer as a plain iterator."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

T = TypeVar("T")
Put = Callable[[T], None]


class _End:
    """The producer is done; `error` is what it raised."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def arrivals(produce: Callable[[Put[T]], Awaitable[None]]) -> Iterator[T]:
    """Run `produce(put)` on an event loop in a thread of its own and yield what it puts, then raise what it raised.

    The thread lets it work where a loop is already running (a notebook) and while the caller writes. An iterator that
    is dropped cancels the producer.
    """
    arrived: queue.SimpleQueue[T | _End] = queue.SimpleQueue()
    started: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
    thread = threading.Thread(target=_drive, args=(produce, arrived, started), daemon=True)
    thread.start()
    cancel = started.get()
    try:
        while not isinstance(item := arrived.get(), _End):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            cancel()
        thread.join()


def _drive(
    produce: Callable[[Put[T]], Awaitable[None]],
    arrived: queue.SimpleQueue[T | _End],
    started: queue.SimpleQueue[Callable[[], object]],
) -> None:
    async def main() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        started.put(lambda: loop.call_soon_threadsafe(task.cancel))
        await produce(arrived.put)

    try:
        asyncio.run(main())
        arrived.put(_End(None))
    except BaseException as error:  # handed over to the caller's thread
        arrived.put(_End(error))
