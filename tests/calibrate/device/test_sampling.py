"""The selection of tokens: equal tokens in all variants, and one line for a variant that a device does not have."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from servesim.calibrate.device.backend import MODELS, Model, Row
from servesim.calibrate.device.kbk.mindspore_setup import check_variant, select_tokens, supported_variants
from servesim.calibrate.device.worker_client import Worker
from servesim.core import BadInput

from .kbk_host import kbk_python, run_contract
from .stepping_worker import SteppingWorker

MODEL = Model("small", 2, 64, 4, 4, 176, 256, 512)
BLOCKS = {"blocks": 64, "block_size": 16}


def steps(seed: int = 3) -> list[list[Row]]:
    """Return steps with prompts, later chunks, prompts of one token and decodes, in mixed order."""
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return rng.choices(range(MODEL.vocab), k=count)

    return [
        [Row(tokens(20), 0, [1, 2]), Row(tokens(5), 0, [3]), Row(tokens(1), 0, [4])],
        [Row(tokens(1), 20, [1, 2]), Row(tokens(7), 5, [3]), Row(tokens(9), 0, [5]), Row(tokens(1), 1, [4])],
        [Row(tokens(1), 21, [1, 2])] * 3,
    ]


def tokens_and_logits(backend: Any, read: Any) -> tuple[list[list[int]], list[Any]]:
    tokens, logits = [], []
    for rows in steps():
        tokens.append(backend.step(rows))
        logits.append(np.array(read()))
    return tokens, logits


def check_equal(one: tuple[list[list[int]], list[Any]], other: tuple[list[list[int]], list[Any]]) -> None:
    assert one[0] == other[0]
    for tokens, left, right in zip(one[0], one[1], other[1]):
        np.testing.assert_array_equal(left, right)
        assert tokens == left.argmax(-1).tolist()  # the logits are those of the same rows, in the same order


class TestTorch:
    """Sampling on the device and on the host."""

    @pytest.fixture(autouse=True)
    def _torch(self) -> None:
        pytest.importorskip("torch", reason="torch is not installed: pip install '.[torch]'")

    def loaded(self, sampling: str, **options: Any) -> Any:
        from servesim.calibrate.device.torch.backend import TorchBackend

        backend = TorchBackend("cpu", sampling=sampling, threads=1, **options)
        backend.load(MODEL, **BLOCKS)
        return backend

    def test_the_tokens_are_equal(self) -> None:
        device, host = self.loaded("device"), self.loaded("host")
        check_equal(tokens_and_logits(device, device.logits), tokens_and_logits(host, host.logits))
        np.testing.assert_array_equal(host.logits([2, 0]), host.logits()[[2, 0]])
        assert (device.describe()["sampling"], host.describe()["sampling"]) == ("device", "host")

    def test_more_rows_than_the_largest_bucket(self) -> None:
        rows = [Row([index], 3, [1 + index % 60]) for index in range(20)]
        tokens = {name: self.loaded(name, row_buckets=(1, 4)).step(rows) for name in ("device", "host")}
        assert tokens["device"] == tokens["host"]

    def test_the_first_of_equal_logits_is_selected(self) -> None:
        import torch

        backend = self.loaded("device")
        backend.step([Row([1], 0, [1])] * 3)
        logits = backend.logits() * 0 + 1
        logits[:, 7] = logits[:, 200] = 2
        backend.last_logits.copy_(torch.from_numpy(logits))
        assert backend.select_tokens("host") == backend.last_logits.argmax(dim=1).tolist() == [7, 7, 7]

    @pytest.mark.parametrize("value", ["ops", "", None, 3])
    def test_error_for_an_unknown_variant(self, value: Any) -> None:
        with pytest.raises(BadInput, match=r"^sampling: expected one of device, host, got "):
            self.loaded(value)


def test_a_cpu_has_no_mint() -> None:
    assert supported_variants("CPU") == ("host", "ops")
    assert supported_variants("Ascend") == ("host", "ops", "mint")
    check_variant("mint", "Ascend")
    with pytest.raises(BadInput) as error:
        check_variant("mint", "CPU")
    assert str(error.value) == (
        "sampling: mint has no operator on a CPU (MindSpore has mint.argmax for Ascend only), expected one of host, ops"
    )


class CountedTensor:
    """A tensor that counts the numbers that are copied to the host."""

    copied = 0

    def __init__(self, array: Any) -> None:
        self.array = array

    def asnumpy(self) -> Any:
        CountedTensor.copied += self.array.size
        return self.array


@pytest.mark.parametrize(("variant", "module", "copied"), [("host", "", 300), ("ops", "ops", 3), ("mint", "mint", 3)])
def test_operators_on_the_device_copy_only_tokens(variant: str, module: str, copied: int) -> None:
    def argmax(tensor: CountedTensor, dim: int) -> CountedTensor:
        used.append(module)
        return CountedTensor(tensor.array.argmax(dim))

    used: list[str] = []
    operators = {name: SimpleNamespace(argmax=argmax if name == module else None) for name in ("ops", "mint")}
    logits = np.random.default_rng(0).random((3, 100))
    CountedTensor.copied = 0
    tokens = select_tokens(SimpleNamespace(**operators), variant, CountedTensor(logits))
    assert tokens.tolist() == logits.argmax(-1).tolist()
    assert CountedTensor.copied == copied
    assert used == ([module] if module else [])


@pytest.mark.kbk
@pytest.mark.timeout(1800)
class TestKbk:
    """MindSpore on a CPU."""

    @pytest.mark.parametrize("mode", ["graph", "pynative"])
    def test_the_tokens_of_host_and_ops_are_equal(self, mode: str) -> None:
        results = []
        for sampling in ("host", "ops"):
            with SteppingWorker("kbk", python=kbk_python(), mode=mode, sampling=sampling, threads=1) as worker:
                worker.load(MODEL, **BLOCKS)
                assert worker.describe()["sampling"] == sampling
                results.append(tokens_and_logits(worker, lambda: worker.call("logits")))
        check_equal(*results)

    def test_error_for_mint_and_for_an_unknown_variant(self) -> None:
        with pytest.raises(BadInput, match=r"^sampling: mint has no operator on a CPU .*expected one of host, ops$"):
            Worker("kbk", python=kbk_python(), sampling="mint")
        with pytest.raises(BadInput, match=r"^sampling: expected one of host, ops, mint, got 'device'$"):
            Worker("kbk", python=kbk_python(), sampling="device")

    def test_mint_with_a_replaced_operator_gives_the_same_tokens(self, tmp_path: Path) -> None:
        results = run_contract(tmp_path, "replaced")["replaced"]
        assert results["host"] == results["ops"] == results["mint"] == results["logits"]
        assert results["shapes"] == [[2, MODELS["micro"].vocab], [1, MODELS["micro"].vocab]]  # prompts, then the cache
