"""The trust panel: what it says about profiles and policies."""

from __future__ import annotations

from servesim.config.scenario import Scenario
from servesim.report.trust import policy_fact, profile_facts

from ..study import sweeps


def test_a_profile_that_was_not_measured_or_is_missing_is_a_warning() -> None:
    (written,) = profile_facts(sweeps.COSTS)
    assert written.tone == "warn" and "not measured" in written.text
    (missing,) = profile_facts("no-such-profile")
    assert missing.tone == "warn" and "cannot be loaded now" in missing.text


def test_policies_name_their_recordings() -> None:
    def scenario(name: str) -> Scenario:
        return Scenario.model_validate(sweeps.base(policy={"name": name}))

    proven = policy_fact([scenario("vllm-v1")])
    assert proven.tone == "good" and "vllm-v1: recordings of the real schedulers of 0.11.0" in proven.text
    mixed = policy_fact([scenario("vllm-v1"), scenario("orca")])
    assert mixed.tone == "check" and "orca: hand-worked cases" in mixed.text
