"""Progress of many runs as a bar, and of one long run as a line; plain lines if it is not a terminal."""

from __future__ import annotations

import sys
import time
from typing import Any, Optional, TextIO

from servesim.files.terminal import printable, raw_stream

REPORT_INTERVAL_S = 10.0  # between plain lines


class Progress:
    """Counts runs and prints progress; use it as a context manager. `quiet` prints nothing."""

    def __init__(self, name: str, quiet: bool = False, file: Optional[TextIO] = None, unit: str = "run") -> None:
        self.name = name
        self.unit = unit
        self.file = sys.stderr if file is None else file
        self.quiet = quiet
        self.done = self.total = 0
        self.done_before = 0  # runs of earlier processes
        self._bar: Any = None
        self._start = self._last_report = time.monotonic()
        self._printed = 0  # runs in the last plain line

    def __enter__(self) -> Progress:
        if not self.quiet and self.file.isatty():
            from tqdm import tqdm

            tqdm.monitor_interval = 0  # no monitor thread
            how: Any = {"file": raw_stream(self.file), "dynamic_ncols": True, "smoothing": 0.05}
            self._bar = tqdm(desc=printable(self.name), unit=self.unit, **how)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        elif not self.quiet and self.done > max(self.done_before, self._printed):
            self._print()

    def expect(self, total: int, done: int) -> None:
        """Set the total number of runs and the number done so far; fewer than before are those of the next sweep."""
        if not self.total or done < self.done:
            self.done_before, self._start, self._printed = done, time.monotonic(), 0
            if self._bar is not None:
                self._bar.initial = self._bar.n = done
        self.total, self.done = total, done
        if self._bar is not None:
            self._bar.total = total
            self._bar.refresh()

    def advance(self, runs: int) -> None:
        """Count finished runs."""
        self.done += runs
        if self._bar is not None:
            self._bar.update(runs)
        elif not self.quiet and time.monotonic() - self._last_report >= REPORT_INTERVAL_S:
            self._print()

    def _print(self) -> None:
        self._last_report, self._printed = time.monotonic(), self.done
        rate = (self.done - self.done_before) / max(self._last_report - self._start, 1e-9)
        left = (self.total - self.done) / rate if rate else 0.0
        text = f"{self.name}: {self.done}/{self.total} {self.unit}s, {rate:.1f}/s"
        print(f"{text}, {left:.0f} s left" if self.done < self.total else text, file=self.file, flush=True)


class StatusLine:
    """The state of one long run: a line that is rewritten on a terminal, otherwise a new line from time to time."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self.terminal = sys.stderr.isatty()
        self._printed_at = time.monotonic()

    def show(self, text: str) -> None:
        """Print the state, unless the last one is recent."""
        if self.quiet or (not self.terminal and time.monotonic() - self._printed_at < REPORT_INTERVAL_S):
            return
        self._printed_at = time.monotonic()
        line, end = (f"\r{printable(text):<100}", "") if self.terminal else (printable(text), "\n")
        print(line, end=end, file=raw_stream(sys.stderr), flush=True)

    def end(self) -> None:
        """End the line."""
        if self.terminal and not self.quiet:
            print(file=sys.stderr)
