"""Run random scenarios in this interpreter and tell their results, for tests/compiled and tools/compare_builds.py.

    python -m tests.scenario_digests

Each line of the input is the number of a random scenario, which is answered with its case as JSON, or a case to run,
which is answered with its results. With `"texts": true`, they include the files. This module uses public paths of the
product only, because an older or a newer build runs it.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from servesim.config.scenario import scenario_from
from servesim.core import BadInput, Stuck
from servesim.engine import loop
from servesim.files.write import open_text
from servesim.runs.decision_log import DecisionLog
from servesim.runs.run_folder import MANIFEST, write_run
from servesim.runs.simulate import Run, simulate

from .random_scenarios import Case, numbered_case

EVERY_STEP: dict[str, Any] = {"hold": False} if "hold" in inspect.signature(simulate).parameters else {}
SECONDS = 120  # after which a scenario hangs; most take some milliseconds


def run_case(case: Case, folder: Path, observers: Sequence[Any] = ()) -> tuple[Run, Run]:
    """Run a scenario, and again with observers and a call of the policy in every step. Write the files of both runs."""
    scenario = scenario_from(case.tree)
    run = simulate(scenario, case.trace, profile=case.profile)
    write_run(run, folder / "run")
    with open_text(folder / "decisions.jsonl") as file:
        logged = simulate(scenario, case.trace, (DecisionLog(file), *observers), profile=case.profile, **EVERY_STEP)
    sort_by_replica(folder / "decisions.jsonl")
    write_run(logged, folder / "logged")
    return run, logged


def sort_by_replica(log: Path) -> None:
    """Write the decisions of each replica together: their order at different replicas is no decision."""
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    rows.sort(key=lambda row: row.get("replica", ""))
    log.write_text("".join([json.dumps({**row, "step": number}) + "\n" for number, row in enumerate(rows)]))


def files_of(folder: Path) -> dict[str, Path]:
    """Return all files of a folder; a manifest has the command and the versions, which differ."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MANIFEST)
    return {path.relative_to(folder).as_posix(): path for path in paths}


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def results_of(case: Case, with_texts: bool) -> dict[str, Any]:
    """Run a scenario and return the metrics of both runs, and digests of the other files; or its error."""
    with tempfile.TemporaryDirectory() as name:
        folder, found = Path(name), dict[str, Any]()
        try:
            run_case(case, folder)
        except Exception as error:  # an engine that is too small for the policy, or a fault: equal in both builds
            found["error"] = f"{type(error).__name__}: {error}"
            if not isinstance(error, (BadInput, Stuck)):
                found["traceback"] = traceback.format_exc().splitlines()
        files = files_of(folder)
        metrics = {key: json.loads(path.read_text()) for key, path in files.items() if path.suffix == ".json"}
        texts = {key: path.read_text() for key, path in files.items() if path.suffix != ".json"}
        found |= {"metrics": metrics, "files": {key: digest(text.encode()) for key, text in texts.items()}}
        return {**found, "texts": texts} if with_texts else found


def main() -> None:
    print(json.dumps({"engine": loop.__file__}), flush=True)
    for line in sys.stdin:
        signal.alarm(SECONDS)  # ends this process, also in compiled code
        asked = json.loads(line)
        if isinstance(asked, int):
            answer: dict[str, Any] = {"case": asdict(numbered_case(asked))}
        else:
            answer = results_of(Case(**asked["case"]), asked["texts"])
        signal.alarm(0)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
