"""The kbk backend with its fused kernels on an Ascend: run `pytest -m ascend` there. The authors have not run it yet.

The interpreter is SERVESIM_KBK_PYTHON, else that of .venv-kbk. Logits are compared at the precision of float16.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from servesim.calibrate.device.backend import Row

from .kbk_host import kbk_python, run_contract
from .stepping_worker import SteppingWorker

pytestmark = [pytest.mark.ascend, pytest.mark.timeout(1800)]

BLOCKS = {"blocks": 128, "block_size": 16, "host_blocks": 64}
FLOAT16_TOLERANCE = 2e-2  # of a logit, relative to the largest one


@pytest.fixture(scope="module")
def ascend() -> Iterator[SteppingWorker]:
    with SteppingWorker("kbk", python=kbk_python()) as worker:
        if worker.describe()["kernels"] != "fused":
            pytest.skip("no Ascend here: MindSpore runs on the CPU")
        worker.load("tiny", **BLOCKS)
        yield worker


def test_an_ascend_runs_the_fused_kernels_in_float16(ascend: SteppingWorker) -> None:
    about = ascend.describe()
    assert (about["kernels"], about["dtype"], about["jit_level"]) == ("fused", "float16", "O0")
    assert not about["device"].startswith("CPU")


@pytest.mark.parametrize("seed", range(3))
def test_batches_that_grow_shrink_and_swap_match_a_pass_without_a_cache(ascend: SteppingWorker, seed: int) -> None:
    result = ascend.call("exercise", timeout=600, seed=seed)
    assert result["error"] < FLOAT16_TOLERANCE


def test_one_wrong_block_table_changes_the_logits(ascend: SteppingWorker) -> None:
    assert ascend.call("exercise", timeout=600, spoil=True)["error"] > 5 * FLOAT16_TOLERANCE


def test_fused_and_reference_kernels_give_the_same_logits(ascend: SteppingWorker) -> None:
    rows = [
        [Row(list(range(1, 50)), 0, [9, 4, 30, 2]), Row([7, 8, 9], 0, [5])],
        [Row([11], 49, [9, 4, 30, 2]), Row([12, 13, 14], 3, [5])],
    ]
    with SteppingWorker("kbk", python=kbk_python(), device="CPU") as reference:
        reference.load("tiny", **BLOCKS)
        for step in rows:
            ascend.step(step)
            reference.step(step)
            fused, plain = np.array(ascend.call("logits")), np.array(reference.call("logits"))
            assert np.abs(fused - plain).max() < FLOAT16_TOLERANCE * np.abs(plain).max()


def test_new_shapes_compile_no_new_graph(ascend: SteppingWorker) -> None:
    for rows in range(1, 9):
        table = list(range(1, 2 + rows))
        ascend.step([Row([7] * 16 * rows, 0, table)] * rows)
        ascend.step([Row([7], 16 * rows, table)] * rows)
    assert ascend.describe()["graphs"] == 2


def test_wall_time_of_a_step_is_at_least_its_device_time(ascend: SteppingWorker, tmp_path: Path) -> None:
    result = run_contract(tmp_path, "events")["events"]
    assert all(0 < device <= wall for device, wall in zip(result["device"], result["wall"]))


def test_llama_7b_runs_unpatched(ascend: SteppingWorker) -> None:
    ascend.load("llama2-7b", blocks=512, block_size=16, host_blocks=8)
    first = ascend.step([Row(list(range(1, 200)), 0, list(range(1, 14)))])
    assert ascend.seconds > 0
    second = ascend.step([Row(first, 199, list(range(1, 14)))])
    assert all(0 <= token < 32000 for token in first + second)
