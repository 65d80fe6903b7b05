"""The supported families: where each keeps its blocks, its attention weights and its normalisations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from analyses.kit.block import Activation, Affine, Norm
from analyses.kit.record import HeadWeights, ModelShape, Vocabulary
from bertgeo_cli.errors import UsageError


def _encoder_blocks(model: nn.Module) -> list[nn.Module]:
    return list(model.get_submodule("encoder.layer").children())


def _distilbert_blocks(model: nn.Module) -> list[nn.Module]:
    return list(model.get_submodule("transformer.layer").children())


def _albert_blocks(model: nn.Module) -> list[nn.Module]:
    config: Any = model.config
    groups = [list(group.get_submodule("albert_layers").children()) for group in _albert_groups(model)]
    steps_per_group = config.num_hidden_layers / config.num_hidden_groups
    return [block for step in range(config.num_hidden_layers) for block in groups[int(step / steps_per_group)]]


def _albert_groups(model: nn.Module) -> list[nn.Module]:
    return list(model.get_submodule("encoder.albert_layer_groups").children())


@dataclass(frozen=True)
class Family:
    """One row of the adapter table.

    `blocks` lists a model's blocks in the order in which one pass runs them; a shared block stands once a run. The
    dotted names from `query` to `second_norm` hold inside a block: `attention_output` is W_O, `mlp_output` the MLP's
    second matrix, `first_norm` and `second_norm` the LayerNorms after attention and MLP. In the model, the names from
    `embedding` to `task_embedding` are the tables whose rows add up to a token, `embedding_norm` is the LayerNorm of
    that sum, and `embedding_projection` takes it to the model's width where it may be narrower.
    """

    model_type: str
    model_class: str
    blocks: Callable[[nn.Module], list[nn.Module]] = _encoder_blocks
    query: str = "attention.self.query"
    key: str = "attention.self.key"
    value: str = "attention.self.value"
    attention_output: str = "attention.output.dense"
    first_norm: str = "attention.output.LayerNorm"
    mlp_input: str = "intermediate.dense"
    mlp_output: str = "output.dense"
    second_norm: str = "output.LayerNorm"
    embedding: str = "embeddings.word_embeddings"
    position_embedding: str = "embeddings.position_embeddings"
    segment_embedding: str | None = "embeddings.token_type_embeddings"
    task_embedding: str | None = None
    embedding_norm: str = "embeddings.LayerNorm"
    embedding_projection: str | None = None
    pooler: bool = True
    segments: bool = True
    positions_after_padding: bool = False

    def takes_segments(self, config: Any) -> bool:
        """Whether segment ids (token_type_ids) mean anything to a model with this configuration."""
        return self.segments and getattr(config, "type_vocab_size", 0) > 1

    def first_position(self, config: Any) -> int:
        """The position of a text's first token: RoBERTa counts from the padding id + 1."""
        return int(config.pad_token_id) + 1 if self.positions_after_padding else 0

    def usable_positions(self, config: Any) -> int:
        """Tokens that fit, special ones included."""
        return int(config.max_position_embeddings) - self.first_position(config)

    def positions(self, model: nn.Module, ids: Sequence[int]) -> Sequence[int]:
        """The position of each token of one text, as the family counts them: RoBERTa skips padding ids in a text."""
        if not self.positions_after_padding:
            return range(len(ids))
        embeddings: Any = model.get_submodule("embeddings")
        counted = embeddings.create_position_ids_from_input_ids(torch.tensor([ids]), embeddings.padding_idx)
        return [int(position) for position in counted[0]]

    def embedding_tables(self, model: nn.Module) -> dict[str, nn.Module]:
        """The tables whose rows this model adds up to a token, by what they embed."""
        named = {
            "word": self.embedding,
            "position": self.position_embedding,
            "segment": self.segment_embedding,
            "task": self.task_embedding,
        }
        return {what: held for what, path in named.items() if (held := held_at(model, path)) is not None}


BERT = Family("bert", "BertModel")
ROBERTA = Family("roberta", "RobertaModel", positions_after_padding=True)

FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        BERT,
        ROBERTA,
        replace(ROBERTA, model_type="xlm-roberta", model_class="XLMRobertaModel"),
        replace(ROBERTA, model_type="camembert", model_class="CamembertModel"),
        replace(
            BERT,
            model_type="electra",
            model_class="ElectraModel",
            embedding_projection="embeddings_project",
            pooler=False,
        ),
        Family(
            "distilbert",
            "DistilBertModel",
            blocks=_distilbert_blocks,
            query="attention.q_lin",
            key="attention.k_lin",
            value="attention.v_lin",
            attention_output="attention.out_lin",
            first_norm="sa_layer_norm",
            mlp_input="ffn.lin1",
            mlp_output="ffn.lin2",
            second_norm="output_layer_norm",
            segment_embedding=None,
            pooler=False,
            segments=False,
        ),
        Family(
            "albert",
            "AlbertModel",
            blocks=_albert_blocks,
            query="attention.query",
            key="attention.key",
            value="attention.value",
            attention_output="attention.dense",
            first_norm="attention.LayerNorm",
            mlp_input="ffn",
            mlp_output="ffn_output",
            second_norm="full_layer_layer_norm",
            embedding_projection="encoder.embedding_hidden_mapping_in",
        ),
        replace(BERT, model_type="ernie", model_class="ErnieModel", task_embedding="embeddings.task_type_embeddings"),
    )
}
"""Every supported family by the `model_type` of its configuration."""


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a configuration (the contents of a config.json).

    Raises: UsageError, naming what was found, for any configuration without one bilinear form a head.
    """
    found = config.get("model_type")
    if str(found) not in FAMILIES:
        named = f"model type {found!r}" if found else "a configuration without model_type"
        raise _unsupported(named)
    for decoder in ("is_decoder", "add_cross_attention", "is_encoder_decoder"):
        if config.get(decoder):
            raise _unsupported(f"a {found} configuration with {decoder}=true (a decoder, not an encoder)")
    positions = config.get("position_embedding_type") or "absolute"
    if positions != "absolute":
        raise _unsupported(f"a {found} configuration with position_embedding_type={positions!r} (absolute only)")
    return FAMILIES[str(found)]


def _unsupported(found: str) -> UsageError:
    supported = ", ".join(FAMILIES)
    return UsageError(f"bertgeo cannot read {found}", f"use an encoder of one of these families: {supported}")


def shape_of(model: nn.Module) -> ModelShape:
    """The sizes of a loaded base encoder; `weight_layer` maps each run block to the index of its weights."""
    config: Any = model.config
    family = FAMILIES[config.model_type]
    run = family.blocks(model)
    held = list(dict.fromkeys(run))
    inner, width = attrgetter(family.query)(run[0]).weight.shape
    heads = config.num_attention_heads
    return ModelShape(config.model_type, heads, width, inner // heads, tuple(held.index(block) for block in run))


def head_weights(model: nn.Module) -> HeadWeights:
    """The attention weights of a loaded base encoder, cut into heads; shared blocks stand once. float64, on the CPU.

    Head h owns rows of W_Q, W_K, W_V and columns of W_O, because a torch Linear stores (out, in).
    """
    config: Any = model.config
    family = FAMILIES[config.model_type]
    held = list(dict.fromkeys(family.blocks(model)))
    heads = config.num_attention_heads
    query, query_bias = _rows(held, family.query, heads)
    key, key_bias = _rows(held, family.key, heads)
    value, value_bias = _rows(held, family.value, heads)
    output, output_bias = _stacked(held, family.attention_output)
    columns = output.reshape(*output.shape[:2], heads, -1).movedim(2, 1).contiguous()
    gain = torch.stack([attrgetter(family.first_norm)(block).weight.detach().cpu().double() for block in held])
    return HeadWeights(query, key, value, columns, query_bias, key_bias, value_bias, output_bias, gain)


def vocabulary(model: nn.Module, tokens: Sequence[str | None]) -> Vocabulary:
    """The word embedding of a loaded base encoder; `tokens` names as many of its first rows as the tokenizer knows."""
    config: Any = model.config
    family = FAMILIES[config.model_type]
    vectors: Tensor = attrgetter(family.embedding)(model).weight
    named = (*tokens, *[None] * len(vectors))[: len(vectors)]
    projection: Any = held_at(model, family.embedding_projection)
    return Vocabulary(named, vectors, None if projection is None else projection.weight)


def held_at(model: nn.Module, path: str | None) -> nn.Module | None:
    """The module of that name, if the model has one.

    Asked of the model and not of its sizes: ELECTRA projects its embedding only where it must, ALBERT always.
    """
    return dict(model.named_modules()).get(str(path))


def affine_of(module: Any, rows: slice = slice(None)) -> Affine:
    """A Linear, or some of its outputs; float64, on the CPU."""
    # The CPU first: Apple's devices know no float64.
    weight, bias = (tensor.detach().cpu().double() for tensor in (module.weight, module.bias))
    return Affine(weight[rows], bias[rows])


def norm_of(module: Any) -> Norm:
    """A LayerNorm; float64, on the CPU."""
    gain, bias = (tensor.detach().cpu().double() for tensor in (module.weight, module.bias))
    return Norm(gain, bias, module.eps)


def activation_of(config: Any) -> Activation:
    """The MLP's activation that a configuration names."""
    from transformers.activations import ACT2FN  # late, as in models: a wrong name is to be answered at once

    name = getattr(config, "hidden_act", None) or config.activation
    return Activation(str(name), ACT2FN[name])


def position_vectors(model: nn.Module) -> Tensor:
    """The position embeddings of a loaded base encoder, a row for every place that a token can have, float64 (CPU).

    As wide as the word embedding: in ELECTRA and ALBERT narrower than the model.
    """
    config: Any = model.config
    family = FAMILIES[config.model_type]
    rows: Tensor = attrgetter(family.position_embedding)(model).weight
    return rows.detach().cpu().double()[family.first_position(config) :]


def _rows(blocks: list[nn.Module], name: str, heads: int) -> tuple[Tensor, Tensor]:
    weight, bias = _stacked(blocks, name)
    layers, _, width = weight.shape
    return weight.reshape(layers, heads, -1, width), bias.reshape(layers, heads, -1)


def _stacked(blocks: list[nn.Module], name: str) -> tuple[Tensor, Tensor]:
    """Weights (weight_layer, out, in) and biases (weight_layer, out) of one Linear in every block."""
    linears = [affine_of(attrgetter(name)(block)) for block in blocks]
    return torch.stack([linear.weight for linear in linears]), torch.stack([linear.bias for linear in linears])
