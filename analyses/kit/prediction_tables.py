"""What a masked-LM head predicts, as tables and figures: of one text position by position, of a corpus text by text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from .accumulators import Counts, Moments, Sample, Tally, Totals
from .analysis import State
from .masking import WAYS, Probe
from .prediction import Leading, Scores
from .record import TokenizedText
from .result import ColouredText, Figure, Heatmap, Lines, Result, Series, Table
from .tables import sample_table, token_frame

Floats = NDArray[np.float64]
Tokens = Sequence[str | None]
BIN = 0.25
"""Width in nats of a bin of texts' mean cross-entropies."""
PANELS = 6
"""[MASK]s that are drawn."""

WHAT: Mapping[str, str] = {
    "each": "every token masked one at a time",
    "given": "the masked tokens that the text gives",
    "random": "a share of the tokens masked at random",
    "none": "nothing masked: each token sees itself, so this is no pseudo-likelihood",
}
assert WHAT.keys() == WAYS.keys()

SUMMARY = {
    "texts": "texts read",
    "tokens": "tokens read, special ones included",
    "predictions": "tokens predicted",
    "cross_entropy": "mean of -ln p of the true token over all predictions, nats",
    "bits": "the same in bits",
    "perplexity": "exp of that mean, 1 or more",
    "pseudo_perplexity": "exp of that mean, 1 or more: the pseudo-perplexity of Salazar et al. 2020",
    "first": "share of predictions whose most probable token is the true one, 0 to 1",
    "uncertainty": "mean entropy of the predicted distribution, bits",
    "uncertainty_share": "the same over log2(vocabulary), 0 to 1",
}


@dataclass
class Tested(State):
    """What was predicted so far. `totals` sums -ln p, entropies (nats), hits and predictions; `bins` counts texts."""

    totals: Totals
    counts: Counts
    moments: Moments
    bins: Tally
    sample: Sample
    vocabulary: int

    @classmethod
    def empty(cls, vocabulary: int, *, sample: int = 0, seed: int = 0) -> Tested:
        """Nothing predicted yet, of a vocabulary of so many entries."""
        return cls(Totals.empty(4), Counts(), Moments.empty(1), Tally(()), Sample.empty(sample, seed), vocabulary)

    def read(self, texts: Sequence[TokenizedText]) -> None:
        """Count texts, whether or not they have something to predict."""
        self.counts.add([len(text) for text in texts])

    def add(self, text: TokenizedText, scores: Scores) -> None:
        """Add the predictions of one text."""
        hits, mean = (scores.rank == 1).sum(), np.array([scores.surprisal.mean()])
        self.totals.add(np.array([scores.surprisal.sum(), scores.entropy.sum(), hits, len(scores)]))
        self.moments.add(mean[None])
        self.bins.add(np.floor(mean / BIN))
        own = [len(scores), mean[0], mean[0] / np.log(2), np.exp(mean[0]), hits / len(scores)]
        self.sample.add([text], np.array([own]))

    @property
    def mean(self) -> float:
        """Mean of -ln p over all predictions, nats."""
        return float(self.totals.values[0] / self.totals.values[3])


def summary(tested: Tested, way: str) -> Table:
    """All predictions in one row."""
    _, entropy, hits, predictions = tested.totals.values
    row = {
        "texts": tested.counts.texts,
        "tokens": tested.counts.tokens,
        "predictions": int(predictions),
        "cross_entropy": tested.mean,
        "bits": tested.mean / np.log(2),
        _perplexity(way): float(np.exp(tested.mean)),
        "first": hits / predictions,
        "uncertainty": entropy / predictions / np.log(2),
        "uncertainty_share": entropy / predictions / np.log(tested.vocabulary),
    }
    columns = {name: SUMMARY[name] for name in row}
    counts = ("texts", "tokens", "predictions")
    return Table("mlm", f"Prediction of tokens: {WHAT[way]}", pd.DataFrame([row]), columns, counts)


def _perplexity(way: str) -> str:
    return "pseudo_perplexity" if way == "each" else "perplexity"


def corpus_result(tested: Tested, way: str) -> Result:
    """The answer for a corpus."""
    headline = summary(tested, way)
    tables = (headline, _texts_table(tested, way), _distribution(tested))
    return Result(headline, tables, (_histogram(tested, way),), _spread(tested.moments))


def _spread(moments: Moments) -> tuple[str, ...]:
    """How far texts differ, where there are several."""
    if moments.count[0] < 2:
        return ()
    mean, deviation = moments.mean[0], moments.std[0]
    return (f"Mean cross-entropy of a text: {mean:.4g} nats over texts, standard deviation {deviation:.4g}.",)


def _texts_table(tested: Tested, way: str) -> Table:
    values = {
        "predictions": "tokens of the text that were predicted",
        "cross_entropy": "mean of -ln p over them, nats",
        "bits": "the same in bits",
        _perplexity(way): "exp of the mean",
        "first": "share of them whose most probable token is the true one",
    }
    table = sample_table("mlm-texts", "Prediction by text", tested.sample, pd.DataFrame(index=range(1)), {}, values)
    frame = table.frame.astype({"predictions": int})
    return Table(table.name, table.title, frame, table.columns, ("predictions",))


def _distribution(tested: Tested) -> Table:
    counted = sorted(tested.bins.counts.items())
    frame = pd.DataFrame({"low": [place * BIN for place, _ in counted]})
    frame["high"] = frame["low"] + BIN
    frame["texts"] = [int(texts) for _, texts in counted]
    columns = {"low": "least mean cross-entropy, nats", "high": "below this", "texts": "texts whose mean lies there"}
    return Table("mlm-distribution", "Texts by their mean cross-entropy", frame, columns)


def _histogram(tested: Tested, way: str) -> Figure:
    places = range(min(tested.bins.counts), max(tested.bins.counts) + 1)
    x = np.array([(place + 0.5) * BIN for place in places])
    y = np.array([float(tested.bins.counts.get(place, 0)) for place in places])
    panel = Lines((Series("", x, y),), "mean cross-entropy of a text (nats)", "texts", whole=False, low=0.0)
    note = f"{WHAT[way].capitalize()}; bins of {BIN} nats."
    return Figure("mlm-distribution", "Texts by their mean cross-entropy", (panel,), note=note)


# One text


@dataclass(frozen=True)
class Predicted:
    """The predictions of one text: where, what the model read there, how well, and the foremost entries."""

    text: TokenizedText
    positions: tuple[int, ...]
    inputs: tuple[str, ...]
    scores: Scores
    leading: Leading

    @classmethod
    def of(cls, probes: Sequence[Probe], scores: Scores, leading: Leading) -> Predicted:
        """Those of all of a text's probes, in their order."""
        positions = tuple(position for probe in probes for position in probe.positions)
        inputs = tuple(what for probe in probes for what in probe.inputs)
        return cls(probes[0].text, positions, inputs, scores, leading)


def text_result(predicted: Predicted, tested: Tested, way: str, tokens: Tokens) -> Result:
    """The answer for one text whose true tokens are known."""
    headline = summary(tested, way)
    tables = (headline, _scores_table(predicted, tested.vocabulary), *_entries(predicted, tokens, gradient=True))
    return Result(headline, tables, (_coloured(predicted, way),), (_identities(predicted.scores),))


def given_result(predicted: Predicted, vocabulary: int, tokens: Tokens) -> Result:
    """The answer for the [MASK]s of a text: nobody knows what stands there."""
    masks = _scores_table(predicted, vocabulary, truth=False)
    best = masks.frame[["token", "uncertainty", "uncertainty_share"]].copy()
    best.insert(1, "piece", [tokens[entry] or "" for entry in predicted.leading.ids[:, 0].tolist()])
    best.insert(2, "probability", predicted.leading.probability[:, 0])
    named = {**masks.columns, "piece": "the most probable token", "probability": "its p, 0 to 1"}
    columns = {str(name): named[str(name)] for name in best}
    headline = Table("mlm", "The most probable token of each [MASK]", best, columns)
    tables = (headline, masks, *_entries(predicted, tokens, gradient=False))
    return Result(headline, tables, (_masks_figure(predicted, tokens),))


def _scores_table(predicted: Predicted, vocabulary: int, *, truth: bool = True) -> Table:
    frame, columns = token_frame(predicted.text)
    frame = frame.iloc[list(predicted.positions)].reset_index(drop=True)
    frame["input"], columns["input"] = predicted.inputs, "what the model read there: mask, random (another token), kept"
    scores = predicted.scores
    known = {
        "probability": (scores.probability, "p of the true token, 0 to 1"),
        "rank": (scores.rank, "rank of the true token by probability, from 1"),
        "cross_entropy": (scores.surprisal, "-ln p of the true token, nats"),
        "bits": (scores.surprisal / np.log(2), "the same in bits"),
        "kl": (scores.divergence, "KL(y || p) by its definition, nats: the cross-entropy, for H(y) is 0"),
        "gradient": (scores.gradient, "|p - y|: norm of the cross-entropy's gradient by the logits, 0 to sqrt(2)"),
        "gradient_closed": (scores.gradient_closed, "the same by sqrt(sum p^2 - 2 p + 1)"),
    }
    values = (known if truth else {}) | {
        "entropy": (scores.entropy, "entropy of the predicted distribution, nats"),
        "uncertainty": (scores.entropy / np.log(2), "the same in bits"),
        "uncertainty_share": (scores.entropy / np.log(vocabulary), "the same over log2(vocabulary), 0 to 1"),
    }
    for name, (column, meaning) in values.items():
        frame[name], columns[name] = column, meaning
    return Table("mlm-tokens", "Prediction by token", frame, columns)


def _entries(predicted: Predicted, tokens: Tokens, *, gradient: bool) -> tuple[Table, ...]:
    """The most probable entries of every position, and those of the largest gradient."""
    leading = predicted.leading
    pull = "p - y of this logit, -1 to 1: y is 1 for the true token and 0 elsewhere"
    likely = {"probability": (leading.probability, "p, 0 to 1")}
    likely |= {"gradient": (leading.gradient, pull)} if gradient else {}
    top = _long(predicted, "mlm-top", "The most probable tokens", leading.ids, likely, tokens)
    if not gradient:
        return (top,)
    steep = {"gradient": (leading.steepest, pull)}
    title = "Where the gradient p - y is largest"
    return top, _long(predicted, "mlm-gradient", title, leading.steepest_ids, steep, tokens)


def _long(
    predicted: Predicted,
    name: str,
    title: str,
    ids: NDArray[np.int64],
    values: Mapping[str, tuple[Floats, str]],
    tokens: Tokens,
) -> Table:
    """A row for every place of every position."""
    positions, places = ids.shape
    frame = pd.DataFrame(
        {
            "token": np.repeat(np.array(predicted.positions), places),
            "place": np.tile(np.arange(places), positions),
            "id": ids.ravel(),
            "piece": [tokens[entry] or "" for entry in ids.ravel().tolist()],
        }
    )
    columns = {
        "token": "position of the predicted token, from 0",
        "place": "place in the order, from 0",
        "id": "row of the vocabulary",
        "piece": "the token as it stands in the vocabulary",
    }
    for column, (found, meaning) in values.items():
        frame[column], columns[column] = found.ravel(), meaning
    return Table(name, title, frame, columns)


def _identities(scores: Scores) -> str:
    apart = np.abs(scores.surprisal - scores.divergence).max()
    norms = np.abs(scores.gradient - scores.gradient_closed).max()
    return (
        f"Cross-entropy = KL(y || p) + H(y) with H(y) = 0: they differ by {apart:.1g} at most; "
        f"|p - y| and sqrt(sum p^2 - 2 p + 1) by {norms:.1g}."
    )


def _coloured(predicted: Predicted, way: str) -> Figure:
    """The text twice: how surprising each token is, and how uncertain the prediction was."""
    values = np.full((2, len(predicted.text)), np.nan)
    values[:, list(predicted.positions)] = np.array([predicted.scores.surprisal, predicted.scores.entropy]) / np.log(2)
    panel = ColouredText(predicted.text.labels, ("surprisal", "uncertainty"), values, "bits", low=0.0)
    note = f"{WHAT[way].capitalize()}. Surprisal: -log2 p of the token; uncertainty: entropy of the prediction."
    return Figure("mlm-tokens", "How surprising each token is", (panel,), note=note)


def _masks_figure(predicted: Predicted, tokens: Tokens) -> Figure:
    shown = list(zip(predicted.positions, predicted.leading.ids, predicted.leading.probability, strict=True))[:PANELS]
    panels = tuple(
        Heatmap(
            p[None],
            f"token {position}",
            ("p",),
            tuple(tokens[int(entry)] or "" for entry in ids),
            row_label="",
            column_label="most probable tokens",
            unit="probability",
            high=None,
            written=".3f",
        )
        for position, ids, p in shown
    )
    left = len(predicted.positions) - len(shown)
    note = f"{left} more in the tables." if left else ""
    return Figure("mlm-masks", "What stands at each [MASK]", panels, note=note)
