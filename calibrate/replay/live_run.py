"""What came of a live run: the files of `sim run`, and beside them what was sent, decided and measured call by call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from servesim.calibrate.live.driver import TIMES
from servesim.config.scenario import Scenario
from servesim.core import Request, Stuck
from servesim.costs.device_profile import Profile
from servesim.engine.build import build_server
from servesim.engine.step import ModelCall, model_call
from servesim.runs.run_folder import DECISIONS, SENT, STEPS, write_decisions, write_run, write_sent, write_steps
from servesim.runs.simulate import Run, measure


@dataclass
class LiveRun(Run):
    """A run that was measured instead of simulated."""

    backend: Mapping[str, Any] = field(default_factory=dict)  # what ran it
    model_calls: Sequence[ModelCall] = ()
    decisions: Sequence[Mapping[str, Any]] = ()
    host: Sequence[float] = ()  # what the host adds, from the warm-up: the fields of host.Host
    stopped: bool = False  # before all was served
    extra: Mapping[str, Any] = field(default_factory=dict)  # what else was seen

    def result(self) -> dict[str, Any]:
        """Return the figures of a run, then what only a measurement knows."""
        calls = self.model_calls
        return {
            **super().result(),
            "backend": dict(self.backend),
            "host_s": sum(call.called - call.start for call in calls),
            "device_s": sum(call.end - call.called for call in calls),
            "host": list(self.host),
            "stopped": self.stopped,
            **self.extra,
        }


def live_run(scenario: Scenario, profile: Profile, requests: Sequence[Request], told: Mapping[str, Any]) -> LiveRun:
    """Return the run that the live driver told of, the requests filled in."""
    for request, (written, arrival, *times) in zip(requests, told["requests"]):
        request._written, request.arrival = written, arrival
        for name, value in zip(TIMES, times):
            setattr(request, name, value)
    server = build_server(scenario.make_policy(), scenario.engine.model_dump())
    server.computed = told["computed"]
    for seconds, seen in zip(*told["gaps"]):
        server.gaps.add(seconds, seen)
    calls = [model_call(row) for row in told["calls"]]
    stuck = Stuck(told["stuck"], [], told["end"]) if told["stuck"] else None
    return LiveRun(
        scenario=scenario,
        profile=profile,
        requests=requests,
        measures=measure(scenario, requests, server),
        server=server,
        calls=len(calls),
        busy=sum(call.end - call.start for call in calls),
        end=told["end"],
        padded_tokens=0,
        padded_rows=0,
        stuck=stuck,
        backend=told["backend"],
        model_calls=calls,
        decisions=told["decisions"],
        host=told["host"],
        stopped=told["stopped"],
        extra={"late_s": told["late"], "blocks_left": told["blocks_left"], "blocks": told["blocks"]},
    )


def write_live(run: LiveRun, folder: Path) -> None:
    """Write a live run's files."""
    write_run(run, folder)
    write_sent(run.requests, folder / SENT)
    if run.decisions:
        write_decisions(run.decisions, folder / DECISIONS)
    if run.model_calls:
        write_steps(run.model_calls, folder / STEPS)
