"""Two checkpoints over one input: what may be compared, how both read it, and what run.json says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

from threadpoolctl import ThreadpoolController

from analyses.kit.analysis import SettingsError
from analyses.kit.change import Change, ChangeState
from analyses.kit.record import TokenizedText
from analyses.kit.result import Result

from . import estimate, provenance, report, screen
from .corpus import Encoder
from .errors import UsageError
from .intake import Intake
from .models import LoadedModel, load_chosen
from .observation import Pass, one_thread
from .options import SHARD_TEXTS, ComparedModels, CompareOptions, InputOptions
from .recording import record_batch
from .run import use_threads
from .source import Source

COMMAND = "compare"


def open_models(chosen: ComparedModels) -> tuple[LoadedModel, LoadedModel]:
    """Both models, named on stderr. Raises UsageError when they are not of one architecture."""
    first, second = load_chosen(chosen), load_chosen(chosen.second)
    use_threads(chosen.threads)
    screen.say(f"Model: A is {first.name}, B is {second.name} ({first.dtype})")
    here, there = architecture(first), architecture(second)
    differences = [f"{name} {here[name]} and {there[name]}" for name in here if here[name] != there[name]]
    if differences:
        raise UsageError(
            f"A and B are not of one architecture: {', '.join(differences)}",
            "Compare checkpoints whose heads and widths are the same, such as a model and its fine-tuned copy.",
        )
    return first, second


def architecture(loaded: LoadedModel) -> dict[str, Any]:
    """What two checkpoints must have in common for their heads and tokens to have counterparts."""
    shape = loaded.shape
    block = loaded.family.blocks(loaded.model)[0]
    return {
        "family": shape.family,
        "layers": shape.layers,
        "heads": shape.heads,
        "width": shape.width,
        "channels a head": shape.head_width,
        "layers with weights of their own": shape.weight_layers,
        "MLP width": attrgetter(loaded.family.mlp_input)(block).weight.shape[0],
        "segment ids": "read" if loaded.segments else "not read",
    }


@dataclass
class Comparison:
    """Two models of one architecture, what of them is compared, and over which texts."""

    first: LoadedModel
    second: LoadedModel
    change: Change
    what: CompareOptions
    texts: InputOptions
    how: Pass
    remarks: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    read: dict[str, Any] = field(default_factory=lambda: {"kind": "weights"})
    incomplete: int = 0
    _blas: ThreadpoolController = field(default_factory=ThreadpoolController)

    @cached_property
    def source(self) -> Source:
        """The texts as A's tokenizer reads them, of a length that both models take."""
        fitting = min(self.first.max_tokens, self.second.max_tokens)
        return Source(self.texts, replace(self.first, max_tokens=fitting))

    @cached_property
    def other_encoder(self) -> Encoder | None:
        """B's own tokenizer, where its files are not A's."""
        if self.first.identity["tokenizer_sha256"] == self.second.identity["tokenizer_sha256"]:
            return None
        special = self.texts.special_tokens_in_text
        return Encoder(self.second.tokenizer, self.source.loaded.max_tokens, special_tokens_in_text=special)

    def start(self) -> ChangeState:
        """The empty state. Raises UsageError for settings that the models cannot satisfy."""
        try:
            return self.change.start(self.first.shape)
        except SettingsError as error:
            raise UsageError(str(error), error.hint) from None

    def plan(self, *, figures: bool) -> dict[str, int]:
        """Texts, tokens, forward passes of each model and shards, and about how many bytes will be left on disk."""
        first, texts = estimate.first_and_all(() if self.what.weights_only else self.source.texts())
        counts = estimate.plan(texts, self.how, SHARD_TEXTS)
        state = self.start()
        if first is not None:
            self._observe(state, [first])
        result = self._finalize(state)
        size = estimate.LINE_BYTES * counts["texts"] + estimate.FIGURE_BYTES * len(result.figures) * figures
        size += sum(len(table.frame.to_csv(index=False)) for table in result.tables)
        return counts | {"bytes on disk, about": size}

    def answer(self, draft: Path) -> Result:
        """The answer; a corpus also leaves lines.csv in the draft."""
        state = self.start()
        if not self.what.weights_only:
            texts = Intake(self.source, self.how, draft)
            for batch in texts.batches():
                self._observe(state, batch)
            self.files, self.remarks, self.read, self.incomplete = (
                texts.files,
                texts.remarks,
                texts.read,
                texts.incomplete,
            )
            self._tell_tokenizers(state.counts.texts)
        return self._finalize(state)

    def describe(self, result: Result, written: report.Written, formats: Mapping[str, str]) -> dict[str, Any]:
        """What run.json says."""
        origin = provenance.model_and_arithmetic(self.first, self.how)
        return provenance.run_content(
            COMMAND,
            provenance.describe_analyses({COMMAND: self.change}, provenance.contents({COMMAND: result}), written.notes),
            self.read,
            provenance.reading(self.texts),
            {"model": origin["model"], "other_model": dict(self.second.identity), **origin},
            formats,
            self.remarks,
            written.files,
        )

    def _finalize(self, state: ChangeState) -> Result:
        with one_thread():
            weights = self.first.head_weights(), self.second.head_weights()
            return self.change.finalize(self.first.shape, *weights, state)

    def _observe(self, state: ChangeState, batch: list[TokenizedText]) -> None:
        self._refuse_other_ids(batch)
        passes = [
            record_batch(loaded, batch, needs=self.change.needs, backend=self.how.backend)
            for loaded in (self.first, self.second)
        ]
        with one_thread(self._blas):
            for first, second in zip(*passes, strict=True):
                self.change.update(state, first, second)

    def _refuse_other_ids(self, batch: list[TokenizedText]) -> None:
        if self.other_encoder is None:
            return
        for text in batch:
            own, other = (encoder.encode(text.text, text.pair) for encoder in (self.source.encoder, self.other_encoder))
            if own.ids != other.ids or own.segment != other.segment:
                raise UsageError(
                    f"line {text.line}: B's tokenizer gives other ids than A's ({_first_difference(own, other)})",
                    "Compare checkpoints of one vocabulary, or their weights alone by --weights-only.",
                )

    def _tell_tokenizers(self, texts: int) -> None:
        if self.other_encoder is not None:
            self.remarks.append(f"The tokenizers' files differ; both gave the same ids for all {texts} texts.")


def _first_difference(own: TokenizedText, other: TokenizedText) -> str:
    pairs = zip(own.tokens, own.ids, other.tokens, other.ids, strict=False)
    different = ((a, i, b, j) for a, i, b, j in pairs if i != j)
    token = next(different, None)
    if token is None:
        return f"{len(own)} tokens in A, {len(other)} in B"
    return f"{token[0]!r} is {token[1]} in A, {token[2]!r} is {token[3]} in B"
