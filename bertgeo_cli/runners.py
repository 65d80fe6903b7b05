"""Who observes the shards: this process, several processes, or a Dask cluster. The bytes are the same."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing import connection, get_context, parent_process
from typing import Any, Protocol

import torch

from analyses.kit.record import TokenizedText

from .corpus import Shard
from .errors import BertgeoError, UsageError
from .models import LoadedModel, load_chosen
from .observation import Progress, ShardResult, Task, observe_shard
from .options import ModelOptions
from .recording import give_back_memory
from .versions import versions

Results = Iterator[tuple[Shard, ShardResult]]


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


def serially(task: Task, loaded: LoadedModel, shards: Iterable[Shard], progress: Progress) -> Results:
    """One shard after the other, in this process."""
    for shard in shards:
        yield shard, observe_shard(task, loaded, shard.texts, progress)


def in_processes(task: Task, origin: Origin, shards: Iterable[Shard], workers: int) -> Results:
    """As many shards at a time as there are worker processes, which divide the threads among them."""
    threads = max(1, torch.get_num_threads() // workers)
    with _processes(workers) as pool:
        yield from _windowed(lambda texts: pool.submit(_work, task, origin, threads, texts), shards, workers + 1)


@contextmanager
def _processes(workers: int) -> Iterator[ProcessPoolExecutor]:
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_begin_worker)
    try:
        yield pool
        pool.shutdown()
    except BrokenProcessPool:
        hint = "Out of memory? Go on by --resume, with fewer --workers."
        raise BertgeoError("a worker process was killed", hint) from None
    finally:
        for process in list((pool._processes or {}).values()):
            process.terminate()
        pool.shutdown(wait=False, cancel_futures=True)


def on_dask(task: Task, origin: Origin, shards: Iterable[Shard], address: str, workers: int) -> Results:
    """On a Dask cluster by its scheduler's address, or `local` for one of this machine's processes.

    At most two shards a worker are in flight. Dask itself gives the shards of a lost worker to another one. Raises
    UsageError without Dask or a scheduler.
    """
    with _client(address, workers) as client:
        threads = max(1, torch.get_num_threads() // workers) if address == "local" else None
        size = 2 * max(1, len(client.scheduler_info(n_workers=-1)["workers"]))

        def submit(texts: Sequence[TokenizedText]) -> Any:
            return client.submit(_work, task, origin, threads, texts, pure=False)

        yield from _windowed(submit, shards, size)


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
    """What both pools give for a shard."""

    def result(self) -> ShardResult:
        """Wait for it."""


def _windowed(submit: Callable[[Sequence[TokenizedText]], Future], shards: Iterable[Shard], size: int) -> Results:
    """Results in the order of shards, of which at most `size` are in flight: memory does not grow with the corpus."""
    waiting: deque[tuple[Shard, Future]] = deque()
    for shard in shards:
        waiting.append((shard, submit(shard.texts)))
        if len(waiting) >= size:
            first, future = waiting.popleft()
            yield first, future.result()
    for shard, future in waiting:
        yield shard, future.result()


def _begin_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


ALONE = threading.Lock()
"""A recorded pass registers itself with transformers: the threads of a Dask worker take turns."""


def _work(task: Task, origin: Origin, threads: int | None, texts: Sequence[TokenizedText]) -> ShardResult:
    with ALONE:
        if threads is not None:
            torch.set_num_threads(threads)
        result = observe_shard(task, _model(origin), texts)
    give_back_memory()
    return result


@cache
def _model(origin: Origin) -> LoadedModel:
    """A worker's own copy of the model, which must be the same one, among the same packages."""
    _refuse_other("packages", dict(origin.versions), versions())
    loaded = load_chosen(origin.model)
    _refuse_other("model", dict(origin.identity), loaded.identity)
    return loaded


def _refuse_other(what: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    other = {name: theirs.get(name) for name in ours if ours[name] != theirs.get(name)}
    if other:
        raise BertgeoError(f"a worker has another {what}: {other}", "Its bytes would differ; install the same there.")
