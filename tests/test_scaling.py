"""Scaling by sqrt(dk): by hand, against autograd, plain float64 loops over MiniLM, and transformers' own weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import reference
import tiny
import torch
import transformers
from command import Run, assert_error, content, files_of
from scipy.stats import kurtosis, skew
from vectors import text_of

from analyses.kit.dot_products import SPREAD, DotProducts, variance_parts
from analyses.kit.record import ForwardRecord, ModelShape
from analyses.kit.result import Lines
from analyses.kit.scaling_tables import row_result, scaling_result
from analyses.kit.temperature import SWEEP, jacobian_norm, softmax_at, sweep_values, temperatures
from bertgeo_cli.corpus import Encoder
from bertgeo_cli.models import LoadedModel, at_initialisation, load_model
from bertgeo_cli.recording import record

TEXTS = ("The river bank.", "Was the cat's mat wet, or did it only look wet?", "Play.")


def plain_softmax(scores: list[float], tau: float) -> list[float]:
    raised = [math.exp((score - max(scores)) / tau) for score in scores]
    return [one / sum(raised) for one in raised]


def plain_values(scores: list[float], tau: float) -> list[float]:
    """The values of SWEEP from their definitions, entry by entry of the Jacobian."""
    p = plain_softmax(scores, tau)
    entropy = -sum(one * math.log(one) for one in p if one > 0)
    entries = [(p[i] if i == j else 0.0) - p[i] * p[j] for i in range(len(p)) for j in range(len(p))]
    norm = math.sqrt(sum(entry**2 for entry in entries))
    return [entropy, entropy / math.log(len(p)), max(p), norm, norm / tau]


# The toy row


@pytest.fixture
def row(run: Run, tmp_path: Path) -> Path:
    done = run("scaling", "--scores", "5,20,5", "--dk", "20", "-o", "row", "--model", "nowhere", "--figures", "none")
    assert done.exit_code == 0, done.output
    assert "Before: entropy 9.789e-06 nats, largest weight 0.999999" in done.stderr
    assert "After / sqrt(dk) = 4.47214: entropy 0.2866 nats, largest weight 0.934683" in done.stderr
    return tmp_path / "row"


def test_every_number_of_the_toy_row_by_hand(row: Path) -> None:
    frame = pd.read_csv(row / "scaling-row.csv")
    # 5 / sqrt(20) = sqrt(5) / 2, 20 / sqrt(20) = 2 sqrt(5): the outer keys have e^-15 and e^(-1.5 sqrt(5)) of it.
    before, after = math.exp(-15), math.exp(-1.5 * math.sqrt(5))
    assert frame["key"].tolist() == [0, 1, 2]
    assert frame["score"].tolist() == [5, 20, 5]
    assert frame["scaled"].tolist() == pytest.approx([math.sqrt(5) / 2, 2 * math.sqrt(5), math.sqrt(5) / 2], rel=1e-14)
    for name, small in (("weight_before", before), ("weight_after", after)):
        expected = [small / (1 + 2 * small), 1 / (1 + 2 * small), small / (1 + 2 * small)]
        assert frame[name].tolist() == pytest.approx(expected, rel=1e-12, abs=0)


def test_every_number_of_its_sweep_by_hand(row: Path) -> None:
    frame = pd.read_csv(row / "scaling-row-sweep.csv")
    grid = sorted({1.0, *(math.sqrt(20) * 2.0**step for step in range(-4, 5))})
    assert frame["tau"].tolist() == pytest.approx(grid, rel=1e-15)
    assert frame["of_own"].tolist() == pytest.approx([tau / math.sqrt(20) for tau in grid], rel=1e-14)
    for at, tau in enumerate(grid):
        small = math.exp(-15 / tau)
        largest = 1 / (1 + 2 * small)
        low = small * largest
        entropy = math.log1p(2 * small) + 2 * low * 15 / tau  # -ln p = ln Z + (20 - score) / tau
        # diag(p) - p p^T: a (1 - a) once, b (1 - b) twice; beside the diagonal a b four times, b^2 twice.
        norm = math.sqrt((2 * low * largest) ** 2 + 2 * (low * (1 - low)) ** 2 + 4 * (largest * low) ** 2 + 2 * low**4)
        expected = [entropy, entropy / math.log(3), largest, norm, norm / tau]
        assert frame.loc[at, list(SWEEP)].tolist() == pytest.approx(expected, rel=1e-9, abs=0)


def test_one_score_and_equal_ones() -> None:
    single = sweep_values(np.array([3.0]), 2.0)
    assert single[[0, 2, 3, 4]].tolist() == [0, 1, 0, 0]
    assert math.isnan(single[1])
    even = sweep_values(np.full(4, -7.0), 0.5)
    assert even.tolist() == pytest.approx([math.log(4), 1, 1 / 4, math.sqrt(3) / 4, math.sqrt(3) / 2], rel=1e-14)


# The softmax and its Jacobian


@pytest.mark.parametrize("tau", [0.25, 1.0, 5.66])
def test_the_jacobian_is_that_of_autograd(tau: float) -> None:
    scores = torch.randn(5, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 3
    found = sweep_values(scores.numpy(), tau)
    for row, values in zip(scores, found, strict=True):
        by_scaled: Any = torch.autograd.functional.jacobian(lambda s: s.softmax(dim=-1), row / tau)
        by_raw: Any = torch.autograd.functional.jacobian(lambda s: (s / tau).softmax(dim=-1), row)
        assert values[3] == pytest.approx(float(torch.linalg.matrix_norm(by_scaled)), rel=1e-12)
        assert values[4] == pytest.approx(float(torch.linalg.matrix_norm(by_raw)), rel=1e-12)


def test_the_jacobian_norm_is_the_closed_form_and_at_most_a_half() -> None:
    weights = np.random.default_rng(0).dirichlet(np.full(6, 0.5), size=200)
    squares, cubes = (weights**2).sum(axis=1), (weights**3).sum(axis=1)
    np.testing.assert_allclose(jacobian_norm(weights) ** 2, squares - 2 * cubes + squares**2, rtol=1e-9, atol=1e-15)
    assert jacobian_norm(weights).max() <= 0.5


@pytest.mark.parametrize("gap", [1.0, 30.0, 60.0, 300.0])
def test_a_saturated_row_keeps_its_digits(gap: float) -> None:
    # Two scores: |J|_F = 2 p (1 - p), where 1 - p = e^-gap / (1 + e^-gap) is far below the rounding of p.
    left = math.exp(-gap) / (1 + math.exp(-gap))
    assert sweep_values(np.array([gap, 0.0]), 1.0)[3] == pytest.approx(2 * left * (1 - left), rel=1e-12, abs=0)


def test_no_temperature_overflows() -> None:
    assert softmax_at(np.array([-1e300, 0.0, 1e300]), 1e-300).tolist() == [0, 0, 1]
    assert softmax_at(np.array([1e3, 0.0]), 1e300).tolist() == [0.5, 0.5]


def test_the_grid_holds_one_and_the_models_own() -> None:
    own = math.sqrt(32)
    assert set(temperatures("grid", 32)) == {1.0, *(own * 2.0**step for step in range(-4, 5))}
    assert temperatures("3, 2", 9) == (1.0, 2.0, 3.0)


# The spread of q.k


def record_of(q: np.ndarray, k: np.ndarray, line: int = 1) -> ForwardRecord:
    """One text's q and k (head, token, channel) as a record of one layer."""
    heads, tokens, channels = q.shape
    shape = ModelShape("bert", heads, heads * channels, channels, (0,))
    layers = {name: [torch.tensor(part)[None]] for name, part in (("q", q), ("k", k))}
    return ForwardRecord(shape, [text_of(line, ["w"] * tokens)], layers)


def seen_of(*records: ForwardRecord, taus: tuple[float, ...] = (1.0,)) -> DotProducts:
    shape = records[0].shape
    seen = DotProducts.empty((0,), range(shape.heads), taus, shape.head_width)
    for one in records:
        seen.add(one)
    return seen


def spread(seen: DotProducts, head: int = 0, layer: int = 0) -> dict[str, float]:
    return dict(zip(SPREAD, seen.spread[layer, head].tolist(), strict=True))


def vectors(seed: int, heads: int, tokens: int, channels: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(heads, tokens, channels))


@pytest.mark.parametrize(("of_q", "of_k"), [(1.0, 1.0), (0.39, 2.5)])
def test_independent_entries_spread_as_the_root_of_dk_says(of_q: float, of_k: float) -> None:
    q, k = of_q * vectors(1, 4, 300, 64), of_k * vectors(2, 4, 300, 64)
    seen = seen_of(record_of(q, k))
    for head in range(4):
        found = spread(seen, head)
        assert found["std"] == pytest.approx(of_q * of_k * math.sqrt(64), rel=0.02)
        assert found["scaled_std"] == pytest.approx(of_q * of_k, rel=0.02)
        assert found["law"] == pytest.approx(1, rel=0.02)
        assert found["pair_share"] > 0.98


def test_the_law_does_not_see_the_scale_of_q_and_k_but_sees_dependence() -> None:
    q, k = vectors(1, 1, 50, 16), vectors(2, 1, 50, 16)
    plain, scaled = spread(seen_of(record_of(q, k))), spread(seen_of(record_of(7 * q, k / 3)))
    assert scaled["law"] == pytest.approx(plain["law"], rel=1e-12)
    assert scaled["std"] == pytest.approx(plain["std"] * 7 / 3, rel=1e-12)
    alike = np.repeat(vectors(3, 1, 50, 1), 16, axis=2)  # all channels the same: the sum of dk equal terms
    assert spread(seen_of(record_of(alike, alike)))["law"] == pytest.approx(math.sqrt(16), rel=0.1)


def test_moments_and_shares_are_those_of_plain_loops() -> None:
    texts = [(vectors(at, 2, tokens, 3) + 0.5, vectors(at + 9, 2, tokens, 3) - 1) for at, tokens in ((1, 4), (2, 7))]
    seen = seen_of(*(record_of(q, k, line) for line, (q, k) in enumerate(texts, start=1)))
    for head in range(2):
        products = [q[head] @ k[head].T for q, k in texts]
        every = np.concatenate([part.ravel() for part in products])
        q_entries, k_entries = (np.concatenate([pair[side][head].ravel() for pair in texts]) for side in (0, 1))
        parts = {"query_share": 0.0, "key_share": 0.0, "pair_share": 0.0, "text_share": 0.0}
        for (q, k), own in zip(texts, products, strict=True):
            q_mean, k_mean = q[head].mean(axis=0), k[head].mean(axis=0)
            for query in q[head]:
                for key in k[head]:
                    parts["query_share"] += ((query - q_mean) @ k_mean) ** 2
                    parts["key_share"] += (q_mean @ (key - k_mean)) ** 2
                    parts["pair_share"] += ((query - q_mean) @ (key - k_mean)) ** 2
                    parts["text_share"] += (own.mean() - every.mean()) ** 2
        total = ((every - every.mean()) ** 2).sum()
        expected = {
            "mean": every.mean(),
            "std": every.std(),
            "skewness": skew(every),
            "excess_kurtosis": kurtosis(every),
            "scaled_std": every.std() / math.sqrt(3),
            "query_std": q_entries.std(),
            "key_std": k_entries.std(),
            "law": every.std() / (math.sqrt(3) * q_entries.std() * k_entries.std()),
            **{name: part / total for name, part in parts.items()},
        }
        assert list(expected) == list(SPREAD)
        assert spread(seen, head) == pytest.approx(expected, rel=1e-9)
        assert sum(parts.values()) == pytest.approx(total, rel=1e-12)


def test_the_parts_of_the_variance_add_up() -> None:
    products = vectors(5, 3, 6, 4) * 4 + 2
    total = ((products - products.mean(axis=(1, 2), keepdims=True)) ** 2).sum(axis=(1, 2))
    np.testing.assert_allclose(variance_parts(products).sum(axis=-1), total, rtol=1e-12)


def test_parts_of_a_corpus_merge_to_the_whole() -> None:
    records = [record_of(vectors(at, 2, at, 3), vectors(at + 9, 2, at, 3), at) for at in range(2, 6)]
    whole, merged = seen_of(*records), seen_of(*records[:1]).merge(seen_of(*records[1:]))
    np.testing.assert_allclose(merged.spread, whole.spread, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(merged.sweep.mean, whole.sweep.mean, rtol=1e-12)
    assert merged.counts == whole.counts


# Real models


def test_minilm_is_measured_as_plain_float64_loops_measure_it(run: Run, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    done = run("scaling", "--corpus", "corpus.txt", "--tau", "3", "-o", "out", "--layers", "0,4", "--heads", "2,11")
    assert done.exit_code == 0, done.output
    heads = pd.read_csv(tmp_path / "out" / "scaling-heads.csv").set_index(["weights", "layer", "head"])
    sweep = pd.read_csv(tmp_path / "out" / "scaling-sweep.csv").set_index(["weights", "layer", "head"])
    assert len(heads) == 8
    passes = [reference.forward(tokens.ids, tokens.segments) for tokens in map(reference.tokenize, TEXTS)]
    for layer in (0, 4):
        for head in (2, 11):
            products = [one["scores"][layer][head] * math.sqrt(32) for one in passes]
            every = np.concatenate([own.ravel() for own in products])
            found = heads.loc[("trained", layer, head)]
            assert found["pairs"] == len(every)
            assert found["mean"] == pytest.approx(every.mean(), rel=1e-4, abs=1e-4)
            assert found["std"] == pytest.approx(every.std(), rel=1e-5)
            assert found["scaled_std"] == pytest.approx(every.std() / math.sqrt(32), rel=1e-5)
            q, k = (np.concatenate([one[name][layer][head].ravel() for one in passes]) for name in ("q", "k"))
            assert found["law"] == pytest.approx(every.std() / (math.sqrt(32) * q.std() * k.std()), rel=1e-5)
            at = sweep.loc[("trained", layer, head)].set_index("tau")
            assert at.index.tolist() == pytest.approx([1.0, 3.0, math.sqrt(32)])
            for tau in at.index:
                rows = [np.mean([plain_values(row.tolist(), tau) for row in own], axis=0) for own in products]
                assert at.loc[tau, list(SWEEP)].tolist() == pytest.approx(np.mean(rows, axis=0).tolist(), rel=1e-3)
                assert at.loc[tau, "entropy_std"] == pytest.approx(np.std(rows, axis=0, ddof=1)[0], rel=1e-3)


def test_at_the_models_own_temperature_stands_the_recorded_attention(minilm: LoadedModel) -> None:
    text = Encoder(minilm.tokenizer, minilm.max_tokens).encode(TEXTS[1])
    found = record(minilm, [text], needs=frozenset({"q", "k", "scores", "attention"}))
    q, k, scores, attention = (found.of_text(name, 0) for name in ("q", "k", "scores", "attention"))
    products = q @ k.swapaxes(-1, -2)
    np.testing.assert_allclose(products, scores * math.sqrt(32), atol=1e-4)
    np.testing.assert_allclose(softmax_at(products, math.sqrt(32)), attention, atol=1e-5)


@pytest.fixture(scope="module", params=tiny.FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tiny.tiny_family(request.param, tmp_path_factory.mktemp("models") / request.param)
    return load_model(str(folder), device="cpu", offline=True)


def test_random_weights_are_those_that_transformers_draws(family: LoadedModel) -> None:
    before = torch.random.get_rng_state()
    found = at_initialisation(family, seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(3)
    model_class = getattr(transformers, family.family.model_class)
    expected = model_class(family.model.config, **({"add_pooling_layer": False} if family.family.pooler else {}))
    state = found.model.state_dict()
    assert state.keys() == family.model.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(state[name], tensor), name
    name = f"{block_name(family)}.{family.family.query}.weight"
    query, other = state[name], at_initialisation(family, seed=4).model.state_dict()[name]
    assert not torch.isclose(query, other).all()
    assert float(query.std()) == pytest.approx(family.model.config.initializer_range, rel=0.05)
    assert not any(parameter.requires_grad for parameter in found.model.parameters())
    assert found.name.endswith("at random initialisation")
    assert found.identity["weights_sha256"] is None


def block_name(family: LoadedModel) -> str:
    first = family.family.blocks(family.model)[0]
    return next(name for name, module in family.model.named_modules() if module is first)


def test_every_family_is_measured_from_its_own_scores(family: LoadedModel) -> None:
    text = Encoder(family.tokenizer, family.max_tokens).encode("the old cat sat on a mat by the river")
    for model in (family, at_initialisation(family, 0)):
        found = record(model, [text], needs=frozenset({"q", "k", "scores"}))
        shape = found.shape
        own = math.sqrt(shape.head_width)
        seen = DotProducts.empty(range(shape.layers), range(shape.heads), (own,), shape.head_width)
        seen.add(found)
        raw = found.of_text("scores", 0) * own
        flat = raw.reshape(*raw.shape[:2], -1)
        np.testing.assert_allclose(seen.products.std, flat.std(axis=-1), rtol=1e-4)
        np.testing.assert_allclose(seen.products.mean, flat.mean(axis=-1), rtol=1e-4, atol=1e-4)
        scaled = seen.spread[..., list(SPREAD).index("scaled_std")]
        np.testing.assert_allclose(scaled, flat.std(axis=-1) / own, rtol=1e-4)


def test_at_initialisation_entries_have_the_variance_that_the_configuration_gives(minilm: LoadedModel) -> None:
    # A LayerNorm at initialisation gives vectors of mean square 1, so q = W x has variance range^2 d = 0.02^2 384.
    text = Encoder(minilm.tokenizer, minilm.max_tokens).encode(TEXTS[1])
    seen = DotProducts.empty(range(6), range(12), (1.0,), 32)
    seen.add(record(at_initialisation(minilm, 0), [text], needs=frozenset({"q", "k"})))
    for deviations in (seen.queries.std, seen.keys.std):
        assert deviations.mean() == pytest.approx(0.02 * math.sqrt(384), rel=0.02)
    law = seen.spread[..., list(SPREAD).index("law")]
    assert law.mean() == pytest.approx(1, abs=0.15)
    assert seen.spread[..., list(SPREAD).index("scaled_std")].mean() == pytest.approx(0.02**2 * 384, rel=0.2)


# The command


def test_batches_leave_no_trace(fast: Run, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("the cat\na dog ran\nwe play\nthe old river\n", encoding="utf-8")
    for folder, tokens in (("one", "1"), ("all", "1000")):
        done = fast("scaling", "--corpus", "corpus.txt", "--batch-tokens", tokens, "-o", folder)
        assert done.exit_code == 0, done.output
    one, every = files_of(tmp_path / "one"), files_of(tmp_path / "all")
    assert {name: one[name] for name in one if name.endswith(".csv")} == {
        name: every[name] for name in every if name.endswith(".csv")
    }


def test_the_seed_draws_other_random_weights_and_leaves_the_trained_ones(fast: Run, tmp_path: Path) -> None:
    for folder in ("0", "1"):
        assert fast("scaling", "the cat sat", "--seed", folder, "-o", folder).exit_code == 0
    first, second = (pd.read_csv(tmp_path / folder / "scaling-heads.csv") for folder in ("0", "1"))
    trained = first["weights"] == "trained"
    assert first[trained].equals(second[trained])
    assert not np.isclose(first[~trained]["std"], second[~trained]["std"]).any()
    assert content(tmp_path / "1")["settings"]["seed"] == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--scores", "5,twenty", "--dk", "20"), "'5,twenty' is no list of numbers"),
        (("--scores", "5,inf", "--dk", "20"), "'5,inf' is no list of numbers"),
        (("--scores", "5,20"), "--scores and --dk go together"),
        (("--dk", "20"), "--scores and --dk go together"),
        (("--scores", "5,20", "--dk", "20", "the cat"), "a text was given"),
        (("--tau", "1,0"), "not above 0"),
        (("--tau", "warm"), "'warm' is no list of numbers"),
        (("--seed", str(2**64)), "too large"),
        (("the cat", "--layers", "7"), "layer 7 does not exist"),
        (("the cat", "--heads", "4"), "head 4 does not exist"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_two_lines(fast: Run, arguments: tuple[str, ...], told: str) -> None:
    assert_error(fast("scaling", *arguments), 2, told)


def test_figures_mark_the_models_own_temperature() -> None:
    seen = seen_of(record_of(vectors(1, 2, 5, 9), vectors(2, 2, 5, 9)), taus=(1.0, 3.0))
    swept = {figure.name: figure for figure in scaling_result({"trained": seen, "random": seen}, "").figures}
    row = row_result([5.0, 20.0], 9, (1.0, 3.0)).figures[0]
    for figure in (swept["scaling-sweep"], row):
        for panel in figure.panels:
            assert isinstance(panel, Lines)
            assert (panel.log_x, panel.mark, panel.mark_label) == (True, 3.0, "sqrt(dk)")
    entropy = swept["scaling-sweep"].panels[0].series[0]
    assert entropy.y.tolist() == seen.sweep.mean[0, :, :, 1].mean(axis=0).tolist()


def test_every_figure_is_drawn(run: Run, tiny_folder: Path, tmp_path: Path) -> None:
    done = run("scaling", "the cat sat", "--model", str(tiny_folder), "-o", "out", "--figures", "svg")
    assert done.exit_code == 0, done.output
    names = {path.name for path in (tmp_path / "out").glob("*.svg")}
    assert names == {"scaling-spread.svg", "scaling-sweep.svg", "scaling-distribution.svg"}
