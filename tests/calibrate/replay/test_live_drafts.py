"""Speculative decoding in live runs: the tokens equal those without drafts, and the simulation has the same steps."""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

import pytest
from servesim.calibrate.client.prompts import Prompts
from servesim.calibrate.device.backend import MODELS, Backend, Row
from servesim.calibrate.device.fake import FakeBackend
from servesim.calibrate.live.driver import LiveDriver
from servesim.calibrate.live.live_drafts import look_up
from servesim.calibrate.live.setup import FAKE_MODEL, DeviceSession
from servesim.calibrate.live.token_history import PromptMaker, TokenHistory
from servesim.calibrate.replay.replay import replay_on_backend, replay_requests
from servesim.cli import main
from servesim.config.scenario import scenario_from
from servesim.core import BadInput, Request
from servesim.core.content import content_of_pieces
from servesim.costs.device_profile import load_profile
from servesim.costs.linear import LinearCost
from servesim.engine.clocks import VirtualClock
from servesim.files.write import write_yaml

COST = {"base": 0.002, "prefill_token": 2e-5, "decode_row": 1e-4, "draft_token": 1e-4}
ENGINE = {"num_blocks": 32, "block_size": 8, "host_blocks": 0, "max_model_len": 256, "reject_oversized": "always"}


class KeptTokens(TokenHistory):
    """Keeps the tokens of finished requests."""

    def __init__(self, make_prompt: PromptMaker) -> None:
        super().__init__(make_prompt)
        self.kept: dict[Any, list[int]] = {}

    def keep(self, request: Request, tokens: array[int]) -> None:
        self.kept[request.id] = list(tokens)


def draw_requests(rng: random.Random, count: int = 24) -> list[Request]:
    """Return requests of which some begin with the same text."""
    requests = []
    for id in range(count):
        shared, own = rng.choice([0, 16, 32, 40]), rng.randint(1, 40)
        pieces = [*([(f"shared {rng.randint(0, 2)}", shared)] if shared else []), (f"own {id}", own)]
        content = content_of_pieces(pieces, None)
        requests.append(Request(id, rng.random() / 2, shared + own, rng.randint(2, 60), content=content))
    return requests


def run_live(
    backend: Backend, requests: Sequence[Request], vocab: int, **policy: Any
) -> tuple[LiveDriver, dict[Any, list[int]]]:
    fields = {"name": "vllm-v1", "async_scheduling": False, **policy}
    chances = (5, 0.7, [], 9, 0.8 if policy.get("speculative_method") == "ngram" else 1.0)
    clock = VirtualClock(LinearCost(base=0.01, prefill_token=1e-4))
    history = KeptTokens(Prompts("0", vocab).token_ids)
    live = LiveDriver(fields, {**ENGINE, "chances": chances}, requests, backend, history, clock)
    live.loop.notices.checks = True
    live.run()
    assert live.tables.free_count == ENGINE["num_blocks"]
    return live, history.kept


def test_the_lookup_finds_the_longest_end_that_occurred_before() -> None:
    tokens = array("i", [1, 2, 3, 9, 7, 2, 3, 8, 6, 1, 2, 3])
    assert list(look_up(tokens, 2, 3, 1)) == [9, 7]
    assert list(look_up(tokens, 20, 2, 2)) == [9, 7, 2, 3, 8, 6, 1, 2, 3]
    assert list(look_up(tokens, 2, 4, 4)) == []
    assert list(look_up(array("i", [4, 4]), 3, 5, 1)) == [4]
    assert list(look_up(array("i", [4]), 3, 5, 1)) == []
    # the bytes of 65536, 1 contain those of 1 at a place inside a token
    assert list(look_up(array("i", [256, 0, 5, 1]), 3, 5, 1)) == []


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("method", ["ngram", "eagle", "draft_model"])
def test_drafts_change_no_token_with_preemptions_and_a_prefix_cache(method: str, seed: int) -> None:
    rng = random.Random(seed)
    settings = {
        "max_num_seqs": rng.choice([4, 8]), "max_num_batched_tokens": rng.choice([16, 64, 200]),
        "enable_prefix_caching": seed % 3 > 0,
    }  # fmt: skip
    requests = [draw_requests(random.Random(seed), 16) for _ in range(2)]
    backend = FakeBackend(cost={})
    backend.load(FAKE_MODEL, ENGINE["num_blocks"] + 1, ENGINE["block_size"])
    without, expected = run_live(backend, requests[0], FAKE_MODEL.vocab, **settings)
    drafts = {"num_speculative_tokens": rng.choice([1, 3, 5]), "speculative_method": method}
    live, tokens = run_live(backend, requests[1], FAKE_MODEL.vocab, **settings, **drafts)
    assert tokens == expected
    assert len(tokens) == len(requests[0])
    assert len(live.calls) < len(without.calls)
    assert live.loop.server.drafts is not None
    assert live.loop.server.drafts.accepted > 100


@pytest.mark.parametrize("caching", [False, True])
def test_torch_verifies_drafts_and_generates_the_same_tokens(caching: bool) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install '.[torch]'")
    from servesim.calibrate.device.torch.backend import TorchBackend

    threads = torch.get_num_threads()
    backend = TorchBackend("cpu", threads=1)
    backend.load(MODELS["micro"], ENGINE["num_blocks"] + 1, ENGINE["block_size"])
    requests = [draw_requests(random.Random(3), 10) for _ in range(2)]
    settings = {"max_num_seqs": 6, "max_num_batched_tokens": 64, "enable_prefix_caching": caching}
    without, expected = run_live(backend, requests[0], MODELS["micro"].vocab, **settings)
    drafts = {"num_speculative_tokens": 3, "speculative_method": "ngram"}
    live, tokens = run_live(backend, requests[1], MODELS["micro"].vocab, **settings, **drafts)
    torch.set_num_threads(threads)
    assert tokens == expected
    counts = live.loop.server.drafts
    assert counts is not None
    assert 0 < counts.accepted < counts.drafted  # some guesses are right, and some are wrong
    assert len(live.calls) < len(without.calls)


def test_a_row_with_drafts_has_the_next_token_after_each_of_them() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install '.[torch]'")
    from servesim.calibrate.device.torch.backend import TorchBackend

    threads = torch.get_num_threads()
    backend = TorchBackend("cpu", threads=1)
    backend.load(MODELS["micro"], 20, 16)
    prompt, other = list(range(20, 40)), [7, 8, 9]
    right: list[int] = []  # one token after the other
    for _ in range(4):
        known = prompt + right
        right += backend.step([Row(known, 0, [1, 2])])
    guess = [right[0], right[1], (right[2] + 1) % 256]
    backend.step([Row(prompt[:-1], 0, [3, 4]), Row(other[:-1], 0, [5])])
    rows = [Row([prompt[-1], *guess], len(prompt) - 1, [3, 4], 3), Row(other[-1:], 2, [5]), Row(other, 0, [6])]
    tokens = backend.step(rows)
    torch.set_num_threads(threads)
    assert len(tokens) == 4 + 1 + 1
    assert tokens[:3] == right[:3]
    assert tokens[4] == tokens[5]
    assert len(backend.logits()) == 6


def scenario(method: str = "ngram", **policy: Any) -> Any:
    return scenario_from({
        "policy": {"name": "vllm-v1", "max_num_seqs": 4, **policy},
        "speculative": {"method": method, "tokens": 3, "acceptance": [0.8, 0.6, 0.5]},
        "engine": {"num_blocks": 60, "block_size": 8},
        "workload": {
            "requests": 16, "arrivals": {"kind": "poisson", "rate": 400},
            "lengths": {"prompt": 30, "output": [10, 40]},
        },
        "profile": COST,
    })  # fmt: skip


def replay(scenario: Any, backend: str, check_tokens: Optional[int] = None) -> Any:
    profile = load_profile(scenario.profile)
    with DeviceSession(backend, "micro", options={"threads": 1} if backend == "torch" else None) as session:
        session.load([scenario])
        requests = replay_requests(scenario)
        return replay_on_backend(session, "drafts", scenario, requests, profile, check_tokens=check_tokens)


@pytest.mark.usefixtures("device_here")
@pytest.mark.parametrize("method", ["ngram", "eagle"])
def test_a_replay_on_the_fake_backend_accepts_what_the_simulation_accepts(method: str) -> None:
    replayed = replay(scenario(method, async_scheduling=False), "fake", 16)
    result, simulated = replayed.live.result(), replayed.run.result()
    assert replayed.comparison.decisions.identical
    for metric in ("makespan", "model_calls", "accepted_tokens_per_step", "draft_acceptance_rate", "wasted_tokens"):
        assert result[metric] == pytest.approx(simulated[metric]), metric
    assert result["token_check"]["equal"] == 16
    assert sum(row[2] for rows in result["drafts"]["requests"].values() for row in rows) == result["drafts"]["accepted"]


def test_a_replay_on_torch_simulates_what_the_device_accepted() -> None:
    pytest.importorskip("torch", reason="torch is not installed: pip install '.[torch]'")
    replayed = replay(scenario(enable_prefix_caching=False), "torch", 16)
    result = replayed.live.result()
    matched, calls = replayed.comparison.calls_matched
    assert matched == calls == len(replayed.live.model_calls)
    assert result["token_check"]["equal"] == 16
    for metric in ("accepted_tokens_per_step", "draft_acceptance_rate", "wasted_tokens"):
        assert result[metric] == pytest.approx(replayed.run.result()[metric]), metric


@pytest.mark.usefixtures("device_here")
@pytest.mark.parametrize("rates", [(0.2, 0.9), (0.2, "")])
def test_a_rate_per_request_comes_from_the_trace_and_clients_have_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rates: tuple[Any, Any]
) -> None:
    write_yaml(tmp_path / "a.yaml", {
        "policy": {"name": "vllm-v1"}, "speculative": {"method": "ngram", "tokens": 3, "acceptance": "column"},
        "engine": {"num_blocks": 60, "block_size": 8}, "profile": COST,
    })  # fmt: skip
    rows = [f"0,10,40,{rate}" for rate in rates]
    (tmp_path / "a.csv").write_text("\n".join(["arrival_s,prompt_tokens,output_tokens,acceptance", *rows, ""]))
    words = ["--backend", "fake", "--quiet", "--trace", str(tmp_path / "a.csv"), "-o", str(tmp_path / "out")]
    code = main(["replay", str(tmp_path / "a.yaml"), *words])
    if rates[1]:
        drafts = json.loads((tmp_path / "out/live/result.json").read_text())["drafts"]["requests"]
        assert code == 0 and len(drafts["0"]) > len(drafts["1"])
        return
    assert code == 2
    assert capsys.readouterr().err.endswith("acceptance: expected the column acceptance, request 1 has none\n")
    assert main(["serve", str(tmp_path / "a.yaml"), "--backend", "fake"]) == 2
    expected = "speculative.acceptance: expected a rate or a list of rates, requests of clients have none"
    assert capsys.readouterr().err == f"sim: {expected}\n"


class Unable(FakeBackend):
    """A backend that cannot verify drafts."""

    name = "kbk"
    speculation = ""


class Verifying(FakeBackend):
    """A backend that verifies drafts."""

    speculation = "verified"


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (Unable, {}, "speculative: backend kbk does not verify drafts, expected torch or fake"),
        (Verifying, {"speculative_method": "eagle"}, "speculative.method: expected ngram, .* got eagle"),
        (FakeBackend, {"speculative_method": "eagle", "async_scheduling": True}, "set async_scheduling: false"),
    ],
)
def test_what_cannot_run_live_is_refused_in_one_line(kind: Any, fields: dict[str, Any], message: str) -> None:
    backend = kind(cost={})
    backend.load(FAKE_MODEL, 33, 8)
    settings = {"num_speculative_tokens": 3, "speculative_method": "ngram", **fields}
    with pytest.raises(BadInput, match=message) as caught:
        run_live(backend, [], FAKE_MODEL.vocab, **settings)
    assert "\n" not in str(caught.value)
