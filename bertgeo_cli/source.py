"""The input of a run: one text or the lines of a corpus, tokenised as they are read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from analyses.kit.record import TokenizedText

from . import provenance
from .corpus import Encoder, Line, Long, Reading, kmer_size, prepare, read_lines, too_long
from .errors import BertgeoError
from .formats import Entry, Layout, as_read, format_of, is_compressed, is_rereadable, labels_of, name_of, open_entries
from .models import LoadedModel
from .options import CorpusInput, InputOptions
from .samples import SAMPLE_CORPUS


@dataclass
class Source:
    """What the options of a run say is to be read, and the tokenizer that it is read for."""

    options: InputOptions | CorpusInput
    loaded: LoadedModel
    layout: Layout = Layout("txt", {})

    @property
    def is_corpus(self) -> bool:
        """Whether there are lines to read, not one text."""
        return self.options.text is None

    @property
    def is_rereadable(self) -> bool:
        """Whether the corpus can be read more than once."""
        return bool(self.options.several) or is_rereadable(self.path)

    @property
    def is_grouped(self) -> bool:
        """Whether the corpus names a group of every text."""
        return self.options.group_column is not None

    @property
    def path(self) -> Path | str:
        """The corpus: a file, `-` for standard input, or the sample."""
        if self.options.corpus is None:
            return SAMPLE_CORPUS
        return "-" if self.options.corpus == "-" else Path(self.options.corpus)

    @property
    def name(self) -> str:
        """The corpus as messages name it."""
        if self.options.several:
            return "the texts given"
        return "the sample corpus" if self.options.corpus is None else name_of(self.path)

    @property
    def labels(self) -> tuple[str, ...]:
        """Which of `id` and `group` the corpus gives its texts."""
        return () if self.options.several else labels_of(self.path, self.options)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Which corpus it is. Raises UsageError for a file that cannot be read."""
        if self.options.several:
            return provenance.texts_identity(self.name, self.options.several)
        return provenance.corpus_identity(self.path, self.options.encoding)

    def refuse_changed(self) -> None:
        """Raise BertgeoError when the corpus is no longer the one that `identity` names."""
        if self.options.several:
            return
        if self.identity["sha256"] not in (None, provenance.corpus_identity(self.path, "")["sha256"]):
            raise BertgeoError(f"{self.name} changed while it was read", "Run it anew by --force.")

    @cached_property
    def encoder(self) -> Encoder:
        """What turns lines into tokens."""
        special = self.options.special_tokens_in_text
        return Encoder(self.loaded.tokenizer, self.loaded.max_tokens, special_tokens_in_text=special)

    def single(self) -> TokenizedText:
        """The one text. Raises BertgeoError when it is too long and may not be cut."""
        first, second = self.options.text or "", self.options.pair
        text = self.encoder.encode(as_read(first, self.options), second and as_read(second, self.options))
        if len(text) > self.encoder.max_tokens and self.options.long != "truncate":
            raise too_long("the text", len(text), self.encoder.max_tokens, "Shorten it, or choose --long truncate.")
        return text

    def lines(self) -> Iterator[tuple[Line, TokenizedText | None]]:
        """Every line of the corpus, with the text that goes to the model, if any does."""
        usual: Long = "error" if self.options.several else "truncate"
        reading = Reading(self.options.long or usual, self.options.on_error, self.options.limit)
        with self._entries() as (self.layout, entries):
            for line in read_lines(entries, reading, self.name):
                yield from prepare(line, self.encoder, reading)

    def _entries(self) -> AbstractContextManager[tuple[Layout, Iterator[Entry]]]:
        several = self.options.several
        if not several:
            return open_entries(self.path, self.options)
        entries = (Entry(number, as_read(text, self.options)) for number, text in enumerate(several, start=1))
        return nullcontext((self.layout, entries))

    def texts(self) -> Iterator[TokenizedText]:
        """What goes to the model."""
        if self.is_corpus:
            yield from (text for _, text in self.lines() if text is not None)
        else:
            yield self.single()

    def expected_lines(self) -> int | None:
        """How many lines there are, where that can be told before."""
        if self.options.several:
            return len(self.options.several)
        if is_compressed(self.path) or not self.is_rereadable:
            return None
        if self.options.limit and format_of(self.path, self.options) != "txt":
            return None  # so many rows or records, which may have several lines
        lines = provenance.count_lines(Path(self.path))
        return min(lines, self.options.limit or lines)

    def advice(self, unread: str) -> str:
        """What may help when a text is all unknown tokens: nothing, or to read it as K-mers."""
        size = kmer_size(unread, self.encoder) if unread else None
        return f" It holds {size}-mers of such sequences: read them by --kmer {size}." if size else ""
