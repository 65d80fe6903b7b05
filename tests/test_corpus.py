"""From bytes to tokens: lines keep their numbers, labels are the user's own text, limits hold (cases T1-T10, F1-F5)."""

from __future__ import annotations

import io
import itertools
import os
import random
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from analyses.attention import Attention
from analyses.kit.record import TokenizedText
from bertgeo_cli.corpus import Encoder, Line, Reading, batches, is_empty, portions, prepare, read_lines, shards
from bertgeo_cli.errors import BertgeoError, UsageError
from bertgeo_cli.formats import open_entries
from bertgeo_cli.models import LoadedModel, load_model
from bertgeo_cli.options import CorpusOptions
from bertgeo_cli.run import Pass, analyse_text


@pytest.fixture(scope="module")
def encoder(tiny_model: LoadedModel) -> Encoder:
    return Encoder(tiny_model.tokenizer, tiny_model.max_tokens)


@pytest.fixture(scope="module")
def minilm_encoder(minilm: LoadedModel) -> Encoder:
    return Encoder(minilm.tokenizer, minilm.max_tokens)


@pytest.fixture(scope="module")
def roberta(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    """RoBERTa with 20 positions and padding id 1: 18 tokens fit."""
    folder = tiny.tiny_family("roberta", tmp_path_factory.mktemp("roberta") / "tiny", max_position_embeddings=20)
    loaded = load_model(str(folder), device="cpu", offline=True)
    return Encoder(loaded.tokenizer, loaded.max_tokens)


def lines_of(content: bytes, tmp_path: Path, encoding: str = "utf-8", **reading: Any) -> list[Line]:
    file = tmp_path / "corpus.txt"
    file.write_bytes(content)
    with open_entries(file, CorpusOptions(encoding=encoding)) as (_, entries):
        return list(read_lines(entries, Reading(**reading), file.name))


def labels(text: TokenizedText) -> list[str]:
    return [label for label, special in zip(text.labels, text.special, strict=True) if not special]


def spans(text: TokenizedText) -> list[tuple[int | None, int | None]]:
    return [
        span for span, special in zip(zip(text.start, text.end, strict=True), text.special, strict=True) if not special
    ]


# Words


def test_t1_words_sum_over_key_pieces_and_average_over_query_pieces(tiny_model: LoadedModel, encoder: Encoder) -> None:
    text = encoder.encode("playing cats")
    assert text.tokens == ("[CLS]", "play", "##ing", "cats", "[SEP]")
    tokens, words = (
        next(
            table.frame
            for table in analyse_text([Attention(words=words)], tiny_model, text, Pass())[0].tables
            if table.name == "attention-weights"
        )
        for words in (False, True)
    )
    whole = tokens["weight"].to_numpy().reshape(2, 4, 5, 5)
    summed = np.stack([whole[..., 0], whole[..., 1] + whole[..., 2], whole[..., 3], whole[..., 4]], axis=-1)
    expected = np.stack(
        [summed[..., 0, :], (summed[..., 1, :] + summed[..., 2, :]) / 2, summed[..., 3, :], summed[..., 4, :]], axis=-2
    )
    found = words["weight"].to_numpy().reshape(2, 4, 4, 4)
    np.testing.assert_allclose(found, expected, atol=1e-12)
    np.testing.assert_allclose(found.sum(axis=-1), 1.0, atol=1e-12)
    assert list(words["key_token"][:4]) == ["[CLS]", "playing", "cats", "[SEP]"]
    assert list(words["key_end"][:4].dropna()) == [7, 12]


# Labels and spans


COMPOSED = "caf\u00e9 hac\u00eda"
COMBINING = "cafe\u0301 haci\u0301a"


@pytest.mark.parametrize("text", [COMPOSED, COMBINING], ids=["composed", "combining"])
def test_t2_labels_are_the_users_own_text(minilm_encoder: Encoder, text: str) -> None:
    encoded = minilm_encoder.encode(text)
    assert [text[start:end] for start, end in spans(encoded)] == labels(encoded)
    assert "".join(labels(encoded)) == text.replace(" ", "")
    assert spans(encoded)[0] == (0, len(text.split(" ")[0]))
    assert encoded.tokens[1] == "cafe"


@pytest.mark.parametrize("text", [COMPOSED, COMBINING], ids=["composed", "combining"])
def test_t2_every_letter_keeps_its_accent_when_words_fall_into_pieces(encoder: Encoder, text: str) -> None:
    encoded = encoder.encode(text)
    assert len(encoded) > 4
    assert "".join(labels(encoded)) == text.replace(" ", "")
    ends = [end for _, end in spans(encoded)]
    assert ends == sorted(ends)
    assert ends[-1] == len(text)


def test_t2_both_spellings_are_read_alike(minilm_encoder: Encoder) -> None:
    assert minilm_encoder.encode(COMPOSED).ids == minilm_encoder.encode(COMBINING).ids


def test_labels_keep_capitals_that_the_model_does_not_see(encoder: Encoder) -> None:
    encoded = encoder.encode("The CAT sat")
    assert labels(encoded) == ["The", "CAT", "sat"]
    assert encoded.tokens[1:-1] == ("the", "cat", "sat")


def test_labels_of_byte_level_tokens_have_no_space_marks(roberta: Encoder) -> None:
    assert labels(roberta.encode("the cat sat")) == ["t", "h", "e", "cat", "sat"]


def test_labels_of_byte_level_tokens_are_slices_of_the_text_even_for_a_lone_space(roberta: Encoder) -> None:
    text = "a  cat is \u00e9"
    assert [label for label in labels(roberta.encode(text)) if label not in text] == []


def test_special_tokens_have_names_and_no_span(encoder: Encoder) -> None:
    encoded = encoder.encode("the cat")
    assert encoded.labels == ("[CLS]", "the", "cat", "[SEP]")
    assert encoded.start == (None, 0, 4, None)
    assert encoded.end == (None, 3, 7, None)
    assert (encoded.cls, encoded.sep) == (0, (3,))


def test_spans_of_a_pair_count_in_their_own_text(encoder: Encoder) -> None:
    encoded = encoder.encode("the cat", "a dog sat")
    assert encoded.segment == (0, 0, 0, 0, 1, 1, 1, 1)
    assert spans(encoded) == [(0, 3), (4, 7), (0, 1), (2, 5), (6, 9)]
    assert encoded.sep == (3, 7)


@pytest.mark.parametrize("text", ["[SEP] the cat", "a [MASK] b [CLS]", "[PAD][UNK] cat"])
def test_t5_typed_special_tokens_are_text(encoder: Encoder, minilm_encoder: Encoder, text: str) -> None:
    for reader in (encoder, minilm_encoder):
        encoded = reader.encode(text)
        assert encoded.special == (True, *(False,) * (len(encoded) - 2), True)
        assert "".join(labels(encoded)) == text.replace(" ", "")
        assert (encoded.cls, encoded.sep) == (0, (len(encoded) - 1,))
        assert encoded.tokens[1] in ("[", "a")


def test_t5_typed_special_tokens_are_special_when_asked_for(tiny_model: LoadedModel) -> None:
    encoder = Encoder(tiny_model.tokenizer, tiny_model.max_tokens, special_tokens_in_text=True)
    encoded = encoder.encode("a [MASK] [SEP] cat")
    assert encoded.tokens == ("[CLS]", "a", "[MASK]", "[SEP]", "cat", "[SEP]")
    assert encoded.special == (True, False, True, True, False, True)
    assert encoded.sep == (3, 5)
    assert (encoded.start[2], encoded.end[2]) == (2, 8)


def test_t5_one_encoder_does_not_change_another(tiny_model: LoadedModel, encoder: Encoder) -> None:
    Encoder(tiny_model.tokenizer, tiny_model.max_tokens, special_tokens_in_text=True).encode("[SEP]")
    assert encoder.encode("[SEP]").tokens[1] == "["


def test_t10_equal_words_are_told_apart_by_position(tiny_model: LoadedModel, encoder: Encoder) -> None:
    text = encoder.encode("the cat the cat")
    assert spans(text) == [(0, 3), (4, 7), (8, 11), (12, 15)]
    tables = {table.name: table.frame for table in analyse_text([Attention()], tiny_model, text, Pass())[0].tables}
    weights = tables["attention-weights"]
    assert len(weights) == 2 * 4 * 6 * 6
    assert not weights.duplicated(["layer", "head", "query", "key"]).any()
    assert list(weights["key_start"][:6].dropna()) == [0, 4, 8, 12]
    assert list(tables["tokens"]["start"].dropna()) == [0, 4, 8, 12]


def test_unknown_words_are_marked_and_added_tokens_are_not(encoder: Encoder) -> None:
    encoded = encoder.encode("the \u4e2d cat")
    assert encoded.unknown == (False, False, True, False, False)
    assert encoded.labels[2] == "\u4e2d"


def test_padding_and_truncation_inside_a_tokenizer_json_have_no_effect(minilm_encoder: Encoder) -> None:
    text = " ".join(["river"] * 200)
    encoded = minilm_encoder.encode(text)
    assert len(encoded) == 202
    assert len(minilm_encoder.encode("river")) == 3
    assert len(minilm_encoder.truncate(encoded)) == 202
    assert "[PAD]" not in minilm_encoder.encode("a", "b").tokens


def test_padding_and_truncation_switched_on_later_have_no_effect(tiny_model: LoadedModel) -> None:
    encoder, backend = Encoder(tiny_model.tokenizer, 64), tiny_model.tokenizer.backend_tokenizer
    backend.enable_padding(length=9)
    backend.enable_truncation(4)
    assert len(encoder.encode("the cat sat on the mat")) == 8
    assert len(encoder.encode("cat")) == 3


# Blank lines


@pytest.mark.parametrize("text", ["", " ", "\t", "\u00a0", "\u200b", "\u200d\u200b \ufeff", "\u2028", "\r", "\u3000"])
def test_f1_blank_texts_are_empty(text: str) -> None:
    assert is_empty(text)


@pytest.mark.parametrize("text", ["a", ".", "\u200ba", " \u4e2d"])
def test_f1_other_texts_are_not(text: str) -> None:
    assert not is_empty(text)


def test_f1_blank_lines_keep_their_numbers(tmp_path: Path, encoder: Encoder) -> None:
    lines = lines_of("the cat\n\n  \t\na dog\n\u200b\u200d\nthe mat\n".encode(), tmp_path)
    assert [(line.number, line.status) for line in lines] == [
        (1, "ok"), (2, "empty"), (3, "empty"), (4, "ok"), (5, "empty"), (6, "ok"),
    ]  # fmt: skip
    prepared = [prepare(line, encoder, Reading())[0][1] for line in lines]
    assert [text and text.line for text in prepared] == [1, None, None, 4, None, 6]


# Bytes


PLAIN = "the caf\u00e9\na dog\n"


@pytest.mark.parametrize(
    ("content", "encoding"),
    [
        (PLAIN.encode("utf-8-sig"), "utf-8"),
        (PLAIN.encode("utf-8-sig"), "UTF8"),
        (PLAIN.replace("\n", "\r\n").encode(), "utf-8"),
        (PLAIN.removesuffix("\n").encode(), "utf-8"),
        (PLAIN.replace("\n", "\r\n").removesuffix("\r\n").encode("utf-8-sig"), "utf-8"),
        (PLAIN.encode("latin-1"), "latin-1"),
        (PLAIN.encode("utf-16"), "utf-16"),
        (PLAIN.encode("utf-16-le"), "utf-16-le"),
        (PLAIN.encode("utf-16-be"), "utf-16-be"),
        (PLAIN.replace("\n", "\r\n").encode("utf-16"), "utf-16"),
    ],
)
def test_f2_mark_line_ends_and_encoding_change_nothing(content: bytes, encoding: str, tmp_path: Path) -> None:
    found = lines_of(content, tmp_path, encoding)
    assert [(line.number, line.text) for line in found] == [(1, "the caf\u00e9"), (2, "a dog")]


def test_f2_only_line_feeds_end_a_line(tmp_path: Path) -> None:
    found = lines_of("a\u2028b\x0cc\x85d\x1ce\rf\ng\rh\r\ni".encode(), tmp_path)
    assert [line.text for line in found] == ["a\u2028b\x0cc\x85d\x1ce\rf", "g\rh", "i"]


STRAY = b"the cat\na dog\ncaf\xe9 x\nthe mat\n"


def test_f3_a_stray_byte_names_line_and_byte(tmp_path: Path) -> None:
    with pytest.raises(BertgeoError) as caught:
        lines_of(STRAY, tmp_path)
    assert caught.value.exit_code == 1
    assert "line 3" in caught.value.message
    assert "0xE9" in caught.value.message
    assert "--encoding" in caught.value.hint
    assert "--on-error" in caught.value.hint


def test_f3_the_right_encoding_reads_it(tmp_path: Path) -> None:
    assert [line.text for line in lines_of(STRAY, tmp_path, "latin-1")] == [
        "the cat",
        "a dog",
        "caf\u00e9 x",
        "the mat",
    ]


def test_f3_the_line_can_be_skipped_and_is_counted(tmp_path: Path) -> None:
    lines = lines_of(STRAY, tmp_path, on_error="skip")
    assert Counter(line.status for line in lines) == {"ok": 3, "undecodable": 1}
    assert (lines[2].number, lines[2].text, lines[2].incomplete) == (3, "", True)
    assert "0xE9" in lines[2].note


def test_f3_a_byte_cut_off_at_the_end_of_the_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BertgeoError, match=r"line 2.*0xC3"):
        lines_of(b"the cat\ncaf\xc3", tmp_path)


@pytest.mark.parametrize(
    "content", ["the cat\n".encode("utf-16-le") + b"\x00\xd8", "the cat".encode("utf-16-le") + b"x"]
)
def test_f3_broken_utf_16_is_named_too(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(BertgeoError, match="line"):
        lines_of(content, tmp_path, "utf-16-le")


def test_unknown_encodings_and_missing_files_are_usage_errors(tmp_path: Path) -> None:
    for file, encoding in ((tmp_path / "nope.txt", "utf-8"), (tmp_path, "utf-8"), (tmp_path / "a", "utf-99")):
        with pytest.raises(UsageError), open_entries(file, CorpusOptions(encoding=encoding)):
            pass


def test_encodings_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"the cat\n")
    with pytest.raises(UsageError, match="hex"), open_entries(tmp_path / "a", CorpusOptions(encoding="hex")):
        pass


def test_a_limit_stops_before_what_follows(tmp_path: Path) -> None:
    assert [line.text for line in lines_of(STRAY, tmp_path, limit=2)] == ["the cat", "a dog"]


def test_standard_input_is_read_and_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.write(writing, "the caf\u00e9\n\na dog".encode("utf-8-sig"))
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(pipe, encoding="ascii"))
        with open_entries("-", CorpusOptions()) as (_, entries):
            lines = list(read_lines(entries, Reading(), "standard input"))
        assert not pipe.closed
        sys.stdin.detach()
    assert [line.text for line in lines] == ["the caf\u00e9", "", "a dog"]


# Long lines


LONG = Line(7, " ".join(["the", "cat", "sat"] * 1000))


def prepared(encoder: Encoder, policy: Any, line: Line = LONG) -> Any:
    return prepare(line, encoder, Reading(long=policy))


@pytest.fixture(params=["bert", "roberta"])
def limited(request: pytest.FixtureRequest, encoder: Encoder, roberta: Encoder) -> Encoder:
    return encoder if request.param == "bert" else roberta


def test_f4_limits_are_those_of_the_family(encoder: Encoder, roberta: Encoder) -> None:
    assert (encoder.max_tokens, roberta.max_tokens) == (64, 18)


def test_f4_a_line_that_just_fits_is_whole(encoder: Encoder) -> None:
    fits, longer = (Line(1, " ".join(["cat"] * count)) for count in (62, 63))
    assert prepared(encoder, "error", fits)[0][0].status == "ok"
    assert prepared(encoder, "truncate", longer)[0][0].status == "truncated"


def test_f4_truncate_keeps_the_beginning_and_the_special_tokens(limited: Encoder) -> None:
    [(line, text)] = prepared(limited, "truncate")
    whole = limited.encode(LONG.text)
    assert (line.number, line.status, line.tokens, line.used) == (7, "truncated", len(whole), limited.max_tokens)
    assert text.line == 7
    assert text.ids[:-1] == whole.ids[: limited.max_tokens - 1]
    assert (text.ids[-1], text.sep) == (whole.ids[-1], (limited.max_tokens - 1,))
    assert text.start[:-1] == whole.start[: limited.max_tokens - 1]
    assert line.incomplete


def test_f4_split_loses_nothing_and_counts_in_the_whole_text(limited: Encoder) -> None:
    parts = prepared(limited, "split")
    whole = limited.encode(LONG.text)

    def inner(name: str) -> tuple[Any, ...]:
        return tuple(value for _, text in parts for value in getattr(text, name)[1:-1])

    assert [line.part for line, _ in parts] == [text.part for _, text in parts] == list(range(len(parts)))
    assert {line.status for line, _ in parts} == {"split"}
    assert {line.number for line, _ in parts} == {7}
    assert sum(line.tokens for line, _ in parts) == len(whole)
    assert all(2 < len(text) <= limited.max_tokens for _, text in parts)
    assert all((text.cls, text.sep) == (0, (len(text) - 1,)) for _, text in parts)
    for name in ("ids", "start", "end", "labels"):
        assert inner(name) == getattr(whole, name)[1:-1]


def test_f4_split_leaves_short_lines_whole(limited: Encoder) -> None:
    [(line, text)] = prepared(limited, "split", Line(1, "the cat"))
    assert (line.status, text.part) == ("ok", 0)


def test_f4_skip_leaves_the_line_out_and_says_so(limited: Encoder) -> None:
    [(line, text)] = prepared(limited, "skip")
    assert text is None
    assert (line.status, line.tokens, line.used, line.incomplete) == (
        "skipped",
        len(limited.encode(LONG.text)),
        0,
        True,
    )


def test_f4_error_names_line_and_numbers(limited: Encoder) -> None:
    with pytest.raises(BertgeoError) as caught:
        prepared(limited, "error")
    assert "line 7" in caught.value.message
    assert str(len(limited.encode(LONG.text))) in caught.value.message
    assert str(limited.max_tokens) in caught.value.message
    assert "--long" in caught.value.hint


def test_f4_of_a_long_pair_both_texts_are_kept(encoder: Encoder) -> None:
    cut = encoder.truncate(encoder.encode(" ".join(["cat"] * 200), "the dog"))
    assert len(cut) == 64
    assert cut.tokens[-3:] == ("the", "dog", "[SEP]")
    assert cut.segment.count(1) == 3


def test_policies_leave_no_truncation_behind(encoder: Encoder) -> None:
    for policy in ("truncate", "split", "skip"):
        prepared(encoder, policy)
        assert len(encoder.encode(LONG.text)) == 3002


# Shards and batches

LENGTHS = (5, 1, 5, 2, 1, 5, 9, 2, 5)


def texts_of(encoder: Encoder, lengths: Sequence[int]) -> list[TokenizedText]:
    return [encoder.encode(" ".join(["cat"] * length), line=line) for line, length in enumerate(lengths, start=1)]


def test_f5_the_order_of_texts_does_not_depend_on_the_batch(encoder: Encoder) -> None:
    shard = texts_of(encoder, LENGTHS)
    orders = {
        tuple(text.line for batch in batches(shard, size) for text in batch) for size in (1, 7, 14, 21, 64, 10_000)
    }
    assert orders == {(2, 5, 4, 8, 1, 3, 6, 9, 7)}


@pytest.mark.parametrize("size", [1, 8, 20, 1000])
def test_batches_hold_as_many_texts_as_fit_into_the_tokens_asked_for(encoder: Encoder, size: int) -> None:
    found = [[len(text) for text in batch] for batch in batches(texts_of(encoder, LENGTHS), size)]
    assert [length for batch in found for length in batch] == [length + 2 for length in sorted(LENGTHS)]
    assert all(len(batch) == 1 or sum(batch) <= size for batch in found)
    assert all(sum(batch) + following[0] > size for batch, following in itertools.pairwise(found))


def test_parts_of_one_line_stay_in_order(encoder: Encoder) -> None:
    parts = [text for _, text in prepared(encoder, "split")]
    assert [text.part for batch in batches(parts[::-1], 64) for text in batch if len(text) == 64] == [
        text.part for text in parts if len(text) == 64
    ]


def test_a_small_shard_is_one_portion_in_the_order_of_token_counts(encoder: Encoder) -> None:
    (portion,) = portions(texts_of(encoder, LENGTHS))
    assert [text.line for text in portion] == [2, 5, 4, 8, 1, 3, 6, 9, 7]
    assert portions([]) == []


@settings(deadline=None, max_examples=30)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=60), seed=st.integers(0, 9))
@pytest.mark.parametrize(("most", "least"), [(8, 20), (3, 1), (8, 200)])
def test_portions_have_about_as_many_tokens_each_and_depend_on_the_texts_alone(
    encoder: Encoder, most: int, least: int, lengths: list[int], seed: int
) -> None:
    texts = texts_of(encoder, lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bertgeo_cli.corpus.PORTIONS", most)
        patch.setattr("bertgeo_cli.corpus.PORTION_TOKENS", least)
        cut = portions(texts)
        assert portions(random.Random(seed).sample(texts, len(texts))) == cut
    assert [text.line for portion in cut for text in portion] == [
        text.line for text in sorted(texts, key=lambda text: (len(text), text.line))
    ]
    sizes, longest = [sum(map(len, portion)) for portion in cut], max(map(len, texts))
    asked = max(1, min(most, sum(sizes) // least))
    assert 1 <= len(cut) <= asked
    assert all(abs(size - sum(sizes) / asked) < longest for size in sizes) or longest > sum(sizes) / asked


def test_shards_are_cut_by_number_of_texts(encoder: Encoder) -> None:
    texts = texts_of(encoder, [1] * 7)
    assert [len(shard) for shard in shards(texts, 3)] == [3, 3, 1]
    assert [text.line for shard in shards(iter(texts), 3) for text in shard] == list(range(1, 8))
    assert list(shards([], 3)) == []


def test_a_table_of_tokens_shows_start_and_end(tiny_model: LoadedModel, encoder: Encoder) -> None:
    text = encoder.encode(COMBINING)
    tokens = next(
        table.frame
        for table in analyse_text([Attention()], tiny_model, text, Pass())[0].tables
        if table.name == "tokens"
    )
    inner = tokens[~tokens["special"]]
    assert [COMBINING[start:end] for start, end in zip(inner["start"], inner["end"], strict=True)] == list(
        inner["text"]
    )
    assert tokens["start"].isna().tolist() == tokens["special"].tolist()
    assert isinstance(tokens["start"].dtype, pd.Int64Dtype)
