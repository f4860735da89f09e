"""A servesim policy inside the real scheduler of vLLM 0.32, with a pretended model.

SERVESIM_VLLM_PYTHON names the Python of an environment with vLLM (`make vllm`). Without it these tests are skipped.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import pytest
import servesim
from servesim.config.registry import make_policy

from ...policies.recordings import FOLDER, load, play, recording_names
from ...policies.test_engines_vllm import v1

Decide = Callable[..., Any]
PYTHON = os.environ.get("SERVESIM_VLLM_PYTHON")
pytestmark = pytest.mark.skipif(not PYTHON, reason="SERVESIM_VLLM_PYTHON is not set: no Python with vLLM")
NAMES = [
    name for folder in ("", "prefix", "versions") for name in recording_names("vllm-v1", folder=folder)
    if load(name).meta["version"].removeprefix("v1-") == "0.32.0"
]  # fmt: skip


@pytest.fixture(scope="module")
def decide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decide]:
    """A function that runs a recording in vLLM: steps, or the line with which the adapter refuses."""
    errors = tmp_path_factory.mktemp("vllm") / "stderr.txt"
    package = Path(servesim.__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": str(package), "VLLM_LOGGING_LEVEL": "ERROR"}
    script = str(Path(__file__).with_name("vllm_drive.py"))
    with errors.open("w") as log, subprocess.Popen(
        [str(PYTHON), script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
    ) as worker:  # fmt: skip

        def run(recorded: str, scheduler: str = "PolicyScheduler", knobs: Any = None, **policy: Any) -> Any:
            with gzip.open(FOLDER / recorded, "rt") as file:
                recording = json.load(file)
            recording["meta"]["knobs"].update(knobs or {})
            job = {"recording": recording, "scheduler": scheduler, "policy": policy}
            worker.stdin.write(json.dumps(job) + "\n")
            worker.stdin.flush()
            line = worker.stdout.readline()
            assert line, errors.read_text()[-3000:]
            return json.loads(line)

        yield run
        worker.stdin.close()


def decisions(steps: list[dict[str, Any]], caching: bool) -> list[tuple[Any, ...]]:
    """Return what two runs must have in common: time, batch, preemptions, free blocks and cached tokens."""
    return [
        (
            step["t"], sorted(row[:2] for row in step["sched"]),
            sorted(row[0] if isinstance(row, list) else row for row in step.get("preempted", [])),
            step["free_gpu"], step.get("cached", []) if caching else None,
        )
        for step in steps
    ]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_the_policy_decides_as_stock_vllm_did(decide: Decide, name: str) -> None:
    recording = load(name)
    caching = recording.knobs.get("enable_prefix_caching", False)
    steps = decide(name, name="vllm-v1")
    assert decisions(steps, caching) == decisions(recording.steps, caching)
    assert [row for step in steps for row in step["sched"]] == [
        row for step in recording.steps for row in step["sched"]
    ]


OTHERS = [
    (
        {"name": "vllm-v1", "order": "shortest-output"},
        "kv_pressure", "prefix/pressure_shared", "prefix/async_prefix_preemption",
    ),
    ({"name": "vllm-v1", "order": "longest-prompt", "max_wait": 2e5}, "chunked_kv_pressure", "prefix/async_preemption"),
    ({"name": "vllm", "delay_factor": 0.5}, "kv_pressure", "no_pressure"),
    ({"name": "vllm", "policy": "priority"}, "priority", "kv_pressure"),
    ({"name": "vllm-chunked"}, "chunked_kv_pressure", "kv_pressure"),
    ({"name": "sarathi", "chunk_size": 128}, "no_pressure"),
    ({"name": "sarathi", "chunk_size": 512}, "kv_pressure"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "name"), [(fields, name) for fields, *names in OTHERS for name in names])
def test_another_policy_decides_inside_vllm_as_in_the_simulation(
    decide: Decide, fields: dict[str, Any], name: str
) -> None:
    recording = load(f"{name}__v1-0.32.0")
    knobs, caching = recording.knobs, recording.knobs.get("enable_prefix_caching", False)
    if fields["name"] == "vllm-v1":
        policy = v1(knobs, **{key: value for key, value in fields.items() if key != "name"})
    else:
        limits = {} if fields["name"] == "sarathi" else {"max_num_batched_tokens": knobs["max_num_batched_tokens"]}
        policy = make_policy({**fields, "max_num_seqs": knobs["max_num_seqs"], **limits})
    simulated = [row for row in play(recording, policy).rows if row["sched"] or row["preempted"]]
    steps = decide(f"{name}__v1-0.32.0.json.gz", **fields)
    assert decisions(steps, caching) == decisions(simulated, caching)
    assert decisions(steps, caching) != decisions(recording.steps, caching)  # it is not stock vLLM that decides
