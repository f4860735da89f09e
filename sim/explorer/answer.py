"""One answer to the page: the runs of its scenarios, and what is sent when."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from servesim.config.layers import value_at
from servesim.core import BadInput
from servesim.runs.request_rate import RATE_KEYS, rate_key_value, request_rate, round_rate
from servesim.statistics.constraints import Bound, parse_bounds
from servesim.study.rates import next_rate
from servesim.study.single_run import Record, Task

from .controls import slider_ticks
from .knee import find_knee
from .results import CURRENT, NAMES, RATE_FACTORS, Shown, curve_of, picture_json, rates_json, slo_bounds, verdict_json
from .runner import Job, Runner
from .state import Origin, PageState

PROGRESS_SECONDS = 0.25  # between two messages
SETTLE_SECONDS = 0.25  # until the curves over the rate run: a moving slider does not need them
PRECISION = 0.05  # of the highest load
MAX_ROUNDS = 8  # of runs that find it
Send = Callable[[dict[str, Any]], Awaitable[None]]


class Answer:
    """Sends the current scenario first, then the pinned ones, replications, and curves over the request rate."""

    def __init__(self, origin: Origin, runner: Runner, job: Job, state: PageState, send: Send) -> None:
        self.origin, self.runner, self.job, self.send = origin, runner, job, send
        self._read(state)

    def _read(self, state: PageState) -> None:
        """Check the scenarios and the constraints of a state."""
        self.state = state
        tree, scenario = self.origin.scenario(state)
        self.shown = [Shown(0, tree, scenario)]
        for number, pin in enumerate(state.pins, 1):
            try:
                self.shown.append(Shown(number, *self.origin.scenario(pin, like=tree)))
            except BadInput as bad:
                raise BadInput(f"{NAMES[number]}: {bad}") from None
        bounds = [line for line in state.subject_to.splitlines() if line.strip()]
        self.bounds: Sequence[Bound] = parse_bounds(bounds) if bounds else slo_bounds(scenario.slo.model_dump())

    async def run(self) -> None:
        """Send everything, with the progress in between."""
        progress = asyncio.create_task(self._send_progress())
        try:
            if self.state.at_knee:
                await self._go_to_knee()
            await self.send({"kind": "applied", "settings": self.origin.applied(self.state)})
            await self._run_first()
            await self._run_replications()
            await asyncio.sleep(SETTLE_SECONDS)
            await self._run_rates()
            await self.send({"kind": "done"})
        finally:
            progress.cancel()

    async def _send_progress(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            part = self.runner.progress(self.job)
            await self.send({"kind": "progress", "part": part, "ended": self.job.ended, "planned": self.job.planned})

    async def _go_to_knee(self) -> None:
        """Find the knee of the current scenario and run there; a load without a key for its rate stays as it is."""
        item = self.shown[0]
        own = rate_key_value(item.tree) or (request_rate(item.tree) if item.tree.get("trace") else None)
        rate = None if own is None else await find_knee(lambda rate: self._run_at(item, rate, own), own)
        if rate is None:
            return
        key = next((key for key in RATE_KEYS if value_at(item.tree, key) is not None), "trace.rate")
        settings = {**self.state.settings, key: f"{rate:g}"}
        self._read(self.state.model_copy(update={"settings": settings}))
        ticks = slider_ticks(rate, whole=False)
        await self.send({"kind": "knee", "key": key, "text": settings[key], "ticks": ticks})

    async def _run_at(self, item: Shown, rate: float, own: float) -> Record:
        return await self._run(item, rate=rate, rate_factor=rate / own)

    def _task(self, item: Shown, replication: int = 0, **keys: Any) -> Task:
        return Task(0, replication, {key: value for key, value in item.tree.items() if value is not None}, **keys)

    async def _run(self, item: Shown, **keys: Any) -> Record:
        return await self.runner.run(self.job, self._task(item, **keys), self.origin.code(item.tree))

    async def _run_first(self) -> None:
        """Run each scenario once. The current one is sent as soon as it has ended, with those that are known."""
        waiting = {}
        for item in self.shown:
            known = self.runner.known(self._task(item))
            if known is None:
                waiting[item.number] = asyncio.create_task(self._run(item))
            else:
                item.runs = [known]
        try:
            if 0 in waiting:
                self.shown[0].runs = [checked(await waiting.pop(0), CURRENT)]
            await self._send_picture()
            for number, run in waiting.items():
                self.shown[number].runs = [checked(await run, self.shown[number].name)]
            if waiting:
                await self._send_picture()
        finally:
            for run in waiting.values():
                run.cancel()

    async def _send_picture(self) -> None:
        await self.send(picture_json(self.shown))
        if len(self.shown) == 1 or (self.shown[1].runs and self.state.replications == 1):
            await self._send_verdict()

    async def _send_verdict(self) -> None:
        await self.send(verdict_json(self.shown, self.state.metric, self.bounds))

    async def _run_replications(self) -> None:
        """Run further replications of the scenarios that depend on the seed, then send the verdict with interval."""
        if self.state.replications == 1:
            return
        pairs = [
            (item, replication)
            for replication in range(1, self.state.replications)
            for item in self.shown
            if item.scenario.varies
        ]
        runs = (self._run(item, replication=replication) for item, replication in pairs)
        for (item, _), record in zip(pairs, await asyncio.gather(*runs)):
            item.runs.append(checked(record, item.name))
        await self._send_verdict()

    async def _run_rates(self) -> None:
        """Run all scenarios at other request rates."""
        if any(not item.own_rate for item in self.shown):
            text = "The requests have no rate: they wait for each other, or all arrive at once."
            await self.send({"kind": "rates", "charts": [], "caption": text, "loads": []})
            return
        for item in self.shown:
            item.rates[item.own_rate or 1.0] = item.runs[0]
        first = [(item, round_rate(part * (item.own_rate or 1.0), 3)) for item in self.shown for part in RATE_FACTORS]
        await self._add_rates(first)
        for _ in range(MAX_ROUNDS):
            pairs = [
                (item, next_rate(curve_of(item, self.bounds), sorted(item.rates), PRECISION)) for item in self.shown
            ]
            if not any(rate for _, rate in pairs):
                break
            await self._add_rates([(item, rate) for item, rate in pairs if rate is not None])

    async def _add_rates(self, pairs: Sequence[tuple[Shown, float]]) -> None:
        """Run scenarios at other rates and send all curves."""
        runs = (self._run_at(item, rate, item.own_rate or 1.0) for item, rate in pairs)
        for (item, rate), record in zip(pairs, await asyncio.gather(*runs)):
            item.rates[rate] = record
        await self.send(rates_json(self.shown, self.bounds))


def checked(record: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the record of a run; raise BadInput with its error."""
    if "error" in record:
        text = str(record["error"]).removeprefix("configuration 0: ")
        raise BadInput(text if name == CURRENT else f"{name}: {text}")
    return record
