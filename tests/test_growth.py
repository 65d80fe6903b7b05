"""Growth: low-rank spectra against dense eigenvalue problems, the trace, and the table against MiniLM's own tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ortho_group

from analyses.growth import Antisymmetric, Growth, extremes
from bertgeo_cli.corpus import Encoder
from bertgeo_cli.models import LoadedModel
from bertgeo_cli.recording import record
from bertgeo_cli.run import Pass, analyse_corpus, analyse_text


def dense(x: np.ndarray, query: np.ndarray, key: np.ndarray) -> np.ndarray:
    """All eigenvalues of sym(X^T X M_a), by the definition."""
    form = query.T @ key
    product = x.T @ x @ (form - form.T) / 2
    return np.linalg.eigvalsh((product + product.T) / 2)


def test_two_orthogonal_tokens_of_unequal_length_by_hand() -> None:
    # M = [[0, 2], [0, 0]], so M_a = [[0, 1], [-1, 0]]; X^T X = diag(4, 1): product [[0, 4], [-1, 0]], S has 3/2 off the
    # diagonal and eigenvalues -3/2 and 3/2.
    query, key = torch.tensor([[[1.0, 0.0]]]).double(), torch.tensor([[[0.0, 2.0]]]).double()
    found = Antisymmetric.of(query, key).spectra(torch.tensor([[2.0, 0.0], [0.0, 1.0]]).double())
    assert extremes(found.numpy())[0] == pytest.approx([1.5, -1.5, 1.5 * 2**0.5, 0.5**0.5, -(0.5**0.5)])


@settings(max_examples=40, deadline=None)
@given(tokens=st.integers(1, 30), channels=st.integers(1, 12), seed=st.integers(0, 9), repeated=st.booleans())
def test_spectra_are_those_of_the_dense_matrix(tokens: int, channels: int, seed: int, repeated: bool) -> None:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(tokens, 16))
    if repeated:
        x[:] = x[0]
    query, key = rng.normal(size=(2, 3, channels, 16))
    found = Antisymmetric.of(torch.from_numpy(query), torch.from_numpy(key)).spectra(torch.from_numpy(x)).numpy()
    for head in range(3):
        wanted = dense(x, query[head], key[head])
        scale = np.abs(wanted).max()
        assert extremes(found[head]) == pytest.approx(extremes(wanted), abs=1e-10 * scale)
        assert found[head].sum() == pytest.approx(0.0, abs=1e-9 * scale)
        assert found[head].min() <= 1e-9 * scale
        assert found[head].max() >= -1e-9 * scale


def test_symmetric_forms_and_equal_axes_do_not_grow() -> None:
    factor = torch.randn(2, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert Antisymmetric.of(factor, factor).spectra(x).abs().max() < 1e-12
    # X^T X = 1: S is the symmetric part of an antisymmetric matrix.
    other = torch.randn(2, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    assert Antisymmetric.of(factor, other).spectra(torch.eye(8, dtype=torch.float64)).abs().max() < 1e-12


def test_rotating_the_space_changes_nothing_and_swapping_queries_and_keys_turns_the_sign() -> None:
    rng = np.random.default_rng(3)
    rotation = ortho_group.rvs(10, random_state=4)
    x, query, key = rng.normal(size=(6, 10)), *rng.normal(size=(2, 1, 3, 10))
    plain, turned, swapped = (
        Antisymmetric.of(torch.from_numpy(q), torch.from_numpy(k)).spectra(torch.from_numpy(tokens)).numpy()
        for tokens, q, k in (
            (x, query, key),
            (x @ rotation, query @ rotation, key @ rotation),
            (x, key, query),
        )
    )
    np.testing.assert_allclose(turned, plain, atol=1e-9)
    np.testing.assert_allclose(swapped, -plain[:, ::-1], atol=1e-9)


def test_no_growth_has_no_shares() -> None:
    assert extremes(np.zeros((1, 3)))[0].tolist() == pytest.approx([0, 0, 0, np.nan, np.nan], nan_ok=True)


def test_the_table_of_a_text_equals_dense_spectra(minilm: LoadedModel) -> None:
    text = Encoder(minilm.tokenizer, minilm.max_tokens).encode("The fisherman sat down by the river bank.")
    frame = analyse_text([Growth()], minilm, text, Pass())[0].tables[0].frame
    states = record(minilm, [text], needs=frozenset({"hidden_states"})).of_text("hidden_states", 0)
    checkpoint = {name: value.double().numpy() for name, value in minilm.model.state_dict().items()}
    for row in frame.iloc[::17].itertuples():
        inside = f"encoder.layer.{row.layer}.attention.self"
        own = slice(row.head * 32, row.head * 32 + 32)
        wanted = dense(states[row.layer], *(checkpoint[f"{inside}.{name}.weight"][own] for name in ("query", "key")))
        assert [row.largest, row.smallest] == pytest.approx([wanted[-1], wanted[0]], rel=1e-9)
        assert row.norm == pytest.approx(np.sqrt((wanted**2).sum()), rel=1e-9)


def test_a_corpus_is_the_mean_and_deviation_of_its_texts(tiny_model: LoadedModel) -> None:
    encoder = Encoder(tiny_model.tokenizer, tiny_model.max_tokens)
    texts = [encoder.encode(text, line=line) for line, text in enumerate(("a cat", "we play", "the old dog ran"), 1)]
    whole = analyse_corpus([Growth()], tiny_model, texts, Pass())[0].tables[0].frame
    single = [analyse_text([Growth()], tiny_model, text, Pass())[0].tables[0].frame for text in texts]
    values = np.array([frame["largest"] for frame in single])
    np.testing.assert_allclose(whole["largest"], values.mean(axis=0), rtol=1e-10)
    np.testing.assert_allclose(whole["largest_std"], values.std(axis=0, ddof=1), rtol=1e-8)


def test_the_headline_is_the_mean_over_heads(tiny_model: LoadedModel) -> None:
    text = Encoder(tiny_model.tokenizer, tiny_model.max_tokens).encode("the old dog ran")
    result = analyse_text([Growth()], tiny_model, text, Pass())[0]
    for row in result.headline.frame.itertuples():
        own = result.tables[0].frame[result.tables[0].frame["layer"] == row.layer]
        assert row.largest == pytest.approx(sum(own["largest"]) / len(own))
        assert row.smallest_share == pytest.approx(sum(own["smallest_share"]) / len(own))
