"""Options of the command line as dataclasses: each field is an option, its metadata the help."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from . import registry
from .samples import first_sample


def option(default: Any, help: str, *names: str, panel: str = "", metavar: str | None = None, **extra: Any) -> Any:  # noqa: A002
    """A field that is an option; `names` replace the one made from the field's name."""
    metadata = {"help": help, "names": names, "panel": panel, "metavar": metavar, "extra": extra}
    required = default is dataclasses.MISSING
    return dataclasses.field(metadata=metadata) if required else dataclasses.field(default=default, metadata=metadata)


def same(group: type, name: str) -> Any:
    """An option of another group, as a field here."""
    field = {field.name: field for field in dataclasses.fields(group)}[name]
    return dataclasses.field(default=field.default, metadata=field.metadata)


def _load_config(context: typer.Context, path: Path | None) -> Path | None:
    if path is None:
        return None
    import tomllib

    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise typer.BadParameter(f"{path}: {error}") from None
    values = {key: value for key, value in content.items() if not isinstance(value, dict)}
    tables = {key: value for key, value in content.items() if isinstance(value, dict)}
    strangers = sorted(set(tables) - set(registry.commands()))
    if strangers:
        raise typer.BadParameter(f"{path}: bertgeo has no command {', '.join(strangers)}")
    command = str(context.info_name)
    values = {key.replace("-", "_"): value for key, value in (values | tables.get(command, {})).items()}
    unknown = sorted(set(values) - {parameter.name for parameter in context.command.params})
    if unknown:
        raise typer.BadParameter(f"{path}: bertgeo {command} has no option {', '.join(unknown)}")
    context.default_map = {**(context.default_map or {}), **values}
    return path


FORMAT = "Corpus format"
SUBJECT = "subject"
"""The panel of an argument that says what is asked about: it comes before the texts."""
SHARD_TEXTS = 2048
"""Texts to a shard: with fewer, batches of equal length get too small to be fast; more take more memory."""
BATCH_TOKENS = 512
"""Tokens to a pass: with a core to a pass, larger ones gain nothing and hold more memory."""


@dataclass(frozen=True)
class CorpusOptions:
    """The corpus and what its file holds. `typed` names the options that the command line itself gave.

    `several` are texts typed one by one, which are read as the lines of a corpus.
    """

    corpus: str | None = option(
        None,
        "A file of texts, plain or .gz: a text a line, or .tsv, .csv, .jsonl, .fasta; - is standard input.",
        panel="Input",
        metavar="FILE",
    )
    encoding: str = option("utf-8", "Encoding of the corpus.", panel="Input")
    input_format: Literal["txt", "tsv", "csv", "jsonl", "fasta"] | None = option(
        None, "What the corpus holds. Default: what its name says; txt for standard input.", panel=FORMAT
    )
    column: str | None = option(
        None,
        "Column of a tsv or csv with a header row, or field of a jsonl, that holds the text. "
        "Default: the only one, or text or sentence.",
        "--column",
        "--field",
        panel=FORMAT,
        metavar="NAME",
    )
    pair_column: str | None = option(
        None,
        "Column or field of a second text, read together with the first; where it is blank, the first is read alone.",
        panel=FORMAT,
        metavar="NAME",
    )
    id_column: str | None = option(
        None, "Column or field of the texts' ids (in FASTA, a header's first word).", panel=FORMAT, metavar="NAME"
    )
    group_column: str | None = option(None, "Column or field of the texts' groups.", panel=FORMAT, metavar="NAME")
    literal_quotes: bool = option(
        False, "Quote marks in a tsv or csv are text; without this a quoted cell may hold line breaks.", panel=FORMAT
    )
    kmer: int | None = option(
        None,
        "Read texts as sequences, in capitals, cut into K-mers: with 6, ATTGGCA is read as ATTGGC TTGGCA. FASTA is "
        "read residue by residue (as with 1), which ProtBERT expects; for a tokenizer that cuts whole sequences "
        "itself, give them one a line in a txt.",
        panel=FORMAT,
        metavar="K",
        min=1,
    )
    stride: int | None = option(
        None,
        "Residues from one K-mer to the next. Default: 1; what remains after the last whole K-mer is left out.",
        panel=FORMAT,
        metavar="S",
        min=1,
    )
    limit: int | None = option(None, "Read at most this many lines (rows, records).", panel="Input", min=1)
    long: Literal["truncate", "split", "skip", "error"] | None = option(
        None,
        "Texts longer than the model reads. Default: error for a text, truncate and count for a corpus.",
        panel="Input",
    )
    on_error: Literal["stop", "skip"] = option(
        "stop", "Lines that do not decode, rows and records with a fault, texts that fail.", panel="Input"
    )
    strict: bool = option(False, "Exit with 3 when lines were skipped, truncated or failed.", panel="Input")
    special_tokens_in_text: bool = option(
        False, "Read [SEP], [MASK] and the like in the text as special tokens, not as text.", panel="Input"
    )
    several: Sequence[str] | None = None
    typed: frozenset[str] = frozenset()

    @property
    def given(self) -> bool:
        """Whether the user names texts, so that it is not the sample that would be read."""
        return self.corpus is not None or bool(self.several)


@dataclass(frozen=True)
class InputOptions(CorpusOptions):
    """What is read: a text, a pair, a corpus, or the sample corpus."""

    text: str | None = option(
        None,
        "The text to read; without a text or --corpus, the sample corpus (the weights alone where they suffice).",
        panel="argument",
    )
    pair: str | None = option(None, "A second text, read together with the first.", panel="Input")

    @property
    def given(self) -> bool:
        """Whether the user names a text or texts."""
        return self.text is not None or super().given

    @property
    def as_input(self) -> InputOptions:
        """Itself: what reads texts understands it."""
        return self


@dataclass(frozen=True)
class StudyInput(InputOptions):
    """What a study of a text or a corpus reads."""

    text: str | None = option(
        None, "The text to read; without a text or --corpus, the sample corpus.", panel="argument"
    )


@dataclass(frozen=True)
class TextInput:
    """What a study of a single text reads."""

    text: str | None = option(None, "The text to read; without it, the first sample sentence.", panel="argument")
    pair: str | None = same(InputOptions, "pair")
    long: Literal["truncate", "error"] = option(
        "error", "A text longer than the model reads: cut it, or say so.", panel="Input"
    )
    special_tokens_in_text: bool = same(CorpusOptions, "special_tokens_in_text")
    strict: bool = option(False, "Exit with 3 when the text was truncated.", panel="Input")
    typed: frozenset[str] = frozenset()

    @property
    def given(self) -> bool:
        """Whether the user names a text."""
        return self.text is not None

    @property
    def as_input(self) -> InputOptions:
        """The same, as whatever reads texts understands it."""
        text = first_sample() if self.text is None else self.text
        shared = {name: getattr(self, name) for name in ("pair", "long", "special_tokens_in_text", "strict", "typed")}
        return InputOptions(text=text, **shared)


@dataclass(frozen=True)
class CorpusInput(CorpusOptions):
    """What `bertgeo run` reads."""

    corpus: str | None = option(
        None, "A file of texts (- is standard input); without it, the sample corpus.", panel="argument"
    )

    @property
    def text(self) -> None:
        """There is no single text."""
        return None

    @property
    def pair(self) -> None:
        """Nor a second one to it."""
        return None


@dataclass(frozen=True)
class TextsInput(CorpusInput):
    """What a study of several texts reads: those typed, a corpus, or the sample."""

    corpus: str | None = option(
        None,
        "A file of texts, plain or .gz: a text a line, or .tsv, .csv, .jsonl, .fasta; - is standard input.",
        "--texts",
        "--corpus",
        panel="Input",
        metavar="FILE",
    )
    several: list[str] | None = option(
        None, "The texts to read; without any or --texts, the sample corpus.", panel="argument", metavar="TEXT"
    )

    @property
    def as_input(self) -> TextsInput:
        """Itself: what reads texts understands it."""
        return self


@dataclass(frozen=True)
class ModelOptions:
    """Which model, and where it computes."""

    model: str = option(
        "minilm",
        "minilm (all-MiniLM-L6-v2, embedded), a hub name such as bert-base-uncased, or a folder.",
        panel="Model",
    )
    revision: str | None = option(None, "Branch, tag or commit of a hub model.", panel="Model")
    offline: bool = option(False, "Make no network request: hub models come from the local cache.", panel="Model")
    builtin_class: bool = option(
        False, "Read a checkpoint that brings its own code with transformers' class instead.", panel="Model"
    )
    device: str = option("auto", "auto, cpu, cuda, cuda:n or mps.", panel="Model")
    dtype: Literal["float32", "bfloat16", "float16"] = option(
        "float32", "Arithmetic of the forward pass.", panel="Model"
    )
    attention_backend: Literal["eager", "sdpa"] = option(
        "eager", "Arithmetic of A V; recorded attention agrees to 1e-5.", panel="Model"
    )
    threads: int | None = option(
        None, "Cores: over a corpus as many passes at a time. Default: PyTorch's choice.", panel="Model", min=1
    )


@dataclass(frozen=True, kw_only=True)
class ComparedModels(ModelOptions):
    """Two checkpoints, and where they compute."""

    model: str = option(
        dataclasses.MISSING,
        "Checkpoint A, where the change starts: minilm, a hub name or a folder.",
        panel="argument",
        metavar="MODEL_A",
    )
    other: str = option(
        dataclasses.MISSING, "Checkpoint B, of the same architecture.", panel="argument", metavar="MODEL_B"
    )
    revision: str | None = option(None, "Branch, tag or commit of A on the hub.", "--revision-a", panel="Model")
    other_revision: str | None = option(None, "Branch, tag or commit of B on the hub.", "--revision-b", panel="Model")

    @property
    def second(self) -> ModelOptions:
        """What B is loaded by."""
        return dataclasses.replace(self, model=self.other, revision=self.other_revision)


@dataclass(frozen=True)
class CompareOptions:
    """How much of two checkpoints is compared."""

    weights_only: bool = option(False, "Compare weights alone: read no texts, run no model.", panel="Input")


@dataclass(frozen=True)
class ReproduceOptions:
    """Which published values are measured again, on which models and texts."""

    models: list[str] | None = option(
        None,
        "A model whose values to measure, or NAME=FOLDER for your copy of it; may be given again. Default: all.",
        "--model",
        panel="Model",
        metavar="NAME[=FOLDER]",
    )
    download: bool = option(False, "Download models that are not on this machine.", panel="Model")
    values: Path | None = option(
        None, "TOML file of published values instead of bertgeo's own.", panel="Values", metavar="FILE"
    )
    only: str = option("all", "Entries or sources by name, separated by commas.", panel="Values")
    corpus: str | None = option(
        None,
        "The texts that the chosen values were measured on; without them only values of weights are measured.",
        panel="Input",
        metavar="FILE",
    )
    encoding: str = same(CorpusOptions, "encoding")
    input_format: Literal["txt", "tsv", "csv", "jsonl", "fasta"] | None = same(CorpusOptions, "input_format")
    column: str | None = same(CorpusOptions, "column")
    pair_column: str | None = same(CorpusOptions, "pair_column")
    limit: int | None = same(CorpusOptions, "limit")
    device: str = same(ModelOptions, "device")
    threads: int | None = same(ModelOptions, "threads")
    typed: frozenset[str] = frozenset()


@dataclass(frozen=True)
class OutputOptions:
    """Where results go and what they look like."""

    output: Path | None = option(
        None, "Folder of the report. Default: bertgeo-report/COMMAND.", "--output", "-o", panel="Output", metavar="DIR"
    )
    force: bool = option(
        False,
        "Replace a folder that bertgeo did not write (its own reports are replaced anyway); drop an unfinished run.",
        panel="Output",
    )
    format: Literal["csv", "parquet", "jsonl"] = option("csv", "Format of tables.", panel="Output")
    figures: Literal["png", "svg", "pdf", "none"] = option("png", "Format of figures.", panel="Output")
    json: bool = option(
        False, "Print one JSON document instead of a table; the report is written all the same.", panel="Output"
    )


@dataclass(frozen=True)
class CorpusRunOptions:
    """How a corpus is run: by whom, from where on, and what is kept of every text."""

    resume: bool = option(False, "Go on with a run that was stopped or killed.", panel="Corpus run")
    workers: int | None = option(
        None,
        "Processes, which divide the threads among them; the bytes are the same. Default: on a CPU under Linux one for "
        "every thread, for a corpus that is worth it; else 1.",
        panel="Corpus run",
        min=1,
    )
    dask: str | None = option(
        None,
        "Run on a Dask cluster: its scheduler's address, or local for --workers processes here.",
        panel="Corpus run",
        metavar="ADDRESS|local",
    )
    shard: str | None = option(
        None,
        "Job i of an array of n: every n-th shard; bertgeo merge then joins the n reports.",
        panel="Corpus run",
        metavar="i/n",
    )
    shard_texts: int = option(
        SHARD_TEXTS,
        "Texts to a shard, which is what is kept and handed out. Fewer are slower; the last bits depend on it.",
        panel="Corpus run",
        min=1,
    )
    per_text: bool = option(
        False, "Also every value of every text, by layer and head: Parquet, a file a shard.", panel="Corpus run"
    )


@dataclass(frozen=True)
class ChoiceOptions:
    """Which analyses share a run, and their settings."""

    analyses: str = option("all", "Analyses, separated by commas; all is every one.", panel="Analyses")
    set: list[str] | None = option(
        None,
        "A setting, such as cone-index.layers=0-3; may be given again.",
        panel="Analyses",
        metavar="ANALYSIS.SETTING=VALUE",
    )
    plan: Path | None = option(
        None,
        'TOML file with a table for each analysis to run, such as [flow] and below it from = "all".',
        panel="Analyses",
        metavar="FILE",
    )


@dataclass(frozen=True)
class MergeOptions:
    """The reports that jobs of an array left."""

    parts: list[Path] = option(dataclasses.MISSING, "The reports of all jobs.", panel="argument")


@dataclass(frozen=True)
class RunOptions:
    """How the run goes."""

    batch_tokens: int = option(BATCH_TOKENS, "Most tokens to a forward pass.", panel="Run", min=1)
    dry_run: bool = option(
        False, "Count texts, tokens, batches and shards, estimate bytes on disk; write nothing.", panel="Run"
    )
    config: Path | None = option(
        None,
        "TOML file with options: keys at the top for every command, tables by command.",
        panel="Run",
        metavar="FILE",
        callback=_load_config,
        is_eager=True,
    )
    debug: bool = option(False, "Show the traceback of an error.", panel="Run")


@dataclass(frozen=True)
class RecordOptions:
    """What `bertgeo record` reads and writes."""

    text: str = option(dataclasses.MISSING, "The text to read.", panel="argument")
    output: Path = option(
        dataclasses.MISSING, "The safetensors file.", "--output", "-o", panel="Output", metavar="FILE"
    )
    pair: str | None = option(None, "A second text, read together with the first.", panel="Input")
    special_tokens_in_text: bool = option(
        False, "Read [SEP], [MASK] and the like in the text as special tokens, not as text.", panel="Input"
    )
    force: bool = option(False, "Replace an existing file.", panel="Output")


@dataclass(frozen=True)
class PlainOptions:
    """Options of commands without a report."""

    json: bool = option(False, "Print one JSON document.", panel="Output")
    debug: bool = option(False, "Show the traceback of an error.", panel="Run")


@dataclass(frozen=True)
class DebugOption:
    """The one option of commands that read nothing else."""

    debug: bool = option(False, "Show the traceback of an error.", panel="Run")


def groups_of(name: str, question: type | None) -> list[type]:
    """The dataclasses whose fields are a command's options, in the order of its help; `question` where it is one."""
    if name in registry.studies() and question is not None:
        return [getattr(question, "reads"), ModelOptions, question, OutputOptions, RunOptions]  # noqa: B009
    if question is not None:
        return [InputOptions, ModelOptions, question, OutputOptions, CorpusRunOptions, RunOptions]
    if name == "run":
        return [CorpusInput, ChoiceOptions, ModelOptions, OutputOptions, CorpusRunOptions, RunOptions]
    if name == "compare":
        from analyses.kit.change import Change

        return [ComparedModels, CompareOptions, InputOptions, Change, OutputOptions, RunOptions]
    if name == "reproduce":
        return [ReproduceOptions, OutputOptions, RunOptions]
    if name == "merge":
        return [MergeOptions, OutputOptions, DebugOption]
    return [*([RecordOptions] if name == "record" else []), ModelOptions, PlainOptions]


def command_function(groups: Sequence[type], act: Callable[..., None], name: str) -> Callable[..., None]:
    """A function whose signature is the fields of all groups; called, it gives `act` one object a group."""

    def call(context: typer.Context, **values: Any) -> None:
        typed = frozenset(name for name in values if _on_command_line(context, name))
        objects = []
        for group in groups:
            fields = set(_fields(group))
            chosen = {name: _typed(group, name, value) for name, value in values.items() if name in fields}
            objects.append(group(**chosen, **({"typed": typed & fields} if "typed" in fields else {})))
        act(*objects)

    context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    annotated = [both for group in groups for both in _annotated(group)]
    parameters = [context] + [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=_default(field), annotation=annotation)
        for field, annotation in sorted(annotated, key=lambda both: both[0].metadata.get("panel") != SUBJECT)
    ]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    call.__name__ = name
    return call


def with_implied_values(arguments: Sequence[str], implied: Mapping[str, str]) -> list[str]:
    """The command line with the value of every option in `implied` that stands without one, before `--`.

    >>> with_implied_values(["--metric", "-o", "folder"], {"metric": "list"})
    ['--metric', 'list', '-o', 'folder']
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    filled: list[str] = []
    for at, argument in enumerate(arguments):
        filled.append(argument)
        bare = at < end and (at + 1 == len(arguments) or arguments[at + 1].startswith("-"))
        if bare and argument.startswith("--") and argument[2:].replace("-", "_") in implied:
            filled.append(implied[argument[2:].replace("-", "_")])
    return filled


def _on_command_line(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _fields(group: type) -> list[str]:
    return [field.name for field in dataclasses.fields(group)]


def _is_selection(hint: Any) -> bool:
    return getattr(hint, "__name__", "") == "Selection"


def _typed(group: type, field: str, value: Any) -> Any:
    hint = typing.get_type_hints(group)[field]
    return hint(value) if _is_selection(hint) else value


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is dataclasses.MISSING:
        return inspect.Parameter.empty
    return getattr(field.default, "text", field.default) if _is_selection(type(field.default)) else field.default


def _annotated(group: type) -> list[tuple[dataclasses.Field[Any], Any]]:
    hints = typing.get_type_hints(group)
    fields = [field for field in dataclasses.fields(group) if "help" in field.metadata]
    return [(field, _annotation(field, hints[field.name])) for field in fields]


def _annotation(field: dataclasses.Field[Any], hint: Any) -> Any:
    about = field.metadata
    panel = about.get("panel") or "Analysis"
    if panel in ("argument", SUBJECT):
        return Annotated[
            hint,
            typer.Argument(help=about["help"], metavar=about.get("metavar") or field.name.upper(), show_default=False),
        ]
    flag = "--" + field.name.replace("_", "-")
    # What is on unless told otherwise needs a name for off.
    names = about.get("names") or ((f"{flag}/--no-{flag[2:]}" if field.default is True else flag),)
    info = typer.Option(
        *names,
        help=about["help"],
        rich_help_panel=panel,
        metavar=about.get("metavar"),
        envvar=f"BERTGEO_{field.name.upper()}",
        show_envvar=False,
        show_default=not any(field.default is value for value in (None, False, dataclasses.MISSING)),
        **about.get("extra", {}),
    )
    return Annotated[str if _is_selection(hint) else hint, info]
