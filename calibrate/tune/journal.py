"""tune.jsonl: what each round measures, and every finished measurement. A killed run loses no measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal, Optional

from pydantic import Field, model_validator
from servesim.files.checked import Index, Stored, StoredNumber
from servesim.study.journal import Journal, sync

JOURNAL = "tune.jsonl"


@dataclass(frozen=True)
class Measurement:
    """One configuration, measured live. Its files are in the folder live/NAME."""

    round: int
    config: int
    name: str
    seconds: float  # of the device, with loading and warm-up
    metrics: Mapping[str, float]  # metrics of the run; empty if it was stopped or got stuck
    predicted: Mapping[str, float]  # the same metrics as simulated before the measurement
    stopped: bool = False  # at the end of the device time: only its steps are used
    differs: Sequence[str] = ()  # settings of the server that are not those of the configuration


class TuneLine(Stored):
    """The keys of one line: the choice of a round, or a measurement."""

    event: Literal["chosen", "measured"]
    round: Index
    configs: Optional[list[Index]] = None
    config: Optional[Index] = None
    name: Optional[str] = Field(None, pattern=r"^[\w-]+$")
    seconds: Optional[StoredNumber] = None
    metrics: dict[str, StoredNumber] = Field({})
    predicted: dict[str, StoredNumber] = Field({})
    stopped: bool = False
    differs: list[str] = Field([])

    @model_validator(mode="after")
    def _has_result(self) -> TuneLine:
        complete = self.configs is not None if self.event == "chosen" else None not in (self.config, self.name)
        if not complete or (self.event == "measured" and self.seconds is None):
            raise ValueError("the configs of a choice, or the config, name and seconds of a measurement")
        return self


class TuneJournal:
    """The open journal of a tuning run; use it as a context manager."""

    def __init__(self, folder: Path) -> None:
        self._journal = Journal(folder / JOURNAL, TuneLine)
        self.chosen: dict[int, list[int]] = {}  # by round: the configurations to measure
        self.measurements: list[Measurement] = []

    def __enter__(self) -> TuneJournal:
        self._journal.__enter__()
        for record in self._journal.records:
            line = TuneLine.model_validate(record)
            if line.event == "chosen":
                self.chosen[line.round] = list(line.configs or [])
            else:
                self.measurements.append(Measurement(**{f.name: getattr(line, f.name) for f in fields(Measurement)}))
        return self

    def __exit__(self, *_: object) -> None:
        self._journal.__exit__()

    def choose(self, number: int, configs: Sequence[int]) -> None:
        """Record what a round measures, before it measures."""
        self._journal.append([{"event": "chosen", "round": number, "configs": list(configs)}])
        self.chosen[number] = list(configs)

    def add(self, measurement: Measurement) -> None:
        """Record a finished measurement, whose files are complete."""
        self._journal.append([{"event": "measured", **asdict(measurement)}])
        sync(self._journal.path)
        self.measurements.append(measurement)

    @property
    def device_seconds(self) -> float:
        """The device time of all measurements."""
        return sum(measurement.seconds for measurement in self.measurements)

    def of_round(self, number: int) -> list[Measurement]:
        """Return the measurements of a round."""
        return [measurement for measurement in self.measurements if measurement.round == number]

    def up_to(self, number: int) -> list[Measurement]:
        """Return the measurements of a round and of those before it."""
        return [measurement for measurement in self.measurements if measurement.round <= number]
