"""Threads that compute, one to a core: passes and measurements share them, for more would fight over the caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial

import torch

Work = Callable[[], None]
Done = Future[None]


@cache
def cores(count: int) -> ThreadPoolExecutor:
    """So many threads. They stay: what MKL keeps for a thread is not freed when it ends."""
    return ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))


class Lanes:
    """Work side by side on so many threads: on a lane one thing after the other, and no lane waits for another.

    With one thread all is done at once, by the caller.
    """

    def __init__(self, threads: int, lanes: int):
        self._threads = threads
        self._last = [_done() for _ in range(lanes)]

    def put(self, works: Sequence[Work]) -> list[Done]:
        """One more thing on every lane, and what will say that it is done or how it failed."""
        if self._threads == 1:
            return [_settle(work, Future()) for work in works]
        before, self._last = self._last, [Future() for _ in works]
        for work, last, done in zip(works, before, self._last, strict=True):
            last.add_done_callback(partial(self._begin, work, done))
        return self._last

    def _begin(self, work: Work, done: Done, before: Done) -> None:
        cores(self._threads).submit(_settle, work, done)


def _settle(work: Work, done: Done) -> Done:
    try:
        work()
    except BaseException as error:
        done.set_exception(error)
    else:
        done.set_result(None)
    return done


def _done() -> Done:
    done: Done = Future()
    done.set_result(None)
    return done
