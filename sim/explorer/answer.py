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
        if own is None:
            return

        async def run(rate: float) -> Record:
            [record] = await self._run_at(item, [rate], own)
            return record

        rate = await find_knee(run, own)
        if rate is None:
            return
        key = next((key for key in RATE_KEYS if value_at(item.tree, key) is not None), "trace.rate")
        settings = {**self.state.settings, key: f"{rate:g}"}
        self._read(self.state.model_copy(update={"settings": settings}))
        ticks = slider_ticks(rate, whole=False)
        await self.send({"kind": "knee", "key": key, "text": settings[key], "ticks": ticks})

    async def _run_at(self, item: Shown, rates: Sequence[float], own: float) -> list[Record]:
        tasks = [self._task(item, rate=rate, rate_factor=rate / own) for rate in rates]
        return await self.runner.run(self.job, tasks, self.origin.access)

    async def _run(self, item: Shown, replications: Sequence[int]) -> list[Record]:
        tasks = [self._task(item, replication) for replication in replications]
        records = await self.runner.run(self.job, tasks, self.origin.access)
        return [checked(record, item.name) for record in records]

    def _task(self, item: Shown, replication: int = 0, **keys: Any) -> Task:
        return Task(0, replication, {key: value for key, value in item.tree.items() if value is not None}, **keys)

    async def _run_first(self) -> None:
        """Run each scenario once. The current one is sent as soon as it has ended, with those that are known."""
        first = [item for item in self.shown if not item.number or self.runner.known(self._task(item)) is not None]
        runs = [asyncio.create_task(self._run(item, [0])) for item in self.shown]
        try:
            for group in (first, [item for item in self.shown if item not in first]):
                for item in group:
                    item.runs = await runs[item.number]
                if group:
                    await self._send_picture()
        finally:
            for run in runs:
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
        shown = [item for item in self.shown if item.scenario.varies]
        further = range(1, self.state.replications)
        for item, records in zip(shown, await asyncio.gather(*(self._run(item, further) for item in shown))):
            item.runs += records
        await self._send_verdict()

    async def _run_rates(self) -> None:
        """Run all scenarios at other request rates."""
        if any(not item.own_rate for item in self.shown):
            text = "The requests have no rate: they wait for each other, or all arrive at once."
            await self.send({"kind": "rates", "charts": [], "caption": text, "loads": []})
            return
        for item in self.shown:
            item.rates[item.own_rate or 1.0] = item.runs[0]
        rates = {
            item.number: [round_rate(part * (item.own_rate or 1.0), 3) for part in RATE_FACTORS] for item in self.shown
        }
        for _ in range(1 + MAX_ROUNDS):
            await asyncio.gather(*(self._add_rates(item, rates[item.number]) for item in self.shown))
            await self.send(rates_json(self.shown, self.bounds))
            found = {
                item.number: next_rate(curve_of(item, self.bounds), sorted(item.rates), PRECISION)
                for item in self.shown
            }
            rates = {number: [] if rate is None else [rate] for number, rate in found.items()}
            if not any(rates.values()):
                break

    async def _add_rates(self, item: Shown, rates: Sequence[float]) -> None:
        """Run a scenario at other rates and keep their records."""
        item.rates.update(zip(rates, await self._run_at(item, rates, item.own_rate or 1.0)))


def checked(record: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the record of a run; raise BadInput with its error."""
    if "error" in record:
        text = str(record["error"]).removeprefix("configuration 0: ")
        raise BadInput(text if name == CURRENT else f"{name}: {text}")
    return record
