"""Published values measured again: which of them can be, what comes out, and whether it agrees."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from analyses.kit.analysis import Analysis
from analyses.kit.record import TokenizedText
from analyses.kit.result import Result

from . import formats, provenance, registry, report, screen
from .choice import analysis_of
from .errors import BertgeoError, UsageError
from .families import FAMILIES
from .models import LoadedModel, load_chosen
from .observation import Pass, start
from .options import CorpusInput, ModelOptions, ReproduceOptions
from .published import PUBLISHED, Published, read_published
from .run import analyse_corpus, analyse_weights, use_threads
from .source import Source
from .verdicts import Measurement
from .versions import versions

COMMAND = "reproduce"


class DiffersError(BertgeoError):
    """A measured value is not the published one."""

    exit_code = 4


@dataclass
class Reproduction:
    """The published values that were chosen, and what measuring them gave."""

    chosen: ReproduceOptions
    how: Pass
    origins: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, int] = field(default_factory=dict)

    @cached_property
    def path(self) -> Path:
        """The file of values."""
        return PUBLISHED if self.chosen.values is None else self.chosen.values

    @cached_property
    def entries(self) -> list[Published]:
        """Those asked for. Raises UsageError for models or names that have no values."""
        entries = read_published(self.path)
        _refuse_unknown(self.folders, dict.fromkeys(entry.model for entry in entries), "model", "--model")
        names = [] if self.chosen.only == "all" else [name.strip() for name in self.chosen.only.split(",")]
        sources = dict.fromkeys(entry.source for entry in entries)
        _refuse_unknown(set(names) - {entry.name for entry in entries}, sources, "source or entry", "--only")
        return [
            entry
            for entry in entries
            if (entry.model in self.folders or not self.folders)
            and (entry.name in names or entry.source in names or not names)
        ]

    @cached_property
    def folders(self) -> dict[str, str]:
        """By model asked for: where to load it from."""
        parts = [given.partition("=") for given in self.chosen.models or []]
        return {name: folder or name for name, _, folder in parts}

    @cached_property
    def corpus(self) -> CorpusInput:
        """How texts are read."""
        names = [field.name for field in fields(CorpusInput) if hasattr(self.chosen, field.name)]
        return CorpusInput(**{name: getattr(self.chosen, name) for name in names})

    @cached_property
    def source(self) -> dict[str, Any]:
        """Which texts are read. Raises UsageError for those that cannot be, or not once for every model."""
        if self.chosen.corpus is None:
            self._refuse_unread()
            return {"kind": "weights"}
        if not formats.is_rereadable(self.chosen.corpus):
            raise UsageError("reproduce reads the corpus once for every model", "Give it as a file.")
        formats.check(self.corpus)
        return provenance.corpus_identity(Path(self.chosen.corpus), self.chosen.encoding)

    def _refuse_unread(self) -> None:
        for name in ("encoding", "input_format", "column", "pair_column", "limit"):
            if getattr(self.chosen, name) != getattr(ReproduceOptions, name):
                option = name.replace("_", "-")
                raise UsageError(f"--{option} was given, and no --corpus", "Leave it out, or give both.")

    def check(self) -> None:
        """Raise UsageError for what cannot be meant, before any work."""
        _ = self.entries, self.source

    def measured(self, *, dry: bool = False) -> list[Measurement]:
        """Every chosen entry with its values measured, or why not. A dry run measures nothing."""
        found: dict[str, Measurement] = {}
        for model in dict.fromkeys(entry.model for entry in self.entries):
            found |= self._of_model(model, [entry for entry in self.entries if entry.model == model], dry)
        return [found[entry.name] for entry in self.entries]

    def _of_model(self, model: str, entries: Sequence[Published], dry: bool) -> dict[str, Measurement]:
        obstacles = {entry.name: self._obstacle(entry) for entry in entries}
        left = [entry for entry in entries if not obstacles[entry.name]]
        found = {entry.name: Measurement.skipped(entry, obstacles[entry.name]) for entry in entries}
        loaded = self._load(model) if left else ""
        if isinstance(loaded, str) or dry:
            why = loaded if isinstance(loaded, str) else "to be measured: this is a dry run"
            return found | {entry.name: Measurement.skipped(entry, why) for entry in left}
        return found | self._measured(loaded, left)

    def describe(self, result: Result, written: report.Written, formats: Mapping[str, str]) -> dict[str, Any]:
        """What run.json says."""
        return provenance.run_content(
            COMMAND,
            provenance.describe_analyses(
                {COMMAND: self.settings}, provenance.contents({COMMAND: result}), written.notes
            ),
            self.source | ({"texts": self.texts} if self.texts else {}),
            provenance.reading(self.corpus),
            {"models": self.origins, "versions": versions()},
            formats,
            (),
            written.files,
        )

    @property
    def settings(self) -> Settings:
        """What was asked for, without paths."""
        own = "published.toml" if self.chosen.values is None else self.path.name
        return Settings(sorted(self.folders), self.chosen.only, own, report.file_hash(self.path))

    def _obstacle(self, entry: Published) -> str:
        """Why an entry cannot be measured, whatever the model's files hold; empty if it can."""
        if entry.family not in FAMILIES:
            return f"{entry.model} is of the family {entry.family}, which bertgeo does not read"
        if entry.analysis not in registry.entries():
            return f"no analysis {entry.analysis} in this version"
        try:
            analysis = _analysis(entry)
        except UsageError as error:
            return f"not in this version: {error.message}"
        if analysis.needs and self.chosen.corpus is None:
            return f"needs texts, by --corpus: {entry.corpus or 'any'}"
        return ""

    def _load(self, model: str) -> LoadedModel | str:
        """The model, or why there is none. A folder that the user named must hold it."""
        chosen = ModelOptions(
            model=self.folders.get(model, model),
            offline=not self.chosen.download,
            device=self.chosen.device,
            threads=self.chosen.threads,
        )
        try:
            loaded = load_chosen(chosen)
        except BertgeoError as error:
            if chosen.model != model:
                raise
            return error.message
        use_threads(chosen.threads)
        screen.say(f"Model: {model}" + (f" from {loaded.name}" if chosen.model != model else ""))
        arithmetic = provenance.arithmetic(loaded, self.how)
        self.origins[model] = {"model": dict(loaded.identity), "arithmetic": arithmetic}
        return loaded

    def _measured(self, loaded: LoadedModel, entries: Sequence[Published]) -> dict[str, Measurement]:
        """The entries of one model: all that ask the same share an analysis, all of one length of text a pass."""
        runs = {_run_of(entry): _analysis(entry) for entry in entries}
        self._refuse_other_sizes(loaded, entries[0].model, list(runs.values()))
        results = {run: analyse_weights([analysis], loaded)[0] for run, analysis in runs.items() if not analysis.needs}
        of_texts = {run: analysis for run, analysis in runs.items() if analysis.needs}
        for tokens in dict.fromkeys(run[2] for run in of_texts):
            shared = {run: analysis for run, analysis in of_texts.items() if run[2] == tokens}
            results |= dict(zip(shared, self._of_texts(loaded, list(shared.values()), tokens), strict=True))
        return {entry.name: Measurement.of(entry, results[_run_of(entry)]) for entry in entries}

    def _refuse_other_sizes(self, loaded: LoadedModel, model: str, analyses: Sequence[Analysis[Any]]) -> None:
        """Raise UsageError for a folder that lacks what is measured of the model it was named."""
        try:
            start(analyses, loaded)
        except UsageError as error:
            told = f"{loaded.name} cannot be measured as {model}: {error.message}"
            raise UsageError(told, f"Give the folder of {model} itself by --model.") from None

    def _of_texts(self, loaded: LoadedModel, analyses: Sequence[Analysis[Any]], tokens: int) -> list[Result]:
        fitting = replace(loaded, max_tokens=min(tokens or loaded.max_tokens, loaded.max_tokens))
        name = f"{loaded.name}, {f'cut to {tokens}' if tokens else 'all'} tokens"
        return analyse_corpus(analyses, loaded, self._counted(name, Source(self.corpus, fitting).texts()), self.how)

    def _counted(self, name: str, texts: Iterator[TokenizedText]) -> Iterator[TokenizedText]:
        for number, text in enumerate(texts, start=1):
            self.texts[name] = number
            yield text


@dataclass(frozen=True)
class Settings:
    """What run.json says was asked for."""

    models: list[str]
    only: str
    values: str
    values_sha256: str


def _refuse_unknown(given: Iterable[str], known: Iterable[str], what: str, option: str) -> None:
    for name in given:
        if name not in known:
            raise UsageError(f"{option} {name}: the values know no such {what}", f"They know {', '.join(known)}.")


def _analysis(entry: Published) -> Analysis[Any]:
    return analysis_of(entry.analysis, entry.settings)


def _run_of(entry: Published) -> tuple[str, str, int]:
    return entry.analysis, json.dumps(entry.settings, sort_keys=True), entry.tokens
