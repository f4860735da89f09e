"""Where a live run takes place: a worker with a loaded model, large enough for every scenario that will be replayed."""

from __future__ import annotations

import contextlib
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Callable, Optional, Union

from servesim.calibrate.device.backend import MODELS, Model
from servesim.calibrate.device.worker_client import Worker
from servesim.config.scenario import Scenario
from servesim.core import BadInput, Request, StepCost
from servesim.core.request import ASKED
from servesim.costs.device_profile import Profile
from servesim.costs.mapping import cost_from, mapping

QUIET = 900.0  # seconds without a word from a running replay after which it is given up
FAKE = Model("fake", 1, 1, 1, 1, 1, 32000, 1 << 20)  # a fake device serves any length


class Stage:
    """A worker and what it has loaded. Use it as a context."""

    def __init__(
        self, backend: str, model: Optional[str] = None, python: Optional[str] = None, weights: Optional[str] = None,
        options: Optional[Mapping[str, Any]] = None,
    ) -> None:  # fmt: skip
        self.backend = backend
        self.model = FAKE if backend == "fake" else known_model(model or "tiny")
        self.weights = weights
        given = dict(options or {})
        self.pace: Optional[Mapping[str, Any]] = None  # what the steps of a fake device take
        if backend == "fake":
            self.pace = paced(given.pop("cost", None))
            given["cost"] = {}  # the clock keeps its time, not the device
        self.worker = Worker(backend, python, **given)
        self.about: dict[str, Any] = {}

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.worker.close()

    def load(self, scenarios: Sequence[Scenario]) -> dict[str, Any]:
        """Load the model with memory for the largest scenario; return what the backend is."""
        sizes = {scenario.engine.block_size for scenario in scenarios}
        if len(sizes) > 1:
            raise BadInput(f"engine.block_size: expected one for all scenarios of a replay, got {sorted(sizes)}")
        blocks = max(scenario.engine.num_blocks for scenario in scenarios) + 1
        host = max(scenario.engine.host_blocks for scenario in scenarios)
        self.worker.load(self.model, blocks, sizes.pop(), host, self.weights)
        self.about = self.worker.describe()
        return self.about

    def replay(
        self,
        scenario: Scenario,
        requests: Sequence[Request],
        cost: Optional[StepCost] = None,
        warm_up: int = 0,
        progress: Optional[Callable[[Any], None]] = None,
    ) -> dict[str, Any]:
        """Replay fresh requests; return what `live.replay` told. Ctrl-C ends it with what there is by then."""
        with tempfile.TemporaryDirectory(prefix="servesim-") as folder:
            stop = Path(folder) / "stop"
            args = arguments(scenario, requests, self.model, warm_up, str(stop))
            if self.backend == "fake":
                assert cost is not None, "a fake device takes the time a cost model says"
                args["pace"] = self.pace or mapping(cost)
            with until_interrupted(stop):
                told: dict[str, Any] = self.worker.call("replay", QUIET, progress, **args)
        return told


def paced(cost: Any) -> Optional[Mapping[str, Any]]:
    """Return what a fake device is told to take, checked."""
    if cost is None:
        return None
    if not isinstance(cost, Mapping):
        raise BadInput(f"--option cost: expected terms of a cost model, got {cost!r}")
    cost_from(cost, "--option cost")
    return cost


def known_model(name: str) -> Model:
    """Return a model by its name."""
    if name not in MODELS:
        raise BadInput(f"model {name!r}: expected one of {', '.join(MODELS)}")
    return MODELS[name]


def arguments(
    scenario: Scenario, requests: Sequence[Request], model: Model, warm_up: int, stop: Optional[str] = None
) -> dict[str, Any]:
    """Return a scenario as `live.replay` takes it, plain JSON."""
    return {
        "policy": scenario.policy,
        "engine": scenario.engine.model_dump(mode="json"),
        "requests": [[plain(getattr(request, name)) for name in ASKED] for request in requests],
        "seed": scenario.seed,
        "vocab": model.vocab,
        "context": model.context,
        "warm_up": warm_up,
        "stop": stop,
    }


def plain(value: Any) -> Any:
    """Return a request's field as JSON takes it."""
    return value if value is None or isinstance(value, (int, float, str)) else list(value)


@contextlib.contextmanager
def until_interrupted(stop: Path) -> Iterator[None]:
    """Turn the first Ctrl-C into a stop file; the second one is what it always is."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def asked(number: int, frame: Any) -> None:
        if stop.exists():
            raise KeyboardInterrupt
        stop.touch()
        print("\nstopping after this step; once more to give up the results", file=sys.stderr)

    before = signal.signal(signal.SIGINT, asked)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def same_device(profile: Profile, about: Mapping[str, Any]) -> None:
    """Refuse a profile that was measured on something else."""
    for key in ("device", "kernels", "dtype", "model", "threads"):
        given, found = name_of(profile.about.get(key)), name_of(about.get(key))
        if given is not None and found is not None and given != found:
            raise BadInput(
                f"profile {profile.name}: measured with {key} {given!r}, this is {found!r}; "
                "measure this one with `sim calibrate probe`, or replay without comparing: --live-only"
            )


def name_of(value: Union[str, Mapping[str, Any], None]) -> Optional[str]:
    """Return what a profile or a backend calls its device, kernels or model."""
    if isinstance(value, Mapping):
        value = value.get("name")
    return None if value is None else str(value)
