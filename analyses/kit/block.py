"""What a block of an encoder is made of, as formulas over tensors; and how far two tensors are apart."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Affine:
    """x W^T + b, as a torch Linear computes it: W is (out, in), b (out,).

    >>> Affine(torch.tensor([[1.0, 2.0]]), torch.tensor([0.5]))(torch.tensor([[3.0, 4.0]])).tolist()
    [[11.5]]
    """

    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias

    @property
    def homogeneous(self) -> Tensor:
        """[W b], (out, in + 1): the same of x~ = (x, 1)."""
        return torch.cat([self.weight, self.bias[:, None]], dim=-1)


@dataclass(frozen=True)
class Norm:
    """A LayerNorm: gain (x - mean) / sqrt(variance + epsilon) + bias over the last axis; the variance divides by width.

    >>> Norm(torch.ones(2), torch.zeros(2), 0.0)(torch.tensor([1.0, 5.0])).tolist()
    [-1.0, 1.0]
    """

    gain: Tensor
    bias: Tensor
    epsilon: float

    def __call__(self, x: Tensor) -> Tensor:
        centred = x - x.mean(dim=-1, keepdim=True)
        variance = centred.square().mean(dim=-1, keepdim=True)
        return self.gain * centred / (variance + self.epsilon).sqrt() + self.bias


@dataclass(frozen=True)
class Activation:
    """The MLP's activation, by the name that the configuration gives it."""

    name: str
    function: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        return self.function(x)


def deviation(first: Tensor, second: Tensor) -> float:
    """Largest |first - second|, relative where |second| is above 1; NaN wins over any number, nothing deviates by 0.

    >>> deviation(torch.tensor([0.5, 20.0]), torch.tensor([0.25, 10.0]))
    1.0
    """
    apart = (first - second).abs() / second.abs().clamp(min=1.0)
    if apart.isnan().any():
        return math.nan
    return float(apart.max()) if apart.numel() else 0.0
