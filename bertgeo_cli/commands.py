"""What each command does, once its options are read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from analyses.kit.analysis import Analysis
from analyses.kit.record import TokenizedText
from analyses.kit.result import Result

from . import provenance, report, screen
from .corpus import Encoder, Line, Reading, is_empty, open_lines, prepare, read_lines, too_long
from .errors import BertgeoError, IncompleteError, UsageError
from .models import LoadedModel, load_model
from .options import InputOptions, ModelOptions, OutputOptions, PlainOptions, RecordOptions, RunOptions
from .run import Pass, analyse_corpus, analyse_text, analyse_weights, needs_of, plan, use_threads
from .samples import SAMPLE_CORPUS

UNKNOWN_LIMIT = 0.2


def open_model(chosen: ModelOptions) -> LoadedModel:
    """Load the model and name it on stderr, with the way to another."""
    loaded = load_model(
        chosen.model,
        revision=chosen.revision,
        dtype=chosen.dtype,
        device=chosen.device,
        offline=chosen.offline,
        builtin_class=chosen.builtin_class,
    )
    use_threads(chosen.threads)
    screen.say_model(loaded)
    return loaded


def analyse(
    name: str,
    analysis: Analysis[Any],
    texts: InputOptions,
    model: ModelOptions,
    output: OutputOptions,
    run: RunOptions,
) -> None:
    """Run one analysis over a text, a corpus or the weights, write its report and print its headline."""
    _refuse_conflicts(texts)
    folder = output.output or Path("bertgeo-report") / name
    report.check_replaceable(folder, force=output.force)
    loaded = open_model(model)
    job = Job(name, analysis, loaded, texts, Pass(run.batch_tokens, model.attention_backend))
    if run.dry_run:
        screen.show_plan(job.plan(), as_json=output.json)
        return
    with report.draft(folder, force=output.force) as draft:
        result = job.result(draft)
        files, notes = report.write_result(result, draft, output.format, output.figures)
        content = provenance.describe(job, result, [*result.notes, *notes], model, output, run)
        report.write_run(content, draft)
    screen.show(
        result, [*job.remarks, *result.notes, *notes], [folder / file for file in job.files + files], content, output
    )
    if texts.strict and job.incomplete:
        raise IncompleteError(
            f"{job.incomplete} lines were truncated, skipped or not decodable", "lines.csv in the report lists them."
        )


def _refuse_conflicts(texts: InputOptions) -> None:
    if texts.text is not None and texts.corpus is not None:
        raise UsageError("both a text and --corpus were given", "Give one of them.")
    if texts.pair is not None and texts.text is None:
        raise UsageError("--pair was given without a text", "Give the first text before it.")
    if texts.text is not None and is_empty(texts.text):
        raise UsageError(f"the text {texts.text!r} is empty", "Give a text with something to read in it.")


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
    incomplete: int = 0

    def result(self, draft: Path) -> Result:
        """The answer; a corpus also leaves lines.csv in the draft."""
        if not needs_of([self.analysis]):
            self.source = {"kind": "weights"}
            return analyse_weights([self.analysis], self.loaded)[0]
        if self.texts.text is not None:
            text = self.single()
            self.source = provenance.text_source(text)
            self._warn_unknown(sum(text.unknown), len(text) - sum(text.special))
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
        text = encoder.encode(self.texts.text or "", self.texts.pair)
        if len(text) <= encoder.max_tokens:
            return text
        if self.texts.long != "truncate":
            raise too_long("the text", len(text), encoder.max_tokens)
        self.incomplete = 1
        self.remarks.append(f"The text has {len(text)} tokens and was truncated to {encoder.max_tokens}.")
        return encoder.truncate(text)

    def _corpus(self, draft: Path) -> Result:
        log = report.LinesLog(draft)
        try:
            with screen.progress(self._expected_lines()) as advance:
                texts = self._logged(log, advance)
                result = analyse_corpus([self.analysis], self.loaded, texts, self.how)[0]
        finally:
            log.close()
        self.files.append("lines.csv")
        self.incomplete = log.incomplete
        self.source = provenance.corpus_source(self.path, log, self.texts.encoding)
        self.remarks.append(screen.summary(self.source))
        self._warn_unknown(log.unknown, log.tokens)
        return result

    def _logged(self, log: report.LinesLog, advance: Any) -> Iterator[TokenizedText]:
        for line, text in self._prepared():
            log.add(line)
            advance(line.number)
            if text is not None:
                yield text

    def _prepared(self) -> Iterator[tuple[Line, TokenizedText | None]]:
        encoder, reading = self._encoder(), self._reading()
        with open_lines(self.path, reading.encoding) as stream:
            for line in read_lines(stream, reading, self.path_name):
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
        if self.texts.corpus is None:
            return "the sample corpus"
        return "standard input" if self.texts.corpus == "-" else Path(self.texts.corpus).name

    def _reading(self) -> Reading:
        long = self.texts.long or "truncate"
        return Reading(self.texts.encoding, long, self.texts.on_error, self.texts.limit)

    def _encoder(self) -> Encoder:
        special = self.texts.special_tokens_in_text
        return Encoder(self.loaded.tokenizer, self.loaded.max_tokens, special_tokens_in_text=special)

    def _expected_lines(self) -> int | None:
        if self.path == "-":
            return None
        lines = provenance.count_lines(Path(self.path))
        return min(lines, self.texts.limit or lines)

    def _warn_unknown(self, unknown: int, tokens: int) -> None:
        if tokens and unknown / tokens > UNKNOWN_LIMIT:
            self.remarks.append(
                f"Warning: {unknown / tokens:.0%} of the tokens are unknown to this model's vocabulary."
            )


def info(model: ModelOptions, plain: PlainOptions) -> None:
    """Print the model's architecture, shapes, parameters and hashes."""
    from .check import describe_model

    screen.show_mapping("Model", describe_model(open_model(model)), as_json=plain.json)


def check(model: ModelOptions, plain: PlainOptions) -> None:
    """Prove what was loaded; exit 4 when a proof fails."""
    from .check import check_model

    proofs = check_model(open_model(model))
    screen.show_proofs(proofs, as_json=plain.json)
    failed = [proof.name for proof in proofs if not proof.holds]
    if failed:
        raise CheckFailedError(
            f"failed: {', '.join(failed)}", "Do not use numbers from this model; see the table above."
        )


class CheckFailedError(BertgeoError):
    """A proof of `bertgeo check` does not hold."""

    exit_code = 4


def record(chosen: RecordOptions, model: ModelOptions, plain: PlainOptions) -> None:
    """Write every recorded tensor of one text to a safetensors file."""
    from .archive import save_record

    if is_empty(chosen.text):
        raise UsageError(f"the text {chosen.text!r} is empty", "Give a text with something to read in it.")
    if chosen.output.exists() and not chosen.force:
        raise UsageError(f"{chosen.output} exists", "Choose another file, or replace it by --force.")
    loaded = open_model(model)
    encoder = Encoder(loaded.tokenizer, loaded.max_tokens, special_tokens_in_text=chosen.special_tokens_in_text)
    text = encoder.encode(chosen.text, chosen.pair)
    if len(text) > loaded.max_tokens:
        raise too_long("the text", len(text), loaded.max_tokens)
    written = save_record(loaded, text, chosen.output, backend=model.attention_backend)
    if plain.json:
        print(json.dumps({"file": str(chosen.output), "tensors": written}, indent=2))
    else:
        print(chosen.output)
