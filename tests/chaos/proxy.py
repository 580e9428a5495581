"""A TCP relay before a store, that breaks connections in the ways in which networks do."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any


class Proxy:
    """Relays connections on its own loopback `port` to `target`. Its methods do harm; any thread may call them."""

    def __init__(self, target: int, seed: int = 0) -> None:
        self._target = target
        self._rng = random.Random(seed)
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port: int = self._socket.getsockname()[1]
        self.cut_replies = 0
        self._to_cut = 0
        self._refusing = False
        self._pairs: list[list[asyncio.StreamWriter]] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy")

    def cut(self) -> None:
        """End all connections at once."""
        self._do(self._cut)

    def cut_in_reply(self, count: int) -> None:
        """Of the next `count` replies, pass on only the beginning, or nothing, and end the connection."""
        self._to_cut = count

    def refuse(self) -> None:
        """End all connections, and each new one."""
        self._refusing = True
        self.cut()

    def fall_silent(self) -> None:
        """Keep connections open and pass nothing on."""
        self._do(self._open.clear)

    def recover(self) -> None:
        """Do no more harm, and pass on what was held back."""
        self._refusing = False
        self._to_cut = 0
        self._do(self._open.set)

    def __enter__(self) -> Proxy:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, deed: Callable[[], Any]) -> None:
        async def now() -> None:
            deed()

        asyncio.run_coroutine_threadsafe(now(), self._loop).result()

    async def _start(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._server = await asyncio.start_server(self._relay, sock=self._socket)

    async def _stop(self) -> None:
        self._server.close()
        self._refusing = True
        self._open.set()
        self._cut()
        await asyncio.gather(*self._tasks)
        await asyncio.sleep(0)  # the transports close in the loop's next round

    def _cut(self) -> None:
        for pair in self._pairs:
            _abort(pair)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self._tasks.add(task)
        pair = [writer]
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
            pair.append(far_writer)
            self._pairs.append(pair)
            if self._refusing:
                return
            await asyncio.gather(self._pump(reader, pair, far_writer), self._pump(far_reader, pair, writer))
        except OSError:
            pass  # there is nobody at the far end
        finally:
            _abort(pair)
            if pair in self._pairs:
                self._pairs.remove(pair)
            self._tasks.discard(task)

    async def _pump(
        self, reader: asyncio.StreamReader, pair: Sequence[asyncio.StreamWriter], writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await self._open.wait()
                if self._to_cut and writer is pair[0]:
                    self._to_cut -= 1
                    self.cut_replies += 1
                    writer.write(data[: self._rng.randrange(len(data))])
                    await writer.drain()
                    break
                writer.write(data)
                await writer.drain()
        _abort(pair)


def _abort(pair: Iterable[asyncio.StreamWriter]) -> None:
    for writer in pair:
        writer.transport.abort()
