"""A measured run and its files: those of `sim run`, plus sent requests, decisions and model calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from servesim.calibrate.live.driver import RESULT_FIELDS
from servesim.config.scenario import Scenario
from servesim.core import Request, Stuck
from servesim.costs.device_profile import Profile
from servesim.costs.model_arithmetic import model_of
from servesim.costs.peak import known_peak, stored_peak
from servesim.engine.build import build_server
from servesim.engine.step import ModelCall, model_call
from servesim.engine.work_totals import work_from_json
from servesim.runs.device_counters import summarise, write_counters
from servesim.runs.measured_timeline import write_measured_timeline
from servesim.runs.run_folder import (
    DECISIONS,
    DEVICE,
    SENT,
    STEPS,
    TIMELINE,
    write_decisions,
    write_run,
    write_sent,
    write_steps,
)
from servesim.runs.simulate import Run, measure
from servesim.runs.utilisation import TOKENS

from .token_check import TokenCheck, check_from_worker


@dataclass
class MeasuredRun(Run):
    """A run that was measured instead of simulated."""

    backend: Mapping[str, Any] = field(default_factory=dict)  # its description
    model_calls: Sequence[ModelCall] = ()
    decisions: Sequence[Mapping[str, Any]] = ()
    host: Sequence[float] = ()  # host overhead, measured in the warm-up: the fields of host_overhead.HostOverhead
    stopped: bool = False  # before all requests were served
    extra: Mapping[str, Any] = field(default_factory=dict)  # further metrics
    token_check: Optional[TokenCheck] = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # for the manifest: what else is needed to repeat it
    counters: Optional[Mapping[str, Any]] = None  # of the device; see device_counters.py

    @property
    def about(self) -> Mapping[str, Any]:
        """Description of the device and the model: of the profile, else of the backend."""
        backend, profile = self.backend, self.profile.about
        if model_of(profile) is not None or backend.get("backend") == "fake":  # a fake backend has no model
            return profile
        return {**backend, "peak": stored_peak(known_peak(backend))}

    @property
    def device(self) -> Optional[dict[str, Any]]:
        """Means of the device counters during the run, None without samples."""
        has_samples = self.counters is not None and self.counters["samples"]
        return summarise(self.counters, self.end) if self.counters is not None and has_samples else None

    @property
    def energy(self) -> Optional[float]:
        """Joules per 1,000 generated tokens, from the measured power."""
        joules = None if self.device is None else self.device["energy_j"]
        return None if joules is None or not self.measures.outputs else TOKENS * joules / self.measures.outputs

    def result(self) -> dict[str, Any]:
        """Return the metrics of a run, then those that only a measurement has."""
        calls = self.model_calls
        return {
            **super().result(),
            "backend": dict(self.backend),
            "host_s": sum(call.called - call.start for call in calls),
            "device_s": sum(call.end - call.called for call in calls),
            "host": list(self.host),
            "device": self.device,
            "stopped": self.stopped,
            **self.extra,
            **({} if self.token_check is None else {"token_check": self.token_check.as_dict()}),
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
        work=work_from_json(result.get("work", {})),  # results of older versions have none
        counters=result.get("counters"),
        backend=result["backend"],
        model_calls=calls,
        decisions=result["decisions"],
        host=result["host"],
        stopped=result["stopped"],
        token_check=check_from_worker(result.get("token_check")),
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
    rows = run.counters["samples"] if run.counters is not None else []
    if rows:
        write_counters(rows, folder / DEVICE)
    if run.model_calls or rows:
        write_measured_timeline(run.model_calls, run.requests, rows, folder / TIMELINE)
