"""The section `speculative` of a scenario: what it sets, what it refuses, and the random stream of acceptance."""

from __future__ import annotations

from typing import Any

import pytest
from servesim.config.layers import apply_assignment, assemble, setting_layers
from servesim.config.scenario import Scenario, scenario_from
from servesim.core import BadInput, Request
from servesim.engine.acceptance import NUMBERS, Acceptance, Proposals, first_luck

BASE: dict[str, Any] = {"policy": {"name": "vllm-v1"}, "speculative": {"tokens": 3, "acceptance": 0.6}}


def scenario(**section: Any) -> Scenario:
    return scenario_from({**BASE, "speculative": {**BASE["speculative"], **section}})


def refusal(tree: dict[str, Any]) -> str:
    with pytest.raises(BadInput) as error:
        scenario_from(tree)
    return str(error.value).removeprefix("scenario: ")


def test_the_section_sets_the_fields_of_the_policy() -> None:
    policy: Any = scenario(method="mtp", modules=2).make_policy()
    fields = policy.num_speculative_tokens, policy.speculative_method, policy.mtp_modules, policy.async_scheduling
    assert fields == (3, "mtp", 2, True)


def test_ngram_drafts_turn_asynchronous_scheduling_off() -> None:
    policy: Any = scenario(method="ngram").make_policy()
    assert not policy.async_scheduling
    tree = {"policy": {"name": "vllm-v1", "async_scheduling": True}}
    tree["speculative"] = {"method": "ngram", "tokens": 3, "acceptance": 0.5}
    assert refusal(tree) == (
        "policy.async_scheduling: expected False with speculative_method ngram, as in vLLM, got True"
    )


def test_no_tokens_are_no_speculation() -> None:
    tree = {"policy": {"name": "llm-serving"}, "speculative": {"tokens": 0}}
    assert scenario_from(tree).drafts is None
    assert scenario_from(tree).make_policy() == scenario_from({"policy": {"name": "llm-serving"}}).make_policy()


def test_sweeps_and_settings_address_its_keys() -> None:
    tree = apply_assignment(BASE, {"speculative.tokens": 5})
    assert scenario_from(tree).speculative.tokens == 5  # type: ignore[union-attr]
    layers = setting_layers(["policy=vllm-v1", "speculative.tokens=2", "speculative.acceptance=[0.7, 0.5]"])
    section = scenario_from(assemble(layers)).drafts
    assert section is not None and (section.tokens, section.acceptance) == (2, [0.7, 0.5])


RATE = "expected a rate from 0 to 1, a list of such rates that do not grow, or column"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"tokens": 1001}, "tokens: expected less than or equal to 1000, got 1001"),
        ({"tokens": -1}, "tokens: expected greater than or equal to 0, got -1"),
        ({"acceptance": None}, "acceptance: expected a rate, got None"),
        ({"acceptance": 1.1}, f"acceptance: {RATE}, got 1.1"),
        ({"acceptance": float("nan")}, f"acceptance: {RATE}, got nan"),
        ({"acceptance": "colum"}, f"acceptance: {RATE}, got 'colum'"),
        ({"acceptance": []}, f"acceptance: {RATE}, got []"),
        ({"acceptance": [0.2, 0.4, 0.1]}, f"acceptance: {RATE}, got [0.2, 0.4, 0.1]"),
        ({"acceptance": [0.2, "x", 0.1]}, f"acceptance: {RATE}, got [0.2, 'x', 0.1]"),
        ({"acceptance": [0.5, 0.2]}, "acceptance: expected a rate for each of 3 tokens, got [0.5, 0.2]"),
        ({"proposals": 0.5}, "proposals: expected nothing unless method is ngram, got 0.5"),
        ({"modules": 2}, "modules: expected nothing unless method is mtp, got 2"),
        ({"model": "llama"}, "model: expected nothing unless method is draft_model, got 'llama'"),
    ],
)
def test_wrong_values_give_one_line(section: dict[str, Any], message: str) -> None:
    assert refusal({**BASE, "speculative": {**BASE["speculative"], **section}}) == f"speculative.{message}"


def test_policies_that_do_not_speculate_refuse_the_section() -> None:
    assert refusal({**BASE, "policy": {"name": "sglang"}}) == (
        "speculative: expected a policy with speculative decoding (vllm-v1), got sglang"
    )
    assert refusal({**BASE, "policy": {"name": "vllm-v1", "version": "0.27.0"}}) == (
        "speculative.tokens: expected 0 with version 0.27.0: its rules are known for 0.32.0 only, got 3"
    )
    assert refusal({**BASE, "policy": {"name": "vllm-ascend-balance"}}) == (
        "speculative.tokens: expected 0, its rules with this scheduler are not modelled, got 3"
    )


@pytest.mark.parametrize("section", [None, BASE["speculative"]])
def test_the_policy_itself_does_not_set_the_fields(section: Any) -> None:
    tree = {"policy": {"name": "vllm-v1", "num_speculative_tokens": 3}, "speculative": section}
    assert refusal(tree) == "policy.num_speculative_tokens: expected speculative.tokens, which sets it"


def random_numbers(key: int, name: Any) -> list[float]:
    """Return the numbers that decide about the first rows of a request."""
    request, model = Request(name, 0.0, 1, 1), Acceptance(key, 0.5)
    numbers = []
    for _ in range(400):
        luck = request.luck if request.luck >= 0 else first_luck(model.start, name)
        numbers.append(luck / NUMBERS)
        assert model.accept(request, 1) == (numbers[-1] < 0.5)
    return numbers


def random_offers(key: int, name: Any) -> list[float]:
    """Return in which steps of a request a drafter finds something, 1, or nothing, 0."""
    request, proposals = Request(name, 0.0, 1, 1), Proposals(key, 0.25, 3)
    offers = []
    for written in range(2000):
        request._written = written
        offers.append(proposals.offer(request) / 3)
    return offers


def test_offers_of_requests_have_their_rate_and_are_independent() -> None:
    offers = [random_offers(key, name) for key in (1, 2) for name in (0, 1, 2, "a", "b")]
    for one in offers:
        assert abs(sum(one) / 2000 - 0.25) < 4 * (0.25 * 0.75 / 2000) ** 0.5
    for k, one in enumerate(offers):
        for other in [*offers[k + 1 :], *([*one[lag:], *one[:lag]] for lag in (1, 2, 3))]:
            covariance = sum((x - 0.25) * (y - 0.25) for x, y in zip(one, other)) / 2000
            assert abs(covariance) < 4 * 0.25 * 0.75 / 2000**0.5


def test_random_numbers_of_requests_are_uniform_and_independent() -> None:
    numbers = [random_numbers(key, name) for key in (1, 2) for name in (0, 1, 2, "a", "b")]
    for one in numbers:
        assert all(0 <= number < 1 for number in one)
        assert abs(sum(one) / 400 - 0.5) < 4 * (1 / 12 / 400) ** 0.5
    for k, one in enumerate(numbers):
        for other in [*numbers[k + 1 :], [*one[1:], one[0]]]:  # other requests, and the next row of the same one
            covariance = sum((x - 0.5) * (y - 0.5) for x, y in zip(one, other)) / 400
            assert abs(covariance) < 4 / 12 / 400**0.5
