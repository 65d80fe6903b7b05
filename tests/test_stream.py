"""The stream of vectors: by hand, against scipy.stats, and against plain loops over the float64 reference pass."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import reference
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from analyses.kit.analysis import Selection
from analyses.kit.distribution import CentralMoments, bin_counts, bin_edges, central_sums, histogram, pooled
from analyses.kit.kept import pieces
from analyses.kit.mixing import layer_weights, parts_of_output
from analyses.kit.record import ForwardRecord, HeadWeights, ModelShape
from analyses.kit.spectra import frobenius_norm, von_neumann_entropy
from analyses.kit.stream_points import POINTS
from analyses.kit.sublayers import affine_rank, norm_values, step_values
from analyses.stream import Stream
from bertgeo_cli.corpus import Encoder
from bertgeo_cli.models import LoadedModel, load_model
from bertgeo_cli.observation import one_thread
from bertgeo_cli.recording import EVERYTHING, run_pass
from bertgeo_cli.run import Pass, analyse_corpus

TEXTS = ("The fisherman sat down by the river bank.", "Hello.", "Was the cat's mat wet, or did it only look wet?")
WIDE = ("attention_projection", "attention_sum", "attention_norm", "mlp_output", "mlp_sum")


def encoded(loaded: LoadedModel, *texts: str) -> list:
    encoder = Encoder(loaded.tokenizer, loaded.max_tokens)
    return [encoder.encode(text, line=number) for number, text in enumerate(texts, start=1)]


def record_of(loaded: LoadedModel, text: str) -> ForwardRecord:
    (own,) = encoded(loaded, text)
    held = run_pass(loaded, torch.tensor([own.ids]), torch.tensor([own.segment]), needs=EVERYTHING)
    return ForwardRecord(loaded.shape, [own], held)


def frames(loaded: LoadedModel, analysis: Stream, *texts: str) -> dict[str, pd.DataFrame]:
    """Every table of a corpus by name."""
    (result,) = analyse_corpus([analysis], loaded, encoded(loaded, *texts), Pass())
    return {table.name: table.frame for table in result.tables}


def references() -> list[dict[str, np.ndarray]]:
    tokens = [reference.tokenize(text) for text in TEXTS]
    return [reference.forward(own.ids, own.segments) for own in tokens]


@pytest.fixture(scope="module")
def tables(minilm: LoadedModel) -> dict[str, pd.DataFrame]:
    """Every table of three texts of different length as a corpus."""
    return frames(minilm, Stream(parts="all"), *TEXTS)


def vectors_at(record: dict[str, np.ndarray], layer: int, point: str, head: int | slice | None) -> np.ndarray:
    names = {"query": "q", "key": "k", "value": "v", "head_output": "head_outputs"}
    if point in names:
        return record[names[point]][layer][head]
    if point in WIDE:
        return record[point][layer]
    return record["hidden_states"][layer + (point == "layer_output")]


# Distributions


@settings(deadline=None, max_examples=30)
@given(st.lists(st.lists(st.floats(-100, 100, width=32), max_size=6), min_size=1, max_size=6), st.integers(0, 6))
def test_pooled_moments_are_those_of_all_values(texts: list[list[float]], cut: int) -> None:
    sides = CentralMoments.empty(), CentralMoments.empty()
    for number, text in enumerate(texts):
        sides[number >= cut].add([central_sums(np.array(text, dtype=float))])
    merged, whole = sides[0].merge(sides[1]), np.concatenate([np.array(text) for text in texts])
    assert merged.count == len(whole)
    rest = whole - (whole.mean() if len(whole) else 0.0)
    expected = [(rest**power).sum() for power in (2, 3, 4)]
    for power, found in zip((2, 3, 4), merged.sums[2:], strict=True):
        assert found == pytest.approx(expected[power - 2], rel=1e-9, abs=1e-9 * max((abs(rest) ** power).sum(), 1e-20))


def test_moments_of_every_point_are_those_of_scipy(tables: dict[str, pd.DataFrame]) -> None:
    records = references()
    frame = tables["stream"]
    assert len(frame) == 6 * (4 * 12 + 7)
    for row in frame[frame["head"].isna() | frame["head"].isin([3, 11])].itertuples():
        found = [
            vectors_at(record, row.layer, row.point, None if pd.isna(row.head) else row.head) for record in records
        ]
        vectors = np.concatenate(found)
        entries, norms = vectors.ravel(), np.array([math.sqrt(sum(x * x for x in vector)) for vector in vectors])
        assert (row.tokens, row.entries) == (len(vectors), vectors.size)
        expected = {
            "mean": entries.mean(),
            "std": entries.std(),
            "skewness": stats.skew(entries),
            "excess_kurtosis": stats.kurtosis(entries),
            "jarque_bera_per_entry": stats.jarque_bera(entries).statistic / len(entries),
            "norm_mean": norms.mean(),
            "norm_std": norms.std(),
            "norm_skewness": stats.skew(norms),
        }
        for name, value in expected.items():
            assert getattr(row, name) == pytest.approx(value, rel=1e-4, abs=1e-5), (row.layer, row.point, name)


def test_constant_values_have_neither_skewness_nor_kurtosis() -> None:
    moments = CentralMoments.empty(1)
    moments.add([central_sums(np.full((1, 7), 0.1)), central_sums(np.full((1, 2), 0.1))])
    assert np.isnan([moments.skewness, moments.excess_kurtosis, moments.jarque_bera]).all()
    assert moments.mean == pytest.approx(0.1)


@pytest.mark.parametrize("entries", [7, 9000, 40_000])
def test_central_sums_and_norms_have_the_bits_that_a_row_has_alone(entries: int) -> None:
    rows = np.random.default_rng(entries).standard_normal((3, 2, 1, entries)) + 0.3
    with one_thread():
        for measure in (central_sums, lambda values: frobenius_norm(values[..., None])):
            together = measure(rows.copy())
            for at in np.ndindex(3, 2):
                assert together[at].tobytes() == measure(rows[at].copy()).tobytes()


def test_an_empty_side_leaves_the_bits_of_the_other() -> None:
    some, none = central_sums(np.array([0.1, 0.7, -3.3])), np.zeros(5)
    assert pooled(some, none).tobytes() == pooled(none, some).tobytes() == some.tobytes()


def test_every_float32_falls_between_the_edges_of_its_bin() -> None:
    values = (np.random.default_rng(0).standard_normal(500) * 10.0 ** np.arange(-25, 25).repeat(10)).astype(np.float32)
    low, high = bin_edges()
    for value in values.astype(float):
        (at,) = np.flatnonzero(bin_counts(np.array([[value]]))[0])
        inside = low[at] <= value < high[at] if value > 0 else low[at] < value <= high[at]
        assert inside, value


def test_histograms_hold_every_entry_once_and_have_area_one(tables: dict[str, pd.DataFrame]) -> None:
    records, groups = references(), dict(list(tables["stream-histograms"].groupby(["layer", "point"])))
    assert groups.keys() == set(product(range(6), POINTS))
    for (layer, point), own in groups.items():
        assert (own["density"] * (own["high"] - own["low"])).sum() == pytest.approx(1.0)
        assert np.array_equal(own["low"].iloc[1:], own["high"].iloc[:-1])
        entries = np.concatenate([vectors_at(record, layer, point, slice(None)).ravel() for record in records])
        edges = [*own["low"], own["high"].iloc[-1]]
        apart = np.abs(own["entries"].to_numpy() - np.histogram(entries, edges)[0]).sum()
        assert apart <= 4 + entries.size * 1e-4  # float32 may carry a few over an edge


def test_the_bins_around_zero_are_one() -> None:
    found = histogram(bin_counts(np.array([[0.0, -0.001, 0.002, -1.0, 2.0]]))[0], least=0.5)
    assert (found.counts[found.low == -0.5], found.high[found.low == -0.5]) == (3, 0.5)
    assert found.counts.sum() == 5


def test_an_enlarged_channel_is_the_outlier(tiny_folder: Path) -> None:
    # N4: one hidden dimension enlarged by 50, by the gain of the second LayerNorm.
    loaded = load_model(str(tiny_folder), device="cpu", offline=True)
    gain = loaded.model.encoder.layer[1].output.LayerNorm.weight
    with torch.no_grad():
        gain[17] *= 50
    outliers = frames(loaded, Stream(parts="moments"), "the cat sat", "a dog ran by")["stream-outliers"]
    last = outliers[(outliers["layer"] == 1) & (outliers["point"] == "layer_output")]
    assert last["channel"].tolist() == [17]
    assert last["variance_share"].item() > 0.8
    assert (last["variance"] > last["variance_bound"]).all()
    records = [record_of(loaded, text) for text in ("the cat sat", "a dog ran by")]
    vectors = np.concatenate([record.of_text("layer_outputs", 0)[1] for record in records])
    mean, variance = np.abs(vectors.mean(axis=0)), vectors.var(axis=0)
    wanted = [vectors[:, 17].mean(), variance[17], *(each.mean() + 3 * each.std() for each in (mean, variance))]
    found = last[["mean", "variance", "mean_bound", "variance_bound"]].to_numpy().ravel()
    assert found == pytest.approx(wanted)
    assert last["variance_share"].item() == pytest.approx(variance[17] / variance.sum())


@pytest.mark.parametrize("deviations", [1, 2])
def test_channels_beyond_as_many_deviations_as_asked_for_are_outliers(tiny_model: LoadedModel, deviations: int) -> None:
    tables = frames(tiny_model, Stream(parts="moments", outliers=deviations), "the cat sat")
    frame = tables["stream-outliers"].query("layer == 1 and point == 'layer_output'")
    vectors = record_of(tiny_model, "the cat sat").of_text("hidden_states", 0)[2]
    values = np.abs(vectors.mean(axis=0)), vectors.var(axis=0)
    beyond = [each > each.mean() + deviations * each.std() for each in values]
    assert frame["channel"].tolist() == np.flatnonzero(beyond[0] | beyond[1]).tolist()
    assert len(frame)


def test_figures_of_distributions_show_what_the_tables_have(tiny_model: LoadedModel) -> None:
    (result,) = analyse_corpus([Stream(parts="moments")], tiny_model, encoded(tiny_model, "the cat sat"), Pass())
    tables = {table.name: table.frame.set_index(["layer", "point"]) for table in result.tables}
    figures = {figure.name: figure.panels for figure in result.figures}
    last = tables["stream"].loc[(1, "layer_output")]
    wanted = (last["norm_mean"], last["std"], last["skewness"], np.log10(last["excess_kurtosis"] + 3))
    for panel, value in zip(figures["stream"], wanted, strict=True):
        (hidden,) = (curve for curve in panel.series if curve.label == "hidden states")
        assert (hidden.x.tolist(), hidden.y[-1]) == ([0, 1, 2], pytest.approx(value.item()))
    for panel, point in zip(figures["stream-histograms"], POINTS, strict=True):
        for layer, curve in enumerate(panel.series):
            own = tables["stream-histograms"].loc[(layer, point)]
            upper = own["entries"].cumsum() / own["entries"].sum()
            lower = upper - own["entries"] / own["entries"].sum()
            drawn = own[(upper > 0.001) & (lower < 0.999) & (own["entries"] > 0)]
            assert curve.x.tolist() == ((drawn["low"] + drawn["high"]) / 2).tolist()
            assert curve.y == pytest.approx(np.log10(drawn["density"]))


# Sublayers


def angle(first: np.ndarray, second: np.ndarray) -> float:
    cosine = float(first @ second) / math.sqrt(float(first @ first) * float(second @ second))
    return math.degrees(math.acos(max(-1.0, min(1.0, cosine))))


def test_steps_are_those_of_plain_loops(tables: dict[str, pd.DataFrame]) -> None:
    records = references()
    for row in tables["stream-steps"].itertuples():
        per_text = []
        for record in records:
            states = record["hidden_states"]
            before = record["attention_norm"][row.layer] if row.sublayer == "mlp" else states[row.layer]
            updates = {
                "attention": record["attention_projection"][row.layer],
                "mlp": record["mlp_output"][row.layer],
                "block": states[row.layer + 1] - states[row.layer],
            }[row.sublayer]
            values = [
                (math.sqrt((u @ u) / (x @ x)), angle(u, x), angle(x + u, x))
                for x, u in zip(before, updates, strict=True)
            ]
            per_text.append(np.mean(values, axis=0))
        found = [row.update_ratio, row.update_angle, row.moved_angle]
        assert found == pytest.approx(np.mean(per_text, axis=0), rel=1e-4)


def test_steps_without_direction_are_empty_and_opposite_ones_turn_by_half() -> None:
    x, zero = np.array([1.0, 0.0]), np.zeros(2)
    assert step_values(x, zero)[[0, 2]].tolist() == [0.0, 0.0]
    assert np.isnan(step_values(x, zero)[1])
    assert np.isnan(step_values(zero, x)).all()
    assert step_values(x, -3 * x).tolist() == [3.0, 180.0, 180.0]


def layer_norm(x: np.ndarray) -> np.ndarray:
    centred = x - x.mean(axis=1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axis=1, keepdims=True))


def test_a_layer_norm_is_not_neutral_to_affine_rank() -> None:
    # The three counter-examples: rank is gained on a line off the origin, lost on a ray, lost with n above width.
    line = np.array([[1.0, 0.0, 0.0, 2.0]]) + np.outer([0.0, 1.0, 3.0], [0.0, 1.0, -1.0, 0.5])
    ray = np.outer([1.0, 2.0, 5.0], [1.0, 3.0, -2.0, 0.5])
    many = np.random.default_rng(0).standard_normal((12, 8))
    ranks = [(affine_rank(x).item(), affine_rank(layer_norm(x)).item()) for x in (line, ray, many)]
    assert ranks == [(1.0, 2.0), (1.0, 0.0), (8.0, 7.0)]


def test_a_direction_below_what_rounding_leaves_adds_no_rank() -> None:
    # Three tokens of length 1000; X - 1 mean has singular values 1 and `spread`, both far above float64's rounding.
    least = 3 * 2.0**-23 * 1000 * math.sqrt(3)
    for spread, rank in ((least / 2, 1.0), (least * 2, 2.0)):
        x = np.array([1000.0, 0.0, 0.0, 0.0]) + np.outer([1.0, -1.0, 0.0], [0.0, 1.0, 0.0, 0.0]) / math.sqrt(2)
        x += np.outer([1.0, 1.0, -2.0], [0.0, 0.0, spread, 0.0]) / math.sqrt(6)
        assert affine_rank(x).item() == rank


def test_equal_tokens_a_single_one_and_none_have_defined_ranks() -> None:
    # N3
    equal = np.tile(np.random.default_rng(0).standard_normal(48).astype(np.float32), (5, 1)).astype(float)
    assert affine_rank(equal) == affine_rank(equal[:1]) == 0
    assert np.isnan(affine_rank(equal[:0]))


def test_what_a_layer_norm_does_to_a_vector_by_hand() -> None:
    # (1, 3): mean 2, deviation 1, 2 * 4 of 10 along (1, 1).
    found = norm_values(np.array([[[1.0, 3.0]]]), np.array([[[-1.0, 1.0]]]))
    assert found.tolist() == [[1.0, 2.0, 0.8, 0.0, 0.0, 0.0]]


def test_layer_norms_are_those_of_plain_loops(tables: dict[str, pd.DataFrame]) -> None:
    records = references()
    for row in tables["stream-layernorms"].itertuples():
        names = {"attention": ("attention_sum", "attention_norm"), "mlp": ("mlp_sum", "layer_outputs")}[row.norm]
        values = []
        for record in records:
            before, after = (record[name][row.layer] for name in names)
            ranks = [np.linalg.matrix_rank(x - x.mean(axis=0)) for x in (before, after)]
            values.append(
                [
                    np.mean([1 / x.std() for x in before]),
                    np.mean([x.mean() for x in before]),
                    np.mean([x.size * x.mean() ** 2 / (x @ x) for x in before]),
                    *ranks,
                ]
            )
        found = [row.scale, row.entry_mean, row.ones_share, row.affine_rank_before, row.affine_rank_after]
        assert found == pytest.approx(np.mean(values, axis=0), rel=1e-4, abs=1e-6)


# Mixing


def pair_vectors(record: dict[str, np.ndarray], layer: int) -> np.ndarray:
    """sum_h A_ij f_h(x_j) from the checkpoint, pair by pair: (query, key, width)."""
    output = reference.weights(f"encoder.layer.{layer}.attention.output.dense.weight")
    heads, tokens, channels = record["v"][layer].shape
    found = np.zeros((tokens, tokens, len(output)))
    for head in range(heads):
        columns = output[:, head * channels : (head + 1) * channels]
        for i in range(tokens):
            for j in range(tokens):
                found[i, j] += record["attention"][layer][head, i, j] * (columns @ record["v"][layer][head, j])
    return found


def mixed(others: np.ndarray, own: np.ndarray) -> float:
    first, second = np.linalg.norm(others), np.linalg.norm(own)
    return first / (first + second)


def test_mixing_ratios_are_those_of_loops_over_pairs(tables: dict[str, pd.DataFrame]) -> None:
    records = references()
    for row in tables["stream-mixing"].itertuples():
        gain = reference.weights(f"encoder.layer.{row.layer}.attention.output.LayerNorm.weight")
        means = []
        for record in records:
            pairs, values = pair_vectors(record, row.layer), []
            for i, x in enumerate(record["hidden_states"][row.layer]):
                others, own = sum(pairs[i, j] for j in range(len(pairs)) if j != i), pairs[i, i]
                deviation = math.sqrt(record["attention_sum"][row.layer][i].var() + 1e-12)
                through = [gain * (part - part.mean()) / deviation for part in (others, own + x)]
                weights = 1 - np.mean([head[i, i] for head in record["attention"][row.layer]])
                values.append([weights, mixed(others, own), mixed(others, own + x), mixed(*through)])
            means.append(np.mean(values, axis=0))
        found = [row.mixing_weights, row.mixing_attention, row.mixing_residual, row.mixing_norm]
        assert found == pytest.approx(np.mean(means, axis=0), abs=1e-5)


def test_layers_that_share_weights_have_those_of_their_group() -> None:
    per_layer = [torch.full((2, *shape), 1.0).double() for shape in ((3, 4, 8),) * 3 + ((3, 8, 4),) + ((3, 4),) * 3]
    per_layer += [torch.tensor([[first] * 8, [first + 1] * 8]).double() for first in (1, 3)]
    shape = ModelShape("albert", heads=3, width=8, head_width=4, weight_layer=(0, 0, 1, 1))
    found = layer_weights(HeadWeights(*per_layer), shape, [1, 2, 3])
    assert {layer: (own.bias[0], own.gain[0]) for layer, own in found.items()} == {1: (1, 3), 2: (2, 4), 3: (2, 4)}


def test_the_parts_add_up_to_what_was_recorded(minilm: LoadedModel) -> None:
    record, layer = record_of(minilm, TEXTS[0]), 2
    (piece,) = pieces(record, special=True)
    weights = layer_weights(minilm.head_weights(), minilm.shape, [layer])[layer]
    others, own, _ = (part[0] for part in parts_of_output(piece, [layer], [weights]))
    held = reference.forward(record.texts[0].ids, record.texts[0].segment)
    pairs = pair_vectors(held, layer)
    diagonal = np.array([pairs[i, i] for i in range(len(pairs))])
    assert own[0] == pytest.approx(diagonal, abs=1e-5)
    assert others[0] == pytest.approx(pairs.sum(axis=1) - diagonal, abs=1e-5)
    total = others[0] + own[0] + record.of_text("hidden_states", 0)[layer] + weights.bias
    normed = reference.layer_norm(total, f"encoder.layer.{layer}.attention.output.LayerNorm")
    assert normed == pytest.approx(record.of_text("attention_norm", 0)[layer], abs=1e-5)


# Spectra


def test_entropy_of_the_identity_is_ln_n_and_of_rank_one_zero() -> None:
    assert von_neumann_entropy(np.ones(7)) == pytest.approx(math.log(7))
    assert von_neumann_entropy(np.array([0.0, 0.0, 5.0])) == 0
    assert np.isnan(von_neumann_entropy(np.zeros(3)))
    # p = (9, 16) / 25 of singular values 3 and 4
    assert von_neumann_entropy(np.array([3.0, 4.0])) == pytest.approx(-(0.36 * math.log(0.36) + 0.64 * math.log(0.64)))


def entropy_by_density(matrix: np.ndarray) -> float:
    """That of A A^T / tr(A A^T), from its eigenvalues."""
    shares = np.linalg.eigvalsh(matrix @ matrix.T / np.trace(matrix @ matrix.T))
    return -sum(float(p) * math.log(float(p)) for p in shares if p > 1e-14)


def test_spectra_are_those_of_dense_decompositions(tables: dict[str, pd.DataFrame]) -> None:
    records, frame = references(), tables["stream-spectra"]
    assert len(frame) == 72
    for row in frame[frame["head"].isin([0, 7])].itertuples():
        values = []
        for record in records:
            attention = record["attention"][row.layer][row.head]
            scores = record["q"][row.layer][row.head] @ record["k"][row.layer][row.head].T
            sigma = np.linalg.svd(record["head_outputs"][row.layer][row.head], compute_uv=False)
            entropies = [entropy_by_density(part) for part in (attention, scores, (scores + scores.T) / 2)]
            k90 = np.mean([reference.k90(list(query)) for query in attention])
            spread = math.exp(stats.entropy(sigma))
            values.append([*entropies, entropies[0] / math.log(len(attention)), sigma[0], spread, k90])
        found = [row.attention_entropy, row.scores_entropy, row.symmetric_entropy, row.attention_entropy_share]
        found += [row.output_sigma, row.output_effective_rank, row.k90]
        assert found == pytest.approx(np.mean(values, axis=0), rel=2e-4, abs=1e-5)


def test_the_condition_of_the_output_matrix_is_that_of_the_checkpoint(tables: dict[str, pd.DataFrame]) -> None:
    names = [f"encoder.layer.{layer}.attention.output.dense.weight" for layer in range(6)]
    expected = [np.linalg.cond(reference.weights(name)) for name in names]
    assert tables["stream-weights"]["output_condition"].tolist() == pytest.approx(expected, rel=1e-6)


# Settings


@pytest.mark.parametrize("family", ["roberta", "distilbert", "albert", "electra"])
def test_other_families_have_every_part(family: str, tmp_path: Path) -> None:
    loaded = load_model(str(tiny.tiny_family(family, tmp_path / family)), device="cpu", offline=True)
    found = frames(loaded, Stream(parts="all"), "the cat sat on the mat")
    record = record_of(loaded, "the cat sat on the mat").of_text("attention", 0)
    diagonal = [1 - np.mean([np.diag(head).mean() for head in heads]) for heads in record]
    assert found["stream-mixing"]["mixing_weights"].tolist() == pytest.approx(diagonal, abs=1e-6)
    assert len(found["stream-spectra"]) == loaded.shape.layers * loaded.shape.heads
    assert found["stream-layernorms"]["scale"].gt(0).all()


def test_a_layer_norm_without_gain_leaves_one_point_behind_it(tiny_folder: Path) -> None:
    loaded = load_model(str(tiny_folder), device="cpu", offline=True)
    with torch.no_grad():
        loaded.model.encoder.layer[1].output.LayerNorm.weight.zero_()
    frame = frames(loaded, Stream(parts="layernorms"), "the cat sat")["stream-layernorms"]
    ranks = frame.set_index(["layer", "norm"])[["affine_rank_before", "affine_rank_after"]]
    assert ranks.loc[(1, "mlp")].tolist() == [4.0, 0.0]
    assert ranks.drop(index=(1, "mlp")).to_numpy().tolist() == [[4.0, 4.0]] * 3


def test_without_special_tokens_k90_is_still_over_all_keys_and_entropies_are_not(tiny_model: LoadedModel) -> None:
    frame = frames(tiny_model, Stream(parts="spectra", special="drop"), "the cat sat")["stream-spectra"]
    record = record_of(tiny_model, "the cat sat")
    for row in frame.itertuples():
        inner = record.of_text("attention", 0)[row.layer, row.head][1:-1]
        assert row.n == 3
        assert row.k90_share == pytest.approx(row.k90 / 5)
        assert row.k90 == pytest.approx(np.mean([reference.k90(list(query)) for query in inner]))
        assert row.attention_entropy == pytest.approx(entropy_by_density(inner[:, 1:-1]), abs=1e-5)


def test_dropped_special_tokens_are_not_measured_but_still_mixed_in(tiny_model: LoadedModel) -> None:
    text = "the cat sat on"
    (own,) = encoded(tiny_model, text)
    found = frames(tiny_model, Stream(parts="moments,mixing", special="drop"), text)
    record = record_of(tiny_model, text)
    kept = [at for at, added in enumerate(own.special) if not added]
    assert found["stream"]["tokens"].unique().tolist() == [len(kept)] == [4]
    attention = record.of_text("attention", 0)[:, :, kept, kept]
    assert found["stream-mixing"]["mixing_weights"].tolist() == pytest.approx(1 - attention.mean(axis=(1, 2)), abs=1e-6)
    last = found["stream"].query("layer == 1 and point == 'layer_output'")
    assert last["mean"].item() == pytest.approx(record.of_text("hidden_states", 0)[2][kept].mean())


def test_the_headline_takes_its_values_from_the_tables(tiny_model: LoadedModel) -> None:
    (result,) = analyse_corpus([Stream(parts="all")], tiny_model, encoded(tiny_model, "the cat sat", "a dog"), Pass())
    told, tables = result.headline.frame, {table.name: table.frame for table in result.tables}
    steps = tables["stream-steps"].set_index(["sublayer", "layer"])["update_ratio"]
    assert told["attention_update"].tolist() == steps["attention"].tolist()
    assert told["mlp_update"].tolist() == steps["mlp"].tolist()
    norms = tables["stream"][tables["stream"]["point"] == "layer_output"]
    assert told["norm"].tolist() == norms["norm_mean"].tolist()
    scales = tables["stream-layernorms"].set_index(["norm", "layer"])["scale"]
    assert told["mlp_norm_scale"].tolist() == scales["mlp"].tolist()
    entropies = tables["stream-spectra"].groupby("layer")["attention_entropy_share"]
    assert told["attention_entropy_share"].tolist() == pytest.approx([sum(own) / len(own) for _, own in entropies])


def test_chosen_layers_and_heads_have_the_rows_they_have_among_all(tiny_model: LoadedModel) -> None:
    fewer = Stream(layers=Selection("1"), heads=Selection("0,2"), parts="all")
    some, every = (frames(tiny_model, own, "the cat sat", "a dog") for own in (fewer, Stream(parts="all")))
    for name, frame in some.items():
        whole = every[name][every[name]["layer"] == 1]
        if "head" in whole and len(whole) != len(frame):
            whole = whole[whole["head"].isna() | whole["head"].isin([0, 2])]
        if name != "stream-histograms":  # those put the chosen heads together
            pd.testing.assert_frame_equal(frame.reset_index(drop=True), whole.reset_index(drop=True))
