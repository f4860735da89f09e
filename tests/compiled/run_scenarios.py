"""Run the scenarios of tests/random_scenarios.py. Print the file of the engine, then one line per scenario: its name, a
digest, and its outcomes.

    python -m tests.compiled.run_scenarios FOLDER [NAME...]

The digest is of all files that the run writes into FOLDER/NAME. With names, only these scenarios run and the files
stay. Every scenario runs with and without fast-forward; `fault` in a line says what then differs, or does not add up.
Tests run this in compiled and in plain Python and compare the lines.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path

from servesim.config.scenario import scenario_from
from servesim.core import BadInput
from servesim.engine import loop
from servesim.files.write import open_text, write_json
from servesim.runs.decision_log import DecisionLog
from servesim.runs.run_folder import MANIFEST, write_run
from servesim.runs.simulate import simulate
from servesim.runs.timeline import QueueLog, Timeline

from ..random_scenarios import Case, cases, different_keys, wrong_states


def run_case(case: Case, folder: Path) -> str:
    """Run a scenario without and with observers, which turn fast-forward off. Return its outcomes as text."""
    try:
        scenario = scenario_from(case.tree)
        run = simulate(scenario, case.trace, profile=case.profile)
        write_run(run, folder / "run")
        queues, names = QueueLog(50), [] if scenario.fleet is None else scenario.fleet.names
        with open_text(folder / "decisions.jsonl") as file, Timeline(folder / "timeline.json", names) as timeline:
            logged = simulate(scenario, case.trace, (DecisionLog(file), queues, timeline), profile=case.profile)
        write_run(logged, folder / "logged")
        write_json(folder / "queues.json", [queues.times, queues.queues])
    except (BadInput, AssertionError) as error:  # an engine that is too small for the policy
        return f"error: {error}"
    outcomes = json.dumps({**run.measures.outcomes(), "preemptions": run.result()["preemptions"]})
    faults = [*different_keys(run, logged), *wrong_states(run), *wrong_states(logged)]
    return f"{outcomes} {run.stuck or ''}" + (f" fault: {', '.join(faults)}" if faults else "")


def digest(folder: Path) -> str:
    """Return a digest of the names and contents of all files; a manifest has the command, which differs."""
    result = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != MANIFEST:
            result.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return result.hexdigest()[:16]


def main(folder: Path, names: list[str]) -> None:
    print(loop.__file__)
    for case in cases():
        if names and case.name not in names:
            continue
        (folder / case.name).mkdir(parents=True)
        text = run_case(case, folder / case.name)
        print(case.name, digest(folder / case.name), text, flush=True)
        if not names:
            shutil.rmtree(folder / case.name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
