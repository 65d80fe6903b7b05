"""A portion of a shard -> what the analyses see of it: the only work that leaves the process."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import groupby
from typing import Any, Self

import pandas as pd
import torch
from threadpoolctl import ThreadpoolController

from analyses.kit.accumulators import Sample
from analyses.kit.analysis import Analysis, SettingsError, State
from analyses.kit.record import ForwardRecord, TokenizedText

from .cores import Done, Lanes
from .corpus import by_length, packed, portions
from .errors import BertgeoError, UsageError
from .models import LoadedModel
from .options import BATCH_TOKENS
from .recording import records, threads

Progress = Callable[[int], None]
States = list[State]


def silent(texts: int) -> None:
    """No progress."""


@dataclass(frozen=True)
class Pass:
    """How texts go through the model."""

    batch_tokens: int = BATCH_TOKENS
    backend: str = "eager"


@dataclass(frozen=True)
class Task:
    """What is to be done with every shard of a corpus: `analyses` by the command's name of each.

    With `grouped` there are states for every group of the corpus; `with_ids` says that its texts have ids; with
    `per_text` the values of every text are kept. A text that fails ends the run, or with `skip_failures` is left out
    and listed.
    """

    analyses: Mapping[str, Analysis[Any]]
    how: Pass = Pass()
    grouped: bool = False
    with_ids: bool = False
    per_text: bool = False
    skip_failures: bool = False


@dataclass(frozen=True)
class Failure:
    """A text whose pass or measurement raised an error."""

    line: int
    part: int
    message: str


@dataclass
class Observed:
    """What some shards gave: the states of all analyses by group ("" without groups), and what failed.

    `tables` holds the checksums of the files of per-text values.
    """

    groups: dict[str, States]
    failures: tuple[Failure, ...] = ()
    texts: int = 0
    tables: dict[str, str] = field(default_factory=dict)

    def merge(self, other: Self) -> Self:
        """Both, this one's shards before the other's; neither changes."""
        names = sorted(self.groups.keys() | other.groups.keys())
        groups = {name: merged_states(self.groups.get(name), other.groups.get(name)) for name in names}
        tables = self.tables | other.tables
        return type(self)(groups, self.failures + other.failures, self.texts + other.texts, tables)

    @property
    def whole(self) -> States:
        """The states of all groups together, merged in the order of their names."""
        states: States | None = None
        for name in sorted(self.groups):
            states = merged_states(states, self.groups[name])
        return states or []


def merged_states(first: States | None, second: States | None) -> States:
    """The states of two runs of shards, the first's texts before the second's; where one side is missing, the other."""
    if first is None or second is None:
        return first or second or []
    return [one.merge(other) for one, other in zip(first, second, strict=True)]


def needs_of(analyses: Sequence[Analysis[Any]]) -> frozenset[str]:
    """What one forward pass must record to serve all analyses."""
    return frozenset[str]().union(*(analysis.needs for analysis in analyses))


def start(analyses: Sequence[Analysis[Any]], loaded: LoadedModel) -> States:
    """The empty states. Raises UsageError for settings that the model cannot satisfy."""
    weights = loaded.head_weights() if any(analysis.needs_weights for analysis in analyses) else None
    try:
        with one_thread():
            return [analysis.start(loaded.shape, weights if analysis.needs_weights else None) for analysis in analyses]
    except SettingsError as error:
        raise UsageError(str(error), error.hint) from None


def observe(
    analyses: Sequence[Analysis[Any]],
    loaded: LoadedModel,
    texts: Sequence[TokenizedText],
    how: Pass,
    progress: Progress = silent,
) -> States:
    """The states of one shard: every analysis sees each forward pass."""
    found = [
        observe_groups(analyses, loaded, portion, how, progress, group_of=lambda text: "")[""]
        for portion in portions(texts)
    ]
    return reduce(merged_states, found) if found else start(analyses, loaded)


def observe_groups(
    analyses: Sequence[Analysis[Any]],
    loaded: LoadedModel,
    texts: Sequence[TokenizedText],
    how: Pass,
    progress: Progress = silent,
    *,
    group_of: Callable[[TokenizedText], str],
) -> dict[str, States]:
    """The states of one portion by group of texts; all groups share the forward passes."""
    groups: dict[str, States] = {}
    empty, count = start(analyses, loaded), torch.get_num_threads()
    passes = packed(by_length(texts), how.batch_tokens)
    with updating(analyses, count, how.batch_tokens) as update:
        for recorded in records(loaded, passes, needs=needs_of(analyses), backend=how.backend, count=count):
            for group, own in _by_group(recorded, group_of):
                states = groups.get(group) or groups.setdefault(group, merged_states(empty, empty))
                update(states, own, progress)
                del own
            del recorded  # not to be held during the next pass
    return groups


@contextmanager
def one_thread(blas: ThreadpoolController | None = None) -> Iterator[None]:
    """NumPy and torch compute with one thread: BLAS and LAPACK split sums by threads, which shows in the last bits."""
    with (blas or ThreadpoolController()).limit(limits=1, user_api="blas"), threads(1):
        yield


class Updates:
    """Adds records to the states of all analyses, of as many at a time as there are threads.

    Each of them sees one record after the other, in order: what goes on beside it leaves no trace. The caller goes on
    to the next record meanwhile, until more than `ahead` tokens wait to be measured.
    """

    def __init__(self, analyses: Sequence[Analysis[Any]], count: int, ahead: int):
        self._analyses = analyses
        self._ahead = ahead if count > 1 else 0  # what was done at once need not be held
        self._lanes = Lanes(count, len(analyses))
        self._waiting: deque[tuple[ForwardRecord, list[Done], Progress]] = deque()

    def __call__(self, states: States, recorded: ForwardRecord, then: Progress = silent) -> None:
        """Begin to add a record; `then` is told its number of texts when that is done."""
        works = [partial(one.update, state, recorded) for one, state in zip(self._analyses, states, strict=True)]
        self._waiting.append((recorded, self._lanes.put(works), then))
        self.finish(self._ahead)

    def finish(self, ahead: int = 0) -> None:
        """Wait until at most so many tokens wait. Raises what the first of them raises that fails."""
        while sum(len(recorded.texts) * len(recorded.texts[0]) for recorded, *_ in self._waiting) > ahead:
            recorded, measured, then = self._waiting[0]
            for done in measured:
                done.result()
            self._waiting.popleft()
            then(len(recorded.texts))

    def abandon(self) -> None:
        """Wait for what has begun, whatever it gives."""
        wait([done for _, measured, _ in self._waiting for done in measured])


@contextmanager
def updating(analyses: Sequence[Analysis[Any]], count: int, ahead: int) -> Iterator[Updates]:
    """Updates that are done on leaving."""
    with one_thread():
        updates = Updates(analyses, count, ahead)
        try:
            yield updates
            updates.finish()
        finally:
            updates.abandon()


def _by_group(recorded: ForwardRecord, group_of: Callable[[TokenizedText], str]) -> Iterator[tuple[str, ForwardRecord]]:
    """The record cut by group, groups in the order of their names."""
    names = [group_of(text) for text in recorded.texts]
    if len(set(names)) == 1:
        yield names[0], recorded
        return
    ordered = sorted(range(len(names)), key=names.__getitem__)
    for name, members in groupby(ordered, key=names.__getitem__):
        yield name, recorded.select(list(members))


@dataclass(frozen=True)
class Seen:
    """What a portion gave, or several, and the values of each of its texts by analysis, where asked for."""

    observed: Observed
    tables: Mapping[str, pd.DataFrame]

    def merge(self, other: Self) -> Self:
        """Both, this one's portions before the other's."""
        names = sorted(self.tables.keys() | other.tables.keys())
        sides = {name: [side.tables[name] for side in (self, other) if name in side.tables] for name in names}
        tables = {name: pd.concat(frames, ignore_index=True) for name, frames in sides.items()}
        return type(self)(self.observed.merge(other.observed), tables)

    def by_line(self) -> Self:
        """The same, its failures and the rows of its tables in the order of the corpus."""
        failures = sorted(self.observed.failures, key=lambda failure: (failure.line, failure.part))
        tables = {
            name: table.sort_values(["line", "part"], kind="stable", ignore_index=True)
            for name, table in self.tables.items()
        }
        return type(self)(dataclasses.replace(self.observed, failures=tuple(failures)), tables)


def observe_portion(
    task: Task, loaded: LoadedModel, texts: Sequence[TokenizedText], progress: Progress = silent
) -> Seen:
    """Do the task on a portion. Raises BertgeoError for a text that fails, which it names, unless such are skipped."""
    failures: list[Failure] = []
    try:
        groups = _observed_groups(task, loaded, texts, progress)
    except BertgeoError:
        raise
    except Exception as error:
        failures = _failures(task, loaded, texts)
        if not failures:
            raise
        if not task.skip_failures:
            raise failed(failures[0]) from error
        left_out = {(failure.line, failure.part) for failure in failures}
        groups = _observed_groups(task, loaded, [text for text in texts if (text.line, text.part) not in left_out])
    tables = _tables(task, groups) if task.per_text else {}
    groups = {group: [state.lasting() for state in _limited(task, states)] for group, states in groups.items()}
    return Seen(Observed(groups, tuple(failures), len(texts) - len(failures)), tables)


def failed(failure: Failure) -> BertgeoError:
    """The error for a text that fails and may not be skipped."""
    hint = "Leave it out by --on-error skip, or see the traceback by --debug."
    return BertgeoError(f"line {failure.line} failed: {failure.message}", hint)


def _observed_groups(
    task: Task, loaded: LoadedModel, texts: Sequence[TokenizedText], progress: Progress = silent
) -> dict[str, States]:
    analyses = [_sampling(analysis, len(texts)) if task.per_text else analysis for analysis in task.analyses.values()]
    group_of: Callable[[TokenizedText], str] = (lambda text: text.group) if task.grouped else (lambda text: "")
    return observe_groups(analyses, loaded, texts, task.how, progress, group_of=group_of)


def _sampling(analysis: Analysis[Any], texts: int) -> Analysis[Any]:
    """The analysis with a sample that keeps every text."""
    settings: dict[str, Any] = {"sample": texts}
    return dataclasses.replace(analysis, **settings) if hasattr(analysis, "sample") else analysis


def _failures(task: Task, loaded: LoadedModel, texts: Sequence[TokenizedText]) -> list[Failure]:
    """The texts that fail on their own."""
    failures = []
    for text in texts:
        try:
            _observed_groups(task, loaded, [text])
        except Exception as error:
            failures.append(Failure(text.line, text.part, " ".join(f"{type(error).__name__}: {error}".split())))
    return failures


def _tables(task: Task, groups: Mapping[str, States]) -> dict[str, pd.DataFrame]:
    tables = {}
    for at, (name, analysis) in enumerate(task.analyses.items()):
        parts = {group: analysis.per_text(states[at]) for group, states in groups.items()}
        frames = [_labelled(part.frame, group, task) for group, part in parts.items() if part is not None]
        if frames:
            tables[name] = pd.concat(frames, ignore_index=True)
    return tables


def _labelled(frame: pd.DataFrame, group: str, task: Task) -> pd.DataFrame:
    """The same columns in every shard, whether its texts have an id or not."""
    if task.with_ids and "id" not in frame:
        frame.insert(list(frame).index("part") + 1, "id", "")
    if task.grouped:
        frame.insert(0, "group", group)
    return frame


def _limited(task: Task, states: States) -> States:
    """The states with samples of the size that was asked for."""
    return [
        dataclasses.replace(state, **_samples(state, analysis.sample)) if hasattr(analysis, "sample") else state
        for analysis, state in zip(task.analyses.values(), states, strict=True)
    ]


def _samples(state: State, size: int) -> dict[str, Sample]:
    return {name: value.limited(size) for name, value in vars(state).items() if isinstance(value, Sample)}
