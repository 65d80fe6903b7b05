"""Rank collapse: worked by hand, against a dense SVD, and against the float64 reference pass of MiniLM."""

from __future__ import annotations

import math

import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.stats import ortho_group

from analyses.kit.spectra import composite_norm, effective_rank, numerical_rank, ranks, singular_values_by_gram
from analyses.kit.token_matrices import residuals
from analyses.rank_collapse import RankCollapse
from bertgeo_cli.corpus import Encoder
from bertgeo_cli.models import LoadedModel
from bertgeo_cli.run import Pass, analyse_corpus, analyse_text

TOLERANCE = 1e-5
TEXTS = ("The fisherman sat down by the river bank.", "Hello.", "Was the cat's mat wet, or did it only look wet?")


def by_svd(matrix: np.ndarray, n: int) -> list[float]:
    """Effective, stable and numerical rank, by loops over a dense SVD's singular values."""
    sigma = [float(value) for value in np.linalg.svd(matrix, compute_uv=False)]
    shares = [value / sum(sigma) for value in sigma]
    spread = -sum(share * math.log(share) for share in shares if share > 0)
    stable = sum(value**2 for value in sigma) / max(sigma) ** 2
    return [math.exp(spread), stable, float(sum(value > n * 2.0**-23 * max(sigma) for value in sigma))]


def by_loops(x: np.ndarray) -> list[float]:
    """Both relative residuals, entry by entry."""
    tokens, width = x.shape
    mean = [sum(x[i, j] for i in range(tokens)) / tokens for j in range(width)]
    rest = [[x[i, j] - mean[j] for j in range(width)] for i in range(tokens)]
    return [norm(rest) / norm(x.tolist()) for norm in (_composite, _frobenius)]


def _composite(rows: list[list[float]]) -> float:
    columns = max(sum(abs(row[j]) for row in rows) for j in range(len(rows[0])))
    return math.sqrt(columns * max(sum(abs(value) for value in row) for row in rows))


def _frobenius(rows: list[list[float]]) -> float:
    return math.sqrt(sum(value**2 for row in rows for value in row))


def values_at(table, row: int) -> list[float]:
    names = ["residual_composite", "residual_frobenius", "effective_rank", "stable_rank", "numerical_rank"]
    return table.frame.loc[row, names].tolist()


def texts_of(loaded: LoadedModel) -> list:
    encoder = Encoder(loaded.tokenizer, loaded.max_tokens)
    return [encoder.encode(text, line=number) for number, text in enumerate(TEXTS, start=1)]


def test_composite_norm_of_a_two_by_two_matrix() -> None:
    # Column sums 4 and 2, row sums 3 and 3: sqrt(4 * 3).
    assert composite_norm(np.array([[1.0, -2.0], [3.0, 0.0]])) == pytest.approx(math.sqrt(12))


def test_residuals_of_a_two_by_two_matrix() -> None:
    # Mean (1, .5), rest (1, -.5), (-1, .5): column sum 2, row sum 1.5; X: column sum 2, row sum 2.
    found = residuals(np.array([[2.0, 0.0], [0.0, 1.0]]))
    assert found == pytest.approx([math.sqrt(2 * 1.5) / 2, math.sqrt(2.5 / 5)])


def test_equal_tokens_have_collapsed_and_a_single_one_always_has() -> None:
    equal = np.tile([[0.1, -0.7, 0.3]], (3, 1))
    assert residuals(equal) == pytest.approx([0.0, 0.0], abs=1e-15)
    assert ranks(equal, 3)[2] == 1
    assert ranks(equal, 3)[:2] == pytest.approx([1.0, 1.0], abs=1e-6)
    assert residuals(equal[:1]).tolist() == [0.0, 0.0]
    assert ranks(equal[:1], 1).tolist() == [1.0, 1.0, 1.0]


def test_collinear_tokens_have_rank_one_but_have_not_collapsed() -> None:
    collinear = np.outer([1.0, 2.0, 4.0], [0.5, 0.25])
    assert ranks(collinear, 3)[2] == 1
    assert residuals(collinear)[1] == pytest.approx(np.linalg.norm([-4 / 3, -1 / 3, 5 / 3]) / np.linalg.norm([1, 2, 4]))


def test_no_tokens_and_zero_tokens_have_no_value_rather_than_a_wrong_one() -> None:
    assert np.isnan(residuals(np.zeros((0, 4)))).all()
    assert np.isnan(ranks(np.zeros((0, 4)), 0)).all()
    assert np.isnan(residuals(np.zeros((2, 4)))).all()
    assert np.isnan(ranks(np.zeros((2, 4)), 2)[:2]).all()
    assert ranks(np.zeros((2, 4)), 2)[2] == 0


def test_orthonormal_rows_have_full_rank() -> None:
    assert ranks(np.eye(5, 9), 5) == pytest.approx([5.0, 5.0, 5.0])


@settings(max_examples=60, deadline=None)
@given(hnp.arrays(np.float32, st.tuples(st.integers(1, 9), st.integers(1, 9)), elements=st.floats(-8, 8, width=16)))
def test_ranks_by_gram_matrix_are_those_of_a_dense_svd(matrix: np.ndarray) -> None:
    matrix = matrix.astype(np.float64)
    if not matrix.any():
        return
    np.testing.assert_allclose(ranks(matrix, len(matrix)), by_svd(matrix, len(matrix)), rtol=1e-5)


def test_numerical_rank_counts_above_its_threshold_only() -> None:
    sigma = np.array([3.9 * 2.0**-23, 4.1 * 2.0**-23, 1.0])
    assert numerical_rank(sigma, tokens=4) == 2
    assert effective_rank(np.array([0.0, 1.0, 1.0])) == pytest.approx(2.0)


def test_rotating_the_space_changes_no_rank_and_no_frobenius_residual() -> None:
    rng = np.random.default_rng(0)
    x, rotation = rng.normal(size=(6, 12)), ortho_group.rvs(12, random_state=1)
    assert ranks(x @ rotation, 6) == pytest.approx(ranks(x, 6))
    assert residuals(x @ rotation)[1] == pytest.approx(residuals(x)[1])


def test_singular_values_of_tall_and_wide_matrices_agree_with_the_svd() -> None:
    x = np.random.default_rng(2).normal(size=(3, 7, 5))
    for matrices in (x, x.swapaxes(1, 2)):
        expected = np.sort(np.linalg.svd(matrices, compute_uv=False), axis=-1)
        np.testing.assert_allclose(singular_values_by_gram(matrices), expected)


@pytest.mark.parametrize("special", ["keep", "drop"])
def test_the_table_of_a_text_equals_the_reference_pass(minilm: LoadedModel, special: str) -> None:
    text = texts_of(minilm)[2]
    table = analyse_text([RankCollapse(special=special)], minilm, text, Pass())[0].tables[0]
    tokens = reference.tokenize(TEXTS[2])
    rows = [at for at, kind in enumerate(tokens.kinds()) if special == "keep" or kind not in ("cls", "sep")]
    for depth, states in enumerate(reference.forward(tokens.ids, tokens.segments)["hidden_states"]):
        x = states[rows]
        wanted = by_loops(x) + by_svd(x, len(rows))
        np.testing.assert_allclose(values_at(table, depth), wanted, rtol=TOLERANCE, atol=TOLERANCE)


def test_spectra_equal_a_dense_svd_of_the_reference_pass(minilm: LoadedModel) -> None:
    result = analyse_text([RankCollapse(spectra=True)], minilm, texts_of(minilm)[0], Pass())[0]
    frame = next(table.frame for table in result.tables if table.name == "rank-collapse-spectra")
    tokens = reference.tokenize(TEXTS[0])
    expected = reference.forward(tokens.ids, tokens.segments)
    assert len(frame) == 6 * 12 * 2
    for row in frame.itertuples():
        q, k = expected["q"][row.layer, row.head], expected["k"][row.layer, row.head]
        matrix = expected["attention"][row.layer, row.head] if row.matrix == "attention" else q @ k.T
        wanted = by_svd(matrix, len(matrix))
        assert [row.effective_rank, row.stable_rank] == pytest.approx(wanted[:2], rel=1e-4)
        # A singular value within the recording's error of the threshold may fall on either side.
        sigma = np.linalg.svd(matrix, compute_uv=False)
        limits = [int((sigma > scale * len(matrix) * 2.0**-23 * sigma[0]).sum()) for scale in (10, 0.1)]
        assert limits[0] <= row.numerical_rank <= limits[1]


def test_a_corpus_is_the_mean_and_deviation_of_its_texts(minilm: LoadedModel) -> None:
    texts = texts_of(minilm)
    whole = analyse_corpus([RankCollapse()], minilm, texts, Pass())[0]
    single = [analyse_text([RankCollapse()], minilm, text, Pass())[0].tables[0].frame for text in texts]
    for name in ("residual_composite", "effective_rank"):
        columns = np.array([frame[name] for frame in single])
        np.testing.assert_allclose(whole.tables[0].frame[name], columns.mean(axis=0), rtol=1e-12)
        np.testing.assert_allclose(whole.tables[0].frame[f"{name}_std"], columns.std(axis=0, ddof=1), rtol=1e-9)
    assert whole.tables[1].frame["residual_composite"].tolist() == pytest.approx(
        np.concatenate([frame["residual_composite"] for frame in single])
    )


def test_spectra_without_special_tokens_leave_out_their_rows_and_columns(minilm: LoadedModel) -> None:
    result = analyse_text([RankCollapse(spectra=True, special="drop")], minilm, texts_of(minilm)[0], Pass())[0]
    frame = next(table.frame for table in result.tables if table.name == "rank-collapse-spectra")
    tokens = reference.tokenize(TEXTS[0])
    kept = [at for at, kind in enumerate(tokens.kinds()) if kind not in ("cls", "sep")]
    attention = reference.forward(tokens.ids, tokens.segments)["attention"]
    for row in frame[frame["matrix"] == "attention"].itertuples():
        wanted = by_svd(attention[row.layer, row.head][np.ix_(kept, kept)], len(kept))
        assert [row.effective_rank, row.stable_rank] == pytest.approx(wanted[:2], rel=1e-4)


def test_spectra_of_a_batch_are_the_mean_of_those_of_its_texts(tiny_model: LoadedModel) -> None:
    encode = Encoder(tiny_model.tokenizer, tiny_model.max_tokens).encode
    # As many tokens in each, but the special ones of a pair stand elsewhere.
    lines = [("the cat sat on the mat", None), ("a dog ran", "the river"), ("the old cat", "a bank")]
    texts = [encode(text, pair, line=number) for number, (text, pair) in enumerate(lines, start=1)]
    assert {len(text) for text in texts} == {8}
    settings = RankCollapse(spectra=True, special="drop")

    def spectra(texts: list) -> np.ndarray:
        tables = analyse_corpus([settings], tiny_model, texts, Pass())[0].tables
        frame = next(table.frame for table in tables if table.name == "rank-collapse-spectra")
        return frame[["n", "effective_rank", "stable_rank", "numerical_rank"]].to_numpy()

    single = [spectra([text]) for text in texts]
    np.testing.assert_allclose(spectra(texts), np.mean(single, axis=0), rtol=1e-12)


def test_figures_show_every_ablation_as_the_tables_have_it(tiny_model: LoadedModel) -> None:
    texts = texts_of(tiny_model)
    result = analyse_corpus([RankCollapse(ablate="all", spectra=True)], tiny_model, texts, Pass())[0]
    tables = {table.name: table.frame for table in result.tables}
    figures = {figure.name: figure for figure in result.figures}
    for panel, name in zip(
        figures["rank-collapse"].panels, ("residual_composite", "effective_rank_share"), strict=True
    ):
        for (_, own), curve in zip(tables["rank-collapse"].groupby("ablation", sort=False), panel.series, strict=True):
            assert curve.y.tolist() == own[name].tolist()
            np.testing.assert_allclose(curve.high - curve.y, own[f"{name}_std"], rtol=1e-9)
    assert len({curve.y[-1] for curve in figures["rank-collapse"].panels[0].series}) == 4
    spectra = tables["rank-collapse-spectra"]
    for ablation in ("none", "skip", "mlp", "both"):
        own = spectra[(spectra["ablation"] == ablation) & (spectra["matrix"] == "attention")]
        shown = figures[f"rank-collapse-spectra-{ablation}"].panels[0].values
        assert shown.ravel().tolist() == own["effective_rank"].tolist()
