"""Several prompts per prefill on MindSpore's CPU device: the logits of MindFormers' Llama equal those of one prompt."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from ..device.kbk_host import kbk_python

pytestmark = [pytest.mark.kbk, pytest.mark.timeout(1800)]

SCRIPT = Path(__file__).with_name("kbk_grouped_prefill.py")
PROMPTS, STEPS = 8, 7  # a prefill and six decodes
TOLERANCE = 1e-5  # of a logit, relative to the largest one


@pytest.mark.parametrize("seed", [1, 2])
def test_logits_of_a_repaired_group_and_of_its_decodes_equal_those_of_single_prompts(tmp_path: Path, seed: int) -> None:
    command = [kbk_python(), str(SCRIPT), str(seed)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert results["repaired"]["steps"] == PROMPTS * STEPS
    assert results["repaired"]["error"] < TOLERANCE
    assert results["repaired"]["different"] == []
    assert results["stock"]["error"] > 0.01  # the comparison sees the mistakes of the stock server
    assert results["stock"]["different"]
