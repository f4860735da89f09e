"""llm-serving on random scenarios, all three strategies: the same steps as a second, plain telling of the rules."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from .llm_serving_reference import Reference
from .test_llm_serving import CASES, play, policy_of, reproduces

COSTS = [(3.0, 1.0), (0.5, 1.0), (7.0, 1.0), (0.3, 0.1), (1.0, 1.0)]


def scenario(chance: random.Random, strategy: str) -> Reference:
    """Return a server and its requests: often tight, often with ties, some out of range, some that fail."""
    size, tokens = chance.choice([1, 2, 3, 4, 8, 16]), chance.choice([20, 30, 45, 60, 90, 150])
    config = {
        "page_attention": strategy.endswith("paged"),
        "strategy": "continuous" if strategy == "paged" else strategy.partition("-")[0],
        "decode_batch": [chance.choice([1, 1, 2, 2, 3, 4, 5, 8])],
        "prefill_batch": [chance.choice([1, 2, 3, 8])],
        "num_blocks": max(3, chance.randint(tokens // size // 2, tokens // size) + 2),
        "block_size": size,
        "seq_length": [chance.choice([4096, 4096, 40, 30, 20])],
        "max_generate_length": chance.choice([None, None, None, 40, 25, 12]),
    }
    came = chance.choice([lambda: 0, lambda: chance.randint(0, 15), lambda: chance.choice([0, 0, 100, 250.5])])
    most = chance.choice([5, 10, 30])
    requests: list[dict[str, Any]] = []
    for number in range(chance.choice([1, 2, 3, 4, 6, 8, 12, 16])):
        prompt = chance.choice([chance.randint(1, most), chance.randint(1, most), max(1, size - 1), size, size + 1])
        limit = chance.choice([1, 2, chance.randint(1, 8), chance.randint(1, 30), size])
        ends = {"eos_at": chance.randint(1, limit)} if chance.random() < 0.3 else {}
        fails = {"fail_at": chance.randint(1, limit)} if chance.random() < 0.05 else {}
        asked = {"id": f"r{number}", "arrival": came(), "prompt_len": prompt, "max_new_tokens": limit}
        requests.append({**asked, **ends, **fails})
    return Reference(config, dict(zip(("prefill", "decode"), chance.choice(COSTS))), requests)


@pytest.mark.parametrize("strategy", ["paged", "continuous", "static", "static-paged"])
def test_both_tellings_take_the_same_steps(strategy: str) -> None:
    died = 0
    for seed in range(600):
        told = scenario(random.Random(f"{strategy} {seed}"), strategy)
        try:
            reproduces(told.run())
        except MemoryError:  # a static batch that the blocks do not suffice for: the real loop dies of it
            stuck = play(told.requests, policy_of(told.config), told.cost, told.config["num_blocks"],
                         told.size, max_model_len=told.longest,
                         max_generate_length=told.config["max_generate_length"])[2]  # fmt: skip
            assert stuck is not None
            assert "the serving loop is dead" in stuck
            died += 1
    assert (died > 0) == (strategy == "static-paged")


STOCK = {"page_attention": True, "strategy": "continuous", "num_blocks": 64, "block_size": 16, "seq_length": [4096],
         "max_generate_length": None}  # fmt: skip


def seen(step: dict[str, Any], paged: bool) -> dict[str, Any]:
    """Return what both say of a step: of slots and blocks nothing is recorded where there are none."""
    kept = {key: step.get(key) for key in ("t", "t_end", "kind", "admitted", "waiting", "valid")}
    moved = {key: [(entry["id"], entry["slot"]) for entry in step[key]] for key in ("swapped_out", "inserted")}
    return {**kept, **moved, "free": step["free_blocks"]} if paged else kept


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)
def test_the_second_telling_is_that_of_the_recordings(case: Path) -> None:
    recorded = json.loads(case.read_text())
    told = Reference({**STOCK, **recorded["config"]}, recorded["cost"], recorded["requests"]).run()
    paged = told["config"]["page_attention"]
    for ours, theirs in zip(told["steps"], recorded["steps"]):  # how often an idle server was looked at does not matter
        assert seen(ours, paged) == seen(theirs, paged)
    assert told["steps"][-1]["kind"] == recorded["steps"][-1]["kind"]
    assert told["finished_at"] == recorded["finished_at"]
    assert bool(told["error"]) == bool(recorded["error"])
