"""Residual cuts, gradients and Jacobians: against finite differences of a plain NumPy pass, and estimates against J."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tiny
import torch
from command import Run, assert_error
from scipy.special import erf

from analyses.kit.jacobian import (
    Shares,
    Step,
    estimated_shares,
    exact_shares,
    gradient_norms,
    probes,
    random_units,
    spectral_norm,
)
from analyses.kit.record import TokenizedText
from analyses.kit.residual_answer import CUTS, ResidualSums, gradient_table
from bertgeo_cli.corpus import Encoder
from bertgeo_cli.models import LoadedModel, load_model
from bertgeo_cli.observation import Pass
from bertgeo_cli.recording import record, run_pass
from bertgeo_cli.studies.residuals import Residuals, _Follow, _steps
from bertgeo_cli.surgery import RESIDUALS, without_residuals

TEXT = "the old cat sat"
POINTS = ("hidden_states", "attention_projection", "attention_sum", "attention_norm", "mlp_output", "mlp_sum")


def encode(loaded: LoadedModel, text: str = TEXT) -> TokenizedText:
    return Encoder(loaded.tokenizer, loaded.max_tokens).encode(text)


def block(weights: dict[str, np.ndarray], layer: int, x: np.ndarray, cut: str, heads: int = 4) -> np.ndarray:
    """One block of a BERT in float64 from its checkpoint's own tensors, without the residuals that are cut."""
    prefix = f"encoder.layer.{layer}."
    part = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}

    def linear(name: str, values: np.ndarray) -> np.ndarray:
        return values @ part[f"{name}.weight"].T + part[f"{name}.bias"]

    def norm(name: str, values: np.ndarray) -> np.ndarray:
        rest = values - values.mean(axis=1, keepdims=True)
        scaled = rest / np.sqrt((rest**2).mean(axis=1, keepdims=True) + 1e-12)
        return scaled * part[f"{name}.weight"] + part[f"{name}.bias"]

    q, k, v = (
        linear(f"attention.self.{name}", x).reshape(len(x), heads, -1).swapaxes(0, 1)
        for name in ("query", "key", "value")
    )
    scores = q @ k.swapaxes(1, 2) / math.sqrt(q.shape[-1])
    raised = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed = (raised / raised.sum(axis=-1, keepdims=True) @ v).swapaxes(0, 1).reshape(len(x), -1)
    attended = linear("attention.output.dense", mixed)
    y = norm("attention.output.LayerNorm", attended if cut in ("attention", "both") else attended + x)
    inner = linear("intermediate.dense", y)
    added = linear("output.dense", inner / 2 * (1 + erf(inner / math.sqrt(2))))
    return norm("output.LayerNorm", added if cut in ("mlp", "both") else added + y)


def by_differences(weights: dict[str, np.ndarray], layer: int, x: np.ndarray, cut: str) -> np.ndarray:
    """J of a block by central differences."""
    columns, step = [], 1e-5
    for entry in range(x.size):
        moved = np.zeros(x.size)
        moved[entry] = step
        ends = [block(weights, layer, x + sign * moved.reshape(x.shape), cut) for sign in (1, -1)]
        columns.append((ends[0] - ends[1]).ravel() / (2 * step))
    return np.stack(columns, axis=1)


@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """The tiny BERT in float64."""
    loaded = load_model(str(tiny.tiny_bert(tmp_path_factory.mktemp("models") / "tiny")), device="cpu", offline=True)
    loaded.model.double()
    return loaded


@pytest.mark.parametrize("cut", CUTS)
def test_gradients_and_jacobians_are_those_of_finite_differences(double: LoadedModel, cut: str) -> None:
    weights = {name: value.numpy() for name, value in double.model.state_dict().items()}
    text, follow = encode(double), _Follow(double, Pass())
    depths = follow.depths(text, cut)
    x = depths[0][0].detach().numpy()
    expected = []
    for layer, step in enumerate(_steps(depths)):
        expected.append(by_differences(weights, layer, x, cut))
        x = block(weights, layer, x, cut)
        np.testing.assert_allclose(step.leaving[0].detach().numpy(), x, atol=1e-9)
        np.testing.assert_allclose(step.matrix(), expected[-1], atol=2e-6 * np.abs(expected[-1]).max())

    direction = random_units(tuple(depths[-1].shape), depths[-1], torch.Generator().manual_seed(1))
    r = direction.numpy().ravel()
    norms = gradient_norms(depths, direction)[:, 0]
    upper = expected[1].T @ r
    np.testing.assert_allclose(norms, [np.linalg.norm(expected[0].T @ upper), np.linalg.norm(upper), 1.0], rtol=1e-5)

    for step, jacobian in zip(_steps(depths), expected, strict=True):
        found, singular = exact_shares(step.matrix()), np.linalg.svd(jacobian, compute_uv=False)
        n = len(jacobian)
        cosine = (jacobian * np.eye(n)).sum() / (np.linalg.norm(jacobian) * np.linalg.norm(np.eye(n)))
        assert found.identity == pytest.approx(cosine, rel=1e-5)
        assert found.diagonal == pytest.approx(np.diag(jacobian).mean(), rel=1e-5)
        assert found.gain == pytest.approx(math.sqrt((singular**2).mean()), rel=1e-5)
        assert found.spectral == pytest.approx(singular[0], rel=1e-5)


@pytest.fixture(scope="module", params=tiny.FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tiny.tiny_family(request.param, tmp_path_factory.mktemp("models") / request.param)
    return load_model(str(folder), device="cpu", offline=True)


@pytest.mark.parametrize("cut", RESIDUALS)
def test_every_layer_of_every_family_lacks_just_the_residuals(family: LoadedModel, cut: str) -> None:
    text = encode(family)
    ids, segments = torch.tensor([text.ids]), torch.tensor([text.segment])
    with without_residuals(family, cut):
        found = run_pass(family, ids, segments, needs=frozenset(POINTS))
    for layer in range(family.shape.layers):
        at = {name: tensors[layer] for name, tensors in found.items()}
        first = at["attention_projection"] + (0 if cut in ("attention", "both") else at["hidden_states"])
        second = at["mlp_output"] + (0 if cut in ("mlp", "both") else at["attention_norm"])
        assert torch.equal(at["attention_sum"], first)
        assert torch.equal(at["mlp_sum"], second)
        assert not torch.equal(found["hidden_states"][layer + 1], at["attention_norm"])  # the MLP stays


def hooks(loaded: LoadedModel) -> list[tuple[Any, ...]]:
    modules = loaded.model.named_modules(remove_duplicate=False)
    return [(name, module, list(module._forward_hooks), list(module._forward_pre_hooks)) for name, module in modules]


def test_a_differentiable_pass_is_the_recorded_one_and_leaves_nothing_behind(family: LoadedModel) -> None:
    text, before = encode(family), hooks(family)
    plain = record(family, [text], needs=frozenset({"hidden_states"}))
    depths = _Follow(family, Pass()).depths(text, "none")
    for depth, hidden in enumerate(depths):
        assert hidden.requires_grad
        torch.testing.assert_close(hidden.detach(), plain.layer("hidden_states", depth), rtol=1e-5, atol=1e-5)
    assert hooks(family) == before
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in family.model.parameters())
    after = record(family, [text], needs=frozenset({"hidden_states"}))
    assert torch.equal(after.hidden_states, plain.hidden_states)


def test_an_unknown_kind_of_residual_is_refused(tiny_model: LoadedModel) -> None:
    with pytest.raises(ValueError, match="unknown kind of residual"), without_residuals(tiny_model, "skip"):
        pass


@pytest.mark.parametrize("cut", ["none", "both"])
def test_estimates_agree_with_the_whole_jacobian_in_every_family(family: LoadedModel, cut: str) -> None:
    study, follow, text = Residuals(probes=64, iterations=400), _Follow(family, Pass()), encode(family)
    exact, estimated = study._exact(follow, text, cut), study._estimated(follow, text, cut)
    for (whole, _), (found, _) in zip(exact, estimated, strict=True):
        for name in ("identity", "diagonal", "gain"):
            error = getattr(found, f"{name}_error")
            assert error > 0
            assert abs(getattr(found, name) - getattr(whole, name)) < 4 * error, name
        assert found.spectral == pytest.approx(whole.spectral, rel=0.05)
        assert found.spectral <= whole.spectral * (1 + 1e-4)


MATRIX = np.array([[2.0, 1.0, 0.0], [0.0, -1.0, 4.0], [0.5, 0.0, 3.0]])


def linear_step(copies: int) -> Step:
    """x -> M x, for every copy."""
    entering = torch.zeros(copies, 1, 3, dtype=torch.float64, requires_grad=True)
    given = entering * 1.0
    return Step(given, given @ torch.from_numpy(MATRIX).T)


def test_products_with_the_jacobian_of_a_linear_map() -> None:
    step, vector = linear_step(2), torch.tensor([[[1.0, 2.0, 3.0]], [[0.0, 1.0, 0.0]]], dtype=torch.float64)
    np.testing.assert_allclose(step.matrix(), MATRIX)
    np.testing.assert_allclose(step.transposed(vector)[:, 0], vector[:, 0].numpy() @ MATRIX)
    np.testing.assert_allclose(step.forward()(vector)[:, 0], vector[:, 0].numpy() @ MATRIX.T)


def test_power_iteration_finds_the_largest_singular_value() -> None:
    found, settled = spectral_norm(linear_step(1), 200, 1e-9, torch.Generator().manual_seed(0))
    assert settled
    assert found == pytest.approx(np.linalg.svd(MATRIX, compute_uv=False)[0], rel=1e-7)
    first, settled = spectral_norm(linear_step(1), 1, 1e-9, torch.Generator().manual_seed(0))
    assert not settled
    assert first < found


def test_random_signs_estimate_trace_and_norm_without_bias() -> None:
    signs = np.array(list(itertools.product((-1.0, 1.0), repeat=3)))
    assert np.mean([z @ MATRIX @ z for z in signs]) == pytest.approx(np.trace(MATRIX))
    traces, squares = probes(linear_step(4000), torch.Generator().manual_seed(0))
    possible = {round(float(z @ MATRIX @ z), 9) for z in signs}
    assert set(traces.round(9).tolist()) == possible
    assert squares.mean() == pytest.approx((MATRIX**2).sum(), rel=0.03)
    assert traces.mean() == pytest.approx(np.trace(MATRIX), rel=0.03)


def test_standard_errors_are_the_spread_of_repeated_estimates() -> None:
    count = 50
    traces, squares = (part.reshape(-1, count) for part in probes(linear_step(400 * count), torch.Generator()))
    found: list[Shares] = [estimated_shares(*pair, 3, 1.0) for pair in zip(traces, squares, strict=True)]
    for name in ("identity", "diagonal", "gain"):
        spread = np.std([getattr(one, name) for one in found], ddof=1)
        assert np.mean([getattr(one, f"{name}_error") for one in found]) == pytest.approx(spread, rel=0.1), name


def test_a_block_that_gives_nothing_has_no_direction() -> None:
    assert math.isnan(exact_shares(np.zeros((2, 2))).identity)
    found = estimated_shares(np.zeros(3), np.zeros(3), 2, 0.0)
    assert math.isnan(found.identity)
    assert found.gain == 0


def test_a_gradient_is_the_root_mean_square_over_directions() -> None:
    sums = ResidualSums.empty(["none"], 1)
    sums.add_gradients([np.array([[3.0, 4.0], [1.0, 1.0]])])
    assert gradient_table(sums).frame["gradient"].tolist() == pytest.approx([math.sqrt(12.5), 1.0])
    sums.add_gradients([np.array([[0.0, 0.0], [1.0, 1.0]])])  # has no logarithm
    assert gradient_table(sums).frame["texts"].tolist() == [1, 2]
    assert sums.vanished == 1


def table(folder: Path, name: str = "residuals") -> pd.DataFrame:
    return pd.read_csv(folder / f"{name}.csv", keep_default_na=False, na_values=[""])


def test_over_texts_gradients_are_averaged_as_logarithms_and_errors_shrink(fast: Run, tmp_path: Path) -> None:
    lines = ["the old cat sat on the mat by the river bank", "we play", "she ran to the old river and it was very old"]
    (tmp_path / "corpus.txt").write_text("\n".join(lines) + "\n")
    ran = fast("residuals", "--corpus", "corpus.txt", "--exact", "0", "-o", "whole")
    assert ran.exit_code == 0, ran.output
    for at, line in enumerate(lines):
        assert fast("residuals", line, "--exact", "0", "-o", f"single{at}").exit_code == 0
    single = [table(tmp_path / f"single{at}") for at in range(3)]
    whole = table(tmp_path / "whole")
    logs = np.array([np.log10(frame["gradient"]) for frame in single])
    np.testing.assert_allclose(whole["gradient"], 10 ** logs.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(whole["log10_gradient_std"], logs.std(axis=0, ddof=1), rtol=1e-4, atol=1e-9)
    assert whole["texts"].unique().tolist() == [3]
    assert (whole.query("depth == 2")["gradient"] - 1).abs().max() < 1e-6
    blocks = [table(tmp_path / f"single{at}", "residuals-blocks") for at in range(3)]
    errors = np.sqrt(sum(frame["identity_error"] ** 2 for frame in blocks)) / 3
    joined = table(tmp_path / "whole", "residuals-blocks")
    np.testing.assert_allclose(joined["identity_error"], errors, rtol=1e-4)
    np.testing.assert_allclose(joined["identity"], sum(frame["identity"] for frame in blocks) / 3, rtol=1e-4)


@pytest.mark.parametrize(
    "options", [("--batch-tokens", "20"), ("--attention-backend", "sdpa")], ids=["small passes", "sdpa"]
)
def test_how_passes_go_changes_nothing(fast: Run, tmp_path: Path, options: tuple[str, ...]) -> None:
    arguments = ("residuals", "the old cat sat on the mat", "--exact", "0")
    for folder, more in (("usual", ()), ("other", options)):
        ran = fast(*arguments, *more, "-o", folder)
        assert ran.exit_code == 0, ran.output
    for name in ("residuals", "residuals-blocks"):
        usual, other = (table(tmp_path / folder, name) for folder in ("usual", "other"))
        for column in usual.select_dtypes("float"):
            np.testing.assert_allclose(other[column], usual[column], rtol=2e-3, atol=1e-5, err_msg=column)


def test_jacobians_are_measured_of_some_texts_and_whole_where_small(fast: Run, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("we play\nthe cat ran to the old river bank and sat by it\na dog\n")
    ways = {"whole": ("--blocks", "2", "--exact", "300"), "none": ("--blocks", "0", "--cut", "both,none")}
    for folder, more in ways.items():
        assert fast("residuals", "--corpus", "corpus.txt", *more, "-o", folder).exit_code == 0
    blocks = table(tmp_path / "whole", "residuals-blocks")
    assert blocks["texts"].unique().tolist() == [2]
    assert blocks["exact"].unique().tolist()[0] in (1, 2)
    assert not (tmp_path / "none" / "residuals-blocks.csv").exists()
    assert table(tmp_path / "none")["cut"].unique().tolist() == ["none", "both"]


def test_an_unknown_cut_is_refused_before_texts_are_read(fast: Run) -> None:
    assert_error(fast("residuals", "a cat", "--cut", "skip"), 2, "unknown cut 'skip'", "none, attention, mlp, both")


def test_the_identity_is_lost_without_attention_residuals_in_a_real_model(minilm: LoadedModel) -> None:
    study, follow = Residuals(probes=4), _Follow(minilm, Pass())
    text = encode(minilm, "The fisherman sat down by the river bank.")
    kept, cut = (study._estimated(follow, text, name) for name in ("none", "both"))
    assert min(shares.identity for shares, _ in kept) > 0.4
    assert max(abs(shares.identity) for shares, _ in cut) < 0.1
