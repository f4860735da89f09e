"""Several prompts per prefill inside the server: every token in its slot, and the decisions of the simulation."""

from __future__ import annotations

import random
from multiprocessing.shared_memory import SharedMemory
from typing import Any, Optional

import numpy as np
import pytest
from servesim.calibrate.adapter import grouped_prefill
from servesim.calibrate.adapter.grouped_prefill import MARK, repair
from servesim.core import BadInput
from servesim.policies.llm_serving import LLMServing

from .agent_standin import TOKENS, DisModel, Settings, Shm, TokenModel, WorkAgent, Worker, next_token
from .llm_serving_standin import Entry, EntryStatus, Master, Schedule, install_in
from .test_adapter_decisions import compare_with_simulation, random_settings, random_world

LENGTH = 64  # tokens of a row, and of a block table


class MasterWithAgent(Master):
    """A server whose model calls go through worker, shared memory and agent; it checks every slot after every step."""

    worker_class: type[Worker] = Worker
    model_class: type[DisModel] = DisModel
    agent_class: type[WorkAgent] = WorkAgent
    seq_length: Optional[int] = LENGTH  # None: as long as the longest prompt of the group
    log: dict[str, Any]

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(schedule)
        self.model = TokenModel(len(schedule.pool.free_blocks) + 1, schedule.block_size)
        settings = Settings(schedule.batch_size, self.seq_length, LENGTH)
        agent = self.agent_class(settings, self.model)
        self.worker = self.worker_class(settings, self.model_class(agent.handle))
        agent.shms = self.worker.shms
        self.log.update(answers={}, groups=self.model.groups)

    def _prefill(self, entries: list[Entry]) -> list[int]:
        return [token for token, _ in self.worker.predict(self.schedule.batch_size, entries)]

    _decode = _prefill

    def step(self) -> tuple[str, list[int]]:
        kind, slots = super().step()
        for entry in self.schedule.running_request_list:
            if entry.live and not entry.is_prompt:
                table, size = np.array(entry.cache_engine.block_table), entry.cache_engine.block_size
                position = np.arange(entry.cache_engine.num_token)
                cached = self.model.cache[table[position // size] * size + position % size]
                assert cached.tolist() == entry.entry_data.get_all_tokens()[: len(position)]
        return kind, slots

    def _record(self, entry: Entry, token: int) -> None:
        super()._record(entry, token)
        self.log["answers"][entry.request_id] = entry.entry_data.tokens


def repaired(**settings: Any) -> type[MasterWithAgent]:
    """Return a server with repaired classes of its own."""
    worker, model = type("Worker", (Worker,), {}), type("DisModel", (DisModel,), {})
    repair(worker, model)
    return type("Repaired", (MasterWithAgent,), {"worker_class": worker, "model_class": model, "log": {}, **settings})


def with_prompts(requests: list[dict[str, Any]], rng: random.Random) -> list[dict[str, Any]]:
    """Add prompt tokens; the server rejects prompts with the padding token 0."""
    return [{**one, "prompt": [rng.choice((1, *range(3, 40))) for _ in range(one["prompt_len"])]} for one in requests]


def answer_alone(request: dict[str, Any], count: int) -> list[int]:
    """Return the tokens of a request that has the model to itself."""
    tokens = list(request["prompt"])
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(request["prompt"]) :]


def check_answers(requests: list[dict[str, Any]], answers: dict[str, list[int]]) -> int:
    """Compare all answers with those of single requests; return the number of tokens."""
    assert set(answers) == {request["id"] for request in requests}
    for request in requests:
        assert answers[request["id"]] == answer_alone(request, request["max_new_tokens"])
    return sum(map(len, answers.values()))


@pytest.mark.parametrize("seq_length", [LENGTH, None], ids=["one padded length", "dynamic length"])
def test_decisions_and_every_token_with_8_prompts_per_prefill(seq_length: Optional[int]) -> None:
    steps = preempted = tokens = 0
    groups: list[int] = []
    for seed in range(20):
        rng = random.Random(seed)
        requests, _, blocks, size = random_world(rng)
        batch = rng.randint(2, 10)
        requests = with_prompts(requests, rng)
        server = repaired(seq_length=seq_length)
        policy = LLMServing(decode_batch=batch, prefill_batch=8)
        counts = compare_with_simulation(requests, policy, batch, blocks, size, 2, server)
        if counts[0]:  # 0: the simulation is stuck, and so is the server
            tokens += check_answers(requests, server.log["answers"])
        steps, preempted = steps + counts[0], preempted + counts[1]
        groups += server.log["groups"]
    assert steps > 700
    assert preempted > 35
    assert tokens > 1400
    assert set(range(1, 9)) <= set(groups)


def test_decisions_and_every_token_with_any_settings() -> None:
    tokens = 0
    for seed in range(30):
        rng = random.Random(1000 + seed)
        requests, batch, blocks, size = random_world(rng)
        requests = with_prompts(requests, rng)
        server = repaired(seq_length=rng.choice([LENGTH, None]))
        settings = {**random_settings(rng), "prefill_batch": rng.choice([2, 3, 8])}
        policy = LLMServing(decode_batch=batch, **settings)
        if compare_with_simulation(requests, policy, batch, blocks, size, 7, server)[0]:
            tokens += check_answers(requests, server.log["answers"])
    assert tokens > 2000


class RowOffsets(DisModel):
    """Sends the index of the last token with the offset of its row, as the stock server does."""

    def call(self, shms: Any, input_ids: Any, current_index: Any, *args: Any, **kwargs: Any) -> Any:
        if args[2]:  # a prefill
            current_index = current_index + np.arange(len(input_ids)) * input_ids.shape[1]
        return super().call(shms, input_ids, current_index, *args, **kwargs)


def without(left_out: str, monkeypatch: pytest.MonkeyPatch) -> type[MasterWithAgent]:
    """Return a server with all repairs except one."""
    if left_out == "tokens":
        monkeypatch.setattr(grouped_prefill, "call_agent", lambda call, shms, slots: call())
    worker, model = (
        type("Worker", (Worker,), {}),
        type("DisModel", (RowOffsets if left_out == "index" else DisModel,), {}),
    )
    repair(worker, model)
    if left_out == "lengths":
        worker._get_valid_length = staticmethod(Worker._get_valid_length)
    if left_out == "block tables":
        model._assemble_pa_full_inputs = DisModel._assemble_pa_full_inputs
    fields = {"worker_class": worker, "model_class": model, "log": {}, "seq_length": None}
    return type("PartlyRepaired", (MasterWithAgent,), fields)


def run_until_wrong(server: type[MasterWithAgent], cases: int = 60) -> None:
    for seed in range(cases):
        rng = random.Random(seed)
        requests, _, blocks, size = random_world(rng)
        requests = with_prompts(requests, rng)
        policy = LLMServing(decode_batch=10, prefill_batch=8)
        if compare_with_simulation(requests, policy, 10, blocks, size, 2, server)[0]:
            check_answers(requests, server.log["answers"])


@pytest.mark.parametrize("left_out", ["tokens", "index", "lengths", "block tables"])
def test_the_stand_in_has_every_mistake_that_is_repaired(left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_until_wrong(without("nothing", monkeypatch), 10)
    with pytest.raises((AssertionError, ValueError, IndexError)):
        run_until_wrong(without(left_out, monkeypatch))


def test_a_decode_above_a_slot_that_was_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first prefill, r0 and r1 need a block each: r2 in slot 2 is preempted, r3 in slot 3 is not."""
    requests = [
        {"id": f"r{k}", "arrival": 0.0, "prompt_len": length, "max_new_tokens": 2}
        for k, length in enumerate([4, 4, 3, 7])
    ]
    requests = with_prompts(requests, random.Random(1))
    policy, world = LLMServing(decode_batch=4, prefill_batch=2), (4, 7, 4, 2)
    server = repaired()
    assert compare_with_simulation(requests, policy, *world, server)[1] == 1
    assert server.log["groups"] == [2, 1, 1, 1]  # the third has one padding token, in slot 2
    check_answers(requests, server.log["answers"])

    monkeypatch.setattr(grouped_prefill.AgentCalls, "use_slots_below", lambda *_: None)
    server = repaired()
    compare_with_simulation(requests, policy, *world, server)
    with pytest.raises(AssertionError):
        check_answers(requests, server.log["answers"])


def grouped_call(agent_class: type[WorkAgent]) -> tuple[Any, list[int], list[int]]:
    """Run one prefill of three prompts in slots 1, 2 and 5. Return answers, tokens before and tokens after it."""
    schedule = Schedule(8, 30, 4, 4096, None)
    server = repaired(agent_class=agent_class)(schedule)
    entries = []
    for slot in (1, 2, 5):
        entry = schedule.entry({"id": str(slot), "prompt_len": slot, "prompt": [slot] * slot, "max_new_tokens": 3})
        entry.entry_data.set_decode_index(slot)
        entry.entry_data.set_status(EntryStatus.RUNNING)
        entries.append(entry)
    tokens = server.worker.shms[TOKENS].view((8,), np.int32)
    tokens[:] = range(20, 28)
    before = tokens.tolist()
    answers = server.worker.predict(8, entries)
    assert server.worker.shms[TOKENS].view((12,), np.int32)[8:].tolist() == [0] * 4
    return answers, before, tokens.tolist()


class PatchedAgent(WorkAgent):
    """An agent that writes each token of a group at its slot."""

    def do_post_sampling(
        self, outputs: Any, outputs_shm: Shm, output_logprob_shm: Shm, decode_index: list[int], prefill: bool = True
    ) -> None:
        for row, slot in enumerate(decode_index):
            super().do_post_sampling(outputs[row : row + 1], outputs_shm, output_logprob_shm, [slot])


@pytest.mark.parametrize("agent", [WorkAgent, PatchedAgent], ids=["stock agent", "patched agent"])
def test_tokens_of_a_group_are_at_their_slots_and_other_slots_keep_theirs(agent: type[WorkAgent]) -> None:
    answers, before, after = grouped_call(agent)
    expected = [next_token([slot] * slot) for slot in (1, 2, 5)]
    assert answers == [(token, float(row)) for row, token in enumerate(expected, start=1)]
    for slot, token in zip((1, 2, 5), expected):
        before[slot] = token
    assert after == before


def test_shared_memory_can_be_closed_after_a_group() -> None:
    """A view that is still open would raise BufferError when the server stops."""
    shms = [SharedMemory(create=True, size=4096) for _ in range(9)]
    try:

        def write_as_the_stock_agent() -> Any:
            for slot in (1, 3):
                shms[5].buf[4 * slot : 4 * slot + 8] = np.array([7, 8], np.int32).tobytes()
                shms[6].buf[8 * slot : 8 * slot + 16] = np.array([0.5, 0.25]).tobytes()
            return [(7, 0.5), (7, 0.5)], 1

        assert grouped_prefill.call_agent(write_as_the_stock_agent, shms, [1, 3]) == ([(7, 0.5), (8, 0.25)], 1)
        assert np.frombuffer(bytes(shms[5].buf[:24]), np.int32).tolist() == [0, 7, 0, 8, 0, 0]
    finally:
        for shm in shms:
            shm.close()
            shm.unlink()


def test_a_failed_group_fails_all_its_prompts_and_changes_no_other_slot() -> None:
    class FailingAgent(WorkAgent):
        def do_post_sampling(self, *_: Any, **__: Any) -> None:
            raise RuntimeError("predict failed")

    answers, _, after = grouped_call(FailingAgent)
    assert answers == [(-1, 0)] * 3
    assert [token for slot, token in enumerate(after) if slot not in (1, 2, 5)] == [20, 23, 24, 26, 27]


def test_an_agent_that_writes_elsewhere_fails_the_group_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    class OtherAgent(WorkAgent):
        def do_post_sampling(self, outputs: Any, outputs_shm: Any, *_: Any, **__: Any) -> None:
            outputs_shm.view((7,), np.int32)[6:] = 9

    answers, before, after = grouped_call(OtherAgent)
    assert answers == [(-1, 0)] * 3
    assert after[6:] == before[6:]
    assert MARK not in after
    assert capsys.readouterr().err.splitlines()[-1].startswith("servesim: this agent writes the tokens of several")


def test_the_repair_is_logged_and_refuses_classes_and_settings_it_does_not_know(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule, master = type("Schedule", (Schedule,), {}), type("Master", (Master,), {})
    worker, model = type("Worker", (Worker,), {}), type("DisModel", (DisModel,), {})
    policy = LLMServing(prefill_batch=8)
    monkeypatch.setenv("SERVESIM_MULTI_PREFILL", "repair")  # the code of the stand-ins is not that of the server
    install_in(monkeypatch, policy, schedule, master, worker, model)
    assert capsys.readouterr().err == "servesim repairs prefills of several prompts: lengths, block tables, tokens\n"
    with pytest.raises(BadInput, match="adapter: AsyncMaster has no _check_prompt_predict_data_pa"):
        install_in(monkeypatch, policy, schedule, type("Other", (), {}), worker, model)
    with pytest.raises(BadInput, match="adapter: Other has no call; set prefill_batch to 1"):
        repair(worker, type("Other", (), {}))
    monkeypatch.setenv("SERVESIM_MULTI_PREFILL", "yes")
    with pytest.raises(BadInput, match="SERVESIM_MULTI_PREFILL: expected 1, repair or nothing, got 'yes'"):
        install_in(monkeypatch, policy, schedule, master, worker, model)
    monkeypatch.setenv("SERVESIM_MULTI_PREFILL", "1")  # the agent needs no repair
    untouched = type("DisModel", (DisModel,), {})
    install_in(monkeypatch, policy, schedule, master, worker, untouched)
    assert untouched.call is DisModel.call
    assert capsys.readouterr().err == ""
