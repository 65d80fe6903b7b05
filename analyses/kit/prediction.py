"""What a distribution over the vocabulary says of the token that truly stands there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .maths import entropy, largest_magnitudes

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]


def cross_entropy(logits: Tensor, truth: Tensor) -> Tensor:
    """-ln p of the true entry, p = softmax(logits), in nats, 0 or more. Shapes (position, entry), (position,).

    >>> cross_entropy(torch.tensor([[0.0, 0.0]]).double(), torch.tensor([1])).numpy().round(6).tolist()
    [0.693147]
    """
    return torch.logsumexp(logits, dim=-1) - logits.gather(-1, truth[:, None])[:, 0]


def divergence_from(reference: Tensor, log_p: Tensor) -> Tensor:
    """KL(y || p) = sum_v y_v (ln y_v - ln p_v) in nats, with 0 ln 0 = 0; 0 or more, infinite where p lacks what y has.

    Shapes (position, entry) twice: y (`reference`) as probabilities, p as logarithms, which do not underflow.

    >>> half = torch.tensor([[0.5, 0.5]]).double()
    >>> divergence_from(torch.tensor([[1.0, 0.0]]).double(), half.log()).numpy().round(6).tolist()
    [0.693147]
    """
    there = reference > 0
    terms = torch.where(there, reference, 1.0).log() - log_p
    return torch.where(there, reference * terms, 0.0).sum(dim=-1)


def one_hot(truth: Tensor, entries: int) -> Tensor:
    """The distribution y that is sure of the true entry, (position, entry): its entropy is 0.

    >>> one_hot(torch.tensor([1]), 3).tolist()
    [[0.0, 1.0, 0.0]]
    """
    return torch.nn.functional.one_hot(truth, entries).double()


def logit_gradient(log_p: Tensor, truth: Tensor) -> Tensor:
    """p - y: the gradient of the cross-entropy with respect to the logits, (position, entry); rows sum to 0.

    The true entry is -(1 - p) without cancellation.

    >>> logit_gradient(torch.tensor([[0.25, 0.75]]).double().log(), torch.tensor([1])).numpy().round(6).tolist()
    [[0.25, -0.25]]
    """
    of_truth = log_p.gather(-1, truth[:, None])
    return log_p.exp().scatter_(-1, truth[:, None], torch.expm1(of_truth))


def gradient_norm(sum_of_squares: Floats, of_truth: Floats) -> Floats:
    """|p - y| from sum p^2 and the true entry's p: sqrt(sum p^2 - 2 p + 1), from 0 to sqrt(2).

    Loses digits where p is nearly 1; the norm of `logit_gradient` does not.

    >>> gradient_norm(np.array([0.625]), np.array([0.75])).round(6).tolist()
    [0.353553]
    """
    return np.sqrt(np.maximum(sum_of_squares - 2 * of_truth + 1, 0.0))


def true_rank(logits: Tensor, truth: Tensor) -> Tensor:
    """1 + how many entries have a larger logit than the true one. Shapes (position, entry), (position,).

    >>> true_rank(torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([2])).tolist()
    [2]
    """
    return 1 + (logits > logits.gather(-1, truth[:, None])).sum(dim=-1)


@dataclass(frozen=True)
class Scores:
    """Of every position, one array each: what was predicted, and how well.

    `surprisal` -ln p of the true token (the cross-entropy, nats), `probability` p, `rank` of it (1 is the most
    probable), `entropy` of the whole prediction (nats), `divergence` KL(y || p) by its definition, `gradient` the norm
    of p - y and `gradient_closed` the same by sqrt(sum p^2 - 2 p + 1). NaN (rank 0) where the true token is not known.
    """

    surprisal: Floats
    probability: Floats
    rank: Whole
    entropy: Floats
    divergence: Floats
    gradient: Floats
    gradient_closed: Floats

    @classmethod
    def of(cls, logits: Tensor, truth: Tensor | None) -> Self:
        """Those of some logits (position, entry), which are taken in float64."""
        logits = logits.double()
        log_p = torch.log_softmax(logits, dim=-1)
        p = log_p.exp()
        spread = entropy(p.numpy())
        if truth is None:
            nothing = np.full(len(logits), np.nan)
            return cls(nothing, nothing, np.zeros(len(logits), np.int64), spread, nothing, nothing, nothing)
        surprisal = cross_entropy(logits, truth).clamp_min(0.0)
        of_truth = surprisal.neg().exp().numpy()
        return cls(
            surprisal.numpy(),
            of_truth,
            true_rank(logits, truth).numpy(),
            spread,
            divergence_from(one_hot(truth, logits.shape[-1]), log_p).numpy(),
            torch.linalg.vector_norm(logit_gradient(log_p, truth), dim=-1).numpy(),
            gradient_norm((p * p).sum(dim=-1).numpy(), of_truth),
        )

    def __len__(self) -> int:
        return len(self.entropy)


@dataclass(frozen=True)
class Leading:
    """The foremost entries of every position, (position, place): by falling probability, and by falling |p - y|.

    `gradient` is p - y of the most probable entries; `steepest` has the entries that pull the logits most. Without a
    true token `gradient` is NaN and `steepest` has no places.
    """

    ids: Whole
    probability: Floats
    gradient: Floats
    steepest_ids: Whole
    steepest: Floats

    @classmethod
    def of(cls, logits: Tensor, truth: Tensor | None, count: int) -> Self:
        """The first `count` of each, from logits (position, entry); none costs nothing."""
        if not count:
            nothing = np.empty((len(logits), 0))
            return cls(nothing.astype(np.int64), nothing, nothing, nothing.astype(np.int64), nothing)
        log_p = torch.log_softmax(logits.double(), dim=-1)
        ids, probability = largest_magnitudes(log_p.exp().numpy(), count)
        if truth is None:
            nothing = np.empty((len(ids), 0))
            return cls(ids, probability, np.full_like(probability, np.nan), nothing.astype(np.int64), nothing)
        pull: Floats = logit_gradient(log_p, truth).numpy()
        return cls(ids, probability, np.take_along_axis(pull, ids, axis=1), *largest_magnitudes(pull, count))


P = TypeVar("P", Scores, Leading)


def joined(parts: Sequence[P]) -> P:
    """The positions of all parts, one after the other."""
    names = [field.name for field in fields(parts[0])]
    return type(parts[0])(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))
