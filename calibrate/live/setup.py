"""A worker with a loaded model, with enough blocks for every scenario of a live run."""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Callable, Optional, Union

from servesim.calibrate.device.backend import Model, model_named
from servesim.calibrate.device.worker_client import Worker
from servesim.config.scenario import Scenario
from servesim.config.speculative import fields_that_draft
from servesim.config.user_code import code_access
from servesim.core import BadInput, Request, StepCost
from servesim.costs.device_profile import Profile
from servesim.costs.mapping import cost_from, cost_mapping
from servesim.files.scratch import ScratchFolder
from servesim.runs.build import chances_of

from .request_json import request_to_json

REPLAY_TIMEOUT_S = 900.0  # seconds without a progress report
FAKE_MODEL = Model("fake", 1, 1, 1, 1, 1, 32000, 1 << 20)  # accepts any sequence length


class DeviceSession:
    """A worker and its loaded model. Use it as a context manager.

    A worker selects tokens in one way (engine.sampling). A scenario with another one gets a new worker.
    """

    def __init__(
        self, backend: str, model: Optional[str] = None, python: Optional[str] = None, weights: Optional[str] = None,
        options: Optional[Mapping[str, Any]] = None,
    ) -> None:  # fmt: skip
        self.backend = backend
        self.model = FAKE_MODEL if backend == "fake" else model_named(model or "tiny")
        self.weights = weights
        self.python = python
        self.options = dict(options or {})
        self.sampling: Optional[str] = self.options.get("sampling")  # of the worker; None is the backend's default
        self.fake_cost: Optional[Mapping[str, Any]] = None  # cost model of a fake backend
        if backend == "fake":
            self.fake_cost = cost = self.options.pop("cost", None)
            if not isinstance(cost, (Mapping, type(None))):
                raise BadInput(f"--option cost: expected terms of a cost model, got {cost!r}")
            if cost is not None:
                cost_from(cost, "--option cost")  # checks it
            self.options["cost"] = {}  # the clock of the live driver waits instead of the backend
        self.about: dict[str, Any] = {}
        self._worker: Optional[Worker] = None
        self._cache: tuple[int, int, int] = (0, 0, 0)  # blocks, block size, host blocks

    def __enter__(self) -> DeviceSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the worker."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    @property
    def worker(self) -> Worker:
        """The worker, started at its first use."""
        if self._worker is None:
            # The clock of a fake backend waits for the selection of tokens too.
            own = {} if self.sampling is None or self.backend == "fake" else {"sampling": self.sampling}
            options = {key: value for key, value in self.options.items() if key != "sampling"}
            self._worker = Worker(self.backend, self.python, **options, **own)
        return self._worker

    def load(self, scenarios: Sequence[Scenario]) -> dict[str, Any]:
        """Load the model with enough blocks for the largest scenario; return the description of the backend."""
        sizes = {scenario.engine.block_size for scenario in scenarios}
        if len(sizes) > 1:
            raise BadInput(f"engine.block_size: expected one value for all scenarios of a replay, got {sorted(sizes)}")
        if any(scenario.engine.host_cache for scenario in scenarios):
            raise BadInput("engine.host_cache: expected none, a live backend keeps no evicted blocks in host memory")
        blocks = max(scenario.engine.num_blocks for scenario in scenarios) + 1
        host = max(scenario.engine.host_blocks for scenario in scenarios)
        samplings = [self._sampling_of(scenario) for scenario in scenarios]
        self._cache = blocks, sizes.pop(), host
        return self._load(samplings[0])

    def use_sampling(self, scenario: Scenario) -> Optional[str]:
        """Load the model again if a scenario selects tokens in another way; return the way, if the backend has one."""
        sampling = self._sampling_of(scenario)
        if sampling != self.sampling:
            self._load(sampling)
        return None if self.backend == "fake" else self.about.get("sampling")

    def _load(self, sampling: Optional[str]) -> dict[str, Any]:
        """Load the model on a worker that selects tokens in this way."""
        if sampling != self.sampling:
            self.close()
            self.sampling = sampling
        self.worker.load(self.model, *self._cache, self.weights)
        self.about = self.worker.describe()
        return self.about

    def _sampling_of(self, scenario: Scenario) -> Optional[str]:
        """Return how a scenario selects tokens: as its engine or the option of the backend says; both must agree."""
        option, own = self.options.get("sampling"), scenario.engine.sampling
        if option is not None and own is not None and option != own:
            raise BadInput(f"--option sampling={option}: the scenario has engine.sampling: {own}; expected the same")
        return option if own is None else own

    def replay(
        self,
        scenario: Scenario,
        requests: Sequence[Request],
        cost: Optional[StepCost] = None,
        warm_up: int = 0,
        progress: Optional[Callable[[Any], None]] = None,
        max_seconds: float = math.inf,
        check_tokens: Optional[int] = None,
    ) -> dict[str, Any]:
        """Replay unserved requests; return the result of `replay_job.replay`.

        Ctrl-C ends the run and keeps its results. So does the end of `max_seconds`, which include the warm-up.
        `check_tokens` requests then run again alone, and their tokens are compared.
        """
        self.use_sampling(scenario)
        with ScratchFolder() as folder:
            stop = Path(folder) / "stop"
            args = replay_arguments(scenario, requests, self.model, warm_up, str(stop))
            # Both processes have the same monotonic clock.
            args.update(check_tokens=check_tokens, until=time.monotonic() + max_seconds)
            if self.backend == "fake":
                assert cost is not None, "a fake backend needs a cost model"
                args["pace"] = self.fake_cost or cost_mapping(cost)
            with stop_on_interrupt(stop):
                result: dict[str, Any] = self.worker.call("replay", REPLAY_TIMEOUT_S, progress, **args)
        return result


def replay_arguments(
    scenario: Scenario, requests: Sequence[Request], model: Model, warm_up: int, stop: Optional[str] = None
) -> dict[str, Any]:
    """Return the arguments of `replay_job.replay` for a scenario, as JSON."""
    return {
        **server_arguments(scenario),
        "code": code_access(),
        "requests": [request_to_json(request) for request in requests],
        "seed": scenario.seed,
        "vocab": model.vocab,
        "context": model.context,
        "warm_up": warm_up,
        "stop": stop,
    }


def server_arguments(scenario: Scenario) -> dict[str, Any]:
    """Return the policy and the engine of a live run, as JSON. A pretending backend needs the chances of drafts."""
    engine, section = scenario.engine.model_dump(mode="json"), scenario.drafts
    if section is not None:
        engine["chances"] = chances_of(section, scenario.seed)
    return {"policy": fields_that_draft(scenario.policy, section), "engine": engine}


@contextlib.contextmanager
def stop_on_interrupt(stop: Path) -> Iterator[None]:
    """Write the stop file at the first Ctrl-C; raise KeyboardInterrupt at the second."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_interrupt(number: int, frame: Any) -> None:
        if stop.exists():
            raise KeyboardInterrupt
        stop.touch()
        print("\nstopping after this step; press Ctrl-C again to discard the results", file=sys.stderr)

    previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def check_same_device(profile: Profile, about: Mapping[str, Any]) -> None:
    """Raise BadInput if the profile was measured on another device or model."""
    for key in ("device", "kernels", "dtype", "model", "threads"):
        expected, actual = name_of(profile.about.get(key)), name_of(about.get(key))
        if expected is not None and actual is not None and expected != actual:
            raise BadInput(
                f"profile {profile.name}: measured with {key} {expected!r}, but this device has {actual!r}; "
                "calibrate it with `sim calibrate probe`, or replay without comparison: --live-only"
            )


def name_of(value: Union[str, Mapping[str, Any], None]) -> Optional[str]:
    """Return the name of a device, kernels or model as text."""
    if isinstance(value, Mapping):
        value = value.get("name")
    return None if value is None else str(value)
