"""Head against head: references in plain NumPy and SciPy, invariances, arrangements, and the command line."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import reference
import tiny
import torch
from numpy.typing import NDArray
from scipy.linalg import subspace_angles
from scipy.spatial.distance import cosine, jensenshannon
from scipy.stats import ortho_group, pearsonr
from typer.testing import CliRunner, Result

from analyses.heads import HeadsAgainstHeads
from analyses.kit.analysis import Selection, SettingsError
from analyses.kit.arrangement import clustered, nearest, on_plane
from analyses.kit.comparison import Pairing, places_of
from analyses.kit.divergence import jensen_shannon, row_correlation
from analyses.kit.head_answers import BY_WEIGHTS
from analyses.kit.head_metrics import COMPOSITIONS, METRICS, SUBSPACES
from analyses.kit.record import HeadWeights
from analyses.kit.subspaces import (
    composition_scores,
    folded,
    orthonormal_bases,
    principal_angles,
    projection_kernels,
    random_projection_kernel,
    squared_products,
)
from bertgeo_cli.cli import app
from bertgeo_cli.corpus import Encoder
from bertgeo_cli.errors import UsageError
from bertgeo_cli.models import LoadedModel, load_model
from bertgeo_cli.options import with_implied_values
from bertgeo_cli.recording import record
from bertgeo_cli.run import Pass, analyse_corpus, analyse_text, analyse_weights, observe

Floats = NDArray[np.float64]
SENTENCES = (
    "The fisherman sat down by the river bank.",
    "Goldfish, unhappily.",
    "She deposited the cheque at the savings bank — didn't she?",
)
TEXT_METRICS = ("jensen-shannon", "correlation")
LAYERS, HEADS, WIDTH, CHANNELS = 6, 12, 384, 32
WEIGHTS = ("query", "key", "value", "output")
KEYS = ["layer", "head", "other_layer", "other_head"]
PAIRS = (((0, 0), (0, 1)), ((0, 2), (1, 9)), ((2, 3), (4, 7)), ((1, 11), (5, 0)), ((4, 6), (4, 9)))


def of_weights(loaded: LoadedModel, **settings: Any) -> dict[str, pd.DataFrame]:
    result = analyse_weights([HeadsAgainstHeads(**settings)], loaded)[0]
    return {table.name: table.frame for table in result.tables}


def of_texts(loaded: LoadedModel, texts: Sequence[str], **settings: Any) -> dict[str, pd.DataFrame]:
    encoder = Encoder(loaded.tokenizer, loaded.max_tokens)
    encoded = [encoder.encode(text, line=line) for line, text in enumerate(texts, start=1)]
    result = analyse_corpus([HeadsAgainstHeads(**settings)], loaded, encoded, Pass())[0]
    return {table.name: table.frame for table in result.tables}


def grid(pairs: pd.DataFrame, column: str = "value") -> Floats:
    """The table of pairs as a matrix; ordered pairs that it leaves out are NaN."""
    wide = pairs.pivot(index=["layer", "head"], columns=["other_layer", "other_head"], values=column)
    every = wide.index.union(wide.columns)
    return wide.reindex(index=every, columns=every).to_numpy(float)


@cache
def raw(letter: str, layer: int, head: int) -> Floats:
    """W_Q^T, W_K^T, W_V^T or W_O of one head of MiniLM, (width, channel), from the checkpoint's own names."""
    part = {"Q": "self.query", "K": "self.key", "V": "self.value", "O": "output.dense"}[letter]
    weight = reference.weights(f"encoder.layer.{layer}.attention.{part}.weight")
    rows = slice(head * CHANNELS, (head + 1) * CHANNELS)
    return weight[:, rows] if letter == "O" else weight[rows].T


# Weights, against plain references


@pytest.fixture(scope="module")
def kernels(minilm: LoadedModel) -> pd.DataFrame:
    return of_weights(minilm, subspaces="all")["heads-pairs"]


@pytest.mark.parametrize("kind", SUBSPACES)
def test_projection_kernels_are_the_sum_of_squared_cosines_of_principal_angles(
    kernels: pd.DataFrame, kind: str
) -> None:
    found = grid(kernels[kernels["subspaces"] == kind])
    for one, other in PAIRS:
        angles = subspace_angles(raw(kind[0], *one), raw(kind[1], *other))
        at = one[0] * HEADS + one[1], other[0] * HEADS + other[1]
        assert found[at] == pytest.approx(float((np.cos(angles) ** 2).sum()), rel=1e-5)


def test_all_sixteen_pairs_of_all_heads_stand_in_the_table(kernels: pd.DataFrame) -> None:
    assert len(kernels) == 16 * (LAYERS * HEADS) ** 2
    assert not kernels.duplicated(["subspaces", *KEYS]).any()
    assert ((kernels["value"] >= 0) & (kernels["value"] <= CHANNELS)).all()
    assert (kernels["earlier"] == (kernels["layer"] < kernels["other_layer"])).all()


def test_reversed_kinds_are_transposed(kernels: pd.DataFrame) -> None:
    for first, second in itertools.combinations("QKVO", 2):
        one, other = (grid(kernels[kernels["subspaces"] == kind]) for kind in (first + second, second + first))
        np.testing.assert_allclose(one, other.T, rtol=1e-12)


def test_z_counts_standard_deviations_of_random_subspaces(kernels: pd.DataFrame) -> None:
    mean = CHANNELS**2 / WIDTH
    variance = 2 * CHANNELS**2 * (WIDTH - CHANNELS) ** 2 / (WIDTH**2 * (WIDTH - 1) * (WIDTH + 2))
    np.testing.assert_allclose(kernels["random_mean"], mean)
    np.testing.assert_allclose(kernels["random_std"], math.sqrt(variance))
    np.testing.assert_allclose(kernels["z"], (kernels["value"] - mean) / math.sqrt(variance))


@pytest.fixture(scope="module")
def compositions(minilm: LoadedModel) -> pd.DataFrame:
    return of_weights(minilm, metric="composition")["heads-pairs"]


def dense_composition(kind: str, one: tuple[int, int], other: tuple[int, int]) -> float:
    """|P M| / (|P| |M|) from width x width matrices, as the definition stands."""
    writes = raw("V", *one) @ raw("O", *one).T
    reads = {
        "Q": raw("Q", *other) @ raw("K", *other).T,
        "K": (raw("Q", *other) @ raw("K", *other).T).T,
        "V": raw("V", *other) @ raw("O", *other).T,
    }[kind]
    return float(np.linalg.norm(writes @ reads) / (np.linalg.norm(writes) * np.linalg.norm(reads)))


@pytest.mark.parametrize("kind", COMPOSITIONS)
def test_composition_scores_are_those_of_dense_products(compositions: pd.DataFrame, kind: str) -> None:
    found = compositions[compositions["composition"] == kind].set_index(KEYS)["value"]
    for one, other in PAIRS:
        if one[0] < other[0]:
            assert found[(*one, *other)] == pytest.approx(dense_composition(kind, one, other), rel=1e-5)


def test_composition_runs_from_earlier_to_strictly_later_layers(compositions: pd.DataFrame) -> None:
    assert len(compositions) == 3 * math.comb(LAYERS, 2) * HEADS**2
    assert (compositions["layer"] < compositions["other_layer"]).all()
    assert compositions["value"].between(0, 1).all()
    np.testing.assert_allclose(compositions["random_about"], 1 / math.sqrt(WIDTH))


ANGLES = {"metric": "principal-angles", "subspaces": "OQ,KV,VK,VV"}


@pytest.fixture(scope="module")
def angles(minilm: LoadedModel) -> pd.DataFrame:
    return of_weights(minilm, **ANGLES)["heads-pairs"]


@pytest.mark.parametrize("kind", ["OQ", "KV", "VK", "VV"])
def test_principal_angles_are_those_of_scipy_in_degrees(angles: pd.DataFrame, kind: str) -> None:
    found = angles[angles["subspaces"] == kind].set_index(KEYS)
    for one, other in (*PAIRS, *((other, one) for one, other in PAIRS)):
        wanted = np.degrees(subspace_angles(raw(kind[0], *one), raw(kind[1], *other)))
        row = found.loc[(*one, *other)]
        assert row["value"] == pytest.approx(wanted.mean(), rel=1e-5)
        assert row["smallest"] == pytest.approx(wanted.min(), rel=1e-5)
        assert row["angles"] == CHANNELS


def test_all_angles_of_any_two_subspaces_are_those_of_scipy() -> None:
    generator = np.random.default_rng(7)
    first, second = (generator.standard_normal((3, 9, size)) for size in (2, 4))
    found = principal_angles(orthonormal_bases(first)[0], orthonormal_bases(second)[0])
    assert found.shape == (3, 3, 2)
    for at in np.ndindex(3, 3):
        wanted = np.sort(np.degrees(subspace_angles(first[at[0]], second[at[1]])))
        np.testing.assert_allclose(found[at], wanted, atol=1e-5)
    back = principal_angles(orthonormal_bases(second)[0], orthonormal_bases(first)[0])
    np.testing.assert_allclose(back, found.transpose(1, 0, 2), atol=1e-9)


def test_angles_are_0_within_a_subspace_90_across_and_none_past_the_smaller_dimension() -> None:
    axes = np.eye(6)
    bases, _ = orthonormal_bases(np.array([axes[:, :2], axes[:, :2] @ [[1.0, 5.0], [2.0, 1.0]], axes[:, [4, 4]]]))
    found = principal_angles(bases, bases).round(5)
    assert found[0, 1].tolist() == [0, 0]
    assert found[0, 2, 0] == 90
    assert found[2, 2, 0] == 0
    assert np.isnan(found[2, :, 1]).all()
    assert np.isnan(found[:, 2, 1]).all()


def test_bilinear_cosines_are_those_of_dense_forms(minilm: LoadedModel) -> None:
    found = of_weights(minilm, metric="bilinear-cosine")["heads-pairs"].set_index(KEYS)["value"]
    for one, other in PAIRS:
        first, second = (raw("Q", *head) @ raw("K", *head).T for head in (one, other))
        wanted = (first * second).sum() / (np.linalg.norm(first) * np.linalg.norm(second))
        assert found[(*one, *other)] == pytest.approx(wanted, rel=1e-5, abs=1e-8)
    assert found[(2, 3, 2, 3)] == pytest.approx(1.0)


def test_content_bias_cosines_are_those_of_vectors_from_the_checkpoint(minilm: LoadedModel) -> None:
    found = of_weights(minilm, metric="content-bias-cosine")["heads-pairs"].set_index(KEYS)["value"]

    def content_bias(layer: int, head: int) -> Floats:
        bias = reference.weights(f"encoder.layer.{layer}.attention.self.query.bias")
        return raw("K", layer, head) @ bias[head * CHANNELS : (head + 1) * CHANNELS]

    for one, other in PAIRS:
        assert found[(*one, *other)] == pytest.approx(1 - cosine(content_bias(*one), content_bias(*other)), rel=1e-5)


def test_a_head_without_a_query_bias_has_no_cosine_and_a_model_without_any_is_refused(tiny_model: LoadedModel) -> None:
    def without(layers: slice) -> LoadedModel:
        def silenced(weights: HeadWeights) -> HeadWeights:
            bias = weights.query_bias.clone()
            bias[layers] = 0
            return dataclasses.replace(weights, query_bias=bias)

        return with_weights(tiny_model, silenced)

    pairs = of_weights(without(slice(1)), metric="content-bias-cosine")["heads-pairs"]
    silent = (pairs["layer"] == 0) | (pairs["other_layer"] == 0)
    assert (pairs["value"].isna() == silent).all()
    with pytest.raises(UsageError, match="no content bias"):
        of_weights(without(slice(None)), metric="content-bias-cosine")


@pytest.mark.parametrize("metric", ["projection-kernel", "principal-angles", "bilinear-cosine", "content-bias-cosine"])
def test_pairs_from_earlier_to_later_are_those_rows_of_all_pairs(tiny_model: LoadedModel, metric: str) -> None:
    whole, later = (of_weights(tiny_model, metric=metric, direction=way) for way in ("all", "earlier-to-later"))
    pairs = whole["heads-pairs"]
    kept = pairs[pairs["layer"] < pairs["other_layer"]].reset_index(drop=True)
    assert 0 < len(kept) < len(pairs)
    pd.testing.assert_frame_equal(later["heads-pairs"], kept)
    summary = later["heads-summary"].set_index("pairs")
    assert summary["count"].to_dict() == {"within a layer": 0, "between layers": 16}
    assert summary.loc["between layers", "mean"] == pytest.approx(kept["value"].mean())
    assert (later["heads-nearest"]["layer"] != later["heads-nearest"]["other_layer"]).all()


FARTHEST = {"projection-kernel": math.sqrt(12), "principal-angles": 90.0, "bilinear-cosine": 1.0, "composition": 1.0}


@pytest.mark.parametrize("metric", FARTHEST)
def test_pairs_without_a_value_lie_as_far_apart_as_can_be(tiny_model: LoadedModel, metric: str) -> None:
    places = places_of(range(2), range(4), range(2))
    kinds = {"bilinear-cosine": (), "composition": ("Q",)}.get(metric, ("OQ",))
    answer = BY_WEIGHTS[metric](places, tiny_model.head_weights(), kinds, Pairing.of(places, only_later=True))
    (one,) = answer.heads.comparisons
    layers = np.repeat([0, 1], 4)
    within = layers[:, None] == layers
    assert np.isnan(one.pairs[within]).all()
    np.testing.assert_allclose(one.distances[within & ~np.eye(8, dtype=bool)], FARTHEST[metric])
    assert (one.distances[~within] < FARTHEST[metric]).all()
    assert not np.diagonal(one.distances).any()
    np.testing.assert_array_equal(one.distances, one.distances.T)


@pytest.mark.parametrize("metric", ["projection-kernel", *TEXT_METRICS])
def test_earlier_to_later_pairs_need_two_layers(tiny_model: LoadedModel, metric: str) -> None:
    analysis = HeadsAgainstHeads(metric=metric, direction="earlier-to-later", layers=Selection("1"))
    with pytest.raises(SettingsError, match="an earlier and a later layer"):
        analysis.start(tiny_model.shape, None)


# By hand, and the laws of subspaces


def test_equal_subspaces_overlap_by_their_dimension_and_orthogonal_ones_by_0() -> None:
    axes = np.eye(6)
    bases, dimensions = orthonormal_bases(np.array([axes[:, :2] @ [[2.0, 1.0], [0.0, 3.0]], axes[:, :2], axes[:, 4:]]))
    assert dimensions.tolist() == [2, 2, 2]
    np.testing.assert_allclose(projection_kernels(bases, bases), [[2, 2, 0], [2, 2, 0], [0, 0, 2]], atol=1e-12)


@pytest.mark.parametrize("width", [3, 40])
def test_dependent_columns_span_fewer_dimensions(width: int) -> None:
    generator = np.random.default_rng(0)
    thin = generator.standard_normal((2, width, 2)) @ generator.standard_normal((2, 2, 4))
    thin[1] = 0
    bases, dimensions = orthonormal_bases(thin.astype(np.float32).astype(float))
    assert dimensions.tolist() == [2, 0]
    assert projection_kernels(bases, bases).round(9).tolist() == [[2, 0], [0, 0]]


def test_norms_of_products_need_no_wide_matrix() -> None:
    generator = np.random.default_rng(1)
    a, b, c = (generator.standard_normal((5, 30, 4)) for _ in range(3))
    wanted = [[np.linalg.norm(one.T @ (two @ three.T)) for two, three in zip(b, c, strict=True)] for one in a]
    np.testing.assert_allclose(np.sqrt(squared_products(a, folded(b, c))), wanted)


@pytest.mark.parametrize("slab", [1, 7, 30, 2**20])
def test_slabs_of_any_height_give_the_same_norms(monkeypatch: pytest.MonkeyPatch, slab: int) -> None:
    a, b = (np.random.default_rng(2).standard_normal((3, 30, 4)) for _ in range(2))
    monkeypatch.setattr("analyses.kit.subspaces.SLAB_BYTES", slab * 8 * 30 * 3)
    wanted = [[np.linalg.norm(one.T @ other) ** 2 for other in b] for one in a]
    np.testing.assert_allclose(squared_products(a, b), wanted)
    np.testing.assert_allclose(squared_products(a, a), squared_products(a, a.copy()))


@pytest.mark.parametrize(("p", "q", "width"), [(3, 3, 12), (2, 5, 9)])
def test_moments_of_random_subspaces_are_those_of_a_simulation(p: int, q: int, width: int) -> None:
    generator = np.random.default_rng(3)
    first, _ = orthonormal_bases(generator.standard_normal((400, width, p)))
    second, _ = orthonormal_bases(generator.standard_normal((400, width, q)))
    values = projection_kernels(first, second)
    mean, std = random_projection_kernel(np.array(float(p)), np.array(float(q)), width)
    assert values.mean() == pytest.approx(float(mean), rel=5e-3)
    assert values.std() == pytest.approx(float(std), rel=2e-2)


def test_gaussian_factors_compose_by_about_the_root_of_the_width() -> None:
    generator = np.random.default_rng(4)
    a, b, c, d = (generator.standard_normal((20, 96, 8)) for _ in range(4))
    assert composition_scores(folded(a, b), folded(c, d)).mean() == pytest.approx(1 / math.sqrt(96), rel=0.02)


def with_weights(loaded: LoadedModel, change: Callable[[HeadWeights], HeadWeights]) -> LoadedModel:
    changed = change(loaded.head_weights())

    class Changed(type(loaded)):  # type: ignore[misc]
        def head_weights(self) -> HeadWeights:
            return changed

    return Changed(**{field.name: getattr(loaded, field.name) for field in dataclasses.fields(loaded)})


WEIGHT_SETTINGS: tuple[dict[str, Any], ...] = (
    {"subspaces": "all"},
    ANGLES,
    {"metric": "composition"},
    {"metric": "bilinear-cosine"},
    {"metric": "content-bias-cosine"},
)


@pytest.mark.parametrize("chosen", WEIGHT_SETTINGS)
def test_turning_the_residual_space_changes_nothing(tiny_model: LoadedModel, chosen: dict[str, Any]) -> None:
    turn = torch.from_numpy(ortho_group.rvs(tiny_model.shape.width, random_state=5))

    def turned(weights: HeadWeights) -> HeadWeights:
        read = {name: getattr(weights, name) @ turn for name in ("query", "key", "value")}
        return dataclasses.replace(weights, **read, output=turn.T @ weights.output)

    before, after = (of_weights(model, **chosen) for model in (tiny_model, with_weights(tiny_model, turned)))
    tolerance = 1e-5 if chosen is ANGLES else 1e-10  # degrees
    np.testing.assert_allclose(after["heads-pairs"]["value"], before["heads-pairs"]["value"], atol=tolerance)


@pytest.mark.parametrize("chosen", WEIGHT_SETTINGS)
def test_permuting_heads_permutes_rows_and_columns(tiny_model: LoadedModel, chosen: dict[str, Any]) -> None:
    order = [2, 0, 3, 1]

    def permuted(weights: HeadWeights) -> HeadWeights:
        return dataclasses.replace(
            weights, **{name: getattr(weights, name)[:, order] for name in (*WEIGHTS, "query_bias", "key_bias")}
        )

    before, after = (
        of_weights(model, **chosen)["heads-pairs"] for model in (tiny_model, with_weights(tiny_model, permuted))
    )
    for side in ("head", "other_head"):
        after[side] = after[side].map(lambda head: order[head])
    kinds = [name for name in ("subspaces", "composition") if name in before]
    one, other = (frame.sort_values([*kinds, *KEYS])["value"] for frame in (before, after))
    np.testing.assert_allclose(other, one, atol=1e-5 if chosen is ANGLES else 1e-12)


def test_layers_that_share_weights_count_once_and_feed_themselves(tmp_path: Path) -> None:
    albert = load_model(str(tiny.tiny_family("albert", tmp_path)), device="cpu", offline=True)
    assert albert.shape.layers == 4
    pairs = of_weights(albert)["heads-pairs"]
    assert len(pairs) == albert.shape.heads**2
    assert pairs["earlier"].all()
    assert len(of_weights(albert, metric="composition")["heads-pairs"]) == 3 * albert.shape.heads**2
    with pytest.raises(UsageError, match="earlier and a later layer"):
        of_weights(albert, metric="composition", layers=Selection("2"))


# Attention, against plain references


@cache
def attention(text: str) -> Floats:
    tokens = reference.tokenize(text)
    maps = reference.forward(tokens.ids, tokens.segments)["attention"]
    return maps.reshape(-1, *maps.shape[2:])


def mean_over_texts(of_rows: Callable[[Floats, Floats], float], one: int, other: int) -> float:
    by_text = [
        np.mean([of_rows(p, q) for p, q in zip(maps[one], maps[other], strict=True)])
        for maps in map(attention, SENTENCES)
    ]
    return float(np.mean(by_text))


def divergence_of(p: Floats, q: Floats) -> float:
    return float(jensenshannon(p, q)) ** 2


def correlation_of(p: Floats, q: Floats) -> float:
    return float(pearsonr(p, q).statistic)


@pytest.mark.parametrize(("metric", "of_rows"), [("jensen-shannon", divergence_of), ("correlation", correlation_of)])
def test_attention_metrics_are_means_over_rows_then_texts(
    minilm: LoadedModel, metric: str, of_rows: Callable[[Floats, Floats], float]
) -> None:
    found = grid(of_texts(minilm, SENTENCES, metric=metric)["heads-pairs"])
    for one, other in ((0, 1), (3, 50), (14, 14), (71, 2), (30, 31), (22, 66)):
        wanted = mean_over_texts(of_rows, one, other)
        np.testing.assert_allclose(found[one, other], wanted, rtol=1e-5, atol=1e-5)


def test_divergence_and_correlation_of_rows_worked_by_hand() -> None:
    maps = np.array([[[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.5, 0.5]], [[1.0, 0.0], [0.0, 1.0]]])
    quarter = 1.5 * math.log(2) - 0.75 * math.log(3)  # H(3/4, 1/4) - H(1/2, 1/2) / 2
    half = math.log(2) / 2
    np.testing.assert_allclose(jensen_shannon(maps)[0], [0, half, quarter / 2], atol=1e-12)
    # The uniform rows vary in no head's favour: only the first row counts.
    assert row_correlation(maps)[0].round(12).tolist() == [1, -1, 1]
    assert np.isnan(row_correlation(maps[:1, 1:])).all()


def test_blocks_of_any_size_give_the_same_divergences(monkeypatch: pytest.MonkeyPatch) -> None:
    maps = np.random.default_rng(6).dirichlet(np.full(5, 0.2), size=(9, 5))
    whole = jensen_shannon(maps)
    monkeypatch.setattr("analyses.kit.divergence.BLOCK", 60)
    assert jensen_shannon(maps).tobytes() == whole.tobytes()


@pytest.mark.parametrize("metric", TEXT_METRICS)
def test_texts_cut_anywhere_merge_into_the_whole(tiny_model: LoadedModel, metric: str) -> None:
    analysis = HeadsAgainstHeads(metric=metric)
    encoder = Encoder(tiny_model.tokenizer, tiny_model.max_tokens)
    texts = [encoder.encode(text, line=line) for line, text in enumerate(("a cat", "the dog ran", "", "no , no !"), 1)]
    whole = analysis.finalize(observe([analysis], tiny_model, texts, Pass())[0], None)
    for cut in range(len(texts) + 1):
        one, other = (observe([analysis], tiny_model, part, Pass())[0] for part in (texts[:cut], texts[cut:]))
        merged = analysis.finalize(one.merge(other), None)
        for table, wanted in zip(merged.tables, whole.tables, strict=True):
            pd.testing.assert_frame_equal(table.frame, wanted.frame, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("metric", TEXT_METRICS)
def test_only_the_attention_is_read_and_one_text_is_a_corpus_of_one(tiny_model: LoadedModel, metric: str) -> None:
    analysis = HeadsAgainstHeads(metric=metric)
    text = Encoder(tiny_model.tokenizer, tiny_model.max_tokens).encode("the cats sat on the mat.")
    state = analysis.start(tiny_model.shape, None)
    analysis.update(state, record(tiny_model, [text], needs=frozenset({"attention"})))
    single = analyse_text([analysis], tiny_model, text, Pass())[0]
    for one, other in zip(analysis.finalize(state, None).tables, single.tables, strict=True):
        pd.testing.assert_frame_equal(one.frame, other.frame)


@pytest.mark.parametrize("metric", TEXT_METRICS)
def test_chosen_heads_are_rows_and_columns_of_all(tiny_model: LoadedModel, metric: str) -> None:
    every = of_texts(tiny_model, ["the old cat"], metric=metric)["heads-pairs"]
    some = of_texts(tiny_model, ["the old cat"], metric=metric, heads=Selection("1,3"))["heads-pairs"]
    kept = every[every["head"].isin([1, 3]) & every["other_head"].isin([1, 3])].reset_index(drop=True)
    pd.testing.assert_frame_equal(some, kept)


# Arrangements


def distances(size: int = 12, seed: int = 0) -> Floats:
    places = np.random.default_rng(seed).standard_normal((size, 2))
    return np.linalg.norm(places[:, None] - places, axis=-1)


def test_a_plane_is_found_again_and_twice_the_same() -> None:
    places, stress = on_plane(distances())
    assert stress < 1e-4
    np.testing.assert_allclose(np.linalg.norm(places[:, None] - places, axis=-1), distances(), atol=1e-3)
    again, _ = on_plane(distances())
    assert places.tobytes() == again.tobytes()


@pytest.mark.parametrize("size", [2, 3, 12])
def test_arrangements_of_few_or_equal_items_raise_no_warning(size: int) -> None:
    with warnings.catch_warnings(), np.errstate(divide="raise", invalid="raise"):
        warnings.simplefilter("error")
        for apart in (distances(size), np.zeros((size, size)), 1.0 - np.eye(size)):
            tree, order = clustered(apart)
            places, stress = on_plane(apart)
            assert sorted(order) == list(range(size))
            assert np.isfinite(places).all()
            assert np.isfinite(stress)
            assert len(tree) == size - 1


def test_leaves_lie_beside_their_nearest_and_come_out_the_same_twice() -> None:
    line = np.array([0.0, 10.0, 1.0, 11.0, 0.4])
    apart = np.abs(line[:, None] - line)
    tree, order = clustered(apart)
    assert order.tolist() in ([0, 4, 2, 1, 3], [3, 1, 2, 4, 0])
    assert clustered(apart)[0].tobytes() == tree.tobytes()
    assert tree[:, 2].round(6).tolist() == [0.4, 0.8, 1.0, 10.033333]
    assert nearest(apart, 2).tolist() == [[4, 2], [3, 2], [4, 0], [1, 2], [0, 2]]


@pytest.mark.parametrize("settings", [{}, {"subspaces": "OQ"}, {"metric": "composition"}])
def test_the_nearest_are_the_smallest_distances(tiny_model: LoadedModel, settings: dict[str, Any]) -> None:
    tables = of_weights(tiny_model, nearest=3, **settings)
    near = tables["heads-nearest"]
    assert near["pair_value"].notna().all()
    assert (near["place"] <= 3).all()
    assert near.groupby([*KEYS[:2], *({"subspaces", "composition"} & set(near))])[
        "distance"
    ].is_monotonic_increasing.all()
    assert not ((near["layer"] == near["other_layer"]) & (near["head"] == near["other_head"])).any()


FROM_VALUE: dict[str, Callable[[Floats], Floats]] = {
    "principal-angles": lambda angle: angle,
    "bilinear-cosine": lambda cosine: np.sqrt((1 - cosine) / 2),
    "content-bias-cosine": lambda cosine: np.sqrt((1 - cosine) / 2),
    "projection-kernel": lambda kernel: np.sqrt(12 - kernel),
    "composition": lambda score: 1 - score,
    "jensen-shannon": np.sqrt,
    "correlation": lambda correlation: np.sqrt((1 - correlation) / 2),
}


@pytest.mark.parametrize("metric", FROM_VALUE)
def test_distances_follow_from_values(tiny_model: LoadedModel, metric: str) -> None:
    of = of_texts(tiny_model, ["the old cat"], metric=metric) if metric in TEXT_METRICS else None
    near = (of or of_weights(tiny_model, metric=metric))["heads-nearest"]
    np.testing.assert_allclose(near["distance"], FROM_VALUE[metric](near["pair_value"].to_numpy()), atol=1e-9)


@pytest.mark.parametrize("settings", [{"subspaces": "OQ"}, {"metric": "composition", "composition": "K"}])
def test_a_pair_of_layers_counts_by_its_earlier_head(tiny_model: LoadedModel, settings: dict[str, Any]) -> None:
    tables = of_weights(tiny_model, nearest=7, **settings)
    values = tables["heads-pairs"].set_index(KEYS)["value"]
    for row in tables["heads-nearest"].itertuples():
        forth = (row.layer, row.head, row.other_layer, row.other_head)
        back = (*forth[2:], *forth[:2])
        if row.layer != row.other_layer:
            assert row.pair_value == values[min(forth, back)]
        else:
            assert row.pair_value == pytest.approx((values[forth] + values[back]) / 2)


def test_figures_follow_the_clustering_and_say_how_well_a_plane_does(minilm: LoadedModel) -> None:
    result = analyse_weights([HeadsAgainstHeads(subspaces="OQ")], minilm)[0]
    figures = {figure.name: figure for figure in result.figures}
    assert list(figures) == ["heads-heatmap", "heads-directions", "heads-map", "heads-graph"]
    panel = figures["heads-heatmap"].panels[0]
    leaves = next(table for table in result.tables if table.name == "heads-places").frame.sort_values("leaf")
    assert list(panel.rows) == [f"L{layer}H{head}" for layer, head in zip(leaves["layer"], leaves["head"], strict=True)]
    np.testing.assert_array_equal(panel.values, panel.values.T)
    assert "Stress-1" in figures["heads-map"].note


# Settings and the command line


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"metric": "cosine"}, "unknown metric 'cosine'"),
        ({"metric": "mean"}, "rows sum to 1"),
        ({"metric": "mean_attention"}, "rows sum to 1"),
        ({"subspaces": "QX"}, "'QX' is no pair of subspaces"),
        ({"metric": "composition", "composition": "O"}, "'O' is no composition"),
        ({"nearest": 0}, "0 nearest heads"),
        *(({"edges": edges}, "no graph") for edges in ("0", "-3", "0%", "101%", "3%%", "many", "2.5", "", "nan%")),
        ({"layers": Selection("0"), "heads": Selection("0")}, "nothing to compare it with"),
    ],
)
def test_settings_without_meaning_are_refused(tiny_model: LoadedModel, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        HeadsAgainstHeads(**settings).start(tiny_model.shape, tiny_model.head_weights())


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (["--metric"], ["--metric", "list"]),
        (["--metric", "-o", "x"], ["--metric", "list", "-o", "x"]),
        (["--metric", "--json"], ["--metric", "list", "--json"]),
        (["--metric", "correlation", "-o", "x"], ["--metric", "correlation", "-o", "x"]),
        (["--metric=correlation"], ["--metric=correlation"]),
        (["--", "--metric"], ["--", "--metric"]),
        (["--nearest", "3"], ["--nearest", "3"]),
    ],
)
def test_an_option_without_a_value_takes_the_implied_one(given: list[str], wanted: list[str]) -> None:
    assert with_implied_values(given, {"metric": "list"}) == wanted


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(app, ["heads", *arguments])


@pytest.mark.parametrize("arguments", [("--metric",), ("--metric", "list"), ("--metric", "-o", "x")])
def test_metric_alone_lists_the_metrics_without_a_model(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setattr("bertgeo_cli.commands.load_chosen", None)
    done = run(*arguments)
    assert done.exit_code == 0, done.output
    for name in METRICS:
        assert sum(name in line for line in done.stdout.splitlines() if "│" in line) == 1
    assert not Path("x").exists()


def test_the_list_of_metrics_is_json_when_asked_for(run: Callable[..., Result]) -> None:
    listed = json.loads(run("--metric", "--json").stdout)
    assert {row["metric"]: row["reads"] for row in listed} == {
        "projection-kernel": "weights",
        "principal-angles": "weights",
        "bilinear-cosine": "weights",
        "content-bias-cosine": "weights",
        "composition": "weights",
        "jensen-shannon": "text",
        "correlation": "text",
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--metric", "cosine"), "projection-kernel, principal-angles, bilinear-cosine, content-bias-cosine"),
        (("--edges", "1.5"), "a number such as 100, or a share: 3%"),
        (("--direction", "later"), "earlier-to-later"),
        (("--metric", "mean"), "rows sum to 1"),
        (("--subspaces", "AB"), "QQ, QK"),
        (("A sentence.",), "a text was given, but this reads the model's weights alone"),
        (("--corpus", "some.txt", "--metric", "composition"), "--corpus was given"),
    ],
)
def test_wrong_usage_ends_with_2_and_two_lines(
    run: Callable[..., Result], arguments: tuple[str, ...], message: str
) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 2


def test_without_a_metric_it_is_the_projection_kernel_of_queries(run: Callable[..., Result], tiny_folder: Path) -> None:
    done = run("--model", str(tiny_folder), "-o", "out")
    assert done.exit_code == 0, done.output
    pairs = pd.read_csv("out/heads-pairs.csv")
    assert set(pairs["metric"]) == {"projection-kernel"}
    assert set(pairs["subspaces"]) == {"QQ"}
    assert json.loads(Path("out/run.json").read_text())["input"]["kind"] == "weights"


@pytest.mark.parametrize("metric", TEXT_METRICS)
def test_metrics_of_text_read_a_text(run: Callable[..., Result], tiny_folder: Path, metric: str) -> None:
    done = run("the cat sat", "--metric", metric, "--model", str(tiny_folder), "-o", "out")
    assert done.exit_code == 0, done.output
    assert len(pd.read_csv("out/heads-pairs.csv")) == 64
    assert {path.suffix for path in Path("out").iterdir()} >= {".png", ".csv", ".json"}


@pytest.mark.parametrize("direction", ["all", "earlier-to-later"])
def test_the_headline_holds_the_closest_pairs_and_none_without_a_value(tiny_model: LoadedModel, direction: str) -> None:
    settings = {"metric": "content-bias-cosine", "direction": direction, "heads": Selection("0,1")}
    result = analyse_weights([HeadsAgainstHeads(**settings)], tiny_model)[0]
    pairs = next(table.frame for table in result.tables if table.name == "heads-pairs")
    once = pairs[pairs["layer"] * 4 + pairs["head"] < pairs["other_layer"] * 4 + pairs["other_head"]]
    wanted = once["value"].sort_values(ascending=False)
    assert len(wanted) == (6 if direction == "all" else 4)
    np.testing.assert_array_equal(result.headline.frame["pair_value"], wanted)
