"""Run tasks in this process, in one process per core, or on a dask.distributed cluster.

All three yield (task index, record) in the order in which runs end. If a worker dies, another one gets its tasks.
"""

from __future__ import annotations

import importlib
import logging
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Future, ProcessPoolExecutor, wait
from concurrent.futures import Executor as Futures
from contextlib import contextmanager
from typing import Any, Callable, NamedTuple, Optional, Protocol

from servesim.core import BadInput
from servesim.core.errors import WorkerLost, missing_package
from servesim.core.limits import MAX_JOBS

from .single_run import Record, Task, run_context, run_tasks

CHUNK_SECONDS = 0.25  # work per chunk: long compared with submitting it, short compared with the sweep
MAX_CHUNK_RUNS = 64
MAX_RUNS_AHEAD = 128  # per worker: from the oldest unfinished run to the last submitted one
MAX_RETRIES = 3  # of a chunk whose worker died
# Exceptions that mean "the worker died", by name because dask is optional. All other exceptions are raised.
WORKER_DEATHS = ("BrokenProcessPool", "KilledWorker", "CancelledError", "FutureCancelledError")

Results = Iterator[tuple[int, Record]]
Runs = Callable[[str, list[Task]], list[Record]]  # of a context and tasks


class Executor(Protocol):
    """Runs tasks."""

    def run(self, context: str, tasks: Sequence[Task]) -> Results:
        """Yield each task's index and record, in the order in which runs end."""

    def close(self) -> None:
        """End the workers."""


def run_all(executor: Executor, context: str, tasks: Sequence[Task]) -> list[Record]:
    """Return the records of tasks, in the order of the tasks."""
    return [record for records in run_in_order(executor, context, tasks) for record in records]


def run_in_order(executor: Executor, context: str, tasks: Sequence[Task]) -> Iterator[list[Record]]:
    """Yield records in the order of their tasks, each as soon as all earlier ones have arrived."""
    early: dict[int, Record] = {}
    next_index = 0
    for index, record in run_startable(executor, context, tasks):
        early[index] = record
        ready = []
        while next_index in early:
            ready.append(early.pop(next_index))
            next_index += 1
        if ready:
            yield ready


def run_startable(executor: Executor, context: str, tasks: Sequence[Task]) -> Results:
    """Run tasks. A configuration that the real engine refuses does not run: its records have only the reason."""
    runs, refused = run_context(context), {}
    for task in tasks:
        if task.config not in refused:
            refused[task.config] = runs.refusals(task)
    kept = [index for index, task in enumerate(tasks) if not refused[task.config]]
    for index, task in enumerate(tasks):
        if refused[task.config]:
            yield index, {**task.record, "refused": refused[task.config]}
    for position, record in executor.run(context, [tasks[index] for index in kept]):
        yield kept[position], record


class Serial:
    """Runs all tasks in this process, one after the other."""

    def run(self, context: str, tasks: Sequence[Task]) -> Results:
        for index, task in enumerate(tasks):
            yield index, run_tasks(context, [task])[0]

    def close(self) -> None:
        """Do nothing: there are no workers."""


class Chunk(NamedTuple):
    """Consecutive tasks that one worker runs."""

    first: int  # index of the first task
    tasks: list[Task]
    retries: int = 0
    restarts: int = 0  # of the workers, before this chunk was submitted

    def again(self, restarts: int) -> Chunk:
        """Return the chunk after the death of its worker; one that `restart` ended counts as none."""
        died = restarts == self.restarts
        if died and self.retries >= MAX_RETRIES:
            names = ", ".join(f"{task.config}/{task.replication}" for task in self.tasks[:4])
            raise WorkerLost(f"workers died {MAX_RETRIES + 1} times on configuration/replication {names}")
        return self._replace(retries=self.retries + died, restarts=restarts)


class Pool:
    """Submits chunks of tasks to a concurrent.futures executor; resubmits the chunks of a worker that died.

    Several threads may run tasks at the same time. The workers start with the first task.
    """

    def __init__(
        self, start: Callable[[], Futures], workers: Callable[[], int], stop: Callable[[Futures], None]
    ) -> None:
        self._start, self._workers, self._stop = start, workers, stop  # workers() is at least 1
        self._lock = threading.Lock()
        self._futures: Optional[Futures] = None
        self.starts = 0  # how often workers have started
        self._restarts = 0
        self._closed = False

    def run(self, context: str, tasks: Sequence[Task], function: Runs = run_tasks) -> Results:
        """Yield each task's index and record; `function` runs the tasks of a chunk."""
        pending: dict[Future[list[Record]], Chunk] = {}
        sizer = ChunkSizer(len(tasks))
        while sizer.submitted < len(tasks) or pending:
            for chunk in self._next_chunks(tasks, pending.values(), sizer):
                pending[self._submit(function, context, chunk.tasks)] = chunk
            done, _ = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                chunk = pending.pop(future)
                if is_worker_death(future):
                    again = chunk.again(self._restarts)
                    pending[self._submit(function, context, again.tasks)] = again
                    continue
                records = future.result()
                sizer.add_finished(len(records), self._workers())
                yield from enumerate(records, chunk.first)

    def _next_chunks(self, tasks: Sequence[Task], pending: Collection[Chunk], sizer: ChunkSizer) -> Iterator[Chunk]:
        """Yield the next chunks: two per worker are pending, so that no worker is idle."""
        workers = self._workers()
        oldest = min((chunk.first for chunk in pending), default=sizer.submitted)
        limit = min(len(tasks), oldest + MAX_RUNS_AHEAD * workers)
        for _ in range(2 * workers - len(pending)):
            if sizer.submitted < limit:
                first = sizer.submitted
                sizer.submitted = min(len(tasks), first + sizer.next_size(workers))
                yield Chunk(first, list(tasks[first : sizer.submitted]), restarts=self._restarts)

    def _submit(self, function: Runs, context: str, tasks: list[Task]) -> Future[list[Record]]:
        """Submit tasks; workers that have ended are replaced."""
        with self._lock:
            if self._closed:
                raise WorkerLost("the workers have ended")
            try:
                return self._workers_now().submit(function, context, tasks)
            except BrokenExecutor:  # one of them died, so all have ended
                self._end()
                return self._workers_now().submit(function, context, tasks)

    def _workers_now(self) -> Futures:
        if self._futures is None:
            self._futures, self.starts = self._start(), self.starts + 1
        return self._futures

    def _end(self) -> None:
        if self._futures is not None:
            self._stop(self._futures)
            self._futures = None

    def start(self) -> None:
        """Start the workers."""
        with self._lock:
            self._workers_now()

    def restart(self) -> None:
        """End the workers, even in the middle of a run; their tasks run again, however often it happens."""
        with self._lock:
            self._restarts += 1
            self._end()

    def close(self) -> None:
        """End the workers, even in the middle of a run."""
        with self._lock:
            self._closed = True
            self._end()


def is_worker_death(future: Future[Any]) -> bool:
    """Whether a chunk was lost because its worker died."""
    return future.cancelled() or type(future.exception()).__name__ in WORKER_DEATHS


class ChunkSizer:
    """Chooses the number of runs per chunk from the measured speed; chunks get smaller towards the end."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.submitted = 0
        self._finished = 0
        self._start: Optional[float] = None
        self._run_seconds = CHUNK_SECONDS  # estimated seconds per run

    def add_finished(self, runs: int, workers: int) -> None:
        """Update the estimated seconds per run."""
        now = time.monotonic()
        if self._start is None:  # the first chunk includes the start of the workers
            self._start = now
            return
        self._finished += runs
        self._run_seconds = (now - self._start) * workers / self._finished

    def next_size(self, workers: int) -> int:
        """Return the number of runs of the next chunk."""
        fair_size = -(-(self.total - self.submitted) // (4 * workers))
        return max(1, min(int(CHUNK_SECONDS / max(self._run_seconds, 1e-6)), fair_size, MAX_CHUNK_RUNS))


def exit_with_parent() -> None:
    """In a worker: ignore Ctrl-C and exit when the parent process ends for any reason."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def process_pool(jobs: int, initializer: Callable[..., None] = exit_with_parent, *arguments: Any) -> Pool:
    """Return a pool of `jobs` processes on this machine. Each calls `initializer` first, with arguments to share."""
    children: set[Any] = set()

    def start() -> Futures:
        before = set(multiprocessing.active_children())
        children.clear()
        pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer, arguments)
        for _ in range(jobs):  # start all workers now, so that `children` lists all of them
            pool.submit(os.getpid)
        children.update(set(multiprocessing.active_children()) - before)
        return pool

    def stop(pool: Futures) -> None:
        for child in children:
            child.terminate()
        pool.shutdown(wait=True)  # the tasks have failed with their workers

    return Pool(start, lambda: jobs, stop)


class DaskPool(Pool):
    """The workers of a dask.distributed scheduler."""

    def __init__(self, client: Any, address: str) -> None:
        self._client, self._address = client, address
        self._cores, self._counted_at = 1, -math.inf
        super().__init__(
            lambda: client.get_executor(pure=False, retries=MAX_RETRIES), self._count_cores, lambda _: client.close()
        )

    def run(self, context: str, tasks: Sequence[Task], function: Runs = run_tasks) -> Results:
        try:
            yield from super().run(context, tasks, function)
        except Exception as error:  # every call of a lost client raises another one
            is_lost = isinstance(error, (OSError, RuntimeError, CancelledError)) or self._client.status != "running"
            if isinstance(error, WorkerLost) or not is_lost:
                raise
            raise WorkerLost(f"the dask scheduler at {self._address} does not answer any more") from None

    def _count_cores(self) -> int:
        """Return the cores of all workers. The number changes; each query is a message to the scheduler."""
        if time.monotonic() - self._counted_at > 2:
            self._cores, self._counted_at = sum(self._client.nthreads().values()), time.monotonic()
        return max(1, self._cores)


def dask_pool(address: str) -> DaskPool:
    """Return a pool of the workers of a dask.distributed scheduler."""
    try:
        distributed: Any = importlib.import_module("distributed")
    except ImportError:
        raise BadInput(f"--executor dask: {missing_package('distributed')}") from None
    for name in ("distributed", "distributed.client", "tornado.application"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # a lost scheduler is one line of this program
    try:
        return DaskPool(distributed.Client(address), address)
    except (OSError, ValueError, TimeoutError) as error:
        raise BadInput(f"--executor dask:{address}: no dask scheduler answers at this address ({error})") from None


@contextmanager
def open_executor(spec: str, jobs: Optional[int], tasks: int = MAX_JOBS) -> Iterator[Executor]:
    """Yield the executor of the --executor and --jobs options, for this many tasks.

    Its workers end when the block ends, also after SIGTERM.
    """
    executor: Executor
    count = min(process_count(jobs), tasks)
    if spec.startswith("dask:"):
        executor = dask_pool(spec.removeprefix("dask:"))
    elif spec == "local":
        executor = Serial() if count <= 1 else process_pool(count)
    else:
        raise BadInput(f"--executor {spec}: expected local or dask:ADDRESS")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt) if threading.current_thread() is threading.main_thread() else None
    try:
        yield executor
    finally:
        executor.close()
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def process_count(jobs: Optional[int]) -> int:
    """Return `jobs`; without it, one process per core that this process may use."""
    if jobs is not None and not 1 <= jobs <= MAX_JOBS:
        raise BadInput(f"--jobs: expected at least 1, at most {MAX_JOBS}, got {jobs}")
    return jobs or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
