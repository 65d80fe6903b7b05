"""Threads that compute, one to a core: passes and measurements share them, for more would fight over the caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache

import torch


@cache
def cores(count: int) -> ThreadPoolExecutor:
    """So many threads. They stay: what MKL keeps for a thread is not freed when it ends."""
    return ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))


def side_by_side(count: int, works: Sequence[Callable[[], None]]) -> None:
    """Do all of this on so many threads, and wait for it. Raises what the first of them raises that fails."""
    begun = [cores(count).submit(work) for work in works]
    wait(begun)
    for done in begun:
        done.result()
