"""Companions: what an analysis of weights asks of texts, in one report with its answer of the weights."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from command import Run, assert_error, content, files_of
from toy_norms import ToyNorms
from toy_norms_on_texts import ToyNormsOnTexts, ToyTextsState

from analyses.kit.accumulators import Counts
from analyses.kit.analysis import State, derived
from bertgeo_cli import registry, states
from bertgeo_cli.corpus import Encoder
from bertgeo_cli.models import LoadedModel
from bertgeo_cli.observation import Pass, Task, observe_portion
from bertgeo_cli.recording import record

TEXTS = ("the cats sat", "a dog", "she ran to the old river", "the old cat", "no, no", "we play", "the bank")
CORPUS = "".join(f"{text}\t{'ab'[at % 2]}\n" for at, text in enumerate(TEXTS))
GROUPED = ("--corpus", "corpus.tsv", "--group-column", "kind", "--shard-texts", "2")


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The toy analysis beside those of the folder, and a corpus in the working folder."""
    every = {**registry.entries(), "toy-norms": registry.Entry("toy-norms", "toy_norms")}
    monkeypatch.setattr(registry, "entries", lambda: every)
    (tmp_path / "corpus.tsv").write_text(f"text\tkind\n{CORPUS}")
    (tmp_path / "corpus.txt").write_text("\n".join(TEXTS) + "\n")


def mean_lengths(loaded: LoadedModel, layer: int = 0, texts: Sequence[str] = TEXTS) -> list[float]:
    """By head, over texts: the mean length of W_Q x, from the weights and the layer's input."""
    encoder = Encoder(loaded.tokenizer, loaded.max_tokens)
    weight = loaded.head_weights().query[layer].numpy()
    found = []
    for text in texts:
        states = record(loaded, [encoder.encode(text)], needs=frozenset({"hidden_states"})).hidden_states[0, layer]
        found.append([np.mean([np.linalg.norm(head @ x) for x in states.double().numpy()]) for head in weight])
    return np.mean(found, axis=0).tolist()


# One report


def test_without_texts_the_weights_alone_are_read(fast: Run, tmp_path: Path) -> None:
    done = fast("toy-norms", "-o", "out")
    assert done.exit_code == 0, done.output
    assert set(files_of(tmp_path / "out")) == {"run.json", "toy-biases.csv"}
    assert content(tmp_path / "out")["input"] == {"kind": "weights"}
    assert "headline_on_texts" not in json.loads(fast("toy-norms", "--json").stdout)


def test_a_corpus_is_asked_too_and_both_answers_stand_in_one_report(
    fast: Run, tmp_path: Path, tiny_model: LoadedModel
) -> None:
    done = fast("toy-norms", "--corpus", "corpus.txt", "-o", "out", "--figures", "png", "--layer", "1")
    assert done.exit_code == 0, done.output
    about = content(tmp_path / "out")
    assert list(about["tables"]) == list(about["figures"]) == ["toy-biases", "toy-queries"]
    assert {"toy-biases.png", "toy-queries.png", "lines.csv"} <= set(about["files"])
    assert about["notes"][-2:] == ["Lengths of biases.", "Lengths of queries."]
    assert about["settings"] == {"layer": 1}
    biases, queries = (pd.read_csv(tmp_path / "out" / f"toy-{name}.csv") for name in ("biases", "queries"))
    assert list(queries["length"]) == pytest.approx(mean_lengths(tiny_model, 1), rel=1e-5)
    assert list(biases["bias"]) == tiny_model.head_weights().query_bias[1].norm(dim=-1).tolist()
    assert done.stdout.index("Biases") < done.stdout.index("Queries")


@pytest.mark.parametrize("given", [("the cat",), ("the cat", "--pair", "a dog"), ("--corpus", "corpus.txt")])
def test_every_way_to_give_texts_asks_them(fast: Run, given: tuple[str, ...]) -> None:
    done = fast("toy-norms", *given, "--json")
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert set(answer) == {"run", "headline", "headline_on_texts", "files"}
    assert [*answer["headline"][0], *answer["headline_on_texts"][0]] == ["head", "bias", "head", "texts", "length"]


def test_a_corpus_named_by_the_environment_is_asked(fast: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BERTGEO_CORPUS", "corpus.txt")
    assert fast("toy-norms", "-o", "out").exit_code == 0
    assert content(tmp_path / "out")["input"]["lines"] == len(TEXTS)


@pytest.mark.parametrize(
    ("analyses", "asked"), [("toy-norms", False), ("toy-norms,heads", False), ("toy-norms,cone-index", True)]
)
def test_a_run_asks_texts_where_there_are_any(fast: Run, tmp_path: Path, analyses: str, asked: bool) -> None:
    assert fast("run", "--analyses", analyses, "--limit", "2", "-o", "out").exit_code == (0 if asked else 2)
    assert fast("run", "--analyses", analyses, "-o", "sample").exit_code == 0
    assert fast("run", "corpus.txt", "--analyses", analyses, "-o", "given").exit_code == 0
    for folder, there in (("sample", asked), ("given", True)):
        assert (tmp_path / folder / "toy-norms" / "toy-biases.csv").is_file()
        assert (tmp_path / folder / "toy-norms" / "toy-queries.csv").is_file() == there


def test_json_of_a_run_holds_all_headlines(fast: Run) -> None:
    answer = json.loads(fast("run", "corpus.txt", "--analyses", "toy-norms,cone-index", "--json").stdout)
    assert set(answer["headlines"]) == {"toy-norms", "cone-index"}
    assert set(answer["headlines_on_texts"]) == {"toy-norms"}


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        (("--limit", "3"), ("--limit was given, but this reads the model's weights alone", "--corpus")),
        (("--resume",), ("--resume is for a corpus",)),
        (("the cat", "--resume"), ("--resume is for a corpus",)),
        (("the cat", "--limit", "3"), ("--limit",)),
        (("the cat", "--corpus", "corpus.txt"), ("both a text and --corpus",)),
        ((" ",), ("is empty",)),
        (("the cat", "--layer", "x"), ("layer",)),
    ],
)
def test_what_cannot_be_meant_is_refused(fast: Run, given: tuple[str, ...], parts: tuple[str, ...]) -> None:
    assert_error(fast("toy-norms", *given), 2, *parts)


def test_a_dry_run_counts_the_texts_and_the_bytes_of_both(fast: Run) -> None:
    plans = [
        json.loads(fast("toy-norms", *given, "--dry-run", "--json").stdout)
        for given in ((), ("--corpus", "corpus.txt"))
    ]
    assert [plan["texts"] for plan in plans] == [0, len(TEXTS)]
    size = "bytes on disk, about"
    assert plans[1][size] > plans[0][size] + 24 * len(TEXTS)


# Whoever runs it


def test_workers_jobs_and_a_resumed_run_give_the_same_bytes(
    fast: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = fast("toy-norms", *GROUPED, "-o", "whole", "--figures", "svg")
    assert whole.exit_code == 0, whole.output
    expected = files_of(tmp_path / "whole")
    assert {"toy-queries-by-group.csv", "toy-queries-group-differences.csv"} <= set(expected)
    assert "toy-biases-by-group.csv" not in expected

    assert fast("toy-norms", *GROUPED, "-o", "workers", "--figures", "svg", "--workers", "2").exit_code == 0
    assert files_of(tmp_path / "workers") == expected

    for job in (1, 2):
        done = fast("toy-norms", *GROUPED, "-o", f"part-{job}", "--figures", "svg", "--shard", f"{job}/2")
        assert done.exit_code == 0, done.output
    assert (tmp_path / "part-1" / "toy-biases.csv").is_file()
    assert not (tmp_path / "part-2" / "toy-biases.csv").exists()
    done = fast("merge", "part-1", "part-2", "-o", "merged", "--figures", "svg")
    assert done.exit_code == 0, done.output
    assert files_of(tmp_path / "merged") == expected

    real, calls = ToyNormsOnTexts.update, []

    def stopped(self: Any, state: Any, recorded: Any) -> None:
        calls.append(1)
        if len(calls) > 4:
            raise KeyboardInterrupt
        real(self, state, recorded)

    with monkeypatch.context() as patch:
        patch.setattr(ToyNormsOnTexts, "update", stopped)
        assert fast("toy-norms", *GROUPED, "-o", "resumed", "--figures", "svg").exit_code == 130
    assert list(tmp_path.glob(".resumed.states/*.state"))
    assert fast("toy-norms", *GROUPED, "-o", "resumed", "--figures", "svg", "--resume").exit_code == 0
    assert files_of(tmp_path / "resumed") == expected


def test_each_group_has_its_own_texts(fast: Run, tmp_path: Path, tiny_model: LoadedModel) -> None:
    assert fast("toy-norms", *GROUPED, "-o", "out").exit_code == 0
    rows = pd.read_csv(tmp_path / "out" / "toy-queries-by-group.csv")
    for at, group in enumerate("ab"):
        own = rows[rows["group"] == group]
        assert set(own["texts"]) == {len(TEXTS[at::2])}
        assert list(own["length"]) == pytest.approx(mean_lengths(tiny_model, texts=TEXTS[at::2]), rel=1e-5)


def test_jobs_of_a_run_of_several_analyses_merge_too(fast: Run, tmp_path: Path) -> None:
    chosen = ("run", "corpus.txt", "--analyses", "toy-norms,heads,cone-index", "--shard-texts", "2")
    assert fast(*chosen, "-o", "whole").exit_code == 0
    for job in (1, 2):
        assert fast(*chosen, "-o", f"part-{job}", "--shard", f"{job}/2").exit_code == 0
    assert fast("merge", "part-1", "part-2", "-o", "merged").exit_code == 0
    assert files_of(tmp_path / "merged") == files_of(tmp_path / "whole")


# What is derived from the weights


def test_what_leaves_a_shard_holds_nothing_of_the_weights(tiny_model: LoadedModel) -> None:
    encoder = Encoder(tiny_model.tokenizer, tiny_model.max_tokens)
    texts = [encoder.encode(text, line=line) for line, text in enumerate(TEXTS, start=1)]
    result = observe_portion(Task({"toy-norms": ToyNorms().on_texts()}, Pass()), tiny_model, texts)
    state = result.observed.whole[0]
    assert isinstance(state, ToyTextsState)
    assert state.biases is None
    assert state.counts.texts == len(TEXTS)
    back = states.from_bytes(states.to_bytes(result.observed), ["toy_norms_on_texts", "bertgeo_cli.observation"])
    assert back.whole[0].moments.mean.tolist() == state.moments.mean.tolist()
    assert len(pickle.dumps(state)) < 1000


def test_the_groups_of_a_shard_share_what_is_derived_and_nothing_else(tiny_model: LoadedModel) -> None:
    empty = ToyNormsOnTexts().start(tiny_model.shape, tiny_model.head_weights())
    one, other = empty.merge(empty), empty.merge(empty)
    assert one.biases is other.biases is empty.biases
    one.counts.add([3])
    one.moments.add([[1.0, 2.0, 3.0, 4.0]])
    assert (other.counts.texts, empty.counts.texts, other.moments.count.sum()) == (0, 0, 0)


@dataclass
class Kept(State):
    """A count, and what was derived."""

    counts: Counts
    own: Any = derived()


@pytest.mark.parametrize("sides", [(True, True), (True, False), (False, True), (False, False)])
def test_merge_takes_what_is_derived_from_the_side_that_has_it(sides: tuple[bool, bool]) -> None:
    array = torch.ones(3)
    first, second = (Kept(Counts(1, 2), array if there else None) for there in sides)
    merged = first.merge(second)
    assert merged.counts == Counts(2, 4)
    assert merged.own is (array if any(sides) else None)
    assert merged.lasting() == Kept(Counts(2, 4))


def test_arrays_derived_twice_are_not_compared() -> None:
    first, second = (Kept(Counts(), np.array([value, 1.0])) for value in (1.0, 2.0))
    assert first.merge(second).own is first.own
