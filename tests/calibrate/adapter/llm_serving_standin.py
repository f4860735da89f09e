"""A stand-in for llm-serving's objects, written from its specification: entries, slots, blocks, one step of its loop.

It has the names that the adapter uses in the real server, but no scheduling: the adapter adds it.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from enum import Enum, auto
from types import SimpleNamespace
from typing import Any, Optional

END_TOKEN, FAILED, ERROR = 2, -1, -202


class EntryStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED_STOPPED = auto()
    FINISHED_LENGTH_CAPPED = auto()
    PADDING_INVAILED = auto()
    INPUT_OUTOFRANGE = auto()


class MemPool:
    """Block ids: allocated from the front, freed to the end. Block 0 is always in use."""

    def __init__(self, blocks: int) -> None:
        self.free_blocks = list(range(1, blocks))
        self.used_blocks = [0]

    @property
    def num_blocks(self) -> int:
        return len(self.free_blocks)

    def take(self, count: int) -> list[int]:
        assert count <= len(self.free_blocks), "block pool is out of memory"
        taken, self.free_blocks = self.free_blocks[:count], self.free_blocks[count:]
        self.used_blocks += taken
        return taken

    def give(self, blocks: list[int]) -> None:
        for block in blocks:
            self.used_blocks.remove(block)
        self.free_blocks += blocks


class CacheEngine:
    """The blocks of an entry and the number of tokens in them."""

    def __init__(self, pool: MemPool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self.block_table: list[int] = []
        self.num_token = 0

    def prepare_cache(self, tokens: int) -> None:
        room = len(self.block_table) * self.block_size - self.num_token
        if tokens > room:
            self.block_table += self.pool.take(-(-(tokens - room) // self.block_size))
        self.num_token += tokens

    def release_cache(self) -> None:
        self.pool.give(self.block_table)
        self.block_table, self.num_token = [], 0

    def assign_null_block(self) -> None:
        self.block_table, self.num_token = [0], 1


class EntryData:
    do_sample, top_k, top_p, temperature, repetition_penalty = False, 3, 1.0, 1.0, 1.0

    def __init__(
        self, prompt: int, limit: int, eos_at: Optional[int], fail_at: Optional[int],
        prompt_tokens: Optional[list[int]] = None,
    ) -> None:  # fmt: skip
        self.prompt, self.limit, self.eos_at, self.fail_at = prompt, limit, eos_at, fail_at
        self.prompt_tokens = prompt_tokens or [1] * prompt
        self.tokens: list[int] = []
        self.status = EntryStatus.WAITING
        self.decode_index = 0

    def get_status(self) -> EntryStatus:
        return self.status

    def set_status(self, status: EntryStatus) -> None:
        self.status = status

    def set_decode_index(self, index: int) -> None:
        self.decode_index = index

    def get_all_tokens(self) -> list[int]:
        return self.prompt_tokens + self.tokens

    def get_prompt_len(self) -> int:
        return self.prompt

    def get_output_len(self) -> int:
        return len(self.tokens)

    def get_len(self) -> int:
        return self.prompt + len(self.tokens)

    def get_max_token_len(self) -> int:
        return self.limit


class Entry:
    def __init__(self, id: str, data: EntryData, cache: CacheEngine, is_prompt: bool = True) -> None:
        self.request_id = id
        self.entry_data = data
        self.cache_engine = cache
        self.is_prompt = is_prompt

    def get_entry_data(self) -> EntryData:
        return self.entry_data

    @property
    def live(self) -> bool:
        return self.entry_data.status in (EntryStatus.RUNNING, EntryStatus.INPUT_OUTOFRANGE)


class Schedule:
    """The waiting queue and the slots; the adapter fills the slots."""

    def __init__(self, batch: int, blocks: int, block_size: int, seq_length: int, max_length: Optional[int]) -> None:
        self.waiting_request_queue: deque[Entry] = deque()
        self.running_request_list: list[Entry] = []
        self.batch_size = batch
        self.max_input_len = seq_length
        self.max_generate_length = max_length
        self.pool = MemPool(blocks)
        self.block_size = block_size
        self.log: list[tuple[str, str, int]] = []  # event, request id, slot

    def entry(self, spec: dict[str, Any]) -> Entry:
        data = EntryData(
            spec["prompt_len"], spec["max_new_tokens"], spec.get("eos_at"), spec.get("fail_at"), spec.get("prompt")
        )
        return Entry(spec["id"], data, CacheEngine(self.pool, self.block_size))

    def padding(self) -> Entry:
        data = EntryData(1, 5000, None, None)
        data.status = EntryStatus.PADDING_INVAILED
        entry = Entry("PAD", data, CacheEngine(self.pool, self.block_size), is_prompt=False)
        entry.cache_engine.assign_null_block()
        return entry

    def try_initialize_paddings_pa(self) -> None:
        while len(self.running_request_list) < self.batch_size:
            self.running_request_list.append(self.padding())

    def insert_padding_entry(self, index: int) -> None:
        self.log.append(("swapped", self.running_request_list[index].request_id, index))
        self.running_request_list[index] = self.padding()

    def _insert_new_prompt_to_batch_pa(self, index: int) -> None:
        entry = self.waiting_request_queue.popleft()
        data = entry.entry_data
        out_of_range = data.prompt + data.limit >= self.max_input_len
        data.status = EntryStatus.INPUT_OUTOFRANGE if out_of_range else EntryStatus.RUNNING
        data.decode_index = index
        self.running_request_list[index] = entry
        self.log.append(("inserted", entry.request_id, index))

    def _continuous_batch_pa(self) -> None:
        raise NotImplementedError


class Master:
    """One step of the loop: fill the slots, choose the call, run it, record the tokens."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule

    @staticmethod
    def _check_prompt_predict_data_pa(entries: list[Entry]) -> tuple[list[Entry], list[int]]:
        """Return the prompt of the lowest slot: a stock server prefills one prompt per call."""
        for slot, entry in enumerate(entries):
            if entry.is_prompt and entry.entry_data.status is not EntryStatus.INPUT_OUTOFRANGE:
                return [entry], [slot]
        return [], []

    def step(self) -> tuple[str, list[int]]:
        """Return the kind of the step and the slots it ran."""
        schedule = self.schedule
        schedule.log.clear()
        schedule._continuous_batch_pa()
        slots = schedule.running_request_list
        if not any(entry.live for entry in slots):
            return "idle", []
        rejected = [
            s for s, e in enumerate(slots) if e.is_prompt and e.entry_data.status is EntryStatus.INPUT_OUTOFRANGE
        ]
        if rejected:
            for slot in rejected:
                self._record(slots[slot], ERROR)
            return "reject", rejected
        prompts, chosen = self._check_prompt_predict_data_pa(slots)
        if chosen:
            for entry, token in zip(prompts, self._prefill(prompts)):
                self._record(entry, token)
            return "prefill", chosen
        tokens = self._decode(slots)
        chosen = [slot for slot, entry in enumerate(slots) if entry.live]
        for slot in chosen:
            self._record(slots[slot], tokens[slot])
        return "decode", chosen

    def _prefill(self, entries: list[Entry]) -> list[int]:
        """Return the next tokens of some prompts; all failed if one fails."""
        for entry in entries:
            entry.cache_engine.prepare_cache(entry.entry_data.get_len())
        tokens = [self._token(entry) for entry in entries]
        return [FAILED] * len(tokens) if FAILED in tokens else tokens

    def _decode(self, entries: list[Entry]) -> list[int]:
        """Return the next tokens of all slots; all failed if one of a live slot fails."""
        live = [entry for entry in entries if entry.live]
        for entry in live:
            entry.cache_engine.prepare_cache(1)
        failed = any(self._token(entry) == FAILED for entry in live)
        return [FAILED if failed else self._token(entry) for entry in entries]

    def _token(self, entry: Entry) -> int:
        data, number = entry.entry_data, entry.entry_data.get_output_len() + 1
        if number == data.fail_at:
            return FAILED
        return END_TOKEN if number == data.eos_at else 1000 + number

    def _record(self, entry: Entry, token: int) -> None:
        data, max_length = entry.entry_data, self.schedule.max_generate_length
        entry.is_prompt = False
        data.tokens.append(token)
        too_long = max_length is not None and data.get_len() >= max_length
        if token in (END_TOKEN, FAILED):
            status = EntryStatus.FINISHED_STOPPED
        elif data.get_output_len() >= data.limit or too_long:
            status = EntryStatus.FINISHED_LENGTH_CAPPED
        elif data.status is EntryStatus.INPUT_OUTOFRANGE:
            status = EntryStatus.FINISHED_STOPPED
        else:
            return
        data.status = status
        entry.cache_engine.release_cache()
        entry.cache_engine.assign_null_block()


def install_in(
    monkeypatch: Any, policy: Any, schedule: Any, master: Any, worker: Any = None, model: Any = None
) -> None:
    """Install a policy in these classes, as in the server of this process."""
    from servesim.calibrate.adapter.llm_serving import install
    from servesim.core import field_values

    modules = {
        "schedule.schedule": {"Schedule": schedule},
        "master.master": {"AsyncMaster": master},
        "worker.worker": {"Worker": worker, "DisModel": model},
    }
    for name, classes in modules.items():
        monkeypatch.setitem(sys.modules, f"mindspore_serving.{name}", SimpleNamespace(**classes))
    monkeypatch.setenv("SERVESIM_POLICY", json.dumps(field_values(policy)))
    install()
