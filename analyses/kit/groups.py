"""Tables of several groups of texts: one below the other, and what differs between two of them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

import pandas as pd

from .result import Table

GROUP = {"group": "group of texts, as the corpus names it"}
PAIR = {"group": "first group, in the order of names", "other_group": "second group"}
SUFFIXES = {
    "_difference": "{0} of the second group minus {0} of the first",
    "_d": "Cohen's d of {0}: the difference divided by sqrt(((n1 - 1) s1^2 + (n2 - 1) s2^2) / (n1 + n2 - 2)), with n "
    "texts and standard deviation s over texts; empty without spread. Many are compared: no test, no correction",
}


def tables_by_group(groups: Mapping[str, Mapping[str, Table]]) -> list[Table]:
    """Every table of every group, groups below one another, and the differences between groups where there are any.

    `groups` holds each group's tables by their name.
    """
    names = list(dict.fromkeys(name for tables in groups.values() for name in tables))
    found = []
    for name in names:
        tables = {group: tables[name] for group, tables in groups.items() if name in tables}
        found.append(_stacked(tables))
        differences = group_differences(tables)
        if differences is not None:
            found.append(differences)
    return found


def _stacked(tables: Mapping[str, Table]) -> Table:
    first = next(iter(tables.values()))
    frames = [table.frame.assign(group=group) for group, table in tables.items()]
    joined = pd.concat(frames, ignore_index=True)
    columns = GROUP | _meanings(tables)
    frame = joined[["group", *(name for name in joined if name != "group")]]
    return Table(f"{first.name}-by-group", f"{first.title}, by group", frame, columns)


def group_differences(tables: Mapping[str, Table]) -> Table | None:
    """For every two groups, in the order of their names, each value of the second minus that of the first, row by row.

    Beside each mean over texts stands d (Cohen 1988): the difference divided by the pooled standard deviation
    sqrt(((n1 - 1) s1^2 + (n2 - 1) s2^2) / (n1 + n2 - 2)), empty where that is 0 or unknown. None where the groups'
    rows are about different things, such as their texts or the nearest heads.
    """
    pairs = [pair for pair in combinations(tables.items(), 2) if pair[0][1].keys.equals(pair[1][1].keys)]
    if not pairs or "line" in pairs[0][0][1].frame:
        return None
    frames = [_difference(*first, *second) for first, second in pairs]
    first, frame = next(iter(tables.values())), pd.concat(frames, ignore_index=True)
    meanings = _meanings(tables)
    columns = PAIR | {name: _meaning(name, meanings) for name in map(str, frame) if name not in PAIR}
    return Table(f"{first.name}-group-differences", f"{first.title}: second group minus first", frame, columns)


def _difference(group: str, first: Table, other_group: str, second: Table) -> pd.DataFrame:
    one, other, found = first.frame, second.frame, first.keys.copy()
    found.insert(0, "group", group)
    found.insert(1, "other_group", other_group)
    if "texts" in one and "texts" in other:
        found["texts"], found["other_texts"] = one["texts"], other["texts"]
    for name in map(str, one.select_dtypes("float")):
        if name not in other or (name.removesuffix("_std") in one and name.endswith("_std")):
            continue
        found[f"{name}_difference"] = other[name] - one[name]
        if f"{name}_std" in one and f"{name}_std" in other:
            found[f"{name}_d"] = _cohen_d(one, other, name)
    return found


def _cohen_d(one: pd.DataFrame, other: pd.DataFrame, name: str) -> pd.Series[float]:
    squares = sum((frame["texts"] - 1) * frame[f"{name}_std"] ** 2 for frame in (one, other))
    pooled = (squares / (one["texts"] + other["texts"] - 2).clip(lower=1)) ** 0.5
    return (other[name] - one[name]) / pooled.where(pooled > 0)


def _meanings(tables: Mapping[str, Table]) -> dict[str, str]:
    """What columns are: a small group may lack some."""
    return {name: text for table in tables.values() for name, text in table.columns.items()}


def _meaning(name: str, columns: Mapping[str, str]) -> str:
    if name == "other_texts":
        return "texts measured of the second group"
    for suffix, text in SUFFIXES.items():
        if name.endswith(suffix) and name not in columns:
            return text.format(name.removesuffix(suffix))
    return columns[name]
