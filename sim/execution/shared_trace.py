"""The trace file of an experiment is read once, in the parent process; workers on the same machine get its arrays.

The arrays are in a file of a private temporary folder. A worker that cannot read it loads the trace itself: on another
machine, or for a configuration with another trace. A workload is not shared: a worker generates it from the seed.
"""

from __future__ import annotations

import json
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Optional

from pydantic import ValidationError
from servesim.config.overrides import Tree, apply_assignment
from servesim.config.scenario import Scenario
from servesim.core import BadInput
from servesim.files.scratch import ScratchFolder
from servesim.files.write import open_bytes
from servesim.runs.simulate import load_trace
from servesim.traces.request_table import table_of
from servesim.traces.trace import Trace


class SharedTraces:
    """The trace files that this process has read for its workers."""

    def __init__(self) -> None:
        self._folder: Optional[ScratchFolder] = None
        self._paths: dict[str, str] = {}  # by key

    def share(self, base: Tree) -> Optional[str]:
        """Return the path of the arrays of a base scenario's trace, None if it has no trace file or an unusable one."""
        try:
            scenario = Scenario.model_validate(apply_assignment(base, {}))
            key = trace_key(scenario)
            if scenario.trace is not None and key not in self._paths:
                self._paths[key] = self._write(key, load_trace(scenario))
        except (BadInput, ValidationError):  # every run of a worker reports the error
            return None
        return self._paths.get(key)

    def _write(self, key: str, trace: Trace) -> str:
        trace.requests = table_of(trace.requests)
        if self._folder is None:
            self._folder = ScratchFolder()
        path = Path(self._folder.name) / f"{len(self._paths)}.pickle"
        with open_bytes(path) as file:
            pickle.dump((key, trace), file, protocol=pickle.HIGHEST_PROTOCOL)
        return str(path)

    def close(self) -> None:
        """Remove the files."""
        if self._folder is not None:
            self._folder.cleanup()
        self._folder, self._paths = None, {}


def read_shared(path: Optional[str], scenario: Scenario) -> Optional[Trace]:
    """Return the trace of a scenario if the parent process has shared it."""
    if path is None or scenario.trace is None:
        return None
    with suppress(OSError), open(path, "rb") as file:
        key, trace = pickle.load(file)
        if key == trace_key(scenario):
            result: Trace = trace
            return result
    return None


def trace_key(scenario: Scenario) -> str:
    """Return a text that is equal for equal trace sections."""
    return json.dumps(None if scenario.trace is None else scenario.trace.model_dump(), sort_keys=True)
