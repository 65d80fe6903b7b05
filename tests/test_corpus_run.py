"""Corpus runs: whoever observes the shards, whatever was killed, the report is the same bytes."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tiny
from command import Run, assert_error, content, files_of
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from analyses.attention import Attention
from analyses.cone_index import ConeIndex
from bertgeo_cli import versions
from bertgeo_cli.checkpoint import SUFFIX, Checkpoint
from bertgeo_cli.cli import app
from bertgeo_cli.corpus import Encoder, Line, cut
from bertgeo_cli.models import LoadedModel
from bertgeo_cli.observation import Observed, Pass, Task, observe_portion
from bertgeo_cli.source import Source

CORPUS = "corpus.txt"
LINES = 90
SHARD = 8
SHARDS = -(-(LINES - LINES // 15) // SHARD)
ANALYSES = "attention,cone-index,rank-collapse,flow,heads"
SMALL = ("--shard-texts", str(SHARD), "--set", "attention.sample=20", "--set", "cone-index.sample=20")


def corpus_lines(count: int = LINES) -> list[str]:
    """Texts of one to twelve words, and here and there a blank line."""
    chooser = random.Random(0)
    lines = [" ".join(chooser.choices(tiny.WORDS, k=chooser.randint(1, 12))) for _ in range(count)]
    return ["" if at % 15 == 4 else line for at, line in enumerate(lines)]


def write_corpus(folder: Path) -> None:
    (folder / CORPUS).write_text("\n".join(corpus_lines()) + "\n", encoding="utf-8")


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    """A corpus of a dozen shards, in the working folder."""
    write_corpus(tmp_path)
    return CORPUS


def runs(corpus: str, output: str, *more: str) -> list[str]:
    return ["run", corpus, "--analyses", ANALYSES, *SMALL, "--per-text", "-o", output, *more]


@pytest.fixture(scope="module")
def whole(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The report of an uninterrupted run in one process: what all others must be, byte for byte."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_corpus(folder)
        patch.setenv("BERTGEO_MODEL", str(tiny_folder))
        patch.setenv("BERTGEO_FIGURES", "none")
        done = CliRunner().invoke(app, runs(CORPUS, "out"))
    assert done.exit_code == 0, done.output
    report = files_of(folder / "out")
    assert {"run.json", "lines.csv", "attention/attention-heads.csv"} <= set(report)
    return report


def states(folder: Path, name: str = "out") -> Path:
    return folder / f".{name}.states"


# Runners


@pytest.mark.parametrize("more", [("--workers", "2"), ("--dask", "local", "--workers", "2")], ids=["processes", "dask"])
def test_workers_give_the_same_bytes(
    fast: Run, corpus: str, tmp_path: Path, more: tuple[str, ...], whole: dict[str, bytes]
) -> None:
    done = fast(*runs(corpus, "parallel", *more))
    assert done.exit_code == 0, done.stderr
    assert files_of(tmp_path / "parallel") == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.txt", "parallel"]


def test_jobs_of_an_array_merge_into_the_same_bytes(
    fast: Run, corpus: str, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    for job in (1, 2, 3):
        assert fast(*runs(corpus, f"part-{job}", "--shard", f"{job}/3")).exit_code == 0
    done = fast("merge", "part-2", "part-3", "part-1", "-o", "merged")
    assert done.exit_code == 0, done.stderr
    assert files_of(tmp_path / "merged") == whole


def test_a_job_without_shards_of_its_own_does_no_harm(fast: Run, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("the cat\n\na dog\n\n", encoding="utf-8")
    assert fast("attention", "--corpus", "short.txt", "-o", "serial").exit_code == 0
    for job in (1, 2, 3):
        assert fast("attention", "--corpus", "short.txt", "--shard", f"{job}/3", "-o", f"part-{job}").exit_code == 0
    assert fast("merge", "part-1", "part-2", "part-3", "-o", "merged").exit_code == 0
    assert files_of(tmp_path / "serial") == files_of(tmp_path / "merged")


def test_merge_refuses_what_is_not_one_whole_array(fast: Run, corpus: str, tmp_path: Path) -> None:
    for job in (1, 2):
        arguments = ("attention", "--corpus", corpus, "--shard-texts", "8", "--shard", f"{job}/2")
        assert fast(*arguments, "-o", f"part-{job}").exit_code == 0
    assert fast("attention", "--corpus", corpus, "--shard", "2/2", "-o", "other").exit_code == 0
    assert fast("attention", "the cat", "-o", "single").exit_code == 0
    assert_error(fast("merge", "part-1", "-o", "m"), 2, "job 2 of 2 is missing")
    assert_error(fast("merge", "part-1", "part-1", "-o", "m"), 2, "both job 1")
    assert_error(fast("merge", "part-1", "other", "-o", "m"), 2, "differ in shard_texts")
    assert_error(fast("merge", "part-1", "single", "-o", "m"), 2, "single is no report of a job")
    next((tmp_path / "part-2" / "states").glob(f"*{SUFFIX}")).write_bytes(b"broken")
    assert_error(fast("merge", "part-1", "part-2", "-o", "m"), 1, "part-2 lacks states/", "job 2 again")
    assert not (tmp_path / "m").exists()


def test_one_analysis_alone_writes_what_it_writes_among_others(fast: Run, corpus: str, tmp_path: Path) -> None:
    assert fast(*runs(corpus, "all")).exit_code == 0
    assert fast("attention", "--corpus", corpus, "--shard-texts", "8", "--sample", "20", "-o", "one").exit_code == 0
    together = files_of(tmp_path / "all")
    tables = {name: data for name, data in files_of(tmp_path / "one").items() if name.startswith("attention")}
    assert tables == {name: together[f"attention/{name}"] for name in tables}
    assert len(tables) == 2


# Killed and resumed


def started(arguments: Sequence[str], folder: Path) -> subprocess.Popen[str]:
    """The real command in a process of its own, which Ctrl-C reaches even where the tests run in the background."""
    command = [sys.executable, "-m", "bertgeo_cli", *arguments]
    options: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        command, cwd=folder, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), **options
    )


def wait_for(condition: Callable[[], Any], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, "it ended before it could be stopped"
        assert time.monotonic() < deadline
        time.sleep(0.002)


def shards_done(folder: Path) -> int:
    """Shards that the nodes stand for; while two are merged their parent is there as well."""
    nodes = [(int(path.name[:2]), int(path.name[3:11])) for path in folder.glob(f"*{SUFFIX}")]
    return len({shard for level, index in nodes for shard in range(index << level, (index + 1) << level)})


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_run_killed_at_a_random_point_and_resumed_gives_the_same_bytes(
    fast: Run, corpus: str, tmp_path: Path, seed: int, whole: dict[str, bytes]
) -> None:
    chooser = random.Random(seed)
    process = started(runs(corpus, "out"), tmp_path)
    after = chooser.randint(1, SHARDS - 3)
    wait_for(lambda: shards_done(states(tmp_path)) >= after, process)
    time.sleep(chooser.random() * 0.05)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    assert_error(fast(*runs(corpus, "out")), 2, "unfinished run", "--resume")
    observed = count_observed(fast, runs(corpus, "out", "--resume"))
    assert 0 < observed <= SHARDS - after
    assert files_of(tmp_path / "out") == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.txt", "out"]


def count_observed(fast: Run, arguments: Sequence[str]) -> int:
    """Run to the end; how many shards went through the model."""
    with pytest.MonkeyPatch.context() as patch:
        seen: list[int] = []

        def counted(task: Task, *arguments: Any) -> Any:
            seen.append(1)
            return observe_portion(task, *arguments)

        patch.setattr("bertgeo_cli.runners.observe_portion", counted)
        done = fast(*arguments)
    assert done.exit_code == 0, done.stderr
    return len(seen)


def test_ctrl_c_says_how_to_go_on_and_keeps_what_was_done(
    fast: Run, corpus: str, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    process = started(runs(corpus, "out"), tmp_path)
    wait_for(lambda: shards_done(states(tmp_path)) >= 2, process)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    last = told.splitlines()[-2:]
    assert last[0].startswith("Error: stopped; ")
    assert "--resume" in last[1]
    assert "Traceback" not in told
    assert fast(*runs(corpus, "out", "--resume")).exit_code == 0
    assert files_of(tmp_path / "out") == whole


@pytest.fixture
def stopped(fast: Run, corpus: str, tmp_path: Path) -> Path:
    """The states of a run that was stopped after five shards."""
    add, done = Checkpoint.add, []

    def stopping(self: Checkpoint, *arguments: Any) -> None:
        if len(done) == 5:
            raise KeyboardInterrupt
        done.append(1)
        add(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoint, "add", stopping)
        assert fast(*runs(corpus, "out")).exit_code == 130
    return states(tmp_path)


def test_what_is_kept_of_a_stopped_run_is_a_few_files(stopped: Path) -> None:
    assert sorted(path.name[:11] for path in stopped.glob(f"*{SUFFIX}")) == ["00-00000004", "02-00000000"]


def test_neighbours_that_a_kill_left_unmerged_are_merged(
    fast: Run, corpus: str, tmp_path: Path, stopped: Path, whole: dict[str, bytes]
) -> None:
    """Killed between the second child and its parent: otherwise the tree, and with it the last bits, would differ."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoint, "_merge_up", lambda self, node: None)
        patch.setattr(Checkpoint, "settle", lambda self: None)
        add = Checkpoint.add

        def stopping(self: Checkpoint, shard: int, *arguments: Any) -> None:
            add(self, shard, *arguments)
            if shard == 8:
                raise KeyboardInterrupt

        patch.setattr(Checkpoint, "add", stopping)
        assert fast(*runs(corpus, "out", "--resume")).exit_code == 130
    assert len(list(stopped.glob(f"*{SUFFIX}"))) == 6
    assert fast(*runs(corpus, "out", "--resume")).exit_code == 0
    assert files_of(tmp_path / "out") == whole


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "missing", "table", "half written"])
def test_a_damaged_state_is_computed_again(
    fast: Run, corpus: str, tmp_path: Path, stopped: Path, damage: str, whole: dict[str, bytes]
) -> None:
    file = sorted(stopped.glob(f"*{SUFFIX}"))[1]
    data = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
    elif damage == "table":
        sorted(stopped.rglob("*.parquet"))[1].write_bytes(b"PAR1")
    elif damage == "half written":
        (stopped / f".{file.name}.partial").write_bytes(data[:100])
    else:
        data[len(data) // 2] ^= damage == "flipped"
        file.write_bytes({"truncated": data[:-9], "flipped": data, "empty": b""}[damage])
    again = {"table": 1, "half written": 0}.get(damage, 4)
    assert count_observed(fast, runs(corpus, "out", "--resume")) == SHARDS - 5 + again
    assert files_of(tmp_path / "out") == whole


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (("--limit", "50"), "reading.limit was None, is 50"),
        (("--long", "skip"), "reading.long"),
        (("--set", "flow.from=all"), "analyses.flow.source was cls, is all"),
        (("--shard-texts", "9"), "shard_texts was 8, is 9"),
        (("--dtype", "bfloat16"), "arithmetic.dtype was float32, is bfloat16"),
        (("--model", "minilm"), "model."),
    ],
)
def test_a_changed_option_is_refused_by_name(
    fast: Run, corpus: str, stopped: Path, change: tuple[str, str], named: str
) -> None:
    before = files_of(stopped)
    assert_error(fast(*runs(corpus, "out", "--resume", *change)), 2, named)
    assert files_of(stopped) == before


def test_what_is_kept_of_every_text_may_not_change(fast: Run, corpus: str, stopped: Path) -> None:
    without = [argument for argument in runs(corpus, "out", "--resume") if argument != "--per-text"]
    assert_error(fast(*without), 2, "per_text was True, is False")


def test_a_changed_corpus_and_a_changed_version_are_refused(
    fast: Run, corpus: str, tmp_path: Path, stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / corpus).open("a") as stream:
        stream.write("one more\n")
    assert_error(fast(*runs(corpus, "out", "--resume")), 2, "corpus.sha256 was")
    write_corpus(tmp_path)
    other = {**versions.versions(), "torch": "0.1"}
    monkeypatch.setattr("bertgeo_cli.job.versions", lambda: other)
    assert_error(fast(*runs(corpus, "out", "--resume")), 2, "versions.torch was", "is 0.1")


def test_threads_and_workers_may_change_between_stop_and_resume(
    fast: Run, corpus: str, tmp_path: Path, stopped: Path, whole: dict[str, bytes]
) -> None:
    done = fast(*runs(corpus, "out", "--resume", "--workers", "2"))
    assert done.exit_code == 0, done.stderr
    assert files_of(tmp_path / "out") == whole


def test_force_starts_anew(fast: Run, corpus: str, tmp_path: Path, stopped: Path, whole: dict[str, bytes]) -> None:
    assert count_observed(fast, runs(corpus, "out", "--force")) == SHARDS
    assert files_of(tmp_path / "out") == whole


def test_two_runs_into_one_report_at_once_are_refused(fast: Run, corpus: str, tmp_path: Path) -> None:
    process = started(runs(corpus, "out"), tmp_path)
    wait_for(lambda: shards_done(states(tmp_path)) >= 1, process)
    os.kill(process.pid, signal.SIGSTOP)
    try:
        assert_error(fast(*runs(corpus, "out", "--resume")), 2, "another run is writing this report")
    finally:
        os.kill(process.pid, signal.SIGCONT)
    assert process.wait(timeout=120) == 0


def children_of(process: int) -> list[int]:
    return [int(child) for task in Path(f"/proc/{process}/task").iterdir() for child in read(task / "children").split()]


def read(path: Path) -> bytes:
    """A file of /proc; nothing of a thread or process that has just ended."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def python_children(process: int) -> list[int]:
    """Its workers, without multiprocessing's resource tracker."""
    commands = {child: read(Path(f"/proc/{child}/cmdline")) for child in children_of(process)}
    return [child for child, command in commands.items() if command and b"resource_tracker" not in command]


def test_a_killed_worker_process_is_told_and_the_run_can_go_on(
    fast: Run, corpus: str, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    process = started(runs(corpus, "out", "--workers", "2"), tmp_path)
    wait_for(lambda: shards_done(states(tmp_path)) >= 1, process)
    os.kill(python_children(process.pid)[0], signal.SIGKILL)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "a worker process was killed" in told
    assert "--resume" in told.splitlines()[-1]
    assert fast(*runs(corpus, "out", "--resume")).exit_code == 0
    assert files_of(tmp_path / "out") == whole


def test_worker_processes_end_with_a_killed_parent(corpus: str, tmp_path: Path, fast: Run) -> None:
    process = started(runs(corpus, "out", "--workers", "2"), tmp_path)
    wait_for(lambda: len(python_children(process.pid)) == 2, process)
    workers = python_children(process.pid)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_killed_dask_worker_loses_nothing(fast: Run, corpus: str, tmp_path: Path, whole: dict[str, bytes]) -> None:
    from distributed import Client, LocalCluster

    options: dict[str, Any] = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        process = started(runs(corpus, "out", "--dask", cluster.scheduler_address), tmp_path)
        wait_for(lambda: shards_done(states(tmp_path)) >= 1, process)
        os.kill(next(iter(client.run(os.getpid).values())), signal.SIGKILL)
        _, told = process.communicate(timeout=120)
        assert process.returncode == 0, told
    assert files_of(tmp_path / "out") == whole


def test_no_scheduler_is_an_error_that_names_the_address(fast: Run, corpus: str) -> None:
    done = fast(*runs(corpus, "out", "--dask", "tcp://127.0.0.1:9"))
    assert done.exit_code == 2
    assert "tcp://127.0.0.1:9" in done.stderr


# Texts that fail


@pytest.fixture
def fragile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention fails on a text with the word `boat`, in the middle of whatever batch it is in."""
    update = Attention.update

    def failing(self: Attention, state: Any, record: Any) -> None:
        update(self, state, record)
        if any("boat" in text.text for text in record.texts):
            raise ArithmeticError("no boats")

    monkeypatch.setattr(Attention, "update", failing)


def test_a_text_that_fails_stops_the_run_and_is_named(fast: Run, tmp_path: Path, fragile: None) -> None:
    (tmp_path / "c.txt").write_text("the cat\na boat\nthe dog\n", encoding="utf-8")
    assert_error(fast("attention", "--corpus", "c.txt", "-o", "out"), 1, "line 2 failed", "no boats", "--on-error skip")
    assert not (tmp_path / "out").exists()


def test_a_text_that_fails_is_listed_and_leaves_no_trace(fast: Run, tmp_path: Path, fragile: None) -> None:
    (tmp_path / "c.txt").write_text("the cat\na boat\nthe dog\n", encoding="utf-8")
    (tmp_path / "d.txt").write_text("the cat\n\nthe dog\n", encoding="utf-8")
    done = fast("attention", "--corpus", "c.txt", "--on-error", "skip", "-o", "out")
    assert done.exit_code == 0
    assert "1 failed" in done.stderr
    assert fast("attention", "--corpus", "d.txt", "-o", "without").exit_code == 0
    for name in ("attention-heads.csv", "attention-texts.csv"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "without" / name).read_bytes()
    rows = pd.read_csv(tmp_path / "out" / "lines.csv")
    assert rows["status"].tolist() == ["ok", "failed", "ok"]
    assert "no boats" in rows["note"][1]
    strict = fast("attention", "--corpus", "c.txt", "--on-error", "skip", "--strict", "-o", "out")
    assert strict.exit_code == 3


# Values of every text


def test_values_of_every_text_are_one_typed_dataset(fast: Run, corpus: str, tmp_path: Path) -> None:
    from pyarrow import dataset

    assert fast(*runs(corpus, "out")).exit_code == 0
    assert fast("attention", "--corpus", corpus, "--sample", "10000", "-o", "one").exit_code == 0
    files = dataset.dataset(tmp_path / "out" / "attention" / "per-text", format="parquet")
    assert len(files.files) == SHARDS
    found = files.to_table().to_pandas()
    expected = pd.read_csv(tmp_path / "one" / "attention-texts.csv")
    assert list(found.dtypes) == list(expected.dtypes.astype(object).where(expected.notna().any(), np.dtype("float64")))
    assert len(found) == len(expected) == len([line for line in corpus_lines() if line]) * 8
    pd.testing.assert_frame_equal(found.sort_values(["line", "layer", "head"], ignore_index=True), expected)


# Cuts and orders


corpora = st.lists(st.integers(1, 9), min_size=1, max_size=12)


class Numbers:
    """Values of a corpus by shard cut and order, in this process."""

    def __init__(self, loaded: LoadedModel, folder: Path):
        self.loaded, self.folder = loaded, folder
        self.encoder = Encoder(loaded.tokenizer, loaded.max_tokens)
        self.task = Task({"attention": Attention(), "cone-index": ConeIndex()}, Pass(64), per_text=True)
        self.count = 0

    def __call__(self, lines: Sequence[tuple[int, str]], size: int) -> tuple[Observed, pd.DataFrame]:
        self.count += 1
        modules = [type(analysis).__module__ for analysis in self.task.analyses.values()]
        kept, tables = Checkpoint(self.folder / str(self.count), modules), []
        prepared = [(Line(number, text), self.encoder.encode(text, line=number)) for number, text in lines]
        for shard in cut(prepared, size):
            result = observe_portion(self.task, self.loaded, shard.texts)
            kept.add(shard.index, result.observed, {})
            tables.append(result.tables["attention"])
        merged = kept.merged()
        assert merged is not None
        whole = pd.concat(tables).sort_values(["line", "layer", "head"], ignore_index=True)
        return merged, whole


@pytest.fixture(scope="module")
def numbers(tiny_model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Numbers:
    return Numbers(tiny_model, tmp_path_factory.mktemp("cuts"))


@settings(deadline=None, max_examples=15)
@given(lengths=corpora, size=st.integers(1, 13), seed=st.integers(0, 99))
def test_any_cut_and_any_order_give_the_same_values(numbers: Numbers, lengths: list[int], size: int, seed: int) -> None:
    chooser = random.Random(seed)
    lines = [(at, " ".join(chooser.choices(tiny.WORDS, k=length))) for at, length in enumerate(lengths, start=1)]
    shuffled = chooser.sample(lines, len(lines))
    (one, texts), (other, same_texts) = numbers(lines, 64), numbers(shuffled, size)
    pd.testing.assert_frame_equal(texts, same_texts, rtol=1e-5, atol=1e-5)
    for first, second in zip(one.whole, other.whole, strict=True):
        for value in ("mean", "std"):
            a, b = (getattr(state.moments, value) for state in (first, second))
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    repeated, _ = numbers(shuffled, size)
    analysis = Attention()
    first, second = (analysis.finalize(each.whole[0], None).tables[0].frame for each in (other, repeated))
    pd.testing.assert_frame_equal(first, second, rtol=0, atol=0)


# One bad line


def test_a_night_of_work_survives_one_bad_line(fast: Run, tmp_path: Path) -> None:
    lines = [line.encode() for line in corpus_lines() if line]
    lines[70] = b"caf\xe9"
    (tmp_path / "c.txt").write_bytes(b"\n".join(lines) + b"\n")
    arguments = ("attention", "--corpus", "c.txt", "--shard-texts", "16", "-o", "out")
    assert_error(fast(*arguments), 1, "line 71", "--on-error skip", "4 shards of 16 texts) is kept: add --resume")
    assert count_observed(fast, [*arguments, "--on-error", "skip", "--resume"]) == 2
    assert fast(*arguments[:-1], "whole", "--on-error", "skip").exit_code == 0
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


# What an adversary broke


def failing_corpus(folder: Path) -> None:
    (folder / "c.txt").write_text(
        "the cat\na boat\nthe dog\nold boat\n" + "the river " * 40 + "boat\n", encoding="utf-8"
    )


def test_failures_of_all_shards_are_listed_whoever_observed_them(fast: Run, tmp_path: Path, fragile: None) -> None:
    failing_corpus(tmp_path)
    options = ("c.txt", "--analyses", "attention", "--shard-texts", "1", "--on-error", "skip", "--long", "split")
    assert fast("run", *options, "-o", "serial").exit_code == 0
    rows = pd.read_csv(tmp_path / "serial" / "lines.csv")
    assert rows.loc[rows["status"] == "failed", "line"].unique().tolist() == [2, 4, 5]
    assert content(tmp_path / "serial")["input"]["status"] == {"failed": 3, "ok": 2}
    for job in (1, 2):
        assert fast("run", *options, "--shard", f"{job}/2", "-o", f"part-{job}").exit_code == 0
    assert fast("merge", "part-1", "part-2", "-o", "merged").exit_code == 0
    assert files_of(tmp_path / "merged") == files_of(tmp_path / "serial")


def test_a_run_that_skipped_failures_is_not_resumed_as_one_that_stops(
    fast: Run, tmp_path: Path, fragile: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_corpus(tmp_path)
    options = ("run", "c.txt", "--analyses", "attention", "--shard-texts", "2", "-o", "out")
    with monkeypatch.context() as patch:
        patch.setattr("bertgeo_cli.report.write_results", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        done = fast(*options, "--on-error", "skip")
    assert done.exit_code == 130
    assert "3 shards of 2 texts kept" in done.stderr
    again = fast(*options, "--resume")
    assert again.exit_code == 1
    assert "line 2 failed" in again.stderr
    assert fast(*options, "--resume", "--on-error", "skip").exit_code == 0


def test_files_of_values_have_one_schema_whichever_texts_have_ids_and_groups(fast: Run, tmp_path: Path) -> None:
    rows = [f"{'seven' if at == 4 else ''}\tthe cat {word}\t{'ab'[at % 2]}" for at, word in enumerate(tiny.WORDS[:9])]
    (tmp_path / "c.tsv").write_text("id\ttext\tkind\n" + "\n".join(rows) + "\n", encoding="utf-8")
    options = ("--id-column", "id", "--group-column", "kind", "--shard-texts", "3", "--per-text")
    assert fast("run", "c.tsv", "--analyses", "attention,flow", *options, "-o", "out").exit_code == 0
    for name in ("attention", "flow"):
        tables = [pd.read_parquet(path) for path in sorted((tmp_path / "out" / name / "per-text").iterdir())]
        assert len({tuple(table.columns) for table in tables}) == 1
        whole = pd.concat(tables)
        assert whole["line"].nunique() == 9
        assert whole.loc[whole["id"] == "seven", "line"].unique().tolist() == [6]


def test_a_carriage_return_in_an_id_breaks_no_table(fast: Run, tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text('{"text": "the cat", "id": "a\\rb"}\n', encoding="utf-8")
    assert fast("attention", "--corpus", "c.jsonl", "--id-column", "id", "-o", "out").exit_code == 0
    assert pd.read_csv(tmp_path / "out" / "lines.csv")["id"].tolist() == ["a b"]


@pytest.mark.parametrize("damage", ["table", "lines", "gone", "outside"])
def test_merge_refuses_a_damaged_part(fast: Run, corpus: str, tmp_path: Path, damage: str) -> None:
    for job in (1, 2):
        arguments = ("attention", "--corpus", corpus, "--shard-texts", "30", "--per-text", "--shard", f"{job}/2")
        assert fast(*arguments, "-o", f"part-{job}").exit_code == 0
    part = tmp_path / "part-2"
    table = next((part / "per-text").iterdir())
    if damage == "outside":
        told = json.loads((part / "run.json").read_text())
        (tmp_path / "secret.txt").write_text("x")
        told["part"]["sha256"]["../secret.txt"] = hashlib.sha256(b"x").hexdigest()
        (part / "run.json").write_text(json.dumps(told))
    elif damage == "gone":
        table.unlink()
    else:
        (table if damage == "table" else part / "lines.csv").write_bytes(b"PAR1")
    assert_error(fast("merge", "part-1", "part-2", "-o", "m"), 1, "part-2 lacks ", "Run job 2 again")
    assert_error(fast("merge", "part-1", "part-2", "-o", "part-1"), 2, "one of the parts")
    assert not (tmp_path / "m").exists()


def test_a_corpus_that_changes_while_it_is_read_is_noticed(
    fast: Run, corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = Source.lines

    def changing(self: Source) -> Any:
        yield from lines(self)
        (tmp_path / corpus).write_text("something else\n")

    monkeypatch.setattr(Source, "lines", changing)
    assert_error(fast("attention", "--corpus", corpus, "-o", "out"), 1, "corpus.txt changed while it was read")


def test_standard_input_that_fails_leaves_nothing_and_touches_no_kept_run(
    fast: Run, corpus: str, tmp_path: Path, stopped: Path
) -> None:
    before = files_of(stopped)
    command = [sys.executable, "-m", "bertgeo_cli", "attention", "--corpus", "-", "--shard-texts", "1", "-o"]
    given = {"cwd": tmp_path, "input": b"the cat\ncaf\xe9\n", "capture_output": True, "check": False}
    done = subprocess.run([*command, "out"], **given)
    assert done.returncode == 2
    assert b"unfinished run" in done.stderr
    assert files_of(stopped) == before
    done = subprocess.run([*command, "other"], **given)
    assert done.returncode == 1
    assert b"line 2" in done.stderr
    assert b"--resume" not in done.stderr
    assert not states(tmp_path, "other").exists()
