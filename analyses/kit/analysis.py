"""The shape of a question: settings, what it needs recorded, a state that merges, an answer."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Self, TypeVar

from .record import ForwardRecord, HeadWeights, ModelShape
from .result import Result, Table


class SettingsError(ValueError):
    """A setting that this model cannot satisfy; `hint` says what would."""

    def __init__(self, message: str, hint: str):
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True)
class Selection:
    """Layers or heads as the user wrote them: `all`, or numbers and ranges such as `0,3-5,-1` (counted from 0).

    >>> Selection("0,3-5,-1").resolve(12, "layer")
    (0, 3, 4, 5, 11)
    """

    text: str = "all"

    def resolve(self, count: int, what: str) -> tuple[int, ...]:
        """The chosen indices in rising order, each once. Raises SettingsError outside 0 .. count - 1."""
        if self.text.strip() == "all":
            return tuple(range(count))
        chosen = {index for part in self.text.split(",") for index in self._part(part.strip(), count, what)}
        return tuple(sorted(chosen))

    def _part(self, part: str, count: int, what: str) -> range:
        first, dash, last = part[1:].partition("-")
        try:
            start = int(part[:1] + first)
            stop = int(last) if dash else start
        except ValueError:
            raise SettingsError(
                f"{part!r} in {self.text!r} is no {what}",
                f"Write all, or numbers and ranges such as 0,3-5,-1 ({what}s).",
            ) from None
        low, high = (index + count if index < 0 else index for index in (start, stop))
        if not 0 <= low <= high < count:
            raise SettingsError(
                f"{what} {part} does not exist in a model with {count} {what}s",
                f"Choose from 0 to {count - 1}, or -{count} to -1 counted from the end.",
            )
        return range(low, high + 1)


ALL = Selection("all")


def setting(default: Any, help: str, *, name: str | None = None, least: int | None = None) -> Any:  # noqa: A002
    """A dataclass field that is an option of the command line: its default, a line of help, its least value."""
    metadata = {"help": help, "names": (f"--{name}",) if name else (), "extra": {} if least is None else {"min": least}}
    return dataclasses.field(default=default, metadata=metadata)


def derived() -> Any:
    """A field of a state for what `start` made of the weights: read by `update`, by `finalize` never.

    It is None once a shard is done: neither kept on disk nor sent to another process, where it may be large.
    """
    return dataclasses.field(default=None, metadata={"derived": True})


@dataclass
class State:
    """Accumulators that merge field by field; fields without a `merge` (settings, shapes) must agree."""

    def merge(self, other: Self) -> Self:
        """A new state as if both had seen their texts in turn; neither argument changes.

        What is derived comes from the side that has it.
        """
        merged = {
            field.name: _derived_of(field, self, other)
            if _is_derived(field)
            else _merged(getattr(self, field.name), getattr(other, field.name))
            for field in dataclasses.fields(self)
        }
        return type(self)(**merged)

    def lasting(self) -> Self:
        """The state without what was derived from the weights: all that `merge` and `finalize` read."""
        gone: dict[str, Any] = {field.name: None for field in dataclasses.fields(self) if _is_derived(field)}
        return dataclasses.replace(self, **gone)


def _is_derived(field: dataclasses.Field[Any]) -> bool:
    return bool(field.metadata.get("derived"))


def _derived_of(field: dataclasses.Field[Any], first: State, second: State) -> Any:
    own = getattr(first, field.name)
    return getattr(second, field.name) if own is None else own


def refuse_unknown(name: str, known: Collection[str], what: str) -> None:
    """Raise SettingsError for a name that is not `known`; the hint lists those that are."""
    if name not in known:
        raise SettingsError(f"unknown {what} {name!r}", f"Choose from {', '.join(known)}.")


def refuse_unknown_metric(metric: str, known: Collection[str]) -> None:
    """Raise SettingsError for a metric that is not `known`, and with the reason for the mean attention weight."""
    if metric.replace("_", "-") in ("mean", "mean-attention", "attention"):
        why = "the mean attention weight is no metric: rows sum to 1, so it is 1/n for every head"
        raise SettingsError(why, f"Choose from {', '.join(known)}.")
    refuse_unknown(metric, known, "metric")


def chosen_names(text: str, known: Collection[str], what: str) -> tuple[str, ...]:
    """The names in a comma-separated list, each once; all of the `known` for all. Raises SettingsError for others.

    >>> chosen_names("flow, rollout,flow", ("attention", "rollout", "flow"), "method")
    ('flow', 'rollout')
    """
    if text.strip() == "all":
        return tuple(known)
    chosen = tuple(dict.fromkeys(name.strip().replace("-", "_") for name in text.split(",")))
    for name in chosen:
        refuse_unknown(name, known, what)
    return chosen


def _merged(first: Any, second: Any) -> Any:
    if hasattr(first, "merge"):
        return first.merge(second)
    if isinstance(first, dict):
        return {key: _merged(first[key], second[key]) for key in first}
    if first is not second and first != second:
        raise ValueError(f"states of different settings do not merge: {first!r}, {second!r}")
    return first


S = TypeVar("S", bound=State)


@dataclass(frozen=True)
class Analysis(ABC, Generic[S]):
    """A question to a model. The class docstring is the command's help; dataclass fields are its options."""

    optional_values: ClassVar[Mapping[str, str]] = {}
    """Settings whose option may stand without a value, and what it then means: {"metric": "list"}."""

    @property
    @abstractmethod
    def needs(self) -> frozenset[str]:
        """Names of the recorded tensors that `update` and `finalize` read (see record.AXES)."""

    @property
    def needs_weights(self) -> bool:
        """Whether `start` is to be given the checkpoint's head weights: as a rule, where nothing is recorded."""
        return not self.needs

    def on_texts(self) -> Analysis[Any] | None:
        """The companion of an analysis of weights: what the same settings ask of texts, where the user gives some.

        Its answer joins that of the weights in one report. It is defined in `kit`, since it is no command of its own,
        and may read the weights in `start`; what it keeps of them there is a `derived` field. None: texts are refused.
        """
        return None

    def listing(self) -> Table | None:
        """A table that answers these settings without a model (`--metric list`), else None.

        Raises SettingsError for settings that no model can satisfy.
        """
        return None

    @abstractmethod
    def start(self, shape: ModelShape, weights: HeadWeights | None) -> S:
        """The empty state: the identity of merge. Raises SettingsError for settings that the model cannot satisfy."""

    def update(self, state: S, record: ForwardRecord) -> None:
        """Add a batch to the state: the only mutation."""
        raise NotImplementedError(f"{type(self).__name__} reads weights alone and is never updated")

    def per_text(self, state: S) -> Table | None:
        """The values of every sampled text, a row for each place (layer, head ...); None where texts have none."""
        return None

    @abstractmethod
    def finalize(self, state: S, record: ForwardRecord | None) -> Result:
        """The answer; `record` is there when there was a single text. Pure: the state stays as it was."""


def head_names(layers: Sequence[int], heads: Sequence[int]) -> tuple[str, ...]:
    """Names of heads as figures write them, layer by layer.

    >>> head_names([0, 1], [3])
    ('L0H3', 'L1H3')
    """
    return tuple(f"L{layer}H{head}" for layer in layers for head in heads)
