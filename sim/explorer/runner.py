"""Runs of the page in worker processes, one per core at most: records from a cache, progress, and cancelling.

All runs go through one process pool, so a core never has two runs. A job is one answer to the page. Cancelling it ends
its runs at their next step. If a worker does not answer, for example while it reads a large trace, all workers end and
new ones start; the runs of other jobs start again.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any, Optional

from servesim.config.user_code import CodeAccess, use_access
from servesim.study.executor import process_pool
from servesim.study.single_run import Record, Task, context_json

from .worker import join, run_watched

SLOTS = 4096  # jobs that are known at the same time
CANCEL_SECONDS = 1.0  # until the workers of a cancelled job are ended
MAX_RECORDS = 2000  # in the cache
MAX_THREADS = 256  # that wait for workers: one per scenario of an answer
Key = tuple[str, int, Optional[float]]  # scenario, replication, rate factor


def key_of(task: Task) -> Key:
    """Return what identifies a run: all keys of the scenario are the assignment of its task."""
    return json.dumps(task.assignment, sort_keys=True, default=str), task.replication, task.rate_factor


class Job:
    """The runs of one answer to the page."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.change = 0  # number of the change of its page that it answers
        self.batches: set[asyncio.Future[Any]] = set()  # runs that have not ended, also if no one waits for them
        self.cancelled = False
        self.ended = 0  # runs
        self.planned = 0

    def end(self, batch: asyncio.Future[Any]) -> None:
        """Forget runs that have ended."""
        self.batches.discard(batch)
        batch.cancelled() or batch.exception()  # else asyncio prints the error of runs that no one waits for


class Runner:
    """The workers, and the records of the runs so far."""

    def __init__(self, workers: int) -> None:
        memory = get_context("spawn")
        self._cancelled, self._progress = memory.RawArray("b", SLOTS), memory.RawArray("d", SLOTS)
        self._pool = process_pool(workers, join, self._cancelled, self._progress)
        self._pool.start()  # so that the first run does not wait
        self._threads = ThreadPoolExecutor(MAX_THREADS)
        self._records: OrderedDict[Key, Record] = OrderedDict()
        self._jobs = 0

    def start_job(self) -> Job:
        """Return a new job."""
        self._jobs += 1
        self._cancelled[self._jobs % SLOTS], self._progress[self._jobs % SLOTS] = 0, 0.0
        return Job(self._jobs)

    def progress(self, job: Job) -> float:
        """Return which part of the planned runs of a job has ended; the run that is slowest counts in parts."""
        part = self._progress[job.number % SLOTS] if job.ended < job.planned else 0.0
        return (job.ended + min(part, 0.99)) / max(1, job.planned)

    def known(self, task: Task) -> Optional[Record]:
        """Return the record of a run that has ended before."""
        key = key_of(task)
        if key in self._records:
            self._records.move_to_end(key)
        return self._records.get(key)

    async def run(self, job: Job, tasks: Sequence[Task], code: Optional[CodeAccess]) -> list[Record]:
        """Return the records of runs. `code`: the permission to load a policy file."""
        found = {key_of(task): record for task in tasks if (record := self.known(task)) is not None}
        if missing := {key: task for task in tasks if (key := key_of(task)) not in found}:
            job.planned += len(missing)
            with use_access(code):
                context = context_json({})
            batch = asyncio.get_running_loop().run_in_executor(self._threads, self._run, job, context, missing)
            job.batches.add(batch)
            batch.add_done_callback(job.end)
            await asyncio.wait([batch])
            if job.cancelled:
                raise asyncio.CancelledError
            found |= batch.result()
        for key, record in found.items():
            if "error" not in record:
                self._records[key] = record
        while len(self._records) > MAX_RECORDS:
            self._records.popitem(last=False)
        return [found[key_of(task)] for task in tasks]

    def _run(self, job: Job, context: str, tasks: Mapping[Key, Task]) -> dict[Key, Record]:
        """Return the records of runs, in a thread that waits for the workers."""
        keys, found = list(tasks), {}
        for index, record in self._pool.run(context, list(tasks.values()), partial(run_watched, job=job.number)):
            found[keys[index]] = record
            job.ended += 1
        return found

    async def cancel(self, job: Job) -> None:
        """End the runs of a job. Workers that do not react are ended."""
        job.cancelled, starts = True, self._pool.starts
        self._cancelled[job.number % SLOTS] = 1
        if job.batches:
            _, late = await asyncio.wait(job.batches, timeout=CANCEL_SECONDS)
            if late and self._pool.starts == starts:
                await asyncio.to_thread(self._pool.restart)

    def close(self) -> None:
        """End the workers."""
        self._pool.close()
        self._threads.shutdown()
