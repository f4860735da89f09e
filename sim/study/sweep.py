"""A sweep: every configuration of an experiment on the same random numbers, journalled and resumable.

The journal has the order of the plan, not the order in which runs end: a continued sweep leaves the same bytes.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

from servesim.core import BadInput
from servesim.files.write import open_text

from .executor import Executor, Results
from .experiment import EXPERIMENT, RUNS, Experiment, stored
from .intervals import interval, paired, replications_for
from .journal import Journal, line_of, read_journal, sync
from .progress import Progress
from .ranking import FRESH, Summary
from .single_run import Record, Task

Found = dict[tuple[int, int], Record]
LEAST = 3  # replications before a spread is believed


class Shard(NamedTuple):
    """One of several parts of a sweep, numbered from 1."""

    part: int = 1
    parts: int = 1

    @property
    def journal(self) -> str:
        """The file it writes to."""
        return RUNS if self.parts == 1 else f"runs-{self.part}-of-{self.parts}.jsonl"


WHOLE = Shard()


def sweep(
    experiment: Experiment,
    folder: Union[str, Path],
    executor: Executor,
    resume: bool = False,
    shard: Shard = WHOLE,
    progress: Optional[Progress] = None,
) -> Found:
    """Run what an experiment still lacks; return all its records, or all of this shard."""
    folder = Path(folder)
    claim(experiment, folder, resume, shard)
    progress = Progress("sweep", quiet=True) if progress is None else progress
    with Journal(folder / shard.journal) as journal:
        found = keyed(journal.records)
        for wanted in rounds(experiment, found):
            wanted = [task for task in wanted if task.config % shard.parts == shard.part - 1]
            tasks = [task for task in wanted if (task.config, task.replication) not in found]
            progress.expect(len(found) + len(tasks), len(found))
            for records in in_order(executor.run(experiment.setup, tasks)):
                journal.append(records)
                found.update(keyed(records))
                progress.advance(len(records))
        sync(journal.path)
    return found


def keyed(records: Iterable[Record]) -> Found:
    """Return records by configuration and replication."""
    return {(record["config"], record["replication"]): record for record in records}


def in_order(results: Results) -> Iterator[list[Record]]:
    """Return records in the order of their tasks, as soon as all before them are in."""
    held: dict[int, Record] = {}
    following = 0
    for place, record in results:
        held[place] = record
        ready = []
        while following in held:
            ready.append(held.pop(following))
            following += 1
        if ready:
            yield ready


def rounds(experiment: Experiment, found: Found) -> Iterator[list[Task]]:
    """Return all tasks up to each round's end; the next round is planned once the records of the last are in `found`.

    What is planned depends on complete rounds alone, so a sweep that stopped in the middle plans the same again.
    """
    configs = range(len(experiment.configs))
    first = max(experiment.replications, LEAST if experiment.ci else 1) if experiment.varies else 1
    targets = dict.fromkeys(configs, first)
    while True:
        most = max(targets.values())
        yield [experiment.task(c, r) for r in range(most) for c in configs if r < targets[c]]
        if experiment.ci is None or not experiment.varies:
            break
        grown = {config: target(experiment, found, config, targets[config]) for config in configs}
        grown[0] = max(grown.values())  # every pair needs its other half
        if grown == targets:
            break
        targets = grown
    if experiment.confirm and experiment.varies and (winner := Summary(experiment, found).winner):
        pair = dict.fromkeys([0, winner.config])
        yield [experiment.task(c, FRESH + r) for r in range(experiment.confirm) for c in pair]


def target(experiment: Experiment, found: Found, config: int, count: int) -> int:
    """Return how many replications a configuration should have, judged by those it has."""
    metric, ci = experiment.objectives[0].metric, experiment.ci
    assert ci is not None
    mine = [found[config, r].get("figures", {}).get(metric) for r in range(count)]
    base = [found[0, r].get("figures", {}).get(metric) for r in range(count)]
    if None in mine or None in base:
        return count  # it failed: more of the same would not help
    spread, apart = interval(mine, experiment.confidence), paired(mine, base, experiment.confidence)
    level = interval(base).mean
    wanted = max(replications_for(ci * abs(spread.mean), spread), replications_for(ci * abs(level), apart))
    return min(experiment.most, max(count, wanted), 2 * count)


def claim(experiment: Experiment, folder: Path, resume: bool, shard: Shard) -> None:
    """Make the folder this experiment's, or make sure that it is; never take over another's."""
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"{folder}: expected a folder to write to, found a file")
    strangers = [path for path in folder.glob("*") if not path.name.startswith(EXPERIMENT)]
    if strangers and not (folder / EXPERIMENT).exists():
        raise BadInput(f"{folder}: expected a new folder or an experiment's, found {strangers[0].name} in it")
    if begin(experiment, folder):
        return
    if not resume and (folder / shard.journal).exists():
        raise BadInput(f"{folder}: holds an experiment, which is never overwritten; --resume continues it")
    check_same(experiment.as_json(), folder / EXPERIMENT, "experiment")


def begin(experiment: Experiment, folder: Path) -> bool:
    """Write experiment.json if it is not there; whole or not at all, and by one process alone."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / EXPERIMENT).exists():
            return False
        with tempfile.NamedTemporaryFile("w", dir=folder, prefix=EXPERIMENT, delete=False, encoding="utf-8") as file:
            json.dump(experiment.as_json(), file, indent=1)
            file.write("\n")
        os.chmod(file.name, 0o644)
    except OSError as error:
        raise BadInput(f"{folder}: cannot be written: {error.strerror}") from None
    try:
        os.link(file.name, folder / EXPERIMENT)
    except FileExistsError:
        return False
    finally:
        os.unlink(file.name)
    return True


def check_same(terms: Mapping[str, Any], file: Path, what: str) -> None:
    """Refuse to continue an experiment or a search under other terms than those in its file."""
    mine, theirs = json.loads(json.dumps(terms)), json.loads(file.read_text(encoding="utf-8"))
    for key in mine:
        if mine[key] != theirs.get(key):
            raise BadInput(f"{file.parent}: holds another {what}: {key} differs; give another folder with -o")


def merge(folder: Union[str, Path]) -> tuple[Experiment, Found]:
    """Put the journals of all shards together in runs.jsonl; say who is not done."""
    folder = Path(folder)
    experiment = stored(folder)
    found: Found = {}
    for path in sorted(folder.glob("runs*.jsonl")):
        found.update(keyed(read_journal(path)))
    tasks = next(rounds(experiment, found))
    missing = [task for task in tasks if (task.config, task.replication) not in found]
    if missing:
        raise BadInput(f"{folder}: {len(missing)} of {len(tasks)} runs are missing: {absent(folder, missing)}")
    if not (folder / RUNS).exists():
        with open_text(folder / RUNS) as file:
            file.writelines(line_of(found[task.config, task.replication]).decode() for task in tasks)
    return experiment, found


def absent(folder: Path, missing: list[Task]) -> str:
    """Say which shards lack how many runs."""
    parts = {int(path.stem.rsplit("-", 1)[1]) for path in folder.glob("runs-*-of-*.jsonl")}
    if len(parts) != 1:
        return "continue the sweep with --resume" if not parts else "shards of different splits are mixed"
    count = parts.pop()
    lacking: dict[int, int] = {}
    for task in missing:
        lacking[task.config % count + 1] = lacking.get(task.config % count + 1, 0) + 1
    return ", ".join(f"shard {part}/{count} lacks {runs}" for part, runs in sorted(lacking.items()))


def load(folder: Union[str, Path]) -> Summary:
    """Return the summary of an experiment's folder."""
    folder = Path(folder)
    experiment = stored(folder)
    found = keyed(read_journal(folder / RUNS))
    if not found:
        raise BadInput(f"{folder}: no run is complete yet")
    return Summary(experiment, found)
