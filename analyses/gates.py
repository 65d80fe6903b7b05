"""What kind of gate each head's attention is: continuous scores, and a label from thresholds."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from .kit.accumulators import Counts, Moments, Sample, Tally
from .kit.analysis import ALL, Analysis, Selection, SettingsError, State, setting
from .kit.examples import Examples
from .kit.gate_figures import example_figure, map_figure, scores_figure, shares_figure
from .kit.gate_labels import GATES, PATTERNS, Rules
from .kit.gate_scores import SCORES, SLACK, GateMaps
from .kit.maths import normalised_rows
from .kit.record import ForwardRecord, HeadWeights, ModelShape
from .kit.result import Figure, Result, Table
from .kit.selected import Selected
from .kit.tables import moment_columns, sample_table
from .kit.unit_maps import over_units
from .kit.units import Kinds

Floats = NDArray[np.float64]
HEAD = {"layer": "layer, from 0", "head": "head, from 0"}
OFFSET = "offset of the strongest diagonal, key minus query: 0 itself, -1 the unit before"


@dataclass
class GatesState(State):
    """Per-text scores (layer, head, score), labels and offsets, selected columns, and a map for each label."""

    moments: Moments
    sample: Sample
    gates: Tally
    patterns: Tally
    offsets: Tally
    selected: Selected
    examples: Examples
    counts: Counts
    layers: tuple[int, ...]
    heads: tuple[int, ...]


@dataclass(frozen=True)
class Gates(Analysis[GatesState]):
    """What kind of gate each head's attention is: continuous scores, and a label from thresholds.

    "The geometry of BERT" (arXiv 2502.12033) names the gates and gives no rule; every score, rule and threshold here
    is this project's own. Of a text's map, and of the corpus's mean scores, the first rule that is met decides: closed
    (weight on special tokens); directional (one diagonal, with its offset); backward, forward contextual (excess of a
    window over uniform rows, twice the other's); symmetric context (of both); instance (few columns for all rows);
    cluster (modularity of 2 to 8 runs of tokens); open (row entropy); mixed. Beside it the five classes of Kovaleva et
    al. 2019 (vertical, diagonal, both, block: only in a pair, heterogeneous), again by rules of our own.

    Example: bertgeo gates --words --open-as identity
    """

    layers: Selection = setting(ALL, "Layers, from 0: all, or such as 0,3-5,-1.")
    heads: Selection = setting(ALL, "Heads, from 0: all, or such as 0,3-5,-1.")
    words: bool = setting(False, "Measure between words: sum over a word's key pieces, mean over its query pieces.")
    window: int = setting(8, "Units before and behind that are context.", least=1)
    top: float = setting(0.02, "Share of the columns that an instance gate may select, rounded up.")
    confident: float = setting(0.3, "Weight from which a row's maximum counts as confident.")
    closed: float = setting(0.9, "Closed: least weight on special tokens.")
    directional: float = setting(0.5, "Directional: least weight on one diagonal.")
    contextual: float = setting(0.5, "Backward, forward and symmetric context: least excess of the window.")
    instance: float = setting(0.5, "Instance: least weight on the heaviest columns.")
    column_spread: float = setting(0.15, "Instance: most that column entropy exceeds row entropy, in ln(units).")
    fixed: float = setting(0.5, "Instance: least Jaccard index of two texts' columns for a fixed selection.")
    cluster: float = setting(0.3, "Cluster: least modularity.")
    open: float = setting(0.9, "Open: least row entropy / ln(units).")
    pattern: float = setting(0.5, "Vertical, diagonal, block: least excess; half of it each for vertical+diagonal.")
    open_as: Literal["uniform", "identity"] = setting(
        "uniform", "What open means: rows spread over everything, or each unit passes unchanged (weight on itself)."
    )
    directional_as: Literal["diagonal", "column"] = setting(
        "diagonal", "What directional means: one diagonal, or one column that all rows point to."
    )
    example_units: int = setting(24, "Most tokens (or words) of a text that may be drawn as an example.", least=2)
    sample: int = setting(1000, "Texts of a corpus whose own values are written (those of smallest hash).", least=0)
    seed: int = setting(0, "Seed of that sample's hash.")

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"attention"})

    def listing(self) -> Table | None:
        for name in ("top", "confident", "fixed", *THRESHOLDS):
            value = getattr(self, name)
            if not 0 < value <= 1:
                option = name.replace("_", "-")
                raise SettingsError(f"--{option} cannot be {value:g}", "Give more than 0 and at most 1.")
        return None

    def start(self, shape: ModelShape, weights: HeadWeights | None) -> GatesState:
        self.listing()
        layers, heads = self.layers.resolve(shape.layers, "layer"), self.heads.resolve(shape.heads, "head")
        cells = len(layers), len(heads)
        moments, sample = Moments.empty(*cells, len(SCORES)), Sample.empty(self.sample, self.seed)
        tallies = Tally(cells), Tally(cells), Tally(cells)
        selected, examples = Selected.empty(self.seed), Examples(self.example_units)
        return GatesState(moments, sample, *tallies, selected, examples, Counts(), layers, heads)

    def update(self, state: GatesState, record: ForwardRecord) -> None:
        for texts, units, values in over_units(record, state.layers, state.heads, self._measured, words=self.words):
            scores, offsets, columns = np.split(values, [len(SCORES), len(SCORES) + 1], axis=-1)
            gates, patterns = self._rules.gates(scores), self._rules.patterns(scores)
            state.moments.add(scores)
            for tally, found in ((state.gates, gates), (state.patterns, patterns), (state.offsets, offsets[..., 0])):
                tally.add(found)
            labels = np.stack([gates, patterns], axis=-1)
            state.sample.add(record.texts[texts], np.concatenate([scores, offsets, labels], axis=-1))
            if not np.isnan(offsets).all():
                state.selected.add(record.texts[texts], units, columns)
            places, strengths = (state.layers, state.heads), self._rules.strengths(scores)
            state.examples.offer(record, texts, units, places, gates, strengths)
        state.counts.add([len(text) for text in record.texts])

    def per_text(self, state: GatesState) -> Table:
        values = {**SCORES, "offset": OFFSET, "gate": "", "pattern": ""}
        table = sample_table("gates-texts", "Gates by text", state.sample, _places(state), HEAD, values)
        frame = table.frame.assign(gate=_names(table.frame["gate"], GATES))
        frame["pattern"] = _names(frame["pattern"], PATTERNS)
        about = {
            "gate": "gate of this text; empty below two units that are not special",
            "pattern": "its class",
        }
        return replace(table, frame=frame, columns={**table.columns, **about})

    def finalize(self, state: GatesState, record: ForwardRecord | None) -> Result:
        labels, shares = self._labels_table(state), _shares_table(state)
        tables = (labels, self._scores_table(state), shares, *(() if record else (self.per_text(state),)))
        return Result(_headline(state, labels), tables, self._figures(state, labels, shares), self._notes(state))

    @property
    def _rules(self) -> Rules:
        return Rules(*(getattr(self, field.name) for field in fields(Rules)))

    def _measured(self, attention: Floats, kinds: Kinds) -> Floats:
        """Scores, the strongest offset and the heaviest columns (first, head, ...) of some maps."""
        maps = GateMaps(normalised_rows(attention), kinds, self.window, self.top, self.confident)
        values = [maps.value(name) for name in SCORES]
        columns = maps.top_columns if maps.m > 1 else np.full((*values[0].shape, 1), np.nan)
        return np.concatenate([np.stack([*values, maps.offset], axis=-1), columns], axis=-1)

    def _labels_table(self, state: GatesState) -> Table:
        frame = _places(state)
        frame["texts"] = state.gates.total.ravel().astype(int)
        mean = state.moments.mean
        for name, tally, names, found in (
            ("gate", state.gates, GATES, self._rules.gates(mean)),
            ("pattern", state.patterns, PATTERNS, self._rules.patterns(mean)),
        ):
            most, share = tally.most
            frame[name], frame[f"{name}_of_most"] = _names(found, names), _names(most, names)
            frame[f"{name}_stability"] = share.ravel()
            frame[f"{name}_entropy"] = _entropy(tally, len(names)).ravel()
        offset, share = state.offsets.most
        frame["offset"], frame["offset_stability"] = offset.ravel(), share.ravel()
        self._add_selection(frame, state)
        return Table("gates", "Gate and pattern by layer and head", frame, LABELS)

    def _add_selection(self, frame: pd.DataFrame, state: GatesState) -> None:
        likeness = state.selected.likeness(len(state.layers), len(state.heads)).reshape(-1, 2)
        frame["same_token"], frame["same_position"] = likeness.T
        either = likeness.max(axis=-1)
        named = np.where(either >= self.fixed - SLACK, "fixed", "input-dependent")
        frame["selection"] = pd.Series(named, dtype="str").mask(np.isnan(either)).to_numpy()

    def _scores_table(self, state: GatesState) -> Table:
        frame = _places(state)
        frame["texts"] = state.counts.texts
        values, columns = moment_columns(state.moments, list(SCORES), SCORES)
        about = HEAD | {"texts": "texts measured"} | columns
        title = "Scores of gates by layer and head (mean over texts)"
        return Table("gates-scores", title, pd.concat([frame, values], axis=1), about)

    def _figures(self, state: GatesState, labels: Table, shares: Table) -> tuple[Figure, ...]:
        places, texts = (state.layers, state.heads), state.counts.texts
        unit = "word" if self.words else "token"
        figures = [
            map_figure(labels.frame, places, texts),
            scores_figure(state.moments.mean, places, unit, texts),
            shares_figure(shares.frame, state.layers, texts),
        ]
        examples = state.examples.rows()
        return (*figures, example_figure(examples, unit, texts)) if examples else tuple(figures)

    def _notes(self, state: GatesState) -> tuple[str, ...]:
        note = "Scores, rules and thresholds are this project's own, not the paper's."
        undrawn = [GATES[label] for label in sorted(state.gates.counts) if label not in state.examples.best]
        if not undrawn:
            return (note,)
        unit = "words" if self.words else "tokens"
        names = ", ".join(undrawn)
        return note, f"No text of at most {self.example_units} {unit} (--example-units) shows these gates: {names}."


THRESHOLDS = tuple(field.name for field in fields(Rules) if not field.name.endswith("_as"))
LABELS = {
    **HEAD,
    "texts": "texts that have a label: two units or more that are not special",
    "gate": "gate of the mean scores",
    "gate_of_most": "gate of most texts; of equally many the one that the help names first",
    "gate_stability": "share of the texts that have it, 0 to 1",
    "gate_entropy": "entropy of the texts' gates, nats, 0 (all alike) to ln 9",
    "pattern": "class after Kovaleva et al. of the mean scores",
    "pattern_of_most": "class of most texts",
    "pattern_stability": "share of the texts that have it, 0 to 1",
    "pattern_entropy": "entropy of the texts' classes, nats, 0 to ln 5",
    "offset": f"{OFFSET}; of most texts",
    "offset_stability": "share of the texts that have it, 0 to 1",
    "same_token": "mean Jaccard index of two texts' heaviest columns as vocabulary entries, over all pairs of at most "
    "200 texts (those of smallest hash), 0 to 1; empty below two texts",
    "same_position": "the same as positions from the start of the text",
    "selection": "of the heaviest columns, whatever the gate: fixed where either index reaches --fixed, else "
    "input-dependent; empty below two texts",
}


def _places(state: GatesState) -> pd.DataFrame:
    pairs = [(layer, head) for layer in state.layers for head in state.heads]
    return pd.DataFrame(pairs, columns=list(HEAD))


def _names(codes: Floats | pd.Series[float], names: tuple[str, ...]) -> pd.Series[str]:
    """Labels by their places, empty for NaN."""
    return pd.Series(["" if np.isnan(code) else names[int(code)] for code in np.ravel(codes)], dtype=str)


def _entropy(tally: Tally, labels: int) -> Floats:
    shares = np.stack([tally.share(label) for label in range(labels)])
    return -(shares * np.log(np.where(shares > 0, shares, 1.0))).sum(axis=0) + 0.0


def _shares_table(state: GatesState) -> Table:
    rows = [
        (layer, kind, name, float(share))
        for kind, tally, names in (("gate", state.gates, GATES), ("pattern", state.patterns, PATTERNS))
        for label, name in enumerate(names)
        for layer, share in zip(state.layers, tally.share(label).mean(axis=-1), strict=True)
    ]
    frame = pd.DataFrame(rows, columns=["layer", "kind", "label", "share"])
    frame = frame.sort_values(["layer", "kind"], kind="stable", ignore_index=True)
    frame.insert(3, "texts", frame["layer"].map(_labelled(state)))
    columns = {
        "layer": HEAD["layer"],
        "kind": "gate, or pattern: the class after Kovaleva et al.",
        "label": "which",
        "texts": LABELS["texts"],
        "share": "share of the maps (heads of texts) of the layer that have it, 0 to 1; sums to 1 over a kind's labels",
    }
    return Table("gates-shares", "Shares of gates and patterns by layer", frame, columns)


def _labelled(state: GatesState) -> dict[int, int]:
    return dict(zip(state.layers, state.gates.total.max(axis=-1).astype(int).tolist(), strict=True))


def _headline(state: GatesState, labels: Table) -> Table:
    frame = pd.DataFrame({"layer": state.layers})
    for label, name in enumerate(GATES):
        frame[name.split()[0]] = state.gates.share(label).mean(axis=-1)
    columns = {name.split()[0]: f"share of the layer's maps that are {name}, 0 to 1" for name in GATES}
    about = {"layer": HEAD["layer"], **columns}
    if state.counts.texts > 1:
        frame["stability"] = labels.frame.groupby("layer")["gate_stability"].mean().to_numpy()
        about["stability"] = "share of texts that have a head's most frequent gate, mean over heads, 0 to 1"
    return Table("gates-layers", "Gates by layer (shares of maps)", frame, about)
