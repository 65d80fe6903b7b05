"""Informativeness of pairs of subspaces: against integration, SciPy's kernel density, a published value, and chance."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray
from scipy.integrate import quad
from scipy.stats import gaussian_kde, norm

from analyses.heads import HeadsAgainstHeads
from analyses.kit.informativeness import bandwidth, informativeness
from analyses.kit.result import Result
from analyses.kit.subspaces import orthonormal_bases, projection_kernels, random_projection_kernel
from bertgeo_cli.models import LoadedModel
from bertgeo_cli.run import analyse_weights

Floats = NDArray[np.float64]
GENERATOR = np.random.default_rng(0)
VALUES: dict[str, Floats] = {
    "as chance": GENERATOR.standard_normal(400),
    "wide": 20 + 12 * GENERATOR.standard_normal(300),
    "skewed": GENERATOR.gamma(1.5, 4, 500) - 3,
    "two peaks": np.concatenate([GENERATOR.normal(-2, 1, 90), GENERATOR.normal(9, 3, 90)]),
    "two values": np.array([-0.5, 1.0]),
}


@pytest.mark.parametrize("z", VALUES.values(), ids=VALUES)
def test_it_is_the_integral_against_the_kernel_density_of_scipy(z: Floats) -> None:
    density = gaussian_kde(z)

    def integrand(x: float) -> float:
        return norm.pdf(x) * (norm.logpdf(x) - float(density.logpdf(x)[0]))

    wanted = sum(quad(integrand, start, start + 1)[0] for start in range(-9, 9))
    assert informativeness(z) == pytest.approx(wanted, rel=1e-6, abs=1e-8)
    assert bandwidth(z) == pytest.approx(math.sqrt(density.covariance[0, 0]))


def test_far_values_give_a_finite_divergence_where_a_density_underflows() -> None:
    z = np.array([200.0, 201.0, 203.0])
    assert gaussian_kde(z).pdf(0.0)[0] == 0
    step = z.std(ddof=1) * 3 ** (-1 / 5)
    # ln f is that of the nearest kernel; E (x - 200)^2 = 200^2 + 1, and the entropy of N(0, 1) cancels ln sqrt(2 pi).
    wanted = -0.5 + math.log(3 * step) + (200**2 + 1) / (2 * step**2)
    assert informativeness(z) == pytest.approx(wanted, rel=1e-6)


def test_a_density_as_published_at_the_random_mean_gives_the_published_value() -> None:
    """GPT-2's Q-Q: 2.876 nats, where the published density is about 0.126 at the mean of random subspaces."""
    mean, std = (float(value) for value in random_projection_kernel(np.array(64.0), np.array(64.0), 768))
    around = mean + np.linspace(-0.5, 0.5, 9504) / 0.126
    assert informativeness((around - mean) / std) == pytest.approx(2.876, abs=0.01)


@pytest.mark.parametrize("values", [[], [1.0], [2.0, 2.0, 2.0]])
def test_too_few_or_equal_values_have_none(values: list[float]) -> None:
    assert math.isnan(informativeness(np.array(values)))


def test_it_is_the_same_in_any_unit_and_order() -> None:
    z = VALUES["skewed"]
    assert informativeness(z[::-1]) == pytest.approx(informativeness(z), rel=1e-12)
    assert informativeness(-z) == pytest.approx(informativeness(z), rel=1e-12)


def test_random_subspaces_inform_of_next_to_nothing() -> None:
    first, second = (orthonormal_bases(GENERATOR.standard_normal((60, 48, 12)))[0] for _ in range(2))
    mean, std = random_projection_kernel(np.array(12.0), np.array(12.0), 48)
    z = (projection_kernels(first, second) - mean) / std
    assert 0 <= informativeness(z.ravel()) < 0.02


def answer(loaded: LoadedModel, **settings: Any) -> tuple[dict[str, pd.DataFrame], Result]:
    result = analyse_weights([HeadsAgainstHeads(**settings)], loaded)[0]
    return {table.name: table.frame for table in result.tables}, result


@pytest.mark.parametrize(("direction", "pairs"), [("all", 28), ("earlier-to-later", 16)])
def test_rows_follow_from_the_table_of_pairs(tiny_model: LoadedModel, direction: str, pairs: int) -> None:
    tables, _ = answer(tiny_model, subspaces="all", direction=direction)
    rows = tables["heads-informativeness"].set_index(["subspace", "other_subspace"])
    assert len(rows) == 16
    for (one, other), row in rows.iterrows():
        listed = tables["heads-pairs"]
        listed = listed[listed["subspaces"] == one + other]
        first = listed["layer"] * 4 + listed["head"]
        second = listed["other_layer"] * 4 + listed["other_head"]
        # Where both directions agree, each pair of heads counts once.
        listed = listed[first < second] if one == other else listed[first != second]
        assert row["pairs"] == len(listed) == (pairs if one == other or direction != "all" else 2 * pairs)
        assert row["mean"] == pytest.approx(listed["value"].mean())
        assert row["std"] == pytest.approx(listed["value"].std())
        assert row["informativeness"] == pytest.approx(informativeness(listed["z"].to_numpy()))
        assert row["bandwidth"] == pytest.approx(gaussian_kde(listed["value"]).factor * listed["value"].std())
        beyond = norm(row["random_mean"], row["random_std"])
        inside = beyond.cdf(listed["value"].max()) - beyond.cdf(listed["value"].min())
        assert row["beyond"] == pytest.approx(1 - inside, abs=1e-12)


def test_all_sixteen_also_stand_in_a_4_x_4_table_and_a_heat_map(tiny_model: LoadedModel) -> None:
    tables, result = answer(tiny_model, subspaces="all", direction="earlier-to-later")
    grid = tables["heads-informativeness-grid"].set_index("subspace")
    assert list(grid) == list(grid.index) == ["Q", "K", "V", "O"]
    rows = tables["heads-informativeness"]
    for row in rows.itertuples():
        assert grid.loc[row.subspace, row.other_subspace] == row.informativeness
    panel = next(figure for figure in result.figures if figure.name == "heads-informativeness").panels[0]
    np.testing.assert_array_equal(panel.values, grid.to_numpy())
    assert (panel.rows, panel.columns) == (("Q", "K", "V", "O"),) * 2


def test_fewer_kinds_and_other_metrics_have_no_such_table(tiny_model: LoadedModel) -> None:
    tables, result = answer(tiny_model, subspaces="OQ,OK")
    assert len(tables["heads-informativeness"]) == 2
    assert "heads-informativeness-grid" not in tables
    assert "heads-informativeness" not in {figure.name for figure in result.figures}
    assert "heads-informativeness" not in answer(tiny_model, metric="bilinear-cosine")[0]


def test_mini_lm_reads_more_like_its_earlier_queries_than_chance(minilm: LoadedModel) -> None:
    rows = answer(minilm, subspaces="QQ,VO", direction="earlier-to-later")[0]["heads-informativeness"]
    assert (rows["mean"] > rows["random_mean"]).all()
    assert rows["pairs"].tolist() == [15 * 144] * 2
    assert rows["informativeness"].is_monotonic_decreasing
