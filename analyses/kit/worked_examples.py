"""Two examples that can be followed on paper: attention of three tokens, and a classifier on four channels."""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy.special import log_softmax, softmax

from .analysis import SettingsError
from .maths import Floats
from .result import Figure, Heatmap, Result, Table

TOKENS = np.array([[1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 1.0], [1.0, 1.0, 0.0, 0.0]])
"""x of the three tokens, (token, channel)."""
CLS = np.array([0.5, -0.2, 0.1, 0.8])
"""h of the classifier's example, (channel,)."""
LARGEST = 1e100
"""Sums of larger numbers could overflow."""
WEIGHTS = "1,0,0,1;0,1,1,0"
NAMES = ("x1", "x2", "x3")


def attention(x: Floats, scale: float) -> tuple[Floats, Floats, Floats]:
    """Scores x_i . x_j / scale, their softmax row by row and the weighted values, where q = k = v = x.

    Shape (token, channel) to (token, token) twice and (token, channel).

    >>> [attention(TOKENS, scale)[1][0].round(3).tolist() for scale in (1.0, 2.0)]
    [[0.665, 0.09, 0.245], [0.506, 0.186, 0.307]]
    """
    scores = x @ x.T / scale
    weights = softmax(scores, axis=-1)
    return scores, weights, weights @ x


def attention_example() -> Result:
    """Three tokens in four dimensions with W_Q = W_K = W_V = I, not scaled and scaled by sqrt(d_k) = 2."""
    ways = {"unscaled": attention(TOKENS, 1.0), "scaled": attention(TOKENS, 2.0)}
    steps = [("x", "given", (TOKENS, TOKENS))]
    steps += [(name, f"x W_{name.upper()}^T, W_{name.upper()} = I", (TOKENS, TOKENS)) for name in "qkv"]
    named = (("s", "q . k_j (scaled: / 2)"), ("a", "softmax(s)"), ("z", "sum_j a_j v_j"))
    pairs = zip(*ways.values(), strict=True)
    steps += [(symbol, formula, pair) for (symbol, formula), pair in zip(named, pairs, strict=True)]
    table = _entries(steps)
    weights = tuple(Heatmap(values[1], name.capitalize(), NAMES, NAMES, written=".3f") for name, values in ways.items())
    figure = Figure("trace-example", "Attention of three tokens in four dimensions, W = I", weights, 2)
    note = (
        "Row 1 without scaling: softmax(2, 0, 1); with it: softmax(1, 0, 0.5). Scaling keeps the order, evens the row."
    )
    return Result(_headline(steps), (table,), (figure,), (note,))


Steps = list[tuple[str, str, tuple[Floats, Floats]]]


def _headline(steps: Steps) -> Table:
    rows = [
        {
            "quantity": symbol,
            "formula": formula,
            "token": token + 1,
            "unscaled": _written(unscaled[token]),
            "scaled": _written(scaled[token]),
        }
        for symbol, formula, (unscaled, scaled) in steps
        for token in range(len(TOKENS))
    ]
    title = "Three tokens in four dimensions, W_Q = W_K = W_V = I, without and with scaling by sqrt(d_k) = 2"
    return Table("trace-example", title, pd.DataFrame(rows), COLUMNS)


COLUMNS = {
    "quantity": "x the token, q, k, v its query, key and value, s its scores, a its weights, z its output",
    "formula": "how it is computed",
    "token": "1, 2 or 3; for s and a the query",
    "index": "channel, from 1; for s and a the key",
    "unscaled": "with s = q . k_j",
    "scaled": "with s = q . k_j / sqrt(4)",
}


def _written(row: Floats) -> str:
    """A row: halves as they are, other numbers with three decimals.

    >>> _written(np.array([1.0, 0.5])), _written(np.array([0.66524, 0.5]))
    ('1 0.5', '0.665 0.500')
    """
    exact = bool((2 * row == (2 * row).round()).all())
    return " ".join(f"{entry:g}" if exact else f"{entry:.3f}" for entry in row)


def _entries(steps: Steps) -> Table:
    """Every number in a row of its own."""
    rows = [
        (symbol, formula, token + 1, index + 1, float(unscaled[token, index]), float(scaled[token, index]))
        for symbol, formula, (unscaled, scaled) in steps
        for token, index in np.ndindex(unscaled.shape)
    ]
    return Table("trace-example", "The worked example, entry by entry", pd.DataFrame(rows, columns=[*COLUMNS]), COLUMNS)


def classifier(h: Floats, weights: Floats, bias: Floats) -> tuple[Floats, Floats, Floats]:
    """Contributions w_ci h_i (class, channel), logits W h + b (class,) and their softmax (class,).

    >>> added, logits, probabilities = classifier(CLS, np.array([[1.0, 0, 0, 1], [0, 1, 1, 0]]), np.zeros(2))
    >>> logits.round(9).tolist(), probabilities.round(3).tolist()
    ([1.3, -0.1], [0.802, 0.198])
    """
    added = weights * h + 0.0  # never -0.0
    logits = added.sum(axis=1) + bias
    return added, logits, softmax(logits)


def classifier_example(weights: str | None, bias: str | None) -> Result:
    """Logits and probabilities of the [CLS] vector (0.5, -0.2, 0.1, 0.8), each logit as the sum of what it adds up.

    Raises: SettingsError for weights or a bias that are no numbers, too many or too few.
    """
    w = matrix(WEIGHTS if weights is None else weights)
    b = np.zeros(len(w)) if bias is None else _bias(bias, len(w))
    frame = _classes(w, b)
    title = "logits = W h + b of h = (0.5, -0.2, 0.1, 0.8), and their softmax"
    table = Table("trace-classify", title, frame, CLASSES)
    given = f" W is the default, {WEIGHTS}." if weights is None else ""
    note = f"Each logit is the sum of its row; probability = exp(logit) / sum over classes.{given}"
    return Result(table, (table,), (_classes_figure(frame),), (note,))


def _classes(weights: Floats, bias: Floats) -> pd.DataFrame:
    added, logits, probabilities = classifier(CLS, weights, bias)
    frame = pd.DataFrame(added, columns=ADDED).assign(b=bias, logit=logits, probability=probabilities)
    frame["cross_entropy"] = -log_softmax(logits) + 0.0
    frame.insert(0, "class", range(len(weights)))
    return frame


def _classes_figure(frame: pd.DataFrame) -> Figure:
    classes, columns = tuple(f"class {number}" for number in frame["class"]), (*ADDED, "b", "logit")
    values = frame[[*columns]].to_numpy()
    panel = Heatmap(values, "", classes, columns, "", "", "value", None, None, diverging=True, written=".2f")
    return Figure("trace-classify", "What adds up to each logit", (panel,))


ADDED = tuple(f"w{index} h{index}" for index in range(1, len(CLS) + 1))
CLASSES = {
    "class": "row of W, from 0",
    **{name: f"what channel {name[1]} of h adds to the logit" for name in ADDED},
    "b": "its bias",
    "logit": "the sum of what the channels and the bias add",
    "probability": "softmax of the logits, 0 to 1; sums to 1",
    "cross_entropy": "-ln probability, nats: the loss if this class is the true one",
}


def matrix(text: str) -> Floats:
    """W (class, 4) from rows by ; and numbers by commas. Raises SettingsError for anything else.

    >>> matrix("1,0,0,1;0,1,1,0").tolist()
    [[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 1.0, 0.0]]
    """
    rows = [_numbers(row, "--weights") for row in text.split(";")]
    wrong = [len(row) for row in rows if len(row) != len(CLS)]
    if wrong or len(rows) < 2:
        found = f"a row of {wrong[0]} numbers" if wrong else "one row"
        hint = f"Give {len(CLS)} numbers a class and two classes or more, such as {WEIGHTS}."
        raise SettingsError(f"--weights {text!r} has {found}", hint)
    return np.array(rows)


def _bias(text: str, classes: int) -> Floats:
    numbers = _numbers(text, "--bias")
    if len(numbers) != classes:
        raise SettingsError(f"--bias {text!r} has {len(numbers)} numbers", f"Give {classes}, one a class.")
    return np.array(numbers)


def _numbers(text: str, option: str) -> list[float]:
    try:
        numbers = [float(number) for number in text.split(",")]
    except ValueError:
        numbers = [np.nan]
    if not (np.abs(numbers) <= LARGEST).all():
        hint = f"Separate numbers by commas, none beyond {LARGEST:g} in size."
        raise SettingsError(f"{option} {text!r} holds something that is no number, or too large a one", hint)
    return numbers
