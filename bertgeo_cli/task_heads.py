"""The task head of a checkpoint: what turns the encoder's last hidden states into logits.

In every family a head is one chain, Linear, activation, LayerNorm (masked-LM heads only), Linear. Its modules are
those of transformers' own class; its tensors are read from the checkpoint as strictly as the encoder's, because
transformers fills with random numbers what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from .errors import UntrustedModelError, UsageError
from .models import LoadedModel, load_chosen
from .options import ModelOptions

PARTS = ("weight", "bias")
"""The tensors of each module of a head."""


@dataclass(frozen=True)
class HeadNames:
    """Where one family keeps a head: dotted names, those inside the encoder without its prefix.

    The activation is a fixed one, or (None) what the configuration's `hidden_act` or `activation` names. `bias` is a
    second name under which a checkpoint may keep the bias of `output`.
    """

    model_class: str
    dense: str
    output: str
    activation: str | None = None
    norm: str | None = None
    bias: str | None = None


@dataclass(frozen=True)
class Kind:
    """A kind of head: its name, the table of families, and the ends of the classes whose checkpoints hold one."""

    name: str
    names: Mapping[str, HeadNames]
    saved_as: tuple[str, ...]


_BERT_LM = HeadNames(
    "BertForMaskedLM",
    dense="cls.predictions.transform.dense",
    norm="cls.predictions.transform.LayerNorm",
    output="cls.predictions.decoder",
    bias="cls.predictions.bias",
)
_ROBERTA_LM = HeadNames(
    "RobertaForMaskedLM",
    dense="lm_head.dense",
    activation="gelu",
    norm="lm_head.layer_norm",
    output="lm_head.decoder",
    bias="lm_head.bias",
)
MASKED_LM = Kind(
    "masked-LM",
    {
        "bert": _BERT_LM,
        "ernie": replace(_BERT_LM, model_class="ErnieForMaskedLM"),
        "roberta": _ROBERTA_LM,
        "xlm-roberta": replace(_ROBERTA_LM, model_class="XLMRobertaForMaskedLM"),
        "camembert": replace(_ROBERTA_LM, model_class="CamembertForMaskedLM"),
        "electra": HeadNames(
            "ElectraForMaskedLM",
            dense="generator_predictions.dense",
            activation="gelu",
            norm="generator_predictions.LayerNorm",
            output="generator_lm_head",
        ),
        "distilbert": HeadNames(
            "DistilBertForMaskedLM", dense="vocab_transform", norm="vocab_layer_norm", output="vocab_projector"
        ),
        "albert": HeadNames(
            "AlbertForMaskedLM",
            dense="predictions.dense",
            norm="predictions.LayerNorm",
            output="predictions.decoder",
            bias="predictions.bias",
        ),
    },
    saved_as=("ForMaskedLM", "ForPreTraining"),
)

_POOLED = HeadNames("BertForSequenceClassification", dense="pooler.dense", activation="tanh", output="classifier")
_ON_CLS = HeadNames(
    "RobertaForSequenceClassification", dense="classifier.dense", activation="tanh", output="classifier.out_proj"
)
CLASSIFICATION = Kind(
    "sequence-classification",
    {
        "bert": _POOLED,
        "ernie": replace(_POOLED, model_class="ErnieForSequenceClassification"),
        "albert": replace(_POOLED, model_class="AlbertForSequenceClassification", dense="pooler"),
        "roberta": _ON_CLS,
        "xlm-roberta": replace(_ON_CLS, model_class="XLMRobertaForSequenceClassification"),
        "camembert": replace(_ON_CLS, model_class="CamembertForSequenceClassification"),
        "electra": replace(_ON_CLS, model_class="ElectraForSequenceClassification", activation="gelu"),
        "distilbert": replace(
            _POOLED, model_class="DistilBertForSequenceClassification", dense="pre_classifier", activation="relu"
        ),
    },
    saved_as=("ForSequenceClassification",),
)

OTHER_PARTS: Mapping[str, str] = {
    "pooler": "a pooler",
    "cls.predictions": "a masked-LM head",
    "lm_head": "a masked-LM head",
    "generator_": "a masked-LM head",
    "vocab_": "a masked-LM head",
    "predictions": "a masked-LM head",
    "cls.seq_relationship": "a next-sentence head",
    "sop_classifier": "a sentence-order head",
    "discriminator_predictions": "a head that tells replaced tokens",
    "qa_outputs": "a question-answering head",
    "pre_classifier": "a classifier",
    "classifier": "a classifier",
}
"""What tensors beside the encoder belong to, by the beginning of their names."""


@dataclass(frozen=True)
class TaskHead:
    """The chain from hidden states (..., width) to logits (..., vocabulary or label).

    `tied`: `output` multiplies by the word embedding itself. `dense_name` and `output_name` are what the checkpoint
    calls the two matrices.
    """

    dense: nn.Linear
    activation: str
    activate: Callable[[Tensor], Tensor]
    norm: nn.LayerNorm | None
    output: nn.Linear
    tied: bool
    dense_name: str
    output_name: str

    def stages(self, hidden: Tensor) -> list[Tensor]:
        """What each module before `output` gives, in its order: dense, activation and (masked-LM) LayerNorm."""
        with torch.inference_mode():
            found = [self.dense(hidden)]
            found.append(self.activate(found[-1]))
            return found if self.norm is None else [*found, self.norm(found[-1])]

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits in the model's own arithmetic."""
        with torch.inference_mode():
            return self.output(self.stages(hidden)[-1])


@dataclass(frozen=True)
class LoadedWithHead(LoadedModel):
    """A checked encoder with a head of the same checkpoint."""

    head: TaskHead


def load_with_head(chosen: ModelOptions, kind: Kind) -> LoadedWithHead:
    """The model that the options name, with its head of that kind."""
    return with_head(load_chosen(chosen), kind)


def with_head(loaded: LoadedModel, kind: Kind) -> LoadedWithHead:
    """The encoder with its head of that kind, each tensor from the checkpoint.

    Raises: UsageError, naming what there is, for a checkpoint without such a head; UntrustedModelError for a head of
    which a tensor is missing, has another shape, or is not what config.json says.
    """
    return LoadedWithHead(**vars(loaded), head=_Reader(loaded, kind).head())


class _Reader:
    """Builds a head of a loaded encoder's checkpoint."""

    def __init__(self, loaded: LoadedModel, kind: Kind):
        self.loaded, self.kind = loaded, kind
        self.config: Any = loaded.model.config
        self.names = kind.names[loaded.family.model_type]
        self.tensors = dict(loaded.unused())

    def head(self) -> TaskHead:
        from transformers.activations import ACT2FN

        self._refuse_another_kind()
        self._refuse_unknown_parts()
        names = self.names
        activation = names.activation or getattr(self.config, "hidden_act", None) or self.config.activation
        weight, bias = self._output_weight(), self._output_bias()
        return TaskHead(
            dense=self._module(names.dense),
            activation=activation,
            activate=ACT2FN[activation],
            norm=None if names.norm is None else self._module(names.norm),
            output=self._module(names.output, {"weight": weight, "bias": bias}),
            tied=weight is self._embedding,
            dense_name=names.dense,
            output_name=names.output,
        )

    def _refuse_another_kind(self) -> None:
        saved = [name for name in self.config.architectures or () if "For" in name]
        other = bool(saved) and not any(name.endswith(self.kind.saved_as) for name in saved)
        # The pooler is no sign of a head: every BertModel has one.
        own = tuple(f"{name}." for name in (self.names.output, self.names.dense) if not name.startswith("pooler"))
        if other or not any(name.startswith(own) for name in self.tensors):
            raise UsageError(
                f"model {self.loaded.name} has no {self.kind.name} head: beside the encoder its checkpoint holds "
                f"{_parts(self.tensors)}{_saved_as(self.config.architectures)}",
                f"Choose by --model a checkpoint that was saved as {self.names.model_class}.",
            )

    @cached_property
    def _skeleton(self) -> Any:
        """transformers' own class, without memory for its tensors."""
        import transformers

        with torch.device("meta"):
            return getattr(transformers, self.names.model_class)(self.config)

    @property
    def _embedding(self) -> Tensor:
        embedding: Any = self.loaded.model.get_submodule(self.loaded.family.embedding)
        return embedding.weight

    def _refuse_unknown_parts(self) -> None:
        """A head that transformers builds of more than the chain would be computed wrongly."""
        inside, names = f"{self._skeleton.base_model_prefix}.", self.names
        chain = {f"{name}.{part}" for name in (names.dense, names.norm, names.output) for part in PARTS}
        encoder = {name for name in self._skeleton.state_dict() if name.startswith(inside)}
        unknown = sorted(self._skeleton.state_dict().keys() - encoder - chain - {names.bias})
        if unknown:
            raise self._untrusted(
                f"transformers' {names.model_class} has parts that bertgeo does not know: {', '.join(unknown)}",
                "Use the version of transformers that constraints.txt names.",
            )

    def _stored(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise self._untrusted(
                f"its {self.kind.name} head lacks {name}",
                "Use a complete checkpoint; bertgeo never fills a head with random numbers.",
            )
        return self.tensors[name]

    def _output_weight(self) -> Tensor:
        """The output's own matrix, or the word embedding where config.json ties the two."""
        name = f"{self.names.output}.weight"
        if self.kind is not MASKED_LM or not self.config.tie_word_embeddings:
            return self._stored(name)
        embedding = self._embedding
        stored = self.tensors.get(name)
        if stored is not None and not torch.equal(stored.to(embedding), embedding):
            raise self._untrusted(
                f"config.json ties {name} to the word embedding, and the checkpoint holds another",
                "Set tie_word_embeddings to false in config.json if both are meant, or bring them together.",
            )
        return embedding

    def _output_bias(self) -> Tensor:
        """The bias under either of its names. Raises UntrustedModelError where config.json ties two that differ."""
        own, other = f"{self.names.output}.bias", self.names.bias
        found = [self.tensors[name].double() for name in (own, other) if name in self.tensors]
        # Untied, transformers keeps both and computes with the output's own.
        if len(found) == 2 and self.config.tie_word_embeddings and not torch.equal(*found):
            raise self._untrusted(f"its {own} and {other} differ, which are one bias", "Bring them together.")
        return self.tensors[other] if own not in self.tensors and other in self.tensors else self._stored(own)

    def _module(self, name: str, state: Mapping[str, Tensor] | None = None) -> Any:
        """transformers' module of that name with the checkpoint's tensors, or the given ones."""
        # The pooler is a part of the encoder there.
        path = f"{self._skeleton.base_model_prefix}.{name}" if name.startswith("pooler") else name
        module: nn.Module = self._skeleton.get_submodule(path)
        state = {part: self._stored(f"{name}.{part}") for part in PARTS} if state is None else state
        shapes = module.state_dict()
        fitting = {part: self._fitting(f"{name}.{part}", state[part], shapes[part].shape) for part in PARTS}
        module.load_state_dict(fitting, assign=True)
        return module.eval().requires_grad_(False)

    def _fitting(self, name: str, tensor: Tensor, shape: torch.Size) -> Tensor:
        """The tensor in the encoder's arithmetic. Raises UntrustedModelError for what is not as it should be."""
        if tensor.shape != shape:
            what = f"{name} has shape {tuple(tensor.shape)}, config.json asks for {tuple(shape)}"
            raise self._untrusted(what, "Bring config.json and weights together.")
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise self._untrusted(f"{name} is stored as {tensor.dtype}", "Use unquantised weights.")
        fitting = tensor.to(self._embedding)
        if not torch.isfinite(fitting).all():  # float16 overflows at 65,504
            raise self._untrusted(f"NaN or infinity in {name}", "Use an intact checkpoint, or float32.")
        return fitting

    def _untrusted(self, what: str, hint: str) -> UntrustedModelError:
        return UntrustedModelError(f"model {self.loaded.name}: {what}", hint)


def _parts(tensors: Mapping[str, Tensor]) -> str:
    """What a checkpoint holds beside the encoder."""
    weights = [name for name in tensors if not name.endswith("position_ids")]
    found = {next((what for start, what in OTHER_PARTS.items() if name.startswith(start)), name) for name in weights}
    return " and ".join(sorted(found)) or "nothing"


def _saved_as(architectures: list[str] | None) -> str:
    return f" (saved as {', '.join(architectures)})" if architectures else ""
