"""Several answers to a request in vLLM V1: one request each in the engine, one request in the metrics."""

from __future__ import annotations

from typing import Any

from servesim.config.scenario import scenario_from
from servesim.core import ClientRequest, Content, Sampling
from servesim.runs.decision_log import InMemoryLog
from servesim.runs.simulate import Run, simulate
from servesim.traces.trace import Trace

from ..commands.test_recordings_by_command import scenario_of
from ..policies.recordings import load

TREE: dict[str, Any] = {
    "engine": {"num_blocks": 101, "block_size": 4, "max_model_len": 200}, "profile": {"base": 1.0},
}  # fmt: skip


def run(*requests: ClientRequest, **policy: Any) -> Run:
    tree = {**TREE, "policy": {"name": "vllm-v1", **policy}, "trace": "none.csv"}
    return simulate(scenario_from(tree), Trace(list(requests), "test", "synth"))


def test_the_children_of_a_recording_follow_from_its_requests() -> None:
    """The recording has the children as requests. Here they follow from one request with `n` each."""
    recording = load("prefix/children_of_n__v1-0.32.0")
    children: dict[str, list[list[Any]]] = {}
    for row in recording.requests:
        children.setdefault(row[0].partition("_")[2], []).append(row)
    # A request with one answer is not split: it has the id of its only child.
    children = {id if len(rows) > 1 else rows[0][0]: rows for id, rows in children.items()}
    requests = []
    for id, rows in children.items():
        names, tokens = zip(*recording.pieces(rows[0][0]))
        content = Content(names, [sum(tokens[: k + 1]) for k in range(len(tokens))])
        outputs = tuple(output for _, _, _, output, _ in rows)
        sampling = Sampling(len(rows), outputs=outputs) if len(rows) > 1 else None
        requests.append(ClientRequest(id, rows[0][1], rows[0][2], max(outputs), content=content, sampling=sampling))
    log = InMemoryLog()
    result = simulate(scenario_from(scenario_of(recording)), Trace(requests, "test", "synth"), observers=(log,))
    assert len(log.rows) == len(recording.steps)
    for ours, theirs in zip(log.rows, recording.steps):
        assert (ours["t"], ours["chunks"]) == (theirs["t"], [row[:2] for row in theirs["sched"]])
        assert (ours["cached"], ours["free"]) == (theirs.get("cached", []), theirs["free_gpu"])
    recorded = {id: numbers for id, *numbers in recording.per_request}
    for request in result.requests:
        answers = [recorded[row[0]] for row in children[request.id]]
        assert request.first_token == min(first for first, *_ in answers)
        assert request.client_end == max(end for _, end, *_ in answers)
        assert request.preemptions == sum(preemptions for _, _, preemptions, *_ in answers)
        assert request.cached_tokens == sum(cached for *_, cached in answers)
    assert result.result()["completed"] == len(children) < len(recording.requests)
    assert result.result()["total_output_tokens"] == sum(row[3] for row in recording.requests)


def test_answers_share_the_whole_blocks_of_their_prompt_and_end_with_the_last() -> None:
    result = run(
        ClientRequest("q", 0.0, 10, 5, sampling=Sampling(3, outputs=(2, 5, 4))), ClientRequest("r", 0.0, 10, 2)
    )
    (request, _) = result.requests
    assert [answer.id for answer in result.ran] == ["0_q", "1_q", "2_q", "r"]
    assert request.cached_tokens == 2 * 8
    assert (request.first_token, request.finish, request.written, request.generated) == (1.0, 5.0, 5, 11)
    metrics = result.result()
    assert (metrics["completed"], metrics["total_input_tokens"], metrics["total_output_tokens"]) == (2, 20, 13)
    assert (
        run(ClientRequest("q", 0.0, 10, 5, sampling=Sampling(3)), enable_prefix_caching=False).requests[0].written == 5
    )


def test_a_request_with_a_refused_answer_is_refused() -> None:
    result = run(ClientRequest("q", 0.0, 500, 5, sampling=Sampling(2)))
    assert (result.requests[0].outcome, result.result()["failed"]) == ("refused", 1)


def test_a_request_that_follows_another_is_sent_once_also_with_several_answers() -> None:
    """Its arrival in the trace does not count: the client sends it when the other request has ended."""
    first = ClientRequest("first", 0.0, 8, 3)
    requests = run(
        first, ClientRequest("next", 100.0, 8, 2, follows="first", think_time=0.5, sampling=Sampling(2))
    ).requests
    assert [request.sent for request in requests] == [0.0, requests[0].client_end + 0.5]
    assert requests[1].client_end > requests[1].sent
