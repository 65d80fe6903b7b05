"""Portions handed out: to whom, in what order, and how far they are."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import pandas as pd
import pytest
import torch
from command import Run, files_of
from test_corpus_run import corpus_lines, runs

from analyses.attention import Attention
from bertgeo_cli import recording, runners
from bertgeo_cli.corpus import Encoder, Line, Shard, cut
from bertgeo_cli.models import LoadedModel
from bertgeo_cli.observation import Progress, Seen, Task, silent
from bertgeo_cli.options import ModelOptions
from bertgeo_cli.runners import Counter, Origin, Watched, here
from bertgeo_cli.screen import Bar

linux = pytest.mark.skipif(sys.platform != "linux", reason="forks are for Linux")


@pytest.fixture
def portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of even a few texts are cut."""
    monkeypatch.setattr("bertgeo_cli.corpus.PORTION_TOKENS", 10)
    monkeypatch.setattr("bertgeo_cli.corpus.PORTIONS", 3)


def shards_of(loaded: LoadedModel, lines: list[str], size: int) -> Iterator[Shard]:
    encoder = Encoder(loaded.tokenizer, loaded.max_tokens)
    return cut(((Line(at, line), encoder.encode(line, line=at)) for at, line in enumerate(lines, start=1)), size)


def observed(loaded: LoadedModel, lines: list[str], workers: int | None, told: list[int] | None = None) -> Any:
    task = Task({"attention": Attention()}, per_text=True)
    return seen_by(workers, task, loaded, shards_of(loaded, lines, 20), (told if told is not None else []).append)


def seen_by(
    workers: int | None, task: Task, loaded: LoadedModel, shards: Iterator[Shard], progress: Progress = silent
) -> list[tuple[int, Seen]]:
    """What a run gives with a thread to each worker: workers that are forks have the test's own model."""
    with recording.threads(1 if workers else 2):
        return list(here(task, Origin.of(ModelOptions(), loaded), loaded, shards, workers, progress))


LINES = [line for line in corpus_lines() if line]


# The same bytes, the same values


@pytest.mark.parametrize(
    "more",
    [("--workers", "2"), ("--workers", "3", "--threads", "6"), ("--dask", "local", "--workers", "2")],
    ids=["forks", "spawned", "dask"],
)
def test_portions_of_any_runner_give_the_same_bytes(
    fast: Run, tmp_path: Any, portions: None, more: tuple[str, ...]
) -> None:
    (tmp_path / "c.txt").write_text("\n".join(corpus_lines()), encoding="utf-8")
    threads = [] if "--threads" not in more else ["--threads", "6"]
    assert fast(*runs("c.txt", "one", "--workers", "1", *threads)).exit_code == 0
    assert fast(*runs("c.txt", "several", *more)).exit_code == 0
    assert files_of(tmp_path / "several") == files_of(tmp_path / "one")


def test_portions_change_no_value(tiny_model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = observed(tiny_model, LINES, 1)
    monkeypatch.setattr("bertgeo_cli.corpus.PORTION_TOKENS", 10)
    parts = observed(tiny_model, LINES, 1)
    assert [shard for shard, _ in parts] == [shard for shard, _ in whole] == list(range(len(whole)))
    for (_, one), (_, other) in zip(whole, parts, strict=True):
        pd.testing.assert_frame_equal(one.tables["attention"], other.tables["attention"])
        (mean,), (of_parts,) = ([state.moments.mean for state in seen.observed.whole] for seen in (one, other))
        assert of_parts == pytest.approx(mean, rel=1e-12, nan_ok=True)
        assert other.observed.texts == one.observed.texts


@linux
def test_failures_of_all_portions_stand_in_the_order_of_lines(
    tiny_model: LoadedModel, portions: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: Attention, state: Any, record: Any) -> None:
        if any("boat" in text.text for text in record.texts):
            raise ArithmeticError("no boats")

    monkeypatch.setattr(Attention, "update", failing)
    lines = ["boat " * 9, "the cat", "a boat", "dog " * 12, "boat", "boat " * 5]
    task = Task({"attention": Attention()}, skip_failures=True)
    for workers in (1, 2):
        ((_, seen),) = seen_by(workers, task, tiny_model, shards_of(tiny_model, lines, 9))
        assert [failure.line for failure in seen.observed.failures] == [1, 3, 5, 6]
        assert seen.observed.texts == 2


# To whom


def refused(*arguments: Any) -> Any:
    raise AssertionError("no processes were needed")


def test_a_corpus_of_one_portion_needs_no_processes(tiny_model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runners, "in_processes", refused)
    assert len(observed(tiny_model, LINES[:9], 8)) == 1
    assert observed(tiny_model, [], 8) == []


@linux
def test_there_are_no_more_processes_than_portions(tiny_model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []

    class Pool(ProcessPoolExecutor):
        def __init__(self, count: int, *more: Any):
            begun.append(count)
            super().__init__(count, *more)

    monkeypatch.setattr(runners, "ProcessPoolExecutor", Pool)
    assert len(observed(tiny_model, LINES[:60], 8)) == 3
    assert begun == [3]


@linux
def test_what_is_over_soon_needs_none_by_default_but_many_if_told(
    tiny_model: LoadedModel, portions: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [shard for shard, _ in observed(tiny_model, LINES, 2)] == [0, 1, 2, 3, 4]
    monkeypatch.setattr(runners, "in_processes", refused)
    assert len(observed(tiny_model, LINES, None)) == 5
    with pytest.raises(AssertionError, match="no processes"):
        observed(tiny_model, LINES, 2)


@linux
@pytest.mark.parametrize(("device", "threads", "tokens", "count"), [
    ("cpu", 3, 30, 3), ("cpu", 1, 30, 1), ("cuda:0", 3, 30, 1), ("cpu", 3, 31, 1),
])  # fmt: skip
def test_by_default_there_is_a_process_for_every_thread_of_a_cpu(
    tiny_model: LoadedModel, monkeypatch: pytest.MonkeyPatch, device: str, threads: int, tokens: int, count: int
) -> None:
    encoder = Encoder(tiny_model.tokenizer, tiny_model.max_tokens)
    work = [runners.Work(0, [encoder.encode("cat " * 13)], last=last) for last in (False, True)]  # 15 tokens each
    monkeypatch.setattr(runners, "PORTION_TOKENS", tokens)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    loaded: Any = type("Loaded", (), {"device": device})
    assert runners._worthwhile(loaded, work) == count
    assert runners._worthwhile(loaded, []) == 1


# How far they are


def test_what_workers_have_done_is_told_while_they_are_waited_for() -> None:
    told: list[int] = []
    shared = multiprocessing.get_context("fork").Value("q", 0)
    counter, future = Counter(shared, told.append), Future[Any]()

    looks = iter([3, 3, 0])

    def wait(futures: Any, timeout: float) -> Any:
        assert timeout == runners.PATIENCE
        more = next(looks)
        shared.value += more
        if not more:
            future.set_result("done")
        return type("Waited", (), {"done": set() if more else set(futures)})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runners.futures, "wait", wait)
        pool: Any = type("Pool", (), {"_processes": {}})
        watched: Any = Watched(future, pool, counter)
        assert watched.result() == "done"
    assert told == [3, 3]


@linux
def test_all_texts_are_told_once_whoever_does_them(tiny_model: LoadedModel, portions: None) -> None:
    for workers in (1, 2):
        told: list[int] = []
        observed(tiny_model, LINES, workers, told)
        assert sum(told) == len(LINES)


def test_a_bar_counts_lines_of_whole_shards_and_texts_of_those_in_work() -> None:
    shown: list[int] = []
    bar = Bar(shown.append)
    bar.begin(0, lines=10, texts=8)
    bar.begin(1, lines=5, texts=5)
    bar.advance(6)
    bar.advance(4)  # two of them of the second shard
    bar.finish(0)
    bar.begin(2, lines=7, texts=0)  # kept from before
    bar.finish(2)
    bar.advance(3)
    bar.finish(1)
    assert shown == [6, 10, 12, 19, 22, 22]


# Processes that end, and Ctrl-C


@linux
def test_a_worker_that_ends_in_the_middle_of_a_message_breaks_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its future is never done: the pool waits for the rest of the message."""
    context = multiprocessing.get_context("fork")
    ended, alive = context.Process(target=os._exit, args=(1,)), context.Process(target=time.sleep, args=(60,))
    pool: Any = type("Pool", (), {"_processes": {1: ended, 2: alive}})
    monkeypatch.setattr(runners, "PATIENCE", 0.01)
    for process in (ended, alive):
        process.start()
    try:
        with pytest.raises(BrokenProcessPool):
            Watched(Future[Any](), pool, Counter(context.Value("q", 0), silent)).result()
    finally:
        alive.kill()
        alive.join()
        ended.join()


@linux
def test_the_counter_of_a_worker_that_was_killed_with_its_lock_is_read_all_the_same() -> None:
    told: list[int] = []
    shared = multiprocessing.get_context("fork").Value("q", 7)
    locked = threading.Thread(target=shared.get_lock().acquire)
    locked.start()
    locked.join()
    Counter(shared, told.append).tell()
    assert told == [7]


@linux
def test_ctrl_c_while_processes_begin_comes_when_they_have_begun() -> None:
    done: list[str] = []
    before = signal.getsignal(signal.SIGINT)

    def begin() -> None:
        with runners._interrupts_wait():
            signal.raise_signal(signal.SIGINT)
            done.append("begun")

    with pytest.raises(KeyboardInterrupt):
        begin()
    assert done == ["begun"]
    assert signal.getsignal(signal.SIGINT) is before


@linux
def test_ctrl_c_that_is_ignored_stays_ignored_while_processes_begin() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with runners._interrupts_wait():
            signal.raise_signal(signal.SIGINT)
    finally:
        kept = signal.signal(signal.SIGINT, before)
    assert kept is signal.SIG_IGN


# Memory


def test_memory_goes_back_when_a_process_has_grown_by_more_than_it_may_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    held, trims = iter([100, 100, 150, 160, 120]), []

    class Library:
        @staticmethod
        def malloc_trim(pad: int) -> None:
            trims.append(pad)

    monkeypatch.setattr(recording.ctypes, "CDLL", lambda name: Library)
    monkeypatch.setattr(recording, "_held", lambda: next(held))
    monkeypatch.setitem(recording._HELD, "after", 0)
    recording.give_back_memory()  # holds 100 after it
    recording.give_back_memory(50)  # 100: not grown
    recording.give_back_memory(50)  # 150: by no more than 50
    assert trims == [0]
    recording.give_back_memory(50)  # 160: by more, 120 after it
    assert trims == [0, 0]
    assert recording._HELD["after"] == 120
