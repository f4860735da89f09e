"""Run the scenarios of tests/random_scenarios.py. Print the file of the engine, then one line per scenario: its name, a
digest, and its outcomes.

    python -m tests.compiled.run_scenarios FOLDER [NAME...]

The digest is of all files that the run writes into FOLDER/NAME. With names, only these scenarios run and the files
stay. Every scenario runs with and without observers; `fault` in a line says what then differs, or does not add up.
Tests run this in compiled and in plain Python and compare the lines.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from servesim.config.scenario import scenario_from
from servesim.core import BadInput
from servesim.engine import loop
from servesim.files.write import write_json
from servesim.runs.timeline import QueueLog, Timeline

from ..random_scenarios import Case, cases
from ..run_checks import faults_of
from ..scenario_digests import digest, files_of, run_case


def outcomes_of(case: Case, folder: Path) -> str:
    """Run a scenario without and with observers. Return its outcomes as text."""
    try:
        fleet, queues = scenario_from(case.tree).fleet, QueueLog(50)
        with Timeline(folder / "timeline.json", [] if fleet is None else fleet.names) as timeline:
            run, logged = run_case(case, folder, (queues, timeline))
        write_json(folder / "queues.json", [queues.times, queues.queues])
    except (BadInput, AssertionError) as error:  # an engine that is too small for the policy
        return f"error: {error}"
    outcomes = json.dumps({**run.measures.outcomes(), "preemptions": run.result()["preemptions"]})
    faults = faults_of(run, logged)
    return f"{outcomes} {run.stuck or ''}" + (f" fault: {', '.join(faults)}" if faults else "")


def main(folder: Path, names: list[str]) -> None:
    print(loop.__file__)
    for case in cases():
        if names and case.name not in names:
            continue
        (folder / case.name).mkdir(parents=True)
        text = outcomes_of(case, folder / case.name)
        contents = (f"{name} {digest(path.read_bytes())}" for name, path in files_of(folder / case.name).items())
        print(case.name, digest("\n".join(contents).encode()), text, flush=True)
        if not names:
            shutil.rmtree(folder / case.name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
