"""A trace as tables and figures: the nine steps for the terminal, everything in files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from scipy.special import softmax

from .maths import Floats, lengths
from .record import TokenizedText
from .result import Figure, Heatmap, Result, Table
from .tables import token_frame
from .trace import STEPS, Quantity

ENTRIES = 3
"""Entries of a vector that the terminal shows."""
SHOWN = 12
"""Tokens that the terminal shows."""
RESIDUAL = {
    "x": "layer input",
    "o": "attention output",
    "y": "x + o",
    "n": "LayerNorm(y)",
    "f": "FFN output",
    "t": "n + f",
    "x'": "LayerNorm(t)",
}
"""Points of the stream through a block."""
TITLES = STEPS | {
    2: "embedding, LayerNorm(e) = gain (e - mean) / sqrt(variance + eps) + bias",
    4: "raw scores q . k_j, and the same by x~ = (x, 1) and M~ = [W_Q b_Q]^T [W_K b_K]",
    5: "scaled scores, and weights a_j = exp(s_j) / sum_i exp(s_i)",
    9: "FFN with {}, residual and LayerNorm",
}
ACTIVATIONS = {
    "gelu": "gelu(h) = h (1 + erf(h / sqrt(2))) / 2",
    "gelu_new": "gelu_new(h) = h (1 + tanh(sqrt(2/pi) (h + 0.044715 h^3))) / 2",
    "relu": "relu(h) = max(h, 0)",
}
QUANTITY = {
    "quantity": "symbol of a vector",
    "formula": "how it is computed; rows of x, k and v belong to tokens",
    "shapes": "lengths of what goes in and of what comes out",
    "first entries": "the query token's first entries, recomputed",
    "error": "largest deviation of all its entries from the recorded pass, relative where that is above 1; - where "
    "nothing of the kind is recorded",
}
KEYS = {
    "token": "position, from 0",
    "text": "the token as it stands in the text",
    "raw": "q . k_j",
    "bilinear": "x~ M~ x~_j^T",
    "scaled": "raw / sqrt(d_k)",
    "weight": "softmax of scaled, 0 to 1; sums to 1",
    "unscaled": "softmax of raw: what the weight would be without the scaling",
    "value_length": "|v_j|",
    "weighted_length": "a_j |v_j|, the length of what the token adds to z",
}


@dataclass(frozen=True)
class TokenTrace:
    """What is told: the text, where its tokens stand, which token is the query of which head, and all quantities."""

    text: TokenizedText
    positions: tuple[int, ...]
    query: int
    layer: int
    head: int
    activation: str
    quantities: tuple[Quantity, ...]

    @property
    def name(self) -> str:
        """Head and query as titles say them."""
        return f"L{self.layer}H{self.head}, query {self.query} {self.text.labels[self.query]!r}"

    def row(self, symbol: str) -> Floats:
        """The query token's vector, recomputed."""
        return self.of(symbol).of_token(self.query)

    def of(self, symbol: str) -> Quantity:
        """The quantity of that symbol."""
        return next(quantity for quantity in self.quantities if quantity.symbol == symbol)


def told(trace: TokenTrace, *, full: bool) -> Result:
    """The answer: an overview of the steps, a table of each for the terminal, and the same in files."""
    keys = _keys(trace)
    details = (
        _first(trace, _tokens(trace)),
        *(_step(trace, step) for step in STEPS if 1 < step <= 6),
        _largest(trace, keys),
        *(_step(trace, step) for step in STEPS if step > 6),
    )
    tables = (_steps_table(trace), _tokens_table(trace, keys), _values_table(trace, full=full))
    return Result(_overview(trace), tables, (_attention_figure(trace), _residual_figure(trace)), _notes(trace), details)


def _notes(trace: TokenTrace) -> tuple[str, ...]:
    largest = np.max([quantity.error for quantity in trace.quantities if quantity.error is not None])
    return (
        f"Every value was computed again in float64 from the weights and the recorded input of its step; largest error "
        f"{largest:.1e} (relative where a value is above 1).",
        "r is compared with the recorded scaled scores times sqrt(d_k); u = x~ M~ and x itself are not compared.",
    )


def _overview(trace: TokenTrace) -> Table:
    rows = [
        {"step": step, "name": STEPS[step], "computed from the recorded": reads, "error": error}
        for step in STEPS
        for reads, error in [_summary([quantity for quantity in trace.quantities if quantity.step == step])]
    ]
    columns = {
        "step": "1 to 9",
        "name": "what happens",
        "computed from the recorded": "recorded tensors that the step was computed from",
        "error": "largest error of the step",
    }
    return Table("trace-overview", f"{trace.name}: nine steps", pd.DataFrame(rows), columns)


def _summary(quantities: Sequence[Quantity]) -> tuple[str, float]:
    reads = dict.fromkeys(quantity.reads for quantity in quantities)
    errors = [quantity.error for quantity in quantities if quantity.error is not None]
    return "; ".join(reads), float(np.max(errors))


def _step(trace: TokenTrace, step: int) -> Table:
    told = ACTIVATIONS.get(trace.activation, trace.activation)
    rows = [_shown(trace, quantity) for quantity in trace.quantities if quantity.step == step]
    return Table(f"step-{step}", f"Step {step}: {TITLES[step].format(told)}", pd.DataFrame(rows), QUANTITY)


def _shown(trace: TokenTrace, quantity: Quantity) -> dict[str, str]:
    return {
        "quantity": quantity.symbol,
        "formula": quantity.formula,
        "shapes": quantity.shapes,
        "first entries": first_entries(quantity.of_token(trace.query)),
        "error": "-" if quantity.error is None else f"{quantity.error:.1e}" if quantity.error else "0",
    }


def first_entries(vector: Floats) -> str:
    """The first entries with four decimals, and whether there are more.

    >>> first_entries(np.array([0.5, -1.25, 3.0, 4.0]))
    '0.5000 -1.2500 3.0000 …'
    """
    return " ".join([f"{entry:.4f}" for entry in vector[:ENTRIES]] + ["…"] * (len(vector) > ENTRIES))


def _tokens(trace: TokenTrace) -> pd.DataFrame:
    frame = token_frame(trace.text)[0]
    frame.insert(4, "position", trace.positions)
    return frame


TOKENS = {"position": "its row in the table of positions, as the family counts them"}


def _first(trace: TokenTrace, tokens: pd.DataFrame) -> Table:
    """Step 1: the tokens around the query."""
    first = max(0, min(trace.query - SHOWN // 2, len(tokens) - SHOWN))
    shown = tokens[["token", "text", "piece", "id", "position", "segment"]].iloc[first : first + SHOWN]
    some = f" ({len(shown)} of {len(tokens)})" if len(shown) < len(tokens) else ""
    return Table("step-1", f"Step 1: {STEPS[1]}{some}", shown, token_frame(trace.text)[1] | TOKENS)


def _keys(trace: TokenTrace) -> pd.DataFrame:
    weights, sizes = trace.row("a"), lengths(trace.of("v").values.numpy())
    return pd.DataFrame(
        {
            "token": range(len(weights)),
            "text": trace.text.labels,
            "raw": trace.row("r"),
            "bilinear": trace.row("r~"),
            "scaled": trace.row("s"),
            "weight": weights,
            "unscaled": _unscaled(trace),
            "value_length": sizes,
            "weighted_length": weights * sizes,
        }
    )


def _unscaled(trace: TokenTrace) -> Floats:
    """Weights without the scaling."""
    found: Floats = softmax(trace.row("r"))
    return found


def _largest(trace: TokenTrace, keys: pd.DataFrame) -> Table:
    """Steps 4 to 6, key by key: those of largest weight in a long text."""
    shown = keys.loc[keys["weight"].nlargest(SHOWN).index.sort_values()]
    some = f", the {SHOWN} largest of {len(keys)} weights" if len(shown) < len(keys) else ""
    short = {"value_length": "|v|", "weighted_length": "a |v|"}
    columns = {short.get(name, name): about for name, about in KEYS.items()}
    return Table("steps-4-to-6", f"Steps 4 to 6, key by key{some}", shown.rename(columns=short), columns)


def _steps_table(trace: TokenTrace) -> Table:
    rows = [
        {
            "step": quantity.step,
            "name": STEPS[quantity.step],
            "quantity": quantity.symbol,
            "formula": quantity.formula,
            "shapes": quantity.shapes,
            "computed_from": quantity.reads,
            "length": float(lengths(quantity.of_token(trace.query))),
            "error": np.nan if quantity.error is None else quantity.error,
        }
        for quantity in trace.quantities
    ]
    columns = QUANTITY | {
        "step": "1 to 9",
        "name": "what the step does",
        "computed_from": "recorded tensors that it was computed from",
        "length": "Euclidean length of the query token's vector",
        "error": "largest deviation of all its entries from the recorded pass, relative where that is above 1; empty "
        "where nothing of the kind is recorded",
    }
    return Table("trace-steps", f"Every quantity, {trace.name}", pd.DataFrame(rows), columns)


def _tokens_table(trace: TokenTrace, keys: pd.DataFrame) -> Table:
    frame = pd.concat([_tokens(trace), keys.drop(columns=["token", "text"])], axis=1)
    columns = token_frame(trace.text)[1] | TOKENS | KEYS
    return Table("trace-tokens", f"Tokens, and what each is to {trace.name}", frame, columns)


def _values_table(trace: TokenTrace, *, full: bool) -> Table:
    """Every entry of every vector, or the query token's first entries."""
    parts = [frame for quantity in trace.quantities for frame in _values(trace, quantity, full=full)]
    columns = {
        "step": "1 to 9",
        "quantity": "symbol of a vector (see trace-steps)",
        "token": "the token that it belongs to, from 0; the query for ids, scores and weights",
        "index": "entry of the vector, from 0; the key for scores and weights, the token for ids",
        "value": "the entry, recomputed in float64",
        "recorded": "the same entry of the recorded pass; empty where nothing of the kind is recorded",
        "error": "|value - recorded| / max(1, |recorded|)",
    }
    what = "Every entry of every vector" if full else f"First {ENTRIES} entries of every vector (all with --full)"
    return Table("trace-values", f"{what}, {trace.name}", pd.concat(parts, ignore_index=True), columns)


def _values(trace: TokenTrace, quantity: Quantity, *, full: bool) -> Iterator[pd.DataFrame]:
    for row, token in enumerate(quantity.tokens):
        if not full and token != trace.query:
            continue
        values = quantity.values[row].numpy()[: None if full else ENTRIES]
        recorded = np.full(len(values), np.nan)
        if quantity.recorded is not None:
            recorded = quantity.recorded[row].numpy()[: len(values)]
        yield pd.DataFrame(
            {
                "step": quantity.step,
                "quantity": quantity.symbol,
                "token": token,
                "index": range(len(values)),
                "value": values,
                "recorded": recorded,
                "error": np.abs(values - recorded) / np.maximum(1, np.abs(recorded)),
            }
        )


def _attention_figure(trace: TokenTrace) -> Figure:
    """Scores, scaled scores and weights of the query, and what the weights would be without the scaling: as strips."""
    label = trace.text.labels[trace.query]
    limit = float(np.abs(trace.row("r")).max())
    scores = [
        _strip(trace.row(symbol), title, label, trace.text.labels, "score", -limit, limit)
        for symbol, title in (("r", "Raw scores r = q · k"), ("s", "Scaled scores s = r / √d_k"))
    ]
    weights = [
        _strip(values, title, label, trace.text.labels, "weight", 0.0, None)
        for values, title in ((trace.row("a"), "Weights a = softmax(s)"), (_unscaled(trace), "Unscaled: softmax(r)"))
    ]
    return Figure("trace-attention", f"From scores to weights, {trace.name}", (*scores, *weights))


def _residual_figure(trace: TokenTrace) -> Figure:
    sizes = np.array([float(lengths(trace.row(symbol))) for symbol in RESIDUAL])
    label = trace.text.labels[trace.query]
    panel = _strip(sizes, "", label, tuple(RESIDUAL), "length", 0.0, None, of="vector")
    note = "; ".join(f"{symbol}: {about}" for symbol, about in RESIDUAL.items())
    title = f"Lengths along the block, L{trace.layer}, query {trace.query} {label!r}"
    return Figure("trace-residual", title, (panel,), note=f"{note}.")


def _strip(
    values: Floats,
    title: str,
    row: str,
    columns: Sequence[str],
    unit: str,
    low: float,
    high: float | None,
    of: str = "key",
) -> Heatmap:
    written = ".2f" if len(values) <= SHOWN else ""
    strip = Heatmap(values[None], title, (row,), tuple(columns), "query", of, unit, low, high, written=written)
    return replace(strip, diverging=low < 0)
