"""Analyses over one input: how it is read, run, and what there is to say about it afterwards."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from analyses.kit.record import TokenizedText
from analyses.kit.result import Result

from . import checkpoint, estimate, provenance, report, runners, screen
from .checkpoint import Checkpoint
from .choice import Analyses, settings_of
from .corpus import Encoder, Line, Reading, Shard, cut, kmer_size, prepare, read_lines, too_long
from .errors import StoppedError, UsageError
from .formats import Layout, as_read, format_of, is_compressed, is_rereadable, labels_of, name_of, open_entries
from .models import LoadedModel
from .observation import Observed, Pass, Task, start
from .options import CorpusInput, CorpusRunOptions, InputOptions, ModelOptions
from .run import analyse_text, analyse_weights, finalize, group_tables, nothing_read
from .samples import SAMPLE_CORPUS
from .versions import versions

STATES = "states"


@dataclass
class Job:
    """Analyses, by the name of each one's command, over one input."""

    command: str
    analyses: Analyses
    loaded: LoadedModel
    texts: InputOptions | CorpusInput
    model: ModelOptions
    how: Pass
    runs: CorpusRunOptions
    files: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    source: dict[str, Any] = field(default_factory=dict)
    layout: Layout = Layout("txt", {})
    incomplete: int = 0
    shards: int = 0
    _special: int = 0
    _advice: str = ""

    @property
    def of_texts(self) -> Analyses:
        """The analyses that read texts."""
        return {name: analysis for name, analysis in self.analyses.items() if analysis.needs}

    @property
    def of_weights(self) -> Analyses:
        """The analyses that read the checkpoint alone."""
        return {name: analysis for name, analysis in self.analyses.items() if not analysis.needs}

    @property
    def reads_corpus(self) -> bool:
        """Whether lines of a corpus go through the model."""
        return bool(self.of_texts) and self.texts.text is None

    @property
    def part(self) -> tuple[int, int]:
        """Which job of how many this is, counted from 1."""
        given = self.runs.shard or "1/1"
        job, slash, jobs = given.partition("/")
        if not (slash and job.isdecimal() and jobs.isdecimal() and 1 <= int(job) <= int(jobs)):
            raise UsageError(f"--shard {given!r} is no job of an array", "Write i/n, from 1/n to n/n.")
        return int(job), int(jobs)

    @contextmanager
    def kept(self, folder: Path, *, force: bool) -> Iterator[Checkpoint | None]:
        """Where the states of a corpus run lie until its report stands in `folder`."""
        if not self.reads_corpus:
            yield None
            return
        target = folder.resolve()
        states = target.with_name(f".{target.name}.{STATES}")
        anew = force or not is_rereadable(self.path)
        with checkpoint.opened(states, self.manifest(), self.modules, resume=self.runs.resume, force=anew) as opened:
            yield opened

    @property
    def modules(self) -> list[str]:
        """Where the classes of the states are defined."""
        return [type(analysis).__module__ for analysis in self.of_texts.values()]

    def manifest(self) -> dict[str, Any]:
        """What a resumed run, and every job of an array, must have in common with this one."""
        return {
            "command": self.command,
            "analyses": {name: settings_of(analysis) for name, analysis in self.analyses.items()},
            "corpus": provenance.corpus_identity(self.path, self.texts.encoding),
            "reading": provenance.reading(self.texts),
            "model": dict(self.loaded.identity),
            "arithmetic": provenance.lasting_arithmetic(self.loaded, self.how),
            "versions": versions(),
            "shard_texts": self.runs.shard_texts,
            "per_text": self.runs.per_text,
            "jobs": self.part[1],
        }

    def check(self) -> None:
        """Raise UsageError for what cannot be run, before any work."""
        start(list(self.analyses.values()), self.loaded)
        again = self.runs.resume or self.part[1] > 1
        if self.reads_corpus and again and not is_rereadable(self.path):
            raise UsageError(f"{self.path_name} cannot be read again", "Give the corpus as a file.")

    def describe(
        self, results: Mapping[str, Result], written: report.Written, formats: Mapping[str, str]
    ) -> dict[str, Any]:
        """What run.json says."""
        content = provenance.run_content(
            self.command,
            provenance.describe_analyses(self.analyses, results, written.notes),
            self.source,
            provenance.reading(self.texts),
            provenance.model_and_arithmetic(self.loaded, self.how),
            formats,
            self.remarks,
            written.files,
        )
        return content | ({"part": self.part_content()} if self.runs.shard else {})

    def part_content(self) -> dict[str, Any]:
        """What `bertgeo merge` must know of this job."""
        counted = {"shards": self.shards, "special_tokens": self._special, "advice": self._advice}
        return {"job": self.part[0], **counted, "manifest": self.manifest()}

    def results(self, draft: Path, kept: Checkpoint | None) -> dict[str, Result]:
        """The answers by analysis; a corpus also leaves lines.csv in the draft, and of each text what was asked for.

        A job of an array leaves its states instead, and the first the answers that need no texts.
        """
        found: dict[str, Result] = {}
        if self.of_weights and self.part[0] == 1:
            found |= _named(self.of_weights, analyse_weights(list(self.of_weights.values()), self.loaded))
        if kept is not None:
            found |= self._corpus(draft, kept)
        elif self.of_texts:
            found |= self._text()
        else:
            self.source = {"kind": "weights"}
        return {name: found[name] for name in self.analyses if name in found}

    def plan(self, *, figures: bool) -> dict[str, int]:
        """Texts, tokens, forward passes and shards of the run, and about how many bytes it will leave on disk."""
        first, texts = estimate.first_and_all(self._texts())
        counts = estimate.plan(texts, self.how, self.runs.shard_texts)
        analyses = self.analyses if first else self.of_weights
        size = estimate.bytes_on_disk(
            analyses, self.loaded, first, counts["texts"], how=self.how, per_text=self.runs.per_text, figures=figures
        )
        return counts | {"bytes on disk, about": size}

    def _texts(self) -> Iterator[TokenizedText]:
        if self.reads_corpus:
            yield from (text for _, text in self._prepared() if text is not None)
        elif self.of_texts:
            yield self.single()

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

    def _text(self) -> dict[str, Result]:
        text = self.single()
        self.source = provenance.text_source(text)
        self._warn_unknown(sum(text.unknown), len(text) - sum(text.special), text.text)
        return _named(self.of_texts, analyse_text(list(self.of_texts.values()), self.loaded, text, self.how))

    def _corpus(self, draft: Path, kept: Checkpoint) -> dict[str, Result]:
        log = report.LinesLog(draft, labels_of(self.path, self.texts))
        try:
            with screen.progress(self._expected_lines()) as bar:
                self._observe(kept, log, bar)
        except KeyboardInterrupt:
            raise _stopped(kept, self.runs.shard_texts) from None
        finally:
            log.close()
        observed = kept.merged() or Observed({})
        log.mark_failed(observed.failures)
        self.files.append(report.LINES)
        self._tell(log)
        self._move_tables(kept, draft)
        if self.runs.shard:
            self.files += _move(kept.folder, draft / STATES, sorted(kept.nodes.values()), draft)
            return {}
        try:
            return answers(self.of_texts, observed)
        except UsageError:  # settings that no text satisfies: there is nothing to go on with
            kept.remove()
            raise

    def _observe(self, kept: Checkpoint, log: report.LinesLog, bar: screen.Bar) -> None:
        task = Task(self.of_texts, self.how, self.grouped, self.runs.per_text, self.texts.on_error == "skip")
        for shard, result in self._runner(task, self._missing(kept, log, bar), bar):
            kept.add(shard.index, result.observed, result.tables)
            bar.finish(shard.index)

    def _runner(self, task: Task, shards: Iterable[Shard], bar: screen.Bar) -> runners.Results:
        origin = runners.Origin.of(self.model, self.loaded)
        if self.runs.dask is not None:
            return runners.on_dask(task, origin, shards, self.runs.dask, self.runs.workers)
        if self.runs.workers > 1:
            return runners.in_processes(task, origin, shards, self.runs.workers)
        return runners.serially(task, self.loaded, shards, bar.advance)

    def _missing(self, kept: Checkpoint, log: report.LinesLog, bar: screen.Bar) -> Iterator[Shard]:
        """This job's shards that are not kept already; the lines of all of its shards go into the log."""
        job, jobs = self.part
        for shard in cut(self._prepared(), self.runs.shard_texts):
            bar.begin(shard.index, len(shard.lines))
            self.shards = shard.index + bool(shard.texts)
            if shard.index % jobs != job - 1:
                bar.finish(shard.index)
                continue
            for line in shard.lines:
                log.add(line)
            if not shard.texts or kept.holds(shard.index):
                bar.finish(shard.index)
            else:
                yield shard

    @property
    def grouped(self) -> bool:
        """Whether the corpus names a group of every text."""
        return self.texts.group_column is not None

    def _tell(self, log: report.LinesLog) -> None:
        self.incomplete = log.incomplete
        identity = provenance.corpus_identity(self.path, self.texts.encoding)
        self.source = provenance.corpus_source(identity, self.layout, log)
        self.remarks.append(screen.summary(self.source))
        self._warn_unknown(log.unknown, log.tokens - log.special, log.unread)
        self._special = log.special

    def _move_tables(self, kept: Checkpoint, draft: Path) -> None:
        """The tables of every text, from among the states to the report."""
        for path in sorted((kept.folder / checkpoint.TABLES).rglob("*.parquet")):
            name = path.parent.name
            folder = draft / name / checkpoint.TABLES if self.command == "run" else draft / checkpoint.TABLES
            self.files += _move(path.parent, folder, [path], draft)

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
        size = kmer_size(example, self._encoder()) if example else None
        self._advice = f" It holds {size}-mers of such sequences: read them by --kmer {size}." if size else ""
        self.remarks += screen.unknown_warning(unknown, tokens, self._advice)


def _named(analyses: Analyses, results: list[Result]) -> dict[str, Result]:
    return dict(zip(analyses, results, strict=True))


def answers(analyses: Analyses, observed: Observed) -> dict[str, Result]:
    """The answers to all of the texts, with tables by group where the corpus has groups.

    Raises BertgeoError when there are no texts.
    """
    if not observed.texts:
        raise nothing_read()
    named = _named(analyses, finalize(list(analyses.values()), observed.whole, None))
    if set(observed.groups) <= {""}:
        return named
    tables = group_tables(analyses, observed)
    return {name: result.with_tables(tables[name]) for name, result in named.items()}


def _stopped(kept: Checkpoint, texts: int) -> StoppedError:
    shards = len(kept.shards)
    if not shards:
        return StoppedError("stopped before the first shard was done; nothing was kept", "Run it again.")
    told = f"stopped; {shards} shard{'s' * (shards > 1)} of {texts} texts kept"
    return StoppedError(told, "Go on with the same command and --resume.")


def _move(source: Path, target: Path, paths: list[Path], draft: Path) -> list[str]:
    """Copies of files in the draft, and their names there; the originals stay until the report is in its place."""
    target.mkdir(parents=True, exist_ok=True)
    for path in paths:
        shutil.copyfile(path, target / path.name)
    return [(target / path.name).relative_to(draft).as_posix() for path in paths]
