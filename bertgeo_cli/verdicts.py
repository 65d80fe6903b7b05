"""Published beside measured: verdicts, as a table and as figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from analyses.kit.result import Figure, Lines, Result, Series, Table

from .published import OVER, Key, Published

COLUMNS = {
    "entry": "name of the published curve or value",
    "source": "where it was published, and where the value was read",
    "model": "the model",
    "quantity": "what it is",
    "place": "keys of the rows in the analysis's table; layers and heads from 0",
    "published": "the value as published",
    "measured": "the value measured here; empty where it was skipped",
    "difference": "measured - published",
    "tolerance": "largest difference that agrees",
    "unit": "unit of the values; 1 for pure numbers",
    "verdict": "agrees, differs, open (differs, but the source leaves something open) or skipped",
    "why": "why it was skipped, or what the source leaves open",
    "precision": "how exactly the source is known",
}
VERDICTS = ("agrees", "differs", "open", "skipped")


@dataclass(frozen=True)
class Measurement:
    """What became of each value of an entry: a number, or the reason why there is none."""

    entry: Published
    measured: tuple[float | str, ...]

    @classmethod
    def skipped(cls, entry: Published, why: str) -> Measurement:
        """No value of the entry was measured."""
        return cls(entry, (why,) * len(entry.values))

    @classmethod
    def of(cls, entry: Published, result: Result) -> Measurement:
        """The values of the entry in the answer of its analysis."""
        table = next((table for table in result.tables if table.name == entry.table), None)
        if table is None:
            return cls.skipped(entry, f"{entry.analysis} has no table {entry.table} in this version")
        if entry.column not in table.frame:
            return cls.skipped(entry, f"{entry.table} has no column {entry.column} for this model in this version")
        return cls(entry, tuple(cell(table.frame, keys, entry) for keys in entry.keys))

    def verdict(self, at: int) -> str:
        """One of VERDICTS."""
        measured = self.measured[at]
        if isinstance(measured, str):
            return "skipped"
        # Published decimals are no binary numbers: a value on the edge of the tolerance is within it.
        if abs(measured - self.entry.values[at]) <= self.entry.tolerance * (1 + 1e-9):
            return "agrees"
        return "open" if self.entry.doubt else "differs"

    def row(self, at: int) -> dict[str, Any]:
        """One value with everything that is said of it."""
        entry, found, verdict = self.entry, self.measured[at], self.verdict(at)
        measured = math.nan if isinstance(found, str) else found
        return {
            "entry": entry.name,
            "source": entry.cite,
            "model": entry.model,
            "quantity": entry.quantity,
            "place": place(entry.keys[at], entry.over),
            "published": entry.values[at],
            "measured": measured,
            "difference": measured - entry.values[at],
            "tolerance": entry.tolerance,
            "unit": entry.unit,
            "verdict": verdict,
            "why": found if isinstance(found, str) else entry.doubt if verdict == "open" else "",
            "precision": entry.precision,
        }


def cell(frame: pd.DataFrame, keys: Mapping[str, Key], entry: Published) -> float | str:
    """The value of the row with these keys, or what the entry makes of all such rows; a reason where there is none."""
    absent = [name for name in keys if name not in frame]
    if absent:
        return f"{entry.table} has no column {absent[0]} in this version"
    chosen = np.ones(len(frame), dtype=bool)
    for name, key in keys.items():
        chosen &= (frame[name].astype(str) == str(key)).to_numpy()
    values = frame.loc[chosen, entry.column].to_numpy(dtype=np.float64)
    if not len(values) or (len(values) > 1 and entry.over is None):
        return f"{len(values) or 'no'} rows of {entry.table} have {place(keys)}"
    value = float(OVER[entry.over](values)) if entry.over else float(values[0])
    return value if math.isfinite(value) else "undefined here"


def place(keys: Mapping[str, Key], over: str | None = None) -> str:
    """The keys of a row for people.

    >>> place({"layer": 3, "head": 5}), place({}, "median")
    ('layer 3 head 5', 'median')
    """
    return " ".join([*(f"{name} {key}" for name, key in keys.items()), *([over] if over else [])])


def result_of(measurements: Sequence[Measurement]) -> Result:
    """The table of all values, the short one for the terminal, and curves of what was measured."""
    rows = [each.row(at) for each in measurements for at in range(len(each.measured))]
    table = Table(
        "reproduce", "Published values beside measured ones", pd.DataFrame(rows, columns=list(COLUMNS)), COLUMNS
    )
    figures = _figure([each for each in measurements if _is_curve(each)])
    counts = table.frame["verdict"].value_counts()
    told = ", ".join(f"{counts.get(verdict, 0)} {said}" for verdict, said in zip(VERDICTS, _SAID, strict=True))
    return Result(_headline(table), (table,), figures, (f"{len(rows)} published values: {told}.",))


_SAID = ("agree", "differ", "open", "skipped")


def _headline(table: Table) -> Table:
    """Every measured value a row; what was skipped for one reason together."""
    frame = table.frame
    shown = ["entry", "model", "place", "published", "measured", "difference", "tolerance", "verdict"]
    skipped = frame["verdict"] == "skipped"
    alike = frame[skipped].groupby(["source", "model", "why"], sort=False)
    groups = [
        {"entry": _short(source), "model": model, "place": _counted(len(rows)), "verdict": f"skipped: {why}"}
        for (source, model, why), rows in alike
    ]
    measured = frame.loc[~skipped, shown]
    together = pd.DataFrame(groups, columns=shown).astype(measured.dtypes.to_dict())
    return Table(table.name, table.title, pd.concat([measured, together], ignore_index=True), COLUMNS)


def _short(cite: object) -> str:
    """Authors and year."""
    return str(cite).partition(", arXiv")[0]


def _counted(values: int) -> str:
    return f"{values} value{'s' * (values != 1)}"


def _is_curve(measurement: Measurement) -> bool:
    """Whether the entry's values run over one key that counts, and all were measured."""
    listed = [keys for keys in measurement.entry.rows.values() if isinstance(keys, list)]
    numbers = len(listed) == 1 and all(isinstance(key, int) for key in listed[0]) and len(listed[0]) > 1
    return numbers and not any(isinstance(value, str) for value in measurement.measured)


def _figure(curves: Sequence[Measurement]) -> tuple[Figure, ...]:
    if not curves:
        return ()
    panels = tuple(_panel(curve) for curve in curves)
    note = "Bands: the tolerance about the published values."
    return (Figure("reproduce", "Published and measured", panels, columns=min(3, len(panels)), note=note),)


def _panel(curve: Measurement) -> Lines:
    entry = curve.entry
    name, keys = next((name, keys) for name, keys in entry.rows.items() if isinstance(keys, list))
    x, y = np.array(keys, dtype=np.float64), np.array(entry.values)
    published = Series("published", x, y, y - entry.tolerance, y + entry.tolerance, dashed=True)
    measured = Series("measured", x, np.array(curve.measured, dtype=np.float64))
    return Lines((published, measured), name, entry.column.replace("_", " "), f"{entry.name}, {entry.model}")
