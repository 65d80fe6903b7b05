"""What residual connections do for gradients, and how near each block is to passing its input on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from analyses.kit.analysis import chosen_names, setting
from analyses.kit.jacobian import (
    Shares,
    Step,
    estimated_shares,
    exact_shares,
    gradient_norms,
    probes,
    random_units,
    spectral_norm,
)
from analyses.kit.record import TokenizedText
from analyses.kit.residual_answer import (
    CUTS,
    ResidualSums,
    block_figure,
    block_table,
    gradient_figure,
    gradient_table,
    headline,
)
from analyses.kit.result import Result
from analyses.kit.vector_sample import hashed, text_keys
from bertgeo_cli.intake import Intake
from bertgeo_cli.models import LoadedModel
from bertgeo_cli.observation import Pass
from bertgeo_cli.recording import run_pass
from bertgeo_cli.study import Study
from bertgeo_cli.surgery import without_residuals

Floats = NDArray[np.float64]
TOLERANCE = 1e-3
"""Share of the spectral norm by which a last step of power iteration may change it."""


@dataclass(frozen=True)
class Residuals(Study):
    """Gradients and Jacobians with the residual connections and with each kind cut.

    Cut is the residual around attention, that around the MLP (attention and MLP stay), or both, in every block.
    Gradient: what reaches each depth of the inner product of the last hidden states with random unit directions r over
    all n tokens and d channels. The probe is this project's own: the norm of the last hidden states would not do, since
    the last LayerNorm all but fixes it. Its root mean square estimates |J| / sqrt(n d), in the Frobenius norm, of the
    Jacobian from that depth to the last. Blocks: of the Jacobian J of a block's output by its input its cosine with the
    identity, tr J / (|J| sqrt(n d)), which is this project's own measure; its gain |J| / sqrt(n d); its largest
    singular value by power iteration on J^T J. Trace and norm are estimated by random signs (Hutchinson 1989), with
    standard errors, or computed from J whole where n d is small.

    Example: bertgeo residuals "The fisherman sat down by the river bank."
    """

    cut: str = setting("all", "Residuals to cut, separated by commas: none, attention, mlp, both; or all.")
    probes: int = setting(8, "Random directions, and random signs, for each text.", least=2)
    blocks: int = setting(4, "Texts whose Jacobians are measured, those of smallest hash; 0 for none.", least=0)
    exact: int = setting(1024, "Largest n d of a Jacobian that is computed whole.", least=0)
    iterations: int = setting(50, "Most steps of power iteration.", least=2)
    seed: int = setting(0, "Seed of directions, signs and hash.", least=0)

    def check(self, loaded: LoadedModel) -> None:
        self._cuts()
        if not self.blocks:
            self.refuse_given(("exact", "iterations"), "with --blocks 0")

    def _cuts(self) -> tuple[str, ...]:
        chosen = chosen_names(self.cut, CUTS, "cut")
        return tuple(cut for cut in CUTS if cut in chosen)

    def answer(self, loaded: LoadedModel, texts: Intake) -> Result:
        cuts, follow = self._cuts(), _Follow(loaded, texts.how)
        sums, sampled = ResidualSums.empty(cuts, loaded.shape.layers), list[TokenizedText]()
        for batch in texts.batches():
            for text in batch:
                sums.add_gradients([self._gradients(follow, text, cut) for cut in cuts])
            sampled = sorted([*sampled, *batch], key=self._rank)[: self.blocks]
        for text in sorted(sampled, key=lambda text: (text.line, text.part)):
            self._add_blocks(sums, follow, text)
        return self._result(sums)

    def _rank(self, text: TokenizedText) -> tuple[int, ...]:
        return tuple(text_keys([text], self.seed)[0].tolist())

    def _generator(self, text: TokenizedText, use: str) -> torch.Generator:
        """Random numbers that depend on the text and their use alone, not on other texts."""
        number = hashed(f"{use}\0{text.text}\0{text.pair or ''}", self.seed)
        return torch.Generator().manual_seed(number >> 1)

    def _gradients(self, follow: _Follow, text: TokenizedText, cut: str) -> Floats:
        """|d <r, h_last> / d h_depth|: (depth, direction); every cut follows the same directions."""
        generator, norms = self._generator(text, "directions"), []
        for depths in follow.copies(text, cut, self.probes):
            last = depths[-1]
            norms.append(gradient_norms(depths, random_units(tuple(last.shape), last, generator)))
        return np.concatenate(norms, axis=1)

    def _add_blocks(self, sums: ResidualSums, follow: _Follow, text: TokenizedText) -> None:
        exact = len(text) * follow.loaded.shape.width <= self.exact
        measure = self._exact if exact else self._estimated
        found = [measure(follow, text, cut) for cut in sums.cuts]
        shares = [[own for own, _ in blocks] for blocks in found]
        sums.add_blocks(shares, exact, [[settled for _, settled in blocks] for blocks in found])

    def _exact(self, follow: _Follow, text: TokenizedText, cut: str) -> list[tuple[Shares, bool]]:
        return [(exact_shares(step.matrix()), True) for step in _steps(follow.depths(text, cut))]

    def _estimated(self, follow: _Follow, text: TokenizedText, cut: str) -> list[tuple[Shares, bool]]:
        layers = range(follow.loaded.shape.layers)
        signs = [self._generator(text, f"signs of layer {layer}") for layer in layers]
        seen: list[list[tuple[Floats, Floats]]] = [[] for _ in layers]
        for depths in follow.copies(text, cut, self.probes):
            for layer, step in enumerate(_steps(depths)):
                seen[layer].append(probes(step, signs[layer]))
        found = []
        for layer, step in enumerate(_steps(follow.depths(text, cut))):
            start = self._generator(text, f"start of layer {layer}")
            spectral, settled = spectral_norm(step, self.iterations, TOLERANCE, start)
            traces, squares = (np.concatenate(part) for part in zip(*seen[layer], strict=True))
            found.append((estimated_shares(traces, squares, step.size, spectral), settled))
        return found

    def _result(self, sums: ResidualSums) -> Result:
        gradients, notes = gradient_table(sums), []
        blocks = block_table(sums) if self.blocks else None
        if sums.vanished:
            notes.append(f"In {sums.vanished} texts a gradient was 0 at some depth and is left out there.")
        if blocks is not None:
            notes.append(_about_blocks(sums, self.probes))
        tables = (gradients,) if blocks is None else (gradients, blocks)
        figures = (gradient_figure(sums),) if blocks is None else (gradient_figure(sums), block_figure(sums))
        return Result(headline(gradients, blocks), tables, figures, tuple(notes))


def _about_blocks(sums: ResidualSums, count: int) -> str:
    texts, exact = int(sums.blocks.count.max()), int(sums.counts.values[..., 0].max())
    note = f"Jacobians of blocks: {texts} text{'s' * (texts != 1)}"
    error = float(np.sqrt(sums.errors.values[..., 0]).max() / max(texts, 1))
    if exact < texts:
        note += f", {texts - exact} of them by {count} random probes: standard errors of the identity up to {error:.2g}"
    unsettled = int(sums.counts.values[..., 1].sum())
    return note + "." + f" {unsettled} power iterations had not settled (--iterations)." * bool(unsettled)


@dataclass(frozen=True)
class _Follow:
    """Passes whose hidden states hang on one graph."""

    loaded: LoadedModel
    how: Pass

    def depths(self, text: TokenizedText, cut: str, copies: int = 1) -> list[Tensor]:
        """The hidden states (copy, token, width) of every depth."""
        ids, segments = (
            torch.tensor([values] * copies, device=self.loaded.device) for values in (text.ids, text.segment)
        )
        needs = frozenset({"hidden_states"})
        # Products J v differentiate the gradient once more, which the fused kernels do not know.
        with without_residuals(self.loaded, cut), sdpa_kernel(SDPBackend.MATH):
            found = run_pass(self.loaded, ids, segments, needs=needs, backend=self.how.backend, differentiable=True)
        return found["hidden_states"]

    def copies(self, text: TokenizedText, cut: str, count: int) -> Iterator[list[Tensor]]:
        """As many copies of the text, no more to a pass than --batch-tokens says."""
        most = max(1, self.how.batch_tokens // len(text))
        for start in range(0, count, most):
            yield self.depths(text, cut, min(most, count - start))


def _steps(depths: Sequence[Tensor]) -> list[Step]:
    return [Step(entering, leaving) for entering, leaving in pairwise(depths)]
