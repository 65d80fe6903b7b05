"""Which tokens pulled a word: what each adds to the word's attention output (Kobayashi et al. 2020)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .maths import lengths
from .mixing import LayerWeights, contributions
from .record import ForwardRecord

Floats = NDArray[np.float64]


def word_contributions(
    record: ForwardRecord, text: int, tokens: tuple[int, ...], layer: int, weights: LayerWeights
) -> Floats:
    """What every token adds to the mean attention output of a word's tokens: (token, width).

    sum_h mean_i A_ij f_h(x_j), i over the word's tokens: with b_O they add up to the mean of the recorded output.
    """
    attention, values = (record.of_layer(name, layer)[text].astype(np.float64) for name in ("attention", "v"))
    mean = attention[:, list(tokens)].mean(axis=1)
    found: Floats = contributions(mean[None], values[None], weights.output)[0]
    return found


def pulls(parts: Floats, bias: Floats) -> tuple[Floats, Floats, float]:
    """Norms of the parts of an update, their shares of it along its own direction, and the bias's share.

    With u = sum_j c_j + b, the share of c_j is c_j . u / |u|^2 (this project's own definition): signed, negative for
    what pulls the other way; all shares and the bias's add up to 1. NaN for an update of zero.
    Shapes (token, width) and (width,) to (token,) twice and a number.

    >>> norms, shares, rest = pulls(np.array([[3.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]), np.array([0.0, 1.0]))
    >>> norms.tolist(), shares.tolist(), rest
    ([3.0, 1.0, 1.0], [0.75, 0.25, -0.25], 0.25)
    """
    update = parts.sum(axis=0) + bias
    square = float(update @ update) or np.nan
    return lengths(parts), parts @ update / square, float(bias @ update / square)
