"""Small sweeps for the tests of sweep, search, compare and report; each takes at most a second."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

COSTS = {"kind": "linear", "prefill": 0.02, "prefill_token": 0.0001, "decode_step": 0.02, "decode_row": 0.0005}
LENGTHS = {"kind": "lognormal", "prompt": {"mean": 30, "sd": 20}, "output": {"mean": 20, "sd": 15}}
HELD = '''
import os
import time
from pathlib import Path
from servesim.policies.llm_serving import LLMServing

HERE = Path(__file__).parent

class Held(LLMServing):
    """While the file `hold` exists, each process stops in its 31st run: a sweep cannot end before it is killed."""

    runs = 0
    counted = False

    def decide(self, view):
        if not self.counted:
            self.counted, Held.runs = True, Held.runs + 1
        while Held.runs > 30 and (HERE / "hold").exists():
            (HERE / f"held-{os.getpid()}").touch()
            time.sleep(0.01)
        return super().decide(view)
'''
FILES = ("experiment.json", "runs.jsonl", "summary.csv", "pareto.csv", "best.yaml", "report.html")


def workload(requests: int = 40, rate: float = 4.0) -> dict[str, Any]:
    """Return a Poisson workload."""
    return {"requests": requests, "arrivals": {"kind": "poisson", "rate": rate}, "lengths": LENGTHS}


def base(**changes: Any) -> dict[str, Any]:
    """Return a scenario."""
    return {"workload": workload(), "policy": {"name": "llm-serving"}, "profile": COSTS, **changes}


def sweep_file(folder: Path, **keys: Any) -> Path:
    """Write a sweep file with two parameters; it ranks by makespan, unless `keys` say something else."""
    params = {"policy.decode_batch": [2, 4, 8], "policy.order": ["arrival", "longest-output"]}
    objectives = {} if keys.get("steady") else {"objectives": ["makespan", "mean_ttft_ms"]}
    path = folder / "sweep.yaml"
    tree = {"base": base(), "params": params, "replications": 3, **objectives, **keys}
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path


def held_sweep_file(folder: Path, **keys: Any) -> Path:
    """Write a sweep file whose runs stop, see HELD, while `folder` has a file `hold`; it has one now."""
    (folder / "own.py").write_text(HELD)
    (folder / "hold").touch()
    return sweep_file(folder, base=base(policy={"name": f"{folder / 'own.py'}:Held"}), **keys)


def held(folder: Path) -> int:
    """Return how many processes have stopped in a run."""
    return len(list(folder.glob("held-*")))


def sim(*words: Any) -> int:
    """Run a command in this process."""
    from servesim.cli import main

    return main([str(word) for word in words])


def start(*words: Any, **options: Any) -> subprocess.Popen[str]:
    """Start a command in a new process."""
    command = [sys.executable, "-m", "servesim", *map(str, words)]
    captured = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **{**captured, **options})  # type: ignore[call-overload,no-any-return]


def lines(folder: Path) -> int:
    """Return the complete lines of the journal of a sweep that may be running."""
    path = folder / "runs.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def contents(folder: Path) -> dict[str, bytes]:
    """Return the result files of an experiment."""
    return {name: (folder / name).read_bytes() for name in FILES}
