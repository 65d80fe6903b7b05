"""Why scores are divided by sqrt(dk): how widely q.k spreads, and what the softmax makes of it at any temperature."""

from __future__ import annotations

from dataclasses import dataclass

from analyses.kit.analysis import ALL, Selection, SettingsError, setting
from analyses.kit.dot_products import NEEDS, DotProducts
from analyses.kit.result import Result
from analyses.kit.scaling_tables import RANDOM, TRAINED, row_result, scaling_result
from analyses.kit.temperature import numbers, temperatures
from bertgeo_cli.intake import Intake
from bertgeo_cli.models import LoadedModel, at_initialisation
from bertgeo_cli.observation import one_thread
from bertgeo_cli.recording import record_batch
from bertgeo_cli.study import Study

LARGEST_SEED = 2**63 - 1


@dataclass(frozen=True)
class Scaling(Study):
    """Why scores are divided by sqrt(dk): the spread of q.k against it, and the softmax at other temperatures.

    By head, over all pairs of a query and a key: q.k before and after the division, with the trained weights and with
    those of the same configuration at random initialisation (drawn as transformers draws them), on the same tokens.
    Independent entries of mean 0 and variance 1 give q.k the standard deviation sqrt(dk) (Vaswani et al. 2017). Entries
    of q and k have other variances (at initialisation about 0.02^2 d), so law = std(q.k) / (sqrt(dk) std(q) std(k)) is
    measured too: 1 where all else of that argument holds. Shares say on what the variance depends: on the query alone
    (the softmax does not see it), the key alone, the pair, the text.

    The sweep divides q.k by other tau: entropy, largest weight and Frobenius norm of the softmax's Jacobian, by
    q.k / tau and by q.k itself, which is 1 / tau times as much. law, shares and sweep are this project's own. --scores
    asks the same of one row of numbers, without a model.

    Example: bertgeo scaling --scores 5,20,5 --dk 20
    """

    layers: Selection = setting(ALL, "Layers, from 0: all, or such as 0,3-5,-1.")
    heads: Selection = setting(ALL, "Heads, from 0: all, or such as 0,3-5,-1.")
    tau: str = setting(
        "grid",
        "Temperatures of the sweep, separated by commas; grid: sqrt(dk) / 16 to 16 sqrt(dk) by powers of two. 1 and "
        "sqrt(dk) are always among them.",
    )
    seed: int = setting(0, "Seed of the random weights.", least=0)
    scores: str = setting("", "One row of scores q.k, separated by commas, instead of texts.")
    dk: int = setting(0, "Channels of a head, for --scores.", least=0)

    def without_model(self) -> Result | None:
        """The row of --scores. Raises SettingsError for what is no list of numbers, no temperature or no seed."""
        if bool(self.scores) != bool(self.dk):
            raise SettingsError("--scores and --dk go together", "Give both, such as --scores 5,20,5 --dk 20.")
        temperatures(self.tau, self.dk or 1)
        if self.seed > LARGEST_SEED:
            raise SettingsError(f"--seed {self.seed} is too large", f"Choose from 0 to {LARGEST_SEED}.")
        if not self.scores:
            return None
        self.refuse_given(("layers", "heads", "seed"), "with --scores")
        return row_result(numbers(self.scores, "scores"), self.dk, temperatures(self.tau, self.dk))

    def check(self, loaded: LoadedModel) -> None:
        """Raise SettingsError for layers or heads that the model lacks."""
        self._empty(loaded)

    def answer(self, loaded: LoadedModel, texts: Intake) -> Result:
        """Both models over the same batches, one after the other."""
        models = {TRAINED: loaded, RANDOM: at_initialisation(loaded, self.seed)}
        seen = {name: self._empty(loaded) for name in models}
        for batch in texts.batches():
            for name, model in models.items():
                with one_thread():
                    for record in record_batch(model, batch, needs=NEEDS, backend=texts.how.backend):
                        seen[name].add(record)
        return scaling_result(seen, f"random weights by seed {self.seed}.")

    def _empty(self, loaded: LoadedModel) -> DotProducts:
        """Nothing seen yet. Raises SettingsError for layers, heads or temperatures that there are not."""
        shape = loaded.shape
        layers, heads = self.layers.resolve(shape.layers, "layer"), self.heads.resolve(shape.heads, "head")
        return DotProducts.empty(layers, heads, temperatures(self.tau, shape.head_width), shape.head_width)
