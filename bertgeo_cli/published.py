"""Published values as data: read from a TOML file, whole and valid or not at all."""

from __future__ import annotations

import dataclasses
import math
import tomllib
import typing
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from .errors import UsageError

PUBLISHED = Path(__file__).with_name("published.toml")
"""The values that bertgeo brings; the beginning of the file says what its fields are."""

Key = str | int
Over = Literal["mean", "median", "min", "max"]
OVER: Mapping[str, Any] = {"mean": np.mean, "median": np.median, "min": np.min, "max": np.max}
"""What is made of several rows where one value was published of them."""


@dataclass(frozen=True)
class Published:
    """One published curve or value, what measures it, and how exactly it is known."""

    name: str
    source: str
    cite: str
    model: str
    family: str
    quantity: str
    analysis: str
    table: str
    column: str
    values: list[float]
    unit: str
    tolerance: float
    precision: str
    rows: dict[str, Key | list[Key]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    over: Over | None = None
    corpus: str = ""
    tokens: int = 0
    doubt: str = ""

    @property
    def keys(self) -> list[dict[str, Key]]:
        """The keys of the rows that each value is read from.

        >>> names = "name source cite model family quantity analysis table column unit precision"
        >>> rows = {"layer": [0, 3], "head": 5}
        >>> Published(**dict.fromkeys(names.split(), ""), values=[0.1, 0.2], tolerance=0.1, rows=rows).keys
        [{'layer': 0, 'head': 5}, {'layer': 3, 'head': 5}]
        """
        return [
            {name: keys[at] if isinstance(keys, list) else keys for name, keys in self.rows.items()}
            for at in range(len(self.values))
        ]


def read_published(path: Path) -> list[Published]:
    """Every entry of a file. Raises UsageError, naming the entry, for what is missing, unknown or no number."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"--values {path}: {error}", _HINT) from None
    listed = content.get("published")
    if not isinstance(listed, list) or not listed:
        raise _wrong(path, "it has no [[published]]")
    entries = [_entry(content, item, partial(_wrong, path)) for item in listed]
    twice = [name for name, count in Counter(entry.name for entry in entries).items() if count > 1]
    if twice:
        raise _wrong(path, f"two entries are called {twice[0]!r}")
    return entries


_HINT = "The file that bertgeo brings, published.toml, says at its beginning what stands where."


def _wrong(path: Path, what: str) -> UsageError:
    return UsageError(f"--values {path.name}: {what}", _HINT)


def _entry(content: Mapping[str, Any], item: Any, wrong: Any) -> Published:
    """One entry with what its source, model and corpus say of it."""
    told = item.get("name") if isinstance(item, dict) else item
    source, model = (_named(content, f"{kind}s", item, kind, told, wrong) for kind in ("source", "model"))
    fields = {**source, **item, "family": model.get("family")}
    if fields.get("corpus"):
        fields["corpus"] = _named(content, "corpora", fields, "corpus", told, wrong).get("about")
    known = {each.name: each for each in dataclasses.fields(Published)}
    for name in fields.keys() - known.keys():
        raise wrong(f"{told!r} has an unknown field {name!r}")
    for name, each in known.items():
        _refuse_field(name, fields.get(name), each, told, wrong)
    entry = Published(**fields | {"values": [float(value) for value in fields["values"]]})
    _refuse_uneven(entry, wrong)
    return entry


def _named(content: Mapping[str, Any], table: str, item: Any, kind: str, told: Any, wrong: Any) -> dict[str, Any]:
    """What the file says of the source, model or corpus that an entry names."""
    name = item.get(kind) if isinstance(item, dict) else None
    found = content.get(table, {}).get(name) if isinstance(name, str) else None
    if not isinstance(found, dict):
        raise wrong(f"{told!r} names {kind} {name!r}, which is not in [{table}]")
    return dict(found)


KINDS: Mapping[str, tuple[type, ...]] = {"tolerance": (int, float), "values": (list,), "tokens": (int,)}


def _refuse_field(name: str, value: Any, known: dataclasses.Field[Any], told: Any, wrong: Any) -> None:
    if value is None:
        if known.default is dataclasses.MISSING and known.default_factory is dataclasses.MISSING:
            raise wrong(f"{told!r} has no {name}")
        return
    kind = KINDS.get(name, (dict,) if name in ("rows", "settings") else (str,))
    numbers = value if name == "values" else [value] if name == "tolerance" else []
    if not isinstance(value, kind) or value == [] or not all(_is_number(number) for number in numbers):
        raise wrong(f"{told!r}: {name} cannot be {value!r}")
    if name == "over" and value not in typing.get_args(Over):
        raise wrong(f"{told!r}: over cannot be {value!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _refuse_uneven(entry: Published, wrong: Any) -> None:
    """Every list of keys has a key for each value, and no two values have the same keys."""
    for name, keys in entry.rows.items():
        if isinstance(keys, list) and len(keys) != len(entry.values):
            raise wrong(f"{entry.name!r} has {len(entry.values)} values and {len(keys)} of {name}")
    if len({tuple(keys.items()) for keys in entry.keys}) < len(entry.values):
        raise wrong(f"{entry.name!r} has two values for the same rows")
    if entry.tolerance < 0 or entry.tokens < 0:
        raise wrong(f"{entry.name!r}: tolerance and tokens are 0 or more")
