"""Run prompts through worker, shared memory, agent and MindFormers' Llama, in one prefill and alone. Print JSON.

Run under the interpreter with mindspore: kbk_grouped_prefill.py SEED
"""

from __future__ import annotations

import importlib
import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[3]
BATCH, BLOCKS, BLOCK_SIZE, LENGTH, STEPS = 8, 64, 16, 96, 6


def import_servesim() -> None:
    """Import servesim from the folders of this checkout, as a worker does."""
    sys.path.insert(0, str(ROOT / "calibrate" / "device"))
    finder = importlib.import_module("worker").PackageFinder(str(ROOT / "calibrate" / "device"))
    sys.path[0] = str(ROOT)
    sys.meta_path.insert(0, finder)


class Llama:
    """MindFormers' Llama behind the arrays of the agent. It runs prompts flattened, so the padding is left out."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.logits: list[Any] = []  # of every call

    def forward(
        self, input_ids: Any, valid_length_each_example: Any, block_tables: Any, slot_mapping: Any, prefill: bool
    ) -> Any:
        lengths = valid_length_each_example.astype(np.int32)
        if prefill:
            rows = [row[:length].astype(np.int32) for row, length in zip(input_ids, lengths)]
            slots = [row[:length] for row, length in zip(slot_mapping.reshape(input_ids.shape), lengths)]
            flat, more = np.concatenate(rows).reshape(1, -1), {"origin_inputs": rows}
            cache_slots = np.concatenate(slots)
        else:
            flat, more = input_ids[np.arange(len(lengths)), lengths - 1].astype(np.int32).reshape(-1, 1), {}
            cache_slots = slot_mapping
        call = (flat, lengths, np.ascontiguousarray(block_tables), np.ascontiguousarray(cache_slots), prefill)
        logits = self.backend._forward(*call, **more).reshape(len(lengths), -1)
        self.logits.append(logits)
        return logits


def run(
    backend: Any, prompts: dict[int, list[int]], together: bool, repaired: bool
) -> tuple[dict[int, list[Any]], dict[int, Any]]:
    """Prefill the prompts of some slots, in one call or one by one, then decode; return logits and tokens by slot."""
    from servesim.calibrate.adapter.grouped_prefill import repair

    from tests.calibrate.adapter.agent_standin import DisModel, Settings, WorkAgent, Worker
    from tests.calibrate.adapter.llm_serving_standin import EntryStatus, Schedule

    schedule = Schedule(BATCH, BLOCKS, BLOCK_SIZE, 4096, None)
    schedule.try_initialize_paddings_pa()
    settings, llama = Settings(BATCH, LENGTH, LENGTH), Llama(backend)
    worker_class, model_class = type("Worker", (Worker,), {}), type("DisModel", (DisModel,), {})
    if repaired:
        repair(worker_class, model_class)
    agent = WorkAgent(settings, llama)
    worker = worker_class(settings, model_class(agent.handle))
    agent.shms = worker.shms
    slots, entries = schedule.running_request_list, {}
    for slot, prompt in prompts.items():
        spec = {"id": str(slot), "prompt_len": len(prompt), "prompt": prompt, "max_new_tokens": 99}
        slots[slot] = entries[slot] = schedule.entry(spec)
        entries[slot].entry_data.set_decode_index(slot)
        entries[slot].entry_data.set_status(EntryStatus.RUNNING)
    groups = [list(prompts)] if together else [[slot] for slot in prompts]
    logits: dict[int, list[Any]] = {}
    for group in groups:
        answers = worker.predict(BATCH, [entries[slot] for slot in group])
        for row, (slot, (token, _)) in enumerate(zip(group, answers)):
            logits[slot] = [llama.logits[-1][row]]
            entries[slot].entry_data.tokens.append(token)
            entries[slot].is_prompt = False
    for _ in range(STEPS):
        answers = worker.predict(BATCH, slots)
        for slot, entry in entries.items():
            logits[slot].append(llama.logits[-1][slot])
            entry.entry_data.tokens.append(answers[slot][0])
    return logits, {slot: entry.entry_data.tokens for slot, entry in entries.items()}


def main(seed: int) -> None:
    import_servesim()
    from servesim.calibrate.device.backend import MODELS
    from servesim.calibrate.device.kbk.backend import KbkBackend

    rng = random.Random(seed)
    backend = KbkBackend(device="CPU", mode="pynative", threads=1)
    backend.load(MODELS["micro"], BLOCKS, BLOCK_SIZE)
    vocabulary = MODELS["micro"].vocab
    lengths = [1, 16, 17, 33, 60, 2, 31, 5]
    prompts = {slot: [rng.randrange(3, vocabulary) for _ in range(length)] for slot, length in enumerate(lengths)}
    single, single_tokens = run(backend, prompts, together=False, repaired=False)
    results = {}
    for name, repaired in (("repaired", True), ("stock", False)):
        logits, tokens = run(backend, prompts, together=True, repaired=repaired)
        results[name] = {
            "steps": sum(map(len, logits.values())),
            "error": max(difference(logits[slot], single[slot]) for slot in prompts),
            "different": [slot for slot in prompts if tokens[slot] != single_tokens[slot]],
        }
    print(json.dumps(results))


def difference(ours: list[Any], theirs: list[Any]) -> float:
    """Return the largest difference of logits, relative to the largest logit of their step."""
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(ours, theirs))


if __name__ == "__main__":
    main(int(sys.argv[1]))
