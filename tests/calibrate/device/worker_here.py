"""A worker in this process: a fake backend with the interface of a worker, and no start, pipe or end of a process.

The worker process itself is the matter of test_worker.py.
"""

from __future__ import annotations

import json
from typing import Any, Callable, Optional, Union

from servesim.calibrate.device.backend import Model, model_named
from servesim.calibrate.device.fake import FakeBackend
from servesim.calibrate.device.worker import about_interpreter, find_job


class WorkerHere:
    """Runs its jobs in the thread of the caller."""

    def __init__(self, backend: str = "fake", python: Optional[str] = None, **options: Any) -> None:
        assert (backend, python) == ("fake", None)
        self.about = about_interpreter()
        self.backend = FakeBackend(**options)

    def load(
        self,
        model: Union[Model, str],
        blocks: int,
        block_size: int,
        host_blocks: int = 0,
        weights: Optional[str] = None,
    ) -> None:
        model = model_named(model) if isinstance(model, str) else model
        self.backend.load(model, blocks, block_size, host_blocks, weights)

    def describe(self) -> dict[str, Any]:
        return self.backend.describe()

    def call(
        self, name: str, timeout: Optional[float] = None, progress: Optional[Callable[[Any], None]] = None, **args: Any
    ) -> Any:
        """Run a job; its arguments, reports and result are JSON, as through a pipe."""

        def emit(report: Any) -> None:
            if progress is not None:
                progress(json.loads(json.dumps(report)))

        return json.loads(json.dumps(find_job(name)(self.backend, json.loads(json.dumps(args)), emit)))

    def close(self) -> None:
        """There is no process to end."""

    kill = close

    def __enter__(self) -> WorkerHere:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
