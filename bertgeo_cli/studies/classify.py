"""How a sequence-classification checkpoint comes from a [CLS] vector to its labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from analyses.kit.analysis import setting
from analyses.kit.classification import Classified, Stage, result_of
from analyses.kit.result import Result
from bertgeo_cli.intake import Intake
from bertgeo_cli.models import LoadedModel
from bertgeo_cli.options import ModelOptions, TextInput
from bertgeo_cli.recording import record
from bertgeo_cli.study import Study
from bertgeo_cli.task_heads import CLASSIFICATION, LoadedWithHead, TaskHead, load_with_head


@dataclass(frozen=True)
class Classify(Study):
    """How a sequence-classification checkpoint comes from the [CLS] vector to labels, each logit as a sum.

    The checkpoint's own head reads the last hidden state h of the first token: a = W h + b, g = f(a), z = W g + b. In
    BERT, ERNIE and ALBERT the first two are the pooler with f = tanh; RoBERTa, XLM-R and CamemBERT have tanh, ELECTRA
    gelu and DistilBERT relu. Then softmax, or sigmoid for several labels at once, or neither for a regression, as
    config.json says. Each logit is the sum of its contributions w_i g_i: the largest are listed, with the remainder of
    all others and the bias; likewise the difference of the first two labels. Sums are taken in float64.

    Example: bertgeo classify "The river bank was lovely." --model textattack/bert-base-uncased-SST-2
    """

    reads: ClassVar[type[Any]] = TextInput

    top: int = setting(10, "Largest contributions that are listed for each label.", least=1)

    def load(self, chosen: ModelOptions) -> LoadedModel:
        return load_with_head(chosen, CLASSIFICATION)

    def answer(self, loaded: LoadedModel, texts: Intake) -> Result:
        assert isinstance(loaded, LoadedWithHead), "`load` gives the head"
        text = texts.single()
        recorded = record(loaded, [text], needs=frozenset({"hidden_states"}), backend=texts.how.backend)
        cls = recorded.layer("hidden_states", loaded.shape.layers)[0, 0]
        return result_of(_classified(loaded, text.tokens[0], cls, self.top))


def _classified(loaded: LoadedWithHead, token: str, cls: Tensor, top: int) -> Classified:
    head, config = loaded.head, loaded.model.config
    return Classified(
        stages=_stages(head, token, cls),
        weight=_array(head.output.weight),
        bias=_array(head.output.bias),
        logits_of_pass=_array(head.logits(cls)),
        output=head.output_name,
        labels=_labels(config, head.output.out_features),
        problem=_problem(config, head.output.out_features),
        top=top,
    )


def _stages(head: TaskHead, token: str, cls: Tensor) -> list[Stage]:
    dense, activated = head.stages(cls)
    return [
        Stage("h", "encoder", f"h = last hidden state of {token}, token 0", _array(cls)),
        Stage("a", head.dense_name, "a = W h + b", _array(dense)),
        Stage("g", head.activation, f"g = {head.activation}(a)", _array(activated)),
    ]


def _labels(config: Any, count: int) -> list[str]:
    named = config.id2label or {}
    return [str(named.get(label, f"LABEL_{label}")) for label in range(count)]


def _problem(config: Any, labels: int) -> str:
    """What config.json says; where it says nothing, what transformers takes it for."""
    return config.problem_type or ("regression" if labels == 1 else "single_label_classification")


def _array(tensor: Tensor) -> NDArray[np.float64]:
    return tensor.detach().cpu().double().numpy()
