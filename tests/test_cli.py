"""The command line, in process: what is printed, what is written, how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tiny
import torch
from command import Run, assert_error, content, files_of

from analyses.kit.record import AXES, HeadWeights
from bertgeo_cli import check, registry, report
from bertgeo_cli.archive import load_record
from bertgeo_cli.check import check_model
from bertgeo_cli.families import head_weights
from bertgeo_cli.models import LoadedModel

SENTENCE = "The fisherman sat down by the river bank."
COMMANDS = registry.commands()
REPORTS = list(registry.entries())
"""Commands that write a report."""
READERS = [name for name, entry in registry.entries().items() if entry.load()().needs]
"""Those that read texts; the others read the model's weights, alone or with a companion that reads texts."""
COMPANIONS = [name for name in REPORTS if name not in READERS and registry.entries()[name].load()().on_texts()]
CORPUS = "the cats sat on the mat .\n\nshe ran to the old river .\na dog\n"
INPUTS: dict[str, tuple[str, ...]] = {
    "text": ('the "cats" , sat on the mat .',),
    "corpus": ("--corpus", "corpus.txt"),
    "weights": (),
}
each_input = pytest.mark.parametrize(
    ("name", "given"),
    [(name, kind) for name in REPORTS for kind in (("text", "corpus") if name in READERS else ("weights",))]
    + [(name, kind) for name in COMPANIONS for kind in ("text", "corpus")],
)


def test_the_first_line_of_the_readme_works_on_the_real_model(run: Run, tmp_path: Path) -> None:
    done = run("attention", SENTENCE)
    assert done.exit_code == 0, done.output
    folder = tmp_path / "bertgeo-report" / "attention"
    heads = pd.read_csv(folder / "attention-heads.csv")
    assert len(heads) == 6 * 12
    assert (heads[["mass_cls", "mass_sep", "mass_punctuation", "mass_other"]].sum(axis=1) - 1).abs().max() < 1e-12
    weights = pd.read_csv(folder / "attention-weights.csv", keep_default_na=False)
    assert len(weights) == 6 * 12 * 11 * 11
    assert list(weights["key_token"][:11]) == ["[CLS]", *SENTENCE[:-1].split(), ".", "[SEP]"]
    assert json.loads((folder / "run.json").read_text())["model"]["name"] == "minilm"
    assert (folder / "attention-maps.png").stat().st_size > 10_000


def test_the_default_model_is_named_with_the_way_to_another(run: Run) -> None:
    done = run("attention", SENTENCE, "--figures", "none", "--layers", "0")
    assert done.stderr.splitlines()[0].startswith("Model: minilm")
    assert "--model bert-base-uncased" in done.stderr.splitlines()[0]


# Help


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(run: Run, name: str) -> None:
    done = run(name, "--help")
    assert done.exit_code == 0
    assert f"Example: bertgeo {name}" in " ".join(done.stdout.split())
    assert done.stderr == ""


def test_help_lists_every_command_with_a_line_about_it(run: Run) -> None:
    for flag in ("--help", "-h"):
        done = run(flag)
        assert done.exit_code == 0
        words = done.stdout.split()
        assert all(name in words for name in COMMANDS)
    assert all(entry.help.strip() for entry in registry.entries().values())


@pytest.mark.parametrize("name", REPORTS)
def test_help_in_the_terminal_is_the_docstring_of_the_analysis(run: Run, name: str) -> None:
    shown = " ".join(run(name, "-h").stdout.split())
    assert " ".join(registry.entries()[name].help.split("\n\n")[0].split()) in shown


def test_options_are_kebab_case(run: Run) -> None:
    for name in COMMANDS:
        flags = [word for word in run(name, "--help").stdout.split() if word.startswith("--")]
        assert flags
        assert not [flag for flag in flags if "_" in flag]


@pytest.mark.parametrize("arguments", [("nope",), ("attention", "--nope"), ("attention", "--limit", "0"), ("record",)])
def test_wrong_usage_exits_2_and_prints_nothing_on_stdout(run: Run, arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


# Wrong usage: exit 2


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("the cat", "--layers", "2"), ("layer 2", "2 layers", "0 to 1")),
        (("the cat", "--layers", "0-7"), ("0-7", "0 to 1")),
        (("the cat", "--layers", "-3"), ("-3", "0 to 1")),
        (("the cat", "--layers", "first"), ("'first'",)),
        (("the cat", "--layers", ""), ("''",)),
        (("the cat", "--heads", "4"), ("head 4", "4 heads", "0 to 3")),
        (("the cat", "--corpus", "corpus.txt"), ("--corpus",)),
        (("--pair", "the cat"), ("--pair",)),
        (("",), ("''", "empty")),
        ((" \u200b ",), ("empty",)),
        (("the cat", "--metrics", "sharpness"), ("sharpness", "entropy")),
        (("the cat", "--metrics", "mean"), ("rows sum to 1",)),
        (("the cat", "--metrics", "entropy,mean-attention"), ("rows sum to 1",)),
        (("--corpus", "nope.txt"), ("nope.txt",)),
        (("--corpus", "corpus.txt", "--encoding", "utf-99"), ("utf-99",)),
        (("the cat", "--model", "./nope"), ("./nope",)),
        (("the cat", "--device", "tpu"), ("tpu", "cuda")),
        (("the cat", "--revision", "main"), ("main",)),
    ],
)
def test_wrong_usage_is_explained_in_two_lines(
    fast: Run, tmp_path: Path, arguments: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    (tmp_path / "corpus.txt").write_text("the cat\n")
    assert_error(fast("attention", *arguments), 2, *parts)
    assert list(tmp_path.glob("bertgeo-report/*")) == []


def test_a_refused_run_leaves_no_empty_folder_behind(fast: Run, tmp_path: Path) -> None:
    fast("attention", "the cat", "--layers", "9")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", REPORTS)
def test_every_command_refuses_a_layer_that_does_not_exist(fast: Run, name: str) -> None:
    if "layers" not in registry.entries()[name].load().__dataclass_fields__:
        pytest.skip("it has no --layers")
    text = ("the cats sat",) if name in READERS else ()
    assert_error(fast(name, *text, "--layers", "2"), 2, "layer 2", "0 to 1")


@pytest.mark.parametrize("name", [name for name in REPORTS if name not in READERS and name not in COMPANIONS])
def test_what_reads_weights_alone_refuses_texts(fast: Run, tmp_path: Path, name: str) -> None:
    (tmp_path / "corpus.txt").write_text("the cat\n")
    assert_error(fast(name, "the cat"), 2, "weights")
    assert_error(fast(name, "--corpus", "corpus.txt"), 2, "weights")


def test_f8_a_folder_of_somebody_elses_files_is_refused_and_kept(fast: Run, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    assert_error(fast("attention", "the cat", "-o", "mine"), 2, "mine", "--force")
    assert files_of(tmp_path) == {"mine/thesis.txt": b"years of work"}
    assert fast("attention", "the cat", "-o", "mine", "--force").exit_code == 0
    assert "thesis.txt" not in files_of(folder)


def test_f8_an_empty_folder_is_taken(fast: Run, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    assert fast("attention", "the cat", "-o", "new").exit_code == 0
    assert (tmp_path / "new" / "run.json").is_file()


@pytest.mark.parametrize("output", ["file", "file/report", "file/deep/report"])
def test_f8_a_file_where_a_folder_should_be_is_refused_before_the_model_loads(
    fast: Run, tmp_path: Path, output: str
) -> None:
    (tmp_path / "file").write_text("mine")
    done = fast("attention", "the cat", "-o", output)
    assert_error(done, 2, output)
    assert "Model: " not in done.stderr
    assert files_of(tmp_path) == {"file": b"mine"}


# Failed at run time: exit 1


STRAY = b"the cat\na dog\ncaf\xe9 x\nthe mat\n"


def test_f3_an_undecodable_line_ends_the_run_and_leaves_nothing(fast: Run, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_bytes(STRAY)
    assert_error(fast("attention", "--corpus", "corpus.txt"), 1, "corpus.txt", "line 3", "0xE9", "latin-1")
    assert not (tmp_path / "bertgeo-report" / "attention").exists()
    assert list((tmp_path / "bertgeo-report").glob(".*")) == []


def test_f3_skipped_lines_are_counted_and_the_others_read(fast: Run, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_bytes(STRAY)
    done = fast("attention", "--corpus", "corpus.txt", "--on-error", "skip", "-o", "out")
    assert done.exit_code == 0
    assert "3 ok, 1 undecodable" in done.stderr
    assert content(tmp_path / "out")["input"]["status"] == {"ok": 3, "undecodable": 1}
    lines = pd.read_csv(tmp_path / "out" / "lines.csv")
    assert list(lines["status"]) == ["ok", "ok", "undecodable", "ok"]
    assert "0xE9" in lines["note"][2]
    assert sorted(pd.read_csv(tmp_path / "out" / "attention-texts.csv")["line"].unique()) == [1, 2, 4]


def test_f3_broken_utf_16_is_an_error_of_the_file_and_not_of_bertgeo(fast: Run, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_bytes("the cat\n".encode("utf-16") + b"x")
    assert_error(fast("attention", "--corpus", "corpus.txt", "--encoding", "utf-16"), 1, "corpus.txt")


def test_f1_a_corpus_without_a_text_is_an_error(fast: Run, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("\n  \n\u200b\n", encoding="utf-8")
    assert_error(fast("attention", "--corpus", "corpus.txt"), 1, "no text")
    (tmp_path / "corpus.txt").write_text("")
    assert_error(fast("attention", "--corpus", "corpus.txt"), 1, "no text")


def test_a_long_text_is_an_error_unless_it_may_be_cut(fast: Run, tmp_path: Path) -> None:
    text = " ".join(["cat"] * 100)
    assert_error(fast("attention", text), 1, "102 tokens", "64", "--long")
    done = fast("attention", text, "--long", "truncate", "-o", "out")
    assert done.exit_code == 0
    assert "102 tokens" in done.stderr
    assert len(pd.read_csv(tmp_path / "out" / "tokens.csv")) == 64


# Incomplete: exit 3


@pytest.mark.parametrize("options", [(), ("--long", "skip"), ("--long", "split")])
def test_strict_exits_3_when_something_was_left_out(fast: Run, tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "corpus.txt").write_text("the cat\n" + "cat " * 3000 + "\n\n")
    done = fast("attention", "--corpus", "corpus.txt", "-o", "out", "--strict", *options)
    assert done.exit_code == (0 if "split" in options else 3)
    assert (tmp_path / "out" / "run.json").is_file()
    lines = pd.read_csv(tmp_path / "out" / "lines.csv")
    assert lines[lines["line"] == 2]["tokens"].sum() == 3002
    assert "Traceback" not in done.stderr
    assert fast("attention", "--corpus", "corpus.txt", "-o", "out", *options).exit_code == 0


def test_strict_is_content_with_a_whole_corpus(fast: Run, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("the cat\n\na dog\n")
    assert fast("attention", "--corpus", "corpus.txt", "--strict").exit_code == 0


def test_f4_a_long_line_may_be_an_error(fast: Run, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("the cat\n" + "cat " * 3000)
    assert_error(fast("attention", "--corpus", "corpus.txt", "--long", "error"), 1, "line 2", "3002", "64")


# Untrusted: exit 4


def test_a_folder_without_tokenizer_is_not_trusted(fast: Run, tiny_folder: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bad / name).write_bytes((tiny_folder / name).read_bytes())
    for command in (("attention", "the cat"), ("check",), ("info",), ("record", "the cat", "-o", "r.safetensors")):
        assert_error(fast(*command, "--model", "./bad"), 4, "tokenizer")


# Streams


@each_input
def test_json_is_one_document_on_stdout_and_names_files_that_exist(
    fast: Run, tmp_path: Path, name: str, given: str
) -> None:
    (tmp_path / "corpus.txt").write_text(CORPUS)
    done = fast(name, *INPUTS[given], "--json", "-o", "out")
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    both = {"headline_on_texts"} if name in COMPANIONS and given != "weights" else set()
    assert set(answer) == {"run", "headline", "files"} | both
    assert answer["run"] == content(tmp_path / "out")
    assert answer["headline"]
    assert answer["files"]
    assert all((tmp_path / file).is_file() for file in answer["files"])
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(
    "arguments", [("info",), ("check",), ("record", "the cat", "-o", "r.safetensors"), ("attention", "a", "--dry-run")]
)
def test_json_of_the_other_commands_is_one_document(fast: Run, arguments: tuple[str, ...]) -> None:
    done = fast(*arguments, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)


def test_json_of_a_failed_run_prints_nothing_on_stdout(fast: Run) -> None:
    assert_error(fast("attention", "the cat", "--json", "--layers", "9"), 2)


def test_stdout_holds_results_and_paths_and_stderr_the_rest(fast: Run, tmp_path: Path) -> None:
    done = fast("attention", "the cat", "-o", "out")
    paths = [line for line in done.stdout.splitlines() if line.startswith("out/")]
    assert sorted(paths) == sorted(f"out/{name}" for name in files_of(tmp_path / "out"))
    assert "Model" not in done.stdout
    assert "Special tokens" in done.stderr
    assert "entropy" in done.stdout


def test_dry_run_counts_and_writes_nothing(fast: Run, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("the cat\na dog\n\nthe old cat sat\n")
    before = files_of(tmp_path)
    done = fast("attention", "--corpus", "corpus.txt", "--batch-tokens", "8", "--dry-run", "--json")
    counts = json.loads(done.stdout)
    assert (counts["texts"], counts["tokens"], counts["batches"]) == (3, 14, 2)
    assert files_of(tmp_path) == before
    assert list(tmp_path.iterdir()) == [tmp_path / "corpus.txt"]


def test_dry_run_refuses_what_the_run_would_refuse(fast: Run) -> None:
    assert_error(fast("attention", "the cat", "--dry-run", "--layers", "9"), 2, "0 to 1")
    assert_error(fast("attention", "the cat", "--dry-run", "--metrics", "mean"), 2, "rows sum to 1")


def test_a_corpus_comes_from_standard_input(fast: Run, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from bertgeo_cli.cli import main; main()"]
    arguments = ["attention", "--corpus", "-", "--limit", "2", "--json", "-o", "out"]
    done = subprocess.run(
        command + arguments, input=b"the cat\na dog\ncaf\xe9\n", capture_output=True, cwd=tmp_path, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["run"]["input"]["status"] == {"ok": 2}
    assert content(tmp_path / "out")["input"]["name"] == "standard input"


def test_without_input_the_sample_corpus_is_read_and_named(fast: Run, tmp_path: Path) -> None:
    done = fast("attention", "--limit", "3", "-o", "out")
    assert "sample corpus" in done.stderr
    assert content(tmp_path / "out")["input"]["kind"] == "sample"


# What is left on disk


@each_input
def test_a_rerun_replaces_its_folder_and_writes_the_same_bytes(
    fast: Run, tmp_path: Path, name: str, given: str
) -> None:
    (tmp_path / "corpus.txt").write_text(CORPUS)
    assert fast(name, *INPUTS[given], "-o", "out", "--format", "jsonl", "--figures", "none").exit_code == 0
    first = fast(name, *INPUTS[given], "-o", "out", "--figures", "png")
    assert first.exit_code == 0, first.output
    before = files_of(tmp_path / "out")
    assert not [file for file in before if file.endswith(".jsonl")]
    second = fast(name, *INPUTS[given], "-o", "out", "--figures", "png")
    assert files_of(tmp_path / "out") == before
    assert second.stdout == first.stdout
    assert "run.json" in before
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_f8_a_users_file_in_a_report_and_a_run_json_of_others_are_not_lost(fast: Run, tmp_path: Path) -> None:
    assert fast("attention", "the cat", "-o", "out").exit_code == 0
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.json").write_text("{}")
    for folder in ("out", "other"):
        assert_error(fast("attention", "the cat", "-o", folder), 2)
    assert (tmp_path / "out" / "thesis.txt").read_text() == "mine"
    assert (tmp_path / "other" / "run.json").read_text() == "{}"
    assert fast("attention", "the cat", "-o", "out", "--force").exit_code == 0
    assert not (tmp_path / "out" / "thesis.txt").exists()


def test_a_link_to_a_folder_is_followed(fast: Run, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to("target")
    assert fast("attention", "the cat", "-o", "link").exit_code == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target" / "run.json").is_file()


@pytest.mark.parametrize(
    "arguments",
    [
        ("attention", "--sample", "-1"),
        ("attention", "the cat", "--pair", " "),
        ("attention", "the \udc80"),
        ("flow", "the cat", "--from", "\u00b2"),
        ("flow", "--corpus", "corpus.txt", "--from", "zebra"),
        ("heads", "--composition", "Z"),
        ("attention", "the cat", "-o", "x" * 300),
    ],
)
def test_what_cannot_be_meant_is_refused(fast: Run, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "corpus.txt").write_text("the cat\n")
    done = fast(*arguments)
    assert done.exit_code == 2, done.output
    assert "fault of bertgeo" not in done.stderr


def test_no_file_names_a_machine_or_a_time(fast: Run, tmp_path: Path, tiny_folder: Path) -> None:
    (tmp_path / "corpus.txt").write_text("the cat\na dog\n")
    fast("attention", "--corpus", str(tmp_path / "corpus.txt"), "-o", "out", "--figures", "svg")
    for name, data in files_of(tmp_path / "out").items():
        for trace in (str(tmp_path), str(tiny_folder.parent), os.uname().nodename):
            assert not re.search(rb"\b%s\b" % re.escape(trace.encode()), data), (name, trace)
    assert content(tmp_path / "out")["input"]["name"] == "corpus.txt"


def test_an_interrupted_run_leaves_the_old_report_and_nothing_else(
    fast: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fast("attention", "the cat", "-o", "out").exit_code == 0
    before = files_of(tmp_path)

    def fail(*_: Any) -> None:
        raise RuntimeError("the plug was pulled")

    monkeypatch.setattr(report, "write_run", fail)
    done = fast("attention", "a dog", "-o", "out")
    assert done.exit_code == 1
    assert "the plug was pulled" in done.stderr
    assert files_of(tmp_path) == before
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_ctrl_c_exits_130_and_leaves_the_old_report(fast: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fast("attention", "the cat", "-o", "out").exit_code == 0
    before = files_of(tmp_path)

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "write_results", interrupt)
    done = fast("attention", "a dog", "-o", "out")
    assert done.exit_code == 130
    assert "Traceback" not in done.output
    assert files_of(tmp_path) == before


def test_a_full_disk_is_explained_and_loses_nothing(fast: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fast("attention", "the cat", "-o", "out").exit_code == 0
    before = files_of(tmp_path)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report, "write_results", full)
    assert_error(fast("attention", "a dog", "-o", "out"), 1, "No space left")
    assert files_of(tmp_path) == before


def test_leftovers_of_a_killed_run_are_removed(fast: Run, tmp_path: Path) -> None:
    (tmp_path / ".out.partial-999999999").mkdir()
    assert fast("attention", "the cat", "-o", "out").exit_code == 0
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


# Formats


@each_input
def test_jsonl_and_parquet_hold_the_values_of_csv(fast: Run, tmp_path: Path, name: str, given: str) -> None:
    (tmp_path / "corpus.txt").write_text(CORPUS)
    for form in ("csv", "jsonl", "parquet"):
        done = fast(name, *INPUTS[given], "-o", form, "--format", form)
        assert done.exit_code == 0, done.output
    stems = {path.stem for path in (tmp_path / "csv").glob("*.csv")} - {"lines"}
    assert stems
    for stem in stems:
        parquet = pd.read_parquet(tmp_path / "parquet" / f"{stem}.parquet")
        texts = dict.fromkeys(parquet.select_dtypes(["object", "string"]), str)  # digits may be text: exact counts
        plain = pd.read_csv(tmp_path / "csv" / f"{stem}.csv", keep_default_na=False, na_values=[""], dtype=texts)
        lines = (tmp_path / "jsonl" / f"{stem}.jsonl").read_text(encoding="utf-8").splitlines()
        records = pd.DataFrame([json.loads(line) for line in lines])
        for other in (plain, records):
            assert_same_values(parquet, other)


def assert_same_values(first: pd.DataFrame, second: pd.DataFrame) -> None:
    assert list(first) == list(second)
    for column in first:
        one, other = first[column], second[column]
        assert list(one.isna()) == list(other.isna()), column
        if pd.api.types.is_numeric_dtype(one.dtype) and one.dtype != bool:
            values = [side.astype("Float64").to_numpy(float, na_value=np.nan) for side in (one, other)]
            np.testing.assert_allclose(*values, rtol=1e-14, atol=1e-14, err_msg=str(column))
        else:
            assert list(one.dropna()) == list(other.dropna()), column


def test_csv_holds_every_digit(fast: Run, tmp_path: Path) -> None:
    fast("attention", "the cats sat", "-o", "csv")
    fast("attention", "the cats sat", "-o", "parquet", "--format", "parquet")
    exact = pd.read_parquet(tmp_path / "parquet" / "attention-weights.parquet")["weight"]
    read = pd.read_csv(tmp_path / "csv" / "attention-weights.csv", dtype=str)["weight"]
    assert [float(number) for number in read] == list(exact)


def test_figures_are_left_out_or_take_their_format(fast: Run, tmp_path: Path) -> None:
    fast("attention", "the cat", "-o", "none", "--figures", "none")
    assert {path.suffix for path in (tmp_path / "none").iterdir()} == {".csv", ".json"}
    for form in ("png", "svg", "pdf"):
        done = fast("attention", "the cat", "-o", form, "--figures", form, "--layers", "0")
        assert done.exit_code == 0, done.output
        assert (tmp_path / form / f"attention-maps.{form}").stat().st_size > 1000


# Settings


def test_precedence_is_option_environment_config_default(
    fast: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.toml").write_text(
        'heads = "1"\nlong = "skip"\n[attention]\nheads = "2"\n[cone-index]\nheads = "3"\n'
    )

    def heads(*options: str) -> Any:
        done = fast("attention", "the cat", "--json", *options)
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)["run"]["settings"]["heads"]

    assert heads() == "all"
    assert heads("--config", "config.toml") == "2"
    monkeypatch.setenv("BERTGEO_HEADS", "0")
    assert heads() == "0"
    assert heads("--config", "config.toml") == "0"
    assert heads("--config", "config.toml", "--heads", "3") == "3"


def test_the_configuration_may_come_from_the_environment(
    fast: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.toml").write_text('special = "drop"\nbatch-tokens = 7\nwords = true\n')
    monkeypatch.setenv("BERTGEO_CONFIG", "config.toml")
    told = json.loads(fast("attention", "the cat", "--json").stdout)["run"]
    assert (told["settings"]["special"], told["settings"]["words"]) == ("drop", True)
    assert told["arithmetic"]["batch_tokens"] == 7


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("colour = 1", "colour"),
        ("[attention]\ncolour = 1", "colour"),
        ('special = "maybe"', "maybe"),
        ("not toml", "config.toml"),
        ('attention = "flat"', "attention"),
        ("[special]\nkeep = true", "special"),
    ],
)
def test_a_wrong_configuration_is_refused(fast: Run, tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "config.toml").write_text(text)
    done = fast("attention", "the cat", "--config", "config.toml")
    assert done.exit_code == 2, done.output
    assert named in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "bertgeo-report").exists()


def test_a_configuration_that_is_not_there_is_named(fast: Run) -> None:
    done = fast("attention", "the cat", "--config", "nope.toml")
    assert done.exit_code == 2
    assert "nope.toml" in done.stderr


def test_options_of_another_command_may_stand_in_its_table(fast: Run, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[attention]\nmetrics = "entropy"\n')
    assert fast("cone-index", "the cat", "--config", "config.toml").exit_code == 0


# Text


HARD = "$5 and $6 [sep] [/b]"


def test_t11_text_is_literal_in_tables_and_figures(fast: Run, tmp_path: Path) -> None:
    for form in ("png", "svg"):
        done = fast("attention", HARD, "-o", "out", "--figures", form)
        assert done.exit_code == 0, done.output
    tokens = pd.read_csv(tmp_path / "out" / "tokens.csv", keep_default_na=False)
    assert "".join(tokens["text"][1:-1]) == HARD.replace(" ", "")
    weights = pd.read_csv(tmp_path / "out" / "attention-weights.csv", keep_default_na=False)
    assert set(weights["query_token"]) == set(tokens["text"])
    assert content(tmp_path / "out")["input"]["text"] == HARD


def test_t11_user_text_is_literal_in_the_terminal(fast: Run, tmp_path: Path) -> None:
    (tmp_path / "$5 [b] [sep].txt").write_text("the cat\n")
    done = fast("attention", "--corpus", "$5 [b] [sep].txt")
    assert done.exit_code == 0
    assert "$5 [b] [sep].txt" in done.stderr
    assert_error(fast("attention", "the cat", "--layers", "[/b]"), 2, "[/b]")


@pytest.mark.parametrize("special", ["keep", "drop", "renormalise"])
def test_what_happens_to_special_tokens_is_recorded_and_their_mass_reported(
    fast: Run, tmp_path: Path, special: str
) -> None:
    done = fast("attention", "the cats sat", "--special", special, "-o", "out")
    assert content(tmp_path / "out")["settings"]["special"] == special
    assert "Mean mass on [CLS] 0." in done.stderr
    assert "on [SEP] 0." in done.stderr
    heads = pd.read_csv(tmp_path / "out" / "attention-heads.csv")
    assert (heads[["mass_cls", "mass_sep", "mass_punctuation", "mass_other"]].sum(axis=1) - 1).abs().max() < 1e-12
    assert (heads["n"] == (5 if special == "keep" else 3)).all()
    rows = pd.read_csv(tmp_path / "out" / "attention-weights.csv").groupby(["layer", "head", "query"])["weight"].sum()
    assert (rows < 1 - 1e-6).any() == (special == "drop")


@pytest.mark.parametrize("special", ["keep", "drop", "renormalise"])
def test_f6_a_line_of_special_tokens_alone_has_empty_cells(fast: Run, tmp_path: Path, special: str) -> None:
    (tmp_path / "corpus.txt").write_text("the cat\n\u0301\n", encoding="utf-8")
    done = fast("attention", "--corpus", "corpus.txt", "--special", special, "-o", "out")
    assert done.exit_code == 0, done.output
    assert list(pd.read_csv(tmp_path / "out" / "lines.csv")["used"]) == [4, 2]


def test_words_are_the_units_when_asked_for(fast: Run, tmp_path: Path) -> None:
    fast("attention", "playing cats", "--words", "-o", "out")
    weights = pd.read_csv(tmp_path / "out" / "attention-weights.csv")
    assert list(weights["key_token"][:4]) == ["[CLS]", "playing", "cats", "[SEP]"]
    np.testing.assert_allclose(weights.groupby(["layer", "head", "query"])["weight"].sum(), 1.0, atol=1e-12)
    assert content(tmp_path / "out")["settings"]["words"] is True


def test_a_pair_is_read_as_two_segments(fast: Run, tmp_path: Path) -> None:
    done = fast("attention", "the cat", "--pair", "a dog sat", "-o", "out")
    assert done.exit_code == 0
    assert list(pd.read_csv(tmp_path / "out" / "tokens.csv")["segment"]) == [0, 0, 0, 0, 1, 1, 1, 1]
    heads = pd.read_csv(tmp_path / "out" / "attention-heads.csv")
    assert heads[["mass_a_to_b", "mass_b_to_a"]].notna().all(axis=None)


def test_typed_special_tokens_are_text_unless_asked_for(fast: Run, tmp_path: Path) -> None:
    counts = []
    for options in ((), ("--special-tokens-in-text",)):
        fast("attention", "a [MASK] b [SEP]", "-o", "out", *options)
        counts.append(int(pd.read_csv(tmp_path / "out" / "tokens.csv")["special"].sum()))
    assert counts == [2, 4]


# record


@pytest.fixture
def recorded(fast: Run, tmp_path: Path) -> tuple[Mapping[str, torch.Tensor], Mapping[str, Any]]:
    done = fast("record", "the cats sat", "--pair", "a dog", "-o", "pass.safetensors")
    assert done.exit_code == 0, done.output
    assert done.stdout.strip() == "pass.safetensors"
    return load_record(tmp_path / "pass.safetensors")


def test_a_record_holds_every_tensor_with_its_axes(recorded: Any) -> None:
    tensors, about = recorded
    assert set(tensors) == {*AXES, "query_factors", "key_factors"} == set(about["axes"])
    sizes = {
        "batch": 1,
        "layer": 2,
        "depth": 3,
        "head": 4,
        "token": 8,
        "query": 8,
        "key": 8,
        "channel": 12,
        "width": 48,
    }
    sizes |= {"weight_layer": 2, "width_and_bias": 49}
    for name, tensor in tensors.items():
        assert tuple(tensor.shape) == tuple(sizes[axis] for axis in about["axes"][name]), name


def test_a_record_says_what_was_read_and_by_which_model(recorded: Any, tiny_model: LoadedModel) -> None:
    _, about = recorded
    assert about["text"]["text"] == "the cats sat"
    assert about["text"]["tokens"] == ["[CLS]", "the", "cats", "sat", "[SEP]", "a", "dog", "[SEP]"]
    assert about["text"]["segment"] == [0, 0, 0, 0, 0, 1, 1, 1]
    assert about["model"] == dict(tiny_model.identity)
    assert about["arithmetic"]["dtype"] == "float32"


def test_the_factors_of_a_record_give_back_its_scores_and_attention(recorded: Any) -> None:
    tensors, _ = recorded
    for layer in range(2):
        x = torch.nn.functional.pad(tensors["hidden_states"][0, layer].double(), (0, 1), value=1.0)
        for head in range(4):
            query, key = (tensors[f"{name}_factors"][layer, head].double() for name in ("query", "key"))
            scores = x @ query.T @ key @ x.T / 12**0.5
            torch.testing.assert_close(scores, tensors["scores"][0, layer, head].double(), atol=1e-5, rtol=1e-5)
            attention = tensors["attention"][0, layer, head].double()
            torch.testing.assert_close(scores.softmax(-1), attention, atol=1e-5, rtol=0.0)


def test_a_record_is_not_overwritten_unless_asked_for_and_is_the_same_again(
    fast: Run, recorded: Any, tmp_path: Path
) -> None:
    before = files_of(tmp_path)
    again = ("record", "the cats sat", "--pair", "a dog", "-o", "pass.safetensors")
    assert_error(fast(*again), 2, "pass.safetensors", "--force")
    assert fast(*again, "--force").exit_code == 0
    assert files_of(tmp_path) == before


def test_a_record_refuses_empty_and_long_texts_and_bad_places(fast: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    assert_error(fast("record", " ", "-o", "r"), 2, "empty")
    assert_error(fast("record", "cat " * 100, "-o", "r"), 1, "102 tokens", "64")
    assert_error(fast("record", "the cat", "-o", "file/r"), 2, "file/r")
    assert_error(fast("record", "the cat", "-o", ".", "--force"), 2)
    assert files_of(tmp_path) == {"file": b"mine"}


# check and info


def test_check_proves_the_tiny_model(fast: Run) -> None:
    done = fast("check")
    assert done.exit_code == 0, done.output
    assert "FAIL" not in done.stdout
    assert "bilinear forms" in done.stdout


def test_check_proves_the_real_model(minilm: LoadedModel) -> None:
    assert [proof.name for proof in check_model(minilm) if not proof.holds] == []


def test_check_refuses_other_dtypes(fast: Run) -> None:
    assert_error(fast("check", "--dtype", "float16"), 2, "float16")


def by_columns(weights: HeadWeights) -> HeadWeights:
    """Queries cut as if a Linear stored (in, out)."""
    layers, heads, channels, width = weights.query.shape
    whole = weights.query.reshape(layers, heads * channels, width)
    return replace(weights, query=whole.mT.reshape(layers, heads, channels, width))


def without_bias(weights: HeadWeights) -> HeadWeights:
    return replace(weights, query_bias=torch.zeros_like(weights.query_bias))


def swapped_heads(weights: HeadWeights) -> HeadWeights:
    return replace(weights, value=weights.value.flip(1), value_bias=weights.value_bias.flip(1))


def output_by_rows(weights: HeadWeights) -> HeadWeights:
    layers, heads, width, channels = weights.output.shape
    whole = weights.output.movedim(1, 2).reshape(layers, width, heads * channels)
    return replace(weights, output=whole.reshape(layers, heads, channels, width).mT)


@pytest.mark.parametrize(
    ("fault", "proofs"),
    [
        (by_columns, ("recomputed q", "bilinear forms")),
        (without_bias, ("recomputed q", "bilinear forms")),
        (swapped_heads, ("recomputed v",)),
        (output_by_rows, ("recomputed attention_projection",)),
    ],
)
def test_check_finds_wrongly_cut_weights(
    fast: Run, monkeypatch: pytest.MonkeyPatch, fault: Any, proofs: tuple[str, ...]
) -> None:
    monkeypatch.setattr(LoadedModel, "head_weights", lambda loaded: fault(head_weights(loaded.model)))
    done = fast("check", "--json")
    assert done.exit_code == 4
    assert {proof["name"] for proof in json.loads(done.stdout) if not proof["holds"]} == set(proofs)
    assert all(name in done.stderr for name in proofs)
    assert "Traceback" not in done.stderr


def test_r4_check_finds_a_model_that_ignores_its_mask(fast: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from bertgeo_cli.recording import Recorder

    obedient = Recorder.attend

    def heedless(
        self: Any, module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **rest: Any
    ) -> Any:
        return obedient(self, module, query, key, value, None, **rest)

    monkeypatch.setattr(Recorder, "attend", heedless)
    done = fast("check", "--json")
    assert done.exit_code == 4
    assert [proof["name"] for proof in json.loads(done.stdout) if not proof["holds"]] == ["padding invariance"]


def test_check_finds_a_model_that_draws_lots(fast: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, draws = check.record, iter(range(1000))

    def noisy(loaded: LoadedModel, *arguments: Any, **options: Any) -> Any:
        bias = loaded.model.get_submodule("encoder.layer.1.output.dense").bias
        with torch.no_grad():
            bias += 1e-6 * (next(draws) % 2)
        return honest(loaded, *arguments, **options)

    monkeypatch.setattr(check, "record", noisy)
    done = fast("check", "--json")
    assert done.exit_code == 4
    assert "determinism" in [proof["name"] for proof in json.loads(done.stdout) if not proof["holds"]]


def test_info_gives_shapes_and_hashes(fast: Run, tiny_model: LoadedModel) -> None:
    about = json.loads(fast("info", "--json").stdout)
    assert (about["family"], about["layers"], about["heads per layer"]) == ("bert", 2, 4)
    assert (about["width d"], about["head width dk"], about["longest text (tokens)"]) == (48, 12, 64)
    assert about["parameters"] == sum(parameter.numel() for parameter in tiny_model.model.parameters())
    assert tiny_model.identity["weights_sha256"] in about.values()
    assert fast("info").exit_code == 0


def test_info_of_the_real_model_counts_its_parameters(run: Run) -> None:
    about = json.loads(run("info", "--json").stdout)
    assert (about["layers"], about["heads per layer"], about["width d"], about["head width dk"]) == (6, 12, 384, 32)
    assert about["parameters"] == 22_565_376


def test_other_families_work_from_end_to_end(run: Run, tmp_path: Path) -> None:
    tiny.tiny_family("albert", tmp_path / "albert")
    for name in ("attention", "cone-index"):
        done = run(name, "the cat sat", "--model", "./albert", "--figures", "none", "-o", name)
        assert done.exit_code == 0, done.output
        assert content(tmp_path / name)["model"]["name"] == "albert"


# The real entry point


def bertgeo(*arguments: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).with_name("bertgeo"), *arguments]
    environment = {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=120)


def test_the_entry_point_tells_its_version(tmp_path: Path) -> None:
    done = bertgeo("--version", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("bertgeo 0.")


def test_the_entry_point_calls_itself_bertgeo(tmp_path: Path) -> None:
    done = bertgeo("check", "--help", folder=tmp_path)
    assert done.returncode == 0
    assert "Usage: bertgeo check" in done.stdout


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    code = """
import sys
from bertgeo_cli.cli import main
sys.argv = ["bertgeo", *sys.argv[1:]]
try:
    main()
finally:
    heavy = {"torch", "pandas", "matplotlib", "transformers", "numpy", "scipy"} & set(sys.modules)
    print(sorted(heavy), file=sys.stderr)
"""
    for arguments in (["--help"], ["--version"], ["nope"]):
        command = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
        assert done.stderr.splitlines()[-1] == "[]", done.stderr


def test_ctrl_c_while_python_takes_itself_down_prints_no_traceback(tmp_path: Path) -> None:
    code = """
import atexit, os, signal, sys
from bertgeo_cli.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)
atexit.register(os.kill, os.getpid(), signal.SIGINT)
sys.argv = ["bertgeo", "--version"]
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


@pytest.mark.parametrize("arguments", ["attention 'the cat' --figures none", "--help"])
def test_f10_a_reader_who_leaves_early_ends_the_run_with_141(tmp_path: Path, tiny_folder: Path, arguments: str) -> None:
    program = Path(sys.executable).with_name("bertgeo")
    script = f'"{program}" {arguments} | true; echo "${{PIPESTATUS[0]}}"'
    done = subprocess.run(
        ["bash", "-c", script],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "BERTGEO_MODEL": str(tiny_folder)},
        timeout=120,
    )
    assert done.stdout.strip() == "141", done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr
