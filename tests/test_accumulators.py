"""What states are made of: equal to plain NumPy, and the same however the values were cut, ordered and merged."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyses.kit.accumulators import Counts, Moments, Sample, Totals
from analyses.kit.analysis import State

numbers = st.floats(-1e3, 1e3, allow_nan=False)
cells = numbers | st.just(float("nan"))
rows = st.lists(st.lists(cells, min_size=3, max_size=3), max_size=12)


def moments_of(values: Any, *shape: int) -> Moments:
    moments = Moments.empty(*shape)
    moments.add(np.asarray(values, float).reshape(-1, *shape))
    return moments


def merged_at_random(parts: Sequence[Any], seed: int) -> Any:
    """The parts, kept in order, merged in a tree drawn from the seed."""
    parts, chooser = list(parts), random.Random(seed)
    while len(parts) > 1:
        at = chooser.randrange(len(parts) - 1)
        parts[at : at + 2] = [parts[at].merge(parts[at + 1])]
    return parts[0]


def assert_same_bits(first: Moments, second: Moments) -> None:
    for name in ("count", "total_mean", "deviations"):
        one, other = getattr(first, name), getattr(second, name)
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes()), name


# Moments


@given(rows)
def test_moments_are_those_of_the_statistics_module_without_nan(values: list[list[float]]) -> None:
    moments = moments_of(values, 3)
    for cell, column in enumerate(zip(*values, strict=True) if values else ([],) * 3):
        seen = [value for value in column if value == value]
        assert moments.count[cell] == len(seen)
        mean = statistics.fmean(seen) if seen else np.nan
        std = statistics.stdev(seen) if len(seen) > 1 else np.nan
        np.testing.assert_allclose(moments.mean[cell], mean, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(moments.std[cell], std, rtol=1e-7, atol=1e-7)


def test_moments_of_numpys_own_example() -> None:
    values = np.random.default_rng(0).normal(5.0, 2.0, size=(40, 2, 3))
    moments = moments_of(values, 2, 3)
    np.testing.assert_allclose(moments.mean, values.mean(axis=0), rtol=1e-13)
    np.testing.assert_allclose(moments.std, values.std(axis=0, ddof=1), rtol=1e-12)


def test_a_large_offset_does_not_drown_the_deviation() -> None:
    values = 1e9 + np.array([4.0, 7.0, 13.0, 16.0])
    halves = moments_of(values[:2]).merge(moments_of(values[2:]))
    for moments in (moments_of(values), halves):
        assert moments.std == pytest.approx(statistics.stdev([4, 7, 13, 16]), rel=1e-9)


def test_equal_values_have_deviation_zero() -> None:
    assert moments_of([0.1] * 10).std == 0.0
    assert moments_of([0.1] * 3).merge(moments_of([0.1] * 7)).std == 0.0


def test_one_value_has_no_deviation_and_none_has_no_mean() -> None:
    assert np.isnan(moments_of([3.0]).std)
    assert moments_of([3.0]).mean == 3.0
    assert np.isnan(moments_of([]).mean)
    assert np.isnan(moments_of([np.nan, np.nan]).mean)


@given(rows, st.lists(st.integers(0, 12), max_size=4), st.integers(0, 99))
def test_moments_merge_to_the_whole_in_any_tree(values: list[list[float]], cuts: list[int], seed: int) -> None:
    bounds = [0, *sorted(min(cut, len(values)) for cut in cuts), len(values)]
    parts = [moments_of(values[low:high], 3) for low, high in pairwise(bounds)]
    merged, whole = merged_at_random(parts, seed), moments_of(values, 3)
    np.testing.assert_array_equal(merged.count, whole.count)
    np.testing.assert_allclose(merged.mean, whole.mean, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(merged.std, whole.std, rtol=1e-7, atol=1e-6)


@given(rows)
def test_empty_moments_are_the_identity_bit_for_bit(values: list[list[float]]) -> None:
    moments, empty = moments_of(values, 3), Moments.empty(3)
    assert_same_bits(moments.merge(empty), moments)
    assert_same_bits(empty.merge(moments), moments)


@given(rows, st.integers(0, 12))
def test_adding_in_batches_leaves_no_trace_in_the_bits(values: list[list[float]], cut: int) -> None:
    batched = moments_of(values[:cut], 3)
    batched.add(np.array(values[cut:]).reshape(-1, 3))
    assert_same_bits(batched, moments_of(values, 3))


@given(rows, rows)
def test_merging_moments_leaves_both_alone(values: list[list[float]], others: list[list[float]]) -> None:
    first, second = moments_of(values, 3), moments_of(others, 3)
    first.merge(second).add(np.ones((2, 3)))
    assert_same_bits(first, moments_of(values, 3))
    assert_same_bits(second, moments_of(others, 3))


def test_chosen_cells_are_a_copy() -> None:
    moments = moments_of([[1.0, 2.0], [3.0, 6.0]], 2)
    chosen = moments.at([1])
    assert chosen.mean.tolist() == [4.0]
    chosen.add([[100.0]])
    assert moments.mean.tolist() == [2.0, 4.0]


# Sample


names = st.lists(st.text(min_size=1, max_size=5), unique=True, max_size=15)


def offer(sample: Sample, text: str, line: int, value: float) -> None:
    sample.add([SimpleNamespace(text=text, line=line, part=0, id="")], np.array([[value]]))


def sample_of(lines: Sequence[tuple[int, str]], size: int = 4, seed: int = 0) -> Sample:
    sample = Sample.empty(size, seed)
    for line, text in lines:
        offer(sample, text, line, float(line))
    return sample


def kept(sample: Sample) -> list[tuple[int, list[float]]]:
    return [(item.line, item.values.tolist()) for item in sample.rows()]


@given(names, st.randoms(use_true_random=False))
def test_the_sample_does_not_depend_on_the_order_of_texts(texts: list[str], chooser: random.Random) -> None:
    lines = list(enumerate(texts, start=1))
    shuffled = chooser.sample(lines, len(lines))
    assert kept(sample_of(shuffled)) == kept(sample_of(lines))


@given(names, st.lists(st.integers(0, 15), max_size=3), st.integers(0, 99))
def test_the_sample_does_not_depend_on_cuts_and_tree(texts: list[str], cuts: list[int], seed: int) -> None:
    lines = list(enumerate(texts, start=1))
    bounds = [0, *sorted(min(cut, len(lines)) for cut in cuts), len(lines)]
    parts = [sample_of(lines[low:high]) for low, high in pairwise(bounds)]
    assert kept(merged_at_random(parts, seed)) == kept(sample_of(lines))


def test_a_long_corpus_is_thinned_on_the_way_and_gives_the_same_sample() -> None:
    lines = [(line, f"text {line}") for line in range(1, 1001)]
    whole = sample_of(lines)
    assert len(whole.items) < 80
    assert len(whole.rows()) == 4
    assert kept(whole) == kept(sample_of(lines[::-1])) == kept(sample_of(lines[:700]).merge(sample_of(lines[700:])))


def test_equal_texts_are_told_apart_by_their_lines() -> None:
    lines = [(line, "the same") for line in range(1, 9)]
    assert kept(sample_of(lines)) == kept(sample_of(lines[::-1])) == [(line, [float(line)]) for line in (1, 2, 3, 4)]


def test_another_seed_draws_another_sample_and_does_not_merge() -> None:
    lines = [(line, f"text {line}") for line in range(1, 101)]
    assert kept(sample_of(lines, seed=1)) != kept(sample_of(lines, seed=0))
    with pytest.raises(ValueError, match="seed"):
        sample_of(lines, seed=1).merge(sample_of(lines, seed=0))
    with pytest.raises(ValueError, match="size"):
        sample_of(lines, size=3).merge(sample_of(lines, size=4))


def test_a_limited_sample_is_the_one_that_would_have_been_drawn() -> None:
    lines = [(line, f"text {line}") for line in range(1, 41)]
    assert kept(sample_of(lines, size=40).limited(4)) == kept(sample_of(lines, size=4))
    assert sample_of(lines, size=40).limited(4).size == 4


def test_the_sample_keeps_copies_of_values() -> None:
    sample, values = Sample.empty(4, 0), np.array([[1.0]])
    sample.add([SimpleNamespace(text="text", line=1, part=0, id="")], values)
    values[0] = 2.0
    assert kept(sample) == [(1, [1.0])]


def test_a_sample_of_no_texts_keeps_none() -> None:
    assert sample_of([(1, "a"), (2, "b")], size=0).rows() == []
    assert Sample.empty(4, 0).merge(Sample.empty(4, 0)).rows() == []


def test_merging_samples_leaves_both_alone() -> None:
    first, second = sample_of([(1, "a"), (2, "b")]), sample_of([(3, "c")])
    offer(first.merge(second), "d", 4, 4.0)
    assert [item.line for item in first.items] == [1, 2]
    assert [item.line for item in second.items] == [3]


# Counts and totals


@given(st.lists(st.integers(2, 512), max_size=9), st.integers(0, 9))
def test_counts_add_up(lengths: list[int], cut: int) -> None:
    first, second, whole = Counts(), Counts(), Counts()
    first.add(lengths[:cut])
    second.add(lengths[cut:])
    whole.add(lengths)
    assert whole == Counts(len(lengths), sum(lengths)) == first.merge(second) == second.merge(first)
    assert whole.merge(Counts()) == Counts().merge(whole) == whole


@given(st.lists(st.lists(numbers, min_size=2, max_size=2), max_size=9), st.integers(0, 9))
def test_totals_are_sums(values: list[list[float]], cut: int) -> None:
    parts = [Totals.empty(2), Totals.empty(2), Totals.empty(2)]
    for part, chosen in zip(parts, (values[:cut], values[cut:], values), strict=True):
        for value in chosen:
            part.add(np.array(value))
    first, second, whole = parts
    np.testing.assert_allclose(whole.values, np.sum(values, axis=0) if values else [0, 0], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(first.merge(second).values, whole.values, rtol=1e-9, atol=1e-9)
    assert whole.merge(Totals.empty(2)).values.tobytes() == whole.values.tobytes()
    assert Totals.empty(2).merge(whole).values.tobytes() == whole.values.tobytes()


def test_merging_totals_leaves_both_alone() -> None:
    first, second = Totals(np.array([1.0])), Totals(np.array([2.0]))
    first.merge(second).add(np.array([4.0]))
    assert (first.values.tolist(), second.values.tolist()) == ([1.0], [2.0])


# States


def state_of(layers: tuple[int, ...], texts: int) -> Any:
    from dataclasses import make_dataclass

    kind = make_dataclass("Kind", [("counts", Counts), ("layers", tuple)], bases=(State,))
    return kind(Counts(texts), layers)


def test_states_of_other_settings_do_not_merge() -> None:
    with pytest.raises(ValueError, match=r"\(0,\)"):
        state_of((0,), 1).merge(state_of((0, 1), 1))


def test_states_merge_field_by_field() -> None:
    assert state_of((0,), 1).merge(state_of((0,), 2)).counts == Counts(3)
