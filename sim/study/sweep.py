"""A sweep: run every configuration of an experiment on the same random numbers, with a journal to resume from.

The journal keeps the planned order of runs, not the order in which they end. So a resumed sweep writes the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

from servesim.config.overrides import Tree
from servesim.config.registry import policy_class
from servesim.config.user_code import names_file
from servesim.core import BadInput
from servesim.execution.executor import Executor, Results
from servesim.execution.progress import Progress
from servesim.execution.single_run import Record, RunKey, Task, record_key
from servesim.files.write import FileExists, list_files, open_text, write_json
from servesim.statistics.intervals import interval, paired_difference, replications_for

from .draws import planned_draws
from .experiment import RUNS_FILE, Experiment, load_experiment
from .experiment_file import EXPERIMENT_FILE, check_unchanged, read_terms, stored_terms
from .journal import Journal, encode_record, read_journal, sync
from .loads import LoadRecords, plan_bisection
from .ranking import CONFIRM_REPLICATION_OFFSET, Summary

Records = dict[RunKey, Record]
MIN_REPLICATIONS = 3  # before `ci` uses a half-width


class Shard(NamedTuple):
    """One of `total` parts of a sweep; `number` starts at 1."""

    number: int = 1
    total: int = 1

    @property
    def journal(self) -> str:
        """The name of the shard's journal file."""
        return RUNS_FILE if self.total == 1 else f"runs-{self.number}-of-{self.total}.jsonl"

    @property
    def experiment_file(self) -> str:
        """The name of the shard's own experiment.json: shards may run in copies of the folder, on other machines."""
        return EXPERIMENT_FILE if self.total == 1 else f"experiment-{self.number}-of-{self.total}.json"

    def owns(self, task: Task) -> bool:
        """Whether this shard runs a task."""
        return task.config % self.total == self.number - 1


ONLY_SHARD = Shard()


def sweep(
    experiment: Experiment,
    folder: Union[str, Path],
    executor: Executor,
    resume: bool = False,
    shard: Shard = ONLY_SHARD,
    progress: Optional[Progress] = None,
) -> Records:
    """Run the missing runs of an experiment; return all its records, or all of this shard."""
    folder = Path(folder)
    load_policies(experiment)
    open_folder(experiment, folder, resume, shard)
    progress = Progress("sweep", quiet=True) if progress is None else progress
    with Journal(folder / shard.journal) as journal:
        records = index_records(journal.records)
        for planned in plan_rounds(experiment, records):
            tasks = [task for task in planned if shard.owns(task) and task.key not in records]
            progress.expect(len(records) + len(tasks), len(records))
            for new in in_task_order(executor.run(experiment.context, tasks)):
                journal.append(new)
                records.update(index_records(new))
                progress.advance(len(new))
        sync(journal.path)
    return records


def load_policies(experiment: Experiment) -> None:
    """Load every policy file of an experiment. Without it, each run of a resumed sweep would fail and be recorded."""
    for name in {policy_name(experiment.tree(config)) for config in range(len(experiment.configs))}:
        if names_file(name):
            policy_class(name)


def policy_name(tree: Tree) -> str:
    """Return the policy name of a scenario."""
    policy = tree.get("policy")
    return str(policy.get("name") if isinstance(policy, Mapping) else policy)


def index_records(records: Iterable[Record]) -> Records:
    """Return records by their keys."""
    return {record_key(record): record for record in records}


def in_task_order(results: Results) -> Iterator[list[Record]]:
    """Yield records in the order of their tasks, each as soon as all earlier ones have arrived."""
    early: dict[int, Record] = {}
    next_index = 0
    for index, record in results:
        early[index] = record
        ready = []
        while next_index in early:
            ready.append(early.pop(next_index))
            next_index += 1
        if ready:
            yield ready


def plan_rounds(experiment: Experiment, records: Mapping[RunKey, Record]) -> Iterator[list[Task]]:
    """Yield the tasks of all rounds so far. Before the next round, `records` must hold their results.

    The plan depends only on complete rounds, so a resumed sweep plans the same tasks.
    """
    if not experiment.loads:
        yield from plan_one_load(experiment, records)
        return
    parts = {load: plan_one_load(experiment.at_load(load), LoadRecords(records, load)) for load in experiment.loads}
    planned: dict[float, list[Task]] = {}
    while new := {load: tasks for load, part in parts.items() if (tasks := next(part, None)) is not None}:
        planned |= new
        yield [task for load in parts for task in planned[load]]
    if experiment.precision is not None:
        yield from plan_bisection(experiment, records)


def plan_one_load(experiment: Experiment, records: Mapping[RunKey, Record]) -> Iterator[list[Task]]:
    """Yield the tasks of an experiment without loads, or of one of its loads."""
    configs = range(len(experiment.configs))
    first = max(experiment.replications, MIN_REPLICATIONS if experiment.ci else 1) if experiment.is_random else 1
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
    values = [records[config, r].get("figures", {}).get(metric) for r in range(count)]
    base = [records[0, r].get("figures", {}).get(metric) for r in range(count)]
    if None in values or None in base:
        return count  # a run failed: more replications would not help
    mean, change = interval(values, experiment.confidence), paired_difference(values, base, experiment.confidence)
    level = interval(base).mean
    targets = ((ci * abs(mean.mean), mean), (ci * abs(level), change))
    needed = max(replications_for(target, measured, experiment.confidence) for target, measured in targets)
    return min(experiment.max_replications, max(count, needed), 2 * count)


def open_folder(experiment: Experiment, folder: Path, resume: bool, shard: Shard) -> None:
    """Create the folder of an experiment, or check that it holds the same experiment."""
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"{folder}: expected a folder to write to, found a file")
    others = [path for path in list_files(folder) if not path.name.startswith(EXPERIMENT_FILE)]
    if others and not (folder / EXPERIMENT_FILE).exists():
        raise BadInput(f"{folder}: expected a new folder or the folder of an experiment, found {others[0].name} in it")
    terms = experiment.as_json()
    if not write_terms(terms, folder / EXPERIMENT_FILE):
        if not resume and (folder / shard.journal).exists():
            raise BadInput(
                f"{folder}: already holds a sweep; continue with --resume, or use --fresh or another folder (-o)"
            )
        check_unchanged(terms, folder / EXPERIMENT_FILE, "experiment")
    if shard.total > 1 and not write_terms(terms, folder / shard.experiment_file):
        check_unchanged(terms, folder / shard.experiment_file, "experiment")


def write_terms(terms: Mapping[str, Any], path: Path) -> bool:
    """Write experiment.json unless it exists; atomic, so that only one of several processes writes it."""
    try:
        write_json(path, stored_terms(terms, path.parent), overwrite=False)
    except FileExists:
        return False
    return True


def merge_shards(folder: Union[str, Path]) -> tuple[Experiment, Records]:
    """Merge the journals of all shards into runs.jsonl; raise BadInput if runs are missing."""
    folder = Path(folder)
    experiment = load_experiment(folder)
    for path in sorted(folder.glob("experiment-*-of-*.json")):
        check_unchanged(read_terms(path), folder / EXPERIMENT_FILE, "experiment")
    records: Records = {}
    for path in sorted(folder.glob("runs*.jsonl")):
        records.update(index_records(read_journal(path)))
    tasks = next(plan_rounds(experiment, records))
    missing = [task for task in tasks if task.key not in records]
    if missing:
        details = describe_missing(folder, missing)
        raise BadInput(f"{folder}: {len(missing)} of {len(tasks)} runs are missing: {details}")
    if not (folder / RUNS_FILE).exists():
        with open_text(folder / RUNS_FILE) as file:
            file.writelines(encode_record(records[task.key]).decode() for task in tasks)
    return experiment, records


def describe_missing(folder: Path, missing: list[Task]) -> str:
    """Return the number of missing runs per shard."""
    counts = {int(path.stem.rsplit("-", 1)[1]) for path in folder.glob("runs-*-of-*.jsonl")}
    if len(counts) != 1:
        return "continue the sweep with --resume" if not counts else "the folder mixes different numbers of shards"
    count = counts.pop()
    missing_runs: dict[int, int] = {}
    for task in missing:
        missing_runs[task.config % count + 1] = missing_runs.get(task.config % count + 1, 0) + 1
    return ", ".join(f"shard {number}/{count} lacks {runs}" for number, runs in sorted(missing_runs.items()))


def load_summary(folder: Union[str, Path], load: Optional[float] = None) -> Summary:
    """Return the summary of an experiment folder; `load` is one of its loads, if it has some."""
    folder = Path(folder)
    experiment, records = read_records(folder)
    if load is None and not experiment.loads:
        return Summary(experiment, records)
    if load is None or load not in experiment.loads:
        loads = ", ".join(f"{rate:g}" for rate in experiment.loads) or "none"
        given = "no load" if load is None else f"{load:g}"
        raise BadInput(f"{folder}: expected one of its loads ({loads}), got {given}; use --load RATE or DIR@RATE")
    return Summary(experiment.at_load(load), LoadRecords(records, load))


def read_records(folder: Path) -> tuple[Experiment, Records]:
    """Return the experiment of a folder and its finished runs."""
    experiment = load_experiment(folder)
    records = index_records(read_journal(folder / RUNS_FILE))
    if not records:
        raise BadInput(f"{folder}: has no finished run yet; continue the sweep with --resume")
    if any((record.get("load") is None) == bool(experiment.loads) for record in records.values()):
        raise BadInput(f"{folder / RUNS_FILE}: expected runs {'with' if experiment.loads else 'without'} a load")
    return experiment, records
