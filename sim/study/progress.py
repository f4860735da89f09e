"""Progress of many runs: a bar with rate and time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any, Optional, TextIO

EVERY = 10.0  # seconds between plain lines


class Progress:
    """Counts runs; a context manager. `quiet` says nothing at all."""

    def __init__(self, what: str, quiet: bool = False, file: Optional[TextIO] = None, unit: str = "run") -> None:
        self.what = what
        self.unit = unit
        self.file = sys.stderr if file is None else file
        self.quiet = quiet
        self.done = self.total = 0
        self.found = 0  # done before this process began
        self._bar: Any = None
        self._began = self._said = time.monotonic()

    def __enter__(self) -> Progress:
        if not self.quiet and self.file.isatty():
            from tqdm import tqdm

            tqdm.monitor_interval = 0  # no thread beside the workers' own
            self._bar = tqdm(desc=self.what, unit=self.unit, file=self.file, dynamic_ncols=True, smoothing=0.05)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        elif not self.quiet and self.done > self.found:
            self._say()

    def expect(self, total: int, done: int) -> None:
        """Say how many runs there are in all, and how many are done by now."""
        if not self.total:
            self.found = done
            if self._bar is not None:
                self._bar.initial = self._bar.n = done
        self.total, self.done = total, done
        if self._bar is not None:
            self._bar.total = total
            self._bar.refresh()

    def advance(self, runs: int) -> None:
        self.done += runs
        if self._bar is not None:
            self._bar.update(runs)
        elif not self.quiet and time.monotonic() - self._said >= EVERY:
            self._say()

    def _say(self) -> None:
        self._said = time.monotonic()
        rate = (self.done - self.found) / max(self._said - self._began, 1e-9)
        left = (self.total - self.done) / rate if rate else 0.0
        text = f"{self.what}: {self.done}/{self.total} {self.unit}s, {rate:.1f}/s"
        print(f"{text}, {left:.0f} s left" if self.done < self.total else text, file=self.file, flush=True)
