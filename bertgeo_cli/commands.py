"""What each command does, once its options are read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analyses.kit.analysis import Analysis, SettingsError
from analyses.kit.change import Change
from analyses.kit.result import Table

from . import formats, report, screen
from .asking import Asking
from .choice import Analyses, asked_of_texts, chosen_analyses
from .corpus import Encoder, refuse_unreadable, too_long
from .errors import BertgeoError, IncompleteError, UsageError
from .job import Job
from .models import LoadedModel, load_chosen
from .observation import Pass
from .options import (
    ChoiceOptions,
    ComparedModels,
    CompareOptions,
    CorpusInput,
    CorpusOptions,
    CorpusRunOptions,
    DebugOption,
    InputOptions,
    MergeOptions,
    ModelOptions,
    OutputOptions,
    PlainOptions,
    RecordOptions,
    ReproduceOptions,
    RunOptions,
)
from .run import use_threads
from .source import Source
from .study import Study

if TYPE_CHECKING:
    from .compare import Comparison


def open_model(chosen: ModelOptions) -> LoadedModel:
    """Load the model and name it on stderr, with the way to another."""
    return _opened(load_chosen(chosen), chosen.threads)


def _opened(loaded: LoadedModel, threads: int | None) -> LoadedModel:
    use_threads(threads)
    screen.say_model(loaded)
    return loaded


def analyse(
    name: str,
    texts: InputOptions,
    model: ModelOptions,
    analysis: Analysis[Any],
    output: OutputOptions,
    runs: CorpusRunOptions,
    run: RunOptions,
) -> None:
    """Run one analysis over a text, a corpus or the weights, write its report and print its headline."""
    listing = _listing(analysis)
    if listing is not None:
        screen.show_listing(listing, as_json=output.json)
        return
    _refuse_conflicts(texts)
    _refuse_unread({name: analysis}, texts, runs)
    _report(name, {name: analysis}, texts, model, output, runs, run)


def run(
    texts: CorpusInput,
    choice: ChoiceOptions,
    model: ModelOptions,
    output: OutputOptions,
    runs: CorpusRunOptions,
    how: RunOptions,
) -> None:
    """Run several analyses over a corpus in one pass, write one report and print every headline."""
    analyses = chosen_analyses(choice)
    _refuse_unread(analyses, texts, runs)
    _report("run", analyses, texts, model, output, runs, how)


def _report(
    command: str,
    analyses: Analyses,
    texts: InputOptions | CorpusInput,
    model: ModelOptions,
    output: OutputOptions,
    runs: CorpusRunOptions,
    run: RunOptions,
) -> None:
    if asked_of_texts(analyses, given=texts.given):
        formats.check(texts)
    name = f"{command}-{runs.shard.replace('/', '-of-')}" if runs.shard else command
    folder = output.output or Path("bertgeo-report") / name
    report.check_replaceable(folder, force=output.force)
    if runs.per_text:
        report.require_pyarrow("--per-text")
    loaded = open_model(model)
    how = Pass(run.batch_tokens, model.attention_backend)
    job = Job(command, analyses, Source(texts, loaded), model, how, runs)
    job.check()  # refuses settings that this model cannot satisfy, before any work
    if run.dry_run:
        screen.show_plan(job.plan(figures=output.figures != "none"), as_json=output.json)
        return
    with job.kept(folder, force=output.force) as kept:
        with report.draft(folder, force=output.force) as draft:
            results = job.results(draft, kept)
            written = report.write_results(results, draft, output.format, output.figures, nested=command == "run")
            written.files[:0] = job.files
            content = job.describe(results, written, _formats(output))
            if runs.shard:
                content["part"]["sha256"] = report.hashes(draft, written.files)
            report.write_run(content, draft)
        if kept is not None:
            kept.remove()
    screen.show(results, job.remarks, written, folder, content, as_json=output.json)
    _refuse_incomplete(texts, job.incomplete)


def _refuse_incomplete(texts: InputOptions | CorpusInput, incomplete: int) -> None:
    if not (texts.strict and incomplete):
        return
    if texts.text is not None:
        raise IncompleteError("the text was truncated", "Shorten it, or leave --strict out.")
    raise IncompleteError(
        f"{incomplete} lines were truncated, skipped, failed or not decodable", "lines.csv in the report lists them."
    )


def compare(
    models: ComparedModels,
    what: CompareOptions,
    texts: InputOptions,
    change: Change,
    output: OutputOptions,
    run: RunOptions,
) -> None:
    """Compare two checkpoints of one architecture, write the report and print the change by layer."""
    from .compare import COMMAND, Comparison, open_models

    _refuse_conflicts(texts)
    _refuse_not_compared(what, texts)
    formats.check(texts)
    folder = output.output or Path("bertgeo-report") / COMMAND
    report.check_replaceable(folder, force=output.force)
    comparison = Comparison(*open_models(models), change, what, texts, Pass(run.batch_tokens, models.attention_backend))
    comparison.start()  # refuses settings that these models cannot satisfy, before any work
    if run.dry_run:
        screen.show_plan(comparison.plan(figures=output.figures != "none"), as_json=output.json)
        return
    _report_on(COMMAND, comparison, texts, folder, output)


def _report_on(name: str, asked: Comparison | Asking, texts: InputOptions, folder: Path, output: OutputOptions) -> None:
    """Have the question answered, write its report and print its headline."""
    with report.draft(folder, force=output.force) as draft, _settings_refused():
        result = asked.answer(draft)
        written = report.write_results({name: result}, draft, output.format, output.figures, nested=False)
        written.files[:0] = asked.files
        content = asked.describe(result, written, _formats(output))
        report.write_run(content, draft)
    screen.show({name: result}, asked.remarks, written, folder, content, as_json=output.json)
    _refuse_incomplete(texts, asked.incomplete)


def _refuse_not_compared(what: CompareOptions, texts: InputOptions) -> None:
    if what.weights_only and texts.typed:
        given = "a text" if texts.text is not None else "--" + min(texts.typed).replace("_", "-")
        raise UsageError(f"{given} was given, and --weights-only", "Leave one of them out.")
    _refuse_groups("compare", texts)


def _refuse_groups(name: str, texts: CorpusOptions) -> None:
    if texts.group_column is not None:
        raise UsageError(f"{name} makes no tables by group", "Leave --group-column out.")


def study(name: str, reads: Any, model: ModelOptions, chosen: Study, output: OutputOptions, run: RunOptions) -> None:
    """Ask one study of a text, a corpus, or of nothing but its settings; write its report and print its headline."""
    texts: InputOptions = reads.as_input
    folder = output.output or Path("bertgeo-report") / name
    asking = _asking(name, reads, texts, model, chosen, run, folder, output)
    if run.dry_run:
        screen.show_plan(asking.plan(), as_json=output.json)
        return
    _report_on(name, asking, texts, folder, output)


def _asking(
    name: str,
    reads: Any,
    texts: InputOptions,
    model: ModelOptions,
    chosen: Study,
    run: RunOptions,
    folder: Path,
    output: OutputOptions,
) -> Asking:
    """The study with what it reads. Raises UsageError for what cannot be asked, before any work."""
    how = Pass(run.batch_tokens, model.attention_backend)
    with _settings_refused():
        if chosen.without_model() is not None:
            if reads.typed:
                what = "a text" if reads.given else "--" + min(reads.typed).replace("_", "-")
                raise UsageError(f"{what} was given, but these settings read no text", "Leave one of them out.")
            report.check_replaceable(folder, force=output.force)
            return Asking(name, chosen, None, how)
    _refuse_conflicts(texts)
    if not chosen.groups:
        _refuse_groups(name, texts)
    formats.check(texts)
    report.check_replaceable(folder, force=output.force)
    loaded = _opened(chosen.load(model), model.threads)
    with _settings_refused():
        chosen.check(loaded)
        texts = chosen.reading(texts, loaded)
    return Asking(name, chosen, Source(texts, loaded), how, given=reads.given)


@contextmanager
def _settings_refused() -> Iterator[None]:
    """A wrong setting is wrong usage."""
    try:
        yield
    except SettingsError as error:
        raise UsageError(str(error), error.hint) from None


def reproduce(chosen: ReproduceOptions, output: OutputOptions, run: RunOptions) -> None:
    """Measure published values again; exit 4 when one differs."""
    from .reproduce import COMMAND, DiffersError, Reproduction
    from .verdicts import result_of

    folder = output.output or Path("bertgeo-report") / COMMAND
    report.check_replaceable(folder, force=output.force)
    reproduction = Reproduction(chosen, Pass(run.batch_tokens))
    reproduction.check()
    result = result_of(reproduction.measured(dry=run.dry_run))
    if run.dry_run:
        screen.show_listing(result.headline, as_json=output.json)
        return
    with report.draft(folder, force=output.force) as draft:
        written = report.write_results({COMMAND: result}, draft, output.format, output.figures, nested=False)
        content = reproduction.describe(result, written, _formats(output))
        report.write_run(content, draft)
    screen.show({COMMAND: result}, (), written, folder, content, as_json=output.json)
    differing = result.tables[0].frame.query("verdict == 'differs'")["entry"].unique()
    if len(differing):
        raise DiffersError(f"not as published: {', '.join(differing)}", "reproduce.csv in the report has both values.")


def merge(chosen: MergeOptions, output: OutputOptions, plain: DebugOption) -> None:
    """Join the reports of all jobs of an array into the report of the whole corpus."""
    from .merging import Merge

    folder = output.output or Path("bertgeo-report") / "merge"
    report.check_replaceable(folder, force=output.force)
    if folder.resolve() in [part.resolve() for part in chosen.parts]:
        raise UsageError(f"--output {folder} is one of the parts", "Choose another folder.")
    merging = Merge.of(chosen.parts)
    with report.draft(folder, force=output.force) as draft:
        results = merging.results(draft)
        nested = merging.command == "run"
        written = report.write_results(results, draft, output.format, output.figures, nested=nested)
        written.files[:0] = merging.files
        content = merging.describe(results, written, _formats(output))
        report.write_run(content, draft)
    screen.show(results, merging.remarks, written, folder, content, as_json=output.json)


def _formats(output: OutputOptions) -> dict[str, str]:
    return {"tables": output.format, "figures": output.figures}


def _listing(analysis: Analysis[Any]) -> Table | None:
    with _settings_refused():
        return analysis.listing()


def _refuse_unread(analyses: Analyses, texts: InputOptions | CorpusInput, runs: CorpusRunOptions) -> None:
    reads = bool(asked_of_texts(analyses, given=texts.given))
    if not reads and texts.typed:
        what = "a text" if texts.text is not None else "--" + min(texts.typed).replace("_", "-")
        hint = "Give a text or --corpus with it, or leave it out." if _may_read(analyses) else "Leave it out."
        raise UsageError(f"{what} was given, but this reads the model's weights alone", hint)
    if reads and texts.text is None:
        return
    given = [name for name in vars(runs) if getattr(runs, name) != getattr(CorpusRunOptions, name)]
    if given:
        raise UsageError(f"--{given[0].replace('_', '-')} is for a corpus", "Leave it out, or give --corpus.")


def _may_read(analyses: Analyses) -> bool:
    return bool(asked_of_texts(analyses, given=True))


def _refuse_conflicts(texts: InputOptions) -> None:
    if texts.text is not None and texts.corpus is not None:
        raise UsageError("both a text and --corpus were given", "Give one of them.")
    if texts.pair is not None and texts.text is None:
        raise UsageError("--pair was given without a text", "Give the first text before it.")
    if texts.several and texts.corpus is not None:
        raise UsageError("both texts and --texts were given", "Give one of them.")
    for text in (texts.text, texts.pair, *(texts.several or ())):
        if text is not None:
            refuse_unreadable(text)


def info(model: ModelOptions, plain: PlainOptions) -> None:
    """Print the model's architecture, shapes, parameters and hashes."""
    from .check import describe_model

    screen.show_mapping("Model", describe_model(open_model(model)), as_json=plain.json)


def check(model: ModelOptions, plain: PlainOptions) -> None:
    """Prove what was loaded; exit 4 when a proof fails."""
    from .check import check_model

    if model.dtype != "float32":
        raise UsageError(f"check proves float32, not {model.dtype}", "Leave --dtype out.")
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

    for given in (chosen.text, chosen.pair):
        if given is not None:
            refuse_unreadable(given)
    if chosen.output.exists() and not chosen.force:
        raise UsageError(f"{chosen.output} exists", "Choose another file, or replace it by --force.")
    loaded = open_model(model)
    encoder = Encoder(loaded.tokenizer, loaded.max_tokens, special_tokens_in_text=chosen.special_tokens_in_text)
    text = encoder.encode(chosen.text, chosen.pair)
    if len(text) > loaded.max_tokens:
        raise too_long("the text", len(text), loaded.max_tokens, "Shorten it.")
    written = save_record(loaded, text, chosen.output, backend=model.attention_backend)
    if plain.json:
        screen.print_json({"file": str(chosen.output), "tensors": written})
    else:
        print(chosen.output)
