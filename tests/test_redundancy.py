"""Redundancy: scikit-learn and dense SVDs, tensorly, planted structure, invariances, and the command line."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import reference
import tiny
from command import Run, assert_error, content, files_of
from numpy.typing import NDArray
from scipy.spatial.distance import jensenshannon
from scipy.stats import ortho_group
from sklearn.decomposition import PCA
from tensorly.cp_tensor import cp_to_tensor
from tensorly.decomposition import parafac

from analyses.kit import sharing
from analyses.kit.analysis import Selection
from analyses.kit.captured import captured_by_matrix, captured_variance, components_to_reach, crossings, together
from analyses.kit.sharing import Factors, LayerTensor, Sharing, by_least_squares, shared
from analyses.redundancy import Redundancy
from bertgeo_cli.corpus import Encoder
from bertgeo_cli.models import LoadedModel, load_model
from bertgeo_cli.run import Pass, analyse_corpus, analyse_weights

Floats = NDArray[np.float64]
SHARES = (0.5, 0.9, 0.95, 0.99)
LAYERS, HEADS, CHANNELS = 6, 12, 32


def of_weights(loaded: LoadedModel, **settings: Any) -> dict[str, pd.DataFrame]:
    result = analyse_weights([Redundancy(**settings)], loaded)[0]
    return {table.name: table.frame for table in result.tables}


def raw(layer: int, part: str) -> Floats:
    """W of MiniLM as the paper writes it, (width, heads x channels), from the checkpoint itself."""
    return reference.weights(f"encoder.layer.{layer}.attention.self.{part}.weight").T


def raw_head(layer: int, part: str, head: int) -> Floats:
    return raw(layer, part)[:, head * CHANNELS : (head + 1) * CHANNELS]


def shares_by_svd(matrix: Floats, count: int) -> list[float]:
    sigma = np.linalg.svd(matrix, compute_uv=False)
    return [float(sum(sigma[: at + 1] ** 2) / sum(sigma**2)) for at in range(count)]


def reached_by_loop(captured: list[float], share: float) -> float:
    return next(count for count, value in enumerate(captured, start=1) if value >= share - 1e-9)


def random_layer(seed: int = 0, heads: int = 4, width: int = 24, channels: int = 6) -> LayerTensor:
    draws = np.random.default_rng(seed)
    return LayerTensor(*(draws.normal(size=(heads, width, channels)) for _ in range(2)))


def dense(layer: LayerTensor) -> Floats:
    """T[q, h, k], head by head."""
    return np.stack([q @ k.T for q, k in zip(layer.query, layer.key, strict=True)], axis=1)


def tensorly_error(layer: LayerTensor, factors: Factors) -> float:
    rebuilt = cp_to_tensor((None, [factors.query, factors.mixing, factors.key]))
    return float(np.linalg.norm(dense(layer) - rebuilt) / np.linalg.norm(dense(layer)))


# Captured variance


def test_captured_variance_by_hand() -> None:
    # Singular values 4, 3 and 0: squares 16, 9 and 0 of 25.
    found = captured_variance(np.diag([3.0, 4.0, 0.0]))
    assert found == pytest.approx([0.64, 1.0, 1.0])
    assert components_to_reach(found, [0.5, 0.64, 0.65, 0.99]).tolist() == [1, 1, 2, 2]
    assert crossings(np.array([0.5, 0.9]), [0.25, 0.5, 0.7]) == pytest.approx([0.5, 1.0, 1.5])
    assert np.isnan(captured_variance(np.zeros((3, 2)))).all()
    assert np.isnan(components_to_reach(captured_variance(np.zeros((3, 2))), [0.5])).all()
    assert np.isnan(crossings(np.full(2, np.nan), [0.5])).all()


def test_centred_rows_give_the_explained_variance_of_scikit_learns_pca() -> None:
    layer = random_layer()
    found = captured_by_matrix(layer.query + 3.0, layer.key - 2.0, center=True)
    for head in range(4):
        q, k = layer.query[head] + 3.0, layer.key[head] - 2.0
        for name, matrix in (("QK", q @ k.T), ("K", k), ("Q", q)):
            wanted = np.cumsum(PCA(n_components=6).fit(matrix).explained_variance_ratio_)
            np.testing.assert_allclose(found[name][head], wanted, rtol=1e-10)


@pytest.mark.parametrize("center", [False, True])
def test_every_row_of_minilm_equals_a_dense_svd_of_the_raw_checkpoint(minilm: LoadedModel, center: bool) -> None:
    tables = of_weights(minilm, layers=Selection("0,3"), center=center)
    keys = ["scope", "layer", "head", "matrix"]
    captured = tables["redundancy-captured"].astype({"head": object}).fillna({"head": -1}).set_index(keys)["captured"]
    reached = tables["redundancy-components"].astype({"head": object}).fillna({"head": -1}).set_index(keys)
    for layer in (0, 3):
        for scope, head in (("head", 0), ("head", 7), ("layer", -1)):
            q, k = (raw(layer, part) if head < 0 else raw_head(layer, part, head) for part in ("query", "key"))
            for name, matrix in (("QK", q @ k.T), ("K", k), ("Q", q)):
                own = matrix - matrix.mean(axis=0) if center else matrix
                wanted = shares_by_svd(own, 384 if head < 0 else CHANNELS)
                np.testing.assert_allclose(captured[scope, layer, head, name], wanted, atol=1e-10)
                for share in SHARES:
                    found = reached.loc[(scope, layer, head, name), f"components_{share}"]
                    assert found == reached_by_loop(wanted, share)


def test_together_the_products_sum(minilm: LoadedModel) -> None:
    layer = random_layer()
    query, key = together(layer.query)[0], together(layer.key)[0]
    np.testing.assert_allclose(query @ key.T, dense(layer).sum(axis=1))


def test_the_summary_is_the_mean_over_layers_and_heads(minilm: LoadedModel) -> None:
    tables = of_weights(minilm, components="1,8")
    summary = tables["redundancy"].set_index(["scope", "matrix"])
    for (scope, matrix), rows in tables["redundancy-components"].groupby(["scope", "matrix"]):
        values = rows["components_0.9"]
        assert len(values) == (LAYERS * HEADS if scope == "head" else LAYERS)
        assert summary.loc[(scope, matrix), "components_0.9"] == pytest.approx(sum(values) / len(values))
        assert summary.loc[(scope, matrix), "components_0.9_std"] == pytest.approx(np.std(values, ddof=1))
    curves = np.mean([shares_by_svd(raw(layer, "key"), 384) for layer in range(LAYERS)], axis=0)
    at = int(np.argmax(curves >= 0.9))
    wanted = at + (0.9 - curves[at - 1]) / (curves[at] - curves[at - 1])
    assert summary.loc[("layer", "K"), "mean_curve_0.9"] == pytest.approx(wanted)
    assert sorted(tables["redundancy-captured"]["components"].unique()) == [1, 8]


def test_heads_that_are_copies_need_no_more_directions_together_than_one_alone() -> None:
    layer = random_layer()
    copies = [np.repeat(part[:1], 4, axis=0) for part in (layer.query, layer.key)]
    alone, all_heads = captured_by_matrix(*copies), captured_by_matrix(*map(together, copies))
    for name in ("QK", "K", "Q"):
        np.testing.assert_allclose(all_heads[name][0, :6], alone[name][0])
        np.testing.assert_allclose(all_heads[name][0, 5:], 1.0)
    assert captured_by_matrix(together(layer.query), together(layer.key))["Q"][0, 5] < 0.7


def test_rotating_the_residual_space_changes_nothing_and_centring_alone_is_tied_to_its_axes() -> None:
    layer, rotation = random_layer(), ortho_group.rvs(24, random_state=1)
    turned = [rotation @ part for part in (layer.query, layer.key)]
    for name, values in captured_by_matrix(layer.query, layer.key).items():
        np.testing.assert_allclose(captured_by_matrix(*turned)[name], values)
    centred = [captured_by_matrix(*pair, center=True)["Q"] for pair in ((layer.query, layer.key), turned)]
    assert np.abs(centred[0] - centred[1]).max() > 1e-3


# Shared keys and queries


def test_least_squares_takes_the_steps_of_tensorlys_parafac() -> None:
    layer = random_layer()
    for iterations in (1, 2, 30):
        how = Sharing(10, iterations, 0.0, "random", seed=5)
        factors = shared(layer, how).factors
        initial = np.random.RandomState(5)
        start = [initial.random_sample((rows, 10)) for rows in (24, 4, 24)]
        _, wanted = parafac(dense(layer), 10, n_iter_max=iterations, init=(np.ones(10), start), tol=0)
        for found, other in zip((factors.query, factors.mixing, factors.key), wanted, strict=True):
            np.testing.assert_allclose(found, other, rtol=1e-6, atol=1e-8)


def test_the_random_start_is_tensorlys_own() -> None:
    layer, how = random_layer(), Sharing(7, 3, 0.0, "random", seed=11)
    _, wanted = parafac(dense(layer), 7, n_iter_max=3, init="random", random_state=11, tol=0)
    np.testing.assert_allclose(shared(layer, how).factors.query, wanted[0], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("initial", ["directions", "random"])
def test_both_solvers_find_the_same_and_stop_at_the_same_iteration(initial: Any) -> None:
    layer, how = random_layer(3), Sharing(9, 400, 1e-5, initial)
    ours, theirs = shared(layer, how), shared(layer, dataclasses.replace(how, solver="tensorly"))
    assert (ours.iterations, ours.converged) == (theirs.iterations, theirs.converged)
    assert ours.converged
    assert 2 < ours.iterations < 400
    np.testing.assert_allclose(ours.factors.key, theirs.factors.key, rtol=1e-5, atol=1e-7)


def test_without_a_tolerance_both_solvers_run_all_iterations() -> None:
    layer, how = random_layer(1), Sharing(9, 5, 0.0)
    ours, theirs = shared(layer, how), shared(layer, dataclasses.replace(how, solver="tensorly"))
    assert (ours.iterations, ours.converged) == (theirs.iterations, theirs.converged) == (5, False)


def test_the_error_is_that_of_tensorlys_reconstruction() -> None:
    layer = random_layer(2)
    factors = shared(layer, Sharing(9)).factors
    whole = np.linalg.norm(layer.errors(factors)) / np.linalg.norm(layer.norms)
    assert whole == pytest.approx(tensorly_error(layer, factors))
    for head in range(4):
        own = dense(layer)[:, head] - factors.query @ np.diag(factors.mixing[head]) @ factors.key.T
        assert layer.errors(factors)[head] == pytest.approx(np.linalg.norm(own))
    np.testing.assert_allclose(layer.norms, np.linalg.norm(dense(layer), axis=(0, 2)))


def test_the_full_size_is_exact_without_a_decomposition() -> None:
    layer = random_layer()
    found = shared(layer, Sharing(24))
    assert (found.iterations, found.converged) == (0, True)
    assert tensorly_error(layer, found.factors) < 1e-15
    assert (layer.errors(found.factors) < 1e-14 * layer.norms).all()
    assert set(found.factors.mixing.ravel()) == {0.0, 1.0}


def test_a_planted_decomposition_is_recovered() -> None:
    """Heads that do share their keys and queries: W_Q = A diag(b_h), W_K = C."""
    draws = np.random.default_rng(4)
    a, b, c = draws.normal(size=(24, 7)), draws.normal(size=(4, 7)), draws.normal(size=(24, 7))
    layer = LayerTensor(a * b[:, None, :], np.repeat(c[None], 4, axis=0))
    found = shared(layer, Sharing(7, 1000, 1e-10, "random"))
    assert found.converged
    assert tensorly_error(layer, found.factors) < 1e-6
    matched = np.abs(
        (a / np.linalg.norm(a, axis=0)).T @ (found.factors.query / np.linalg.norm(found.factors.query, axis=0))
    )
    np.testing.assert_allclose(matched.max(axis=1), 1.0, atol=1e-6)
    assert tensorly_error(layer, shared(layer, Sharing(6, 1000, 1e-10, "random")).factors) > 0.05


def test_copies_share_everything_and_what_no_head_shares_costs() -> None:
    layer = random_layer()
    copies = LayerTensor(*(np.repeat(part[:1], 4, axis=0) for part in (layer.query, layer.key)))
    for size in (6, 8):
        assert tensorly_error(copies, shared(copies, Sharing(size)).factors) < 1e-7
        assert copies.error_apart(size) > 0.5


def test_without_sharing_the_error_is_what_the_smaller_singular_values_hold() -> None:
    layer = random_layer()
    pooled = sorted(
        (value for matrix in dense(layer).swapaxes(0, 1) for value in np.linalg.svd(matrix)[1]), reverse=True
    )
    wanted = np.sqrt(sum(value**2 for value in pooled[10:]) / sum(value**2 for value in pooled))
    assert layer.error_apart(10) == pytest.approx(wanted)
    assert layer.error_apart(24) == pytest.approx(0.0, abs=1e-12)


def test_orthogonal_heads_have_nothing_to_share() -> None:
    basis = ortho_group.rvs(24, random_state=0)
    scales = np.geomspace(1, 20, 24).reshape(4, 1, 6)
    layer = LayerTensor(basis.reshape(24, 4, 6).transpose(1, 0, 2) * scales, basis.reshape(24, 4, 6).transpose(1, 0, 2))
    found = np.linalg.norm(layer.errors(shared(layer, Sharing(9)).factors)) / np.linalg.norm(layer.norms)
    assert found == pytest.approx(layer.error_apart(9))


def test_no_iteration_raises_the_error_and_the_start_is_no_worse_than_not_sharing(minilm: LoadedModel) -> None:
    layer = LayerTensor(*(np.stack([raw_head(1, part, head) for head in range(HEADS)]) for part in ("query", "key")))
    start, whole = layer.common(48), np.linalg.norm(layer.norms)
    errors = [np.linalg.norm(layer.errors(start)) / whole]
    for iterations in (1, 2, 4):
        factors = by_least_squares(layer, start, Sharing(48, iterations, 0.0)).factors
        errors.append(np.linalg.norm(layer.errors(factors)) / whole)
    assert errors == sorted(errors, reverse=True)
    assert errors[0] < layer.error_apart(48)


def test_heads_of_zeros_are_no_obstacle() -> None:
    layer = random_layer()
    some = LayerTensor(layer.query * np.array([1.0, 0.0, 0.0, 1.0])[:, None, None], layer.key)
    none = LayerTensor(np.zeros_like(layer.query), layer.key)
    for initial in ("directions", "random"):
        assert np.isfinite(some.errors(shared(some, Sharing(8, initial=initial)).factors)).all()
        np.testing.assert_allclose(none.errors(shared(none, Sharing(8, initial=initial)).factors), 0.0, atol=1e-9)
    assert np.isnan(none.error_apart(8))


def test_the_seed_decides_and_is_read_by_the_random_start_alone() -> None:
    layer = random_layer()
    first, again, other = (
        by_least_squares(layer, sharing._random(layer, how), how).factors.query
        for how in (Sharing(8, 5, 0.0, "random", seed) for seed in (1, 1, 2))
    )
    assert first.tobytes() == again.tobytes()
    assert np.abs(first - other).max() > 1e-3
    assert layer.common(8).query.tobytes() == random_layer().common(8).query.tobytes()


def test_permuting_heads_permutes_errors_and_mixing() -> None:
    layer, order = random_layer(), [2, 0, 3, 1]
    permuted = LayerTensor(layer.query[order], layer.key[order])
    first, second = (shared(one, Sharing(9)).factors for one in (layer, permuted))
    np.testing.assert_allclose(permuted.errors(second), layer.errors(first)[order], rtol=1e-6)
    np.testing.assert_allclose(np.abs(second.mixing), np.abs(first.mixing[order]), rtol=1e-5, atol=1e-7)


def test_rotating_the_residual_space_changes_no_error() -> None:
    layer, rotation = random_layer(), ortho_group.rvs(24, random_state=1)
    turned = LayerTensor(rotation @ layer.query, rotation @ layer.key)
    errors = [one.errors(shared(one, Sharing(9)).factors) for one in (layer, turned)]
    np.testing.assert_allclose(errors[0], errors[1], rtol=1e-6)


def test_tables_of_shared_sizes(tiny_model: LoadedModel) -> None:
    tables = of_weights(tiny_model, shared_size="48,8")
    table, heads = tables["redundancy-shared"], tables["redundancy-shared-heads"]
    assert table[["layer", "shared_size"]].to_numpy().tolist() == [[0, 8], [0, 48], [1, 8], [1, 48]]
    weights = tiny_model.head_weights()
    for _, row in table.iterrows():
        part = [part[row["layer"]].transpose(1, 2).numpy() for part in (weights.query, weights.key)]
        layer = LayerTensor(*part)
        factors = shared(layer, Sharing(row["shared_size"])).factors
        assert row["error"] == pytest.approx(tensorly_error(layer, factors), abs=1e-12)
        own = heads[(heads["layer"] == row["layer"]) & (heads["shared_size"] == row["shared_size"])]["error"]
        wanted = np.linalg.norm(
            dense(layer) - cp_to_tensor((None, [factors.query, factors.mixing, factors.key])), axis=(0, 2)
        )
        np.testing.assert_allclose(own * layer.norms, wanted, atol=1e-10)
    assert table["converged"].tolist()[1::2] == [True, True]


# On texts

TEXTS = ("The fisherman sat down by the river bank.", "Hello.", "Was the cat's mat wet, or did it only look wet?")


def on_texts(loaded: LoadedModel, texts: Sequence[str], **settings: Any) -> pd.DataFrame:
    encoder = Encoder(loaded.tokenizer, loaded.max_tokens)
    encoded = [encoder.encode(text, line=line) for line, text in enumerate(texts, start=1)]
    companion = Redundancy(**settings).on_texts()
    table = analyse_corpus([companion], loaded, encoded, Pass())[0].tables[0]
    return table.frame.set_index(["layer", "head", "shared_size"])


def softmax_row(row: Sequence[float]) -> list[float]:
    raised = [math.exp(value - max(row)) for value in row]
    return [value / sum(raised) for value in raised]


def values_by_loops(layer: int, head: int, x: Floats, scores: Floats, factors: Factors) -> dict[str, float]:
    """Everything by loops over queries and keys, from the raw checkpoint: W_Q x + b_Q, W_K x + b_K, scale sqrt(dk)."""
    name = f"encoder.layer.{layer}.attention.self"
    bias = reference.weights(f"{name}.query.bias")[head * CHANNELS : (head + 1) * CHANNELS]
    key_bias = reference.weights(f"{name}.key.bias")[head * CHANNELS : (head + 1) * CHANNELS]
    query_weight, content = raw_head(layer, "query", head), raw_head(layer, "key", head) @ bias
    form = factors.query @ np.diag(factors.mixing[head]) @ factors.key.T
    apart, moved, centred, own, divergences = [], [], [], [], []
    for i, row in enumerate(scores.tolist()):
        constant = float((x[i] @ query_weight + bias) @ key_bias) / math.sqrt(CHANNELS)
        true = [value - constant for value in row]
        other = [float(x[i] @ form @ y + y @ content) / math.sqrt(CHANNELS) for y in x]
        steps = [a - b for a, b in zip(true, other, strict=True)]
        apart += [abs(step) for step in steps]
        centred += [step - sum(steps) / len(steps) for step in steps]
        own += [value - sum(true) / len(true) for value in true]
        p, q = softmax_row(row), softmax_row(other)
        moved += [abs(a - b) for a, b in zip(p, q, strict=True)]
        divergences.append(jensenshannon(p, q) ** 2)
    return {
        "logit_error": sum(apart) / len(apart),
        "logit_relative": math.sqrt(sum(value**2 for value in centred) / sum(value**2 for value in own)),
        "attention_error": sum(moved) / len(moved),
        "divergence": sum(divergences) / len(divergences),
        "logit_largest": max(apart),
        "attention_largest": max(moved),
    }


def test_errors_on_texts_equal_loops_from_the_raw_checkpoint(minilm: LoadedModel) -> None:
    """The scores of the reference pass hold b_K: leaving it out of both sides must not move attention."""
    settings = {"layers": Selection("0,4"), "shared_size": "48", "iterations": 5}
    table = on_texts(minilm, TEXTS, **settings)
    for layer in (0, 4):
        tensor = LayerTensor(*(np.stack([raw_head(layer, part, at) for at in range(12)]) for part in ("query", "key")))
        factors = shared(tensor, Sharing(48, 5)).factors
        for head in (0, 7):
            found = []
            for text in TEXTS:
                tokens = reference.tokenize(text)
                passed = reference.forward(tokens.ids, tokens.segments)
                x, scores = passed["hidden_states"][layer], passed["scores"][layer, head]
                found.append(values_by_loops(layer, head, x, scores, factors))
            row = table.loc[(layer, head, 48)]
            for name in found[0]:
                values = [one[name] for one in found]
                wanted = max(values) if name.endswith("largest") else sum(values) / len(values)
                assert row[name] == pytest.approx(wanted, rel=2e-4, abs=1e-6), name


def test_the_full_size_changes_no_logit_and_no_attention(minilm: LoadedModel) -> None:
    table = on_texts(minilm, TEXTS, shared_size="384")
    assert table["logit_largest"].max() < 1e-12
    assert table["attention_largest"].max() < 1e-13
    assert table["divergence"].between(0, 1e-14).all()
    assert (table["texts"] == 3).all()


def test_more_shared_dimensions_leave_attention_closer(minilm: LoadedModel) -> None:
    table = on_texts(minilm, TEXTS, layers=Selection("2"), shared_size="24,96,288", iterations=10)
    means = table.groupby("shared_size")[["logit_relative", "attention_error", "divergence"]].mean()
    assert (means.diff().dropna() < 0).all(axis=None)
    assert table["divergence"].between(0, math.log(2)).all()
    assert table["attention_largest"].between(0, 1).all()


def test_layers_that_share_weights_each_have_their_own_errors(tmp_path: Path) -> None:
    loaded = load_model(str(tiny.tiny_family("albert", tmp_path)), device="cpu", offline=True)
    table = on_texts(loaded, ["the cat sat on the mat"], shared_size="8")
    assert sorted(set(table.index.get_level_values("layer"))) == [0, 1, 2, 3]
    assert table["logit_error"].groupby("layer").mean().nunique() == 4


def test_texts_without_a_shared_size_are_refused(fast: Run) -> None:
    assert Redundancy().on_texts() is None
    assert_error(fast("redundancy", "the cat"), 2, "a text was given", "weights alone")


def test_a_text_and_a_corpus_over_shards_and_workers(fast: Run, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("the cat sat\na dog ran\nthe old river bank\n", encoding="utf-8")
    line = ("redundancy", "--shared-size", "8", "--corpus", "corpus.txt", "--shard-texts", "2")
    assert fast(*line, "-o", "one").exit_code == 0
    assert fast(*line, "--workers", "2", "-o", "two").exit_code == 0
    assert files_of(tmp_path / "one")["redundancy-texts.csv"] == files_of(tmp_path / "two")["redundancy-texts.csv"]
    assert fast(*line[:-1], "100", "-o", "whole").exit_code == 0
    cut, whole = (pd.read_csv(tmp_path / name / "redundancy-texts.csv") for name in ("one", "whole"))
    assert (cut["texts"] == 3).all()
    pd.testing.assert_frame_equal(cut, whole, rtol=1e-9)
    done = fast("redundancy", "the cat", "--shared-size", "8", "--figures", "png", "-o", "drawn")
    assert done.exit_code == 0, done.output
    assert {"redundancy-texts.png", "redundancy-shared.png"} <= set(files_of(tmp_path / "drawn"))


# The command line


def test_redundancy_from_the_command_line(fast: Run, tmp_path: Path) -> None:
    done = fast("redundancy", "--shared-size", "8,16", "--iterations", "20", "-o", "first")
    assert done.exit_code == 0, done.output
    assert "of 4 decompositions converged" in done.stderr
    assert fast("redundancy", "--shared-size", "8,16", "--iterations", "20", "-o", "second").exit_code == 0
    assert files_of(tmp_path / "first") == files_of(tmp_path / "second")
    run = content(tmp_path / "first")
    assert run["settings"]["iterations"] == 20
    assert "redundancy-shared.csv" in run["files"]


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (("--shared-size", "49"), ("no shared size 49 in 4 x 12 channels", "1 to 48")),
        (("--shared-size", "0"), ("shared size 0 does not exist",)),
        (("--shared-size", "8,x"), ("'8,x' is no shared size",)),
        (("--shares", "0.5,1"), ("no component captures a share of 1 ", "above 0 and below 1")),
        (("--shares", "half"), ("'half' are no numbers",)),
        (("--components", "0"), ("component 0 does not exist",)),
        (("--components", "99"), ("there are no 99 components", "1 to 48")),
        (("--heads", "4"), ("head 4 does not exist",)),
        (("--heads", "3", "--shared-size", "13"), ("no shared size 13 in 1 x 12 channels", "1 to 12")),
        (("--seed", str(2**32), "--shared-size", "8", "--initial", "random"), ("--seed 4294967296", "4294967295")),
    ],
)
def test_settings_that_cannot_be_satisfied_are_two_lines(fast: Run, options: tuple[str, ...], parts: Any) -> None:
    assert_error(fast("redundancy", *options), 2, *parts)


def test_without_the_extra_tensorly_is_asked_for(fast: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = importlib.util.find_spec
    monkeypatch.setattr(sharing, "find_spec", lambda name: None if name == "tensorly" else whole(name))
    done = fast("redundancy", "--shared-size", "8", "--solver", "tensorly")
    assert_error(done, 2, "--solver tensorly needs tensorly", "pip install 'bertgeo[tensor]'")
    assert fast("redundancy", "--shared-size", "8").exit_code == 0


def test_settings_of_a_plan_may_be_numbers_with_a_point(fast: Run, tmp_path: Path) -> None:
    line = ("run", "--analyses", "redundancy", "--set", "redundancy.shared-size=8")
    assert fast(*line, "--set", "redundancy.tolerance=0.5", "-o", "loose").exit_code == 0
    loose = pd.read_csv(tmp_path / "loose" / "redundancy" / "redundancy-shared.csv")
    assert (loose["iterations"] == 2).all()
    assert_error(fast(*line, "--set", "redundancy.tolerance=-1"), 2, "cannot be -1.0", "0 or more")
    assert_error(fast(*line, "--set", "redundancy.tolerance=much"), 2, "cannot be 'much'", "a number")


def test_shared_layers_stand_once(tmp_path: Path) -> None:
    loaded = load_model(str(tiny.tiny_family("albert", tmp_path)), device="cpu", offline=True)
    tables = of_weights(loaded, layers=Selection("1-3"), shared_size="8")
    assert set(tables["redundancy-components"]["layer"]) == {1}
    assert tables["redundancy-shared"]["layer"].tolist() == [1]


def test_some_heads_are_a_tensor_of_their_own(tiny_model: LoadedModel) -> None:
    table = of_weights(tiny_model, heads=Selection("1,3"), shared_size="24")["redundancy-shared"]
    assert table["error"].max() < 1e-12
    assert (table["iterations"] == 0).all()
