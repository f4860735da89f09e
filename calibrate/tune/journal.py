"""tune.jsonl: what each round measures, and every finished measurement. A killed run loses no measurement."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Optional

from pydantic import ConfigDict, Field, model_validator
from servesim.files.checked import Index, Stored, StoredNumber
from servesim.study.journal import Journal

JOURNAL = "tune.jsonl"


class Measurement(Stored):
    """One configuration, measured live. Its files are in the folder live/NAME."""

    model_config = ConfigDict(frozen=True)

    round: Index
    config: Index
    name: str = Field(pattern=r"^[\w-]+$")
    seconds: StoredNumber  # of the device, with loading and warm-up
    metrics: dict[str, StoredNumber]  # metrics of the run; empty if it was stopped or got stuck
    predicted: dict[str, StoredNumber]  # the same metrics as simulated before the measurement
    stopped: bool = False  # at the end of the device time: only its steps are used
    differs: list[str] = Field([])  # settings of the server that are not those of the configuration


class TuneLine(Stored):
    """The keys of one line: the choice of a round, or a measurement."""

    round: Index
    configs: Optional[list[Index]] = None  # to measure
    measured: Optional[Measurement] = None

    @model_validator(mode="after")
    def _has_one(self) -> TuneLine:
        if (self.configs is None) == (self.measured is None):
            raise ValueError("the configs of a choice, or a measurement")
        return self


class TuneJournal(Journal):
    """The open journal of a tuning run; use it as a context manager."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / JOURNAL, TuneLine)
        self.chosen: dict[int, list[int]] = {}  # by round: the configurations to measure
        self.measurements: list[Measurement] = []

    def __enter__(self) -> TuneJournal:
        super().__enter__()
        for record in self.records:
            self._note(TuneLine.model_validate(record))
        return self

    def _note(self, line: TuneLine) -> None:
        if line.measured is not None:
            self.measurements.append(line.measured)
        else:
            self.chosen[line.round] = line.configs or []

    def _add(self, line: TuneLine) -> None:
        self.append([line.model_dump(exclude_none=True)])
        self.sync()
        self._note(line)

    def choose(self, number: int, configs: Sequence[int]) -> None:
        """Record what a round measures, before it measures."""
        self._add(TuneLine(round=number, configs=list(configs)))

    def add(self, measurement: Measurement) -> None:
        """Record a finished measurement, whose files are complete."""
        self._add(TuneLine(round=measurement.round, measured=measurement))

    @property
    def device_seconds(self) -> float:
        """The device time of all measurements."""
        return sum(measurement.seconds for measurement in self.measurements)

    def of_round(self, number: int) -> list[Measurement]:
        """Return the measurements of a round."""
        return [measurement for measurement in self.measurements if measurement.round == number]
