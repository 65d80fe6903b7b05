"""Who observes the portions of shards: this process, several, or a Dask cluster. The bytes are the same."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from multiprocessing import connection, get_context, parent_process
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import torch
from threadpoolctl import threadpool_limits

from analyses.kit.record import TokenizedText

from .corpus import PORTION_TOKENS, Shard, portions
from .errors import BertgeoError, UsageError
from .models import LoadedModel, load_chosen
from .observation import Progress, Seen, Task, observe_portion
from .options import ModelOptions
from .recording import give_back_memory
from .versions import versions

Results = Iterator[tuple[int, Seen]]
"""The number of each shard, and what it gave."""
PATIENCE = 0.2
"""Seconds between two looks at how far the workers are."""


@dataclass(frozen=True)
class Origin:
    """What a worker must have for its bytes to be ours: the model, and the versions of everything."""

    model: ModelOptions
    identity: tuple[tuple[str, str | None], ...]
    versions: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, model: ModelOptions, loaded: LoadedModel) -> Origin:
        """That of this process."""
        return cls(model, tuple(loaded.identity.items()), tuple(versions().items()))


@dataclass(frozen=True)
class Work:
    """A portion of the shard of this number, which is handed out; with the last one the shard is done."""

    shard: int
    texts: Sequence[TokenizedText]
    last: bool


def here(
    task: Task,
    origin: Origin,
    loaded: LoadedModel,
    shards: Iterable[Shard],
    workers: int | None,
    progress: Progress,
) -> Results:
    """By so many processes of this machine, or as many as are worth it, but no more than there are portions."""
    work = _work_of(shards)
    first = list(islice(work, workers or torch.get_num_threads()))
    count = min(workers or _worthwhile(loaded, first), len(first))
    work = chain(first, work)
    if count < 2:
        return _by_shard((one, observe_portion(task, loaded, one.texts, progress)) for one in work)
    return in_processes(task, origin, loaded, work, count, progress)


def _worthwhile(loaded: LoadedModel, first: Sequence[Work]) -> int:
    """A process for every thread where forks are cheap; one for what is done before they have begun."""
    tokens = sum(len(text) for work in first for text in work.texts)
    return torch.get_num_threads() if _forks(loaded) and tokens >= PORTION_TOKENS else 1


def _forks(loaded: LoadedModel) -> bool:
    """Whether processes may begin as copies of this one: CUDA does not survive that, nor do macOS's own libraries."""
    return sys.platform == "linux" and loaded.device == "cpu"


def _work_of(shards: Iterable[Shard]) -> Iterator[Work]:
    for shard in shards:
        cut = portions(shard.texts)
        for number, texts in enumerate(cut, start=1):
            yield Work(shard.index, texts, last=number == len(cut))


def _by_shard(seen: Iterable[tuple[Work, Seen]]) -> Results:
    """What portions gave, in their order, shard by shard."""
    whole: Seen | None = None
    for work, found in seen:
        whole = whole.merge(found) if whole else found
        if work.last:
            yield work.shard, whole.by_line()
            whole = None


def in_processes(
    task: Task, origin: Origin, loaded: LoadedModel, work: Iterable[Work], workers: int, progress: Progress
) -> Results:
    """As many portions at a time as there are worker processes, which divide the threads among them."""
    threads = max(1, torch.get_num_threads() // workers)
    # A fork has the model already. OpenMP's threads do not survive one, so it may have only its own.
    inherited = loaded if threads == 1 and _forks(loaded) else None
    context = get_context("fork" if inherited else "spawn")
    counter = Counter(context.Value("q", 0), progress)
    with _processes(ProcessPoolExecutor(workers, context, _begin_worker, (counter.shared, origin, inherited))) as pool:

        def submit(texts: Sequence[TokenizedText]) -> Future:
            with _interrupts_wait():
                return Watched(pool.submit(_work, task, origin, threads, texts), pool, counter)

        yield from _by_shard(_windowed(submit, work, 2 * workers))


@contextmanager
def _processes(pool: ProcessPoolExecutor) -> Iterator[ProcessPoolExecutor]:
    """A pool of processes that ends with the work, however that ends. Forks share this one's memory until either writes
    to it: what is free is given back before, and the collector, which would write to all objects, leaves them alone.
    """
    give_back_memory()
    gc.freeze()
    results: Any = pool._result_queue
    try:
        yield pool
        pool.shutdown()
    except BrokenProcessPool:
        hint = "Out of memory? Go on by --resume, with fewer --workers."
        raise BertgeoError("a worker process was killed", hint) from None
    finally:
        for process in _workers(pool):
            process.terminate()
        # A worker may have ended in the middle of a message: with no one left to write, the pool waits for no more.
        results._writer.close()
        pool.shutdown(wait=False, cancel_futures=True)
        gc.unfreeze()


def _workers(pool: ProcessPoolExecutor) -> list[BaseProcess]:
    return list((pool._processes or {}).values())


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Ctrl-C comes only after this: while a process begins, it would be lost among what Python does at a fork."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: caught.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if caught and before is not signal.SIG_IGN:  # as a shell has it for what runs in the background
        raise KeyboardInterrupt


def on_dask(task: Task, origin: Origin, shards: Iterable[Shard], address: str, workers: int) -> Results:
    """On a Dask cluster by its scheduler's address, or `local` for one of this machine's processes.

    At most two portions a worker are in flight. Dask itself gives the portions of a lost worker to another one. Raises
    UsageError without Dask or a scheduler.
    """
    with _client(address, workers) as client:
        threads = max(1, torch.get_num_threads() // workers) if address == "local" else None
        size = 2 * max(1, len(client.scheduler_info(n_workers=-1)["workers"]))

        def submit(texts: Sequence[TokenizedText]) -> Any:
            return client.submit(_work, task, origin, threads, texts, pure=False)

        yield from _by_shard(_windowed(submit, _work_of(shards), size))


@contextmanager
def _client(address: str, workers: int) -> Iterator[Any]:
    try:
        from distributed import Client, LocalCluster
    except ImportError:
        raise UsageError("--dask needs Dask", "Install it: pip install 'bertgeo[dask]'.") from None
    if address != "local":
        try:
            client = Client(address, timeout="10s")
        except (OSError, ValueError) as error:
            raise UsageError(f"no Dask scheduler at {address}: {error}", "Give its address, or local.") from None
        with client:
            yield client
        return
    with (
        LocalCluster(n_workers=workers, threads_per_worker=1, processes=True, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        yield client


class Future(Protocol):
    """What both pools give for a portion."""

    def result(self) -> Seen:
        """Wait for it."""


class Counter:
    """Texts that the workers have done, all together; `shared` is a number that all processes know."""

    def __init__(self, shared: Any, progress: Progress):
        self.shared = shared
        self._progress = progress
        self._told = 0

    def tell(self) -> None:
        """Tell how many there are more than when this was last told."""
        done = self.shared.get_obj().value  # without its lock, which a killed worker may have
        if done > self._told:
            self._progress(done - self._told)
        self._told = done


@dataclass(frozen=True)
class Watched:
    """A future of the pool; whoever waits for it is told meanwhile how far the workers are."""

    future: futures.Future[Seen]
    pool: ProcessPoolExecutor
    counter: Counter

    def result(self) -> Seen:
        """Wait for it. Raises BrokenProcessPool when a worker has ended, which the pool does not see while it reads."""
        while not futures.wait([self.future], PATIENCE).done:
            self.counter.tell()
            ended = connection.wait([process.sentinel for process in _workers(self.pool)], 0)
            if ended and not futures.wait([self.future], PATIENCE).done:
                raise BrokenProcessPool
        self.counter.tell()
        return self.future.result()


def _windowed(
    submit: Callable[[Sequence[TokenizedText]], Future], work: Iterable[Work], size: int
) -> Iterator[tuple[Work, Seen]]:
    """Results in the order of the work, of which at most `size` is in flight: memory does not grow with the corpus."""
    waiting: deque[tuple[Work, Future]] = deque()
    for one in work:
        waiting.append((one, submit(one.texts)))
        if len(waiting) >= size:
            first, future = waiting.popleft()
            yield first, future.result()
    while waiting:
        first, future = waiting.popleft()
        yield first, future.result()


_MODELS: dict[Origin, LoadedModel] = {}
_COUNTED: list[Any] = []
"""A worker's own: its models, and the number of texts that it shares with the others."""


def _begin_worker(shared: Any, origin: Origin, inherited: LoadedModel | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _COUNTED[:] = [shared]
    if inherited:
        give_back_memory()  # from here on is counted how much this process grows
        threadpool_limits(1)
        _MODELS[origin] = inherited


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


ALONE = threading.Lock()
"""A recorded pass registers itself with transformers: the threads of a Dask worker take turns."""


def _work(task: Task, origin: Origin, threads: int | None, texts: Sequence[TokenizedText]) -> Seen:
    with ALONE:
        if threads is not None:
            torch.set_num_threads(threads)
        return observe_portion(task, _model(origin), texts, _count)


def _count(texts: int) -> None:
    for shared in _COUNTED:
        with shared.get_lock():
            shared.value += texts


def _model(origin: Origin) -> LoadedModel:
    """A worker's own copy of the model, which must be the same one, among the same packages."""
    if origin not in _MODELS:
        _refuse_other("packages", dict(origin.versions), versions())
        loaded = load_chosen(origin.model)
        _refuse_other("model", dict(origin.identity), loaded.identity)
        _MODELS[origin] = loaded
    return _MODELS[origin]


def _refuse_other(what: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    other = {name: theirs.get(name) for name in ours if ours[name] != theirs.get(name)}
    if other:
        raise BertgeoError(f"a worker has another {what}: {other}", "Its bytes would differ; install the same there.")
