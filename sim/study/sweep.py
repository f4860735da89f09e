"""A sweep: run every configuration of an experiment on the same random numbers, with a journal to resume from.

The journal keeps the planned order of runs, not the order in which they end. So a resumed sweep writes the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Optional, Union

from servesim.core import BadInput
from servesim.statistics.intervals import interval, paired_difference, replications_for

from .executor import Executor, run_in_order
from .experiment import RUNS_FILE, Experiment, load_experiment, planned_draws
from .experiment_file import EXPERIMENT_FILE, load_code, open_folder
from .journal import Journal, read_journal
from .progress import Progress
from .ranking import CONFIRM_REPLICATION_OFFSET, Summary
from .rates import RateRecords, plan_bisection
from .single_run import Record, RunKey, Task, is_repeated, metric_of, record_key

Records = dict[RunKey, Record]
MIN_REPLICATIONS = 3  # before `ci` uses a half-width


def sweep(
    experiment: Experiment,
    folder: Union[str, Path],
    executor: Executor,
    resume: bool = False,
    progress: Optional[Progress] = None,
) -> Records:
    """Run the missing runs of an experiment; return all its records."""
    folder = Path(folder)
    load_code(map(experiment.tree, range(len(experiment.configs))))
    open_folder(folder, EXPERIMENT_FILE, experiment.as_json(), resume, "sweep")
    progress = Progress("sweep", quiet=True) if progress is None else progress
    with Journal(folder / RUNS_FILE) as journal:
        records = finished_runs(journal.records)
        for planned in plan_rounds(experiment, records):
            progress.expect(len(records.keys() | {task.key for task in planned}), len(records))
            for count in run_missing(planned, records, journal, executor, experiment.context):
                progress.advance(count)
        journal.sync()
    return records


def run_missing(
    tasks: Iterable[Task], records: Records, journal: Journal, executor: Executor, context: str,
    line: Callable[[Record], Record] = lambda record: record,
) -> Iterator[int]:  # fmt: skip
    """Run the tasks without a record; journal and keep the `line` of each. Yield how many runs have just ended."""
    missing = {task.key: task for task in tasks if task.key not in records}
    for new in run_in_order(executor, context, list(missing.values())):
        lines = list(map(line, new))
        journal.append(lines)
        records.update(index_records(lines))
        yield len(lines)


def index_records(records: Iterable[Record]) -> Records:
    """Return records by their keys."""
    return {record_key(record): record for record in records}


def finished_runs(records: Iterable[Record]) -> Records:
    """Return the records of a journal that need no other run."""
    return {key: record for key, record in index_records(records).items() if not is_repeated(record)}


def plan_rounds(experiment: Experiment, records: Mapping[RunKey, Record]) -> Iterator[list[Task]]:
    """Yield the tasks of each round, some of them from earlier rounds. `records` must have them before the next round.

    The plan depends only on complete rounds, so a resumed sweep plans the same tasks.
    """
    if not experiment.rates:
        yield from plan_one_rate(experiment, records)
        return
    parts = {rate: plan_one_rate(experiment.at_rate(rate), RateRecords(records, rate)) for rate in experiment.rates}
    planned: dict[float, list[Task]] = {}
    while new := {rate: tasks for rate, part in parts.items() if (tasks := next(part, None)) is not None}:
        planned |= new
        yield [task for rate in parts for task in planned[rate]]
    if experiment.precision is not None:
        yield from plan_bisection(experiment, records)


def plan_one_rate(experiment: Experiment, records: Mapping[RunKey, Record]) -> Iterator[list[Task]]:
    """Yield the tasks of an experiment without rates, or of one of its rates."""
    configs = range(len(experiment.configs))
    first = max(experiment.runs_per_config, MIN_REPLICATIONS if experiment.ci and experiment.is_random else 1)
    targets = dict.fromkeys(configs, first)
    draws = [experiment.task(c, r, draw) for r, draw in planned_draws(experiment.intervals, first) for c in configs]
    while True:
        tasks = [experiment.task(c, r) for r in range(max(targets.values())) for c in configs if r < targets[c]]
        yield [*tasks, *draws]
        if experiment.ci is None or not experiment.is_random:
            break
        grown = {config: replications_needed(experiment, records, config, targets[config]) for config in configs}
        grown[0] = max(grown.values())  # every paired difference needs a run of the baseline
        if grown == targets:
            break
        targets = grown
    if experiment.confirm and experiment.is_random and (winner := Summary(experiment, records).winner):
        pair = dict.fromkeys([0, winner.config])
        yield [experiment.task(c, CONFIRM_REPLICATION_OFFSET + r) for r in range(experiment.confirm) for c in pair]


def replications_needed(experiment: Experiment, records: Mapping[RunKey, Record], config: int, count: int) -> int:
    """Return the replications that a configuration needs for `ci`, estimated from its first `count` ones."""
    metric, ci = experiment.objectives[0].metric, experiment.ci
    assert ci is not None
    found, of_base = ([metric_of(records[number, r], metric) for r in range(count)] for number in (config, 0))
    values, base = ([value for value in side if value is not None] for side in (found, of_base))
    if min(len(values), len(base)) < count:
        return count  # a run failed: more replications would not help
    mean, change = interval(values, experiment.confidence), paired_difference(values, base, experiment.confidence)
    level = interval(base).mean
    targets = ((ci * abs(mean.mean), mean), (ci * abs(level), change))
    needed = max(replications_for(target, measured, experiment.confidence) for target, measured in targets)
    return min(experiment.max_replications, max(count, needed), 2 * count)


def load_summary(folder: Union[str, Path], rate: Optional[float] = None) -> Summary:
    """Return the summary of an experiment folder; `rate` is one of its rates, if it has some."""
    folder = Path(folder)
    experiment, records = read_records(folder)
    if rate is None and not experiment.rates:
        return Summary(experiment, records)
    if rate is None or rate not in experiment.rates:
        rates = ", ".join(f"{known:g}" for known in experiment.rates) or "none"
        given = "no rate" if rate is None else f"{rate:g}"
        raise BadInput(f"{folder}: expected one of its rates ({rates}), got {given}; use --rate RATE or DIR@RATE")
    return Summary(experiment.at_rate(rate), RateRecords(records, rate))


def read_records(folder: Path) -> tuple[Experiment, Records]:
    """Return the experiment of a folder and its finished runs."""
    experiment = load_experiment(folder)
    records = index_records(read_journal(folder / RUNS_FILE))
    if not records:
        raise BadInput(f"{folder}: has no finished run yet; continue the sweep with --resume")
    if any((record.get("rate") is None) == bool(experiment.rates) for record in records.values()):
        raise BadInput(f"{folder / RUNS_FILE}: expected runs {'with' if experiment.rates else 'without'} a rate")
    return experiment, records
