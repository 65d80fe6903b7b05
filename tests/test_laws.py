"""Laws that every analysis keeps, whatever it measures: a new file in `analyses` is held to them with no edit here."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import sys
import typing
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from analyses.kit import pieces
from analyses.kit.analysis import Analysis, Selection, SettingsError
from analyses.kit.record import OF_THE_MLP, ForwardRecord, TokenizedText, under
from analyses.kit.result import Result, Table
from bertgeo_cli import registry
from bertgeo_cli.corpus import Encoder
from bertgeo_cli.families import FAMILIES
from bertgeo_cli.models import LoadedModel
from bertgeo_cli.recording import EVERYTHING, record_batch, threads
from bertgeo_cli.report import write_table
from bertgeo_cli.run import Pass, analyse_text, observe
from bertgeo_cli.samples import SAMPLE_CORPUS

Numbered = tuple[int, str]
"""A line of a corpus: its number and its text."""

TOLERANCE = 1e-9


SUBSETS = {
    "rank-collapse": {
        "metrics": (
            "n",
            "residual_composite,residual_frobenius",
            "residual_frobenius,stable_rank",
            "effective-rank-share",
        )
    },
    "cone-index": {
        "points": ("hidden_state", "head_output", "concatenated-heads", "attention_norm,concatenated_heads"),
    },
    "stream": {"parts": ("moments", "steps", "steps,mixing")},
    "flow": {"methods": ("attention", "rollout", "flow", "attention,rollout")},
}
"""Settings that name some of what an analysis can give, and values of theirs."""
READING_TEXTS: dict[str, tuple[dict[str, str], ...]] = {
    "rank-collapse": ({}, {"ablate": "skip,both"}),
    "heads": ({"metric": "jensen-shannon"}, {"metric": "correlation"}),
    "redundancy": ({"shared_size": "8,48"},),
    "stream": ({}, {"parts": "layernorms,spectra"}),
}
"""Settings by which an analysis, or its companion, reads texts, altered passes or more, where its default does not."""
OF_ALL_PASSES = EVERYTHING | {under(name, tensor) for name in ("skip", "both") for tensor in EVERYTHING - OF_THE_MLP}


DRAWING_HEADS = {"Paths"}
"""Analyses that draw heads by their numbers."""


def default_analyses() -> list[Any]:
    """Every analysis with its default settings, or those that read texts, and the companions of those of weights.

    What records nothing is skipped.
    """
    params = []
    for entry in registry.entries().values():
        for chosen in READING_TEXTS.get(entry.name, ({},)):
            analysis = entry.load()(**chosen)
            silent = pytest.mark.skipif(not analysis.needs, reason=f"{entry.name} records nothing")
            params.append(pytest.param(analysis, id=" ".join([entry.name, *chosen.values()]), marks=silent))
            companion = None if analysis.needs else analysis.on_texts()
            if companion is not None:
                params.append(pytest.param(companion, id=f"{entry.name} on texts"))
    return params


def variants() -> list[Any]:
    """The same, and each again with one flag or one choice changed."""
    params = default_analyses()
    for param in list(params):
        analysis = param.values[0]
        subsets = SUBSETS.get(param.id, {})
        named = [(name, value) for name, values in subsets.items() for value in values]
        for name, value in [*changes(analysis), *named] if analysis.needs else ():
            varied = dataclasses.replace(analysis, **{name: value})
            params.append(pytest.param(varied, id=f"{param.id}, {name} {value}", marks=param.marks))
    return params


def changes(analysis: Analysis[Any]) -> Iterator[tuple[str, Any]]:
    hints = typing.get_type_hints(type(analysis))
    for field in dataclasses.fields(analysis):
        choices = (True, False) if hints[field.name] is bool else typing.get_args(hints[field.name])
        now = getattr(analysis, field.name)
        literal = hints[field.name] is bool or typing.get_origin(hints[field.name]) is typing.Literal
        yield from ((field.name, choice) for choice in choices if literal and choice != now)


each_analysis = pytest.mark.parametrize("analysis", default_analyses())
each_variant = pytest.mark.parametrize("analysis", variants())
quickly = settings(deadline=None, max_examples=min(10, max(4, 40 // len(registry.entries()))))

words = st.sampled_from((*tiny.WORDS, "playing", "cat's", "unseenword", ",", ".", "!", "7", "$5"))
texts = st.lists(words, max_size=7).map(" ".join)
corpora = st.lists(texts, min_size=1, max_size=8).map(lambda lines: list(enumerate(lines, start=1)))


class Bench:
    """The tiny model, with one recorded pass kept of every text that was asked for."""

    def __init__(self, loaded: LoadedModel):
        self.loaded = loaded
        self.weights = loaded.head_weights()
        self.encoder = Encoder(loaded.tokenizer, loaded.max_tokens)
        self.passes: dict[str, dict[str, Sequence[Tensor]]] = {}

    def encode(self, text: str, line: int = 1) -> TokenizedText:
        return self.encoder.encode(text, line=line)

    def layers(self, text: str) -> dict[str, Sequence[Tensor]]:
        if text not in self.passes:
            self.passes[text] = record_batch(self.loaded, [self.encode(text)], needs=OF_ALL_PASSES)[0]._layers
        return self.passes[text]

    def record(self, text: str, line: int = 1, names: frozenset[str] = OF_ALL_PASSES, kind: Any = ForwardRecord) -> Any:
        held = {name: layers for name, layers in self.layers(text).items() if name in names}
        return kind(self.loaded.shape, [self.encode(text, line)], held)

    def start(self, analysis: Analysis[Any]) -> Any:
        try:
            return analysis.start(self.loaded.shape, self.weights if analysis.needs_weights else None)
        except SettingsError as error:
            pytest.skip(f"these settings do not go together: {error}")

    def state(self, analysis: Analysis[Any], lines: Sequence[Numbered]) -> Any:
        state = self.start(analysis)
        for line, text in lines:
            analysis.update(state, self.record(text, line, analysis.needs))
        return state

    def single(self, analysis: Analysis[Any], text: str) -> Result:
        return analysis.finalize(self.state(analysis, [(1, text)]), self.record(text, 1, analysis.needs))


@pytest.fixture(scope="module")
def bench(tiny_model: LoadedModel) -> Bench:
    return Bench(tiny_model)


def tables_of(result: Result) -> tuple[Table, ...]:
    return (result.headline, *result.tables)


def assert_close(first: Result, second: Result, tolerance: float = TOLERANCE) -> None:
    """Same tables: floats to the tolerance (relative or absolute), everything else exactly."""
    assert [table.name for table in first.tables] == [table.name for table in second.tables]
    for one, other in zip(tables_of(first), tables_of(second), strict=True):
        assert_frames_close(one.frame, other.frame, tolerance, one.name)


def assert_frames_close(one: pd.DataFrame, other: pd.DataFrame, tolerance: float, name: str) -> None:
    assert list(one.columns) == list(other.columns), name
    assert len(one) == len(other), name
    for column in one.columns:
        where = f"{column} of {name}"
        first, second = one[column].reset_index(drop=True), other[column].reset_index(drop=True)
        assert first.dtype == second.dtype, where
        if first.dtype == np.float64:
            np.testing.assert_allclose(first, second, rtol=tolerance, atol=tolerance, equal_nan=True, err_msg=where)
        else:
            assert first.equals(second), where


def same(first: Any, second: Any) -> bool:
    """Whether two values are equal to the last bit, all the way down."""
    if type(first) is not type(second):
        return False
    if isinstance(first, Tensor):
        return torch.equal(first, second) or same(first.numpy(), second.numpy())
    if isinstance(first, np.ndarray) and first.dtype != object:
        return (first.dtype, first.shape, first.tobytes()) == (second.dtype, second.shape, second.tobytes())
    if isinstance(first, pd.DataFrame):
        return list(first) == list(second) and all(same(first[name], second[name]) for name in first)
    if isinstance(first, pd.Series):
        exact = first.dtype == np.float64
        return (
            same(first.to_numpy(), second.to_numpy()) if exact else first.dtype == second.dtype and first.equals(second)
        )
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, float):
        return np.float64(first).tobytes() == np.float64(second).tobytes()
    if dataclasses.is_dataclass(first) or isinstance(first, ForwardRecord):
        return same(vars(first), vars(second))
    return bool(np.all(first == second))


@contextmanager
def strict_arithmetic() -> Iterator[None]:
    """Any warning is an error, and so is any 0/0, 1/0 or overflow."""
    with warnings.catch_warnings(), np.errstate(divide="raise", invalid="raise", over="raise"):
        warnings.simplefilter("error")
        yield


# Merging


@each_analysis
@quickly
@given(lines=corpora, data=st.data())
def test_cutting_the_corpus_anywhere_changes_nothing(
    bench: Bench, analysis: Analysis[Any], lines: list[Numbered], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(lines)))
    merged = bench.state(analysis, lines[:cut]).merge(bench.state(analysis, lines[cut:]))
    whole = analysis.finalize(bench.state(analysis, lines), None)
    assert_close(analysis.finalize(merged, None), whole)


@each_analysis
@quickly
@given(lines=corpora, data=st.data())
def test_three_parts_merged_in_any_tree_and_order_are_the_whole(
    bench: Bench, analysis: Analysis[Any], lines: list[Numbered], data: st.DataObject
) -> None:
    low, high = sorted(data.draw(st.tuples(st.integers(0, len(lines)), st.integers(0, len(lines)))))
    parts = [bench.state(analysis, part) for part in (lines[:low], lines[low:high], lines[high:])]
    first, second, third = data.draw(st.permutations(parts))
    whole = analysis.finalize(bench.state(analysis, lines), None)
    assert_close(analysis.finalize(first.merge(second).merge(third), None), whole)
    assert_close(analysis.finalize(first.merge(second.merge(third)), None), whole)


@each_analysis
@quickly
@given(lines=corpora, others=corpora)
def test_the_empty_state_is_the_identity_of_merge_bit_for_bit(
    bench: Bench, analysis: Analysis[Any], lines: list[Numbered], others: list[Numbered]
) -> None:
    state, other, empty = bench.state(analysis, lines), bench.state(analysis, others), bench.start(analysis)
    alone, together = analysis.finalize(state, None), analysis.finalize(state.merge(other), None)
    for neutral in (state.merge(empty), empty.merge(state)):
        assert same(analysis.finalize(neutral, None), alone)
        assert same(analysis.finalize(neutral.merge(other), None), together)


@each_analysis
def test_two_empty_states_merge_into_an_empty_one(bench: Bench, analysis: Analysis[Any]) -> None:
    assert same(bench.start(analysis).merge(bench.start(analysis)), bench.start(analysis))


@each_analysis
@quickly
@given(lines=corpora, others=corpora)
def test_merge_leaves_both_arguments_alone_and_shares_nothing_with_them(
    bench: Bench, analysis: Analysis[Any], lines: list[Numbered], others: list[Numbered]
) -> None:
    states = bench.state(analysis, lines), bench.state(analysis, others), bench.start(analysis)
    before = copy.deepcopy(states)
    for first in states:
        for second in states:
            merged = first.merge(second)
            analysis.update(merged, bench.record("the old cat", 99, analysis.needs))
    assert same(states, before)


@each_analysis
@quickly
@given(lines=corpora)
def test_a_state_survives_the_way_to_another_process(
    bench: Bench, analysis: Analysis[Any], lines: list[Numbered]
) -> None:
    state = bench.state(analysis, lines)
    assert same(pickle.loads(pickle.dumps(state)), state)


# Finalizing


@each_analysis
@quickly
@given(text=texts, others=corpora)
def test_finalize_changes_neither_state_nor_record_and_says_the_same_twice(
    bench: Bench, analysis: Analysis[Any], text: str, others: list[Numbered]
) -> None:
    for state, record in (
        (bench.state(analysis, [(1, text)]), bench.record(text, 1, analysis.needs)),
        (bench.state(analysis, others), None),
    ):
        before = copy.deepcopy(state)
        held = copy.deepcopy(record._layers) if record else None
        first = copy.deepcopy(analysis.finalize(state, record))
        second = analysis.finalize(state, record)
        assert same(first, second)
        assert same(state, before)
        assert same(record._layers if record else None, held)


@each_analysis
@quickly
@given(text=texts)
def test_update_leaves_the_record_alone(bench: Bench, analysis: Analysis[Any], text: str) -> None:
    record = bench.record(text, 1, analysis.needs)
    before = copy.deepcopy(record._layers)
    analysis.update(bench.start(analysis), record)
    assert same(record._layers, before)


# What is read


class WatchedRecord(ForwardRecord):
    """A record that notes which tensors are read."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.read: set[str] = set()

    def layer(self, name: str, index: int) -> Tensor:
        self.read.add(name)
        return super().layer(name, index)

    def of_text(self, name: str, index: int, layers: Sequence[int] | None = None) -> Any:
        self.read.add(name)
        return super().of_text(name, index, layers)

    def __getattr__(self, name: str) -> Tensor:
        if name in EVERYTHING:
            self.read.add(name)
        return super().__getattr__(name)


@each_variant
def test_needs_lists_exactly_what_update_and_finalize_read(bench: Bench, analysis: Analysis[Any]) -> None:
    record = bench.record("the cats sat on the mat.", kind=WatchedRecord)
    state = bench.start(analysis)
    analysis.update(state, record)
    analysis.finalize(state, record)
    assert record.read == set(analysis.needs)


@each_variant
def test_nothing_is_missed_when_only_needs_was_recorded(bench: Bench, analysis: Analysis[Any]) -> None:
    assert bench.single(analysis, "the cats sat on the mat.").tables
    assert analysis.finalize(bench.state(analysis, [(1, "the cat"), (2, "a dog ran")]), None).tables


def subsets() -> list[Any]:
    """Default settings, and the same with one setting that names some of what there is."""
    return [
        pytest.param(name, setting, value, id=f"{name}, {setting} {value}")
        for name, settings in SUBSETS.items()
        for setting, values in settings.items()
        for value in values
    ]


@pytest.mark.parametrize(("name", "setting", "value"), subsets())
def test_what_is_asked_for_alone_has_the_bits_it_has_among_all(
    bench: Bench, name: str, setting: str, value: str
) -> None:
    make = registry.entries()[name].load()
    lines = ["the cats sat on the mat.", "a dog", "no, no, no!"]
    for some, every in zip(results(bench, make(**{setting: value}), lines), results(bench, make(), lines), strict=True):
        every_table = {table.name: table.frame for table in every.tables}
        for table in some.tables:
            assert set(table.frame) <= set(every_table[table.name]), table.name
            assert_same_rows(table.frame, every_table[table.name], table.name)


def assert_same_rows(some: pd.DataFrame, every: pd.DataFrame, name: str) -> None:
    """Each row of `some` stands in `every`, with the same bits in the columns that both have."""
    keys = list(some.select_dtypes(exclude="float").columns.difference(["saturated"], sort=False))
    both = some.merge(every, on=keys, how="left", suffixes=("", "_of_all"), indicator="found")
    assert len(some)
    assert (both["found"] == "both").all(), name
    for column in some.columns.difference(keys):
        assert same(both[column].to_numpy(), both[f"{column}_of_all"].to_numpy()), f"{column} of {name}"


@pytest.mark.parametrize(("name", "setting"), [(name, setting) for name, held in SUBSETS.items() for setting in held])
def test_an_unknown_name_is_refused_with_those_that_there_are(bench: Bench, name: str, setting: str) -> None:
    analysis = registry.entries()[name].load()(**{setting: "sharpness"})
    for refused in (analysis.listing, lambda: analysis.start(bench.loaded.shape, None)):
        with pytest.raises(SettingsError, match="sharpness") as raised:
            refused()
        assert SUBSETS[name][setting][-1].split(",")[-1].replace("-", "_") in raised.value.hint


# Tables and figures


def results(bench: Bench, analysis: Analysis[Any], lines: Sequence[str]) -> Iterator[Result]:
    """Each text on its own, and all as a corpus."""
    yield from (bench.single(analysis, text) for text in lines)
    yield analysis.finalize(bench.state(analysis, list(enumerate(lines, start=1))), None)


@each_variant
def test_every_column_is_described_and_no_other(bench: Bench, analysis: Analysis[Any]) -> None:
    for result in results(bench, analysis, ["the cats sat on the mat.", "a dog"]):
        assert set(result.headline.frame) <= set(result.headline.columns)
        for table in result.tables:
            assert list(table.frame.columns) == list(dict.fromkeys(table.frame.columns)), table.name
            assert set(table.frame.columns) == set(table.columns), table.name
            assert all(text.strip() for text in table.columns.values()), table.name


@each_variant
def test_rows_of_every_table_are_told_apart_by_what_is_no_measured_value(bench: Bench, analysis: Analysis[Any]) -> None:
    for result in results(bench, analysis, ["the cat the cat the cat", "a dog", "a dog"]):
        for table in tables_of(result):
            keys = table.frame.select_dtypes(exclude="float")
            assert not keys.duplicated().any(), table.name
            assert all(np.isscalar(cell) or cell is pd.NA or cell is None for cell in table.frame.to_numpy().flat)


@each_analysis
def test_tables_and_figures_have_names_that_make_distinct_files(bench: Bench, analysis: Analysis[Any]) -> None:
    for result in results(bench, analysis, ["the cats sat on the mat.", "a dog"]):
        for names in ([table.name for table in result.tables], [figure.name for figure in result.figures]):
            assert len(set(names)) == len(names)
            assert all(name.replace("-", "").isalnum() and name == name.lower() for name in names)


def floats_in(value: Any) -> Iterator[float]:
    """Every float of a table or figure, all the way down."""
    if isinstance(value, (float, np.floating)):
        yield float(value)
    elif isinstance(value, np.ndarray):
        yield from value.ravel().tolist() if np.issubdtype(value.dtype, np.floating) else ()
    elif isinstance(value, pd.DataFrame):
        yield from value.select_dtypes("float").to_numpy().ravel().tolist()
    elif isinstance(value, dict):
        yield from (number for item in value.values() for number in floats_in(item))
    elif isinstance(value, (list, tuple)):
        yield from (number for item in value for number in floats_in(item))
    elif dataclasses.is_dataclass(value):
        yield from floats_in(vars(value))


@each_variant
def test_values_of_usual_texts_are_finite_or_empty_and_cost_no_warning(bench: Bench, analysis: Analysis[Any]) -> None:
    lines = ["the cats sat on the mat.", "no, no, no!", "she was playing by the old river bank"]
    with strict_arithmetic():
        for result in results(bench, analysis, lines):
            assert not any(np.isinf(list(floats_in(result))))


@each_variant
def test_texts_of_two_and_three_tokens_have_defined_values_or_empty_cells(
    bench: Bench, analysis: Analysis[Any]
) -> None:
    assert [len(bench.encode(text)) for text in ("", "cat")] == [2, 3]
    with strict_arithmetic():
        for lines in ([""], ["cat"], ["", "cat"], ["", ""], ["cat", "cat"]):
            for result in results(bench, analysis, lines):
                assert not any(np.isinf(list(floats_in(result))))
                # Without its special tokens a text of two has no pair of tokens left to list.
                assert len(result.headline.frame)
                assert len(result.tables[0].frame)


# Order, batches, threads


@each_analysis
@quickly
@given(lines=corpora, data=st.data())
def test_the_order_of_texts_does_not_matter(
    bench: Bench, analysis: Analysis[Any], lines: list[Numbered], data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(lines))
    whole = analysis.finalize(bench.state(analysis, lines), None)
    assert_close(analysis.finalize(bench.state(analysis, shuffled), None), whole)


def texts_and_pairs(bench: Bench, lengths: Sequence[int]) -> list[TokenizedText]:
    """Texts of so many words and marks, some of them pairs of as many tokens whose special ones stand elsewhere."""
    generator, known = np.random.default_rng(0), [*tiny.WORDS, ",", "."]
    shard = []
    for line, length in enumerate(lengths, start=1):
        words = generator.choice(known, size=length).tolist()
        text, pair = (words[:3], " ".join(words[3:5])) if length == 6 and 9 <= line < 17 else (words, None)
        shard.append(bench.encoder.encode(" ".join(text), pair, line=line))
    assert [len(text) for text in shard] == [length + 2 for length in lengths]
    return shard


@each_variant
@pytest.mark.parametrize("batch", [1, 2, 7])
def test_batches_of_any_size_give_the_same_bits(bench: Bench, analysis: Analysis[Any], batch: int) -> None:
    shard = texts_and_pairs(bench, [6] * 32 + [3] * 9 + [1])
    alone, together = (
        analysis.finalize(observe([analysis], bench.loaded, shard, Pass(8 * size))[0], None) for size in (batch, 32)
    )
    assert same(alone, together)


@each_variant
def test_one_layer_and_one_head_have_the_same_bits_in_batches_of_any_size(
    bench: Bench, analysis: Analysis[Any]
) -> None:
    names = {field.name for field in dataclasses.fields(analysis)}
    one = {name: Selection(value) for name, value in (("layers", "1"), ("heads", "2")) if name in names}
    if not one:
        pytest.skip("neither layers nor heads can be chosen")
    chosen = dataclasses.replace(analysis, **one)
    bench.start(chosen)  # skips what one head alone does not have
    shard = texts_and_pairs(bench, [6] * 20)
    alone, together = (
        chosen.finalize(observe([chosen], bench.loaded, shard, Pass(8 * size))[0], None) for size in (1, 20)
    )
    assert same(alone, together)


@each_variant
def test_texts_and_layers_measured_together_have_the_bits_they_have_alone(
    bench: Bench, analysis: Analysis[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = texts_and_pairs(bench, [6] * 30)
    together = analysis.finalize(observe([analysis], bench.loaded, shard, Pass())[0], None)
    one_by_one(monkeypatch)
    alone = analysis.finalize(observe([analysis], bench.loaded, shard, Pass())[0], None)
    assert same(alone, together)


def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """No piece holds two texts, and none two layers."""
    runs = pieces.runs
    for module in list(sys.modules.values()):
        if getattr(module, "runs", None) is runs:
            monkeypatch.setattr(module, "runs", lambda texts, entries, most=1: runs(texts, entries, 1))


def written(loaded: LoadedModel, lines: Sequence[str], batch: int, folder: Path) -> dict[str, dict[str, bytes]]:
    """Of every analysis the bytes of every table: of the lines in batches of `batch` texts, and of the first alone."""
    analyses = {param.id: param.values[0] for param in default_analyses() if param.values[0].needs}
    encoder = Encoder(loaded.tokenizer, loaded.max_tokens)
    shard = [encoder.encode(line, line=number) for number, line in enumerate(lines, start=1)]
    how = Pass(1 if batch == 1 else batch * max(map(len, shard)))
    states = observe(list(analyses.values()), loaded, shard, how)
    singles = analyse_text(list(analyses.values()), loaded, shard[0], how)
    tables: dict[str, dict[str, bytes]] = {}
    for (name, analysis), state, single in zip(analyses.items(), states, singles, strict=True):
        tables[name] = {}
        for kind, result in (("corpus", analysis.finalize(state, None)), ("single", single)):
            (folder / name / kind).mkdir(parents=True)
            for table in tables_of(result):
                file = folder / name / kind / write_table(table, folder / name / kind, "csv")
                tables[name][f"{kind} {table.name}"] = file.read_bytes()
    return tables


Written = dict[tuple[int, int], dict[str, dict[str, bytes]]]
"""What was written, by number of threads and texts to a batch."""


@pytest.fixture(scope="module", params=["tiny_model", "minilm"])
def by_threads_and_batch(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    loaded = request.getfixturevalue(request.param)
    lines = SAMPLE_CORPUS.read_text(encoding="utf-8").splitlines()[:8]
    found: Written = {}
    for count, batch in ((1, 1), (1, 32), (2, 1), (2, 32)):
        with threads(count):
            found[count, batch] = written(loaded, lines, batch, tmp_path_factory.mktemp("tables"))
    return found


@each_analysis
def test_threads_and_batches_change_no_byte_of_any_table(
    by_threads_and_batch: Written, analysis: Analysis[Any]
) -> None:
    name = next(param.id for param in default_analyses() if param.values[0] == analysis)
    first, *others = (tables[name] for tables in by_threads_and_batch.values())
    assert first
    assert all(other == first for other in others)


def test_threads_change_no_byte_of_a_long_text(minilm: LoadedModel) -> None:
    """From about a hundred tokens on LAPACK splits its sums by threads, unless told not to."""
    text = Encoder(minilm.tokenizer, minilm.max_tokens).encode(" ".join(["the old river bank was green"] * 25))
    analysis = registry.entries()["rank-collapse"].load()()
    found = []
    for count in (1, 2):
        with threads(count):
            found.append(analyse_text([analysis], minilm, text, Pass())[0])
    assert len(text) > 100
    assert same(found[0], found[1])


# Heads


ORDER = (2, 0, 3, 1)
"""Head h of the permuted model is head ORDER[h] of the model."""


def permuted_heads(loaded: LoadedModel) -> LoadedModel:
    """The same function with its heads in another order: rows of W_Q, W_K, W_V and columns of W_O move together."""
    model, family, width = copy.deepcopy(loaded.model), FAMILIES[loaded.shape.family], loaded.shape.head_width
    channels = torch.cat([torch.arange(head * width, (head + 1) * width) for head in ORDER])
    for block in family.blocks(model):
        for name in (family.query, family.key, family.value):
            linear: Any = block.get_submodule(name)
            linear.weight.data, linear.bias.data = linear.weight.data[channels], linear.bias.data[channels]
        output: Any = block.get_submodule(family.attention_output)
        output.weight.data = output.weight.data[:, channels]
    return dataclasses.replace(loaded, model=model)


@pytest.fixture(scope="module")
def precise(tiny_model: LoadedModel) -> Bench:
    """The tiny model in float64: rounding then stays below the tolerance of a comparison."""
    return Bench(dataclasses.replace(tiny_model, model=copy.deepcopy(tiny_model.model).double()))


@each_variant
def test_permuting_heads_permutes_the_rows_of_heads_and_changes_nothing_else(
    precise: Bench, analysis: Analysis[Any]
) -> None:
    if type(analysis).__name__ in DRAWING_HEADS:
        pytest.skip("the same draw names other heads of the permuted model")
    permuted = Bench(permuted_heads(precise.loaded))
    lines = ["the cats sat on the mat.", "a dog ran"]
    compared = 0
    for before, after in zip(results(precise, analysis, lines), results(permuted, analysis, lines), strict=True):
        for one, other in zip(before.tables, after.tables, strict=True):
            if about_heads(one.frame) in ([], ["head"]):
                first, second = (by_key(frame) for frame in (one.frame, renamed(other.frame, one.frame)))
                assert_frames_close(first, second, 1e-8, one.name)
                compared += 1
    assert compared


def about_heads(frame: pd.DataFrame) -> list[str]:
    """Columns that say which head a row is about: by their name, or by cells such as L0H3."""
    named = frame.select_dtypes(exclude=["number", "bool"]).astype(str)
    cells = [name for name in named if named[name].str.contains(r"L\d+H\d+").any()]
    return [name for name in frame if "head" in name or name in cells]


def renamed(frame: pd.DataFrame, like: pd.DataFrame) -> pd.DataFrame:
    """Heads of the permuted model by their number in the model."""
    if "head" not in frame:
        return frame
    heads = frame["head"].map(lambda head: ORDER[head], na_action="ignore")
    return frame.assign(head=heads.astype(like["head"].dtype))


def by_key(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.sort_values(list(frame.select_dtypes(exclude="float")), kind="stable")
