"""Is order seen? The same words in another order, with and without position embeddings; and their geometry."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from analyses.kit.analysis import SettingsError, setting
from analyses.kit.position_geometry import Places
from analyses.kit.position_tables import WITH, WITHOUT, Reordering, positions_result
from analyses.kit.record import TokenizedText
from analyses.kit.result import Result
from analyses.kit.word_order import reordered, shuffled, swapped
from bertgeo_cli.families import position_vectors
from bertgeo_cli.intake import Intake
from bertgeo_cli.models import LoadedModel, in_float64
from bertgeo_cli.observation import one_thread
from bertgeo_cli.options import TextInput
from bertgeo_cli.recording import record
from bertgeo_cli.study import Study
from bertgeo_cli.surgery import without_positions

NEEDS = frozenset({"hidden_states"})


@dataclass(frozen=True)
class Positions(Study):
    """Is order seen? The same words in another order, with and without position embeddings; geometry of positions.

    Attention treats its input as a set: without position embeddings a permutation P of the tokens must permute all
    outputs and change nothing else, H(P x) = P H(x) (Vaswani et al. 2017, section 3.5). Here position embeddings become
    rows of 0, all else stays, both orders are read in float64, and the largest difference at every depth decides: only
    when it is at most 1e-6 of the largest entry is it said that order is seen through positions alone. With positions:
    by how much outputs differ, by depth and token.

    Words are what the tokenizer takes for one; their pieces move together, with their segment, and nothing is tokenised
    anew. Of the embeddings: cosines of all positions that a token can have, singular values, participation ratio,
    directions that hold 90 %, nearest neighbours; raw and less their mean. Which numbers stand here is our choice.

    Example: bertgeo positions "The dog bit the man." --swap dog,man
    """

    reads: ClassVar[type] = TextInput

    swap: str = setting("", "Two words to exchange, such as dog,man: the first occurrence of each.")
    shuffle: bool = setting(
        False,
        "Shuffle all words, the default without --swap: special tokens stay, each text of a pair for itself.",
    )
    seed: int = setting(0, "Seed of the shuffle.", least=0)

    def without_model(self) -> Result | None:
        """Nothing is answered without a model. Raises SettingsError for two orders at once, and for an idle seed."""
        if self.swap and self.shuffle:
            raise SettingsError("--swap and --shuffle were both given", "Give one of them.")
        if self.swap:
            self.refuse_given(("seed",), "with --swap, which draws nothing")
        return None

    def answer(self, loaded: LoadedModel, texts: Intake) -> Result:
        """The text in both orders, without and with positions. Raises SettingsError where there is no other order."""
        text = texts.single()
        order = swapped(text, self.swap) if self.swap else shuffled(text, self.seed)
        with one_thread():
            model = in_float64(loaded)
            pair = [text, reordered(text, order)]
            states = {name: _states(model, pair, name, texts.how.backend) for name in (WITHOUT, WITH)}
            places = Places(position_vectors(loaded.model).numpy())
            return positions_result(Reordering(text, order, states, self._what()), places)

    def _what(self) -> str:
        return f"Exchanged: {self.swap}." if self.swap else f"All words shuffled by seed {self.seed}."


def _states(
    model: LoadedModel, pair: list[TokenizedText], positions: str, backend: str
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Hidden states (depth, token, width) of both texts."""
    with without_positions(model) if positions == WITHOUT else nullcontext():
        found = record(model, pair, needs=NEEDS, backend=backend)
    return found.of_text("hidden_states", 0), found.of_text("hidden_states", 1)
