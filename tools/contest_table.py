"""Entries of the 2024 llm-serving contest, simulated, next to their reported results: python tools/contest_table.py

Prints the table of docs/contest.md. The reported results and the settings are in contest_entries.yaml.
tools/generate_tables.py writes the table to the page.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from servesim.config.layers import Layer, assemble
from servesim.config.scenario import Scenario, scenario_from
from servesim.core import Request
from servesim.engine.server import Server
from servesim.engine.step import Step
from servesim.runs.simulate import load_trace, simulate
from servesim.traces.make.contest import contest
from servesim.traces.trace import Trace

ENTRIES = Path(__file__).with_name("contest_entries.yaml")
REQUESTS = 1500  # of every run of the contest
SEND_OVERHEAD = 0.0032  # seconds that the real client adds to every gap
HEAD = ("team", "setting", "reported", "simulated", "error", "why it helped or not, by simulation")

Entry = dict[str, Any]
Figures = dict[str, float]


class StepTotals:
    """Counts and adds up the steps of a run by kind."""

    def __init__(self) -> None:
        self.steps: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.decode_rows = 0

    def on_step_start(self, server: Server, step: Step, arrived: list[Request]) -> None:
        pass

    def on_step_end(self, server: Server, step: Step, now: float, finished: list[Request]) -> None:
        self.steps[step.kind] += 1
        self.seconds[step.kind] += now - step.start
        self.decode_rows += step.decode_rows


def scenario_of(entry: Entry) -> Scenario:
    """Return the scenario of an entry, with the bundled profile and workload."""
    layers = {"preset": entry.get("preset", "contest-baseline")}, {"workload": {"contest": load_of(entry)}}
    return scenario_from(assemble(map(Layer, [*layers, entry.get("set", {})])))


def load_of(entry: Entry) -> dict[str, Any]:
    """Return the settings of the client."""
    return {"X": entry["X"], "T": REQUESTS / entry["X"], "send_overhead": SEND_OVERHEAD}


def requests_of(entry: Entry, scenario: Scenario) -> Trace:
    """Return the requests of a scenario; with `sort`, the client sends them by prompt plus output tokens."""
    trace = load_trace(scenario)
    if "sort" not in entry:
        return trace
    lengths = zip(trace.prompts.tolist(), trace.outputs.tolist())
    rows = sorted(lengths, key=sum, reverse=entry["sort"] == "descending")
    with TemporaryDirectory() as folder:
        file = Path(folder, "lengths.csv")
        file.write_text("prompt,output\n" + "".join(f"{prompt},{output}\n" for prompt, output in rows))
        return contest(**load_of(entry), seed=scenario.seed, lengths=file)


def figures_of(entry: Entry) -> Figures:
    """Simulate an entry and return the figures that its sentence may use."""
    scenario, totals = scenario_of(entry), StepTotals()
    run = simulate(scenario, requests_of(entry, scenario), (totals,), hold=False)
    makespan, decodes = run.measures.makespan, totals.steps["decode"]
    return {
        "makespan": makespan,
        "slots": getattr(scenario.make_policy(), "decode_batch", 0),
        "prefills": totals.steps["prefill"],
        "prefill_s": totals.seconds["prefill"],
        "prefill_share": 100 * totals.seconds["prefill"] / makespan,
        "idle": makespan - sum(totals.seconds.values()),
        "decodes": decodes,
        "decode_s": totals.seconds["decode"],
        "decode_ms": 1000 * totals.seconds["decode"] / decodes,
        "rows": totals.decode_rows / decodes,
        "preemptions": sum(request.preemptions for request in run.requests),
        "lost": REQUESTS - run.measures.outcomes().get("finished", 0),
    }


def row_of(entry: Entry, figures: dict[str, Figures]) -> list[str]:
    """Return the row of an entry."""
    own, other = figures[entry["name"]], figures.get(entry.get("than", ""), {})
    change = own["makespan"] - other.get("makespan", own["makespan"])
    values = {**own, **{f"than_{key}": value for key, value in other.items()}, "change": change, "saved": -change}
    setting = entry["setting"] + (f" (assumed: {entry['assumed']})" if "assumed" in entry else "")
    reported, error = "", ""
    simulated = f"{own['makespan']:,.1f} s" + (f", {own['lost']:.0f} lost" if own["lost"] else "")
    if "reported" in entry:
        reported = f"{entry['reported']:,.2f} s ({entry['source']})"
        error = f"{100 * (own['makespan'] / entry['reported'] - 1):+.1f} %" + (", fitted" if "fitted" in entry else "")
    elif "reported_change" in entry:
        reported = f"{entry['reported_change']:+.0f} s ({entry['source']})"
        simulated += f" ({change:+.1f} s)"
        error = f"{change - entry['reported_change']:+.1f} s"
    return [entry.get("team", "-"), setting, reported or "-", simulated, error or "-", entry["why"].format(**values)]


def contest_rows() -> list[list[str]]:
    """Simulate all entries and return the rows of the table."""
    entries: list[Entry] = yaml.safe_load(ENTRIES.read_text(encoding="utf-8"))
    figures = {entry["name"]: figures_of(entry) for entry in entries}
    return [row_of(entry, figures) for entry in entries]


if __name__ == "__main__":
    for row in (HEAD, *contest_rows()):
        print(" | ".join(row))
