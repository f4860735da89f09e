"""Where runs are made: in this process, in one process a core, or on a dask.distributed cluster.

All three return (place, record) in the order in which runs end. Another worker gets the tasks of one that dies.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures import Executor as Futures
from contextlib import contextmanager
from typing import Any, Callable, NamedTuple, Optional, Protocol

from servesim.core import BadInput

from .single_run import Record, Task, run_tasks

CHUNK_SECONDS = 0.25  # work handed out at a time: long beside the handing out, short beside the sweep
CHUNK_MOST = 64  # runs
AHEAD = 128  # runs a worker that the first one not yet in may be behind the last one handed out
TRIES = 3  # times that a chunk's worker may die
# Errors of a chunk whose worker died, by name: dask is an extra. Any other error is ours, and raised.
LOST = ("BrokenProcessPool", "KilledWorker", "CancelledError", "FutureCancelledError")

Results = Iterator[tuple[int, Record]]


class WorkerLost(RuntimeError):
    """Workers die again and again on the same runs."""


class Executor(Protocol):
    """Runs tasks."""

    def run(self, setup: str, tasks: Sequence[Task]) -> Results:
        """Return each task's place and record, in the order they end."""

    def close(self) -> None:
        """End the workers."""


class Serial:
    """Runs everything here, one after the other."""

    def run(self, setup: str, tasks: Sequence[Task]) -> Results:
        for place, task in enumerate(tasks):
            yield place, run_tasks(setup, [task])[0]

    def close(self) -> None:
        """Nothing to end."""


class Chunk(NamedTuple):
    """Some tasks in a row."""

    place: int
    tasks: list[Task]
    tries: int = 0


class Pool:
    """Hands chunks of tasks to an executor of concurrent.futures' kind, and again if they are lost with a worker."""

    def __init__(
        self, start: Callable[[], Futures], workers: Callable[[], int], stop: Callable[[Futures], None]
    ) -> None:
        self._start, self._workers, self._stop = start, workers, stop  # how many workers: at least 1
        self._futures: Optional[Futures] = None

    def run(self, setup: str, tasks: Sequence[Task]) -> Results:
        pending: dict[Future[Any], Chunk] = {}
        pace = Pace(len(tasks))
        while pace.given < len(tasks) or pending:
            self._fill(setup, tasks, pending, pace)
            ended, _ = wait(pending, return_when=FIRST_COMPLETED)
            lost: list[Chunk] = []
            for future in ended:
                chunk = pending.pop(future)
                if future.cancelled() or type(future.exception()).__name__ in LOST:
                    lost.append(chunk)
                    continue
                records: list[Record] = future.result()
                pace.ended(len(records), self._workers())
                yield from enumerate(records, chunk.place)
            if lost:
                self._again(setup, lost, pending)

    def _fill(self, setup: str, tasks: Sequence[Task], pending: dict[Future[Any], Chunk], pace: Pace) -> None:
        """Keep two chunks a worker out, so that none is ever idle."""
        workers = self._workers()
        oldest = min((chunk.place for chunk in pending.values()), default=pace.given)
        while pace.given < len(tasks) and len(pending) < 2 * workers and pace.given - oldest < AHEAD * workers:
            size = pace.chunk(workers)
            chunk = Chunk(pace.given, list(tasks[pace.given : pace.given + size]))
            pace.given += len(chunk.tasks)
            self._submit(setup, chunk, pending)

    def _again(self, setup: str, lost: list[Chunk], pending: dict[Future[Any], Chunk]) -> None:
        """Hand out anew what was lost; a broken pool takes all that was out with it and is replaced."""
        if isinstance(self._futures, ProcessPoolExecutor):
            wait(pending)
            survived = [f for f in pending if not f.cancelled() and f.exception() is None]
            lost += [chunk for future, chunk in pending.items() if future not in survived]
            for future in [f for f in pending if f not in survived]:
                del pending[future]
            self._futures.shutdown(wait=True)
            self._futures = None
        for chunk in sorted(lost):
            if chunk.tries >= TRIES:
                names = ", ".join(f"{task.config}/{task.replication}" for task in chunk.tasks[:4])
                raise WorkerLost(f"workers died {TRIES + 1} times on configuration/replication {names}")
            self._submit(setup, chunk._replace(tries=chunk.tries + 1), pending)

    def _submit(self, setup: str, chunk: Chunk, pending: dict[Future[Any], Chunk]) -> None:
        if self._futures is None:
            self._futures = self._start()
        pending[self._futures.submit(run_tasks, setup, chunk.tasks)] = chunk

    def close(self) -> None:
        """End the workers, whatever they are doing."""
        if self._futures is not None:
            self._stop(self._futures)
            self._futures = None


class Pace:
    """How many runs make a chunk: judged by how fast they come in, and fewer towards the end."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.given = 0
        self._in = 0
        self._began: Optional[float] = None
        self._seconds = CHUNK_SECONDS  # of one run

    def ended(self, runs: int, workers: int) -> None:
        now = time.monotonic()
        if self._began is None:  # the first one paid for starting the workers
            self._began = now
            return
        self._in += runs
        self._seconds = (now - self._began) * workers / self._in

    def chunk(self, workers: int) -> int:
        """Return the size of the next chunk."""
        fair = -(-(self.count - self.given) // (4 * workers))
        return max(1, min(int(CHUNK_SECONDS / max(self._seconds, 1e-6)), fair, CHUNK_MOST))


def processes(jobs: int) -> Pool:
    """Return a pool of so many processes here."""
    children: set[Any] = set()

    def start() -> Futures:
        before = set(multiprocessing.active_children())
        pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=outlive_nobody)
        for _ in range(jobs):  # all workers start at once, and are known
            pool.submit(os.getpid)
        children.update(set(multiprocessing.active_children()) - before)
        return pool

    def stop(pool: Futures) -> None:
        for child in children:
            child.terminate()
        pool.shutdown(wait=True, cancel_futures=True)

    return Pool(start, lambda: jobs, stop)


def outlive_nobody() -> None:
    """In a worker: leave interrupts to the parent, and end when it ends, however it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def cluster(address: str) -> Pool:
    """Return a pool of the workers of a dask.distributed scheduler."""
    try:
        distributed: Any = importlib.import_module("distributed")
    except ImportError:
        raise BadInput("--executor dask: needs the extra `cluster`: pip install 'servesim[cluster]'") from None
    try:
        client = distributed.Client(address, timeout=5)
    except (OSError, ValueError, TimeoutError) as error:
        raise BadInput(f"--executor dask:{address}: no scheduler answers there ({error})") from None

    known = {"at": 0.0, "cores": 0.0}

    def cores() -> int:  # workers come and go; asking costs a message to the scheduler
        if time.monotonic() - known["at"] > 2:
            known.update(at=time.monotonic(), cores=sum(client.nthreads().values()))
        return max(1, int(known["cores"]))

    return Pool(lambda: client.get_executor(pure=False, retries=TRIES), cores, lambda _: client.close())


@contextmanager
def executing(where: Executor) -> Iterator[Executor]:
    """End an executor's workers when the block ends, also by a termination signal."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt) if threading.current_thread() is threading.main_thread() else None
    try:
        yield where
    finally:
        where.close()
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def core_count(jobs: Optional[int]) -> int:
    """Return how many processes to run: one for every core this process may use, unless a number is given."""
    if jobs is not None and jobs < 1:
        raise BadInput(f"--jobs: expected at least 1, got {jobs}")
    return jobs or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def executor(spec: str, jobs: int) -> Executor:
    """Return the executor of a command line: local, or dask:ADDRESS."""
    if spec.startswith("dask:"):
        return cluster(spec.removeprefix("dask:"))
    if spec != "local":
        raise BadInput(f"--executor {spec}: expected local or dask:ADDRESS")
    return Serial() if jobs <= 1 else processes(jobs)
