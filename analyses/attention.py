"""How each head spreads its attention: entropy, confidence, reach, and the mass on kinds of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from .kit.accumulators import Counts, Moments, Sample
from .kit.analysis import ALL, Analysis, Selection, State, setting
from .kit.attention_metrics import METRICS, Special, View, chosen_metrics
from .kit.maths import mean_of_rows
from .kit.record import ForwardRecord, HeadWeights, ModelShape, TokenizedText
from .kit.result import Figure, Heatmap, Result, Table
from .kit.tables import moment_columns, sample_table, token_frame
from .kit.unit_maps import over_units
from .kit.units import Kinds, Units, units_of

Floats = NDArray[np.float64]
PANELS = {
    "entropy_share": "share of ln(keys)",
    "confidence": "weight",
    "distance": "tokens",
    "k90": "keys",
    "mass_self": "weight",
    "mass_previous": "weight",
    "mass_next": "weight",
    "mass_cls": "weight",
    "mass_sep": "weight",
}
"""The metrics that the overview draws, and their units."""


@dataclass
class AttentionState(State):
    """Per-text values (layer, head, metric): their moments, and a sample of texts."""

    moments: Moments
    sample: Sample
    counts: Counts
    layers: tuple[int, ...]
    heads: tuple[int, ...]


@dataclass(frozen=True)
class Attention(Analysis[AttentionState]):
    """How each head spreads its attention: entropy, confidence, reach, mass on kinds of tokens.

    Each value is a mean over the query rows of a text, then over texts; special tokens count among rows, keys and
    positions unless --special says otherwise. Entropy in nats and masses as in Clark et al. 2019, without their
    smoothing: the masses on [CLS], [SEP], punctuation and all other keys sum to 1; self, previous and next are a
    second, overlapping view, over all rows. Confidence is the mean row maximum (Voita et al. 2019, who leave out the
    end-of-sentence token); distance the mean of sum_j A_ij |i - j|; k90 the least number of keys that hold 0.9 of a
    row (after Ramsauer et al. 2020). For one text the weights themselves are written and drawn.

    Example: bertgeo attention "The fisherman sat down by the river bank." --layers 3 --heads 5
    """

    layers: Selection = setting(ALL, "Layers, from 0: all, or such as 0,3-5,-1.")
    heads: Selection = setting(ALL, "Heads, from 0: all, or such as 0,3-5,-1.")
    metrics: str = setting("all", "Metrics, separated by commas; all computes every one.")
    special: Special = setting(
        "keep",
        "Special tokens: keep them; drop their rows and columns (weights stay as they are); or drop and renormalise "
        "rows. The masses on [CLS], [SEP], punctuation and other always count every key.",
    )
    words: bool = setting(False, "Measure between words: sum over a word's key pieces, mean over its query pieces.")
    sample: int = setting(1000, "Texts of a corpus whose own values are written (those of smallest hash).", least=0)
    seed: int = setting(0, "Seed of that sample's hash.")

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"attention"})

    def start(self, shape: ModelShape, weights: HeadWeights | None) -> AttentionState:
        layers = self.layers.resolve(shape.layers, "layer")
        heads = self.heads.resolve(shape.heads, "head")
        moments = Moments.empty(len(layers), len(heads), len(chosen_metrics(self.metrics)))
        return AttentionState(moments, Sample.empty(self.sample, self.seed), Counts(), layers, heads)

    def update(self, state: AttentionState, record: ForwardRecord) -> None:
        for texts, _, values in over_units(record, state.layers, state.heads, self._measured, words=self.words):
            state.moments.add(values)
            state.sample.add(record.texts[texts], values)
        state.counts.add([len(text) for text in record.texts])

    def per_text(self, state: AttentionState) -> Table:
        return _texts_table(state, chosen_metrics(self.metrics))

    def finalize(self, state: AttentionState, record: ForwardRecord | None) -> Result:
        names = chosen_metrics(self.metrics)
        heads = self._heads_table(state, names)
        tables, figures = [heads], [_overview(state, names)]
        if record is None:
            tables.append(self.per_text(state))
        else:
            tables.extend(self._text_tables(state, record))
            figures.append(self._maps(state, record))
        return Result(_headline(heads, names), tuple(tables), tuple(figures), self._notes(state))

    def _measured(self, attention: Floats, kinds: Kinds) -> Floats:
        seen = View(attention, kinds, self.special)
        return np.stack([mean_of_rows(METRICS[name][0](seen)) for name in chosen_metrics(self.metrics)], axis=-1)

    def _view(self, state: AttentionState, record: ForwardRecord, index: int) -> View:
        """One text of a record, layer by layer."""
        attention = record.of_text("attention", index, state.layers)[:, list(state.heads)]
        units = units_of(record.texts[index], words=self.words)
        return View(units.pool(attention), Kinds([units]), self.special)

    def _heads_table(self, state: AttentionState, names: tuple[str, ...]) -> Table:
        frame = _head_index(state)
        frame["texts"] = state.counts.texts
        columns = {"layer": "layer, from 0", "head": "head, from 0", "texts": "texts measured"}
        values, descriptions = moment_columns(state.moments, names, {name: METRICS[name][1] for name in names})
        return Table(
            "attention-heads",
            "Attention by layer and head (mean over query rows, then over texts)",
            pd.concat([frame, values], axis=1),
            columns | descriptions,
        )

    def _text_tables(self, state: AttentionState, record: ForwardRecord) -> list[Table]:
        units = units_of(record.texts[0], words=self.words)
        seen = self._view(state, record, 0)
        return [_token_table(record.texts[0], units), _weights_table(state, seen, units)]

    def _maps(self, state: AttentionState, record: ForwardRecord) -> Figure:
        seen = self._view(state, record, 0)
        units = units_of(record.texts[0], words=self.words)
        labels = [units.labels[at] for at in seen.positions]
        unit = "word" if self.words else "token"
        panels = tuple(
            Heatmap(
                seen.kept[at, of],
                f"L{layer}H{head}",
                tuple(labels),
                tuple(labels),
                f"query {unit}",
                f"key {unit}",
                "attention weight",
            )
            for at, layer in enumerate(state.layers)
            for of, head in enumerate(state.heads)
        )
        title = "Attention weights" if len(panels) > 1 else f"Attention weights of {panels[0].title}"
        return Figure("attention-maps", title, panels, columns=len(state.heads), note=self._special_note())

    def _special_note(self) -> str:
        return {
            "keep": "Special tokens kept: every row sums to 1.",
            "drop": "Special tokens dropped, weights as they were: rows sum to less than 1.",
            "renormalise": "Special tokens dropped, rows divided by what is left.",
        }[self.special]

    def _notes(self, state: AttentionState) -> tuple[str, ...]:
        names = chosen_metrics(self.metrics)
        note = self._special_note()
        if self.special == "drop" and "k90" in names:
            note += " k90 counts only rows that keep 0.9."
        if not {"mass_cls", "mass_sep"} <= set(names):
            return (note,)
        mean = state.moments.mean
        mass = [np.mean(mean[..., names.index(name)]) for name in ("mass_cls", "mass_sep")]
        return (f"{note} Mean mass on [CLS] {mass[0]:.3f}, on [SEP] {mass[1]:.3f}.",)


def _head_index(state: AttentionState) -> pd.DataFrame:
    pairs = [(layer, head) for layer in state.layers for head in state.heads]
    return pd.DataFrame(pairs, columns=["layer", "head"])


def _texts_table(state: AttentionState, names: tuple[str, ...]) -> Table:
    columns = {"layer": "layer, from 0", "head": "head, from 0"}
    values = {name: METRICS[name][1] for name in names}
    return sample_table("attention-texts", "Attention by text", state.sample, _head_index(state), columns, values)


def _token_table(text: TokenizedText, units: Units) -> Table:
    frame, columns = token_frame(text)
    frame["unit"] = units.of_token
    return Table("tokens", "Tokens", frame, columns | {"unit": "row and column of the attention tables"})


def _weights_table(state: AttentionState, seen: View, units: Units) -> Table:
    layers, heads, queries, keys = np.indices(seen.kept.shape)
    at = seen.positions
    query, key = at[queries.ravel()], at[keys.ravel()]
    frame = pd.DataFrame(
        {"layer": np.array(state.layers)[layers.ravel()], "head": np.array(state.heads)[heads.ravel()]}
    )
    for name, index in (("query", query), ("key", key)):
        frame[name] = index
        frame[f"{name}_token"] = np.array(units.labels, dtype=object)[index]
        frame[f"{name}_start"] = pd.array(units.start, dtype="Int64")[index]
        frame[f"{name}_end"] = pd.array(units.end, dtype="Int64")[index]
    frame["weight"] = seen.kept.ravel()
    columns = {"layer": "layer, from 0", "head": "head, from 0", "weight": "attention weight, 0 to 1"}
    for name in ("query", "key"):
        columns |= {
            name: f"position of the {name}, from 0",
            f"{name}_token": "its text",
            f"{name}_start": "its first character in the text",
            f"{name}_end": "one past its last character",
        }
    return Table("attention-weights", "Attention weights", frame, columns)


def _overview(state: AttentionState, names: tuple[str, ...]) -> Figure:
    mean = state.moments.mean
    shown = [name for name in PANELS if name in names] or [name for name in names if name != "n"] or ["n"]
    panels = tuple(
        Heatmap(
            mean[..., names.index(name)],
            name.replace("_", " "),
            tuple(map(str, state.layers)),
            tuple(map(str, state.heads)),
            "layer",
            "head",
            PANELS.get(name, name.replace("_", " ")),
            high=1.0 if PANELS.get(name) == "weight" else None,
        )
        for name in shown
    )
    texts = state.counts.texts
    note = f"Mean over query rows{f', then over {texts} texts' if texts > 1 else ''}."
    return Figure("attention-heads", "Attention by layer and head", panels, columns=min(3, len(panels)), note=note)


def _headline(heads: Table, names: tuple[str, ...]) -> Table:
    usual = ("n", "entropy", "entropy_share", "confidence", "distance", "mass_cls", "mass_sep", "k90")
    shown = list(usual if len(names) == len(METRICS) else names)
    frame = heads.frame.groupby("layer", as_index=False)[shown].mean()
    columns = {name: text for name, text in heads.columns.items() if name in frame}
    return Table("attention-layers", "Attention by layer (mean over heads)", frame, columns)
