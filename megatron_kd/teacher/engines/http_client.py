"""Requests to teacher servers: bounded in number, timed, retried with back-off, answered once.

Where a server wants a key, it is taken from the environment variable MEGATRON_KD_API_KEY.
"""

import asyncio
import itertools
import json
import os
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import aiohttp

from megatron_kd.teacher.engines.base import Document, EngineError, EngineUnavailable, Rows

API_KEY = "MEGATRON_KD_API_KEY"
_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 30.0
# Answers that may be another one later: overload, restart, a proxy that lost its server.
_TRANSIENT = frozenset({408, 409, 425, 429, 500, 502, 503, 504})

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class HttpOptions:
    """How a server is spoken to. None of it changes the rows."""

    server: tuple[str, ...] = ()
    """Base addresses, e.g. http://localhost:8000; several share the work in turn."""
    concurrency: int = 16
    """Requests under way at once, over all servers."""
    timeout_s: float = 600.0
    """For one request, from its sending to the last byte of its answer."""
    retries: int = 5
    """Further tries of a request after a lost connection, a timeout or an overload answer."""

    def __post_init__(self) -> None:
        if not self.server:
            raise EngineError(
                "this engine needs the address of its server: --server http://HOST:PORT"
            )
        for address in self.server:
            if not address.startswith(("http://", "https://")):
                raise EngineError(f"--server must begin with http:// or https://, got {address!r}")
        if self.concurrency < 1 or self.retries < 0 or self.timeout_s <= 0:
            raise EngineError(
                "concurrency must be at least 1, retries at least 0 and timeout_s positive, got "
                f"{self.concurrency}, {self.retries} and {self.timeout_s}"
            )


class TeacherClient:
    """JSON over HTTP with the rules of HttpOptions. Use inside one event loop."""

    def __init__(self, options: HttpOptions):
        self.options = options
        self._servers = itertools.cycle(address.rstrip("/") for address in options.server)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "TeacherClient":
        # From the environment: options travel in the cache's manifest, where a key must not lie.
        key = os.environ.get(API_KEY)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._session = aiohttp.ClientSession(
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=self.options.timeout_s),
            connector=aiohttp.TCPConnector(limit=self.options.concurrency),
        )
        return self

    async def __aexit__(self, *exc_info) -> None:
        await self._session.close()

    async def ask(self, path: str, body: dict | None = None, *, server: str | None = None) -> dict:
        """POSTs body to path (GET without one) and returns the JSON object of the answer.

        Each try goes to the next server, so that one lost server of several does not stop the work.

        Raises:
            EngineError: the server refused the request; its words are in the message.
            EngineUnavailable: no answer after all tries.
        """
        trouble = ""
        for attempt in range(self.options.retries + 1):
            if attempt:
                wait_s = min(_FIRST_WAIT_S * 2 ** (attempt - 1), _LONGEST_WAIT_S)
                await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
            address = f"{server or next(self._servers)}{path}"
            try:
                async with self._session.request(
                    "GET" if body is None else "POST", address, json=body
                ) as response:
                    payload = await response.read()
                    if response.status in _TRANSIENT:
                        trouble = f"{address} answered {response.status}: {_words(payload)}"
                        continue
                    if response.status != 200:
                        raise EngineError(
                            f"{address} answered {response.status}: {_words(payload)}"
                        )
            except (TimeoutError, aiohttp.ClientError, OSError) as error:
                trouble = f"{address}: {type(error).__name__} {error}".rstrip()
                continue
            return _json_object(payload, address)
        raise EngineUnavailable(
            f"the teacher server does not answer after {self.options.retries + 1} tries: "
            f"{trouble}. Finished shards are kept; start the server and run the same command again "
            "to go on"
        )


def run_once(options: HttpOptions, task: Callable[[TeacherClient], Awaitable[Result]]) -> Result:
    """Runs one coroutine with a client of its own."""

    async def inside():
        async with TeacherClient(options) as client:
            return await task(client)

    return asyncio.run(inside())


def stream_rows(
    options: HttpOptions,
    documents: Sequence[Document],
    rows_of: Callable[[TeacherClient, Document], Awaitable[Rows]],
) -> Iterator[tuple[int, Rows]]:
    """Asks for every document once, `concurrency` at a time, and yields (index, rows) as they come
    in.

    The first failure ends the stream and cancels what is under way; so does closing the iterator.
    """
    loop = asyncio.new_event_loop()
    waiting = iter(range(len(documents)))
    running: dict[asyncio.Task, int] = {}
    client = TeacherClient(options)
    try:
        loop.run_until_complete(client.__aenter__())
        while True:
            for index in itertools.islice(waiting, options.concurrency - len(running)):
                running[loop.create_task(rows_of(client, documents[index]))] = index
            if not running:
                return
            done, _ = loop.run_until_complete(
                asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            )
            for task in done:
                index = running.pop(task)
                yield index, task.result()
    finally:
        loop.run_until_complete(_abandon(running, client))
        loop.close()


async def _abandon(tasks: Iterable[asyncio.Task], client: TeacherClient) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await client.__aexit__()


def _json_object(payload: bytes, address: str) -> dict:
    try:
        value = json.loads(payload)
    except ValueError as error:
        raise EngineError(f"{address} did not answer with JSON: {_words(payload)}") from error
    if not isinstance(value, dict):
        raise EngineError(f"{address} did not answer with a JSON object: {_words(payload)}")
    return value


def _words(payload: bytes) -> str:
    text = payload.decode("utf-8", "replace").strip()
    return text if len(text) <= 500 else text[:500] + " …"
