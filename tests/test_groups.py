"""Tables by group, and what differs between two groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from analyses.kit.groups import group_differences, tables_by_group
from analyses.kit.result import Table

MEANINGS = {
    "layer": "layer",
    "texts": "texts",
    "entropy": "nats",
    "entropy_std": "its deviation",
    "pairs": "counted pairs",
    "line": "line",
}


def table(name: str = "heads", counts: tuple[str, ...] = ("texts",), **columns: Any) -> Table:
    return Table(name, "Heads", pd.DataFrame(columns), {column: MEANINGS[column] for column in columns}, counts)


def groups_of(one: list[float], other: list[float]) -> dict[str, Table]:
    """A value of one layer, measured over the texts of two groups."""
    return {
        group: table(layer=[0], texts=[len(values)], entropy=[np.mean(values)], entropy_std=[np.std(values, ddof=1)])
        for group, values in (("a", one), ("b", other))
    }


def test_differences_and_cohens_d_by_hand() -> None:
    found = group_differences(groups_of([1.0, 2.0, 3.0], [4.0, 8.0]))
    assert found is not None
    # Variances 1 and 8; pooled (2 * 1 + 1 * 8) / 3 = 10 / 3; means 2 and 6.
    row = found.frame.iloc[0]
    assert (row["group"], row["other_group"], row["layer"]) == ("a", "b", 0)
    assert row["entropy_difference"] == 4.0
    assert row["entropy_d"] == pytest.approx(4 / np.sqrt(10 / 3), rel=1e-12)
    assert list(found.frame) == [
        *("group", "other_group", "layer", "texts", "other_texts", "entropy_difference", "entropy_d")
    ]
    assert found.name == "heads-group-differences"


def test_d_agrees_with_the_t_statistic_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    generator = np.random.default_rng(0)
    one, other = generator.normal(size=17), generator.normal(1.0, 2.0, size=9)
    found = group_differences(groups_of(list(one), list(other)))
    assert found is not None
    expected = stats.ttest_ind(other, one).statistic * np.sqrt(1 / 17 + 1 / 9)
    assert found.frame["entropy_d"][0] == pytest.approx(expected, rel=1e-12)


def test_d_is_empty_without_spread() -> None:
    for one, other in (([1.0, 1.0], [2.0, 2.0]), ([1.0], [2.0])):
        with np.errstate(all="ignore"):
            tables = {
                group: table(
                    layer=[0],
                    texts=[len(values)],
                    entropy=[values[0]],
                    entropy_std=[np.nan if len(values) < 2 else 0.0],
                )
                for group, values in (("a", one), ("b", other))
            }
        found = group_differences(tables)
        assert found is not None
        assert found.frame["entropy_difference"][0] == 1.0
        assert np.isnan(found.frame["entropy_d"][0])


def test_every_two_groups_are_compared_and_counts_are_no_keys() -> None:
    tables = {
        group: table(layer=[0, 1], pairs=[at, 5], entropy=[1.0, at], counts=("pairs",))
        for at, group in enumerate("abc")
    }
    found = group_differences(tables)
    assert found is not None
    assert found.frame[["group", "other_group"]].agg("".join, axis=1).tolist() == ["ab", "ab", "ac", "ac", "bc", "bc"]
    assert found.frame["entropy_difference"].tolist() == [0.0, 1.0, 0.0, 2.0, 0.0, 1.0]
    assert "pairs" not in found.frame


def test_rows_about_different_things_are_not_compared() -> None:
    assert group_differences({"a": table(layer=[0], entropy=[1.0]), "b": table(layer=[1], entropy=[1.0])}) is None
    assert group_differences({"a": table(line=[1], entropy=[1.0]), "b": table(line=[1], entropy=[1.0])}) is None
    assert group_differences({"a": table(layer=[0], entropy=[1.0])}) is None


def test_tables_stand_below_one_another_with_their_group() -> None:
    groups = {group: {"heads": of} for group, of in groups_of([1.0, 2.0], [3.0, 5.0]).items()}
    stacked, differences = tables_by_group(groups)
    assert stacked.name == "heads-by-group"
    assert stacked.frame["group"].tolist() == ["a", "b"]
    assert stacked.frame["entropy"].tolist() == [1.5, 4.0]
    assert set(stacked.frame) == set(stacked.columns)
    assert set(differences.frame) == set(differences.columns)
