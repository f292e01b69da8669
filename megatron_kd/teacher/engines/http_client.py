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
from typing import TYPE_CHECKING, TypeVar

from megatron_kd.teacher.engines.base import (
    EngineError,
    EngineOptions,
    EngineUnavailable,
    TeacherDescription,
    option,
)

if TYPE_CHECKING:
    import aiohttp

Question, Answer = TypeVar("Question"), TypeVar("Answer")
API_KEY = "MEGATRON_KD_API_KEY"
_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 30.0
# Answers that may be another one later: overload, restart, a proxy that lost its server.
_TRANSIENT = frozenset({408, 409, 425, 429, 500, 502, 503, 504})


@dataclass(frozen=True, kw_only=True)
class HttpOptions(EngineOptions):
    """How servers are spoken to. None of it changes the rows."""

    server: tuple[str, ...] = option(
        (),
        "a server's address; repeat it for several, which share the work",
        unasked=API_KEY,
        metavar="URL",
    )
    concurrency: int = option(16, "requests under way at once, over all servers", minimum=1)
    timeout_s: float = option(600.0, "seconds from sending a request to its answer's last byte")
    retries: int = option(
        5, "further tries after a lost connection, a timeout or an overload answer", minimum=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.server:
            raise EngineError(
                "this engine needs the address of its server: --server http://HOST:PORT"
            )
        for address in self.server:
            if not address.startswith(("http://", "https://")):
                raise EngineError(f"--server must begin with http:// or https://, got {address!r}")
        if self.timeout_s <= 0:
            raise EngineError(f"timeout_s must be positive, got {self.timeout_s}")


class TeacherClient:
    """JSON over HTTP with the rules of HttpOptions. Use inside one event loop."""

    def __init__(self, options: HttpOptions):
        self.options = options
        self._servers = itertools.cycle(address.rstrip("/") for address in options.server)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "TeacherClient":
        import aiohttp  # not at the top: the command line lists HttpOptions without it

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
        import aiohttp

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


def describe_servers(
    options: HttpOptions,
    describe_one: Callable[[TeacherClient, str], Awaitable[TeacherDescription]],
) -> TeacherDescription:
    """What the servers say of their teacher.

    Args:
        describe_one: Asks the server of an address.

    Raises:
        EngineError: They do not all serve the same.
    """

    async def ask_each() -> list[TeacherDescription]:
        async with TeacherClient(options) as client:
            return [await describe_one(client, server) for server in options.server]

    first, *others = asyncio.run(ask_each())
    for server, other in zip(options.server[1:], others, strict=True):
        if (other.fingerprint, other.version) != (first.fingerprint, first.version):
            raise EngineError(
                f"{server} serves {other.fingerprint} with {other.version}, {options.server[0]} "
                f"serves {first.fingerprint} with {first.version}; all servers of a capture must "
                "serve the same teacher"
            )
    return first


def stream_answers(
    options: HttpOptions,
    questions: Sequence[Question],
    answer_to: Callable[[TeacherClient, Question], Awaitable[Answer]],
) -> Iterator[tuple[int, Answer]]:
    """Asks every question once, `concurrency` at a time, and yields (index, answer) as they come
    in.

    The first failure ends the stream and cancels what is under way; so does closing the iterator.
    """
    loop = asyncio.new_event_loop()
    waiting = iter(range(len(questions)))
    running: dict[asyncio.Task, int] = {}
    client = TeacherClient(options)
    try:
        loop.run_until_complete(client.__aenter__())
        while True:
            for index in itertools.islice(waiting, options.concurrency - len(running)):
                running[loop.create_task(answer_to(client, questions[index]))] = index
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
