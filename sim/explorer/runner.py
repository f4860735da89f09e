"""Runs of the page in worker processes, one per core at most: records from a cache, progress, and cancelling.

All runs go through one process pool, so a core never has two runs. A job is one answer to the page. Cancelling it ends
its runs at their next step. If a worker does not answer, for example while it reads a large trace, all workers end and
new ones start; the runs of other jobs start again.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing import get_context
from typing import Any, Optional

from servesim.config.user_code import CodeAccess, use_access
from servesim.core.errors import WorkerLost
from servesim.study.executor import MAX_RETRIES, Pool, is_worker_death, process_pool
from servesim.study.single_run import Record, Task, context_json

from .worker import join, run_watched

SLOTS = 4096  # jobs that are known at the same time
CANCEL_SECONDS = 1.0  # until the workers of a cancelled job are ended
MAX_RECORDS = 2000  # in the cache
Key = tuple[str, int, Optional[float]]  # scenario, replication, rate factor


def key_of(task: Task) -> Key:
    """Return what identifies a run: all keys of the scenario are the assignment of its task."""
    return json.dumps(task.assignment, sort_keys=True, default=str), task.replication, task.rate_factor


class Job:
    """The runs of one answer to the page."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.futures: dict[Future[Any], asyncio.Future[Any]] = {}  # runs, and what waits for each
        self.cancelled = False
        self.ended = 0  # runs
        self.planned = 0

    def watch(self, future: Future[Any]) -> asyncio.Future[Any]:
        """Keep a run until it has ended, also if no one waits for it any more."""
        self.futures[future] = waiting = asyncio.wrap_future(future)

        def end(done: asyncio.Future[Any]) -> None:
            del self.futures[future]
            done.cancelled() or done.exception()  # else asyncio prints the error of a run that no one waits for

        waiting.add_done_callback(end)
        return waiting


class Runner:
    """The workers, and the records of the runs so far."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        memory = get_context("spawn")
        self._cancelled, self._progress = memory.RawArray("b", SLOTS), memory.RawArray("d", SLOTS)
        self._pool = self._start_pool()
        self._records: OrderedDict[Key, Record] = OrderedDict()
        self._jobs = 0

    def _start_pool(self) -> Pool:
        """Start workers, so that the first run does not wait for them."""
        pool = process_pool(self.workers, join, self._cancelled, self._progress)
        pool.submit(os.getpid)
        return pool

    async def _replace(self, pool: Pool) -> None:
        """End the workers of a pool and start others, once."""
        if pool is self._pool:
            self._pool = self._start_pool()
            await asyncio.to_thread(pool.close)

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

    async def run(self, job: Job, task: Task, code: Optional[CodeAccess]) -> Record:
        """Return the record of a run. A worker that dies is replaced, and the run starts again.

        `code`: the permission to load a policy file.
        """
        record = self.known(task)
        if record is not None:
            return record
        job.planned += 1
        with use_access(code):
            context = context_json({})
        detailed = task.replication == 0 and task.rate is None
        result = await self._call(job, run_watched, context, task, job.number, detailed)
        job.ended += 1
        if "error" not in result:
            self._records[key_of(task)] = result
            while len(self._records) > MAX_RECORDS:
                self._records.popitem(last=False)
        return result

    async def _call(self, job: Job, function: Callable[..., Record], *arguments: Any) -> Record:
        """Return the result of a call in a worker. If the worker dies, call it again in another one."""
        for _ in range(MAX_RETRIES + 1):
            pool = self._pool
            with suppress(RuntimeError):  # the pool is broken, and no one has replaced it yet
                future = pool.submit(function, *arguments)
                await asyncio.wait([job.watch(future)])
                if job.cancelled:
                    raise asyncio.CancelledError
                if not is_worker_death(future):
                    result: Record = future.result()
                    return result
            await self._replace(pool)
        raise WorkerLost(f"workers died {MAX_RETRIES + 1} times on this scenario")

    async def cancel(self, job: Job) -> None:
        """End the runs of a job. Workers that do not react are ended."""
        job.cancelled, pool = True, self._pool
        self._cancelled[job.number % SLOTS] = 1
        running = [waiting for future, waiting in job.futures.items() if not future.cancel()]
        if not running:
            return
        _, late = await asyncio.wait(running, timeout=CANCEL_SECONDS)
        if late:
            await self._replace(pool)

    def close(self) -> None:
        """End the workers."""
        self._pool.close()
