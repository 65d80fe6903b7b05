"""Pairs of timings taken in turn, so that a ratio holds when the machine's speed drifts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def seconds(action: Callable[[], object]) -> float:
    """Wall time of one call."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def pairs(first: Callable[[], object], second: Callable[[], object], count: int) -> list[tuple[float, float]]:
    """Timings of both actions in turn, after one uncounted call of each; who goes first alternates."""
    first(), second()
    timed = []
    for number in range(count):
        if number % 2:
            later = seconds(second)
            timed.append((seconds(first), later))
        else:
            timed.append((seconds(first), seconds(second)))
    return timed


def report(name: str, timed: list[tuple[float, float]], first: str, second: str, bound: float | None = None) -> float:
    """Print the medians of both sides and the median ratio first / second."""
    one, other = (statistics.median(side) for side in zip(*timed, strict=True))
    ratio = statistics.median(a / b for a, b in timed)
    limit = "" if bound is None else f" (at most {bound})"
    print(f"{name}: {first} {one * 1e3:.2f} ms, {second} {other * 1e3:.2f} ms, ratio {ratio:.3f}{limit}")
    return ratio


def least_by_part(
    first: Callable[[T], object], second: Callable[[T], object], parts: Sequence[T], rounds: int
) -> tuple[float, float]:
    """Both actions on every part in turn, `rounds` times; the sums over parts of the least time of each."""
    totals = [0.0, 0.0]
    for part in parts:
        timed = [
            (seconds(lambda part=part: first(part)), seconds(lambda part=part: second(part)))  # type: ignore[misc]
            for _ in range(rounds)
        ]
        for side, times in enumerate(zip(*timed, strict=True)):
            totals[side] += min(times)
    return totals[0], totals[1]
