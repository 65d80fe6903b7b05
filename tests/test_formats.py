"""What a corpus file says, whatever its format: the same texts give the same numbers (cases F1, F2, F3, F9, T6)."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import tiny
import transformers
from conftest import Run
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cli import assert_error, content, files_of

from bertgeo_cli.corpus import Encoder, Line, Reading, kmer_size, prepare, read_lines
from bertgeo_cli.errors import BertgeoError, UsageError
from bertgeo_cli.formats import FIELD_LIMIT, Entry, Layout, kmers, open_entries
from bertgeo_cli.models import LoadedModel, load_model
from bertgeo_cli.options import CorpusOptions


def read(file: Path | str, **options: Any) -> tuple[Layout, list[Entry]]:
    with open_entries(file, CorpusOptions(**options)) as (layout, entries):
        return layout, list(entries)


def entries_of(data: bytes, file: Path, **options: Any) -> list[Entry]:
    file.write_bytes(data)
    return read(file, **options)[1]


def faults(entries: list[Entry]) -> dict[int, str]:
    return {entry.number: entry.fault.what for entry in entries if entry.fault}


def written(rows: list[list[str]], **dialect: Any) -> bytes:
    stream = io.StringIO()
    csv.writer(stream, **dialect).writerows(rows)
    return stream.getvalue().encode()


# Every format, plain, compressed and from standard input


TEXTS = ["the cat sat on the mat", 'a "dog", very old', "we ran to the river", "caf\u00e9"]
# The txt has a blank line where a table has its header, so that line numbers agree too.
TXT = "\n".join(["", *TEXTS, ""]).encode()
SAME: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "c.txt": (TXT, ()),
    "c.text": (TXT, ()),
    "c.csv": (written([["n", "text"], *([str(n), text] for n, text in enumerate(TEXTS))]), ()),
    "c.TSV": (written([["n", "what"], *([str(n), text] for n, text in enumerate(TEXTS))], delimiter="\t"),
              ("--column", "what")),
    "c.jsonl": (b"\n" + b"".join(json.dumps({"n": 1, "what": text}).encode() + b"\n" for text in TEXTS),
                ("--field", "what")),
    "c.ndjson": (b"\n" + b"".join(json.dumps({"what": text}, ensure_ascii=False).encode() + b"\n" for text in TEXTS),
                 ()),
}  # fmt: skip


def tables(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in files_of(folder).items() if name not in ("lines.csv", "run.json")}


@pytest.mark.parametrize("name", [*SAME, *(f"{name}.gz" for name in SAME)])
def test_every_format_gives_the_bytes_of_the_text_file(fast: Run, tmp_path: Path, name: str) -> None:
    (tmp_path / "plain.txt").write_bytes(TXT)
    data, options = SAME[name.removesuffix(".gz")]
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    for corpus, folder, chosen in (("plain.txt", "plain", ()), (name, "out", options)):
        done = fast("attention", "--corpus", corpus, "-o", folder, *chosen)
        assert done.exit_code == 0, done.output
    assert tables(tmp_path / "out") == tables(tmp_path / "plain")
    assert tables(tmp_path / "out")


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
@pytest.mark.parametrize("name", SAME)
def test_standard_input_is_read_like_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, pack: Callable[[bytes], bytes]
) -> None:
    data, options = SAME[name]
    (tmp_path / name).write_bytes(data)
    reading, writing = os.pipe()
    os.write(writing, pack(data))
    os.close(writing)
    column = options[1] if options else None
    form = {"ndjson": "jsonl", "text": "txt"}.get(name[2:].lower(), name[2:].lower())
    with os.fdopen(reading, "rb") as pipe:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(pipe))
        found = read("-", column=column, input_format=form)
        sys.stdin.detach()
    assert found == read(tmp_path / name, column=column)
    assert [entry.text for entry in found[1] if entry.text] == TEXTS


def test_a_compressed_corpus_comes_from_standard_input(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from bertgeo_cli.cli import main; main()", "attention", "--corpus", "-"]
    data, options = SAME["c.jsonl"]
    done = subprocess.run(
        [*command, "--input-format", "jsonl", *options, "--json", "-o", "out", "--figures", "none"],
        input=gzip.compress(data), capture_output=True, cwd=tmp_path, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)["run"]["input"]
    assert (told["format"], told["columns"], told["sha256"]) == ("jsonl", {"text": "what"}, None)
    assert told["status"] == {"empty": 1, "ok": 4}


def test_a_pipe_is_read_once(fast: Run, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    writer = threading.Thread(target=(tmp_path / "pipe.csv").write_bytes, args=(SAME["c.csv"][0],))
    writer.start()
    done = fast("attention", "--corpus", "pipe.csv", "-o", "out")
    writer.join(timeout=30)
    assert done.exit_code == 0, done.output
    assert content(tmp_path / "out")["input"]["status"] == {"ok": 4}


def test_the_format_may_be_said(tmp_path: Path) -> None:
    assert read_as("a,b\nc,d\n", tmp_path / "c.csv", "txt") == ["a,b", "c,d"]
    assert read_as("text\tb\nc\td\n", tmp_path / "c.txt", "tsv") == ["c"]
    assert read_as(">a\nAT\n", tmp_path / "c.jsonl.gz", "fasta", gzip.compress) == ["A T"]


def read_as(text: str, file: Path, form: str, pack: Callable[[bytes], bytes] = bytes) -> list[str]:
    return [entry.text for entry in entries_of(pack(text.encode()), file, input_format=form)]


# Independent readers


ROWS = [
    ["id", "text", "other", "group"],
    ["1", "the cat", "and a dog", "x"],
    ["b\u00e9", 'a "quoted", text', "", "y"],
    ["1", "two\nlines\n\nand a blank", "p\nq", ""],
    ["", "a lone \r return", "r", "x"],
]
PARTS = {"pair_column": "other", "id_column": "id", "group_column": "group"}


@pytest.mark.parametrize(("name", "delimiter"), [("c.csv", ","), ("c.tsv", "\t")])
def test_tables_are_what_csv_and_pandas_read(tmp_path: Path, name: str, delimiter: str) -> None:
    file = tmp_path / name
    found = entries_of(written(ROWS, delimiter=delimiter), file, column="text", **PARTS)
    with file.open(newline="") as stream:
        rows = list(csv.DictReader(stream, delimiter=delimiter))
    frame = pd.read_csv(file, sep=delimiter, keep_default_na=False, dtype=str)
    assert [[e.id, e.text, e.pair, e.group] for e in found] == [list(row.values()) for row in rows] == ROWS[1:]
    assert [[e.id, e.text, e.pair, e.group] for e in found] == frame.to_numpy().tolist()
    assert [entry.number for entry in found] == [2, 3, 4, 9]


def test_json_lines_are_what_pandas_reads(tmp_path: Path) -> None:
    frame = pd.DataFrame(ROWS[1:], columns=ROWS[0])
    file = tmp_path / "c.jsonl"
    frame.to_json(file, orient="records", lines=True)
    found = read(file, column="text", **PARTS)[1]
    assert [[e.id, e.text, e.pair, e.group] for e in found] == ROWS[1:]
    assert [entry.number for entry in found] == [1, 2, 3, 4]


CELLS = st.text(st.characters(exclude_categories=("Cs",)))


@settings(deadline=None)  # a file is written
@given(texts=st.lists(CELLS, max_size=5), delimiter=st.sampled_from([",", "\t"]))
def test_any_text_written_by_csv_comes_back(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], delimiter: str
) -> None:
    file = tmp_path_factory.getbasetemp() / f"any.{'csv' if delimiter == ',' else 'tsv'}"
    data = written([["text", "id"], *([text, text] for text in texts)], delimiter=delimiter, quoting=csv.QUOTE_ALL)
    found = entries_of(data, file, id_column="id")
    assert [entry.text for entry in found] == texts
    assert [entry.id for entry in found] == [" ".join(text.split()) for text in texts]  # ids are one line
    assert faults(found) == {}


@settings(deadline=None)  # a file is written
@given(texts=st.lists(CELLS, max_size=5), ascii_only=st.booleans())
def test_any_text_written_as_json_comes_back(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], ascii_only: bool
) -> None:
    file = tmp_path_factory.getbasetemp() / "any.jsonl"
    lines = (json.dumps({"text": text, "id": text}, ensure_ascii=ascii_only) for text in texts)
    found = entries_of("\n".join(lines).encode(), file, id_column="id")
    assert [entry.text for entry in found] == texts
    assert [entry.id for entry in found] == [" ".join(text.split()) for text in texts]  # ids are one line


# F1, F2: blank lines, marks, line ends


@pytest.mark.parametrize("name", ["c.txt", "c.tsv", "c.csv", "c.jsonl", "c.fasta"])
@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.encode("utf-8-sig"),
        lambda text: text.replace("\n", "\r\n").encode(),
        lambda text: text.removesuffix("\n").encode(),
        lambda text: text.replace("\n", "\r\n").removesuffix("\r\n").encode("utf-8-sig"),
        lambda text: gzip.compress(text.replace("\n", "\r\n").encode("utf-8-sig")),
    ],
)
def test_f2_mark_line_ends_and_last_newline_change_nothing(
    tmp_path: Path, name: str, change: Callable[[str], bytes]
) -> None:
    plain = {
        "c.txt": "the cat\n\na dog\n",
        "c.tsv": 'text\tid\nthe cat\t1\n\n"a dog"\t2\n',
        "c.csv": 'text,id\nthe cat,1\n\n"a dog",2\n',
        "c.jsonl": '{"text": "the cat"}\n\n{"text": "a dog"}\n',
        "c.fasta": ">a b\nATT\nGG\n\n>c\nTT\n",
    }[name]
    expected = entries_of(plain.encode(), tmp_path / name)
    data = change(plain)
    file = tmp_path / (f"{name}.gz" if data.startswith(b"\x1f") else name)
    assert entries_of(data, file) == expected
    assert faults(expected) == {}


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "latin-1"])
def test_other_encodings_are_read_in_every_format(tmp_path: Path, encoding: str) -> None:
    for name, text in (("c.csv", "n,text\n1,caf\u00e9\n"), ("c.jsonl", '{"text": "caf\u00e9"}\n')):
        assert entries_of(text.encode(encoding), tmp_path / name, encoding=encoding)[0].text == "caf\u00e9"


def test_f1_blank_cells_are_empty_and_blank_rows_keep_the_numbers(tmp_path: Path) -> None:
    data = "id,text\n1,the cat\n\n2,\n3,\u200b\n4,a dog\n".encode()
    lines = list(read_lines(entries_of(data, tmp_path / "c.csv"), Reading(), "c.csv"))
    assert [(line.number, line.status) for line in lines] == [(2, "ok"), (4, "empty"), (5, "empty"), (6, "ok")]
    data = b'{"text": "the cat"}\n\n{"text": ""}\n'
    lines = list(read_lines(entries_of(data, tmp_path / "c.jsonl"), Reading(), "c.jsonl"))
    assert [(line.number, line.status) for line in lines] == [(1, "ok"), (2, "empty"), (3, "empty")]


# F3: entries with a fault


BAD = {
    "c.csv": (b"id,text\n1,the cat\n2,caf\xe9\n3\n4,a,b\n5,a \"b\" c\n6,\"x\" y\n7,a\rb\n8,a dog\n",
              {3: "0xE9", 4: "1 cells where the header has 2", 5: "3 cells", 7: "expected after", 8: "carriage"},
              {2: "the cat", 6: 'a "b" c', 9: "a dog"}),
    "c.tsv": (b'text\tid\nthe cat\t1\n"never closed\t2\na dog\t3\n', {3: "never closed"}, {2: "the cat"}),
    "c.jsonl": (b'{"text": "the cat", "id": 1}\n{"text": \n["a"]\n{"id": 2}\n{"text": null}\n{"text": {"a": 1}}\n'
                b'{"text": ["a"]}\n{"text": "caf\xe9"}\n{"text": "\\ud83d"}\n' + b"[" * 100_000 + b"\n"
                b'{"text": 1.50, "id": 1e400}\n{"text": true, "id": null}\n{"text": "a", "id": [1]}\n{"text": NaN}\n',
                {2: "JSON", 3: "object", 4: "no field 'text'", 5: "null", 6: "an object", 7: "a list", 8: "0xE9",
                 9: "surrogate", 10: "", 13: "'id' is a list", 14: "null"},
                {1: "the cat", 11: "1.50", 12: "true"}),
    "c.fasta": (b"AT\n>a\nATTG\n>b\nAT\nG1\nTT\n>caf\xe9\nAT\n>d\n; a remark\n>e\nGG\n",
                {1: "no > header", 4: "'1' is no residue (line 6)", 8: "0xE9", 10: "';' is no residue (line 11)"},
                {2: "A T T G", 12: "G G"}),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_f3_faults_name_the_line_and_leave_the_others_whole(tmp_path: Path, name: str) -> None:
    data, wrong, right = BAD[name]
    options = {"id_column": "id"} if name != "c.fasta" else {}
    found = entries_of(data, tmp_path / name, **options, **({} if name == "c.fasta" else {"column": "text"}))
    assert set(faults(found)) == set(wrong)
    assert [(number, part) for number, part in wrong.items() if part not in faults(found)[number]] == []
    assert {entry.number: entry.text for entry in found if not entry.fault} == right


def test_numbers_of_json_keep_their_spelling(tmp_path: Path) -> None:
    found = entries_of(BAD["c.jsonl"][0], tmp_path / "c.jsonl", id_column="id", column="text")
    assert [entry.id for entry in found if not entry.fault] == ["1", "1e400", ""]


@pytest.mark.parametrize("name", BAD)
def test_f3_a_fault_stops_the_run_or_is_skipped_and_counted(fast: Run, tmp_path: Path, name: str) -> None:
    data, wrong, right = BAD[name]
    (tmp_path / name).write_bytes(data)
    options = ("--corpus", name, *(() if name == "c.fasta" else ("--column", "text", "--id-column", "id")))
    first = min(wrong)
    assert_error(fast("attention", *options), 1, f"{name}, line {first}: ", wrong[first], "--on-error skip")
    done = fast("attention", *options, "--on-error", "skip", "-o", "out", "--strict")
    assert done.exit_code == 3, done.output
    assert content(tmp_path / "out")["input"]["status"] == {"ok": len(right), "undecodable": len(wrong)}
    lines = pd.read_csv(tmp_path / "out" / "lines.csv", keep_default_na=False)
    noted = lines[lines["status"] == "undecodable"]
    assert list(noted["line"]) == list(wrong)
    assert all(part in note for part, note in zip(wrong.values(), noted["note"], strict=True))


def test_broken_utf_16_ends_a_table_with_a_fault(tmp_path: Path) -> None:
    data = "text\nthe cat\na dog\n".encode("utf-16-le") + b"x"
    found = entries_of(data, tmp_path / "c.csv", encoding="utf-16-le")
    assert [entry.fault is None for entry in found][-1] is False
    assert "reading ends here" in faults(found)[found[-1].number]


def test_nul_bytes_are_characters(tmp_path: Path) -> None:
    assert entries_of(b"text\na\0b\n", tmp_path / "c.csv")[0].text == "a\0b"
    assert entries_of(b"a\0b\n", tmp_path / "c.txt")[0].text == "a\0b"


def test_giant_cells_are_read_up_to_a_limit(tmp_path: Path) -> None:
    assert len(entries_of(b"text\n" + b"a " * 100_000, tmp_path / "c.csv")[0].text) == 200_000
    found = entries_of(b"text\n" + b"a" * (FIELD_LIMIT + 1) + b"\nthe cat\n", tmp_path / "c.csv")
    assert "field limit" in faults(found)[2]
    assert found[-1].text == "the cat"


def test_quote_marks_may_be_text(tmp_path: Path) -> None:
    data = b'text\tn\n"never closed\t1\nan "inner" one\t2\n"both"\t3\n'
    found = entries_of(data, tmp_path / "c.tsv", literal_quotes=True, column="text")
    assert [entry.text for entry in found] == ['"never closed', 'an "inner" one', '"both"']


# F9: columns and fields


TABLE = "id,words,group\n1,the cat,x\n"
OBJECTS = '{"id": 1, "words": "the cat"}\n{"group": "x", "words": "a dog"}\n'


@pytest.mark.parametrize(
    ("name", "text", "options", "parts"),
    [
        ("c.csv", TABLE, ("--column", "txet"), ("'txet'", "'id', 'words', 'group'", "--column")),
        ("c.csv", TABLE, ("--field", "txet"), ("'txet'",)),
        ("c.csv", TABLE, (), ("'id', 'words', 'group'", "--column")),
        ("c.csv", TABLE, ("--column", "words", "--group-column", "g"), ("'g'", "--group-column", "'group'")),
        ("c.csv", TABLE, ("--column", "words", "--id-column", "g"), ("'g'", "--id-column")),
        ("c.csv", TABLE, ("--column", "words", "--pair-column", "g"), ("'g'", "--pair-column")),
        ("c.csv", TABLE, ("--column", "words", "--pair-column", "id", "--long", "split"), ("split", "pairs")),
        ("c.csv", "text;id\nthe cat;1\n", (), ("'text;id'", "--column")),
        ("c.csv", "a,a\n1,2\n", ("--column", "a"), ("2 columns 'a'",)),
        ("c.csv", "text,sentence\n1,2\n", (), ("'text', 'sentence'",)),
        ("c.jsonl", OBJECTS, ("--field", "txet"), ("'txet'", "'id', 'words', 'group'", "field")),
        ("c.jsonl", OBJECTS, (), ("'id', 'words', 'group'", "--field")),
        ("c.jsonl", OBJECTS, ("--field", "words", "--literal-quotes"), ("--literal-quotes", "jsonl")),
        ("c.txt", "the cat\n", ("--column", "text"), ("--column", "txt")),
        ("c.txt", "the cat\n", ("--group-column", "text"), ("--group-column", "txt")),
        ("c.txt", "the cat\n", ("--pair-column", "text"), ("--pair-column",)),
        ("c.txt", "the cat\n", ("--literal-quotes",), ("--literal-quotes",)),
        ("c.fa", ">a\nAT\n", ("--id-column", "a"), ("--id-column", "fasta")),
        ("c.fa", ">a\nAT\n", ("--stride", "2"), ("--stride", "--kmer")),
        ("c.txt.gz", "the cat\n", (), ("c.txt.gz", "no gzip")),
    ],
)  # fmt: skip
def test_f9_what_the_corpus_does_not_have_is_refused_before_any_work(
    fast: Run, tmp_path: Path, name: str, text: str, options: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    (tmp_path / name).write_text(text)
    done = fast("attention", "--corpus", name, *options)
    assert_error(done, 2, *parts)
    assert "Model: " not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    "options",
    [
        ("the cat", "--column", "text"),
        ("the cat", "--limit", "3"),
        ("the cat", "--encoding", "latin-1"),
        ("the cat", "--on-error", "skip"),
        ("the cat", "--input-format", "txt"),
        ("the cat", "--stride", "2"),
        ("the cat", "--kmer", "3"),
        ("ATTG", "--kmer", "0"),
        ("ATTG", "--kmer", "6"),
        ("ATTG", "--pair", "the cat", "--kmer", "2"),
        ("--column", "text"),
        ("--encoding", "latin-1"),
        ("--corpus", "."),
        ("--corpus", "nope.csv.gz"),
        ("--corpus", "nope.jsonl"),
    ],
    ids=" ".join,
)
def test_options_that_would_not_be_read_are_refused(fast: Run, options: tuple[str, ...]) -> None:
    done = fast("attention", *options)
    assert done.exit_code == 2, done.output
    assert "Model: " not in done.stderr
    assert "fault of bertgeo" not in done.output


def test_weights_alone_refuse_every_option_about_texts(fast: Run) -> None:
    assert_error(fast("heads", "--metric", "projection-kernel", "--limit", "3"), 2, "--limit", "weights")


def test_settings_that_hold_for_other_inputs_are_no_fault(
    fast: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.toml").write_text('limit = 3\ncolumn = "words"\n')
    monkeypatch.setenv("BERTGEO_ENCODING", "latin-1")
    assert fast("attention", "the cat", "--config", "config.toml").exit_code == 0
    (tmp_path / "c.txt").write_text("the cat\n")
    assert fast("attention", "--corpus", "c.txt", "--config", "config.toml").exit_code == 0


@pytest.mark.parametrize(
    ("text", "options", "column"),
    [
        ("words\nthe cat\n", {}, "words"),
        ("id,Text\n1,the cat\n", {}, "Text"),
        ("id,sentence\n1,the cat\n", {}, "sentence"),
        ("id,words\n1,the cat\n", {"id_column": "id"}, "words"),
        ("id,text,words\n1,a dog,the cat\n", {"column": "words"}, "words"),
    ],
)
def test_the_one_column_that_can_be_meant_is_taken(
    tmp_path: Path, text: str, options: dict[str, str], column: str
) -> None:
    (tmp_path / "c.csv").write_text(text)
    layout, [entry] = read(tmp_path / "c.csv", **options)
    assert (layout.columns["text"], entry.text) == (column, "the cat")


def test_a_field_that_only_some_lines_have_is_found(tmp_path: Path) -> None:
    found = entries_of(OBJECTS.encode(), tmp_path / "c.jsonl", column="words", id_column="id", group_column="group")
    assert [(entry.id, entry.group) for entry in found] == [("1", ""), ("", "x")]


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_a_table_without_a_header_is_an_error(fast: Run, tmp_path: Path, text: str) -> None:
    (tmp_path / "c.csv").write_text(text)
    assert_error(fast("attention", "--corpus", "c.csv"), 1, "c.csv", "header")


def test_an_empty_file_of_json_lines_or_records_holds_no_text(fast: Run, tmp_path: Path) -> None:
    for name in ("c.jsonl", "c.fa", "c.txt"):
        (tmp_path / name).write_text("")
        assert_error(fast("attention", "--corpus", name), 1, "no text")


@pytest.mark.parametrize(("cut", "line"), [(slice(0, -400), None), (slice(0, 20), 0)])
@pytest.mark.parametrize("name", ["c.txt.gz", "c.jsonl.gz"])
def test_damaged_gzip_names_the_line_reached(
    fast: Run, tmp_path: Path, name: str, cut: slice, line: int | None
) -> None:
    texts = "".join(json.dumps({"text": f"the cat {n} {n * 7919 % 10007}"}) + "\n" for n in range(5000))
    (tmp_path / name).write_bytes(gzip.compress(texts.encode())[cut])
    done = fast("attention", "--corpus", name, "--on-error", "skip", "--dry-run")
    assert_error(done, 1, name, "gzip", "after line " + ("" if line is None else str(line)))
    packed = bytearray(gzip.compress(texts.encode()))
    packed[-6] ^= 255
    (tmp_path / name).write_bytes(packed)
    assert_error(fast("attention", "--corpus", name, "--dry-run"), 1, "after line", "gzip")


# Parts of an entry on their way to the report


def test_ids_groups_and_shares_stand_in_lines_csv(fast: Run, tmp_path: Path) -> None:
    (tmp_path / "c.csv").write_text("id,text,g\n7,the cat \u4e2d,x\n7,,y\n8,a dog,\n", encoding="utf-8")
    done = fast("attention", "--corpus", "c.csv", "--id-column", "id", "--group-column", "g", "-o", "out")
    assert done.exit_code == 0, done.output
    lines = pd.read_csv(tmp_path / "out" / "lines.csv", dtype=str, keep_default_na=False)
    assert list(lines) == [
        "line",
        "part",
        "id",
        "group",
        "status",
        "tokens",
        "used",
        "unknown",
        "unknown_share",
        "note",
    ]
    assert list(lines["id"]) == ["7", "7", "8"]
    assert list(lines["group"]) == ["x", "y", ""]
    assert list(lines["unknown_share"]) == [repr(1 / 3), "", "0.0"]
    told = content(tmp_path / "out")["input"]
    assert (told["format"], told["columns"]) == ("csv", {"text": "text", "id": "id", "group": "g"})
    assert len(told["sha256"]) == 64


def test_without_ids_and_groups_lines_csv_has_no_such_column(fast: Run, tmp_path: Path) -> None:
    (tmp_path / "c.txt").write_text("the cat\n")
    fast("attention", "--corpus", "c.txt", "-o", "out")
    assert list(pd.read_csv(tmp_path / "out" / "lines.csv"))[:3] == ["line", "part", "status"]


def test_texts_carry_id_group_and_pair_to_the_model(tiny_model: LoadedModel) -> None:
    encoder = Encoder(tiny_model.tokenizer, tiny_model.max_tokens)
    entries = [Entry(3, "the cat", "a dog", "n1", "g"), Entry(4, "the cat", " ", "n2")]
    lines = list(read_lines(entries, Reading(), "c.csv"))
    [[(_, pair)], [(_, alone)]] = [prepare(line, encoder, Reading()) for line in lines]
    assert (pair.id, pair.group, pair.pair, pair.segment) == ("n1", "g", "a dog", (0, 0, 0, 0, 1, 1, 1))
    assert (alone.id, alone.pair, alone.line) == ("n2", None, 4)
    for policy in ("split", "truncate"):
        long = prepare(Line(1, "cat " * 100, id="n", group="g"), encoder, Reading(long=policy))
        assert {(text.id, text.group) for _, text in long} == {("n", "g")}


def test_a_pair_column_gives_the_numbers_of_the_pair(fast: Run, tmp_path: Path) -> None:
    (tmp_path / "c.tsv").write_text("a\tb\nthe cat\ta dog sat\n")
    done = fast("attention", "--corpus", "c.tsv", "--column", "a", "--pair-column", "b", "-o", "corpus")
    assert done.exit_code == 0, done.output
    fast("attention", "the cat", "--pair", "a dog sat", "-o", "pair")
    corpus, pair = (pd.read_csv(tmp_path / name / "attention-heads.csv") for name in ("corpus", "pair"))
    pd.testing.assert_series_equal(corpus["mass_a_to_b"], pair["mass_a_to_b"])
    assert corpus["mass_a_to_b"].notna().all()


def test_of_a_long_pair_the_longer_text_is_cut(fast: Run, tmp_path: Path) -> None:
    (tmp_path / "c.tsv").write_text("a\tb\n" + "the cat " * 100 + "\ta dog sat\n")
    fast("attention", "--corpus", "c.tsv", "--column", "a", "--pair-column", "b", "-o", "out")
    lines = pd.read_csv(tmp_path / "out" / "lines.csv")
    assert lines[["status", "tokens", "used"]].to_numpy().tolist() == [["truncated", 206, 64]]


def test_a_limit_counts_rows(fast: Run, tmp_path: Path) -> None:
    (tmp_path / "c.csv").write_text('text\n"the\ncat"\na dog\nthe mat\n')
    fast("attention", "--corpus", "c.csv", "--limit", "2", "-o", "out")
    assert list(pd.read_csv(tmp_path / "out" / "lines.csv")["line"]) == [2, 4]


# Sequences


HEADS = "attention-heads.csv"
FASTA = b">seq1 a river gene\nattg\nGC AT\n\nTC\n>seq2\n>\nAC\n"


def test_records_have_ids_lines_and_joined_sequences(tmp_path: Path) -> None:
    found = entries_of(FASTA, tmp_path / "c.fa")
    assert [(entry.number, entry.id, entry.text) for entry in found] == [
        (1, "seq1", "A T T G G C A T T C"), (6, "seq2", ""), (7, "", "A C"),
    ]  # fmt: skip
    [first, *_] = entries_of(FASTA, tmp_path / "c.fna", kmer=6, stride=2)
    assert first.text == "ATTGGC TGGCAT GCATTC"
    assert "fewer than --kmer 6" in faults(entries_of(FASTA, tmp_path / "c.faa", kmer=6))[7]


def test_records_give_the_numbers_of_spaced_text(fast: Run, tmp_path: Path) -> None:
    (tmp_path / "c.fasta").write_bytes(FASTA)
    (tmp_path / "c.txt").write_text("A T T G G C A T T C\n\n\n\n\n\nA C\n")
    for name in ("c.fasta", "c.txt"):
        assert fast("attention", "--corpus", name, "-o", name[2:]).exit_code == 0
    assert (tmp_path / "fasta" / HEADS).read_bytes() == (tmp_path / "txt" / HEADS).read_bytes()
    records, lines = (pd.read_csv(tmp_path / name / "attention-texts.csv", dtype=str) for name in ("fasta", "txt"))
    assert list(dict.fromkeys(records["id"].dropna())) == ["seq1"]
    pd.testing.assert_frame_equal(records.drop(columns="id"), lines)
    assert list(pd.read_csv(tmp_path / "fasta" / "lines.csv", keep_default_na=False)["id"]) == ["seq1", "seq2", ""]


@given(
    sequence=st.text("ACGT", min_size=1, max_size=40), size=st.integers(1, 9), stride=st.integers(1, 5)
)  # fmt: skip
def test_kmers_are_every_whole_stretch(sequence: str, size: int, stride: int) -> None:
    found = kmers(sequence, size, stride).split()
    windows = [sequence[at : at + size] for at in range(0, len(sequence), stride)]
    assert found == [window for window in windows if len(window) == size]


SEQUENCE = "ATTGGCATTCAG"
TITLE = "\u57fa\u56e0\n"


@pytest.fixture(scope="module")
def sixmers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose vocabulary is the 6-mers of DNA."""
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map("".join, product("ACGT", repeat=6))]
    tokenizer = transformers.BertTokenizer(
        vocab={token: index for index, token in enumerate(tokens)}, do_lower_case=False
    )
    config = transformers.BertConfig(**{**tiny.SIZES, "vocab_size": len(tokens)})
    return tiny.save(transformers.BertModel(config), tokenizer, tmp_path_factory.mktemp("kmers") / "six", 0)


@pytest.mark.parametrize("given", [(SEQUENCE,), ("--corpus", "c.txt"), ("--corpus", "c.fa")], ids=" ".join)
def test_t6_a_sequence_that_is_all_unknown_is_told_the_kmers(
    fast: Run, tmp_path: Path, sixmers: Path, given: tuple[str, ...]
) -> None:
    (tmp_path / "c.txt").write_text(f"{TITLE}{SEQUENCE}\n\n{SEQUENCE[::-1]}\n", encoding="utf-8")
    (tmp_path / "c.fa").write_text(f">a\n{SEQUENCE}\n")
    done = fast("attention", *given, "--model", str(sixmers))
    assert done.exit_code == 0, done.output
    assert "100% of the tokens are unknown" in done.stderr
    assert "--kmer 6" in done.stderr
    (tmp_path / "c.txt").write_text(f"{SEQUENCE}\n")
    told = fast("attention", *given, "--model", str(sixmers), "--kmer", "6", "-o", "out")
    assert told.exit_code == 0, told.output
    assert "unknown" not in told.stderr
    assert content(tmp_path / "out")["input_options"]["kmer"] == 6


def test_t6_the_kmers_of_a_text_are_its_tokens(fast: Run, tmp_path: Path, sixmers: Path) -> None:
    fast("attention", SEQUENCE.lower(), "--kmer", "6", "--model", str(sixmers), "-o", "out")
    tokens = pd.read_csv(tmp_path / "out" / "tokens.csv")
    assert list(tokens["text"][1:-1]) == [SEQUENCE[at : at + 6] for at in range(7)]


def test_t6_no_kmers_are_named_for_words_or_known_sequences(fast: Run, tiny_model: LoadedModel, sixmers: Path) -> None:
    six = load_model(str(sixmers), device="cpu", offline=True)
    assert kmer_size("the cat", Encoder(six.tokenizer, 64)) is None
    assert kmer_size(SEQUENCE, Encoder(six.tokenizer, 64)) == 6
    assert kmer_size(" ".join(SEQUENCE), Encoder(tiny_model.tokenizer, 64)) == 1
    assert "--kmer" not in fast("attention", "\u4e2d \u6587", "--model", str(sixmers)).stderr


def test_lines_that_are_no_sequences_are_faults(tmp_path: Path) -> None:
    found = entries_of(b"ATTGGCA\n\nATTGGC TTGGCA\nATT\n", tmp_path / "c.txt", kmer=6)
    assert [entry.text for entry in found if not entry.fault] == ["ATTGGC TTGGCA", ""]
    assert "' ' is no residue" in faults(found)[3]
    assert "3 residues" in faults(found)[4]


def test_usage_errors_of_a_file_are_raised_when_it_is_opened(tmp_path: Path) -> None:
    (tmp_path / "c.csv").write_text(TABLE)
    with pytest.raises(UsageError), open_entries(tmp_path / "c.csv", CorpusOptions()):
        pass
    (tmp_path / "c.csv").write_bytes(b"id,te\xe9t\n1,the cat\n")
    with pytest.raises(BertgeoError, match="line 1: byte 0xE9"), open_entries(tmp_path / "c.csv", CorpusOptions()):
        pass
