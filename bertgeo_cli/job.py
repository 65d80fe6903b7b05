"""Analyses over one input: how they are run, and what there is to say about it afterwards."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from analyses.kit.result import Result

from . import checkpoint, estimate, provenance, report, runners, screen
from .checkpoint import Checkpoint
from .choice import Analyses, asked_of_texts, settings_of
from .corpus import Shard, cut
from .errors import BertgeoError, StoppedError, UsageError
from .intake import Intake
from .models import LoadedModel
from .observation import Observed, Pass, Task, failed, start
from .options import CorpusRunOptions, ModelOptions
from .recording import give_back_memory
from .run import analyse_text, analyse_weights, finalize, group_tables, nothing_read
from .source import Source
from .versions import versions

STATES = "states"


@dataclass
class Job:
    """Analyses, by the name of each one's command, over one input."""

    command: str
    analyses: Analyses
    source: Source
    model: ModelOptions
    how: Pass
    runs: CorpusRunOptions
    files: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    read: dict[str, Any] = field(default_factory=dict)
    incomplete: int = 0
    shards: int = 0
    for_merging: dict[str, Any] = field(default_factory=dict)

    @property
    def loaded(self) -> LoadedModel:
        """The model."""
        return self.source.loaded

    @property
    def of_texts(self) -> Analyses:
        """What is asked of texts, by the name of the analysis."""
        return asked_of_texts(self.analyses, given=self.source.options.given)

    @property
    def of_weights(self) -> Analyses:
        """The analyses that read the checkpoint alone."""
        return {name: analysis for name, analysis in self.analyses.items() if not analysis.needs}

    @property
    def reads_corpus(self) -> bool:
        """Whether lines of a corpus go through the model."""
        return bool(self.of_texts) and self.source.is_corpus

    @cached_property
    def part(self) -> tuple[int, int]:
        """Which job of how many this is, counted from 1."""
        given = self.runs.shard or "1/1"
        job, slash, jobs = given.partition("/")
        if not (slash and job.isdecimal() and jobs.isdecimal() and 1 <= int(job) <= int(jobs)):
            raise UsageError(f"--shard {given!r} is no job of an array", "Write i/n, from 1/n to n/n.")
        return int(job), int(jobs)

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """What a resumed run, and every job of an array, must have in common with this one."""
        reading = provenance.reading(self.source.options)
        del reading["on_error"]  # shards that are whole had no error: after one, a run may go on and skip it
        return {
            "command": self.command,
            "analyses": {name: settings_of(analysis) for name, analysis in self.analyses.items()},
            "corpus": self.source.identity,
            "reading": reading,
            "model": dict(self.loaded.identity),
            "arithmetic": provenance.lasting_arithmetic(self.loaded, self.how),
            "versions": versions(),
            "shard_texts": self.runs.shard_texts,
            "per_text": self.runs.per_text,
            "jobs": self.part[1],
        }

    def check(self) -> None:
        """Raise UsageError for what cannot be run, before any work."""
        start([*self.of_weights.values(), *self.of_texts.values()], self.loaded)
        again = self.runs.resume or self.part[1] > 1
        if self.reads_corpus and again and not self.source.is_rereadable:
            raise UsageError(f"{self.source.name} cannot be read again", "Give the corpus as a file.")

    def plan(self, *, figures: bool) -> dict[str, int]:
        """Texts, tokens, forward passes and shards of the run, and about how many bytes it will leave on disk."""
        first, texts = estimate.first_and_all(self.source.texts() if self.of_texts else ())
        counts = estimate.plan(texts, self.how, self.runs.shard_texts)
        analyses = [*self.of_weights.values(), *(self.of_texts.values() if first else ())]
        size = estimate.bytes_on_disk(
            analyses, self.loaded, first, counts["texts"], how=self.how, per_text=self.runs.per_text, figures=figures
        )
        return counts | {"bytes on disk, about": size}

    @contextmanager
    def kept(self, folder: Path, *, force: bool) -> Iterator[Checkpoint | None]:
        """Where the states of a corpus run lie until its report stands in `folder`."""
        if not self.reads_corpus:
            yield None
            return
        target = folder.resolve()
        states = target.with_name(f".{target.name}.{STATES}")
        modules = [type(analysis).__module__ for analysis in self.of_texts.values()]
        with checkpoint.opened(states, self.manifest, modules, resume=self.runs.resume, force=force) as opened:
            if self.source.is_rereadable:
                with _told(opened, self.runs.shard_texts):
                    yield opened
                return
            try:
                yield opened
            finally:
                opened.remove()  # what cannot be read again cannot be gone on with

    def results(self, draft: Path, kept: Checkpoint | None) -> dict[str, Result]:
        """The answers by analysis; a corpus also leaves lines.csv in the draft, and of each text what was asked for.

        A job of an array leaves its states instead, and the first the answers that need no texts.
        """
        weights: dict[str, Result] = {}
        if self.of_weights and self.part[0] == 1:
            weights = _named(self.of_weights, analyse_weights(list(self.of_weights.values()), self.loaded))
        texts: dict[str, Result] = {}
        if kept is not None:
            texts = self._corpus(draft, kept)
        elif self.of_texts:
            texts = self._text(draft)
        else:
            self.read = {"kind": "weights"}
        joined = {name: weights[name].joined(texts[name]) for name in weights.keys() & texts.keys()}
        found = weights | texts | joined
        return {name: found[name] for name in self.analyses if name in found}

    def describe(
        self, results: Mapping[str, Result], written: report.Written, formats: Mapping[str, str]
    ) -> dict[str, Any]:
        """What run.json says."""
        answers = provenance.contents(results)
        content = provenance.run_content(
            self.command,
            provenance.describe_analyses(self.analyses, answers, written.notes),
            self.read,
            provenance.reading(self.source.options),
            provenance.model_and_arithmetic(self.loaded, self.how),
            formats,
            self.remarks,
            written.files,
        )
        if not self.runs.shard:
            return content
        return content | {"part": self.for_merging | {"answers": answers, "figure_notes": written.notes}}

    def _text(self, draft: Path) -> dict[str, Result]:
        texts = Intake(self.source, self.how, draft)
        text = texts.single()
        self.read, self.incomplete = texts.read, texts.incomplete
        self.remarks += texts.remarks
        return _named(self.of_texts, analyse_text(list(self.of_texts.values()), self.loaded, text, self.how))

    def _corpus(self, draft: Path, kept: Checkpoint) -> dict[str, Result]:
        log = report.LinesLog(draft, self.source.labels)
        try:
            with screen.progress(self.source.expected_lines()) as bar:
                self._observe(kept, log, bar)
        finally:
            log.close()
        self.source.refuse_changed()
        observed = kept.merged() or Observed({})
        if observed.failures and self.source.options.on_error == "stop":
            raise failed(observed.failures[0])
        log.mark_failed(observed.failures)
        self.files.append(report.LINES)
        self._tell(log)
        self._copy_tables(kept, draft)
        if self.runs.shard:
            self.files += _copied(sorted(kept.nodes.values()), draft / STATES, draft)
            return {}
        try:
            return answers(self.of_texts, observed)
        except BertgeoError:  # no text, or none that satisfies the settings
            if len(self.of_texts) == 1 or not observed.texts:
                kept.remove()
            raise

    def _observe(self, kept: Checkpoint, log: report.LinesLog, bar: screen.Bar) -> None:
        if kept.shards:
            screen.say(f"Going on: {_counted(kept)} of {self.runs.shard_texts} texts kept from before.")
        skip = self.source.options.on_error == "skip"
        task = Task(
            self.of_texts, self.how, self.source.is_grouped, "id" in self.source.labels, self.runs.per_text, skip
        )
        for shard, result in self._runner(task, self._missing(kept, log, bar), bar):
            kept.add(shard, result.observed, result.tables)
            bar.finish(shard)
            del result  # not to be held while the next is observed
            give_back_memory()

    def _runner(self, task: Task, shards: Iterable[Shard], bar: screen.Bar) -> runners.Results:
        origin = runners.Origin.of(self.model, self.loaded)
        if self.runs.dask is not None:
            return runners.on_dask(task, origin, shards, self.runs.dask, self.runs.workers or 1)
        return runners.here(task, origin, self.loaded, shards, self.runs.workers, bar.advance)

    def _missing(self, kept: Checkpoint, log: report.LinesLog, bar: screen.Bar) -> Iterator[Shard]:
        """This job's shards that are not kept already; the lines of all of its shards go into the log."""
        job, jobs = self.part
        for shard in cut(self.source.lines(), self.runs.shard_texts):
            self.shards = shard.index + bool(shard.texts)
            ours = shard.index % jobs == job - 1
            missing = ours and bool(shard.texts) and not kept.holds(shard.index)
            bar.begin(shard.index, len(shard.lines), len(shard.texts) if missing else 0)
            for line in shard.lines if ours else ():
                log.add(line)
            if missing:
                yield shard
            else:
                bar.finish(shard.index)

    def _tell(self, log: report.LinesLog) -> None:
        self.incomplete = log.incomplete
        self.read = provenance.corpus_source(self.source.identity, self.source.layout, log)
        advice = self.source.advice(log.unread)
        self.remarks.append(screen.summary(self.read))
        self.remarks += screen.too_few_shards(self.shards, self.part[1])
        self.remarks += screen.unknown_warning(log.unknown, log.tokens - log.special, advice)
        counted = {"job": self.part[0], "shards": self.shards, "special_tokens": log.special, "advice": advice}
        self.for_merging = counted | {"manifest": self.manifest}

    def _copy_tables(self, kept: Checkpoint, draft: Path) -> None:
        """The tables of every text, from among the states to the report."""
        for path in sorted((kept.folder / checkpoint.TABLES).rglob("*.parquet")):
            folder = draft / path.parent.name if self.command == "run" else draft
            self.files += _copied([path], folder / checkpoint.TABLES, draft)


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


def _named(analyses: Analyses, results: Sequence[Result]) -> dict[str, Result]:
    return dict(zip(analyses, results, strict=True))


@contextmanager
def _told(kept: Checkpoint, texts: int) -> Iterator[None]:
    """However a run ends early: what of it is kept, and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        if kept.nodes:
            told = f"stopped; {_counted(kept)} of {texts} texts kept"
            raise StoppedError(told, "Go on with the same command and --resume.") from None
        raise StoppedError("stopped before the first shard was done; nothing was kept", "Run it again.") from None
    except BertgeoError as error:
        if kept.nodes and kept.folder.exists() and "--resume" not in error.hint:
            error.hint += f" What was done ({_counted(kept)} of {texts} texts) is kept: add --resume."
        raise


def _counted(kept: Checkpoint) -> str:
    return f"{len(kept.shards)} shard{'s' * (len(kept.shards) > 1)}"


def _copied(paths: Iterable[Path], target: Path, draft: Path) -> list[str]:
    """Copies of files in the draft, and their names there; the originals stay until the report is in its place."""
    target.mkdir(parents=True, exist_ok=True)
    copies = [Path(shutil.copyfile(path, target / path.name)) for path in paths]
    return [copy.relative_to(draft).as_posix() for copy in copies]
