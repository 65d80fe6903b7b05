"""States as bytes and back: arrays as safetensors, the rest as JSON. Nothing that is read can run code."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from analyses.kit import accumulators

KEY = "bertgeo"
"""One key with JSON in it: safetensors writes several keys in random order, and equal states must give equal bytes."""

Arrays = dict[str, NDArray[Any]]


class UnreadableStateError(ValueError):
    """Bytes that no state of these analyses was written as."""


def to_bytes(content: Any) -> bytes:
    """Dataclasses, arrays, dicts, tuples, lists and plain values as one safetensors document.

    Raises TypeError for anything else.
    """
    arrays: Arrays = {}
    tree = _encoded(content, arrays)
    return save(arrays, {KEY: json.dumps(tree, separators=(",", ":"))})


def from_bytes(data: bytes, modules: Iterable[str]) -> Any:
    """What `to_bytes` was given; dataclasses are looked up by name in the accumulators, in the named modules, and in
    those that the latter's dataclasses come from.

    Raises UnreadableStateError for other bytes.

    >>> from analyses.kit.accumulators import Counts
    >>> from_bytes(to_bytes({"a": (Counts(1, 2), None)}), [])
    {'a': (Counts(texts=1, tokens=2), None)}
    """
    named = _dataclasses([accumulators, *map(import_module, modules)])
    known = _dataclasses(import_module(kind.__module__) for kind in named.values()) | named
    try:
        arrays = load(data)
        size = int.from_bytes(data[:8], "little")
        tree = json.loads(json.loads(data[8 : 8 + size])["__metadata__"][KEY])
        return _decoded(tree, arrays, known)
    except Exception as error:
        raise UnreadableStateError(f"no state: {type(error).__name__}: {error}") from error


def _dataclasses(modules: Iterable[ModuleType]) -> dict[str, type]:
    found = (value for module in modules for value in vars(module).values())
    return {value.__name__: value for value in found if isinstance(value, type) and dataclasses.is_dataclass(value)}


def _encoded(value: Any, arrays: Arrays) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.ndarray):
        arrays[name := f"{len(arrays):06}"] = np.asarray(value, order="C")
        return {"array": name}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (tuple, list)):
        return {type(value).__name__: [_encoded(item, arrays) for item in value]}
    if isinstance(value, Mapping):
        return {"dict": [[_encoded(key, arrays), _encoded(item, arrays)] for key, item in value.items()]}
    if dataclasses.is_dataclass(value):
        fields = {field.name: _encoded(getattr(value, field.name), arrays) for field in dataclasses.fields(value)}
        return {"dataclass": type(value).__name__, "fields": fields}
    raise TypeError(f"a state may not hold a {type(value).__name__}")


def _decoded(tree: Any, arrays: Arrays, known: Mapping[str, type]) -> Any:
    if not isinstance(tree, dict):
        return tree
    if "array" in tree:
        return arrays[tree["array"]]
    if "dataclass" in tree:
        fields = {name: _decoded(item, arrays, known) for name, item in tree["fields"].items()}
        return known[tree["dataclass"]](**fields)
    if "dict" in tree:
        return {_decoded(key, arrays, known): _decoded(item, arrays, known) for key, item in tree["dict"]}
    kind, items = next(iter(tree.items()))
    return {"tuple": tuple, "list": list}[kind](_decoded(item, arrays, known) for item in items)
