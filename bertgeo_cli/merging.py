"""The reports of all jobs of an array -> the report that one job alone would have written."""

from __future__ import annotations

import csv
import heapq
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from analyses.kit.result import Result

from . import provenance, report, screen
from .checkpoint import Checkpoint
from .choice import Analyses, analysis_of, asked_of_texts
from .errors import BertgeoError, UsageError
from .formats import Layout
from .job import STATES, answers
from .observation import Observed
from .report import LINES, MARKER, LinesLog


@dataclass
class Merge:
    """Reports of jobs by the number of each, with what each one's run.json says."""

    parts: dict[int, Path]
    runs: dict[int, dict[str, Any]]
    files: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    source: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, folders: Sequence[Path]) -> Self:
        """Read the parts. Raises UsageError unless they are all the jobs of one array, each once."""
        parts: dict[int, Path] = {}
        runs: dict[int, dict[str, Any]] = {}
        for folder in folders:
            run = _run(folder)
            job = run["part"]["job"]
            if job in parts:
                raise UsageError(f"{parts[job]} and {folder} are both job {job}", "Give every part once.")
            parts[job], runs[job] = folder, run
        _refuse_strangers(parts, runs)
        for job, folder in parts.items():
            _refuse_damaged(folder, job, runs[job]["part"]["sha256"])
        return cls(dict(sorted(parts.items())), dict(sorted(runs.items())))

    @property
    def command(self) -> str:
        """The command that was run."""
        return str(self.manifest["command"])

    @property
    def manifest(self) -> dict[str, Any]:
        """What all jobs have in common."""
        manifest: dict[str, Any] = next(iter(self.runs.values()))["part"]["manifest"]
        return manifest

    @property
    def analyses(self) -> Analyses:
        """All analyses of the run."""
        return {name: analysis_of(name, settings) for name, settings in self.manifest["analyses"].items()}

    @property
    def of_texts(self) -> Analyses:
        """What was asked of texts; the answers of the weights are the first job's."""
        return asked_of_texts(self.analyses, given=True)

    def results(self, draft: Path) -> dict[str, Result]:
        """The answers to the whole corpus; lines.csv and what the jobs wrote of every text go into the draft."""
        log = self._lines(draft)
        observed = self._observed(draft)
        self._copy(draft)
        identity = self.manifest["corpus"]
        read = self.runs[1]["input"]
        self.source = provenance.corpus_source(identity, Layout(read["format"], read["columns"]), log)
        self.remarks.append(screen.summary(self.source))
        parts = [run["part"] for run in self.runs.values()]
        special, advice = sum(part["special_tokens"] for part in parts), [part["advice"] for part in parts]
        self.remarks += screen.unknown_warning(log.unknown, log.tokens - special, next(filter(None, advice), ""))
        return answers(self.of_texts, observed)

    def describe(
        self, results: Mapping[str, Result], written: report.Written, formats: Mapping[str, str]
    ) -> dict[str, Any]:
        """What run.json says: the same as after a run of one job."""
        first = self.runs[1]
        described = provenance.describe_analyses(self.analyses, *self._answers(results, written))
        origin = {name: first[name] for name in ("model", "arithmetic", "versions")}
        options = first["input_options"]
        return provenance.run_content(
            self.command, described, self.source, options, origin, formats, self.remarks, written.files
        )

    def _answers(
        self, results: Mapping[str, Result], written: report.Written
    ) -> tuple[dict[str, dict[str, Any]], dict[str, list[str]]]:
        """What all answers hold, by analysis, and the notes about their figures: the first job's, and behind them ours.

        The first job answered what is asked of weights.
        """
        first = self.runs[1]["part"]
        answers, notes = dict(first["answers"]), dict(first["figure_notes"])
        for name, answer in provenance.contents(results).items():
            answers[name] = provenance.joined(answers[name], answer) if name in answers else answer
            notes[name] = list(dict.fromkeys([*notes.get(name, []), *written.notes[name]]))
        return answers, notes

    def _observed(self, draft: Path) -> Observed:
        modules = [type(analysis).__module__ for analysis in self.of_texts.values()]
        whole = Checkpoint(draft / STATES, modules)
        for folder in self.parts.values():
            whole.adopt(Checkpoint(folder / STATES, modules))
        shards = next(iter(self.runs.values()))["part"]["shards"]
        missing = sorted(set(range(shards)) - set(whole.shards))
        if missing:
            job = missing[0] % len(self.parts) + 1
            raise BertgeoError(f"{self.parts[job]} lacks shard {missing[0]}", f"Run job {job} again.")
        observed = whole.merged() or Observed({})
        whole.remove()
        return observed

    def _lines(self, draft: Path) -> LinesLog:
        labels = [name for name in ("id", "group") if name in self._columns()]
        log = LinesLog(draft, labels)
        with ExitStack() as stack:
            streams = [
                stack.enter_context((folder / LINES).open(encoding="utf-8", newline=""))
                for folder in self.parts.values()
            ]
            rows = heapq.merge(*map(_rows, streams), key=lambda row: (int(row["line"]), int(row["part"])))
            for row in rows:
                log.add_row(row)
        log.close()
        self.files.append(LINES)
        return log

    def _columns(self) -> list[str]:
        with (self.parts[1] / LINES).open(encoding="utf-8", newline="") as stream:
            return next(csv.reader(stream))

    def _copy(self, draft: Path) -> None:
        """What jobs wrote that needs no merging: tables of every text, and the answers that need no texts."""
        ours = {LINES, MARKER}
        for job, folder in self.parts.items():
            for name in self.runs[job]["part"]["sha256"]:
                if name in ours or name.startswith(f"{STATES}/"):
                    continue
                (draft / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(folder / name, draft / name)
                self.files.append(name)


def _rows(stream: Any) -> Iterator[dict[str, str]]:
    return iter(csv.DictReader(stream))


def _run(folder: Path) -> dict[str, Any]:
    try:
        run: dict[str, Any] = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        for name in ("job", "shards", "special_tokens", "advice", "answers", "figure_notes", "sha256"):
            run["part"][name]
        for name in ("jobs", "analyses", "corpus", "command"):
            run["part"]["manifest"][name]
    except (OSError, ValueError, KeyError, TypeError):
        raise UsageError(f"{folder} is no report of a job", "Give folders that runs with --shard i/n wrote.") from None
    return run


def _refuse_damaged(folder: Path, job: int, files: Mapping[str, str]) -> None:
    """Raise BertgeoError unless every file of a part is there, as it was written, and inside of it."""
    for name, digest in files.items():
        inside = (folder / name).resolve().is_relative_to(folder.resolve())
        if not inside or not (folder / name).is_file() or report.file_hash(folder / name) != digest:
            raise BertgeoError(f"{folder} lacks {name}, or it was changed", f"Run job {job} again.")


def _refuse_strangers(parts: Mapping[int, Path], runs: Mapping[int, Mapping[str, Any]]) -> None:
    manifests = {job: run["part"]["manifest"] for job, run in runs.items()}
    first = next(iter(manifests))
    for job, manifest in manifests.items():
        different = [key for key, value in manifest.items() if value != manifests[first][key]]
        if different:
            told = f"{parts[job]} and {parts[first]} differ in {', '.join(different)}"
            raise UsageError(told, "Give the parts of one run.")
    missing = sorted(set(range(1, manifests[first]["jobs"] + 1)) - set(parts))
    if missing:
        raise UsageError(f"job {missing[0]} of {manifests[first]['jobs']} is missing", "Give the reports of all jobs.")
