"""What one forward pass gives (ForwardRecord) and what a checkpoint gives (HeadWeights), with named axes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ATTENTION_AXES = ("batch", "layer", "head", "query", "key")
HEAD_AXES = ("batch", "layer", "head", "token", "channel")
LAYER_AXES = ("batch", "layer", "token", "width")

AXES: Mapping[str, tuple[str, ...]] = {
    "q": HEAD_AXES,
    "k": HEAD_AXES,
    "v": HEAD_AXES,
    "scores": ATTENTION_AXES,
    "attention": ATTENTION_AXES,
    "head_outputs": HEAD_AXES,
    "hidden_states": ("batch", "depth", "token", "width"),
    "attention_projection": LAYER_AXES,
    "attention_sum": LAYER_AXES,
    "attention_norm": LAYER_AXES,
    "mlp_output": LAYER_AXES,
    "mlp_sum": LAYER_AXES,
    "layer_outputs": LAYER_AXES,
}
"""Every recordable tensor and its axes.

`scores` are scaled and taken before the softmax; `head_outputs` are A V before W_O; `attention_projection` is
W_O's output, `attention_sum` and `attention_norm` lie before and after the first LayerNorm, `mlp_output` is the MLP
before its residual, `mlp_sum` and `layer_outputs` lie before and after the second. Depth 0 of `hidden_states` is the
first layer's input, depth l + 1 the output of layer l.
"""

ABLATIONS: Mapping[str, str] = {
    "none": "transformer",
    "skip": "SAN+MLP",
    "mlp": "SAN+skip",
    "both": "SAN",
}
"""What can be cut out of every block of a pass, and what Dong et al. 2021 (arXiv 2103.03404) call the rest.

`skip`: the residual around attention; `mlp`: the MLP with its LayerNorm and its residual.
"""
OF_THE_MLP = frozenset({"mlp_output", "mlp_sum"})


def under(ablation: str, name: str) -> str:
    """The name of a tensor in a pass with an ablation, for `needs` and for reading. Raises ValueError for one it lacks.

    >>> under("none", "attention"), under("skip", "attention")
    ('attention', 'skip/attention')
    """
    if ablation not in ABLATIONS or (ablation in ("mlp", "both") and name in OF_THE_MLP):
        raise ValueError(f"there is no {name} under ablation {ablation!r}")
    return name if ablation == "none" else f"{ablation}/{name}"


def by_pass(names: Iterable[str]) -> dict[str, frozenset[str]]:
    """The tensors to be recorded by the pass that has them, in the order of ABLATIONS. Without any: the plain pass.

    >>> by_pass(["skip/attention"])
    {'skip': frozenset({'attention'})}
    """
    found: dict[str, set[str]] = {}
    for full in names:
        ablation, _, name = full.rpartition("/")
        under(ablation or "none", name)
        found.setdefault(ablation or "none", set()).add(name)
    return {ablation: frozenset(found[ablation]) for ablation in ABLATIONS if ablation in found} or {
        "none": frozenset()
    }


class NotRecordedError(LookupError):
    """A tensor was read that the analysis did not list in `needs`."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of an encoder. Layer l runs the weights of `weight_layer[l]` (ALBERT shares them; others do not).

    >>> ModelShape("albert", heads=2, width=8, head_width=4, weight_layer=(0, 0, 0)).layers
    3
    """

    family: str
    heads: int
    width: int
    head_width: int
    weight_layer: tuple[int, ...]

    @property
    def layers(self) -> int:
        """Blocks that one pass runs through."""
        return len(self.weight_layer)

    @property
    def weight_layers(self) -> int:
        """Blocks that the checkpoint holds."""
        return max(self.weight_layer) + 1


@dataclass(frozen=True)
class TokenizedText:
    """One text as the model reads it: every tuple has one entry a token.

    `labels` are slices of the user's own text (special tokens keep their name), `start` and `end` count characters
    of the first text, or of the second where `segment` is 1; they are None for special tokens. `word` numbers the
    tokenizer's words within a segment. `id` and `group` are what the corpus says of the line, if it does.
    """

    line: int
    text: str
    pair: str | None
    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    labels: tuple[str, ...]
    start: tuple[int | None, ...]
    end: tuple[int | None, ...]
    segment: tuple[int, ...]
    word: tuple[int | None, ...]
    special: tuple[bool, ...]
    unknown: tuple[bool, ...]
    cls: int | None
    sep: tuple[int, ...]
    part: int = 0
    id: str = ""
    group: str = ""

    def __len__(self) -> int:
        return len(self.ids)

    def __hash__(self) -> int:
        # Of what tells texts apart: to hash every token for each look into a cache would cost more than it saves.
        return hash((self.line, self.part, self.text, self.pair))


@dataclass(frozen=True)
class Vocabulary:
    """The word embedding: a row (id) of `vectors` for every token, `tokens` as they stand in the vocabulary.

    Rows without a token have None. Where rows are narrower than the model (ELECTRA, ALBERT), `projection`
    (width, row's width) takes them there; its bias, the same for all tokens, is left out.
    """

    tokens: tuple[str | None, ...]
    vectors: Tensor
    projection: Tensor | None

    def blocks(self, rows: int) -> Iterator[tuple[int, NDArray[np.float64]]]:
        """The embedding as the first layer is wide, so many rows at a time: the first one's id, and (row, width)."""
        for start in range(0, len(self.tokens), rows):
            block = self.vectors[start : start + rows].detach().cpu().double()
            yield (
                start,
                (block if self.projection is None else block @ self.projection.detach().cpu().double().T).numpy(),
            )


@dataclass(frozen=True)
class HeadWeights:
    """The attention weights of a checkpoint, cut into heads; shared layers stand once.

    A torch Linear stores (out, in): head h owns rows of W_Q, W_K, W_V and columns of W_O. `query`, `key` and `value`
    have the axes (weight_layer, head, channel, width), their biases (weight_layer, head, channel); `output` has
    (weight_layer, head, width, channel), its bias (weight_layer, width), and so has `norm_gain`, the gain of the
    LayerNorm behind it. float64. `vocabulary` is read when called.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    query_bias: Tensor
    key_bias: Tensor
    value_bias: Tensor
    output_bias: Tensor
    norm_gain: Tensor
    vocabulary: Callable[[], Vocabulary] | None = None

    def bilinear_factors(self) -> tuple[Tensor, Tensor]:
        """Thin factors [W_Q b_Q] and [W_K b_K] of every homogeneous form M~ = [W_Q b_Q]^T [W_K b_K].

        Returns: two tensors (weight_layer, head, channel, width + 1); scores are x~ M~ x~^T / sqrt(channel) with
        x~ = (x, 1). Rank at most `channel`, so never multiply them out to width x width.
        """
        query = torch.cat([self.query, self.query_bias[..., None]], dim=-1)
        key = torch.cat([self.key, self.key_bias[..., None]], dim=-1)
        return query, key

    def of_layer(self, index: int) -> HeadWeights:
        """One of the checkpoint's layers alone, its axis kept."""
        parts: dict[str, Any] = {name: part for name, part in vars(self).items() if isinstance(part, Tensor)}
        return replace(self, **{name: part[index : index + 1] for name, part in parts.items()})


def _array(tensor: Tensor) -> NDArray[Any]:
    """A NumPy view where NumPy knows the type (it has no bfloat16)."""
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy()


class ForwardRecord:
    """One forward pass over texts of one token count. Every tensor starts with a `batch` axis; there is no padding.

    `record.attention` stacks the layers on first read; `record.layer("attention", 3)` costs nothing. Reading what was
    not recorded raises NotRecordedError. Axis names: `AXES`.
    """

    def __init__(self, shape: ModelShape, texts: Sequence[TokenizedText], layers: Mapping[str, Sequence[Tensor]]):
        self.shape = shape
        self.texts = tuple(texts)
        self._layers = dict(layers)
        self._stacked: dict[str, Tensor] = {}

    @property
    def recorded(self) -> frozenset[str]:
        """Names of the tensors that this record holds."""
        return frozenset(self._layers)

    def layer(self, name: str, index: int) -> Tensor:
        """One layer (or depth) of a tensor, without its `layer` axis: a reference, not a copy."""
        return self._references(name)[index]

    def of_text(self, name: str, index: int, layers: Sequence[int] | None = None) -> NDArray[np.float64]:
        """One text of the batch in float64, the chosen layers (or depths) stacked first, without a batch axis.

        Statistics are taken text by text from this: equal shapes, equal sums, whatever the batch was.
        """
        references = self._references(name)
        chosen = range(len(references)) if layers is None else layers
        return np.stack([_array(references[layer][index]) for layer in chosen], dtype=np.float64)

    def of_layer(self, name: str, index: int) -> NDArray[Any]:
        """One layer (or depth) of a tensor for NumPy, without its `layer` axis: a view where NumPy knows the type."""
        return _array(self.layer(name, index))

    def of_tokens(
        self, name: str, texts: NDArray[np.intp], positions: NDArray[np.intp], layers: Sequence[int]
    ) -> NDArray[Any]:
        """Vectors of some tokens, each the one at a position of a text of the batch: (token, layer, width).

        For tensors whose layers are (text, token, width), as they were recorded.
        """
        return np.stack([self.of_layer(name, layer)[texts, positions] for layer in layers], axis=1)

    def select(self, texts: Sequence[int]) -> Self:
        """The record of some texts of the batch, by their indices."""
        layers = {name: [tensor[list(texts)] for tensor in tensors] for name, tensors in self._layers.items()}
        return type(self)(self.shape, [self.texts[index] for index in texts], layers)

    def __getattr__(self, name: str) -> Tensor:
        if name not in AXES:
            raise AttributeError(f"ForwardRecord has no {name!r}; it can record {', '.join(AXES)}")
        if name not in self._stacked:
            self._stacked[name] = torch.stack(tuple(self._references(name)), dim=1)
        return self._stacked[name]

    def _references(self, name: str) -> Sequence[Tensor]:
        if name not in self._layers:
            held = ", ".join(sorted(self._layers)) or "nothing"
            raise NotRecordedError(f"{name!r} was not recorded: list it in `needs` (recorded: {held})")
        return self._layers[name]
