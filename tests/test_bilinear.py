"""Bilinear forms: dense NumPy and plain loops from the raw checkpoint, invariances, texts, vocabulary, command line."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import reference
import tiny
import torch
from command import Run, assert_error, content, files_of
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.linalg import subspace_angles
from scipy.stats import ortho_group

from analyses.bilinear import Bilinear
from analyses.kit.accumulators import TopTokens
from analyses.kit.analysis import Selection
from analyses.kit.forms import ThinForms, copying, directionality
from analyses.kit.record import HeadWeights, Vocabulary
from analyses.kit.vocabulary import nearest_entries
from bertgeo_cli.corpus import Encoder
from bertgeo_cli.models import LoadedModel, load_model
from bertgeo_cli.run import Pass, analyse_corpus, analyse_weights

Floats = NDArray[np.float64]
FORMS = ("without-biases", "homogeneous", "value-output")
CHANNELS, RANK = 32, 8
HEADS = ((0, 2), (2, 9), (5, 0))
TEXTS = ("The fisherman sat down by the river bank.", "Goldfish, unhappily", "Didn't she?")
TINY_TEXTS = ("the cats sat on the mat .", "a dog", "no , no , no !")


def tables(loaded: LoadedModel, **settings: Any) -> dict[str, pd.DataFrame]:
    result = analyse_weights([Bilinear(**settings)], loaded)[0]
    return {table.name: table.frame for table in result.tables}


def on_texts(loaded: LoadedModel, texts: tuple[str, ...], **settings: Any) -> dict[str, pd.DataFrame]:
    encoder = Encoder(loaded.tokenizer, loaded.max_tokens)
    encoded = [encoder.encode(text, line=line) for line, text in enumerate(texts, start=1)]
    result = analyse_corpus([Bilinear(**settings).on_texts()], loaded, encoded, Pass())[0]
    return {table.name: table.frame for table in result.tables}


@pytest.fixture(scope="module")
def minilm_tables(minilm: LoadedModel) -> dict[str, pd.DataFrame]:
    return tables(minilm, tokens=5)


# The raw checkpoint


@cache
def raw(part: str, layer: int) -> tuple[Floats, Floats]:
    name = {"output": "output.dense"}.get(part, f"self.{part}")
    return tuple(reference.weights(f"encoder.layer.{layer}.attention.{name}.{kind}") for kind in ("weight", "bias"))


def dense(form: str, layer: int, head: int) -> Floats:
    """M of one head, multiplied out."""
    rows = slice(head * CHANNELS, (head + 1) * CHANNELS)
    (query, query_bias), (key, key_bias) = raw("query", layer), raw("key", layer)
    if form == "without-biases":
        return query[rows].T @ key[rows]
    if form == "homogeneous":
        first, second = np.column_stack([query, query_bias])[rows], np.column_stack([key, key_bias])[rows]
        return first.T @ second
    return raw("value", layer)[0][rows].T @ raw("output", layer)[0][:, rows].T


def published_symmetry(matrix: Floats) -> float:
    """2 |sym|_F^2 / |M|_F^2 - 1."""
    symmetric = (matrix + matrix.T) / 2
    return float(2 * (symmetric**2).sum() / (matrix**2).sum() - 1)


def published_directionality(matrix: Floats) -> float:
    """The published code's score, negated, in loops."""
    excess = []
    for vectors in (matrix, matrix.T):
        norms = [float(np.sqrt(sum(entry * entry for entry in vector))) for vector in vectors]
        mean = sum(norms) / len(norms)
        deviation = (sum((norm - mean) ** 2 for norm in norms) / (len(norms) - 1)) ** 0.5
        excess.append(sum(norm - mean - 2 * deviation for norm in norms if norm > mean + 2 * deviation))
    rows, columns = excess
    return 0.0 if rows + columns == 0 else -(columns - rows) / (columns + rows)


def measured(matrix: Floats, channels: int = CHANNELS) -> dict[str, float]:
    """Every measure of MEASURES from the dense matrix."""
    singular = np.linalg.svd(matrix, compute_uv=False)
    eigenvalues = np.linalg.eigvalsh((matrix + matrix.T) / 2)
    shares = singular[:channels] / singular[:channels].sum()
    antisymmetric = (matrix - matrix.T) / 2
    least = len(matrix) * 2.0**-23 * np.abs(eigenvalues).max()
    return {
        "frobenius": float(np.sqrt((matrix**2).sum())),
        "spectral": float(singular[0]),
        "max_entry": float(np.abs(matrix).max()),
        "effective_rank": float(np.exp(-(shares * np.log(shares)).sum())),
        "stable_rank": float((singular**2).sum() / singular[0] ** 2),
        "numerical_rank": float((singular > len(matrix) * 2.0**-23 * singular[0]).sum()),
        "symmetric_share": 1 - float((antisymmetric**2).sum() / (matrix**2).sum()),
        "antisymmetric_share": float((antisymmetric**2).sum() / (matrix**2).sum()),
        "symmetry": published_symmetry(matrix),
        "directionality": published_directionality(matrix),
        "positive": float((eigenvalues > least).sum()),
        "negative": float((eigenvalues < -least).sum()),
        "positive_mass": float(eigenvalues[eigenvalues > 0].sum() / np.abs(eigenvalues).sum()),
        "trace_share": float(np.trace(matrix) / singular.sum()),
    }


def row(frame: pd.DataFrame, **keys: Any) -> pd.Series[Any]:
    found = frame
    for name, value in keys.items():
        found = found[found[name] == value]
    assert len(found) == 1
    return found.iloc[0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("place", HEADS)
def test_every_measure_of_a_head_is_that_of_the_dense_matrix(
    minilm_tables: dict[str, pd.DataFrame], place: tuple[int, int], form: str
) -> None:
    found = row(minilm_tables["bilinear-heads"], layer=place[0], head=place[1], form=form)
    for name, value in measured(dense(form, *place)).items():
        assert found[name] == pytest.approx(value, rel=1e-6, abs=1e-8), name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("place", HEADS)
def test_spectra_and_principal_angles_are_scipys(
    minilm_tables: dict[str, pd.DataFrame], place: tuple[int, int], form: str
) -> None:
    left, singular, right = np.linalg.svd(dense(form, *place))
    keys = {"layer": place[0], "head": place[1], "form": form}
    spectra, angles = (
        frame[(frame[list(keys)] == list(keys.values())).all(axis=1)]
        for frame in (minilm_tables["bilinear-spectra"], minilm_tables["bilinear-angles"])
    )
    np.testing.assert_allclose(spectra["singular_value"], singular[:CHANNELS], rtol=1e-8)
    np.testing.assert_allclose(
        spectra["cumulated_share"], np.cumsum(singular[:CHANNELS] ** 2) / (singular**2).sum(), rtol=1e-8
    )
    expected = np.sort(np.degrees(subspace_angles(left[:, :RANK], right[:RANK].T)))
    np.testing.assert_allclose(angles["angle"], expected, rtol=1e-5)
    overlap = row(minilm_tables["bilinear-heads"], **keys)["subspace_overlap"]
    assert overlap == pytest.approx(((left[:, :RANK].T @ right[:RANK].T) ** 2).sum() / RANK, rel=1e-8)


@pytest.mark.parametrize("layer", [0, 3])
def test_a_layer_has_the_published_scores_of_the_sum_over_its_heads(
    minilm_tables: dict[str, pd.DataFrame], layer: int
) -> None:
    matrix = raw("query", layer)[0].T @ raw("key", layer)[0]
    found = row(minilm_tables["bilinear-layers"], layer=layer)
    for name, value in measured(matrix, len(matrix)).items():
        if name != "max_entry":
            assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    spectra = minilm_tables["bilinear-layer-spectra"]
    expected = np.linalg.svd(matrix, compute_uv=False)
    own = spectra[spectra["layer"] == layer]["singular_value"]
    np.testing.assert_allclose(own, expected, rtol=1e-6, atol=1e-6 * expected[0])


@pytest.mark.parametrize("layer", [1, 4])
def test_the_expansion_rate_is_that_of_the_published_code(minilm_tables: dict[str, pd.DataFrame], layer: int) -> None:
    """Both affine maps as square matrices, the output's bias as a last column, as the authors' code has it."""
    (value, value_bias), (output, output_bias) = raw("value", layer), raw("output", layer)
    width = len(value)
    first, second = np.zeros((width + 1, width + 1)), np.zeros((width + 1, width + 1))
    first[:width, :width], first[:width, width], first[width, width] = value, value_bias, 1
    second[:width, :width], second[:width, width], second[width, width] = output.T, output_bias, 1
    singular = np.linalg.svd(first.T @ second, compute_uv=False)
    found = row(minilm_tables["bilinear-layers"], layer=layer)
    rate = np.sqrt((singular**2).sum()) / np.sqrt(width + 1)
    assert found["expansion_rate_published"] == pytest.approx(rate, rel=1e-9)
    second[:width, width], second[width, :width] = 0, output_bias
    rate = np.linalg.norm(first.T @ second) / np.sqrt(width + 1)
    assert found["expansion_rate"] == pytest.approx(rate, rel=1e-9)


@pytest.mark.parametrize("place", HEADS)
def test_norms_copying_and_expansion_of_a_head(minilm_tables: dict[str, pd.DataFrame], place: tuple[int, int]) -> None:
    layer, head = place
    rows = slice(head * CHANNELS, (head + 1) * CHANNELS)
    norms = row(minilm_tables["bilinear-norms"], layer=layer, head=head)
    for part in ("query", "key", "value", "output"):
        weight = raw(part, layer)[0]
        own = weight[:, rows] if part == "output" else weight[rows]
        assert norms[f"{part}_frobenius"] == pytest.approx(np.linalg.norm(own), rel=1e-9)
        assert norms[f"{part}_spectral"] == pytest.approx(np.linalg.norm(own, 2), rel=1e-9)
    query_bias, key_bias = raw("query", layer)[1][rows], raw("key", layer)[1][rows]
    assert norms["query_bias"] == pytest.approx(np.linalg.norm(query_bias), rel=1e-9)
    assert norms["key_bias"] == pytest.approx(np.linalg.norm(key_bias), rel=1e-9)
    assert norms["content_bias"] == pytest.approx(np.linalg.norm(query_bias @ raw("key", layer)[0][rows]), rel=1e-9)
    form = dense("value-output", layer, head)
    eigenvalues = np.linalg.eigvals(form)
    output = row(minilm_tables["bilinear-output"], layer=layer, head=head)
    assert output["copying"] == pytest.approx(eigenvalues.sum().real / np.abs(eigenvalues).sum(), rel=1e-4)
    bias = raw("value", layer)[1][rows] @ raw("output", layer)[0][:, rows].T
    expected = np.sqrt((form**2).sum() + (bias**2).sum()) / np.sqrt(len(form) + 1)
    assert output["expansion_rate"] == pytest.approx(expected, rel=1e-9)


# By hand, and bounds


def forms(left: Any, right: Any) -> dict[str, float]:
    measures = ThinForms(np.array([left], float), np.array([right], float)).measures()
    return {name: float(value[0]) for name, value in measures.items()}


def test_a_case_by_hand() -> None:
    """M = [[0, 2], [0, 0]]: one direction searches, another is found."""
    found = forms([[2], [0]], [[0], [1]])
    expected = {"frobenius": 2, "spectral": 2, "max_entry": 2, "effective_rank": 1, "stable_rank": 1}
    expected |= {"numerical_rank": 1, "symmetric_share": 0.5, "antisymmetric_share": 0.5, "symmetry": 0}
    expected |= {"positive": 1, "negative": 1, "positive_mass": 0.5, "trace_share": 0, "directionality": 0}
    assert found == pytest.approx(expected, abs=1e-9)


@given(st.integers(0, 10_000))
def test_a_symmetric_form_has_symmetry_1_and_a_skew_one_minus_1(seed: int) -> None:
    factor = np.random.default_rng(seed).normal(size=(9, 4))
    turn = np.kron(np.eye(2), [[0.0, -1.0], [1.0, 0.0]])
    symmetric, skew = forms(factor, factor), forms(factor, factor @ turn)
    assert symmetric["symmetry"] == pytest.approx(1)
    assert (symmetric["positive"], symmetric["negative"]) == (4, 0)
    assert (symmetric["positive_mass"], symmetric["trace_share"]) == pytest.approx((1, 1))
    assert skew["symmetry"] == pytest.approx(-1)
    assert skew["trace_share"] == pytest.approx(0, abs=1e-9)
    assert forms(factor, -factor)["trace_share"] == pytest.approx(-1)


@given(st.integers(0, 10_000), st.integers(3, 9), st.integers(1, 3))
def test_measures_of_small_forms_are_dense_ones(seed: int, width: int, channels: int) -> None:
    generator = np.random.default_rng(seed)
    left, right = generator.normal(size=(2, width, channels))
    found, expected = forms(left, right), measured(left @ right.T, channels)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    if 2 * channels <= width:
        assert (found["positive"], found["negative"]) == (channels, channels)


def test_a_zero_form_has_empty_ratios_and_warns_of_nothing() -> None:
    with np.errstate(all="raise"):
        found = forms(np.zeros((5, 2)), np.ones((5, 2)))
        assert np.isnan(copying(np.zeros((1, 2, 2))))
    zero = ("frobenius", "spectral", "max_entry", "numerical_rank", "positive", "negative", "directionality")
    assert all(found[name] == 0 for name in zero)
    assert all(np.isnan(value) for name, value in found.items() if name not in zero)


def test_directionality_names_the_side_of_the_outlier() -> None:
    lone, even = np.array([[9.0, *[1.0] * 9]]), np.ones((1, 10))
    assert directionality(lone, even) == [1]
    assert directionality(even, lone) == [-1]
    assert directionality(even, even) == [0]
    assert directionality(lone, lone) == [0]


def test_directions_are_singular_vectors_with_one_sign_and_end_at_the_rank() -> None:
    generator = np.random.default_rng(0)
    left, right = generator.normal(size=(2, 7, 3))
    left[:, 2] = left[:, 0]
    right[:, 2] = right[:, 0]
    first, second = (side[0] for side in ThinForms(left[None], right[None]).directions(3))
    matrix = left @ right.T
    singular = np.linalg.svd(matrix, compute_uv=False)
    for at in range(2):
        np.testing.assert_allclose(matrix @ second[:, at], singular[at] * first[:, at], atol=1e-12)
        assert first[np.abs(first[:, at]).argmax(), at] > 0
    assert not first[:, 2].any()
    assert not second[:, 2].any()


# Invariances


INVARIANT = [name for name in measured(np.eye(4), 4) if name not in ("max_entry", "directionality")]


def changed_weights(loaded: LoadedModel, change: Any) -> dict[str, pd.DataFrame]:
    analysis = Bilinear()
    state = analysis.start(loaded.shape, change(loaded.head_weights()))
    return {table.name: table.frame for table in analysis.finalize(state, None).tables}


def test_rotating_the_residual_space_changes_nothing_but_what_depends_on_its_basis(tiny_model: LoadedModel) -> None:
    turn = torch.from_numpy(ortho_group.rvs(tiny_model.shape.width, random_state=0))

    def rotated(weights: HeadWeights) -> HeadWeights:
        turned = {name: getattr(weights, name) @ turn for name in ("query", "key", "value")}
        output = {"output": turn.T @ weights.output, "output_bias": weights.output_bias @ turn}
        return dataclasses.replace(weights, **turned, **output)

    before, after = tables(tiny_model), changed_weights(tiny_model, rotated)
    for name, frame in before.items():
        kept = [column for column in frame if column not in ("max_entry", "directionality")]
        if name == "bilinear-layers":
            kept.remove("expansion_rate_published")
        pd.testing.assert_frame_equal(frame[kept], after[name][kept], rtol=1e-6, atol=1e-7)
    assert not np.allclose(before["bilinear-heads"]["max_entry"], after["bilinear-heads"]["max_entry"])


def test_scaling_queries_up_and_keys_down_leaves_the_forms(tiny_model: LoadedModel) -> None:
    scale = torch.tensor([0.25, 3.0, 1.0, 10.0], dtype=torch.float64)[:, None, None]

    def scaled(weights: HeadWeights) -> HeadWeights:
        biases = {"query_bias": weights.query_bias * scale[..., 0], "key_bias": weights.key_bias / scale[..., 0]}
        return dataclasses.replace(weights, query=weights.query * scale, key=weights.key / scale, **biases)

    before, after = tables(tiny_model), changed_weights(tiny_model, scaled)
    for name in set(before) - {"bilinear-norms"}:
        pd.testing.assert_frame_equal(before[name], after[name], rtol=1e-6, atol=1e-7)
    ratio = after["bilinear-norms"]["query_frobenius"] / before["bilinear-norms"]["query_frobenius"]
    np.testing.assert_allclose(ratio[:4], scale.flatten().numpy(), rtol=1e-9)


def test_permuting_heads_permutes_rows_and_leaves_layers(tiny_model: LoadedModel) -> None:
    order = [2, 0, 3, 1]

    def permuted(weights: HeadWeights) -> HeadWeights:
        names = ("query", "key", "value", "output", "query_bias", "key_bias", "value_bias")
        return dataclasses.replace(weights, **{name: getattr(weights, name)[:, order] for name in names})

    before, after = tables(tiny_model), changed_weights(tiny_model, permuted)
    for name, frame in before.items():
        other = after[name].copy()
        if "head" in frame:
            other["head"] = other["head"].map(lambda head: order[head])
            keys = list(frame.select_dtypes(exclude="float"))
            frame, other = (one.sort_values(keys, ignore_index=True) for one in (frame, other))
        if name == "bilinear-layers":
            frame, other = (one.drop(columns="expansion_rate_published") for one in (frame, other))
        pd.testing.assert_frame_equal(frame, other, rtol=1e-6, atol=1e-7)


def test_some_layers_and_heads_have_the_rows_they_have_among_all(tiny_model: LoadedModel) -> None:
    some, every = tables(tiny_model, layers=Selection("1"), heads=Selection("1,3")), tables(tiny_model)
    for name, frame in some.items():
        rows = every[name][every[name]["layer"] == 1]
        rows = rows[rows["head"].isin([1, 3])] if "head" in rows else rows
        pd.testing.assert_frame_equal(frame, rows.reset_index(drop=True), rtol=1e-9)


def test_layers_that_share_weights_stand_once(tmp_path: Path) -> None:
    loaded = load_model(str(tiny.tiny_family("albert", tmp_path / "albert")), device="cpu", offline=True)
    assert set(tables(loaded, layers=Selection("1-3"), tokens=3)["bilinear-heads"]["layer"]) == {1}
    assert set(on_texts(loaded, ("the cat",))["bilinear-texts"]["layer"]) == {0, 1, 2, 3}


# Texts


def part(name: str, at: tuple[int, int]) -> Floats:
    rows = slice(at[1] * CHANNELS, (at[1] + 1) * CHANNELS)
    return raw(name, at[0])[0][rows]


@pytest.fixture(scope="module")
def minilm_texts(minilm: LoadedModel) -> dict[str, pd.DataFrame]:
    return on_texts(minilm, TEXTS, top=4)


@cache
def read(text: str) -> tuple[reference.Tokens, Floats]:
    tokens = reference.tokenize(text)
    return tokens, reference.forward(tokens.ids, tokens.segments)["hidden_states"]


@pytest.mark.parametrize("place", HEADS)
def test_the_terms_of_scores_are_those_of_plain_loops(
    minilm_texts: dict[str, pd.DataFrame], place: tuple[int, int]
) -> None:
    content_bias = raw("query", place[0])[1][place[1] * CHANNELS : (place[1] + 1) * CHANNELS] @ part("key", place)
    form = dense("without-biases", *place)
    found = []
    for text in TEXTS:
        states = read(text)[1][place[0]]
        bias = [float(content_bias @ x) / CHANNELS**0.5 for x in states]
        variances = [np.var([float(x @ form @ y) / CHANNELS**0.5 for y in states]) for x in states]
        bias_variance, variance = np.var(bias), np.mean(variances)
        found.append((bias_variance**0.5, variance**0.5, bias_variance / (bias_variance + variance)))
    own = row(minilm_texts["bilinear-texts"], layer=place[0], head=place[1])
    names = ["bias_std", "bilinear_std", "bias_share"]
    np.testing.assert_allclose(own[names].astype(float), np.mean(found, axis=0), rtol=1e-4)
    np.testing.assert_allclose(
        own[[f"{name}_std" for name in names]].astype(float), np.std(found, axis=0, ddof=1), rtol=1e-3
    )
    assert own["texts"] == len(TEXTS)


@pytest.mark.parametrize("place", HEADS)
def test_shares_of_tokens_in_subspaces_are_those_of_dense_singular_vectors(
    minilm_texts: dict[str, pd.DataFrame], place: tuple[int, int]
) -> None:
    left, _, right = np.linalg.svd(dense("without-biases", *place))
    keys = {"layer": place[0], "head": place[1]}
    for side, basis in (("searching", left[:, :RANK]), ("searched", right[:RANK].T)):
        best: dict[str, float] = {}
        by_kind: dict[str, list[float]] = {}
        for text in TEXTS:
            tokens, states = read(text)
            shares = [float(((x @ basis) ** 2).sum() / (x**2).sum()) for x in states[place[0]]]
            for piece, share in zip(tokens.pieces, shares, strict=True):
                best[piece] = max(best.get(piece, 0.0), share)
            kinds = tokens.kinds()
            for kind in set(kinds):
                own = [share for share, of in zip(shares, kinds, strict=True) if of == kind]
                by_kind.setdefault(kind, []).append(sum(own) / len(own))
        for kind, means in by_kind.items():
            found = row(minilm_texts["bilinear-token-kinds"], **keys, kind=kind)
            assert found[side] == pytest.approx(np.mean(means), rel=1e-4)
            assert found["texts"] == len(means)
        top = minilm_texts["bilinear-top-tokens"]
        top = top[(top["layer"] == place[0]) & (top["head"] == place[1]) & (top["side"] == side)]
        expected = sorted(best.items(), key=lambda item: -item[1])[:4]
        assert list(top["token"]) == [piece for piece, _ in expected]
        assert list(top["share"]) == pytest.approx([share for _, share in expected], rel=1e-4)


def test_a_kind_that_no_text_has_is_an_empty_cell(tiny_model: LoadedModel) -> None:
    kinds = on_texts(tiny_model, ("the cat",))["bilinear-token-kinds"]
    without = kinds[kinds["kind"] == "punctuation"]
    assert without[["searching", "searched"]].isna().all(axis=None)
    assert (without["texts"] == 0).all()


tokens_of_text = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4), st.integers(0, 4)), max_size=12)


@given(st.lists(tokens_of_text, max_size=6), st.integers(0, 6), st.integers(0, 4))
def test_top_tokens_are_those_of_a_sorted_list_however_texts_are_cut(
    texts: list[list[tuple[int, int, int]]], cut: int, size: int
) -> None:
    sides = []
    for part_of_texts in (texts[:cut], texts[cut:], texts):
        top = TopTokens.empty(2, size=size)
        for tokens in part_of_texts:
            values = np.array([values for _, *values in tokens], float).reshape(-1, 2).T
            top.add([token for token, *_ in tokens], [f"t{token}" for token, *_ in tokens], values)
        sides.append(top)
    merged = sides[0].merge(sides[1])
    for cell in (0, 1):
        best: dict[int, int] = {}
        for token, *values in [token for tokens in texts for token in tokens]:
            best[token] = max(best.get(token, 0), values[cell])
        expected = sorted(((-value, token) for token, value in best.items()))[:size]
        for top in (merged, sides[2]):
            kept = [(-value, token) for value, token in zip(top.values[cell], top.ids[cell], strict=True) if token >= 0]
            assert kept == expected
    assert merged.pieces == {token: f"t{token}" for token in sorted(set(merged.ids.ravel().tolist()) - {-1})}


def test_top_tokens_of_different_size_do_not_merge() -> None:
    with pytest.raises(ValueError, match="size"):
        TopTokens.empty(1, size=2).merge(TopTokens.empty(1, size=3))


# Vocabulary


@pytest.mark.parametrize("side", ["searching", "searched"])
@pytest.mark.parametrize("place", HEADS)
def test_nearest_entries_are_those_of_the_whole_embedding(
    minilm_tables: dict[str, pd.DataFrame], place: tuple[int, int], side: str
) -> None:
    left, _, right = np.linalg.svd(dense("without-biases", *place))
    vector, partner = left[:, 0], right[0]
    sign = 1.0 if vector[np.abs(vector).argmax()] > 0 else -1.0
    embedding = reference.weights("embeddings.word_embeddings.weight")
    chosen = sign * (vector if side == "searching" else partner)
    cosines = embedding @ chosen / np.linalg.norm(embedding, axis=1)
    found = minilm_tables["bilinear-tokens"]
    found = found[(found["layer"] == place[0]) & (found["head"] == place[1]) & (found["side"] == side)]
    for end, order in (("+", np.argsort(-cosines)), ("-", np.argsort(cosines))):
        own = found[found["end"] == end]
        assert list(own["id"]) == list(order[:5])
        np.testing.assert_allclose(own["cosine"], np.abs(cosines[order[:5]]), rtol=1e-6)


def test_entries_without_a_token_and_zero_rows_are_passed_over_in_any_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.tensor([[0.0, 0.0], [2.0, 0.0], [1.0, 0.0], [0.0, 3.0], [5.0, 0.0]])
    vocabulary = Vocabulary(("zero", "a", "b", "c", None), rows, None)
    for block in (1, 2, 4096):
        monkeypatch.setattr("analyses.kit.vocabulary.ROWS", block)
        found = nearest_entries(vocabulary, np.array([[3.0, 0.0]]), 5)
        assert found.ids.tolist() == [[1, 2, 3]]
        assert found.cosines.tolist() == [[1, 1, 0]]


@pytest.mark.parametrize("family", ["electra", "albert"])
def test_narrower_embeddings_are_projected(tmp_path: Path, family: str) -> None:
    loaded = load_model(str(tiny.tiny_family(family, tmp_path / family)), device="cpu", offline=True)
    model: Any = loaded.model
    projection = model.embeddings_project if family == "electra" else model.encoder.embedding_hidden_mapping_in
    ids = torch.arange(7)
    with torch.no_grad():
        expected = projection(model.embeddings.word_embeddings(ids)) - projection.bias
    found = next(loaded.vocabulary().blocks(7))[1]
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)
    assert tables(loaded, tokens=2)["bilinear-tokens"]["token"].notna().all()


def test_a_plain_run_does_not_read_the_vocabulary(tiny_model: LoadedModel) -> None:
    def unread() -> Vocabulary:
        raise AssertionError("the vocabulary was read")

    found = changed_weights(tiny_model, lambda weights: dataclasses.replace(weights, vocabulary=unread))
    assert "bilinear-tokens" not in found


def test_a_head_whose_form_is_zero_has_no_angles_and_one_that_lacks_rank_has_fewer(tiny_model: LoadedModel) -> None:
    def lacking(weights: HeadWeights) -> HeadWeights:
        query = weights.query.clone()
        query[0, 0], query[0, 1, 3:] = 0.0, 0.0
        return dataclasses.replace(weights, query=query)

    found = changed_weights(tiny_model, lacking)
    angles, heads = (
        frame[(frame["form"] == "without-biases") & (frame["layer"] == 0)].set_index("head")
        for frame in (found["bilinear-angles"], found["bilinear-heads"])
    )
    assert angles.loc[0, ["cosine", "angle"]].isna().all(axis=None)
    assert np.isnan(heads.loc[0, "subspace_overlap"])
    form = lacking(tiny_model.head_weights()).query[0, 1].T @ tiny_model.head_weights().key[0, 1]
    left, _, right = np.linalg.svd(form.numpy())
    expected = np.sort(subspace_angles(left[:, :3], right[:3].T))
    np.testing.assert_allclose(np.radians(angles.loc[1, "angle"]), [*expected, *[np.nan] * 5], atol=1e-7)
    assert heads.loc[1, "subspace_overlap"] == pytest.approx(np.mean(np.cos(expected) ** 2))


def test_a_model_of_zeros_has_no_nearest_tokens(tiny_model: LoadedModel) -> None:
    def zeros(weights: HeadWeights) -> HeadWeights:
        return dataclasses.replace(weights, query=torch.zeros_like(weights.query))

    analysis = Bilinear(tokens=2)
    result = analysis.finalize(analysis.start(tiny_model.shape, zeros(tiny_model.head_weights())), None)
    table = next(table for table in result.tables if table.name == "bilinear-tokens")
    assert list(table.frame) == list(table.columns)
    assert table.frame.empty


# The command line


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        (("--rank", "13"), ("--rank 13", "12 channels", "1 to 12")),
        (("--directions", "99", "--tokens", "2"), ("--directions 99", "1 to 12")),
        (("--rank", "0"), ("rank",)),
        (("--layers", "2"), ("layer 2", "0 to 1")),
        (("the cat", "--heads", "4"), ("head 4", "0 to 3")),
    ],
)
def test_settings_that_no_model_satisfies_are_refused(
    fast: Run, given: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    assert_error(fast("bilinear", *given), 2, *parts)


def test_a_corpus_adds_the_companion_and_jobs_merge_into_the_same_bytes(fast: Run, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("\n".join(TINY_TEXTS) + "\n")
    chosen = ("bilinear", "--corpus", "corpus.txt", "--shard-texts", "1", "--tokens", "2")
    assert fast(*chosen, "-o", "whole").exit_code == 0
    for job in (1, 2):
        assert fast(*chosen, "-o", f"part-{job}", "--shard", f"{job}/2").exit_code == 0
    assert fast("merge", "part-1", "part-2", "-o", "merged").exit_code == 0
    assert fast(*chosen, "-o", "workers", "--workers", "2").exit_code == 0
    expected = files_of(tmp_path / "whole")
    assert files_of(tmp_path / "merged") == files_of(tmp_path / "workers") == expected
    assert {"bilinear-heads.csv", "bilinear-texts.csv", "bilinear-tokens.csv", "lines.csv"} <= set(expected)
    assert set(content(tmp_path / "whole")["settings"]) == {"layers", "heads", "rank", "tokens", "directions", "top"}
