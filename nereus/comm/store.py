"""The store that process groups meet at: one server in the driver, a client in every worker.

    client thread --request, deadline--> server loop --waits for keys--> reply, or "late"

It stands in for torch's TCPStore, which blocks beyond its time-out when a link is silently cut, deadlocks where two
threads share a client, and looks the name of every peer up, so a name server that is slow or gone stalls each
connection for seconds. Here every call has its own deadline on both ends, threads may share a client, and addresses
are never looked up. Values are bytes; nothing is executed or unpickled.
"""

import asyncio
import itertools
import socket
import struct
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from typing import NamedTuple

from torch._C._distributed_c10d import Store

from nereus.errors import GroupError

__all__ = ["KeyValueStore", "StoreServer", "connect_store", "serve_store"]

GRACE_S = 1.0
"""How much longer than a call's deadline the client waits for the server to say so."""

Fields = list[bytes]


class StoreServer(NamedTuple):
    """A running store. `handle` keeps it alive: the store ends when it is closed or dropped."""

    host: str
    port: int
    handle: "ServerHandle"


def serve_store(host: str = "127.0.0.1", *, timeout: timedelta = timedelta(seconds=30)) -> StoreServer:
    """Start the store that every group of a job meets at. Called by the driver, never on a worker."""
    handle = ServerHandle(host, timeout)
    return StoreServer(host, handle.port, handle)


def connect_store(host: str, port: int, *, timeout: timedelta) -> "KeyValueStore":
    """A client of the store; raises GroupError where none answers in time."""
    store = KeyValueStore(host, port, timeout=timeout)
    store.check([])
    return store


class ServerHandle:
    """The thread and event loop of a server."""

    def __init__(self, host: str, timeout: timedelta) -> None:
        listener = socket.create_server((host, 0), backlog=1024)
        self.port: int = listener.getsockname()[1]
        loop, stop = asyncio.new_event_loop(), asyncio.Event()
        thread = threading.Thread(target=_run, args=(loop, _Server(), listener, stop), name="store", daemon=True)
        thread.start()
        self._finalizer = weakref.finalize(self, _end, loop, stop, thread, timeout)

    def close(self) -> None:
        """End the server; clients get errors from now on."""
        self._finalizer()


def _run(loop: asyncio.AbstractEventLoop, server: "_Server", listener: socket.socket, stop: asyncio.Event) -> None:
    loop.run_until_complete(server.serve(listener, stop))
    loop.close()


def _end(loop: asyncio.AbstractEventLoop, stop: asyncio.Event, thread: threading.Thread, timeout: timedelta) -> None:
    loop.call_soon_threadsafe(stop.set)
    if thread is not threading.current_thread():
        thread.join(timeout.total_seconds())


class _Server:
    """Keys and values, and who waits for them. Lives on its event loop alone."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._changed: asyncio.Condition | None = None
        self._clients: set[asyncio.Task[None]] = set()
        self._operations: dict[bytes, Callable[[Fields], Awaitable[Fields]]] = {
            b"set": self._set,
            b"get": self._get,
            b"add": self._add,
            b"compare_set": self._compare_set,
            b"check": self._check,
            b"wait": self._wait,
            b"delete": self._delete,
            b"forget": self._forget,
            b"count": self._count,
        }

    async def serve(self, listener: socket.socket, stop: asyncio.Event) -> None:
        self._changed = asyncio.Condition()
        server = await asyncio.start_server(self._client, sock=listener)
        await stop.wait()
        server.close()
        for task in self._clients:
            task.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)
        await asyncio.sleep(0)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clients.add(task)
        try:
            while True:
                operation, deadline_ms, *arguments = _unpack(await _read_frame(reader))
                try:
                    async with asyncio.timeout(int(deadline_ms) / 1000):
                        reply = [b"ok", *await self._operations[operation](arguments)]
                except TimeoutError:
                    reply = [b"late"]
                writer.write(_pack(reply))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        except asyncio.CancelledError:
            return
        finally:
            self._clients.discard(task)
            writer.transport.abort()

    async def _change(self, key: bytes, value: bytes) -> None:
        assert self._changed is not None
        async with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    async def _set(self, arguments: Fields) -> Fields:
        for key, value in zip(arguments[::2], arguments[1::2], strict=True):
            await self._change(key, value)
        return []

    async def _get(self, keys: Fields) -> Fields:
        await self._wait(keys)
        return [self._values[key] for key in keys]

    async def _wait(self, keys: Fields) -> Fields:
        assert self._changed is not None
        async with self._changed:
            await self._changed.wait_for(lambda: all(key in self._values for key in keys))
        return []

    async def _add(self, arguments: Fields) -> Fields:
        key, amount = arguments
        total = b"%d" % (int(self._values.get(key, b"0")) + int(amount))
        await self._change(key, total)
        return [total]

    async def _compare_set(self, arguments: Fields) -> Fields:
        key, expected, desired = arguments
        if self._values.get(key, b"") == expected:
            await self._change(key, desired)
        return [self._values.get(key, expected)]

    async def _check(self, keys: Fields) -> Fields:
        return [b"%d" % all(key in self._values for key in keys)]

    async def _delete(self, keys: Fields) -> Fields:
        return [b"%d" % (self._values.pop(keys[0], None) is not None)]

    async def _forget(self, prefixes: Fields) -> Fields:
        found = [key for key in self._values if key.startswith(prefixes[0])]
        for key in found:
            del self._values[key]
        return [b"%d" % len(found)]

    async def _count(self, _: Fields) -> Fields:
        return [b"%d" % len(self._values)]


class KeyValueStore(Store):
    """A client. Any thread may call it; each call in progress has a connection of its own."""

    def __init__(self, host: str, port: int, *, timeout: timedelta) -> None:
        super().__init__()
        self.host, self.port = host, port
        self._deadline = timeout
        self._idle: list[socket.socket] = []
        weakref.finalize(self, _close_all, self._idle)

    @property
    def local_address(self) -> str:
        """The address of this machine on the network that reaches the store: peers can reach it there as well."""
        connection = self._connection(self._deadline)
        self._idle.append(connection)
        return str(connection.getsockname()[0])

    def set(self, key: str, value: str | bytes) -> None:
        self._call("set", key, value)

    def get(self, key: str) -> bytes:
        """The value of a key, waited for until the deadline."""
        return self._call("get", key)[0]

    def add(self, key: str, amount: int) -> int:
        return int(self._call("add", key, str(amount))[0])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._call("compare_set", key, expected, desired)[0]

    def check(self, keys: list[str]) -> bool:
        return self._call("check", *keys)[0] == b"1"

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return when all keys are set; the client's deadline applies where no other is given."""
        self._call("wait", *keys, deadline=timeout)

    def delete_key(self, key: str) -> bool:
        return self._call("delete", key)[0] == b"1"

    def forget(self, prefix: str) -> int:
        """Delete every key that starts so; returns how many there were."""
        return int(self._call("forget", prefix)[0])

    def num_keys(self) -> int:
        return int(self._call("count")[0])

    def has_extended_api(self) -> bool:
        return False

    def close(self) -> None:
        """Close idle connections; a later call opens new ones."""
        _close_all(self._idle)

    def _call(self, operation: str, *arguments: str | bytes, deadline: timedelta | None = None) -> Fields:
        """Ask the server; raises GroupError where it does not answer, or says that the deadline passed."""
        limit = deadline if deadline is not None else self._deadline
        what = f"store {self.host}:{self.port}"
        request = [operation.encode(), b"%d" % (limit.total_seconds() * 1000), *map(_encoded, arguments)]
        connection = self._connection(limit)
        try:
            connection.settimeout(limit.total_seconds() + GRACE_S)
            connection.sendall(_pack(request))
            status, *values = _unpack(_receive_frame(connection))
        except OSError as error:
            connection.close()
            raise GroupError(what, f"{operation} failed: {error}") from None
        self._idle.append(connection)
        if status == b"late":
            keys = ", ".join(argument for argument in arguments[:3] if isinstance(argument, str))
            raise GroupError(what, f"{operation} {keys}: not there within {limit.total_seconds():g} s")
        return values

    def _connection(self, limit: timedelta) -> socket.socket:
        try:
            return self._idle.pop()
        except IndexError:
            pass
        try:
            connection = socket.create_connection((self.host, self.port), timeout=limit.total_seconds())
        except OSError as error:
            raise GroupError(f"store {self.host}:{self.port}", f"no connection: {error}") from None
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection


def _close_all(connections: list[socket.socket]) -> None:
    while connections:
        connections.pop().close()


def _encoded(argument: str | bytes) -> bytes:
    return argument.encode() if isinstance(argument, str) else bytes(argument)


def _pack(fields: Fields) -> bytes:
    """Length of the whole, then each field behind its length."""
    body = b"".join(itertools.chain.from_iterable((struct.pack("<I", len(field)), field) for field in fields))
    return struct.pack("<I", len(body)) + body


def _unpack(body: bytes) -> Fields:
    def fields() -> Iterator[bytes]:
        at = 0
        while at < len(body):
            (size,) = struct.unpack_from("<I", body, at)
            yield body[at + 4 : at + 4 + size]
            at += 4 + size

    return list(fields())


async def _read_frame(reader: asyncio.StreamReader) -> bytes:
    (size,) = struct.unpack("<I", await reader.readexactly(4))
    return await reader.readexactly(size)


def _receive_frame(connection: socket.socket) -> bytes:
    (size,) = struct.unpack("<I", _receive(connection, 4))
    return _receive(connection, size)


def _receive(connection: socket.socket, size: int) -> bytes:
    parts: list[bytes] = []
    while size:
        part = connection.recv(size)
        if not part:
            raise ConnectionError("the store closed the connection")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
