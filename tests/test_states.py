"""States as bytes: what goes in comes out, and nothing else is let in."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors.numpy import save

from analyses.kit.accumulators import Counts, Moments, Sample, Sampled
from bertgeo_cli.states import KEY, UnreadableStateError, from_bytes, to_bytes

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
numbers = arrays.arrays(st.sampled_from([np.float64, np.int64, np.bool_]), arrays.array_shapes(min_dims=0, min_side=0))
trees = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(trees)
def test_plain_values_come_back_with_their_types(tree: Any) -> None:
    back = from_bytes(to_bytes(tree), [])
    assert repr(back) == repr(tree)


@given(numbers)
def test_arrays_come_back_bit_for_bit(array: Any) -> None:
    back = from_bytes(to_bytes({"a": array}), [])["a"]
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()


def test_arrays_that_came_back_can_be_added_to() -> None:
    moments = Moments.empty(2)
    back = from_bytes(to_bytes(moments), [])
    back.add([[1.0, 3.0]])
    assert back.mean.tolist() == [1.0, 3.0]


def test_accumulators_come_back() -> None:
    sample = Sample(3, 7, [Sampled("ab", 1, 0, "é\ud800", np.array([[1.0, np.nan]]))])
    back = from_bytes(to_bytes((sample, Counts(1, 2))), [])
    assert repr(back) == repr((sample, Counts(1, 2)))


def test_equal_states_give_equal_bytes() -> None:
    state = {f"m{index}": Moments.empty(index) for index in range(20)}
    assert to_bytes(state) == to_bytes(state)


@dataclass
class Stranger:
    """A dataclass of no analysis."""

    value: int


def test_only_dataclasses_of_the_named_modules_are_made() -> None:
    data = to_bytes(Stranger(1))
    assert from_bytes(data, [__name__]) == Stranger(1)
    with pytest.raises(UnreadableStateError, match="Stranger"):
        from_bytes(data, ["analyses.attention"])


def test_what_is_no_dataclass_is_not_called() -> None:
    tree = {"dataclass": "import_module", "fields": {"name": "antigravity"}}
    with pytest.raises(UnreadableStateError, match="import_module"):
        from_bytes(save({}, {KEY: json.dumps(tree)}), ["bertgeo_cli.states"])


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"\x08" + b"\0" * 7 + b"{}      ", to_bytes([1, 2])[:-3]])
def test_other_bytes_are_no_state(data: bytes) -> None:
    with pytest.raises(UnreadableStateError):
        from_bytes(data, [])


def test_what_cannot_be_kept_is_refused_when_it_is_written() -> None:
    with pytest.raises(TypeError, match="function"):
        to_bytes({"a": lambda: 1})
