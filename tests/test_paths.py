"""Paths: counted one by one and as published, chained by plain loops, residuals by hand."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from test_rank_collapse import by_loops

from analyses.kit.record import ForwardRecord, ModelShape
from analyses.paths import Paths, chained, path_counts, residual_of_rank_one, sampled_paths
from bertgeo_cli.corpus import Encoder
from bertgeo_cli.models import LoadedModel
from bertgeo_cli.recording import record
from bertgeo_cli.run import Pass, analyse_corpus, analyse_text

BERT_BASE = ModelShape("bert", heads=12, width=768, head_width=64, weight_layer=tuple(range(12)))


def test_paths_are_those_that_can_be_listed() -> None:
    for layers, heads in ((1, 1), (3, 2), (4, 3)):
        listed = [sum(step > 0 for step in path) for path in product(range(heads + 1), repeat=layers)]
        assert path_counts(layers, heads) == [listed.count(length) for length in range(layers + 1)]


def test_bert_base_has_the_published_paths() -> None:
    counts = path_counts(12, 12)
    assert sum(counts) == 23_298_085_122_481
    shares = [count / sum(counts) for count in reversed(counts)]
    assert shares[:5] == pytest.approx([0.3827, 0.3827, 0.1754, 0.0487, 0.0091], abs=5e-5)
    mean = Fraction(sum(length * count for length, count in enumerate(counts)), sum(counts))
    assert float(mean) == pytest.approx(11.0769, abs=5e-5)
    settings = Paths()
    result = settings.finalize(settings.start(BERT_BASE, None), None)
    assert result.notes == ("23,298,085,122,481 paths, 11.0769 layers long on average.",)
    assert [int(count) for count in result.tables[0].frame["paths"]] == counts
    assert result.tables[0].frame["share"].to_list() == pytest.approx(shares[::-1])


def test_counts_beyond_64_bits_keep_every_digit() -> None:
    counts = path_counts(96, 96)
    assert sum(counts) == 97**96
    settings = Paths()
    shape = ModelShape("bert", heads=96, width=96, head_width=1, weight_layer=tuple(range(96)))
    frame = settings.finalize(settings.start(shape, None), None).tables[0].frame
    assert frame["paths"].iloc[-1] == str(96**96)
    assert frame["share"].sum() == pytest.approx(1)


def stochastic(layers: int, heads: int, n: int) -> np.ndarray:
    raw = np.random.default_rng(5).exponential(size=(layers, heads, n, n))
    return raw / raw.sum(axis=-1, keepdims=True)


def multiplied(first: list[list[float]], second: list[list[float]]) -> list[list[float]]:
    size = range(len(first))
    return [[sum(first[i][k] * second[k][j] for k in size) for j in size] for i in size]


@pytest.mark.parametrize("order", ["theory", "code"])
def test_chained_attention_is_that_of_plain_loops(order: str) -> None:
    attention = stochastic(4, 3, 5)
    paths = [((0, 2), (1, 0), (3, 1)), ((1, 1), (2, 2), (3, 0))]
    for found, path in zip(chained(attention, paths, order), paths, strict=True):
        steps = [attention[layer, head].tolist() for layer, head in (path if order == "code" else path[::-1])]
        wanted = multiplied(multiplied(steps[0], steps[1]), steps[2])
        np.testing.assert_allclose(found, wanted, rtol=1e-12)
        np.testing.assert_allclose(found.sum(axis=-1), 1.0)


def test_sampled_paths_rise_and_reach_every_layer_and_head() -> None:
    by_length = sampled_paths(4, 3, 200, 1)
    assert [len(paths) for paths in by_length] == [200] * 4
    for length, paths in enumerate(by_length, start=1):
        assert all(len(path) == length and list(path) == sorted(path) for path in paths)
        assert all(len({layer for layer, _ in path}) == length for path in paths)
        assert {place for path in paths for place in path} == set(product(range(4), range(3)))
    assert sampled_paths(4, 3, 200, 2) != by_length


def test_what_the_first_singular_triple_leaves() -> None:
    # Without 3 e1 e1^T, diag(0, 2, 1) is left of diag(3, 2, 1): 2 of 3.
    assert residual_of_rank_one(np.diag([3.0, 2.0, 1.0])) == pytest.approx(2 / 3)
    assert residual_of_rank_one(np.outer([1.0, 2.0], [3.0, 1.0])) == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize("rank_one", ["mean", "svd"])
def test_the_table_of_a_text_holds_means_over_its_sampled_paths(tiny_model: LoadedModel, rank_one: str) -> None:
    text = Encoder(tiny_model.tokenizer, tiny_model.max_tokens).encode("the old cat sat on a mat")
    settings = Paths(path_samples=6, seed=3, rank_one=rank_one)
    frame = analyse_text([settings], tiny_model, text, Pass())[0].tables[0].frame
    attention = record(tiny_model, [text], needs=frozenset({"attention"})).of_text("attention", 0)
    assert np.isnan(frame.loc[0, "residual"])
    for length, paths in enumerate(sampled_paths(2, 4, 6, 3), start=1):
        values = []
        for path in paths:
            matrix = np.eye(len(text))
            for layer, head in path:
                matrix = attention[layer, head] @ matrix
            values.append(by_loops(matrix)[0] if rank_one == "mean" else residual_of_rank_one(matrix).item())
        assert frame.loc[length, "residual"] == pytest.approx(np.mean(values))
        assert frame.loc[length, "spread"] == pytest.approx(np.std(values, ddof=1))


def test_longer_paths_leave_less(minilm: LoadedModel) -> None:
    encoder = Encoder(minilm.tokenizer, minilm.max_tokens)
    texts = [encoder.encode("The fisherman sat down by the river bank.", line=1), encoder.encode("Hello.", line=2)]
    frame = analyse_corpus([Paths(path_samples=50)], minilm, texts, Pass())[0].tables[0].frame
    assert (np.diff(frame["residual"][1:]) < 0).all()


def test_a_model_whose_heads_attend_uniformly_has_rank_one_at_once(tiny_model: LoadedModel) -> None:
    text = Encoder(tiny_model.tokenizer, tiny_model.max_tokens).encode("a cat")
    recorded = record(tiny_model, [text], needs=frozenset({"attention"}))
    uniform = {"attention": [layer.new_full(layer.shape, 1 / len(text)) for layer in recorded.attention.unbind(1)]}
    settings = Paths(path_samples=3)
    state = settings.start(tiny_model.shape, None)
    settings.update(state, ForwardRecord(tiny_model.shape, [text], uniform))
    assert state.moments.mean[1:, 0] == pytest.approx([0, 0], abs=1e-12)
