"""Where configurations are measured: a backend or a server behind a URL."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Optional, Protocol

from servesim.calibrate.client.server_counters import round_trip_ms
from servesim.calibrate.live.setup import DeviceSession
from servesim.calibrate.replay.http_client import Target, replay_against
from servesim.calibrate.replay.measured_run import MeasuredRun
from servesim.calibrate.replay.replay import replay_on_backend, replay_requests
from servesim.config.scenario import Scenario
from servesim.core import BadInput
from servesim.costs.device_profile import Profile

SERVER_START_S = 600.0  # until a restarted server must answer


class LiveTarget(Protocol):
    """What measures configurations for the loop."""

    @property
    def has_steps(self) -> bool: ...  # it reports step times
    @property
    def host_separate(self) -> bool: ...  # step times tell the host from the device
    @property
    def ready(self) -> bool: ...  # it can run any configuration, without its owner
    def measure(
        self, name: str, scenario: Scenario, file: Path, profile: Profile, max_seconds: float
    ) -> tuple[MeasuredRun, float]: ...


@dataclass
class BackendTarget:
    """A model that a worker loads before the first measurement. It can run any configuration."""

    session: DeviceSession
    scenarios: Sequence[Scenario]  # all that may be measured: the largest one decides the size of the cache
    warm_up: int = 32
    quiet: bool = True
    has_steps = True
    ready = True

    @property
    def host_separate(self) -> bool:
        """The clock of the fake backend gives whole steps."""
        return self.session.backend != "fake"

    def measure(
        self, name: str, scenario: Scenario, file: Path, profile: Profile, max_seconds: float
    ) -> tuple[MeasuredRun, float]:
        """Run a scenario, which `file` holds too; stop it after `max_seconds` if possible. Return its device time."""
        start = time.monotonic()
        if not self.session.about:
            self.session.load(self.scenarios)
        left = max_seconds - (time.monotonic() - start)
        replayed = replay_on_backend(
            self.session, name, scenario, replay_requests(scenario, split=False), profile,
            self.warm_up if self.host_separate else 0, self.quiet, max_seconds=left, compares=False,
        )  # fmt: skip
        return replayed.live, time.monotonic() - start


@dataclass
class UrlTarget:
    """A running server. Only its owner can change its configuration: by a command, or by hand."""

    server: Target
    restart: Optional[str] = None  # shell command that starts the server with the scenario in $SCENARIO
    quiet: bool = True
    has_steps = False
    host_separate = False
    _started: Optional[Scenario] = None  # with which the server was restarted

    @property
    def ready(self) -> bool:
        return self.restart is not None

    def measure(
        self, name: str, scenario: Scenario, file: Path, profile: Profile, max_seconds: float
    ) -> tuple[MeasuredRun, float]:
        if self.restart is not None and scenario != self._started:
            self._restart(file)
            self._started = scenario
        start = time.monotonic()  # a restart is no device time: no request runs
        requests = replay_requests(scenario, split=False)
        server = replace(self.server, timeout=min(self.server.timeout, max_seconds))
        live = replay_against(server, name, scenario, requests, None, self.quiet).live
        return live, time.monotonic() - start

    def _restart(self, file: Path) -> None:
        assert self.restart is not None
        done = subprocess.run(
            self.restart, shell=True, env={**os.environ, "SCENARIO": os.path.abspath(file)}, check=False
        )
        if done.returncode:
            raise BadInput(f"--restart: the command ended with exit code {done.returncode}")
        until = time.monotonic() + SERVER_START_S
        while round_trip_ms(self.server.url) is None:
            if time.monotonic() > until:
                raise BadInput(f"--url {self.server.url}: no answer {SERVER_START_S:g} s after --restart")
            time.sleep(0.2)
