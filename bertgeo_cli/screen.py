"""What a person sees in the terminal: results and paths on stdout, everything else on stderr."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pandas as pd
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table as RichTable
from rich.text import Text

from analyses.kit.result import Result, Table

from .models import LoadedModel
from .report import MARKER, Written, json_ready

if TYPE_CHECKING:
    from .check import Proof

PLAIN_PROGRESS_SECONDS = 30
FILE_WIDTH = 160
UNKNOWN_LIMIT = 0.2
NEARLY_ALL = 0.9
FRAME = 3
"""What a table's lines and blanks take beside each cell."""


def say(text: str) -> None:
    """A line for people, on stderr."""
    print(text, file=sys.stderr, flush=True)


def say_model(loaded: LoadedModel) -> None:
    """Which model answers, and how to choose another."""
    shape = loaded.shape
    embedded = loaded.identity["kind"] == "embedded"
    what = "all-MiniLM-L6-v2, a BERT tuned as a sentence encoder; " if embedded else ""
    other = "; for BERT-base: --model bert-base-uncased" if embedded else ""
    sizes = f"{shape.layers} layers, {shape.heads} heads, width {shape.width}, {loaded.dtype}"
    say(f"Model: {loaded.name} ({what}{sizes}){other}")


def console() -> Console:
    """A console on stdout that takes users' text literally; wide where no terminal sets the width."""
    width = None if sys.stdout.isatty() else FILE_WIDTH
    return Console(width=width, markup=False, emoji=False, highlight=False, soft_wrap=False)


def print_table(table: Table) -> None:
    """A short table."""
    print_rows(table.title, list(table.frame.columns), table.frame.itertuples(index=False))


def print_rows(title: str, columns: Sequence[str], rows: Any) -> None:
    """A titled table of cells; numbers stand right with four digits. None is ever cut: wide tables are continued."""
    values = [list(row) for row in rows]
    drawn = [_Column.of(name, [row[at] for row in values]) for at, name in enumerate(columns)]
    out = console()
    for number, some in enumerate(_beside(drawn, out.width)):
        table = RichTable(title=Text("continued" if number else title), title_justify="left")
        tight = sum(max(map(len, (column.name, *column.cells))) + FRAME for column in some) >= out.width
        for column in some:
            width = column.least if tight and column.numeric else None
            table.add_column(Text(column.name), justify="right" if column.numeric else "left", width=width)
        for cells in zip(*(column.cells for column in some), strict=True):
            table.add_row(*map(Text, cells))
        out.print(table)


@dataclass(frozen=True)
class _Column:
    """What a column shows, and the least width at which nothing is cut and its name takes two lines at most."""

    name: str
    cells: tuple[str, ...]
    numeric: bool
    least: int
    key: bool

    @classmethod
    def of(cls, name: str, values: Sequence[Any]) -> Self:
        numbers = [isinstance(value, (int, float)) and not isinstance(value, bool) for value in values]
        key = not any(isinstance(value, float) for value in values)
        shown, cells = name.replace("_", " "), tuple(map(cell, values))
        words = [word for text in cells for word in text.split()]
        least = max([_in_two_lines(shown), *map(len, cells if all(numbers) else words)])
        return cls(shown, cells, all(numbers), least, key)


def _in_two_lines(name: str) -> int:
    """The width at which a name takes two lines.

    >>> _in_two_lines("intra similarity adjusted")
    16
    """
    words = name.split()
    cuts = ((" ".join(words[:at]), " ".join(words[at:])) for at in range(1, len(words) + 1))
    return min((max(map(len, cut)) for cut in cuts), default=0)


def _beside(columns: Sequence[_Column], width: int) -> Iterator[list[_Column]]:
    """Columns that fit beside each other, each time behind the leading ones that hold no measured value."""
    keys = list(takewhile(lambda column: column.key, columns))
    rest = list(columns[len(keys) :])
    if not rest:
        yield keys
    while rest:
        room = width - 1 - sum(column.least + FRAME for column in keys)
        used = accumulate(column.least + FRAME for column in rest)
        fit = max(sum(so_far <= room for so_far in used), 1)
        yield keys + rest[:fit]
        rest = rest[fit:]


def cell(value: Any) -> str:
    """A value as a table shows it; undefined values are empty."""
    if value is None or value is pd.NA or value != value:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def show(
    results: Mapping[str, Result],
    remarks: Sequence[str],
    written: Written,
    folder: Path,
    content: Mapping[str, Any],
    *,
    as_json: bool,
) -> None:
    """The headlines, remarks and the files written."""
    files = [str(folder / file) for file in [*written.files, MARKER]]
    if as_json:
        headlines = {name: _rows(result.headline) for name, result in results.items()}
        on_texts = {name: _rows(table) for name, result in results.items() if (table := result.headline_on_texts)}
        shown = _headlines("headline", headlines, content["command"])
        shown |= _headlines("headline_on_texts", on_texts, content["command"]) if on_texts else {}
        details = {name: {table.name: _rows(table) for table in result.details} for name, result in results.items()}
        shown |= _headlines("details", details, content["command"]) if any(details.values()) else {}
        print_json({"run": content, **shown, "files": files})
        return
    for remark in remarks:
        say(remark)
    for name, result in results.items():
        for table in (result.headline, *result.details):
            print_table(table)
        if result.headline_on_texts is not None:
            print_table(result.headline_on_texts)
        # The other notes on figures stand in the figures.
        for note in [*result.notes, *(note for note in written.notes.get(name, []) if "font" in note)]:
            say(note)
    print("\n".join(files))


def _headlines(what: str, tables: Mapping[str, Any], command: str) -> dict[str, Any]:
    """The one of a command that is an analysis; else all, by analysis."""
    return {what: tables[command]} if command in tables else {what.replace("headline", "headlines"): tables}


def _rows(table: Table) -> Any:
    return json.loads(table.frame.to_json(orient="records", double_precision=15))


def show_listing(table: Table, *, as_json: bool) -> None:
    """A table that needed no model."""
    if as_json:
        print_json(json.loads(table.frame.to_json(orient="records")))
    else:
        print_table(table)


def print_json(content: Any) -> None:
    """One valid JSON document on stdout."""
    print(json.dumps(json_ready(content), indent=2, ensure_ascii=False, allow_nan=False))


def show_plan(counts: Mapping[str, int], *, as_json: bool) -> None:
    """What a dry run found."""
    show_mapping("Dry run: nothing was written", dict(counts), as_json=as_json)


def show_mapping(title: str, content: Mapping[str, Any], *, as_json: bool) -> None:
    """Names and values."""
    if as_json:
        print_json(content)
        return
    print_rows(title, ["what", "value"], content.items())


def show_proofs(proofs: Sequence[Proof], *, as_json: bool) -> None:
    """Each proof with what was measured, the bound, and whether it holds."""
    if as_json:
        print_json([vars(proof) | {"holds": proof.holds} for proof in proofs])
        return
    rows = [
        ("pass" if proof.holds else "FAIL", proof.name, proof.measured, proof.bound, proof.what) for proof in proofs
    ]
    print_rows(
        "What was loaded, proved on the sample sentences (measured: worst deviation, relative where values exceed 1)",
        ["", "proof", "measured", "bound", "what"],
        rows,
    )


def summary(source: Mapping[str, Any]) -> str:
    """One line on the corpus that was read."""
    name = "the sample corpus (no text or --corpus was given)" if source["kind"] == "sample" else source["name"]
    status = ", ".join(f"{count} {status}" for status, count in source["status"].items())
    lines = f"{source['lines']} lines ({status})" if status else "no lines for this job"
    groups = ", ".join(f"{name or 'none'} {count}" for name, count in source.get("groups", {}).items())
    return f"Read {name}: {lines}, {source['tokens']} tokens." + (f" Texts by group: {groups}." if groups else "")


def too_few_shards(shards: int, jobs: int) -> list[str]:
    """A line for those who wonder why more jobs were no faster."""
    if shards >= jobs:
        return []
    return [f"The corpus has {shards} shard{'s' * (shards != 1)} for {jobs} jobs: lower --shard-texts to share it."]


def unknown_warning(unknown: int, tokens: int, advice: str) -> list[str]:
    """A line of warning when many tokens (not counting special ones) are unknown, with advice when nearly all are."""
    share = unknown / tokens if tokens else 0.0
    if share <= UNKNOWN_LIMIT:
        return []
    warning = f"Warning: {share:.0%} of the tokens are unknown to this model's vocabulary."
    return [warning + (advice if share >= NEARLY_ALL else "")]


class Bar:
    """Lines done: those of finished shards, and of those in work as many as they have texts done."""

    def __init__(self, show: Callable[[int], None]):
        self.show = show
        self.counts: dict[int, tuple[int, int]] = {}
        self.done = self.partly = 0

    def begin(self, shard: int, lines: int, texts: int) -> None:
        """A shard of so many lines, with so many texts, was read."""
        self.counts[shard] = lines, texts

    def advance(self, texts: int) -> None:
        """So many texts more of the shards in work are done."""
        self.partly += texts
        self.show(self.done + self.partly)

    def finish(self, shard: int) -> None:
        """A shard is done, whether or not its texts were told one by one."""
        lines, texts = self.counts.pop(shard)
        self.done += lines
        self.partly = max(0, self.partly - texts)
        self.show(self.done + self.partly)


@contextmanager
def progress(total: int | None) -> Iterator[Bar]:
    """Lines done: a bar where stderr is a terminal, else a line every 30 s."""
    if not sys.stderr.isatty():
        yield Bar(_plain_progress(total))
        return
    columns = (
        TextColumn("{task.completed:.0f} lines"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]:.0f} lines/s", style="dim"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    began = time.monotonic()
    with Progress(*columns, console=Console(stderr=True), transient=True) as drawn:
        task = drawn.add_task("", total=total, speed=0.0)

        def show(lines: int) -> None:
            drawn.update(task, completed=lines, speed=lines / max(time.monotonic() - began, 1e-9))

        yield Bar(show)


def _plain_progress(total: int | None) -> Callable[[int], None]:
    began = last = time.monotonic()

    def advance(line: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= PLAIN_PROGRESS_SECONDS:
            last = now
            of = f" of {total}" if total else ""
            say(f"{line}{of} lines, {line / (now - began):.0f} lines/s")

    return advance
