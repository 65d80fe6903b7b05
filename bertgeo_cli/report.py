"""What a run leaves on disk: run.json, tables and figures, written whole or not at all."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from analyses.kit.result import Graph, Result, Table

from .corpus import Line, is_nucleotides
from .errors import BertgeoError, UsageError
from .observation import Failure

TableFormat = Literal["csv", "parquet", "jsonl"]
FigureFormat = Literal["png", "svg", "pdf", "none"]
MARKER = "run.json"
LINES = "lines.csv"


@contextmanager
def draft(folder: Path, *, force: bool) -> Iterator[Path]:
    """A hidden neighbour of `folder` to write into; it takes the folder's place when the block ends well.

    A folder that a former run wrote (it holds run.json) is replaced, any other that is not empty only with `force`.
    Raises UsageError before any work when the folder may not be replaced or its parent not written.
    """
    check_replaceable(folder, force=force)
    target = folder.resolve()
    temporary = target.with_name(f".{target.name}.partial-{os.getpid()}")
    new_parent = not target.parent.exists()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target)
        temporary.mkdir()
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}", "Choose another --output folder.") from None
    try:
        yield temporary
        _flush(temporary)
        _replace(target, temporary)
    except OSError as error:
        raise BertgeoError(f"cannot write {folder}: {error.strerror or error}", "Nothing was replaced.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if new_parent:
            with suppress(OSError):  # not empty: the report is in it
                target.parent.rmdir()


def check_replaceable(folder: Path, *, force: bool) -> None:
    """Raise UsageError when `folder` cannot be made, or holds something that no run of ours wrote."""
    try:
        _check_replaceable(folder.resolve(), folder, force)
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}", "Choose another --output folder.") from None


def _check_replaceable(target: Path, folder: Path, force: bool) -> None:
    if target.exists() and not target.is_dir():
        raise UsageError(f"--output {folder} is a file", "Choose a folder.")
    foreign = sorted(_foreign(target)) if target.is_dir() and not force else []
    if foreign:
        raise UsageError(
            f"--output {folder} holds files that bertgeo did not write: {', '.join(foreign[:5])}",
            "Choose another folder, or replace it by --force.",
        )
    above = next(parent for parent in target.parents if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise UsageError(f"cannot write to {folder}: {above.name or above} is not a writable folder", "Choose another.")


def _foreign(target: Path) -> set[str]:
    """Files in a folder that its run.json, if it is one of ours, does not list."""
    names = {path.relative_to(target).as_posix() for path in target.rglob("*") if not path.is_dir()}
    try:
        run = json.loads((target / MARKER).read_text(encoding="utf-8"))
        return names - {MARKER, *run["files"]} if "bertgeo" in run["versions"] else names
    except (OSError, ValueError, KeyError, TypeError):
        return names


def _remove_leftovers(target: Path) -> None:
    for leftover in target.parent.glob(f".{target.name}.partial-*"):
        if not _alive(leftover.name.rpartition("-")[2]):
            shutil.rmtree(leftover, ignore_errors=True)


def _alive(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return int(process) != os.getpid()


def _flush(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as stream:
                os.fsync(stream.fileno())


def _replace(target: Path, temporary: Path) -> None:
    # Two renames: at every moment either the old or the new report is whole on disk.
    if not target.exists():
        temporary.rename(target)
        return
    old = target.with_name(f".{target.name}.partial-old-{os.getpid()}")
    target.rename(old)
    try:
        temporary.rename(target)
    except OSError:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def write_table(table: Table, folder: Path, form: TableFormat) -> str:
    """Write a table and return the file's name. Floats keep every digit; an undefined value is an empty cell."""
    path = folder / f"{table.name}.{form}"
    if form == "csv":
        table.frame.to_csv(path, index=False, lineterminator="\n")
    elif form == "jsonl":
        table.frame.to_json(path, orient="records", lines=True, double_precision=15, force_ascii=False)
    else:
        _write_parquet(table.frame, path)
    return path.name


def _write_parquet(frame: pd.DataFrame, path: Path) -> None:
    require_pyarrow("--format parquet")
    frame.to_parquet(path, index=False, engine="pyarrow")


def require_pyarrow(what: str) -> None:
    """Raise UsageError without pyarrow, which is an extra."""
    if find_spec("pyarrow") is None:
        raise UsageError(f"{what} needs pyarrow", "Install it: pip install 'bertgeo[parquet]'.")


def write_graph(graph: Graph, folder: Path) -> str:
    """Write a graph as GraphML and return the file's name; edges are numbered, for ids have to differ."""
    import networkx  # heavy, and few analyses have graphs

    made = networkx.MultiDiGraph()
    for row in _rows(graph.nodes):
        made.add_node(row.pop("node"), **row)
    for number, row in enumerate(_rows(graph.edges)):
        made.add_edge(row.pop("source"), row.pop("target"), key=number, **row)
    path = folder / f"{graph.name}.graphml"
    # The other writer, by lxml, is there only where that is installed, and writes other bytes.
    networkx.write_graphml_xml(made, path)
    return path.name


def _rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]


@dataclass
class Written:
    """Names of the files of a report, below its folder, and notes about the figures by analysis."""

    files: list[str] = field(default_factory=list)
    notes: dict[str, list[str]] = field(default_factory=dict)


def write_results(
    results: Mapping[str, Result], folder: Path, tables: TableFormat, figures: FigureFormat, *, nested: bool
) -> Written:
    """Write all tables, graphs and figures; `nested` gives every analysis a folder of its own."""
    written = Written()
    for name, result in results.items():
        below = name if nested else ""
        (folder / below).mkdir(exist_ok=True)
        files, notes = _write_result(result, folder / below, tables, figures)
        written.files += [f"{below}/{file}".lstrip("/") for file in files]
        written.notes[name] = notes
    return written


def _write_result(
    result: Result, folder: Path, table_format: TableFormat, figure_format: FigureFormat
) -> tuple[list[str], list[str]]:
    """All tables, graphs and figures; returns the file names and notes about the figures."""
    files = [write_table(table, folder, table_format) for table in result.tables]
    files += [write_graph(graph, folder) for graph in result.graphs]
    if figure_format == "none":
        return files, []
    from . import figures  # matplotlib costs a second, and only figures need it

    notes: list[str] = []
    for figure in result.figures:
        path = folder / f"{figure.name}.{figure_format}"
        notes.extend(figures.save(figure, path, figure_format))
        files.append(path.name)
    return files, list(dict.fromkeys(notes))


def hashes(folder: Path, files: Sequence[str]) -> dict[str, str]:
    """SHA-256 of files below a folder, by name."""
    return {name: file_hash(folder / name) for name in sorted(files)}


def file_hash(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_run(content: Mapping[str, Any], folder: Path) -> None:
    """Write run.json, which also marks the folder as ours."""
    text = json.dumps(json_ready(content), indent=2, ensure_ascii=False, allow_nan=False)
    (folder / MARKER).write_text(text + "\n", encoding="utf-8")


def json_ready(value: Any) -> Any:
    """The value with everything that JSON lacks made into what it has: NaN and NA become null."""
    if isinstance(value, Mapping):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_ready(item) for item in value]
    if value is pd.NA or (isinstance(value, float) and not math.isfinite(value)):
        return None
    return value.item() if hasattr(value, "item") else value


INCOMPLETE = ("truncated", "skipped", "undecodable", "failed")
"""Statuses of lines of which something was left out (blank lines had nothing)."""


class LinesLog:
    """lines.csv: every line of the corpus with its status, written as it passes.

    `labels` are the columns, `id` and `group`, that the corpus gives; `unread` is the first nucleotide sequence
    that is all unknown.
    """

    COLUMNS = ("status", "tokens", "used", "unknown", "unknown_share", "note")

    def __init__(self, folder: Path, labels: Sequence[str] = ()):
        self.labels = labels
        self.unread = ""
        self.counts: Counter[str] = Counter()
        self.groups: Counter[str] = Counter()
        self.lines = 0
        self.tokens = 0
        self.special = 0
        self.unknown = 0
        self.incomplete = 0
        self.path = folder / LINES
        self._stream = self.path.open("w", encoding="utf-8", newline="")
        self._writer = csv.writer(self._stream, lineterminator="\n")
        self._writer.writerow(("line", "part", *labels, *self.COLUMNS))

    def add(self, line: Line) -> None:
        """Write one line (or one part of a split line) and count it."""
        cells = {name: getattr(line, name) for name in (*self.labels, *self.COLUMNS)}
        row = {"line": line.number, "part": line.part, **cells}
        self.add_row({name: "" if cell is None else str(cell) for name, cell in row.items()}, line.special)
        if not self.unread and line.unknown_share == 1 and is_nucleotides(line.text):
            self.unread = line.text

    def add_row(self, row: Mapping[str, str], special: int = 0) -> None:
        """Write and count one row of such a file, and the special tokens among those used."""
        self._writer.writerow(row.values())
        whole = row["part"] == "0"
        self.lines += whole
        self.counts[row["status"]] += whole
        self.tokens += int(row["used"])
        self.special += special
        self.unknown += int(row["unknown"])
        self.incomplete += row["status"] in INCOMPLETE
        if "group" in row and row["used"] != "0":
            self.groups[row["group"]] += 1

    def mark_failed(self, failures: Sequence[Failure]) -> None:
        """Give the lines that turned out to fail their status; the file is finished by then."""
        if not failures:
            return
        notes = {(failure.line, failure.part): failure.message for failure in failures}
        with self.path.open(encoding="utf-8", newline="") as stream:
            rows = list(csv.DictReader(stream))
        lines = {failure.line for failure in failures}
        for row in rows:
            message = notes.get((int(row["line"]), int(row["part"])))
            if row["part"] == "0" and int(row["line"]) in lines:
                self.counts.subtract([row["status"]])
                self.counts["failed"] += 1
            if message is not None:
                self.incomplete += row["status"] in ("ok", "split")
                row |= {"status": "failed", "note": message}
        self.counts = +self.counts
        with self.path.open("w", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(stream, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)

    def close(self) -> None:
        """Finish the file."""
        self._stream.close()
