"""How well a masked-LM checkpoint predicts the tokens of a text or a corpus."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import Literal

import torch
from torch import Tensor

from analyses.kit.analysis import SettingsError, setting
from analyses.kit.masking import WAYS, Corruption, Masking, Probe
from analyses.kit.prediction import Leading, Scores, joined
from analyses.kit.prediction_tables import Predicted, Tested, corpus_result, given_result, text_result
from analyses.kit.record import TokenizedText
from analyses.kit.result import Result
from bertgeo_cli.corpus import packed
from bertgeo_cli.intake import Intake
from bertgeo_cli.models import LoadedModel
from bertgeo_cli.observation import Pass
from bertgeo_cli.options import InputOptions, ModelOptions
from bertgeo_cli.recording import records, threads
from bertgeo_cli.study import Study
from bertgeo_cli.task_heads import MASKED_LM, LoadedWithHead, load_with_head

ROWS = 32
"""Positions whose logits are held at a time: with BERT's vocabulary some 30 MB in all."""


@dataclass(frozen=True)
class Mlm(Study):
    """How well a masked-LM checkpoint predicts tokens: probabilities, cross-entropy, pseudo-perplexity.

    The checkpoint's own head reads the last hidden states of the recorded pass. Of each predicted token: p, its rank,
    the cross-entropy -ln p in nats and bits, which is KL(y || p) because the entropy of the one-hot y is 0; the
    gradient p - y by the logits; and the uncertainty, the entropy of the prediction in bits and over log2(vocabulary).
    --mask each masks every token one at a time: exp of the mean of -ln p is then the pseudo-perplexity (Salazar et al.
    2020), over a corpus per token. random draws tokens as BERT was trained (Devlin et al. 2019), by hash of seed and
    text; given predicts the [MASK]s that a text holds; none masks nothing, which is no pseudo-likelihood, for each
    token sees itself. Special tokens are read and never predicted.

    Example: bertgeo mlm "The fisherman sat down by the river [MASK]." --model bert-base-uncased
    """

    mask: Literal["auto", "each", "given", "random", "none"] = setting(
        "auto", "What is masked; auto is given where a text holds [MASK], which is then a special token, else each."
    )
    share: float = setting(0.15, "Share of the tokens that are not special that random draws; at least one.")
    corruption: Corruption = setting(
        "80-10-10", "Of the drawn: 80 % [MASK], 10 % another token, 10 % as they are; or mask them all."
    )
    top: int = setting(5, "Of a text: most probable tokens, and largest gradients, that are listed.", least=1)
    sample: int = setting(1000, "Of a corpus: texts whose own values are written (those of smallest hash).", least=0)
    seed: int = setting(0, "Seed of what is drawn, and of that sample.", least=0)

    def load(self, chosen: ModelOptions) -> LoadedModel:
        return load_with_head(chosen, MASKED_LM)

    def check(self, loaded: LoadedModel) -> None:
        if not 0 < self.share <= 1:
            raise SettingsError(f"--share {self.share:g} is no share", "Give a number above 0, up to 1.")
        if loaded.tokenizer.mask_token_id is None and self.mask != "none":
            raise SettingsError(f"the tokenizer of {loaded.name} has no mask token", "Choose --mask none.")
        if self.mask != "random":
            self.refuse_given(("share", "corruption"), "without --mask random")

    def reading(self, texts: InputOptions, loaded: LoadedModel) -> InputOptions:
        self._refuse_idle(texts)
        typed = loaded.tokenizer.mask_token
        holds_mask = bool(typed and texts.text) and typed in f"{texts.text} {texts.pair}"
        if self.mask == "given" and texts.text is None:
            raise SettingsError("--mask given reads one text", f"Give a text with {typed} in it.")
        if self.mask == "given" and not holds_mask:
            raise SettingsError(
                f"the text {texts.text!r} holds no {typed}", f"Write {typed} where a token is to be predicted."
            )
        return replace(texts, special_tokens_in_text=True) if holds_mask else texts

    def _refuse_idle(self, texts: InputOptions) -> None:
        if texts.text is None:
            self.refuse_given(("top",), "for a corpus")
            return
        self.refuse_given(("sample",), "for a text")
        if self.mask != "random":
            self.refuse_given(("seed",), "for a text without --mask random")

    def answer(self, loaded: LoadedModel, texts: Intake) -> Result:
        assert isinstance(loaded, LoadedWithHead), "`load` gives the head"
        if not texts.source.is_corpus:
            return self._text(loaded, texts.single(), texts.how)
        way = "each" if self.mask == "auto" else self.mask
        tested, masking = self._tested(loaded), self._masking(loaded)
        for batch in texts.batches():
            tested.read(batch)
            probes = chain.from_iterable(WAYS[way](masking, text) for text in batch)
            for own, hidden in _predicted(loaded, probes, texts.how):
                tested.add(own[0].text, _measured(loaded, own, hidden, top=0)[0])
        if not tested.totals.values.any():
            raise _nothing_to_predict("the corpus")
        return corpus_result(tested, way)

    def _text(self, loaded: LoadedWithHead, text: TokenizedText, how: Pass) -> Result:
        way = self.mask
        if way == "auto":
            way = "given" if loaded.tokenizer.mask_token_id in text.ids else "each"
        probes = WAYS[way](self._masking(loaded), text)
        if not probes:
            raise _nothing_to_predict("the text")
        ((_, hidden),) = _predicted(loaded, probes, how)
        scores, leading = _measured(loaded, probes, hidden, top=self.top, known=way != "given")
        predicted, tested = Predicted.of(probes, scores, leading), self._tested(loaded)
        tokens = loaded.vocabulary().tokens
        if way == "given":
            return given_result(predicted, tested.vocabulary, tokens)
        tested.read([text])
        tested.add(text, scores)
        return text_result(predicted, tested, way, tokens)

    def _tested(self, loaded: LoadedWithHead) -> Tested:
        return Tested.empty(loaded.head.output.out_features, sample=self.sample, seed=self.seed)

    def _masking(self, loaded: LoadedModel) -> Masking:
        special = set(loaded.tokenizer.all_special_ids)
        named = enumerate(loaded.vocabulary().tokens)
        others = [entry for entry, token in named if token is not None and entry not in special]
        return Masking(loaded.tokenizer.mask_token_id, others, self.share, self.seed, self.corruption)


def _predicted(loaded: LoadedModel, probes: Iterable[Probe], how: Pass) -> Iterator[tuple[list[Probe], Tensor]]:
    """The probes of one text after the other, and the last hidden states (position, width) at all their positions."""
    for _, found in groupby(_hidden(loaded, probes, how), key=lambda pair: pair[0].text):
        own, hidden = zip(*found, strict=True)
        yield list(own), torch.cat(hidden)


def _hidden(loaded: LoadedModel, probes: Iterable[Probe], how: Pass) -> Iterator[tuple[Probe, Tensor]]:
    """Every probe with its last hidden states; records come in the order of what is read."""
    waiting: deque[Probe] = deque()

    def reads() -> Iterator[list[TokenizedText]]:
        for batch in packed(probes, how.batch_tokens):
            waiting.extend(batch)
            yield [probe.read for probe in batch]

    for recorded in records(loaded, reads(), needs=frozenset({"hidden_states"}), backend=how.backend):
        for states in recorded.layer("hidden_states", loaded.shape.layers):
            probe = waiting.popleft()
            yield probe, states[list(probe.positions)]


def _measured(
    loaded: LoadedWithHead, probes: Sequence[Probe], hidden: Tensor, *, top: int, known: bool = True
) -> tuple[Scores, Leading]:
    """Every position's scores and its `top` foremost entries; the logits of a few positions are held at a time."""
    truth = torch.tensor([probe.text.ids[position] for probe in probes for position in probe.positions])
    scores, leading = [], []
    with threads(1):  # the last bits of a long sum depend on how many threads share it
        for start in range(0, len(hidden), ROWS):
            chunk = slice(start, start + ROWS)
            logits, own = loaded.head.logits(hidden[chunk]).cpu(), truth[chunk] if known else None
            scores.append(Scores.of(logits, own))
            leading.append(Leading.of(logits, own, top))
    return joined(scores), joined(leading)


def _nothing_to_predict(what: str) -> SettingsError:
    return SettingsError(f"{what} has no token to predict", "Give texts with more than special tokens.")
