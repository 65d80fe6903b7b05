"""One word in many contexts: where its vectors go, and what pulls them there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from analyses.kit.analysis import setting
from analyses.kit.context_figures import depth_figure, map_figure, pull_figure
from analyses.kit.context_tables import (
    depth_table,
    headline,
    kind_table,
    map_table,
    mean_table,
    notes_of,
    occurrence_table,
    token_table,
    vector_table,
)
from analyses.kit.contexts import Contexts
from analyses.kit.mixing import LayerWeights, layer_weights
from analyses.kit.occurrences import Occurrence, Occurrences, Word
from analyses.kit.pull import pulls, word_contributions
from analyses.kit.record import ForwardRecord, TokenizedText
from analyses.kit.result import Result
from analyses.kit.senses import Directions
from bertgeo_cli.corpus import refuse_unreadable
from bertgeo_cli.errors import BertgeoError, UsageError
from bertgeo_cli.intake import Intake
from bertgeo_cli.models import LoadedModel
from bertgeo_cli.observation import one_thread
from bertgeo_cli.options import SUBJECT, InputOptions, TextsInput, option
from bertgeo_cli.recording import records
from bertgeo_cli.samples import SAMPLE_BANKS, sample_senses
from bertgeo_cli.source import Source
from bertgeo_cli.study import Study

Floats = NDArray[np.float64]
NEEDS = frozenset({"hidden_states", "attention", "v"})


@dataclass(frozen=True)
class Context(Study):
    """One word in many contexts: its vectors by depth, how they fall apart by sense, which tokens pulled them.

    An occurrence's vector is the mean over the word's pieces; upper and lower case are one where the tokenizer makes
    them so. By depth: self-similarity, the mean cosine between occurrences in different texts, and the baseline, that
    of all ordinary tokens of the same texts (Ethayarajh 2019). Where senses are known (--group-column; the samples
    have them, for bank twenty sentences of their own): silhouette (Rousseeuw 1987) by cosine distance, the share of
    occurrences whose nearest neighbour in another text has their sense, and how rarely senses dealt at random separate
    as well. By layer: what each token j adds to the word's attention output, |sum_h A_ij f_h(x_j)| (Kobayashi et al.
    2020), and its share of that output along the output's own direction (this project's own definition). Maps are
    principal components. Without senses, 2-means clusters colour the maps: they are found from the same vectors, so
    they prove nothing.

    Example: bertgeo context bank --texts reviews.tsv --column text --group-column sense
    """

    reads: ClassVar[type[Any]] = TextsInput
    groups: ClassVar[bool] = True

    word: str = option("bank", "The word.", panel=SUBJECT)
    top: int = setting(5, "Tokens to list for each occurrence and layer, by the norm of what they add.", least=1)
    most: int = setting(500, "Occurrences that are kept, those of smallest hash.", least=2)
    permutations: int = setting(999, "Times that senses are dealt to the texts at random.", least=0)
    vectors: bool = setting(False, "Also write the vectors themselves, a row for each occurrence and depth.")
    seed: int = setting(0, "Seed of the hash, of the permutations and of 2-means.", least=0)

    def reading(self, texts: InputOptions, loaded: LoadedModel) -> InputOptions:
        if texts.given or self.word.casefold() != "bank":
            return texts
        return replace(texts, corpus=str(SAMPLE_BANKS), column="text", group_column="sense")

    def answer(self, loaded: LoadedModel, texts: Intake) -> Result:
        with one_thread():
            seen = self._seen(loaded, texts)
            by_depth = depth_table(seen)
            tables = [by_depth, occurrence_table(seen), map_table(seen), token_table(seen, self.top)]
            tables += [mean_table(seen, self.top), kind_table(seen)]
            if self.vectors:
                tables.append(vector_table(seen))
            figures = depth_figure(seen), map_figure(seen), pull_figure(seen)
            return Result(headline(by_depth), tuple(tables), figures, notes_of(seen))

    def _seen(self, loaded: LoadedModel, texts: Intake) -> Contexts:
        """The word's occurrences. Raises BertgeoError where there are none."""
        word, found = self._word(texts.source), Occurrences(self.most, self.seed)
        weights = layer_weights(loaded.head_weights(), loaded.shape, range(loaded.shape.layers))
        baseline = Directions.empty(loaded.shape.layers + 1, loaded.shape.width)
        senses = {} if texts.source.options.given else sample_senses(self.word)
        holding = _holding(word, texts, found)
        for record in records(loaded, holding, needs=NEEDS, backend=texts.how.backend):
            for at, text in enumerate(record.texts):
                vectors = record.of_text("hidden_states", at)
                baseline.add(vectors[:, ~np.array(text.special, dtype=bool)])
                sense = text.group or senses.get(text.line, "")
                found.add([_occurrence(record, at, place, sense, vectors, weights) for place in word.places(text)])
        if not found.seen:
            what = f"the word {self.word!r} occurs in none of the {found.read} texts that were read"
            raise BertgeoError(what, "Give --texts with the word in them, or another word.")
        return Contexts(self.word, found, baseline, self.permutations)

    def _word(self, source: Source) -> Word:
        refuse_unreadable(self.word, "word")
        try:
            return Word.of(source.encoder.encode(self.word), source.encoder.normalised)
        except ValueError:
            what = f"{self.word!r} is no word but special tokens alone"
            raise UsageError(what, "Give a word that stands in the texts.") from None


def _holding(word: Word, texts: Intake, found: Occurrences) -> Iterator[list[TokenizedText]]:
    """The texts that hold the word, batch by batch; the others are read, but not by the model."""
    for batch in texts.batches():
        found.read += len(batch)
        holding = [text for text in batch if word.places(text)]
        if holding:
            yield holding


def _occurrence(
    record: ForwardRecord,
    at: int,
    place: tuple[int, ...],
    sense: str,
    vectors: Floats,
    weights: dict[int, LayerWeights],
) -> Occurrence:
    pulled = [
        pulls(word_contributions(record, at, place, layer, own), own.bias) for layer, own in sorted(weights.items())
    ]
    norms, shares, rest = (np.stack(part) for part in zip(*pulled, strict=True))
    return Occurrence(record.texts[at], place, sense, vectors[:, list(place)].mean(axis=1), norms, shares, rest)
