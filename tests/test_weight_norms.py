"""Weight norms: numpy.linalg on the raw checkpoint, the bound by hand and on layers of attention that it bounds."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import pytest
import torch
from command import Run

from analyses.kit.collapse_bound import CollapseBound
from analyses.kit.record import HeadWeights, ModelShape
from analyses.kit.spectra import composite_norm
from analyses.kit.weight_norms import HeadMatrices, contraction, log_bound
from analyses.weight_norms import WeightNorms
from bertgeo_cli.corpus import Encoder
from bertgeo_cli.models import LoadedModel
from bertgeo_cli.recording import record
from bertgeo_cli.run import Pass, analyse_text, analyse_weights


def composite(matrix: np.ndarray) -> float:
    return math.sqrt(np.linalg.norm(matrix, 1) * np.linalg.norm(matrix, np.inf))


def of_checkpoint(loaded: LoadedModel, layer: int) -> dict[str, np.ndarray]:
    """W_Q, W_K, W_V and W_O of a layer, acting on row vectors."""
    names = {"q": "self.query", "k": "self.key", "v": "self.value", "o": "output.dense"}
    held = loaded.model.state_dict()
    return {
        key: held[f"encoder.layer.{layer}.attention.{name}.weight"].double().numpy().T for key, name in names.items()
    }


def test_norms_are_those_of_numpy_on_the_checkpoint(minilm: LoadedModel) -> None:
    layers, heads = (table.frame for table in analyse_weights([WeightNorms()], minilm)[0].tables)
    for row in layers.iloc[::3].itertuples():
        for name, matrix in of_checkpoint(minilm, row.layer).items():
            found = [getattr(row, f"{name}_{norm}") for norm in ("max", "one", "inf")]
            wanted = [np.abs(matrix).max(), np.linalg.norm(matrix, 1), np.linalg.norm(matrix, np.inf)]
            assert found == pytest.approx(wanted, rel=1e-12)
    for row in heads.iloc[::13].itertuples():
        whole, own = of_checkpoint(minilm, row.layer), slice(32 * row.head, 32 * row.head + 32)
        cut = {name: matrix[own] if name == "o" else matrix[:, own] for name, matrix in whole.items()}
        for name, matrix in cut.items():
            found = [getattr(row, f"{name}_{norm}") for norm in ("max", "one", "inf")]
            wanted = [np.abs(matrix).max(), np.linalg.norm(matrix, 1), np.linalg.norm(matrix, np.inf)]
            assert found == pytest.approx(wanted, rel=1e-12)
        beta = np.linalg.norm(cut["q"] @ cut["k"].T, 1) * composite(cut["v"] @ cut["o"])
        assert row.beta == pytest.approx(beta, rel=1e-12)


def test_the_factor_follows_from_the_largest_beta(minilm: LoadedModel) -> None:
    for through in ("VO", "V"):
        layers, heads = (table.frame for table in analyse_weights([WeightNorms(through=through)], minilm)[0].tables)
        assert layers["beta"].tolist() == heads.groupby("layer")["beta"].max().tolist()
        np.testing.assert_allclose(layers["factor"], 4 * layers["beta"] * 12 / math.sqrt(32))
        np.testing.assert_allclose(layers["factor"] * layers["shrinks_below"] ** 3, layers["shrinks_below"])
    whole = of_checkpoint(minilm, 0)
    single = np.linalg.norm(whole["q"][:, :32] @ whole["k"][:, :32].T, 1) * composite(whole["v"][:, :32])
    assert heads["beta"][0] == pytest.approx(single)


def test_the_bound_of_many_layers_is_that_of_one_again_and_again() -> None:
    factor, residual = 3.0, 0.2
    for layers in range(4):
        assert log_bound(factor, np.array(0.2), layers) == pytest.approx(math.log10(residual))
        residual = factor * residual**3
    assert np.isnan(log_bound(factor, np.array(0.0), 2))


@pytest.mark.parametrize("seed", range(5))
def test_random_layers_of_attention_stay_below_the_bound(seed: int) -> None:
    # Small weights, where the bound means something: residuals of P X W_V W_O summed over heads, no LayerNorm.
    draw = np.random.default_rng(seed)
    q, k, v = draw.normal(scale=0.1, size=(3, 2, 8, 4))
    matrices = HeadMatrices(q, k, v, draw.normal(scale=0.1, size=(2, 4, 8)))
    x = draw.normal(scale=0.3, size=(5, 8))
    factor = contraction(float(matrices.beta("VO").max()), heads=2, head_width=4)
    scores = x @ q @ (x @ k).swapaxes(1, 2) / 2
    attention = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
    y = sum(attention[head] @ x @ v[head] @ matrices.o[head] for head in range(2))
    before, after = (composite_norm(states - states.mean(axis=0)) for states in (x, y))
    assert after <= factor * before**3


def test_the_bound_on_a_text_starts_from_its_residual(tiny_model: LoadedModel) -> None:
    text = Encoder(tiny_model.tokenizer, tiny_model.max_tokens).encode("the old cat sat")
    frame = analyse_text([CollapseBound()], tiny_model, text, Pass())[0].tables[0].frame
    states = record(tiny_model, [text], needs=frozenset({"both/hidden_states"})).of_text("both/hidden_states", 0)
    wanted = [composite(x - x.mean(axis=0)) for x in states]
    assert frame["residual"].tolist() == pytest.approx(wanted)
    assert frame["log10_residual"].tolist() == pytest.approx(np.log10(wanted))
    factor = analyse_weights([WeightNorms()], tiny_model)[0].tables[0].frame["factor"].max()
    powers = [(3**depth - 1) / 2 * math.log10(factor) + 3**depth * math.log10(wanted[0]) for depth in range(3)]
    assert frame["log10_bound"].tolist() == pytest.approx(powers)


@pytest.mark.parametrize("through", ["VO", "V"])
def test_the_bound_on_texts_has_the_largest_factor_of_the_same_weights(
    through: Literal["VO", "V"], tiny_model: LoadedModel
) -> None:
    text = Encoder(tiny_model.tokenizer, tiny_model.max_tokens).encode("the old cat sat")
    settings = WeightNorms(through=through)
    frame = analyse_text([settings.on_texts()], tiny_model, text, Pass())[0].tables[0].frame
    factor = analyse_weights([settings], tiny_model)[0].tables[0].frame["factor"].max()
    wanted = math.log10(factor) + 3 * math.log10(frame["residual"][0])
    assert frame["log10_bound"][1] == pytest.approx(wanted)


def test_a_residual_that_rounding_alone_may_leave_has_no_logarithm(minilm: LoadedModel) -> None:
    text = Encoder(minilm.tokenizer, minilm.max_tokens).encode("The fisherman sat down by the river bank.")
    frame = analyse_text([CollapseBound()], minilm, text, Pass())[0].tables[0].frame
    states = record(minilm, [text], needs=frozenset({"both/hidden_states"})).of_text("both/hidden_states", 0)
    least = [len(text) * 2**-23 * composite(x) for x in states]
    # In float64 the residual goes on falling, to 1e-10 and below; in float32 it stays at 1e-5.
    assert frame["log10_residual"].isna().tolist() == [False] * 5 + [True] * 2
    assert (frame["log10_residual"].isna() == (frame["residual"] <= least)).all()


def test_shared_layers_stand_once_and_zero_weights_have_no_limit() -> None:
    zeros = [torch.zeros(1, 2, 4, 8, dtype=torch.float64)] * 3
    biases = [torch.zeros(1, 2, 4, dtype=torch.float64)] * 3
    output, bias = torch.zeros(1, 2, 8, 4, dtype=torch.float64), torch.zeros(1, 8, dtype=torch.float64)
    shape = ModelShape("albert", heads=2, width=8, head_width=4, weight_layer=(0, 0, 0))
    settings = WeightNorms()
    result = settings.finalize(settings.start(shape, HeadWeights(*zeros, output, *biases, bias, bias)), None)
    frame = result.tables[0].frame
    assert frame["layer"].tolist() == [0]
    assert frame["factor"].tolist() == [0]
    assert frame["shrinks_below"].isna().all()


def test_the_command_gives_the_bound_only_of_texts(fast: Run) -> None:
    alone, beside = fast("weight-norms"), fast("weight-norms", "a cat", "-o", "other")
    assert (alone.exit_code, beside.exit_code) == (0, 0), beside.output
    assert "weight-norms-bound" not in alone.output
    assert "weight-norms-bound.csv" in beside.output
