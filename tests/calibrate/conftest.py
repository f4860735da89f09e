"""Time in the tests of calibration: a virtual clock, a device in this process, and patience with a slow machine."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import pytest

from ..events import PATIENCE_S
from .device.worker_here import WorkerHere

LIMITS = (  # in which something must end that is not the matter of a test
    "device.worker_client.CLOSE_TIMEOUT_S",
    "client.server_counters.MODELS_TIMEOUT_S",
    "vllm.recording.HEADER_TIMEOUT_S",
    "vllm.server.END_TIMEOUT_S",
    "server.service.CLOSE_TIMEOUT_S",
    "server.service.STOP_TIMEOUT_S",
    "server.http.HEAD_SECONDS",
    "server.http.BODY_SECONDS",
    "server.http.STALL_SECONDS",
)


@pytest.fixture(scope="session", autouse=True)
def _patience() -> Iterator[None]:
    """Give slow machines time: a short limit is set where it is tested."""
    pytest.importorskip("aiohttp")
    with pytest.MonkeyPatch.context() as patch:
        for name in LIMITS:
            patch.setattr(f"servesim.calibrate.{name}", PATIENCE_S)
        yield


class VirtualTime:
    """Replaces the clock of the module time: it goes on by sleeps, and by `tick` at each reading."""

    def __init__(self) -> None:
        self.now = 0.0
        self.tick = 1e-7

    def perf_counter(self) -> float:
        self.now += self.tick
        return self.now

    monotonic = perf_counter

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def virtual_time(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    """Take no real time: a step of the fake backend takes exactly the time of its cost model."""
    clock = VirtualTime()
    for name in ("perf_counter", "monotonic", "sleep"):  # of the module itself: compiled modules have a reference to it
        monkeypatch.setattr(time, name, getattr(clock, name))
    return clock


@pytest.fixture
def device_here(monkeypatch: pytest.MonkeyPatch, virtual_time: VirtualTime) -> VirtualTime:
    """Run the fake devices of commands in this process and in virtual time."""
    virtual_time.tick = 1e-5  # the clock of a replay waits with readings for the last millisecond
    monkeypatch.setattr("servesim.calibrate.device.worker_client.Worker", WorkerHere)
    monkeypatch.setattr("servesim.calibrate.live.setup.Worker", WorkerHere)
    monkeypatch.setattr(gc, "collect", lambda: 0)  # at the start of a run; it is slow with the objects of pytest
    return virtual_time
