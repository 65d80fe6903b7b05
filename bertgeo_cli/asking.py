"""A study over one input: how it is asked, and what run.json says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from analyses.kit.result import Result

from . import estimate, provenance, report
from .intake import Intake
from .observation import Pass
from .options import SHARD_TEXTS
from .source import Source
from .study import Study
from .versions import versions


@dataclass
class Asking:
    """A study, by the name of its command, and the source of its texts: None for what reads neither texts nor model."""

    name: str
    study: Study
    source: Source | None
    how: Pass
    given: bool = True
    files: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    read: dict[str, Any] = field(default_factory=lambda: {"kind": "settings"})
    incomplete: int = 0

    def plan(self) -> dict[str, int]:
        """Texts, tokens, forward passes of one kind and shards."""
        return estimate.plan(self.source.texts() if self.source else (), self.how, SHARD_TEXTS)

    def answer(self, draft: Path) -> Result:
        """The answer; a corpus also leaves lines.csv in the draft."""
        if self.source is None:
            result = self.study.without_model()
            assert result is not None, "only what needs no model has no source"
            return result
        texts = Intake(self.source, self.how, draft)
        result = self.study.answer(self.source.loaded, texts)
        if not (self.given or self.source.is_corpus):
            self.remarks.append("Read the first sample sentence (no text was given).")
        self.remarks += texts.remarks
        self.files, self.read, self.incomplete = texts.files, texts.read, texts.incomplete
        return result

    def describe(self, result: Result, written: report.Written, formats: Mapping[str, str]) -> dict[str, Any]:
        """What run.json says."""
        answers = provenance.contents({self.name: result})
        return provenance.run_content(
            self.name,
            provenance.describe_analyses({self.name: self.study}, answers, written.notes),
            self.read,
            {} if self.source is None else provenance.reading(self.source.options),
            self._origin(),
            formats,
            self.remarks,
            written.files,
        )

    def _origin(self) -> dict[str, Any]:
        if self.source is None:
            return {"versions": versions()}
        return provenance.model_and_arithmetic(self.source.loaded, self.how)
