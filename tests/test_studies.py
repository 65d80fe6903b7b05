"""Studies: what the machine does for all of them, by a toy one; and what must hold of each."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from command import Run, assert_error, content, files_of

from bertgeo_cli import registry
from bertgeo_cli.options import CorpusOptions, TextsInput

STUDIES = list(registry.studies())


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The toy study as the only one, and a corpus in the working folder."""
    monkeypatch.setattr(
        registry, "studies", lambda: {"toy-study": registry.Entry("toy-study", "toy_study", registry.STUDY)}
    )
    (tmp_path / "corpus.txt").write_text("the cat sat\n\nshe ran to the old river\n")


def tokens(folder: Path) -> list[int]:
    return pd.read_csv(folder / "toy-study.csv")["tokens"].tolist()


def test_a_text_is_read(toy: None, run: Run, tmp_path: Path) -> None:
    done = run("toy-study", "the cat sat", "-o", "report")
    assert done.exit_code == 0, done.output
    assert tokens(tmp_path / "report") == [5]
    assert content(tmp_path / "report")["input"]["text"] == "the cat sat"


def test_a_corpus_is_read_and_its_lines_are_kept(toy: None, run: Run, tmp_path: Path) -> None:
    done = run("toy-study", "--corpus", "corpus.txt", "-o", "report")
    assert done.exit_code == 0, done.output
    assert tokens(tmp_path / "report") == [5, 8]
    assert pd.read_csv(tmp_path / "report" / "lines.csv")["status"].tolist() == ["ok", "empty", "ok"]
    assert content(tmp_path / "report")["input"]["status"] == {"empty": 1, "ok": 2}


def test_settings_alone_need_no_model(toy: None, run: Run, tmp_path: Path) -> None:
    done = run("toy-study", "--row", "5,20,5", "-o", "report", "--model", "nowhere")
    assert done.exit_code == 0, done.output
    assert tokens(tmp_path / "report") == [3]
    assert "model" not in content(tmp_path / "report")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--row", "five"), "holds no numbers"),
        (("--row", "5", "the cat"), "a text was given"),
        (("--least", "99"), "layers are too few"),
        (("the cat", "--corpus", "corpus.txt"), "both a text and --corpus"),
        (("--corpus", "nowhere.txt"), "nowhere.txt"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_two_lines(
    toy: None, run: Run, arguments: tuple[str, ...], told: str
) -> None:
    assert_error(run("toy-study", *arguments), 2, told)


def test_a_dry_run_counts_and_writes_nothing(toy: None, run: Run, tmp_path: Path) -> None:
    done = run("toy-study", "--corpus", "corpus.txt", "--dry-run", "--json", "-o", "report")
    assert json.loads(done.stdout)["texts"] == 2
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_is_deterministic_and_describes_what_it_writes(
    name: str, fast: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if name in WITH_A_HEAD:
        monkeypatch.setenv("BERTGEO_MODEL", str(request.getfixturevalue(WITH_A_HEAD[name])))
    for folder in ("first", "second"):
        done = fast(name, *EXAMPLES.get(name, ()), "-o", folder)
        assert done.exit_code == 0, done.output
    assert files_of(tmp_path / "first") == files_of(tmp_path / "second")
    told = content(tmp_path / "first")
    written = {Path(file).stem for file in told["files"] if file.endswith(".csv")} - {"lines"}
    assert written == set(told["tables"])


EXAMPLES: dict[str, tuple[str, ...]] = {
    "scaling": ("--tau", "2"),
    "positions": ("the cat sat on the mat",),
    "residuals": ("the old cat sat on the mat",),
}
"""What a study is given on the tiny model, where it needs something."""

WITH_A_HEAD = {"mlm": "masked_lm_folder", "classify": "classifier_folder"}
"""Studies that read a head of the checkpoint, and the fixture whose model has it."""


@pytest.mark.parametrize("name", STUDIES)
def test_groups_are_read_or_refused(name: str, fast: Run, tmp_path: Path) -> None:
    study = registry.studies()[name].load()
    if not issubclass(study.reads, CorpusOptions) or study.groups:
        pytest.skip("reads one text, or reads groups")
    (tmp_path / "corpus.tsv").write_text("text\tkind\nthe cat\ta\n")
    option = "--texts" if issubclass(study.reads, TextsInput) else "--corpus"
    done = fast(name, option, "corpus.tsv", "--column", "text", "--group-column", "kind")
    assert_error(done, 2, "makes no tables by group")


IDLE: tuple[tuple[tuple[str, ...], str], ...] = (
    (("scaling", "--scores", "1,2", "--dk", "4", "--layers", "0"), "--layers is not read with --scores"),
    (("scaling", "--scores", "1,2", "--dk", "4", "--heads", "0"), "--heads is not read with --scores"),
    (("scaling", "--scores", "1,2", "--dk", "4", "--seed", "1"), "--seed is not read with --scores"),
    (("positions", "the cat", "--swap", "the,cat", "--seed", "1"), "--seed is not read with --swap"),
    (("residuals", "the cat", "--blocks", "0", "--exact", "1"), "--exact is not read with --blocks 0"),
    (("residuals", "the cat", "--blocks", "0", "--iterations", "5"), "--iterations is not read with --blocks 0"),
    (("mlm", "the cat", "--share", "0.5"), "--share is not read without --mask random"),
    (("mlm", "the cat", "--corruption", "mask"), "--corruption is not read without --mask random"),
    (("mlm", "the cat", "--sample", "3"), "--sample is not read for a text"),
    (("mlm", "the cat", "--seed", "3"), "--seed is not read for a text without --mask random"),
    (("mlm", "--top", "3"), "--top is not read for a corpus"),
    (("trace", "--example", "--long", "truncate"), "--long was given, but these settings read no text"),
)


@pytest.mark.parametrize(("arguments", "told"), IDLE, ids=lambda part: " ".join(part) if len(part) < 20 else None)
def test_a_setting_that_nothing_reads_is_refused(
    arguments: tuple[str, ...], told: str, fast: Run, masked_lm_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if arguments[0] in WITH_A_HEAD:
        monkeypatch.setenv("BERTGEO_MODEL", str(masked_lm_folder))
    assert_error(fast(*arguments), 2, told)


def test_what_is_said_of_a_text_that_does_not_fit_is_true_of_a_text(fast: Run, tmp_path: Path) -> None:
    text = "the cat " * 99
    refused = fast("trace", text)
    assert_error(refused, 1, "200 tokens", "Shorten it, or choose --long truncate.")
    assert "split" not in refused.output
    cut = fast("trace", text, "--long", "truncate", "--strict", "-o", "report")
    assert cut.exit_code == 3
    assert "the text was truncated" in cut.output
    assert "lines.csv" not in cut.output
    assert not (tmp_path / "report" / "lines.csv").exists()
