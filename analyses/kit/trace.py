"""One token's way through one head and one block, every value computed again in float64 from what was recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .block import Activation, Affine, Norm, deviation
from .maths import Floats

STEPS = {
    1: "tokens and ids",
    2: "embedding and LayerNorm",
    3: "query, key and value",
    4: "raw scores, also as a bilinear form",
    5: "scaled scores and softmax weights",
    6: "weighted values",
    7: "concatenation and output projection",
    8: "residual and LayerNorm",
    9: "FFN, residual and LayerNorm",
}
"""The nine steps."""


@dataclass(frozen=True)
class Quantity:
    """A vector of one step, or one vector for each token: recomputed, recorded, and how it came about.

    `values` is (token, index), `tokens` says which token each row belongs to; a row of scores or weights belongs to
    the query and is indexed by the key, ids by the token. `recorded` is None where the pass records nothing of the
    kind; `reads` are the recorded tensors that it was computed from.
    """

    step: int
    symbol: str
    formula: str
    shapes: str
    reads: str
    values: Tensor
    recorded: Tensor | None
    tokens: tuple[int, ...]

    @property
    def error(self) -> float | None:
        """Largest deviation from what was recorded, relative where that is above 1; None without a record."""
        return None if self.recorded is None else deviation(self.values, self.recorded)

    def of_token(self, token: int) -> Floats:
        """The vector of one token."""
        found: Floats = self.values[self.tokens.index(token)].numpy()
        return found


@dataclass(frozen=True)
class EmbeddingWeights:
    """What makes tokens into the first layer's input: the tables' sizes (rows, channels) and one text's rows of them.

    `rows` are (token, channel), `ids` the row of each table for each token; both by what a table embeds.
    """

    sizes: Mapping[str, tuple[int, ...]]
    ids: Mapping[str, tuple[int, ...]]
    rows: Mapping[str, Tensor]
    norm: Norm
    projection: Affine | None


@dataclass(frozen=True)
class BlockWeights:
    """One head's projections, and what the block's heads share. float64."""

    query: Affine
    key: Affine
    value: Affine
    output: Affine
    first_norm: Norm
    widen: Affine
    activation: Activation
    narrow: Affine
    second_norm: Norm


@dataclass(frozen=True)
class Seen:
    """What one pass recorded of one text, in float64, by the symbol that stands for it here; and the query token.

    Every tensor is (token, ...). `word`, `position`, `segment`, `task`: rows of the tables, `word id` and so on which
    rows; `e` their sum, `l` its LayerNorm, `x0` the first layer's input; `x` the layer's input; `q`, `k`, `v`, `z` of
    the head, `heads` the z of all of them (token, head, channel); `s` and `a` the head's scaled scores and weights
    (query, key); `c` what enters W_O, `o` what leaves it; `y` and `n` before and after the first LayerNorm; `h` and `g`
    before and after the activation; `f` the FFN's output; `t` and `x'` before and after the second LayerNorm.
    """

    tensors: Mapping[str, Tensor]
    query: int

    def __getitem__(self, symbol: str) -> Tensor:
        """The query token's row, (1, ...)."""
        return self.tensors[symbol][self.query : self.query + 1]

    def of_all(self, symbol: str) -> Tensor:
        """The rows of all tokens."""
        return self.tensors[symbol]

    @property
    def own(self) -> tuple[int, ...]:
        """The query token."""
        return (self.query,)

    @property
    def all(self) -> tuple[int, ...]:
        """Every token."""
        return tuple(range(len(self.tensors["x"])))


def traced(embedding: EmbeddingWeights, block: BlockWeights, seen: Seen, layer: int) -> tuple[Quantity, ...]:
    """Every quantity of the nine steps, in their order.

    Which row of each table each token takes; the rows that add up to a token and their LayerNorm; q, k, v; raw scores
    q . k_j, also as x~ M~ x~_j^T with x~ = (x, 1) and M~ = [W_Q b_Q]^T [W_K b_K]; scores over sqrt(d_k) and their
    softmax; z = sum_j a_j v_j; the heads side by side times W_O; two residuals with a LayerNorm behind each, the FFN
    between (Vaswani et al. 2017, Devlin et al. 2019).
    """
    parts = (_numbered, _embedded, _projected, _scored, _weighted, _mixed, _joined, _added, _fed_forward)
    given = Given(embedding, block, seen, layer)
    return tuple(quantity for part in parts for quantity in part(given))


@dataclass(frozen=True)
class Given:
    """All that a step reads."""

    embedding: EmbeddingWeights
    block: BlockWeights
    seen: Seen
    layer: int

    def own(self, step: int, symbol: str, formula: str, shapes: str, reads: str, values: Tensor) -> Quantity:
        """A quantity of the query token."""
        return Quantity(step, symbol, formula, shapes, reads, values, self.seen[symbol], self.seen.own)


def _numbered(given: Given) -> Iterator[Quantity]:
    """The only quantities that are indexed by the token."""
    for what, ids in given.embedding.ids.items():
        values, recorded = torch.tensor([ids], dtype=torch.float64), given.seen.of_all(f"{what} id")[None]
        formula = f"row in the table: {what}"
        yield Quantity(1, f"{what} id", formula, f"{len(ids)}", "text", values, recorded, given.seen.own)


def _embedded(given: Given) -> Iterator[Quantity]:
    embedding, seen = given.embedding, given.seen
    for what, rows in embedding.rows.items():
        formula = f"row {embedding.ids[what][seen.query]} of table"
        size = " x ".join(map(str, embedding.sizes[what]))
        yield given.own(2, what, formula, size, "ids", rows[seen.query : seen.query + 1])
    width, summed = seen["e"].shape[-1], torch.stack([seen[what] for what in embedding.rows]).sum(dim=0)
    yield given.own(2, "e", "sum of these rows", f"{width}", "rows", summed)
    last = "x0" if embedding.projection is None else "l"
    yield given.own(2, last, "LayerNorm(e)", f"{width}", "e", embedding.norm(seen["e"]))
    if embedding.projection is not None:
        yield given.own(2, "x0", "l W^T + b", _sizes(embedding.projection), "l", embedding.projection(seen["l"]))


def _projected(given: Given) -> Iterator[Quantity]:
    block, seen = given.block, given.seen
    x = seen.of_all("x")
    read = f"x (hidden state, depth {given.layer})"
    yield Quantity(3, "x", f"hidden state, depth {given.layer}", f"{x.shape[-1]}", read, x, None, seen.all)
    yield given.own(3, "q", "x W_Q^T + b_Q", _sizes(block.query), read, block.query(seen["x"]))
    for symbol, name, affine in (("k", "K", block.key), ("v", "V", block.value)):
        formula = f"x W_{name}^T + b_{name}"
        yield Quantity(3, symbol, formula, _sizes(affine), read, affine(x), seen.of_all(symbol), seen.all)


def _scored(given: Given) -> Iterator[Quantity]:
    block, seen = given.block, given.seen
    keys, channels = seen.of_all("k").shape
    recorded = seen["s"] * channels**0.5
    raw = seen["q"] @ seen.of_all("k").T
    yield Quantity(4, "r", "q . k_j", f"{keys} x {channels} -> {keys}", "q, k", raw, recorded, seen.own)
    searched = homogeneous(seen["x"]) @ block.query.homogeneous.T @ block.key.homogeneous
    width = searched.shape[-1]
    yield Quantity(4, "u", "x~ M~", f"{width} -> {width}", "x", searched, None, seen.own)
    form, shapes = searched @ homogeneous(seen.of_all("x")).T, f"{keys} x {width} -> {keys}"
    yield Quantity(4, "r~", "u . x~_j = x~ M~ x~_j^T", shapes, "x", form, recorded, seen.own)


def _weighted(given: Given) -> Iterator[Quantity]:
    seen = given.seen
    keys, channels = seen.of_all("k").shape
    scaled = seen["q"] @ seen.of_all("k").T / channels**0.5
    yield given.own(5, "s", f"r / sqrt(d_k), d_k = {channels}", f"{keys}", "q, k", scaled)
    yield given.own(5, "a", "softmax(s)", f"{keys}", "s", seen["s"].softmax(dim=-1))


def _mixed(given: Given) -> Iterator[Quantity]:
    seen = given.seen
    keys, channels = seen.of_all("v").shape
    shapes = f"{keys} x {channels} -> {channels}"
    yield given.own(6, "z", "sum_j a_j v_j", shapes, "a, v", seen["a"] @ seen.of_all("v"))


def _joined(given: Given) -> Iterator[Quantity]:
    block, seen = given.block, given.seen
    heads = seen["heads"]
    shapes = f"{heads.shape[1]} x {heads.shape[2]} -> {heads.shape[1] * heads.shape[2]}"
    yield given.own(7, "c", "z of every head in a row", shapes, "z", heads.flatten(start_dim=1))
    yield given.own(7, "o", "c W_O^T + b_O", _sizes(block.output), "c", block.output(seen["c"]))


def _added(given: Given) -> Iterator[Quantity]:
    seen, width = given.seen, f"{given.seen['x'].shape[-1]}"
    yield given.own(8, "y", "x + o", width, "x, o", seen["x"] + seen["o"])
    yield given.own(8, "n", "LayerNorm(y)", width, "y", given.block.first_norm(seen["y"]))


def _fed_forward(given: Given) -> Iterator[Quantity]:
    block, seen = given.block, given.seen
    width, inner = (f"{seen[symbol].shape[-1]}" for symbol in ("x", "h"))
    yield given.own(9, "h", "n W_1^T + b_1", _sizes(block.widen), "n", block.widen(seen["n"]))
    yield given.own(9, "g", f"{block.activation.name}(h)", inner, "h", block.activation(seen["h"]))
    yield given.own(9, "f", "g W_2^T + b_2", _sizes(block.narrow), "g", block.narrow(seen["g"]))
    yield given.own(9, "t", "n + f", width, "n, f", seen["n"] + seen["f"])
    yield given.own(9, "x'", "LayerNorm(t)", width, "t", block.second_norm(seen["t"]))


def _sizes(affine: Affine) -> str:
    out, into = affine.weight.shape
    return f"{into} -> {out}"


def homogeneous(x: Tensor) -> Tensor:
    """x~ = (x, 1) of every row.

    >>> homogeneous(torch.tensor([[2.0, 3.0]])).tolist()
    [[2.0, 3.0, 1.0]]
    """
    return torch.nn.functional.pad(x, (0, 1), value=1.0)
