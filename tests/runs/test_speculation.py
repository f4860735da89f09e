"""Runs with speculative decoding: what theory says about accepted drafts, and what holds for every run."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from servesim.cli import main
from servesim.config.scenario import scenario_from
from servesim.core import BadInput, ClientRequest
from servesim.core.content import content_of_pieces
from servesim.engine.server import Server
from servesim.engine.step import Step
from servesim.runs.decision_log import DecisionLog
from servesim.runs.run_folder import read_run, write_run
from servesim.runs.simulate import Run, simulate
from servesim.traces.read.formats import load
from servesim.traces.trace import Trace

ONE_TOKEN = {"requests": 60, "arrivals": {"kind": "poisson", "rate": 4}, "lengths": {"prompt": 1, "output": [3, 60]}}
COST = {"base": 0.02, "prefill_token": 1e-4, "decode_row": 1e-3}


def scenario(requests: int = 100, output: int = 60, policy: Any = None, **keys: Any) -> dict[str, Any]:
    workload = {
        "requests": requests,
        "arrivals": {"kind": "poisson", "rate": 4},
        "lengths": {"kind": "fixed", "prompt": 100, "output": output},
    }
    base = {"profile": COST, "workload": workload, "engine": {"num_blocks": 2000}}
    return {**base, "policy": {"name": "vllm-v1", "async_scheduling": False, **(policy or {})}, **keys}


def drafts(tokens: int = 3, acceptance: Any = 0.6, **keys: Any) -> dict[str, Any]:
    return {"speculative": {"tokens": tokens, "acceptance": acceptance, **keys}}


def run_of(tree: dict[str, Any], trace: Any = None) -> Run:
    return simulate(scenario_from(tree), trace)


def rates_of(run: Run) -> tuple[float, float]:
    result = run.result()
    return result["accepted_tokens_per_step"], result["draft_acceptance_rate"]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(("rate", "tokens"), [(0.6, 3), (0.85, 5), (0.3, 1)])
def test_mean_tokens_per_step_are_those_of_the_theory(rate: float, tokens: int, is_async: bool) -> None:
    run = run_of(scenario(300, policy={"async_scheduling": is_async}, **drafts(tokens, rate)))
    rows = run.drafts[0].rows
    mean = sum(rate**k for k in range(1, tokens + 1))
    square = sum(rate**k * (2 * k - 1) for k in range(1, tokens + 1))  # of the number of accepted drafts
    assert abs(rates_of(run)[0] - 1 - mean) < 4 * ((square - mean**2) / rows) ** 0.5
    if (rate, tokens) == (0.6, 3):
        assert 1 + mean == pytest.approx(2.176)


def test_a_list_has_the_rate_of_each_position() -> None:
    rates = [0.8, 0.5, 0.45, 0.1]
    counts = run_of(scenario(300, **drafts(3, rates))).drafts[0]
    for rate, accepted in zip(rates, counts.accepted_at):
        assert abs(accepted / counts.rows - rate) < 4 * (rate * (1 - rate) / counts.rows) ** 0.5


def test_nothing_accepted_is_exact() -> None:
    run = run_of(scenario(20, output=60, **drafts(3, 0.0)))
    assert rates_of(run) == (1.0, 0.0)
    assert run.drafts[0].rows == 20 * 59  # the prompt gives the first token
    assert run.result()["wasted_tokens"] == 20 * 59 * 3


@pytest.mark.parametrize("acceptance", [1.0, [1.0, 1.0, 1.0]])
def test_everything_accepted_is_exact(acceptance: Any) -> None:
    run = run_of(scenario(20, output=58, **drafts(3, acceptance)))
    assert rates_of(run) == (4.0, 1.0)
    assert run.drafts[0].rows == 20 * 15  # 57 tokens, 4 in each row: one in the last
    assert run.result()["wasted_tokens"] == 20 * 2  # its second and third draft are behind the end
    assert run.server.tokens_generated == 20 * 58


def test_asynchronous_scheduling_wastes_the_drafts_of_a_step_behind_the_end() -> None:
    for output, wasted in ((61, 3), (58, 2)):  # the end is foreseen if every result of the last row is one
        run = run_of(scenario(1, output=output, policy={"async_scheduling": True}, **drafts(3, 1.0)))
        assert run.drafts[0].rows == 15
        assert run.result()["wasted_tokens"] == wasted


def test_a_step_has_one_gap_between_tokens_whatever_it_accepts() -> None:
    run = run_of(scenario(20, output=58, **drafts(3, 1.0)))
    assert sum(run.server.token_gaps.counts) == 20 * 15
    for request in run.requests:
        assert request.first_token is not None and request.client_end is not None
    tpot = [(r.client_end - r.first_token) / 57 for r in run.requests]  # type: ignore[operator]
    assert run.result()["mean_tpot_ms"] == pytest.approx(1e3 * sum(tpot) / 20)


def files_of(tree: dict[str, Any], folder: Path) -> tuple[str, str, str]:
    folder.mkdir()
    file, log = folder / "scenario.json", folder / "log.jsonl"
    file.write_text(json.dumps(tree))
    assert main(["run", str(file), "-o", str(folder / "out"), "--decisions", str(log)]) == 0
    return log.read_text(), *((folder / "out" / name).read_text() for name in ("result.json", "requests.csv"))  # type: ignore[return-value]


def test_without_drafts_a_run_is_that_without_the_section(tmp_path: Path) -> None:
    tree = scenario(40, policy={"async_scheduling": True})
    plain = files_of(tree, tmp_path / "plain")
    assert files_of({**tree, **drafts(0)}, tmp_path / "off") == plain
    assert files_of({**tree, **drafts(2)}, tmp_path / "on") != plain


class Accepted:
    """Accepted drafts of every request, in the order of its rows."""

    def __init__(self) -> None:
        self.rows: dict[Any, list[int]] = {}
        self._listens = False

    def on_step_start(self, server: Server, step: Step, arrived: list[Any]) -> None:
        if server.drafts is not None and not self._listens:
            self._listens, accept = True, server.drafts.accept

            def note(request: Any, count: int) -> int:
                accepted = accept(request, count)
                self.rows.setdefault(request.id, []).append(accepted)
                return accepted

            server.drafts.accept = note

    def on_step_end(self, server: Server, step: Step, now: float, finished: list[Any]) -> None:
        pass


def accepted_rows(tree: dict[str, Any]) -> dict[Any, list[int]]:
    noted = Accepted()
    simulate(scenario_from(tree), observers=[noted])
    return noted.rows


def test_a_request_has_the_same_luck_under_every_policy() -> None:
    one = accepted_rows(scenario(20, **drafts()))
    other = accepted_rows(scenario(20, policy={"max_num_seqs": 2, "policy": "priority"}, **drafts(method="mtp")))
    assert one == other
    assert len({tuple(rows[:12]) for rows in one.values()}) == 20  # each request has its own
    assert accepted_rows(scenario(20, seed=1, **drafts())) != one


def test_fewer_drafts_accept_the_same_first_ones() -> None:
    many, few = accepted_rows(scenario(20, **drafts(5))), accepted_rows(scenario(20, **drafts(2)))
    for id, rows in many.items():
        assert [min(accepted, 2) for accepted in rows] == few[id][: len(rows)]


def test_acceptance_changes_no_other_random_number() -> None:
    plain, drafted = run_of(scenario(50)), run_of(scenario(50, **drafts()))
    for one, other in zip(plain.requests, drafted.requests):
        assert one.client_fields() == other.client_fields()


def test_replicas_have_the_luck_of_one_server() -> None:
    one = run_of(scenario(50, **drafts()))
    fleet = run_of(scenario(50, **drafts(), cluster={"replicas": 3, "router": "least-requests"}))
    assert rates_of(fleet) == rates_of(one)
    rows = fleet.result()["replicas"]
    assert sum(row["wasted_tokens"] for row in rows) == fleet.result()["wasted_tokens"]


def test_the_column_of_the_trace_has_the_rate_of_each_request(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    rows = [f"{k},100,41,{rate}" for k, rate in enumerate([0, 1, 0.5])]
    file.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens,acceptance", *rows]) + "\n")
    noted = Accepted()
    simulate(scenario_from(scenario(**drafts(3, "column"))), load(str(file)), [noted])
    assert set(noted.rows[0]) == {0} and len(noted.rows[0]) == 40
    assert set(noted.rows[1]) == {3} and len(noted.rows[1]) == 10
    assert len(set(noted.rows[2])) > 1


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (",1.5", "trace.csv: row 2: acceptance: expected a rate from 0 to 1, got '1.5'"),
        (",x", "trace.csv: row 2: acceptance: expected a rate from 0 to 1, got 'x'"),
        (",", "speculative.acceptance: expected the column acceptance, request 0 has none"),
    ],
)
def test_wrong_cells_give_one_line(column: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(f"arrival_s,prompt_tokens,output_tokens,acceptance\n0,100,41{column}\n")
    with pytest.raises(BadInput) as error:
        run_of(scenario(**drafts(3, "column")), load(str(file)))
    assert str(error.value).replace(f"{tmp_path}/", "") == message


def test_requests_that_fail_are_refused() -> None:
    trace = Trace([ClientRequest("a", 0.0, 10, 5, fails_at_token=2)], "test", "synth")
    with pytest.raises(BadInput) as error:
        run_of(scenario(**drafts()), trace)
    assert str(error.value) == "speculative: expected requests without fails_at_token, request a has it"


def test_ngram_drafts_are_found_in_some_steps() -> None:
    run = run_of(scenario(100, **drafts(3, 0.0, method="ngram", proposals=0.25)))
    offers = 100 * 59
    assert abs(run.drafts[0].rows / offers - 0.25) < 4 * (0.25 * 0.75 / offers) ** 0.5


def test_a_run_warns_if_no_drafting_time_is_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "scenario.json"
    for keys, warns in (
        (drafts(), True),
        (drafts(drafting=0.001), False),
        (drafts(method="ngram"), False),
        ({}, False),
    ):
        file.write_text(json.dumps(scenario(3, **keys)))
        assert main(["run", str(file)]) == 0
        assert ("drafting counts as 0 s" in capsys.readouterr().err) == warns


@st.composite
def requests_of(draw: st.DrawFn) -> list[ClientRequest]:
    requests, now = [], 0.0
    for id, gap in enumerate(draw(st.lists(st.sampled_from([0.0, 0.0, 0.01, 0.3]), min_size=1, max_size=12))):
        now += gap
        prompt, output = draw(st.integers(1, 24)), draw(st.integers(1, 20))
        text, shared = draw(st.sampled_from([None, "a", "b"])), draw(st.integers(0, prompt))
        content = None if text is None else content_of_pieces([(text, shared), (id, prompt - shared)])
        limit = output + draw(st.sampled_from([0, 0, 2]))
        requests.append(
            ClientRequest(id, now, prompt, output, limit, content=content, acceptance=draw(st.floats(0, 1)))
        )
    return requests


@st.composite
def tight_scenarios(draw: st.DrawFn) -> dict[str, Any]:
    method = draw(st.sampled_from(["ngram", "eagle", "mtp", "draft_model"]))
    section = {"method": method, "tokens": draw(st.integers(1, 6)), "acceptance": "column"}
    if method == "ngram":
        section["proposals"] = draw(st.sampled_from([1.0, 0.4]))
    if method == "mtp":
        section["modules"] = draw(st.sampled_from([1, 2]))
    policy = {
        "name": "vllm-v1",
        "max_num_seqs": draw(st.integers(1, 8)),
        "max_num_batched_tokens": draw(st.sampled_from([8, 12, 40, 512])),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 0, 3, 9])),
        "enable_prefix_caching": draw(st.booleans()),
        "scheduler_reserve_full_isl": draw(st.booleans()),
        "policy": draw(st.sampled_from(["fcfs", "priority"])),
        "async_scheduling": method != "ngram" and draw(st.booleans()),
    }
    engine = {"block_size": draw(st.sampled_from([1, 4, 16])), "max_model_len": draw(st.sampled_from([46, 64]))}
    engine["num_blocks"] = 1 + -(-64 // engine["block_size"]) * draw(st.integers(1, 4))
    return {"policy": policy, "engine": engine, "speculative": section, "profile": COST}


def test_a_request_that_joins_before_a_decision_without_a_call_takes_its_blocks_once() -> None:
    policy = {"name": "vllm-v1", "max_num_seqs": 3, "max_num_batched_tokens": 40, "long_prefill_token_threshold": 9,
              "enable_prefix_caching": False, "scheduler_reserve_full_isl": False, "policy": "priority"}  # fmt: skip
    tree = {"policy": policy, "engine": {"block_size": 1, "max_model_len": 46, "num_blocks": 65},
            "speculative": {"method": "eagle", "tokens": 6, "acceptance": 0.0}, "profile": COST}  # fmt: skip
    requests = [ClientRequest(number, 0.0, *lengths) for number, lengths in enumerate(((23, 1), (1, 2), (17, 2)))]
    pool = run_of(tree, Trace(requests, "test", "synth")).server.pool
    assert pool.free == pool.total


@settings(max_examples=60)
@given(tree=tight_scenarios(), requests=requests_of())
def test_every_request_gets_its_tokens_and_frees_its_blocks(
    tree: dict[str, Any], requests: list[ClientRequest]
) -> None:
    run = run_of(tree, Trace(requests, "test", "synth"))
    assume(run.stuck is None)  # faults of the real engine with small budgets: see below
    for request in run.requests:
        assert request.outcome == "finished"
        assert request.written == request.stop_at == request.output
    server, counts = run.server, run.drafts[0]
    assert server.tokens_generated == sum(request.output for request in requests)
    assert server.pool.free + server.pool.evictable == server.pool.total
    assert 0 <= counts.accepted <= counts.drafted <= counts.rows * counts.tokens
    assert counts.accepted_at == sorted(counts.accepted_at, reverse=True)
    if "wasted_tokens" in run.result():
        assert run.result()["wasted_tokens"] >= counts.drafted - counts.accepted
    log = io.StringIO()
    again = simulate(scenario_from(tree), Trace(requests, "test", "synth"), [DecisionLog(log)], hold=False)
    assert again.result() == run.result()


SHARED = content_of_pieces([("system", 16), ("question", 1)])


@pytest.mark.parametrize(
    ("policy", "prompts", "section", "reason"),
    [
        (
            {"max_num_batched_tokens": 3},
            [17, 17],
            {"method": "draft_model"},
            "no request runs and no request will arrive",
        ),
        (
            {"max_num_batched_tokens": 3},
            [10, 10],
            {"method": "mtp", "modules": 2},
            "no request runs and no request will arrive",
        ),
        ({"long_prefill_token_threshold": 3}, [6, 1, 1], {}, "vLLM aborts (AssertionError in schedule)"),
    ],
)
def test_faults_of_the_real_engine_end_the_run(
    policy: dict[str, Any], prompts: list[int], section: dict[str, Any], reason: str
) -> None:
    requests = [
        ClientRequest(k, 0.03 * k, prompt, 6, content=SHARED if prompt == 17 else None)
        for k, prompt in enumerate(prompts)
    ]
    tree = {"profile": COST, "policy": {"name": "vllm-v1", "max_num_seqs": 2, **policy}, **drafts(5, 0.5, **section)}
    run = run_of(tree, Trace(requests, "test", "synth"))
    assert run.stuck is not None and reason in str(run.stuck)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("policy", "keys"),
    [
        ({}, drafts()),
        ({"max_num_batched_tokens": 30, "max_num_seqs": 9}, drafts(3, [0.9, 0.5, 0.2])),  # some rows get fewer drafts
        ({}, {**drafts(5, 0.8), "engine": {"num_blocks": 40, "max_model_len": 190}}),  # preemptions, and a length limit
        ({}, {**drafts(2, 0.7), "cluster": {"replicas": 2}}),
        ({}, drafts(2, 0.7, method="ngram", proposals=0.5)),
        ({}, {**drafts(), "workload": ONE_TOKEN}),  # padded rows
    ],
)
def test_rows_of_requests_have_their_drafts(
    policy: dict[str, Any], keys: dict[str, Any], is_async: bool, tmp_path: Path
) -> None:
    if is_async and keys["speculative"].get("method") == "ngram":
        return
    run = run_of(scenario(60, policy={"async_scheduling": is_async, **policy}, **keys))
    write_run(run, tmp_path)
    rows = read_run(tmp_path).requests.values()
    assert sum(row["drafted"] for row in rows) == sum(each.drafted for each in run.drafts) > 0
    assert sum(row["accepted"] for row in rows) == sum(each.accepted for each in run.drafts) > 0
    assert all(row["drafted"] >= row["accepted"] >= 0 for row in rows)
    assert len({row["accepted"] for row in rows}) > 5


def test_runs_without_drafts_have_no_such_columns(tmp_path: Path) -> None:
    write_run(run_of(scenario(5)), tmp_path)
    assert "drafted" not in next(iter(read_run(tmp_path).requests.values()))
