"""Play recordings of real engines with a servesim policy, and compare them step by step.

A recording is {meta, requests, steps, per_request} under a virtual integer clock. One tick is 1 s here, so times
compare exactly. Rules of MindIE depend on the time, so its ticks are microseconds; times are rounded to ticks.
ENGINES maps each engine to its policy.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Callable, Optional, Union

from servesim.core import FOREVER, Policy, Request, Sampling, Stuck
from servesim.core.content import content_of_pieces
from servesim.costs.linear import LinearCost
from servesim.engine.drafts import Drafts
from servesim.engine.inbox import Inbox
from servesim.engine.kv_cache import PrefixCacheStats
from servesim.engine.lock_step import LockStep
from servesim.engine.loop import Loop
from servesim.engine.prefix_cache import PrefixCache
from servesim.engine.replica import Replica
from servesim.engine.router_view import RouterTexts
from servesim.engine.rules import rules_of
from servesim.engine.server import Server
from servesim.engine.shape import runs_as_decode
from servesim.engine.simulated import SimulatedClock
from servesim.engine.step import Step, batch
from servesim.policies.mindie.round import MindIEState
from servesim.policies.sglang.policy import SGLangState
from servesim.policies.vllm_ascend.rules import BalanceRules
from servesim.policies.vllm_v1.group_cache import GroupCache
from servesim.routers.simple import RoundRobin

from ..conftest import RECORDINGS

FOLDER = RECORDINGS / "engines"

# engine -> function from the meta of a recording to the policy that must reproduce it
ENGINES: dict[str, Callable[[dict[str, Any]], Policy]] = {}


@dataclass
class Recording:
    """The decisions of a real engine for a list of requests."""

    meta: dict[str, Any]
    requests: list[list[Any]]  # id, arrival, prompt, output, priority
    steps: list[dict[str, Any]]
    # id, first token, end, preemptions; with a prefix cache also the cached tokens of all admissions
    per_request: list[list[Any]] = field(default_factory=list)
    content: dict[Any, list[list[Any]]] = field(default_factory=dict)  # id -> pieces of the prompt: name and tokens
    output_content: dict[Any, Any] = field(default_factory=dict)  # id -> name of the answer; otherwise `output:ID`
    max_tokens: dict[Any, int] = field(default_factory=dict)  # of requests that stop earlier
    prefix_cache_stats: Optional[dict[str, int]] = None
    groups: dict[Any, dict[str, Any]] = field(default_factory=dict)  # id -> the sequences of a request
    limits: dict[Any, int] = field(default_factory=dict)  # SGLang: output limits
    jobs: dict[Any, str] = field(default_factory=dict)  # vllm-ascend: id -> name of its batch job
    rank: dict[Any, int] = field(default_factory=dict)  # vllm-ascend: id -> data-parallel rank
    # speculation: id -> accepted drafts of each row with drafts, and drafts offered after each step; absent: always all
    accept: dict[Any, list[int]] = field(default_factory=dict)
    offered: dict[Any, list[int]] = field(default_factory=dict)
    spec_stats: Optional[dict[str, Any]] = None

    def __post_init__(self) -> None:
        if self.jobs:
            self.name_jobs()
        if self.knobs.get("stop_by_eos"):
            self.max_tokens = {id: self.knobs["max_model_len"] for id, *_ in self.requests}
        if self.meta.get("engine") == "sglang-scheduler":  # write it as other recordings do: in blocks
            knobs, self.max_tokens = self.knobs, self.limits
            page = knobs.get("page_size", 1)
            knobs.update(
                num_blocks=knobs["max_total_num_tokens"] // page, block_size=page, max_model_len=knobs["context_len"]
            )
            for step in self.steps:
                step["free_after"] //= page
                if "retracted" in step:
                    step["preempted"] = step.pop("retracted")
        if self.tick < 1:  # write it as other recordings do
            names = {"npuBlockNum": "num_blocks", "cacheBlockSize": "block_size", "maxSeqLen": "max_model_len"}
            names["cpuBlockNum"] = "num_cpu_blocks"
            self.knobs.update({ours: self.knobs[name] for name, ours in names.items() if name in self.knobs})
            for step in self.steps:
                step.setdefault("swap_blocks", 0)
        if self.meta.get("engine", "").startswith(("sglang", "vllm-ascend", "vllm-mindspore")):  # only hits are listed
            for step in self.steps if self.content else ():
                step["hits"] = step.pop("cached", [])
        if self.rank:  # write what the rank of a request says in its place; a rank without work has no step of ours
            self.steps = [step for step in self.steps if step["sched"] or "preempted" in step]
            for step in self.steps:
                del step["rank"]
        for step in self.steps if self.groups else ():  # write what is absent, and the batch as other recordings do
            step["sequences"] = [sequences for *_, sequences in step["sched"]]
            step["sched"] = [row[:3] for row in step["sched"]]
            step["swap_in"] = step.pop("swapped_in", [])
            step["copies"], step["swap_blocks"] = step.get("copies", 0), step.get("swap_blocks", 0)

    def name_jobs(self) -> None:
        """Write the job of a request into its id, where the engine reads it."""
        named = {id: f"#job_name[{job}]#{id}" if job else id for id, job in self.jobs.items()}
        for rows in (self.requests, self.per_request, *(step["sched"] for step in self.steps)):
            for row in rows:
                row[0] = named[row[0]]
        for step in self.steps:
            if "preempted" in step:
                step["preempted"] = [named[id] for id in step["preempted"]]

    @property
    def knobs(self) -> dict[str, Any]:
        return self.meta["knobs"]

    @property
    def tick(self) -> float:
        """Seconds of a tick."""
        return 1e-6 if "1 us" in self.meta.get("clock", "") else 1.0

    def ticks(self, seconds: Optional[float]) -> Optional[float]:
        """Return a time of a run as a recording has it."""
        return seconds if self.tick == 1 or seconds is None else round(seconds / self.tick)

    @property
    def cost(self) -> dict[str, float]:
        """The cost of a step in seconds, as fields of LinearCost."""
        names = {"base": "c0", "prefill_token": "per_prefill_token", "decode_live": "per_decode_seq"}
        names.update(swap_block="per_swap_block", draft_token="per_draft_token")
        return {field: self.meta["cost"].get(name, 0) * self.tick for field, name in names.items()}

    def answer(self, id: Any) -> Any:
        """Return the name of the text that a request generates."""
        return self.output_content.get(id, f"output:{id}")

    def pieces(self, id: Any) -> list[tuple[Any, int]]:
        """Return the prompt of a request as pieces of texts; `prompt:ID` stands for the pieces of another prompt."""
        pieces: list[tuple[Any, int]] = []
        for name, tokens in self.content[id]:
            kind, _, other = name.partition(":")
            if kind == "prompt" and other != id:
                for part, count in self.pieces(other):
                    pieces.append((part, min(count, tokens)))
                    tokens -= pieces[-1][1]
            else:
                pieces.append((self.answer(other) if kind == "output" else name, tokens))
        return [piece for piece in pieces if piece[1]]

    def sampling(self, id: Any) -> Optional[Sampling]:
        """Return the sequences of a request; None: it has one."""
        group = self.groups.get(id, {"best_of": 1})
        if group["best_of"] == 1:
            return None
        beams = self.beam_parents(id) if "beam_width" in group else None
        return Sampling(group["n"], group["best_of"], beams is not None, group.get("outputs", ()), beams)

    def beam_parents(self, id: Any) -> list[list[int]]:
        """Return the parents of the beams of a request after each token, as positions in the live beams."""
        alive, tokens = [0], []
        for step in self.steps:
            rows = [row for row in step["sched"] if row[0] == id]
            if not rows or (rows[0][2] == "P" and id not in step.get("beams", {}) and not self.samples(id, step)):
                continue
            change = step.get("beams", {}).get(id, {"alive": alive})
            parents = dict(change.get("fork", []))
            tokens.append([alive.index(parents.get(beam, beam)) for beam in change["alive"]])
            alive = change["alive"]
        return tokens

    def samples(self, id: Any, step: dict[str, Any]) -> bool:
        """Whether the prompt of a request is complete after a step."""
        before = [s for s in self.steps if s["t"] <= step["t"]]
        computed = sum(tokens for s in before for name, tokens, kind in s["sched"] if name == id and kind == "P")
        return computed >= next(prompt for name, _, prompt, *_ in self.requests if name == id)

    def make_requests(self) -> list[Request]:
        """Return the requests."""
        return [
            Request(
                id, t * self.tick, prompt, output, self.max_tokens.get(id, output), priority=level,
                content=content_of_pieces(self.pieces(id), self.answer(id)) if id in self.content else None,
                sampling=self.sampling(id),
            )
            for id, t, prompt, output, level in self.requests
        ]  # fmt: skip


@dataclass
class PlayedRun:
    """The decisions of a servesim policy for the same requests."""

    rows: list[dict[str, Any]]
    requests: dict[Any, Request]
    server: Server
    finish_time: float
    stuck: Optional[Stuck] = None

    @property
    def busy_steps(self) -> list[dict[str, Any]]:
        """The steps with a model call."""
        return [row for row in self.rows if row["sched"]]

    @property
    def preemptions(self) -> int:
        return sum(request.preemptions for request in self.requests.values())


def recording_names(*engines: str, folder: str = "") -> list[str]:
    """Return the file names of the recordings of these engines (prefixes of the engine in meta)."""
    paths = sorted(path.relative_to(FOLDER).as_posix() for path in (FOLDER / folder).glob("*.json.gz"))
    return [name for name in paths if engine_of(name).startswith(engines)]


def engine_of(name: str) -> str:
    """Return the engine of a recording."""
    return re.findall(r'"engine": ?"([^"]+)"', head_of(name))[0]


@cache
def head_of(name: str) -> str:
    """Return the first characters of a recording, with its meta: to read all recordings takes long."""
    with gzip.open(FOLDER / name, "rt") as file:
        return file.read(3000)


def load(name: str) -> Recording:
    """Return a recording by its file name, with or without the suffix."""
    with gzip.open(FOLDER / (name if name.endswith(".json.gz") else f"{name}.json.gz"), "rt") as file:
        return Recording(**json.load(file))


class StepLog:
    """Records every step in the format of a recording."""

    counts_hashes = True  # False: do not read the prefix cache, which would bring it up to date

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.row: dict[str, Any] = {}
        self.open: dict[Step, dict[str, Any]] = {}  # rows of steps that have not ended
        self.accepted: dict[Any, Iterator[int]] = {}  # accepted drafts of the next rows of a request

    def on_step_start(self, server: Server, step: Step, arrived: list[Request]) -> None:
        requests = {request.id: request for request in server.running}
        swapped_in = set(step.plan.moves.swap_in)
        decoding = {request.id for request in server.running if request.decodes}
        if server.rules.one_token_decodes or server.view.has_groups:
            decoding |= {chunk.request.id for chunk in step.chunks if runs_as_decode(chunk, server.rules)}
        self.row = {
            "t": step.decided,
            "start": step.start if step.runs_model else step.decided,
            "sched": [[id, tokens, "D" if id in decoding else "P"] for id, tokens in batch(server.running, step)],
            "cached": [[request.id, request.cached] for request, _ in step.admitted],
            "hits": [[request.id, request.cached] for request, _ in step.admitted if request.cached],
            "preempted": [[request.id, mode] for request, mode, _ in step.preempted],
            "sequences": [requests[id].sequences for id, _ in batch(server.running, step)],
            "copies": step.shared_copies,
            "swap_blocks": step.copied_blocks,
            "swap_in": [request.id for request in server.running if request in swapped_in],
            "ignored": [gone.request.id for gone in step.plan.moves.reject if gone.reason != "recomputed"],
            "recomputed": [gone.request.id for gone in step.plan.moves.reject if gone.reason == "recomputed"],
            "flushed": [request.id for request in step.plan.moves.release],
            "free_gpu": server.pool.free,
            "free_after": server.pool.free,
            "evictable": server.pool.evictable * server.pool.block_size,
            "free_cpu": server.pool.host_free,
            "seen": list(server.view.engine or ()) if type(server.rules) is BalanceRules else [],
            "waiting": [request.id for request in server.waiting],
            "running": [request.id for request in server.running],
            "swapped": [request.id for request in server.swapped],
            "spec": self.planned_drafts(server, step),
        }
        state = server.view.state
        if isinstance(state, SGLangState):
            self.row["new_token_ratio"] = state.new_token_ratio
        if isinstance(state, MindIEState):
            self.row["mode"] = state.kind
            self.row["queues"] = [len(server.waiting), len(server.running), len(server.swapped)]
            if state.feedback is not None and state.feedback.dynamic is not None:
                self.row["limits"] = [state.feedback.dynamic.seats, state.feedback.dynamic.prefill_seats]
        if isinstance(server.prefix_cache, PrefixCache) and self.counts_hashes:
            self.row["hashes"] = count_hashes(server.prefix_cache, server, step)
        if isinstance(server.prefix_cache, GroupCache):
            self.row["hashes"] = sum(map(len, server.prefix_cache.ring.names))
            tables = server.prefix_cache.tables.values()
            held = zip(*([len(cells) - cells.count(None) for cells in table.groups] for table in tables))
            self.row["held"] = list(map(sum, held)) or [0] * len(server.kv_cache_groups)
        if not server.rules.polls:
            self.open = {step: row for step, row in self.open.items() if row["sched"] or row["preempted"]}
        self.open[step] = self.row

    def planned_drafts(self, server: Server, step: Step) -> list[list[Any]]:
        """Return the rows of a step with drafts, and how many of them the recording accepts."""
        chunks = {chunk.request.id: chunk for chunk in step.chunks}
        rows: list[list[Any]] = []
        for id, tokens in batch(server.running, step) if server.drafts is not None else ():
            chunk = chunks.get(id)
            drafts = tokens - 1 if chunk is None else chunk.drafts
            if chunk is not None and drafts > chunk.request.drafts:
                rows.append([id, drafts, 0, "pad"])
            elif drafts:
                rows.append([id, drafts, min(next(self.accepted[id]), drafts)])
        return rows

    def on_step_end(self, server: Server, step: Step, now: float, finished: list[Request]) -> None:
        row = self.open.pop(step)
        row["ret"] = now if step.runs_model else None
        row["finished"] = [request.id for request in finished]
        row["used"] = server.pool.total - server.pool.free  # LightLLM records it after the step
        self.rows.append(row)


def play_drafts(recording: Recording, drafts: Drafts, log: StepLog) -> None:
    """Let a server accept and offer as many drafts as recorded."""
    accepted = {id: iter(counts) for id, counts in recording.accept.items()}
    offered = {id: iter(counts) for id, counts in recording.offered.items()}
    log.accepted = {id: iter(counts) for id, counts in recording.accept.items()}
    drafts.accept = lambda request, count: next(accepted[request.id])
    if offered:
        drafts.offer = lambda request: next(offered[request.id])


def count_hashes(cache: PrefixCache, server: Server, step: Step) -> int:
    """Return the number of different cached blocks after a decision."""
    cache.update_all(FOREVER if step.decode_rows else 0)
    cache._settle()
    nodes, blocks = [cache.tree.root], 0
    while nodes:
        node = nodes.pop()
        blocks += node.length
        nodes += node.children.values()
    blocks += sum(run.length for run in cache.free_list.runs() if run.hashed and run.node is None)
    tokens = dict(batch(server.running, step))
    for request in server.running:
        if request not in cache.holdings:  # it shares no text
            planned = tokens.get(request.id, 0)
            unknown = request.in_flight if planned else server.cohort.unknown_tokens(request)
            known = request.cached + planned - unknown
            if cache.tree.only_registered:
                told = max(0, request.length - request.in_flight - cache.unnamed)
                known = told if request.decodes else request.named
            blocks += known // server.pool.block_size
    return blocks


def empty_step(policy: Policy) -> float:
    """Return the ticks of a decision that runs no model: the recordings read a pause of an engine as one tick."""
    rules = rules_of(policy)
    return rules.empty_step if rules.polls else 1.0 if rules.empty_step else 0.0


def play(recording: Recording, policy: Optional[Policy] = None, hold: bool = False, **knobs: Any) -> PlayedRun:
    """Run the requests of a recording with its policy or another one; `knobs` override its memory settings."""
    if policy is None:
        policy = ENGINES[recording.meta["engine"]](recording.meta)
    knobs = {**recording.knobs, **knobs}
    requests = recording.make_requests()
    log = StepLog()
    clock = SimulatedClock(LinearCost(**recording.cost))
    loops = []
    for rank in range(knobs.get("ranks", 1)):
        server = Server(
            policy,
            knobs.get("num_blocks", knobs.get("max_total_token_num", 0)) + rules_of(policy).reserved_blocks,
            knobs.get("block_size", 1),
            host_blocks=knobs.get("num_cpu_blocks", 0),
            max_model_len=knobs.get("max_model_len"),
            kv_cache_groups=knobs.get("groups", ()),
        )
        if server.drafts is not None:
            play_drafts(recording, server.drafts, log)
        inbox = Inbox([request for request in requests if recording.rank.get(request.id, 0) == rank])
        observers = () if hold else (log,)
        server.rules.empty_step = empty_step(policy)
        loops.append(Loop(server, inbox, clock, observers, check=True))
    loop: Union[Loop, LockStep] = loops[0]
    if recording.rank:
        loop = LockStep([Replica(each) for each in loops], RoundRobin(), [], RouterTexts(), 0, 0.0)
    stuck = None
    try:
        loop.run()
    except Stuck as error:
        stuck = error
    for row in log.rows:
        row.update({key: recording.ticks(row[key]) for key in ("t", "start", "ret")})
    return PlayedRun(log.rows, {request.id: request for request in requests}, loop.server, loop.now, stuck)


def reproduce(recording: Recording, policy: Optional[Policy] = None) -> PlayedRun:
    """Run a recording step by step, and with held plans, which must give every request the same times."""
    played, fast = play(recording, policy), play(recording, policy, hold=True)
    assert (str(fast.stuck), fast.finish_time) == (str(played.stuck), played.finish_time)
    for id, request in played.requests.items():
        other = fast.requests[id]
        assert (other.first_token, other.finish, other.preemptions, other.cached_tokens) == (
            request.first_token, request.finish, request.preemptions, request.cached_tokens,
        )  # fmt: skip
    return played


def compare(recording: Recording, played: PlayedRun, unlisted_victims: bool = False) -> None:
    """Assert that every step and every request is as recorded; the message shows the first step that differs.

    unlisted_victims: the engine does not list the first victims of a step (those of vLLM v0's priority pass).
    """
    for index, (expected, actual) in enumerate(zip(recording.steps, played.rows)):
        wrong = [key for key in expected if key != "beams" and not matches(key, expected, actual, unlisted_victims)]
        optional = ["preempted", "swap_in", "ignored", "recomputed", "spec"]
        optional += ["finished"] if "ret" in expected else []
        wrong += [key for key in optional if key not in expected and actual[key]]
        if unlisted_victims and "preempted" not in expected:
            wrong = [key for key in wrong if key != "preempted"]
        assert not wrong, describe_difference(recording, played, index, wrong)
    counts = len(recording.steps), len(played.rows)
    extra = (recording.steps if counts[0] > counts[1] else played.rows)[min(counts) :][:1]
    assert counts[0] == counts[1], f"{counts[0]} steps recorded, {counts[1]} played ({played.stuck}), then {extra}"
    compare_requests(recording, played)
    if recording.prefix_cache_stats is not None:
        cache = played.server.prefix_cache
        stats = PrefixCacheStats() if cache is None else cache.stats
        assert {name: getattr(stats, name) for name in recording.prefix_cache_stats} == recording.prefix_cache_stats
    if recording.spec_stats is not None:
        drafts = played.server.drafts
        assert drafts is not None
        counters = drafts.rows, drafts.drafted, drafts.accepted, drafts.accepted_at
        names = ("drafts", "draft_tokens", "accepted_tokens", "accepted_per_pos")
        assert dict(zip(names, counters)) == recording.spec_stats


def matches(key: str, expected: dict[str, Any], actual: dict[str, Any], unlisted_victims: bool) -> bool:
    """Return whether one field of a step is as recorded."""
    recorded, got = expected[key], actual[key]
    if key == "preempted":
        if recorded and not isinstance(recorded[0], list):  # ids without the mode
            got = [id for id, _ in got]
        if "sequences" in expected:
            got = as_queued(got, actual["waiting"])
        if unlisted_victims:
            got = got[len(got) - len(recorded) :]
    return bool(recorded == got)


def as_queued(preempted: list[list[Any]], waiting: list[Any]) -> list[list[Any]]:
    """Return preempted requests as recordings of groups list them: swapped ones first, others as they now wait."""
    swapped = [row for row in preempted if row[1] == "swap"]
    return swapped + sorted((row for row in preempted if row[1] != "swap"), key=lambda row: waiting.index(row[0]))


def describe_difference(recording: Recording, played: PlayedRun, index: int, keys: list[str]) -> str:
    """Describe the previous step, and the recorded and played values of this one."""
    before = {key: recording.steps[index - 1][key] for key in recording.steps[index - 1]} if index else None
    lines = [f"step {index} differs in {', '.join(keys)}", f"before: {before}"]
    lines.append(f"t: {recording.steps[index]['t']} recorded, {played.rows[index]['t']} played")
    for key in keys:
        lines += [f"{key} recorded: {recording.steps[index].get(key)}", f"{key} played:   {played.rows[index][key]}"]
    return "\n".join([*lines, f"all played: {played.rows[index]}"])


def compare_requests(recording: Recording, played: PlayedRun) -> None:
    """Assert first token, finish time and number of preemptions of every request."""
    for id, *recorded in recording.per_request:
        request = played.requests[id]
        end = request.finish if request.outcome == "finished" else None
        got = [recording.ticks(request.first_token), recording.ticks(end), request.preemptions]
        got += [request.cached_tokens] if len(recorded) > 3 else []
        assert got == recorded, f"request {id}: {got} played, {recorded} recorded"
