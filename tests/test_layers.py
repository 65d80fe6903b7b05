"""Depth against depth: against kernels written out, SVD and QR, SciPy's angles, and the reference pass of MiniLM."""

from __future__ import annotations

import numpy as np
import pytest
import reference
from scipy.linalg import subspace_angles
from scipy.stats import ortho_group
from sklearn.cross_decomposition import CCA
from sklearn.decomposition import PCA
from sklearn.metrics.pairwise import cosine_similarity
from vectors import Text, answer, corpus, state_of, text_of

from analyses.kit.accumulators import Floats
from analyses.kit.analysis import Selection, SettingsError
from analyses.kit.similarity import svcca, whitening
from analyses.layers import Layers
from bertgeo_cli.corpus import Encoder
from bertgeo_cli.models import LoadedModel
from bertgeo_cli.run import Pass, analyse_corpus

LENGTHS = (3, 5, 1, 7, 4, 6, 2, 9, 5, 3, 8, 4)
PRINCIPAL = 4


@pytest.fixture(scope="module")
def texts() -> list[Text]:
    """Depths that are partly the same: each is the one before plus noise."""
    return [(about, vectors.cumsum(axis=0)) for about, vectors in corpus(LENGTHS, 3, 9, words=25)]


def stacked(texts: list[Text]) -> Floats:
    """All tokens (depth, token, width)."""
    return np.concatenate([vectors for _, vectors in texts], axis=1)


def kernel_cka(x: Floats, y: Floats) -> float:
    """Kornblith et al. 2019 with n x n kernels and the centring matrix."""
    n = len(x)
    centring = np.eye(n) - np.ones((n, n)) / n
    k, l = (centring @ (v @ v.T) @ centring for v in (x, y))  # noqa: E741
    return np.trace(k @ l) / np.sqrt(np.trace(k @ k) * np.trace(l @ l))


def hsic_by_loops(x: Floats, y: Floats) -> float:
    """The unbiased estimate as a mean over all quadruples of different tokens, entry by entry of centred kernels.

    U-centring (Szekely and Rizzo 2014) gives the same number as the three sums of Song et al. 2012.
    """
    n = len(x)
    u, v = u_centred(x @ x.T), u_centred(y @ y.T)
    return sum(u[i, j] * v[i, j] for i in range(n) for j in range(n) if i != j) / (n * (n - 3))


def u_centred(kernel: Floats) -> Floats:
    n = len(kernel)
    bare = kernel - np.diag(np.diag(kernel))
    rows, total = bare.sum(axis=1), bare.sum()
    return bare - rows[:, None] / (n - 2) - rows[None, :] / (n - 2) + total / ((n - 1) * (n - 2))


def svcca_by_svd(x: Floats, y: Floats, share: float) -> float:
    """Raghu et al. 2017: SVD of the activations, then CCA of what is kept by QR."""
    kept = []
    for v in (x, y):
        u, s, _ = np.linalg.svd(v - v.mean(axis=0), full_matrices=False)
        held = np.cumsum(s**2) / (s**2).sum()
        count = next(number for number, value in enumerate(held, start=1) if value >= share)
        kept.append(np.linalg.qr(u[:, :count] * s[:count])[0])
    return np.linalg.svd(kept[0].T @ kept[1], compute_uv=False).mean()


def other_cosine(x: Floats, y: Floats) -> float:
    cosines = cosine_similarity(x, y)
    return cosines[~np.eye(len(x), dtype=bool)].mean()


def expected(x: Floats, y: Floats, share: float = 0.99) -> dict[str, float]:
    directions = [PCA(PRINCIPAL).fit(v).components_.T for v in (x, y)]
    angles = subspace_angles(*directions)
    return {
        "cka": kernel_cka(x, y),
        "cka_debiased": hsic_by_loops(x, y) / np.sqrt(hsic_by_loops(x, x) * hsic_by_loops(y, y)),
        "svcca": svcca_by_svd(x, y, share),
        "principal_cosine": (np.cos(angles) ** 2).mean(),
        "principal_angle": np.degrees(angles.max()),
        "token_cosine": np.diag(cosine_similarity(x, y)).mean(),
        "other_token_cosine": other_cosine(x, y),
    }


def values(texts: list[Text], **settings: int) -> dict[tuple[int, int], dict[str, float]]:
    frame = answer(Layers(**{"principal": PRINCIPAL, **settings}), texts).tables[0].frame
    return {(row["depth"], row["other"]): row for row in frame.to_dict("records")}


@pytest.mark.parametrize("variance", [99, 70, 100])
def test_every_value_is_that_of_the_whole_array(texts: list[Text], variance: int) -> None:
    vectors, found = stacked(texts), values(texts, variance=variance)
    assert len(found) == 9
    for (first, second), row in found.items():
        for name, value in expected(vectors[first], vectors[second], min(variance / 100, 1 - 1e-9)).items():
            assert row[name] == pytest.approx(value, rel=1e-8, abs=1e-5), (first, second, name)
        assert (row["sampled"], row["tokens"]) == (vectors.shape[1], vectors.shape[1])


def test_directions_of_two_depths_are_those_of_the_one_that_keeps_fewer(texts: list[Text]) -> None:
    # A channel of depth 1 holds most of its variance.
    flat = [(about, own.copy()) for about, own in texts]
    for _, own in flat:
        own[1, :, 0] *= 50
    vectors, found, kept = stacked(flat), values(flat, variance=70), []
    for own in vectors:
        squares = np.linalg.svd(own - own.mean(axis=0), compute_uv=False) ** 2
        kept.append(int((np.cumsum(squares) < 0.7 * squares.sum()).sum()) + 1)
    assert len(set(kept)) > 1
    for (first, second), row in found.items():
        assert row["svcca_directions"] == min(kept[first], kept[second])


def test_canonical_correlations_are_those_of_scikit_learn() -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(300, 3))
    y = x @ generator.normal(size=(3, 2)) + generator.normal(size=(300, 2))
    x, y = x - x.mean(axis=0), y - y.mean(axis=0)
    first, second = CCA(2, max_iter=5000, tol=1e-12).fit_transform(x, y)
    correlations = [np.corrcoef(first[:, at], second[:, at])[0, 1] for at in range(2)]
    own = svcca(whitening(x.T @ x, 1.0), x.T @ y, whitening(y.T @ y, 1.0))
    assert own == pytest.approx(np.mean(correlations), abs=1e-6)


def test_chance_is_what_exchanged_tokens_give(texts: list[Text]) -> None:
    analysis = Layers(principal=PRINCIPAL)
    sample = state_of(analysis, texts, texts[0]).sample.settled().vectors.astype(float)
    found, half = values(texts), len(sample) // 2
    order = [*range(len(sample) - half, len(sample)), *range(len(sample) - half)]
    for (first, second), row in found.items():
        if first <= second:
            x, y = sample[:, first], sample[order, second]
            assert row["cka_chance"] == pytest.approx(kernel_cka(x, y), rel=1e-9)
            assert row["svcca_chance"] == pytest.approx(svcca_by_svd(x, y, 0.99), rel=1e-8)
        assert row["svcca_chance"] == found[second, first]["svcca_chance"]


def test_unrelated_depths_are_alike_by_chance_unless_debiased() -> None:
    generator = np.random.default_rng(0)
    unrelated = [(text_of(1, ["w"] * 60), generator.normal(size=(2, 60, 40)))]
    row = values(unrelated)[0, 1]
    assert row["cka"] > 0.3
    assert row["cka"] == pytest.approx(row["cka_chance"], abs=0.05)
    assert abs(row["cka_debiased"]) < 0.1


def test_rotating_shifting_and_scaling_a_depth_changes_neither_cka_nor_svcca(texts: list[Text]) -> None:
    turn = ortho_group.rvs(9, random_state=0)
    moved = [(about, np.stack([v[0], 3 * v[1] @ turn + 5.0, v[2]])) for about, v in texts]
    before, after = values(texts), values(moved)
    for at, row in before.items():
        for name in ("cka", "cka_debiased", "svcca", "cka_chance", "svcca_chance"):
            assert after[at][name] == pytest.approx(row[name], rel=1e-8), name
    assert after[0, 1]["token_cosine"] != pytest.approx(before[0, 1]["token_cosine"], abs=0.1)


# N3


def test_n3_what_does_not_vary_has_cosines_alone() -> None:
    same = [(text_of(line, ["a", "b", "a"]), np.full((2, 3, 12), 1 / 3)) for line in (1, 2, 3)]
    alone = [(text_of(1, ["a"]), np.ones((2, 1, 12)))]
    for given in (same, alone):
        row = values(given)[0, 1]
        assert row["token_cosine"] == pytest.approx(1.0)
        assert np.isnan([row[name] for name in ("cka", "cka_debiased", "svcca", "principal_cosine")]).all()
    assert values(same)[0, 1]["other_token_cosine"] == pytest.approx(1.0)
    assert np.isnan(values(alone)[0, 1]["other_token_cosine"])


def test_n3_collinear_tokens_are_alike_and_have_no_second_direction() -> None:
    line = np.arange(6.0)[:, None] * np.ones(12)
    row = values([(text_of(1, ["w"] * 6), np.stack([line, -2 * line + 1]))])[0, 1]
    assert [row[name] for name in ("cka", "cka_debiased", "svcca")] == pytest.approx([1.0] * 3)
    assert row["svcca_directions"] == 1
    assert np.isnan(row["principal_cosine"])


# Sample and settings


def test_a_sample_has_its_size_and_depends_on_neither_order_nor_cuts(texts: list[Text]) -> None:
    analysis = Layers(tokens=20, principal=PRINCIPAL)
    whole = analysis.finalize(state_of(analysis, texts, texts[0]), None).tables[0].frame
    first, second = (state_of(analysis, part, texts[0]) for part in (texts[5:][::-1], texts[:5]))
    assert analysis.finalize(first.merge(second), None).tables[0].frame.equals(whole)
    assert set(whole["sampled"]) == {20}
    other = answer(Layers(tokens=20, principal=PRINCIPAL, seed=1), texts).tables[0].frame
    assert other["token_cosine"].iloc[1] != whole["token_cosine"].iloc[1]


def test_chosen_layers_have_the_rows_they_have_among_all(texts: list[Text]) -> None:
    every = answer(Layers(principal=PRINCIPAL), texts).tables[0].frame
    some = answer(Layers(principal=PRINCIPAL, layers=Selection("1")), texts).tables[0].frame
    assert set(some["depth"]) == {1, 2}
    assert some.equals(every[(every["depth"] > 0) & (every["other"] > 0)].reset_index(drop=True))


def test_special_tokens_can_be_dropped(texts: list[Text]) -> None:
    vectors = stacked([(about, vectors[:, 1:-1]) for about, vectors in texts])
    frame = answer(Layers(special="drop", principal=PRINCIPAL), texts).tables[0].frame
    assert set(frame["sampled"]) == {vectors.shape[1]}
    assert frame["cka"].iloc[1] == pytest.approx(kernel_cka(vectors[0], vectors[1]), rel=1e-9)


def test_settings_that_cannot_be_satisfied_are_refused(texts: list[Text]) -> None:
    with pytest.raises(SettingsError, match="101 %"):
        Layers(variance=101).listing()
    with pytest.raises(SettingsError, match="no 10 principal"):
        state_of(Layers(principal=10), [], texts[0])


# MiniLM


def test_minilm_has_the_values_of_the_reference_pass(minilm: LoadedModel) -> None:
    lines = ["The fisherman sat down by the river bank.", "The bank was closed.", "He rowed to the other bank."]
    encoder = Encoder(minilm.tokenizer, minilm.max_tokens)
    encoded = [encoder.encode(line, line=number) for number, line in enumerate(lines, start=1)]
    result = analyse_corpus([Layers(principal=PRINCIPAL)], minilm, encoded, Pass())[0]
    passes = [reference.tokenize(line) for line in lines]
    hidden = np.concatenate([reference.forward(one.ids, one.segments)["hidden_states"] for one in passes], axis=1)
    frame = result.tables[0].frame.set_index(["depth", "other"])
    for first, second in ((0, 1), (2, 6), (5, 5)):
        for name, value in expected(hidden[first], hidden[second]).items():
            assert frame.loc[(first, second), name] == pytest.approx(value, abs=2e-3 if "angle" in name else 1e-5), name
