"""One token's way through one head and one block, step by step, and two examples small enough for paper."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from analyses.kit.analysis import Selection, SettingsError, setting
from analyses.kit.record import ForwardRecord, ModelShape, TokenizedText
from analyses.kit.result import Result
from analyses.kit.trace import BlockWeights, EmbeddingWeights, Seen, traced
from analyses.kit.trace_tables import TokenTrace, told
from analyses.kit.worked_examples import attention_example, classifier_example
from bertgeo_cli.families import activation_of, affine_of, held_at, norm_of
from bertgeo_cli.intake import Intake
from bertgeo_cli.models import LoadedModel
from bertgeo_cli.options import TextInput
from bertgeo_cli.recording import Calls, record, watching
from bertgeo_cli.study import Study

OF_THE_BLOCK = {
    "o": "attention_projection",
    "y": "attention_sum",
    "n": "attention_norm",
    "f": "mlp_output",
    "t": "mlp_sum",
    "x'": "layer_outputs",
}
OF_THE_HEAD = {"q": "q", "k": "k", "v": "v", "s": "scores", "a": "attention", "z": "head_outputs"}
"""Symbols and the recorded tensors that they stand for."""
NEEDS = frozenset({"hidden_states", *OF_THE_BLOCK.values(), *OF_THE_HEAD.values()})


@dataclass(frozen=True)
class Trace(Study):
    """One token step by step through one head and one block, with this model's own numbers.

    The nine steps: (1) tokens and ids; (2) the rows of word, position and segment that add up to the token, and their
    LayerNorm; (3) q, k and v; (4) raw scores q . k_j, and the same from the bilinear form x~ M~ x~_j^T with
    x~ = (x, 1), M~ = [W_Q b_Q]^T [W_K b_K]; (5) scores over sqrt(d_k) and their softmax, the weights a; (6) weighted
    values z = sum_j a_j v_j; (7) the z of all heads side by side, times W_O; (8) residual and LayerNorm; (9) the FFN
    with its activation, residual and LayerNorm (Vaswani et al. 2017, Devlin et al. 2019). Step 2 makes the first
    layer's input; steps 3 to 9 are those of --layer, whose input is the recorded hidden state. Every value is computed
    again in float64 from the raw weights and the recorded input of its step; the error is the largest deviation from
    what the pass recorded, relative where that is above 1.

    --example needs no model: three tokens x = (1,0,1,0), (0,1,0,1), (1,1,0,0) with W_Q = W_K = W_V = I, not scaled and
    scaled. --example classify takes the [CLS] vector h = (0.5, -0.2, 0.1, 0.8) to logits W h + b and their softmax.

    Example: bertgeo trace "The river bank." --layer 3 --head 5 --query river
    """

    reads: ClassVar[type[Any]] = TextInput
    optional_values: ClassVar[Mapping[str, str]] = {"example": "attention"}

    layer: int = setting(0, "The block, from 0; -1 is the last.")
    head: int = setting(0, "The head, from 0; -1 is the last.")
    query: str | None = setting(
        None,
        "The token that is followed: its text, or a number, its position from 0. Default: the first not special.",
    )
    full: bool = setting(False, "Write whole vectors, of all tokens where a step reads them, to trace-values.csv.")
    example: Literal["attention", "classify"] | None = setting(
        None, "A worked example instead of a text; --example alone is attention."
    )
    weights: str | None = setting(
        None, "W of --example classify, rows by ; and numbers by a comma. Default: 1,0,0,1;0,1,1,0 (two classes)."
    )
    bias: str | None = setting(None, "b of --example classify, a number a class, by commas. Default: zeros.")

    def without_model(self) -> Result | None:
        """A worked example, where one is asked for."""
        self._refuse_unread()
        if self.example == "attention":
            return attention_example()
        return classifier_example(self.weights, self.bias) if self.example else None

    def _refuse_unread(self) -> None:
        """Settings that the others leave nothing to do."""
        given = [name for name in ("layer", "head", "query", "full") if getattr(self, name) != getattr(Trace, name)]
        if self.example and given:
            raise SettingsError(f"--{given[0]} was given, and --example", "Leave one of them out.")
        given = [name for name in ("weights", "bias") if getattr(self, name) is not None]
        if given and self.example != "classify":
            raise SettingsError(f"--{given[0]} belongs to --example classify", "Give that, or leave it out.")

    def check(self, loaded: LoadedModel) -> None:
        """Raise SettingsError for a layer or a head that the model lacks."""
        self._place(loaded.shape)

    def answer(self, loaded: LoadedModel, texts: Intake) -> Result:
        """The nine steps of the one text. Raises SettingsError for a token that it lacks, or has several times."""
        text = texts.single()
        query, (layer, head) = chosen_token(self.query, text), self._place(loaded.shape)
        block, ids = loaded.family.blocks(loaded.model)[layer], _ids(loaded, text)
        with watching(_watched(loaded, block)) as calls:
            recorded = record(loaded, [text], needs=NEEDS, backend=texts.how.backend)
        seen = Seen(_of_record(recorded, layer, head) | _of_calls(loaded, calls, layer), query)
        weights = _block_weights(loaded, block, head)
        quantities = traced(_embedding_weights(loaded, ids), weights, seen, layer)
        activation, positions = weights.activation.name, ids["position"]
        return told(TokenTrace(text, positions, query, layer, head, activation, quantities), full=self.full)

    def _place(self, shape: ModelShape) -> tuple[int, int]:
        """Layer and head, from 0. Raises SettingsError for those that the model lacks."""
        layer = Selection(str(self.layer)).resolve(shape.layers, "layer")
        return layer[0], Selection(str(self.head)).resolve(shape.heads, "head")[0]


def chosen_token(query: str | None, text: TokenizedText) -> int:
    """The position of a token by its text, its piece or its position. Raises SettingsError unless it is one token."""
    if query is None:
        return next((at for at, special in enumerate(text.special) if not special), 0)
    if re.fullmatch("-?[0-9]+", query):
        if not -len(text) <= int(query) < len(text):
            raise SettingsError(f"--query {query}: the text has {len(text)} tokens", _choices(text))
        return int(query) % len(text)
    found = [at for at in range(len(text)) if query in (text.labels[at], text.tokens[at])]
    if not found:
        raise SettingsError(f"the text has no token {query!r}", _choices(text))
    if len(found) > 1:
        places = ", ".join(map(str, found))
        raise SettingsError(f"the token {query!r} stands at positions {places}", "Give --query one of these numbers.")
    return found[0]


def _choices(text: TokenizedText) -> str:
    some = ", ".join(text.labels[:12])
    return f"Choose a position from 0 to {len(text) - 1}, or one of: {some}{' ...' * (len(text) > 12)}."


def _ids(loaded: LoadedModel, text: TokenizedText) -> dict[str, tuple[int, ...]]:
    """The row that each token takes of each table of the embedding."""
    nothing = (0,) * len(text)
    ids = {
        "word": text.ids,
        "position": tuple(loaded.family.positions(loaded.model, text.ids)),
        "segment": text.segment if loaded.segments else nothing,
        "task": nothing,
    }
    return {what: ids[what] for what in loaded.family.embedding_tables(loaded.model)}


def _embedding_weights(loaded: LoadedModel, ids: Mapping[str, tuple[int, ...]]) -> EmbeddingWeights:
    family, model = loaded.family, loaded.model
    tables: dict[str, Any] = family.embedding_tables(model)
    rows = {what: table.weight.detach()[list(ids[what])].cpu().double() for what, table in tables.items()}
    sizes = {what: tuple(table.weight.shape) for what, table in tables.items()}
    projection = held_at(model, family.embedding_projection)
    norm = norm_of(model.get_submodule(family.embedding_norm))
    return EmbeddingWeights(sizes, ids, rows, norm, None if projection is None else affine_of(projection))


def _block_weights(loaded: LoadedModel, block: nn.Module, head: int) -> BlockWeights:
    family, channels = loaded.family, loaded.shape.head_width
    rows = slice(head * channels, (head + 1) * channels)
    query, key, value = (
        affine_of(block.get_submodule(path), rows) for path in (family.query, family.key, family.value)
    )
    return BlockWeights(
        query,
        key,
        value,
        output=affine_of(block.get_submodule(family.attention_output)),
        first_norm=norm_of(block.get_submodule(family.first_norm)),
        widen=affine_of(block.get_submodule(family.mlp_input)),
        activation=activation_of(loaded.model.config),
        narrow=affine_of(block.get_submodule(family.mlp_output)),
        second_norm=norm_of(block.get_submodule(family.second_norm)),
    )


def _watched(loaded: LoadedModel, block: nn.Module) -> dict[str, nn.Module]:
    """The modules whose calls show what no record holds: the embedding's parts, what enters W_O, the FFN's inside."""
    family, model = loaded.family, loaded.model
    inside = (family.attention_output, family.mlp_input, family.mlp_output)
    paths = {path: block.get_submodule(path) for path in inside}
    return family.embedding_tables(model) | paths | {"norm": model.get_submodule(family.embedding_norm)}


def _of_calls(loaded: LoadedModel, calls: Calls, layer: int) -> dict[str, Tensor]:
    family, blocks = loaded.family, loaded.family.blocks(loaded.model)
    # A shared block is called once for each of its layers.
    call = sum(block is blocks[layer] for block in blocks[:layer])
    tables = family.embedding_tables(loaded.model)
    found = {what: calls[what][0][1] for what in tables} | {f"{what} id": calls[what][0][0] for what in tables}
    found |= {"e": calls["norm"][0][0], "l": calls["norm"][0][1]}
    found |= {"c": calls[family.attention_output][call][0]}
    found |= {"h": calls[family.mlp_input][call][1], "g": calls[family.mlp_output][call][0]}
    return {symbol: _plain(tensor[0]) for symbol, tensor in found.items()}


def _of_record(recorded: ForwardRecord, layer: int, head: int) -> dict[str, Tensor]:
    whole = {"x0": ("hidden_states", 0), "x": ("hidden_states", layer)}
    whole |= {symbol: (name, layer) for symbol, name in OF_THE_BLOCK.items()}
    found = {symbol: recorded.layer(name, at)[0] for symbol, (name, at) in whole.items()}
    found |= {symbol: recorded.layer(name, layer)[0, head] for symbol, name in OF_THE_HEAD.items()}
    found |= {"heads": recorded.layer("head_outputs", layer)[0].movedim(0, 1)}
    return {symbol: _plain(tensor) for symbol, tensor in found.items()}


def _plain(tensor: Tensor) -> Tensor:
    """In float64, on the CPU."""
    return tensor.detach().cpu().double()
