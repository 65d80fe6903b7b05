"""Pieces of a batch: cut, worked on side by side, and put together again as if there had been no cut."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vectors import text_of

from analyses.kit import kept, pieces
from analyses.kit.maths import direction_sums, lengths
from analyses.kit.pieces import CACHED, over_layers, runs
from analyses.kit.record import ForwardRecord, ModelShape
from analyses.kit.units import Kinds, Units

SHAPE = ModelShape("bert", heads=1, width=3, head_width=3, weight_layer=(0, 1))


@given(st.integers(0, 9), st.integers(0, 30), st.integers(1, 2 * CACHED))
def test_runs_hold_every_text_once_and_no_more_numbers_than_the_cache(start: int, count: int, entries: int) -> None:
    cuts = list(runs(slice(start, start + count), entries))
    assert [text for cut in cuts for text in range(cut.start, cut.stop)] == list(range(start, start + count))
    assert all(cut.stop - cut.start == 1 or (cut.stop - cut.start) * entries <= CACHED for cut in cuts)


@pytest.mark.parametrize("texts", [None, slice(1, 4)])
def test_over_layers_is_each_text_of_each_layer_on_its_own(
    texts: slice | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = [torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(layer)) for layer in range(2)]
    record = ForwardRecord(SHAPE, [None] * 5, {"layer_outputs": tensors})  # type: ignore[list-item]
    chosen = range(5) if texts is None else range(texts.start, texts.stop)

    def measure(values: np.ndarray, which: slice) -> np.ndarray:
        sums = values.sum(axis=(2, 3))
        seen.append(sums.shape)
        return np.stack([sums, np.broadcast_to(np.arange(which.start, which.stop), sums.shape)], axis=-1)

    expected = [[[tensors[layer][text].double().sum().item(), text] for layer in (1, 0)] for text in chosen]
    for cached, most in ((1, 1), (30, 2), (CACHED, 2 * len(chosen))):
        monkeypatch.setattr(pieces, "runs", partial(runs, most=cached))
        seen: list[tuple[int, ...]] = []
        found = over_layers(record, "layer_outputs", (1, 0), measure, texts)
        np.testing.assert_allclose(found, expected, rtol=1e-12)
        assert max(map(math.prod, seen)) == most


@pytest.mark.parametrize("special", [True, False])
def test_pieces_hold_every_text_once_with_the_tokens_that_are_its_own_to_measure(special: bool) -> None:
    marks = ["[CLS] a b [SEP]", "[CLS] b c [SEP]", "[CLS] a [SEP] b", "[CLS] c [SEP] a", "[CLS] c d [SEP]"]
    texts = [text_of(line, mark.split()) for line, mark in enumerate(marks, start=1)]
    layers = [torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(layer)) for layer in range(2)]
    record = ForwardRecord(SHAPE, texts, {"layer_outputs": layers})
    seen = []
    for piece in kept.pieces(record, special=special):
        vectors = piece.vectors("layer_outputs", [1, 0])
        for at, text in enumerate(record.texts[piece.texts]):
            rows = [row for row, added in enumerate(text.special) if special or not added]
            expected = [layers[layer][text.line - 1, rows].double().numpy() for layer in (1, 0)]
            np.testing.assert_array_equal(vectors[:, at], expected)
            seen.append(text.line)
    assert seen == [1, 2, 3, 4, 5]


@given(st.integers(0, 2**32 - 1))
def test_direction_sums_are_those_of_plain_loops(seed: int) -> None:
    generator = np.random.default_rng(seed)
    vectors, chosen = generator.normal(size=(2, 5, 3)), generator.integers(0, 2, size=(2, 4, 5)).astype(float)
    vectors[0, 1] = 0.0
    sums, count = direction_sums(vectors, lengths(vectors), chosen)
    for text in range(2):
        for choice in range(4):
            there = [at for at in range(5) if chosen[text, choice, at] and vectors[text, at].any()]
            units = [vectors[text, at] / sum(value**2 for value in vectors[text, at]) ** 0.5 for at in there]
            np.testing.assert_allclose(sums[text, choice], sum(units, np.zeros(3)), atol=1e-12)
            assert count[text, choice] == len(there)


def test_kinds_stack_texts_and_are_cut_like_them() -> None:
    flags = np.array([[True, False, False], [False, True, False], [False, False, True]])
    units = [
        Units((0, 1, 2), ("a", "b", "."), (0, 1, 2), (1, 2, 3), (0, 0, 1), special, *flags[:2]) for special in flags
    ]
    kinds = Kinds(units)
    assert kinds.special.tolist() == flags.tolist()
    assert kinds[1:].special.tolist() == flags[1:].tolist()
    assert kinds.other.tolist() == [[False, False, False], [False, False, False], [False, False, True]]
    assert kinds.segment.tolist() == [[0, 0, 1]] * 3
    assert kinds[:1].repeated(2).punctuation.tolist() == [[False, False, True]] * 2
