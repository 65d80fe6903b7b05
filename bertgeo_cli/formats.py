"""From bytes to entries: what the lines, rows or records of a corpus say, and what is wrong with them."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

from .errors import BertgeoError, UsageError
from .options import CorpusInput, CorpusOptions, InputOptions

SUFFIXES = {
    ".tsv": "tsv",
    ".csv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".fasta": "fasta",
    ".fa": "fasta",
    ".faa": "fasta",
    ".fna": "fasta",
}
"""Formats by the end of a file's name; every other is a text a line."""
GZIP_MAGIC = b"\x1f\x8b"
FIELD_LIMIT = 1 << 24
"""Characters of a cell: a quote mark that is never closed must not draw a whole corpus into memory."""
SCOUTED = 100
"""Lines of JSON that tell which fields there are."""
LISTED = 20
"""Columns that an error lists."""

FLAGS = {"text": "--column", "pair": "--pair-column", "id": "--id-column", "group": "--group-column"}
"""The option that names the column of each part of an entry."""
COLUMNS = ("column", "pair_column", "id_column", "group_column")
UNREAD_OF_TEXT = (*COLUMNS, "encoding", "input_format", "literal_quotes", "limit", "on_error")
UNREAD_OF_SAMPLE = (*COLUMNS, "encoding", "input_format", "literal_quotes")
UNREAD_OF_FORMAT = {
    "txt": (*COLUMNS, "literal_quotes"),
    "fasta": (*COLUMNS, "literal_quotes"),
    "jsonl": ("literal_quotes",),
    "csv": (),
    "tsv": (),
}

JSON = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=lambda _: None)
"""Numbers stay as they are written; NaN, which JSON does not know, is as good as null."""
STRAY_BYTE = re.compile("[\udc80-\udcff]")
SURROGATE = re.compile("[\ud800-\udfff]")
NO_RESIDUE = re.compile(r"[^A-Za-z*.\-]")

CURE_ENCODING = "Give the file's --encoding (say latin-1)"
CURE_LINE = "Correct the line"
CURE_CELLS = "Correct the row, or give --literal-quotes if its quote marks are text"
CURE_SEQUENCE = "Give sequences of residues, one a line or in FASTA"


@dataclass(frozen=True)
class Fault:
    """What is wrong with an entry, and what would help."""

    what: str
    cure: str = CURE_LINE


@dataclass(frozen=True)
class Entry:
    """One text of a corpus, or a fault in its place; `number` is that of the physical line where it starts."""

    number: int
    text: str = ""
    pair: str | None = None
    id: str = ""
    group: str = ""
    fault: Fault | None = None


@dataclass(frozen=True)
class Layout:
    """A corpus's format, and the column that each part of an entry is read from."""

    format: str
    columns: Mapping[str, str]


def name_of(source: Path | str) -> str:
    """A corpus as messages name it."""
    return "standard input" if source == "-" else Path(source).name


def is_compressed(path: Path | str) -> bool:
    """Whether a file's name says gzip."""
    return Path(path).suffix.lower() == ".gz"


def is_rereadable(source: Path | str) -> bool:
    """Whether a corpus can be read more than once: standard input, pipes and `<(...)` of a shell cannot."""
    path = Path(source)
    return source != "-" and not (path.is_fifo() or path.is_char_device() or path.is_socket())


def format_of(source: Path | str, options: CorpusOptions) -> str:
    """The format that was asked for, or that the name says, `.gz` left aside.

    >>> format_of("reviews.TSV.gz", CorpusOptions()), format_of("-", CorpusOptions())
    ('tsv', 'txt')
    """
    path = Path(source)
    suffix = Path(path.stem).suffix if is_compressed(path) else path.suffix
    return options.input_format or SUFFIXES.get(suffix.lower(), "txt")


def labels_of(source: Path | str, options: CorpusOptions) -> tuple[str, ...]:
    """Which of `id` and `group` a corpus gives its texts."""
    form = format_of(source, options)
    if form == "txt":
        return ()
    if form == "fasta":
        return ("id",)
    return tuple(part for part in _asked(options) if part in ("id", "group"))


# Before any work


def check(options: InputOptions | CorpusInput) -> None:
    """Refuse what cannot be read as asked: options that this input does not have, files, columns, sequences.

    Raises: UsageError; BertgeoError where the file is damaged before its first text.
    """
    if options.stride is not None and options.kmer is None and "stride" in options.typed:
        raise UsageError("--stride was given without --kmer", "Give the length of the K-mers by --kmer.")
    given = options.several or [text for text in (options.text, options.pair) if text]
    if given:
        _refuse_unread(options, UNREAD_OF_TEXT, "the input is a text")
        for text in given:
            as_read(text, options)
    elif options.corpus is None:
        _refuse_unread(options, UNREAD_OF_SAMPLE, "no --corpus")
    else:
        _check_corpus(options.corpus, options)


def _check_corpus(source: str, options: InputOptions | CorpusInput) -> None:
    form = format_of(source, options)
    _refuse_unread(options, UNREAD_OF_FORMAT[form], f"{name_of(source)} is read as {form}")
    if options.pair_column is not None and options.long == "split" and "pair_column" not in UNREAD_OF_FORMAT[form]:
        raise UsageError("--long split cannot cut pairs", "Choose --long truncate, skip or error.")
    _known_encoding(options.encoding)
    if is_rereadable(source):
        with open_entries(source, options):
            pass


def _refuse_unread(options: InputOptions | CorpusInput, unread: Sequence[str], why: str) -> None:
    # Only what was typed: a configuration file or the environment may speak of other inputs too.
    given = [name for name in unread if name in options.typed]
    if given:
        flag = "--" + given[0].replace("_", "-")
        raise UsageError(f"{flag} was given, but {why}", f"Leave {flag} out, or see --help for what reads it.")


def as_read(text: str, options: CorpusOptions) -> str:
    """A text given on the command line as the model is to read it: itself, or its K-mers.

    Raises: UsageError where K-mers were asked for and it is no sequence.
    """
    if options.kmer is None:
        return text
    entry = _sequence(Entry(1, text), options.kmer, options.stride or 1)
    if entry.fault:
        raise UsageError(f"the text {text!r}: {entry.fault.what}", f"{entry.fault.cure}, or leave --kmer out.")
    return entry.text


# Bytes and lines


@contextmanager
def open_entries(source: Path | str, options: CorpusOptions) -> Iterator[tuple[Layout, Iterator[Entry]]]:
    """The entries of a file or of standard input (`-`), streamed, and how they are laid out.

    Raises: UsageError for a file, encoding or column that is not there; BertgeoError for damaged gzip data.
    """
    form = format_of(source, options)
    with _open_text(source, _known_encoding(options.encoding)) as stream:
        lines = Lines(stream, name_of(source), options.encoding)
        columns, entries = READERS[form](lines, options)
        yield Layout(form, columns), _as_read(_with_end(entries, lines), form, options)


def _as_read(entries: Iterator[Entry], form: str, options: CorpusOptions) -> Iterator[Entry]:
    if options.kmer is not None:
        size, stride = options.kmer, options.stride or 1
    elif form == "fasta":
        size = stride = 1
    else:
        return entries
    return (_sequence(entry, size, stride) for entry in entries)


def _known_encoding(encoding: str) -> str:
    try:
        "".encode(encoding)
    except LookupError:
        raise UsageError(f"unknown encoding {encoding!r}", "Try utf-8, latin-1, cp1252 or utf-16.") from None
    return codecs.lookup(encoding).name


@contextmanager
def _open_text(source: Path | str, encoding: str) -> Iterator[IO[str]]:
    """Text whose undecodable bytes come through as lone surrogates, so that a line can be named."""
    with _open_bytes(source) as raw:
        packed = _is_gzip(raw, source)
        data: Any = gzip.GzipFile(fileobj=raw) if packed else raw
        # Only line feeds end a line: a lone carriage return is a character like any other.
        yield io.TextIOWrapper(data, encoding=encoding, errors="surrogateescape", newline="\n")


@contextmanager
def _open_bytes(source: Path | str) -> Iterator[io.BufferedReader]:
    try:
        if source == "-" and sys.stdin is None:
            raise OSError("it is closed")
        raw = open(sys.stdin.fileno() if source == "-" else source, "rb", closefd=source != "-")  # noqa: SIM115
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the corpus {source}: {error}", "Check the path of --corpus.") from None
    with raw:
        yield raw


def _is_gzip(raw: io.BufferedReader, source: Path | str) -> bool:
    """Files say by their name whether they are compressed, standard input by its first two bytes."""
    magic = raw.peek(2)[:2] == GZIP_MAGIC if source == "-" or is_compressed(source) else False
    if source != "-" and is_compressed(source) and not magic:
        raise UsageError(f"{name_of(source)} is named .gz, but holds no gzip data", "Rename it, or compress it.")
    return magic


class Lines:
    """Physical lines with their ends, counted: `number` is that of the line given last.

    Where the bytes of an encoding such as utf-16 go wrong no further line break can be found: the lines end, and
    `broken` says why.
    """

    def __init__(self, stream: Iterable[str], name: str, encoding: str):
        self.name = name
        self.encoding = encoding
        self.number = 0
        self.broken: Fault | None = None
        self._stream = iter(stream)

    def __iter__(self) -> Lines:
        return self

    def __next__(self) -> str:
        if self.broken:
            raise StopIteration
        try:
            line = next(self._stream)
        except UnicodeError as error:
            self.broken = Fault(f"{_undecoded(error, self.encoding)}, reading ends here", CURE_ENCODING)
            raise StopIteration from None
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            message = f"{self.name}: the gzip data are damaged or cut off after line {self.number} ({error})"
            raise BertgeoError(message, "Fetch or compress the file again; `gzip -t` tests it.") from None
        except OSError as error:
            raise BertgeoError(f"cannot read on after line {self.number}: {error}", "Check the corpus.") from None
        self.number += 1
        return line.removeprefix("\ufeff") if self.number == 1 else line

    def stray(self, *texts: str) -> Fault | None:
        """The first byte that does not decode."""
        found = next(filter(None, map(STRAY_BYTE.search, texts)), None)
        return found and Fault(f"byte 0x{ord(found[0]) - 0xDC00:02X} is not {self.encoding}", CURE_ENCODING)


def _undecoded(error: UnicodeError, encoding: str) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"bytes {error.object[error.start : error.end].hex(' ')} are not {encoding}"
    return str(error)


def _with_end(entries: Iterator[Entry], lines: Lines) -> Iterator[Entry]:
    yield from entries
    if lines.broken:
        yield Entry(lines.number + 1, fault=lines.broken)


# A text a line


Columns = dict[str, str]


def _read_texts(lines: Lines, options: CorpusOptions) -> tuple[Columns, Iterator[Entry]]:
    return {}, (
        Entry(lines.number, line.removesuffix("\n").removesuffix("\r"), fault=lines.stray(line)) for line in lines
    )


# Tables


def _read_table(delimiter: str, lines: Lines, options: CorpusOptions) -> tuple[Columns, Iterator[Entry]]:
    csv.field_size_limit(FIELD_LIMIT)
    quoting: Any = csv.QUOTE_NONE if options.literal_quotes else csv.QUOTE_MINIMAL
    # Strict: otherwise a quote mark that is never closed would swallow the rest of the corpus into one text.
    rows = _rows(csv.reader(lines, delimiter=delimiter, quoting=quoting, strict=True), lines)
    header = _header(rows, lines)
    columns = _columns(header, options, lines.name, "column")
    at = {part: header.index(column) for part, column in columns.items()}
    return columns, (_row_entry(number, row, len(header), at, lines) for number, row in rows)


def _rows(reader: Iterator[list[str]], lines: Lines) -> Iterator[tuple[int, list[str] | Fault]]:
    """Every row that is not blank, with the number of the line where it starts."""
    while True:
        number = lines.number + 1
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if lines.broken:
                return
            yield number, _csv_fault(error)
            continue
        if row:
            yield number, row


def _csv_fault(error: csv.Error) -> Fault:
    message = str(error)
    if message.startswith("new-line"):
        message = "a carriage return outside quote marks"
    elif message.startswith("unexpected end"):
        message = "a quote mark is never closed"
    return Fault(message, CURE_CELLS)


def _header(rows: Iterator[tuple[int, list[str] | Fault]], lines: Lines) -> list[str]:
    nothing = lines.broken or Fault("there is no header row", "Give it one that names the columns")
    number, header = next(rows, (1, nothing))
    fault = header if isinstance(header, Fault) else lines.stray(*header)
    if isinstance(header, list) and fault is None:
        return header
    raise BertgeoError(f"{lines.name}, line {number}: {fault and fault.what}", f"{fault and fault.cure}.")


def _row_entry(number: int, row: list[str] | Fault, width: int, at: Mapping[str, int], lines: Lines) -> Entry:
    if isinstance(row, Fault):
        return Entry(number, fault=row)
    fault = lines.stray(*row)
    if len(row) != width:
        # A delimiter inside an unquoted text would otherwise cut it.
        fault = fault or Fault(f"{len(row)} cells where the header has {width}", CURE_CELLS)
    return Entry(number, fault=fault) if fault else _entry(number, {part: row[column] for part, column in at.items()})


def _entry(number: int, parts: Mapping[str, str]) -> Entry:
    # In one line: CSV readers and writers do not agree on a lone carriage return in a cell.
    name, group = (" ".join(parts.get(part, "").split()) for part in ("id", "group"))
    return Entry(number, parts["text"], parts.get("pair"), name, group)


def _columns(names: Sequence[str], options: CorpusOptions, file: str, word: str) -> Columns:
    """The column of each part: those asked for, and for the text else the only one or `text` or `sentence`."""
    columns = _asked(options)
    for part, column in columns.items():
        if names.count(column) != 1:
            found = f"{names.count(column)} {word}s" if column in names else f"no {word}"
            flag = "--field" if word == "field" and part == "text" else FLAGS[part]
            raise UsageError(f"{file} has {found} {column!r}", f"Choose by {flag} from {_listed(names)}.")
    if "text" not in columns:
        columns = {"text": _text_column(names, columns, file, word), **columns}
    return columns


def _asked(options: CorpusOptions) -> Columns:
    named = zip(FLAGS, (getattr(options, name) for name in COLUMNS), strict=True)
    return {part: column for part, column in named if column is not None}


def _text_column(names: Sequence[str], columns: Columns, file: str, word: str) -> str:
    free = [name for name in names if name not in columns.values()]
    usual = [name for name in free if name.casefold() in ("text", "sentence")]
    for candidates in (free, usual):
        # A lone name with another delimiter in it is a header that was cut at the wrong one.
        if len(candidates) == 1 and not re.search(r"[\t;,|]", candidates[0]):
            return candidates[0]
    flag = "--field" if word == "field" else "--column"
    raise UsageError(f"{file} has the {word}s {_listed(names)}", f"Choose the one to read by {flag}.")


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:LISTED]))
    return f"{shown} and {len(names) - LISTED} more" if len(names) > LISTED else shown


# JSON lines


def _read_json_lines(lines: Lines, options: CorpusOptions) -> tuple[Columns, Iterator[Entry]]:
    scouted = [(lines.number, line) for line in islice(lines, SCOUTED)]
    objects = [found for _, line in scouted if isinstance(found := _object(line, lines), dict)]
    fields = list(dict.fromkeys(field for found in objects for field in found))
    # Without one valid object nothing can be said of the fields; every line then is a fault of its own.
    columns = _columns(fields, options, lines.name, "field") if fields else {"text": "text", **_asked(options)}
    numbered = chain(scouted, ((lines.number, line) for line in lines))
    return columns, (_json_entry(number, line, columns, lines) for number, line in numbered)


def _object(line: str, lines: Lines) -> dict[str, Any] | Fault:
    """The fields of one line."""
    if fault := lines.stray(line):
        return fault
    try:
        found = JSON.decode(line)
    except json.JSONDecodeError as error:
        return Fault(f"no valid JSON: {error.msg} at column {error.colno}")
    except RecursionError:
        return Fault("no valid JSON: nested too deeply")
    return found if isinstance(found, dict) else Fault("no JSON object of named fields")


def _json_entry(number: int, line: str, columns: Columns, lines: Lines) -> Entry:
    if not line.strip():
        return Entry(number)
    found = _object(line, lines)
    if isinstance(found, Fault):
        return Entry(number, fault=found)
    values = {part: _json_value(found, part, column) for part, column in columns.items()}
    parts = {part: value for part, value in values.items() if not isinstance(value, Fault)}
    faults = [value for value in values.values() if isinstance(value, Fault)]
    return Entry(number, fault=faults[0]) if faults else _entry(number, parts)


def _json_value(found: Mapping[str, Any], part: str, column: str) -> str | Fault:
    value = found.get(column)
    if value is None and part != "text":
        return ""
    if column not in found:
        return Fault(f"there is no field {column!r}")
    if value is None or isinstance(value, (dict, list)):
        kind = "null" if value is None else "an object" if isinstance(value, dict) else "a list"
        return Fault(f"field {column!r} is {kind}, no text")
    text = value if isinstance(value, str) else json.dumps(value)
    return Fault(f"field {column!r} holds half a surrogate pair") if SURROGATE.search(text) else text


# Sequences


class _Record:
    """A FASTA record while its lines come in."""

    def __init__(self, number: int, header: str | None, fault: Fault | None):
        self.number = number
        self.id = "" if fault else next(iter((header or "").split()), "")
        self.fault = fault
        self.parts: list[str] = []

    def add(self, number: int, line: str, stray: Fault | None) -> None:
        """Take a line of the sequence; after a fault nothing more is kept."""
        part = "".join(line.split())
        stranger = NO_RESIDUE.search(part)
        fault = stray or (Fault(f"{stranger[0]!r} is no residue") if stranger else None)
        if fault and not self.fault:
            self.fault = Fault(f"{fault.what} (line {number})", fault.cure)
        if not self.fault:
            self.parts.append(part)

    def entry(self) -> Entry:
        return Entry(self.number, "".join(self.parts), id=self.id, fault=self.fault)


def _read_fasta(lines: Lines, options: CorpusOptions) -> tuple[Columns, Iterator[Entry]]:
    return {}, (record.entry() for record in _records(lines))


def _records(lines: Lines) -> Iterator[_Record]:
    record = None
    for line in lines:
        if line.startswith(">"):
            if record:
                yield record
            record = _Record(lines.number, line[1:], lines.stray(line))
        elif line.strip():
            if record is None:
                record = _Record(lines.number, None, Fault("no > header stands before the sequence"))
            record.add(lines.number, line, lines.stray(line))
    if record:
        yield record


def kmers(sequence: str, size: int, stride: int = 1) -> str:
    """Stretches of `size` residues, one every `stride`, separated by spaces.

    >>> kmers("ATTGGCA", 6), kmers("ATTGGCA", 3, 2)
    ('ATTGGC TTGGCA', 'ATT TGG GCA')
    """
    return " ".join(sequence[start : start + size] for start in range(0, len(sequence) - size + 1, stride))


def _sequence(entry: Entry, size: int, stride: int) -> Entry:
    """The entry with its sequences, in capitals (small letters only mark masked stretches), as K-mers."""
    text, pair = entry.text.strip().upper(), (entry.pair or "").strip().upper()
    fault = entry.fault or _sequence_fault(text, size) or _sequence_fault(pair, size)
    if fault:
        return replace(entry, fault=fault)
    return replace(entry, text=kmers(text, size, stride), pair=kmers(pair, size, stride) or None)


def _sequence_fault(sequence: str, size: int) -> Fault | None:
    stranger = NO_RESIDUE.search(sequence)
    if stranger:
        return Fault(f"{stranger[0]!r} is no residue, and --kmer reads sequences", CURE_SEQUENCE)
    if 0 < len(sequence) < size:
        return Fault(f"{len(sequence)} residues are fewer than --kmer {size}", "Choose a smaller --kmer")
    return None


READERS: Mapping[str, Callable[[Lines, CorpusOptions], tuple[Columns, Iterator[Entry]]]] = {
    "txt": _read_texts,
    "tsv": lambda lines, options: _read_table("\t", lines, options),
    "csv": lambda lines, options: _read_table(",", lines, options),
    "jsonl": _read_json_lines,
    "fasta": _read_fasta,
}
