"""Records made of given vectors, for analyses of hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from analyses.kit.analysis import Analysis
from analyses.kit.record import ForwardRecord, ModelShape, TokenizedText
from analyses.kit.result import Result


def text_of(line: int, tokens: Sequence[str]) -> TokenizedText:
    """A text of the given tokens; those in brackets are special."""
    count = len(tokens)
    special = tuple(token.startswith("[") for token in tokens)
    words = tuple(None if new else at for at, new in enumerate(special))
    return TokenizedText(
        line,
        " ".join(tokens),
        None,
        tuple(range(count)),
        tuple(tokens),
        tuple(tokens),
        (None,) * count,
        (None,) * count,
        (0,) * count,
        words,
        special,
        (False,) * count,
        None,
        (),
    )


Text = tuple[TokenizedText, np.ndarray]
"""A text and its vectors (depth, token, width)."""


def corpus(lengths: Sequence[int], depths: int, width: int, words: int, seed: int = 0) -> list[Text]:
    """Random texts; a token's vector is a sum of its text's, its word's and its own, and not centred."""
    generator = np.random.default_rng(seed)
    of_word = generator.normal(size=(words, depths, width)) + 0.5
    found = []
    for line, length in enumerate(lengths, start=1):
        chosen = generator.integers(words, size=length)
        tokens = ["[CLS]", *(f"w{word}" for word in chosen), "[SEP]"]
        vectors = generator.normal(size=(depths, length + 2, width)) + generator.normal(size=(depths, 1, width))
        vectors[:, 1:-1] += of_word[chosen].swapaxes(0, 1)
        found.append((text_of(line, tokens), vectors))
    return found


def record_of(*texts: Text) -> ForwardRecord:
    """A batch of texts of one length."""
    depths, _, width = texts[0][1].shape
    shape = ModelShape("bert", 1, width, width, tuple(range(depths - 1)))
    layers = torch.tensor(np.stack([vectors for _, vectors in texts], axis=1))
    return ForwardRecord(shape, [about for about, _ in texts], {"hidden_states": list(layers)})


def state_of(analysis: Analysis[Any], texts: Sequence[Text], like: Text) -> Any:
    """The state after some texts of a corpus that holds `like`."""
    state = analysis.start(record_of(like).shape, None)
    for text in texts:
        analysis.update(state, record_of(text))
    return state


def answer(analysis: Analysis[Any], texts: Sequence[Text]) -> Result:
    return analysis.finalize(state_of(analysis, texts, texts[0]), None)
