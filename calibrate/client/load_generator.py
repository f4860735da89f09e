"""An open-loop load generator: it sends each request at its time, without waiting for earlier responses.

Times are seconds since the start. Outcomes of a request: finished, refused, failed (an error inside the response),
broken (the stream ended early, or no connection), timed out, or unfinished (the run was stopped).
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Callable, Optional

from servesim.core import Request

from .protocols import Api, Event, has_named_answer, key_header

if TYPE_CHECKING:
    import aiohttp

    from .routed import RoutedServers

MAX_LINE_BYTES = 1 << 26
REPORT_INTERVAL_S = 0.5
KEEP_ALIVE_S = 2.0  # of an idle connection; vLLM closes it after 5 s, and a request at that moment would be lost
Progress = Callable[[dict[str, Any]], None]


@dataclass
class SentRequest:
    """A request and its response."""

    request: Request
    due: float
    sent_at: Optional[float] = None
    times: list[float] = field(default_factory=list)  # arrival times of its tokens
    output_tokens: Optional[int] = None  # as the server counts them
    prompt_tokens: Optional[int] = None  # as the server counts them
    ended_at: Optional[float] = None
    outcome: Optional[str] = None
    reason: Optional[str] = None
    pings: int = 0
    repeated: bool = False  # its connection was dropped before the answer
    events: Optional[list[Event]] = None  # of the response, if they are kept
    answer: Optional[list[int]] = None  # its token ids, if later prompts contain it
    url: Optional[str] = None  # that a router has chosen

    @property
    def written(self) -> int:
        return len(self.times) if self.output_tokens is None else self.output_tokens


class LoadGenerator:
    """Sends one list of requests and records the responses."""

    def __init__(
        self, url: str, api: Api, requests: Sequence[Request], timeout: float, progress: Optional[Progress] = None,
        servers: Optional[RoutedServers] = None,
    ) -> None:  # fmt: skip
        self.url = url.rstrip("/") + api.path  # of all requests, if there is no router
        self.servers = servers
        self.api = api
        self.timeout = timeout
        self.progress = progress
        self.sent_requests = [
            SentRequest(request, request.arrival, answer=[] if has_named_answer(request) else None)
            for request in requests
        ]
        self.stopped = False
        self.open = 0  # streams
        self.max_open = 0
        self._start = 0.0
        self._followers: dict[Any, list[SentRequest]] = {}
        for sent in self.sent_requests:
            if sent.request.follows is not None:
                self._followers.setdefault(sent.request.follows, []).append(sent)

    async def run(self) -> None:
        """Send all requests and wait for the last response."""
        tasks: list[asyncio.Task[None]] = []
        async with self._open_session(not self.api.closes) as session:
            with self._stop_on_interrupt(tasks):
                self._start = time.perf_counter()
                reporters = [asyncio.create_task(self._report())]
                if self.servers is not None:
                    reporters.append(asyncio.create_task(self.servers.report(session)))
                first = [sent for sent in self.sent_requests if sent.request.follows is None]
                for sent in sorted(first, key=lambda sent: sent.due):
                    await self._sleep_until(sent.due)
                    if self.stopped:
                        break
                    tasks.append(asyncio.create_task(self._with_followers(session, sent)))
                await asyncio.gather(*tasks, return_exceptions=True)
                for reporter in reporters:
                    reporter.cancel()

    def _open_session(self, keep_alive: bool) -> aiohttp.ClientSession:
        """Return a session that uses idle connections again, or one that opens a new one for each request."""
        import aiohttp

        idle: dict[str, Any] = {"keepalive_timeout": KEEP_ALIVE_S} if keep_alive else {"force_close": True}
        connector = aiohttp.TCPConnector(limit=0, **idle)
        timeout = aiohttp.ClientTimeout(total=self.timeout, sock_connect=min(60.0, self.timeout))
        return aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=1 << 20, headers=key_header())

    async def _with_followers(self, session: aiohttp.ClientSession, sent: SentRequest) -> None:
        """Send a request when it is due, then the requests that follow it."""
        await self._sleep_until(sent.due)
        await self._send(session, sent)
        followers = self._followers.pop(sent.request.id, [])
        for follower in followers:
            follower.due = self._now() + follower.request.think_time
        await asyncio.gather(*(self._with_followers(session, follower) for follower in followers))

    async def _send(self, session: aiohttp.ClientSession, sent: SentRequest) -> None:
        self.open += 1
        self.max_open = max(self.max_open, self.open)
        sent.sent_at = self._now()
        try:
            if self.servers is not None:
                sent.url = self.servers.choose(sent.request, sent.sent_at) + self.api.path
            await self._exchange_or_repeat(session, sent)
        except asyncio.TimeoutError:
            sent.outcome, sent.reason = "timed out", f"no end after {self.timeout:g} s"
        except asyncio.CancelledError:
            sent.outcome = None
            raise
        except Exception as error:  # a broken server can make aiohttp raise anything; every request gets an outcome
            sent.outcome, sent.reason = "broken", f"{type(error).__name__}: {error}"
        finally:
            self.open -= 1
            sent.ended_at = self._now()
            if self.servers is not None:
                self.servers.on_end(sent.request)

    async def _exchange_or_repeat(self, session: aiohttp.ClientSession, sent: SentRequest) -> None:
        """Post a request. If its connection is dropped before the answer, post it on a new one, and time that."""
        import aiohttp

        try:
            await self._exchange(session, sent)
        except aiohttp.ClientConnectionError as error:
            if sent.times or isinstance(error, (aiohttp.ClientConnectorError, asyncio.TimeoutError)):
                raise
            sent.repeated, sent.sent_at = True, self._now()
            async with self._open_session(keep_alive=False) as other:
                await self._exchange(other, sent)

    async def _exchange(self, session: aiohttp.ClientSession, sent: SentRequest) -> None:
        """Post a request and read its stream to the end."""
        headers = {"Connection": "close"} if self.api.closes else {}
        name = str(sent.request.id)
        if name.isascii() and name.isprintable():  # the log of a server then has the ids of the trace
            headers["X-Request-Id"] = name
        body = self.api.body(sent.request)
        async with session.post(sent.url or self.url, json=body, headers=headers) as response:
            if response.status != 200:
                text = (await response.content.read(300)).decode("utf-8", "replace")
                self.api.adapt_to(text)
                if self.api.body(sent.request) != body:
                    await self._exchange(session, sent)
                else:
                    sent.outcome, sent.reason = "refused", f"HTTP {response.status}: {' '.join(text.split())}"
                return
            complete = await self._read(response, sent)
        if sent.outcome is None:
            sent.outcome = "finished" if complete else "broken"
            sent.reason = None if complete else "the stream ended before the response was complete"
        if sent.answer and sent.request.content is not None:
            self.api.prompts.answers[sent.request.content.answer] = sent.answer

    async def _read(self, response: aiohttp.ClientResponse, sent: SentRequest) -> bool:
        """Read the lines of a stream; return whether the response was complete."""
        complete, rest = False, b""
        async for data in response.content.iter_any():
            now = self._now()
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                complete = self._read_line(line.strip(), sent, now) or complete
            if len(rest) > MAX_LINE_BYTES:
                raise ValueError(f"a line of more than {MAX_LINE_BYTES} bytes")
        return self._read_line(rest.strip(), sent, self._now()) or complete

    def _read_line(self, line: bytes, sent: SentRequest, now: float) -> bool:
        if not line:
            return False
        try:
            event = self.api.event(line)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            start = line[:80].decode("utf-8", "replace")
            raise ValueError(f"unexpected line for this API: {start!r} ({type(error).__name__})") from None
        if sent.events is not None:
            sent.events.append(event)
        if sent.answer is not None:
            sent.answer += event.token_ids or ()
        sent.pings += event.ping
        if event.error is not None:
            refused = event.error.startswith("Error20")
            sent.outcome, sent.reason = "refused" if refused else "failed", event.error
        tokens = event.tokens
        if tokens and event.output_tokens is not None:  # the server counts them: a line can have several
            tokens = event.output_tokens - len(sent.times)
        if self.servers is not None and tokens and not sent.times:
            self.servers.on_first_token(sent.request)
        sent.times += [now] * tokens
        if event.output_tokens is not None:
            sent.output_tokens = event.output_tokens
        if event.prompt_tokens is not None:
            sent.prompt_tokens = event.prompt_tokens
        return event.complete

    def _now(self) -> float:
        return time.perf_counter() - self._start

    async def _sleep_until(self, time_s: float) -> None:
        while not self.stopped and (left := time_s - self._now()) > 0:
            await asyncio.sleep(min(left, 0.2))

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORT_INTERVAL_S)
            if self.progress is not None:
                now = self._now()
                count = sum(sent.sent_at is not None for sent in self.sent_requests)
                written = sum(len(sent.times) for sent in self.sent_requests)
                state = {"t": now, "sent": count, "done": count - self.open, "open": self.open}
                self.progress({**state, "tokens_per_s": written / max(now, 1e-9)})

    @contextlib.contextmanager
    def _stop_on_interrupt(self, tasks: list[asyncio.Task[None]]) -> Any:
        """Stop the run cleanly at the first Ctrl-C."""
        loop = asyncio.get_running_loop()

        def stop() -> None:
            self.stopped = True
            loop.remove_signal_handler(signal.SIGINT)
            for task in tasks:
                task.cancel()

        with contextlib.suppress(ValueError, RuntimeError):  # not in the main thread
            loop.add_signal_handler(signal.SIGINT, stop)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGINT)


def send(
    url: str,
    api: Api,
    requests: Sequence[Request],
    timeout: float,
    progress: Optional[Progress] = None,
    keep_events: Collection[Request] = (),
    servers: Optional[RoutedServers] = None,
) -> LoadGenerator:
    """Send requests to a server, or through a router to several, and wait for all responses; keep some events."""
    raise_file_limit(len(requests))
    generator = LoadGenerator(url, api, requests, timeout, progress, servers)
    for sent in generator.sent_requests:
        sent.events = [] if sent.request in keep_events else None
    asyncio.run(generator.run())
    return generator


def raise_file_limit(streams: int) -> None:
    """Raise the limit of open files to this number of connections, as far as the system allows."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = streams + 256
    if soft != resource.RLIM_INFINITY and soft < target:
        limit = target if hard == resource.RLIM_INFINITY else min(target, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
