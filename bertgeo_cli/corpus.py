"""Texts from files, line by line: read, tokenised, cut into shards, batched by equal token count."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, islice
from typing import Any, Literal, TypeVar

from analyses.kit.record import TokenizedText

from .errors import BertgeoError, UsageError
from .formats import Entry, kmers
from .options import SHARD_TEXTS

Long = Literal["truncate", "split", "skip", "error"]
OnError = Literal["stop", "skip"]
Status = Literal["ok", "empty", "truncated", "split", "skipped", "undecodable"]

NUCLEOTIDES = re.compile(r"\s*([ACGTUN]\s*)+", re.IGNORECASE)
WORD_START = " \u2581"
"""What sentencepiece puts before a word, and the space that it stands for."""
LONGEST_KMER = 8
KMER_SAMPLE = 200
"""Residues that tell which K-mers a vocabulary holds."""
PORTIONS, PORTION_TOKENS = 8, 4096
"""The most portions to a shard, and about how many tokens each holds at least: less is not worth handing out."""


@dataclass(frozen=True)
class Line:
    """One line of a corpus and what became of it; `tokens` counts before any truncation."""

    number: int
    text: str
    status: Status = "ok"
    note: str = ""
    part: int = 0
    tokens: int = 0
    used: int = 0
    unknown: int = 0
    special: int = 0
    pair: str | None = None
    id: str = ""
    group: str = ""

    @property
    def unknown_share(self) -> float | None:
        """Unknown tokens among those used that are not special; None where there are none."""
        return self.unknown / (self.used - self.special) if self.used > self.special else None

    @property
    def incomplete(self) -> bool:
        """Whether something of the line was left out (blank lines had nothing)."""
        return self.status in ("truncated", "skipped", "undecodable")


@dataclass(frozen=True)
class Reading:
    """How to read lines: the options that the command line gives."""

    long: Long = "truncate"
    on_error: OnError = "stop"
    limit: int | None = None


class Encoder:
    """Turns text into what the model reads, with labels cut from the user's own text."""

    def __init__(self, tokenizer: Any, max_tokens: int, *, special_tokens_in_text: bool = False):
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.parse_special = special_tokens_in_text
        self.special_ids = frozenset(tokenizer.all_special_ids) - {tokenizer.unk_token_id}

    def encode(self, text: str, pair: str | None = None, *, line: int = 1) -> TokenizedText:
        """One text (or pair) whole, however long."""
        return self._tokenized(self._encoding(text, pair, None), text, pair, line)

    def truncate(self, text: TokenizedText) -> TokenizedText:
        """The beginning that fits, special tokens kept; of a pair the longer text is cut first."""
        return self._tokenized(self._encoding(text.text, text.pair, self.max_tokens), text.text, text.pair, text.line)

    def split(self, text: TokenizedText) -> list[TokenizedText]:
        """Consecutive parts that fit, each with its own special tokens; offsets count in the whole text."""
        encoding = self._encoding(text.text, None, self.max_tokens)
        parts = [encoding, *encoding.overflowing]
        return [
            replace(self._tokenized(part, text.text, None, text.line), part=number) for number, part in enumerate(parts)
        ]

    def normalised(self, text: str) -> str:
        """A text as the tokenizer reads it before cutting it up: lower case and without accents where it is uncased."""
        normaliser = self.tokenizer.backend_tokenizer.normalizer
        return (normaliser.normalize_str(text) if normaliser else text).strip(WORD_START)

    def _encoding(self, text: str, pair: str | None, max_tokens: int | None) -> Any:
        backend = self.tokenizer.backend_tokenizer
        # A tokenizer.json may carry padding and truncation to 128 tokens; neither may enter the science.
        backend.no_padding()
        if max_tokens is None:
            backend.no_truncation()
        else:
            backend.enable_truncation(max_tokens)
        # Otherwise "[SEP]" typed by a user would become a real separator.
        backend.encode_special_tokens = not self.parse_special
        return backend.encode(text, pair)

    def _tokenized(self, encoding: Any, text: str, pair: str | None, line: int) -> TokenizedText:
        of_text = [-1 if index is None else index for index in encoding.sequence_ids]
        added = [index < 0 for index in of_text]
        ids, tokens, sources = encoding.ids, encoding.tokens, (text, pair or "")
        spans = _spans(encoding.offsets, of_text, sources)
        special = [
            new or (self.parse_special and token in self.special_ids) for new, token in zip(added, ids, strict=True)
        ]
        cls, sep, unknown = self.tokenizer.cls_token_id, self.tokenizer.sep_token_id, self.tokenizer.unk_token_id
        return TokenizedText(
            line=line,
            text=text,
            pair=pair,
            ids=tuple(ids),
            tokens=tuple(tokens),
            labels=tuple(
                self._label(token, number, span, sources[of])
                for token, number, span, of in zip(tokens, ids, spans, of_text, strict=True)
            ),
            start=tuple(span and span[0] for span in spans),
            end=tuple(span and span[1] for span in spans),
            segment=_segments(of_text),
            word=tuple(None if new else word for new, word in zip(added, encoding.word_ids, strict=True)),
            special=tuple(special),
            unknown=tuple(not new and token == unknown for new, token in zip(special, ids, strict=True)),
            cls=next((at for at, new in enumerate(special) if new and ids[at] == cls), None),
            sep=tuple(at for at, new in enumerate(special) if new and ids[at] == sep),
        )

    def _label(self, token: str, number: int, span: Span, source: str) -> str:
        """The user's own text; for a token without any (a byte-level space) what its id decodes to."""
        if span is None:
            return token
        piece = source[slice(*span)] or self.tokenizer.backend_tokenizer.decode([number], skip_special_tokens=False)
        return piece.strip() or piece or token


Span = tuple[int, int] | None


def _spans(offsets: Sequence[tuple[int, int]], of_text: Sequence[int], sources: tuple[str, str]) -> list[Span]:
    """Character spans, extended over combining marks that a tokenizer which strips accents leaves out."""
    spans: list[Span] = []
    for at, (start, end) in enumerate(offsets):
        source = sources[of_text[at]]
        following = at + 1 < len(offsets) and of_text[at + 1] == of_text[at]
        stop = offsets[at + 1][0] if following else len(source)
        while end > start and end < stop and unicodedata.category(source[end]).startswith("M"):
            end += 1
        spans.append((start, end) if of_text[at] >= 0 else None)
    return spans


def _segments(of_text: Sequence[int]) -> tuple[int, ...]:
    """0 for the first text, 1 for the second; an added token belongs to the text before it."""
    segments: list[int] = []
    for index in of_text:
        segments.append(index if index >= 0 else segments[-1] if segments else 0)
    return tuple(segments)


def is_empty(text: str) -> bool:
    """Whether nothing is there to read: only spaces, controls and zero-width characters."""
    return all(unicodedata.category(character) in ("Cc", "Cf", "Zs", "Zl", "Zp") for character in text)


def read_lines(entries: Iterable[Entry], reading: Reading, name: str) -> Iterator[Line]:
    """Every entry as a line with its number, blank and faulty ones among them; a blank pair is none.

    Raises: BertgeoError at an entry with a fault, unless `on_error` is skip.
    """
    for entry in islice(entries, reading.limit):
        if entry.fault and reading.on_error == "stop":
            raise BertgeoError(
                f"{name}, line {entry.number}: {entry.fault.what}", f"{entry.fault.cure}, or --on-error skip."
            )
        line = Line(entry.number, "", id=entry.id, group=entry.group)
        if entry.fault:
            yield replace(line, status="undecodable", note=entry.fault.what)
        else:
            pair = None if is_empty(entry.pair or "") else entry.pair
            yield replace(line, text=entry.text, pair=pair, status="empty" if is_empty(entry.text) else "ok")


def prepare(line: Line, encoder: Encoder, reading: Reading) -> list[tuple[Line, TokenizedText | None]]:
    """What of a line goes to the model: one text, several parts, or nothing."""
    if line.status != "ok":
        return [(line, None)]
    text = encoder.encode(line.text, line.pair, line=line.number)
    if len(text) <= encoder.max_tokens:
        return [_counted(line, text, len(text))]
    if reading.long == "error":
        raise too_long(f"line {line.number}", len(text), encoder.max_tokens, CUT_OR_LEAVE)
    if reading.long == "skip":
        return [(replace(line, status="skipped", tokens=len(text), note="too long"), None)]
    if reading.long == "truncate":
        return [_counted(replace(line, status="truncated"), encoder.truncate(text), len(text))]
    return [
        _counted(replace(line, status="split", part=part.part), part, len(text) if part.part == 0 else 0)
        for part in encoder.split(text)
    ]


def _counted(line: Line, text: TokenizedText, tokens: int) -> tuple[Line, TokenizedText]:
    line = replace(line, tokens=tokens, used=len(text), unknown=sum(text.unknown), special=sum(text.special))
    return line, replace(text, id=line.id, group=line.group)


def refuse_unreadable(text: str, what: str = "text") -> None:
    """Raise UsageError for a typed text, or word, that is empty or no valid Unicode."""
    if is_empty(text):
        raise UsageError(f"the {what} {text!r} is empty", f"Give a {what} with something to read in it.")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise UsageError(
            f"the {what} {text!r} is no valid Unicode", "It holds bytes that are not UTF-8, or half a pair."
        )


CUT_OR_LEAVE = "Shorten it, or choose --long truncate, --long split or --long skip."


def too_long(what: str, tokens: int, limit: int, hint: str) -> BertgeoError:
    """The error for a text that does not fit and may not be cut; `hint` says what would help there."""
    return BertgeoError(f"{what} has {tokens} tokens, the model reads {limit}", hint)


@dataclass(frozen=True)
class Shard:
    """Neighbouring texts, with the lines that they came from; the last may hold lines alone."""

    index: int
    lines: tuple[Line, ...]
    texts: tuple[TokenizedText, ...]


def cut(prepared: Iterable[tuple[Line, TokenizedText | None]], size: int = SHARD_TEXTS) -> Iterator[Shard]:
    """Shards of `size` texts; a line without a text goes with the text after it."""
    index, lines, texts = 0, list[Line](), list[TokenizedText]()
    for line, text in prepared:
        lines.append(line)
        if text is not None:
            texts.append(text)
        if len(texts) == size:
            yield Shard(index, tuple(lines), tuple(texts))
            index, lines, texts = index + 1, [], []
    if lines:
        yield Shard(index, tuple(lines), tuple(texts))


def is_nucleotides(text: str) -> bool:
    """Whether a text is a sequence over ACGTUN, spaced or not.

    >>> is_nucleotides("ATTGGC"), is_nucleotides("a t t"), is_nucleotides("the cat")
    (True, True, False)
    """
    return NUCLEOTIDES.fullmatch(text) is not None


def kmer_size(text: str, encoder: Encoder) -> int | None:
    """The largest K for which most K-mers of a nucleotide sequence are known tokens; None for any other text."""
    if not is_nucleotides(text):
        return None
    sequence = "".join(text.split()).upper()[:KMER_SAMPLE]
    sizes = range(min(LONGEST_KMER, len(sequence)), 0, -1)
    return next((size for size in sizes if _reads_kmers(encoder, sequence, size)), None)


def _reads_kmers(encoder: Encoder, sequence: str, size: int) -> bool:
    text = encoder.encode(kmers(sequence, size))
    count = len(sequence) - size + 1
    return len(text) - sum(text.special) == count and 2 * sum(text.unknown) < count


def shards(items: Iterable[TokenizedText], size: int = SHARD_TEXTS) -> Iterator[list[TokenizedText]]:
    """Cut by number of texts, never by number of workers: the tree of merges must depend on the corpus alone."""
    iterator = iter(items)
    while shard := list(islice(iterator, size)):
        yield shard


def portions(shard: Sequence[TokenizedText]) -> list[list[TokenizedText]]:
    """A shard in the order of token counts, cut where each portion has about as many tokens: what is handed out.

    A shard is kept as one, but by itself would leave all cores idle but one. How it is cut depends on its texts alone.
    """
    ordered = by_length(shard)
    tokens = sum(map(len, ordered))
    count = max(1, min(PORTIONS, tokens // PORTION_TOKENS))
    before = accumulate(map(len, ordered), initial=0)
    numbered = groupby(zip(before, ordered, strict=False), key=lambda pair: pair[0] * count // tokens)
    return [[text for _, text in own] for _, own in numbered]


def by_length(texts: Iterable[TokenizedText]) -> list[TokenizedText]:
    """Texts in the order of their token counts, those alike in the order of the corpus."""
    return sorted(texts, key=lambda text: (len(text), text.line, text.part))


def batches(shard: Sequence[TokenizedText], batch_tokens: int) -> Iterator[list[TokenizedText]]:
    """A shard in the order of token counts, at most `batch_tokens` tokens (but one text) to a batch.

    The order of texts is the same whatever `batch_tokens` is. Batches never cross a portion.
    """
    for portion in portions(shard):
        yield from packed(portion, batch_tokens)


S = TypeVar("S", bound=Sized)


def packed(items: Iterable[S], batch_tokens: int) -> Iterator[list[S]]:
    """Items in their order, at most `batch_tokens` tokens (but one item) to a batch."""
    batch: list[S] = []
    tokens = 0
    for item in items:
        if batch and tokens + len(item) > batch_tokens:
            yield batch
            batch, tokens = [], 0
        batch.append(item)
        tokens += len(item)
    if batch:
        yield batch
