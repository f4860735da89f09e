"""What a policy was validated against: only the built-in class has the recordings of the real scheduler."""

from __future__ import annotations

from pathlib import Path

import pytest
from servesim.cli import main
from servesim.config.registry import make_policy
from servesim.config.validation import validated_against
from servesim.engine.rules import rules_of
from servesim.policies import POLICIES

OWN = """
from servesim.policies import POLICIES

class Mine(POLICIES["vllm-v1"]):
    "As vllm-v1."
    def decide(self, view):
        return super().decide(view)
"""


def test_a_subclass_in_a_users_file_is_not_validated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(OWN)
    lengths = "{kind: fixed, prompt: 5, output: 2}"
    workload = f"{{requests: 5, arrivals: {{kind: poisson, rate: 1}}, lengths: {lengths}}}"
    Path("scenario.yaml").write_text(f"policy: {{name: 'mine.py:Mine'}}\nworkload: {workload}\n")
    assert main(["policies", "show", "mine.py:Mine"]) == 0
    assert main(["run", "scenario.yaml"]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "validated against: " in line]
    assert [line.split("against: ")[1] for line in said] == ["not validated: a subclass of vllm-v1"] * 2


@pytest.mark.parametrize("name", POLICIES)
def test_a_built_in_policy_says_what_its_rules_say(name: str) -> None:
    policy = make_policy({"name": name})
    assert validated_against(policy) == rules_of(policy).validated_against
