"""An open-loop load generator: requests are sent when they are due, whatever became of the ones before.

Times are seconds since the start. A request ends as finished, refused, failed (an error inside the answer), broken (the
stream ended early, or no connection), timed out, or unfinished (the run was stopped).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Callable, Optional

from servesim.core import BadInput, Request

from .protocols import Api

if TYPE_CHECKING:
    import aiohttp

LONGEST_LINE = 1 << 26  # bytes; a stream without an end of line is given up
PROGRESS = 0.5
Progress = Callable[[dict[str, Any]], None]


@dataclass
class Sending:
    """One request on its way and what came back."""

    request: Request
    due: float
    sent: Optional[float] = None
    times: list[float] = field(default_factory=list)  # of its tokens
    total: Optional[int] = None  # tokens, as the server counts them
    prompt: Optional[int] = None  # tokens of its prompt, as the server counts them
    end: Optional[float] = None
    outcome: Optional[str] = None
    reason: Optional[str] = None
    pings: int = 0

    @property
    def written(self) -> int:
        return len(self.times) if self.total is None else self.total


class Load:
    """A run of the generator."""

    def __init__(
        self, url: str, api: Api, requests: Sequence[Request], timeout: float, progress: Optional[Progress]
    ) -> None:
        self.url = url.rstrip("/") + api.path
        self.api = api
        self.timeout = timeout
        self.progress = progress
        self.sendings = [Sending(request, request.arrival) for request in requests]
        self.stopped = False
        self.open = 0  # streams
        self.most_open = 0
        self._start = 0.0
        self._followers: dict[Any, list[Sending]] = {}
        for sending in self.sendings:
            if sending.request.after is not None:
                self._followers.setdefault(sending.request.after, []).append(sending)

    async def run(self) -> None:
        """Send everything and wait for the last answer."""
        import aiohttp

        connector = aiohttp.TCPConnector(limit=0, force_close=self.api.closes)
        timeout = aiohttp.ClientTimeout(total=self.timeout, sock_connect=min(60.0, self.timeout))
        tasks: list[asyncio.Task[None]] = []
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=1 << 20) as session:
            with self._stopped_by_interrupt(tasks):
                self._start = time.perf_counter()
                reporter = asyncio.create_task(self._report())
                first = [sending for sending in self.sendings if sending.request.after is None]
                for sending in sorted(first, key=lambda sending: sending.due):
                    await self._until(sending.due)
                    if self.stopped:
                        break
                    tasks.append(asyncio.create_task(self._with_followers(session, sending)))
                await asyncio.gather(*tasks, return_exceptions=True)
                reporter.cancel()

    async def _with_followers(self, session: aiohttp.ClientSession, sending: Sending) -> None:
        """Send a request when it is due, then those that wait for its end."""
        await self._until(sending.due)
        await self._send(session, sending)
        followers = self._followers.pop(sending.request.id, [])
        for follower in followers:
            follower.due = self._now() + follower.request.delay
        await asyncio.gather(*(self._with_followers(session, follower) for follower in followers))

    async def _send(self, session: aiohttp.ClientSession, sending: Sending) -> None:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        sending.sent = self._now()
        try:
            await self._exchange(session, sending)
        except asyncio.TimeoutError:
            sending.outcome, sending.reason = "timed out", f"no end after {self.timeout:g} s"
        except asyncio.CancelledError:
            sending.outcome = None
            raise
        except Exception as error:  # whatever a broken server makes the library raise, the request is accounted for
            sending.outcome, sending.reason = "broken", f"{type(error).__name__}: {error}"
        finally:
            self.open -= 1
            sending.end = self._now()

    async def _exchange(self, session: aiohttp.ClientSession, sending: Sending) -> None:
        """Post a request and read its stream to the end."""
        headers = {"Connection": "close"} if self.api.closes else {}
        async with session.post(self.url, json=self.api.body(sending.request), headers=headers) as response:
            if response.status != 200:
                text = (await response.content.read(300)).decode("utf-8", "replace")
                sending.outcome, sending.reason = "refused", f"HTTP {response.status}: {' '.join(text.split())}"
                return
            over = await self._read(response, sending)
        if sending.outcome is None:
            sending.outcome = "finished" if over else "broken"
            sending.reason = None if over else "the stream ended before the answer did"

    async def _read(self, response: aiohttp.ClientResponse, sending: Sending) -> bool:
        """Read lines; return whether the answer was complete."""
        over, rest = False, b""
        async for data in response.content.iter_any():
            now = self._now()
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                over = self._line(line.strip(), sending, now) or over
            if len(rest) > LONGEST_LINE:
                raise ValueError(f"a line of more than {LONGEST_LINE} bytes")
        return self._line(rest.strip(), sending, self._now()) or over

    def _line(self, line: bytes, sending: Sending, now: float) -> bool:
        if not line:
            return False
        try:
            event = self.api.event(line)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            shown = line[:80].decode("utf-8", "replace")
            raise ValueError(f"not a line of this interface: {shown!r} ({type(error).__name__})") from None
        sending.pings += event.ping
        if event.error is not None:
            refused = event.error.startswith("Error20")
            sending.outcome, sending.reason = "refused" if refused else "failed", event.error
        sending.times += [now] * event.tokens
        if event.total is not None:
            sending.total = event.total
        if event.prompt is not None:
            sending.prompt = event.prompt
        return event.over

    def _now(self) -> float:
        return time.perf_counter() - self._start

    async def _until(self, instant: float) -> None:
        while not self.stopped and (left := instant - self._now()) > 0:
            await asyncio.sleep(min(left, 0.2))

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS)
            if self.progress is not None:
                done = sum(sending.end is not None for sending in self.sendings)
                written = sum(len(sending.times) for sending in self.sendings)
                self.progress({"t": self._now(), "done": done, "open": self.open, "written": written})

    @contextlib.contextmanager
    def _stopped_by_interrupt(self, tasks: list[asyncio.Task[None]]) -> Any:
        """Let the first Ctrl-C end the run in good order."""
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


def send(url: str, api: Api, requests: Sequence[Request], timeout: float, progress: Optional[Progress] = None) -> Load:
    """Give a load to a server and wait for its end."""
    room_for(len(requests))
    load = Load(url, api, requests, timeout, progress)
    asyncio.run(load.run())
    return load


def room_for(streams: int) -> None:
    """Let this process have so many connections open, as far as the system allows it."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = streams + 256
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def first_model(url: str) -> str:
    """Ask a server for the name of the model it serves."""
    from urllib.error import URLError
    from urllib.request import urlopen

    try:
        with urlopen(url.rstrip("/") + "/v1/models", timeout=30) as answer:
            return str(json.load(answer)["data"][0]["id"])
    except (URLError, OSError, ValueError, LookupError, TypeError) as error:
        raise BadInput(f"--url {url}: no list of models there ({error}); name one with --served-model") from None
