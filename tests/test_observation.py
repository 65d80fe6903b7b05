"""Measurements side by side: in order on a lane, none waiting for another, nothing lost and no error swallowed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from time import sleep
from typing import Any

import pytest
from vectors import text_of

from analyses.kit.record import ForwardRecord, ModelShape
from bertgeo_cli.cores import Lanes
from bertgeo_cli.observation import updating

PATIENCE = 60.0
"""Seconds after which a test fails that waits for what does not come."""


# Lanes


def test_with_one_thread_the_caller_does_all_at_once() -> None:
    seen: list[int] = []
    done = Lanes(1, 2).put([lambda: seen.append(threading.get_ident())] * 2)
    assert seen == [threading.get_ident()] * 2
    assert all(one.done() for one in done)


def test_a_lane_does_one_thing_after_the_other_and_waits_for_no_other_lane() -> None:
    begun: list[list[int]] = [[], []]
    ended: list[list[int]] = [[], []]
    far_ahead, came = threading.Event(), []

    def work(lane: int, number: int) -> None:
        begun[lane].append(number)
        assert len(begun[lane]) == len(ended[lane]) + 1
        if (lane, number) == (0, 0):
            came.append(far_ahead.wait(PATIENCE))
        if (lane, number) == (1, 4):
            far_ahead.set()
        ended[lane].append(number)

    lanes = Lanes(2, 2)
    done = [lanes.put([partial(work, lane, number) for lane in (0, 1)]) for number in range(5)]
    for own in done:
        for one in own:
            one.result()
    assert came == [True]
    assert begun == ended == [[0, 1, 2, 3, 4]] * 2


@pytest.mark.parametrize("threads", [1, 2])
def test_what_fails_says_so_and_the_lane_goes_on(threads: int) -> None:
    seen: list[str] = []

    def failing() -> None:
        raise ArithmeticError("no")

    lanes = Lanes(threads, 2)
    first = lanes.put([failing, lambda: seen.append("beside")])
    second = lanes.put([lambda: seen.append("after")] * 2)
    assert isinstance(first[0].exception(), ArithmeticError)
    assert [done.exception() for done in (first[1], *second)] == [None] * 3
    assert sorted(seen) == ["after", "after", "beside"]


# Updates

TOKENS = 4


class Noting:
    """Stands for an analysis: notes the first line of every record, and may wait or fail at one."""

    def __init__(self, failing_at: int = 0, until: threading.Event | None = None):
        self._failing_at = failing_at
        self._until = until

    def update(self, state: list[int], record: ForwardRecord) -> None:
        if self._until is not None and not self._until.wait(PATIENCE):
            raise TimeoutError("the caller waits for this, and this for the caller")
        if record.texts[0].line == self._failing_at:
            raise ArithmeticError(f"no line {self._failing_at}")
        state.append(record.texts[0].line)


def records(*sizes: int) -> list[ForwardRecord]:
    """Records of so many texts, of four tokens each."""
    shape = ModelShape("bert", 1, 4, 4, (0,))
    return [ForwardRecord(shape, [text_of(line, ["a"] * TOKENS)] * size, {}) for line, size in enumerate(sizes, 1)]


def updated(analyses: Sequence[Any], given: Sequence[ForwardRecord], count: int, ahead: int) -> list[list[int]]:
    states: list[Any] = [[] for _ in analyses]
    with updating(analyses, count, ahead) as update:
        for record in given:
            update(states, record)
    return states


@pytest.mark.parametrize("count", [1, 2])
def test_every_analysis_sees_every_record_in_order_and_each_is_told_when_done(count: int) -> None:
    sizes, told = (2, 1, 3, 1, 2), []
    analyses: list[Any] = [Noting(), Noting(), Noting()]
    states: list[Any] = [[] for _ in analyses]
    with updating(analyses, count, 1000) as update:
        for record in records(*sizes):
            update(states, record, told.append)
    assert states == [[1, 2, 3, 4, 5]] * 3
    assert told == list(sizes)


def test_with_one_thread_no_record_is_held_for_later() -> None:
    told: list[int] = []
    with updating([Noting()], 1, 1000) as update:  # type: ignore[list-item]
        for number, record in enumerate(records(1, 1, 1), start=1):
            update([[]], record, told.append)  # type: ignore[list-item]
            assert len(told) == number


def test_the_caller_goes_on_until_as_many_tokens_wait_as_may() -> None:
    free, told = threading.Event(), []
    analysis: Any = Noting(until=free)
    with updating([analysis], 2, 2 * TOKENS) as update:
        state: Any = []
        first, second, *others = records(*[1] * 9)
        update([state], first, told.append)
        update([state], second, told.append)
        assert not told
        free.set()
        for number, record in enumerate(others, start=1):
            update([state], record, told.append)
            assert len(told) >= number
    assert len(told) == 9


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("ahead", [0, 1000])
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("line", [1, 3])
def test_an_error_of_any_analysis_at_any_record_comes_through(count: int, ahead: int, failing: int, line: int) -> None:
    analyses = [Noting(failing_at=line if at == failing else 0) for at in range(2)]
    with pytest.raises(ArithmeticError, match=f"no line {line}"):
        updated(analyses, records(1, 1, 1), count, ahead)


def test_what_has_begun_is_over_when_an_error_of_the_caller_comes_through() -> None:
    class Slow(Noting):
        def update(self, state: list[int], record: ForwardRecord) -> None:
            sleep(0.3)
            super().update(state, record)

    analysis: Any = Slow()
    state: Any = []

    def failing() -> None:
        with updating([analysis], 2, 1000) as update:
            update([state], records(1)[0])
            raise KeyError("elsewhere")

    with pytest.raises(KeyError):
        failing()
    assert state == [1]
