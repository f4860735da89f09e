"""SGLang on random scenarios: same decisions as a reference implementation, with and without held plans."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ..conftest import seeds
from . import test_engines_sglang  # noqa: F401  it maps the engine to its policy
from .recordings import Recording, compare, head_of, load, recording_names, reproduce
from .sglang_reference import Engine, Job
from .test_vllm_reference import COST, outcome_of

VERSIONS = ("v0.4.6", "v0.5.18")


def scenario(rng: random.Random) -> tuple[list[list[Any]], dict[str, int], dict[str, Any]]:
    """Return random requests, their output limits and settings: often little memory, equal lengths or arrivals."""
    context, page = rng.choice([64, 128, 256]), rng.choice([1, 1, 1, 4, 8])
    span, grain = rng.choice([0, 50_000, 400_000, 2_000_000]), rng.choice([1, 1, 50_000])
    lengths = rng.choice([context // 4, context // 2])
    requests: list[list[Any]] = []
    limits: dict[str, int] = {}
    ignore_eos = rng.random() < 0.25
    for index in range(rng.randint(2, 40)):
        id, prompt = f"r{index:03d}", rng.randint(1, lengths)
        output = rng.choice([1, *[rng.randint(1, lengths)] * 9]) if rng.random() < 0.8 else rng.choice([2, 8, 16])
        requests.append([id, rng.randint(0, span) // grain * grain, prompt, output, 0])
        if not ignore_eos and rng.random() < 0.4:
            limits[id] = output + rng.choice([0, 3, 20, 500, 5000])
    requests.sort(key=lambda request: request[1])
    need = max(prompt + output for _, _, prompt, output, _ in requests) + 2 * page + 6
    knobs: dict[str, Any] = {
        "max_total_num_tokens": rng.choice([need, need * 2, need * 4, need * 10]),
        "context_len": context,
        "chunked_prefill_size": rng.choice([None, 2 * page, 8 * page, 64]),
        "page_size": page,
        "schedule_conservativeness": rng.choice([1.0, 1.0, 0.5, 0.1, 0.03, 0.0]),
        "schedule_policy": rng.choice(["fcfs", "fcfs", "lof"]),
        "ignore_eos": ignore_eos,
        "overlap": rng.random() < 0.6,
    }
    if rng.random() < 0.4:
        knobs["max_running_requests"] = rng.choice([1, 2, 3, 8])
    if rng.random() < 0.4:
        knobs["max_prefill_tokens"] = rng.choice([16, 64, 200])
    if rng.random() < 0.3 and knobs["chunked_prefill_size"] == 64:
        rows = knobs.get("max_running_requests", 99)
        knobs.update(enable_mixed_chunk=True, max_running_requests=min(rows, 30))
    return requests, limits, knobs


NAMES = [name for name in recording_names("sglang", folder="sglang") if "radix_cache" not in head_of(name)]


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_repeats_the_recordings(name: str) -> None:
    recording = load(name)
    jobs = [
        Job(id, t, prompt, output, recording.limits.get(id, output)) for id, t, prompt, output, _ in recording.requests
    ]
    reference = Engine(recording.meta["version"], recording.knobs, list(jobs), COST)
    reference.run()
    assert reference.rows == recording.steps
    assert [[job.id, job.first_token, job.finish, job.retractions] for job in jobs] == recording.per_request


@pytest.mark.parametrize("seed", [*seeds(20, 60), 340])
@pytest.mark.parametrize("version", VERSIONS)
def test_policy_matches_reference_implementation(version: str, seed: int) -> None:
    requests, limits, knobs = scenario(random.Random(seed))
    jobs = [Job(id, t, prompt, output, limits.get(id, output)) for id, t, prompt, output, _ in requests]
    reference = Engine(version, knobs, list(jobs), COST)
    reference.run()
    steps = [{**row, "free_after": row["free_after"] * knobs["page_size"]} for row in reference.rows]
    meta = {"engine": "sglang-scheduler", "version": version, "knobs": dict(knobs), "cost": COST}
    recording = Recording(meta, requests, steps, limits=limits)
    played = reproduce(recording)
    played.rows = played.busy_steps
    if played.stuck is not None and knobs["overlap"]:  # the log has no step that did not return
        del recording.steps[max(len(played.rows), len(steps) - 1) :]
    compare(recording, played)
    assert (reference.error or "") in str(played.stuck).replace("no request runs and no request will", "stands still")
    assert (reference.error is None) == (played.stuck is None), (reference.error, played.stuck)
    times = [(job.first_token, job.finish, job.retractions) for job in jobs]
    if reference.error is None:
        assert [outcome_of(played, job.id) for job in jobs] == times
        gaps = played.server.token_gaps  # those of a request go from its first to its last token
        gap_sum = sum(seconds * count for seconds, count in zip(gaps.seconds, gaps.counts))
        assert gap_sum == sum(job.finish - job.first_token for job in jobs)  # type: ignore[operator]
