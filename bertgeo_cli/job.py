"""One analysis over one input: how it is read, run, and what there is to say about it afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from analyses.kit.analysis import Analysis
from analyses.kit.record import TokenizedText
from analyses.kit.result import Result

from . import provenance, report, screen
from .corpus import Encoder, Line, Reading, kmer_size, prepare, read_lines, too_long
from .formats import Layout, as_read, format_of, is_compressed, is_rereadable, labels_of, name_of, open_entries
from .models import LoadedModel
from .options import InputOptions
from .run import Pass, analyse_corpus, analyse_text, analyse_weights, needs_of, plan
from .samples import SAMPLE_CORPUS

UNKNOWN_LIMIT = 0.2
NEARLY_ALL = 0.9


@dataclass
class Job:
    """One analysis over one input: how it is read, run, and what there is to say about it afterwards."""

    name: str
    analysis: Analysis[Any]
    loaded: LoadedModel
    texts: InputOptions
    how: Pass
    files: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    source: dict[str, Any] = field(default_factory=dict)
    layout: Layout = Layout("txt", {})
    incomplete: int = 0

    def result(self, draft: Path) -> Result:
        """The answer; a corpus also leaves lines.csv in the draft."""
        if not needs_of([self.analysis]):
            self.source = {"kind": "weights"}
            return analyse_weights([self.analysis], self.loaded)[0]
        if self.texts.text is not None:
            text = self.single()
            self.source = provenance.text_source(text)
            self._warn_unknown(sum(text.unknown), len(text) - sum(text.special), text.text)
            return analyse_text([self.analysis], self.loaded, text, self.how)[0]
        return self._corpus(draft)

    def plan(self) -> dict[str, int]:
        """Texts, tokens and forward passes of the run, without running it."""
        if not needs_of([self.analysis]):
            return {"texts": 0, "tokens": 0, "batches": 0}
        if self.texts.text is not None:
            return plan([self.single()], self.how)
        return plan((text for _, text in self._prepared() if text is not None), self.how)

    def single(self) -> TokenizedText:
        """The one text, cut if it was asked for."""
        encoder = self._encoder()
        first, second = self.texts.text or "", self.texts.pair
        text = encoder.encode(as_read(first, self.texts), second and as_read(second, self.texts))
        if len(text) <= encoder.max_tokens:
            return text
        if self.texts.long != "truncate":
            raise too_long("the text", len(text), encoder.max_tokens)
        self.incomplete = 1
        self.remarks.append(f"The text has {len(text)} tokens and was truncated to {encoder.max_tokens}.")
        return encoder.truncate(text)

    def _corpus(self, draft: Path) -> Result:
        log = report.LinesLog(draft, labels_of(self.path, self.texts))
        try:
            with screen.progress(self._expected_lines()) as advance:
                texts = self._logged(log, advance)
                result = analyse_corpus([self.analysis], self.loaded, texts, self.how)[0]
        finally:
            log.close()
        self.files.append("lines.csv")
        self.incomplete = log.incomplete
        self.source = provenance.corpus_source(self.path, log, self.texts.encoding, self.layout)
        self.remarks.append(screen.summary(self.source))
        self._warn_unknown(log.unknown, log.tokens - log.special, log.unread)
        return result

    def _logged(self, log: report.LinesLog, advance: Any) -> Iterator[TokenizedText]:
        for line, text in self._prepared():
            log.add(line)
            advance(line.number)
            if text is not None:
                yield text

    def _prepared(self) -> Iterator[tuple[Line, TokenizedText | None]]:
        encoder, reading = self._encoder(), self._reading()
        with open_entries(self.path, self.texts) as (self.layout, entries):
            for line in read_lines(entries, reading, self.path_name):
                yield from prepare(line, encoder, reading)

    @property
    def path(self) -> Path | str:
        """The corpus: a file, `-` for standard input, or the sample."""
        if self.texts.corpus is None:
            return SAMPLE_CORPUS
        return "-" if self.texts.corpus == "-" else Path(self.texts.corpus)

    @property
    def path_name(self) -> str:
        """The corpus as messages name it."""
        return "the sample corpus" if self.texts.corpus is None else name_of(self.path)

    def _reading(self) -> Reading:
        long = self.texts.long or "truncate"
        return Reading(long, self.texts.on_error, self.texts.limit)

    def _encoder(self) -> Encoder:
        special = self.texts.special_tokens_in_text
        return Encoder(self.loaded.tokenizer, self.loaded.max_tokens, special_tokens_in_text=special)

    def _expected_lines(self) -> int | None:
        if is_compressed(self.path) or not is_rereadable(self.path):
            return None
        if self.texts.limit and format_of(self.path, self.texts) != "txt":
            return None  # so many rows or records, which may have several lines
        lines = provenance.count_lines(Path(self.path))
        return min(lines, self.texts.limit or lines)

    def _warn_unknown(self, unknown: int, tokens: int, example: str) -> None:
        if not tokens or unknown / tokens <= UNKNOWN_LIMIT:
            return
        warning = f"Warning: {unknown / tokens:.0%} of the tokens are unknown to this model's vocabulary."
        size = kmer_size(example, self._encoder()) if unknown / tokens >= NEARLY_ALL else None
        advice = f" It holds {size}-mers of such sequences: read them by --kmer {size}." if size else ""
        self.remarks.append(warning + advice)
