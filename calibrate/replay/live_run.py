"""A measured run and its files: those of `sim run`, plus sent requests, decisions and model calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from servesim.calibrate.live.driver import RESULT_FIELDS
from servesim.config.scenario import Scenario
from servesim.core import Request, Stuck
from servesim.costs.device_profile import Profile
from servesim.engine.build import build_server
from servesim.engine.step import ModelCall, model_call
from servesim.runs.run_folder import DECISIONS, SENT, STEPS, write_decisions, write_run, write_sent, write_steps
from servesim.runs.simulate import Run, measure


@dataclass
class MeasuredRun(Run):
    """A run that was measured instead of simulated."""

    backend: Mapping[str, Any] = field(default_factory=dict)  # its description
    model_calls: Sequence[ModelCall] = ()
    decisions: Sequence[Mapping[str, Any]] = ()
    host: Sequence[float] = ()  # host overhead, measured in the warm-up: the fields of host_overhead.HostOverhead
    stopped: bool = False  # before all requests were served
    extra: Mapping[str, Any] = field(default_factory=dict)  # further metrics
    settings: Mapping[str, Any] = field(default_factory=dict)  # for the manifest: what else is needed to repeat it

    def result(self) -> dict[str, Any]:
        """Return the metrics of a run, then those that only a measurement has."""
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


def run_from_result(
    scenario: Scenario, profile: Profile, requests: Sequence[Request], result: Mapping[str, Any]
) -> MeasuredRun:
    """Return a measured run from the result of the live driver; fills in the times of the requests."""
    for request, (written, arrival, *times) in zip(requests, result["requests"]):
        request._written, request.sent = written, arrival
        for name, value in zip(RESULT_FIELDS, times):
            setattr(request, name, value)
    server = build_server(scenario.make_policy(), scenario.engine.model_dump())
    server.prompt_tokens_computed = result["computed"]
    for seconds, count in zip(*result["gaps"]):
        server.token_gaps.add(seconds, count)
    calls = [model_call(row) for row in result["calls"]]
    stuck = Stuck(result["stuck"], [], result["end"]) if result["stuck"] else None
    return MeasuredRun(
        scenario=scenario,
        profile=profile,
        requests=requests,
        measures=measure(scenario, requests, server),
        server=server,
        calls=len(calls),
        busy_seconds=sum(call.end - call.start for call in calls),
        end=result["end"],
        padded_tokens=0,
        padded_rows=0,
        stuck=stuck,
        backend=result["backend"],
        model_calls=calls,
        decisions=result["decisions"],
        host=result["host"],
        stopped=result["stopped"],
        extra={"late_s": result["late"], "blocks_left": result["blocks_left"], "blocks": result["blocks"]},
    )


def write_live(run: MeasuredRun, folder: Path) -> None:
    """Write the files of a measured run."""
    write_run(run, folder, run.settings)
    write_sent(run.requests, folder / SENT)
    if run.decisions:
        write_decisions(run.decisions, folder / DECISIONS)
    if run.model_calls:
        write_steps(run.model_calls, folder / STEPS)
