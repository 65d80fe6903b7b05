"""The texts of one question, read once in this process, and what there is to say of them afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from analyses.kit.record import TokenizedText

from . import provenance, report, screen
from .corpus import batches, cut
from .observation import Pass
from .options import SHARD_TEXTS
from .recording import give_back_memory
from .run import nothing_read
from .source import Source


@dataclass
class Intake:
    """One text, or the lines of a corpus batch by batch; a corpus leaves lines.csv in the draft of the report."""

    source: Source
    how: Pass
    draft: Path
    files: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    read: dict[str, Any] = field(default_factory=dict)
    incomplete: int = 0

    def single(self) -> TokenizedText:
        """The one text, cut to what fits where that was asked for. Raises BertgeoError for one that is too long."""
        text, limit = self.source.single(), self.source.loaded.max_tokens
        if len(text) > limit:
            self.incomplete = 1
            self.remarks.append(f"The text has {len(text)} tokens and was truncated to {limit}.")
            text = self.source.encoder.truncate(text)
        self.read = provenance.text_source(text)
        self._warn(sum(text.unknown), len(text) - sum(text.special), text.text)
        return text

    def batches(self) -> Iterator[list[TokenizedText]]:
        """The text alone, or all texts of the corpus. Raises BertgeoError for a corpus without any."""
        if not self.source.is_corpus:
            yield [self.single()]
            return
        identity, log, texts = self.source.identity, report.LinesLog(self.draft, self.source.labels), 0
        try:
            with screen.progress(self.source.expected_lines()) as bar:
                for shard in cut(self.source.lines(), SHARD_TEXTS):
                    bar.begin(shard.index, len(shard.lines), len(shard.texts))
                    for line in shard.lines:
                        log.add(line)
                    for batch in batches(shard.texts, self.how.batch_tokens):
                        yield batch
                        bar.advance(len(batch))
                    bar.finish(shard.index)
                    texts += len(shard.texts)
                    give_back_memory()
        finally:
            log.close()
        self.source.refuse_changed()
        if not texts:
            raise nothing_read()
        self._tell(identity, log)

    def _tell(self, identity: dict[str, Any], log: report.LinesLog) -> None:
        self.files.append(report.LINES)
        self.incomplete = log.incomplete
        self.read = provenance.corpus_source(identity, self.source.layout, log)
        self.remarks.append(screen.summary(self.read))
        self._warn(log.unknown, log.tokens - log.special, log.unread)

    def _warn(self, unknown: int, tokens: int, text: str) -> None:
        self.remarks += screen.unknown_warning(unknown, tokens, self.source.advice(text))
