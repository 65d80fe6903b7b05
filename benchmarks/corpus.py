"""A corpus measured by the script that people write, and by bertgeo: `python benchmarks/corpus.py CORPUS`.

Both compute the row entropy of every head, the cone index and the relative residual (composite norm) of every hidden
state, and rollout from [CLS] to itself after every layer; both tokenise, neither counts imports or loading the model.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from added_cost import added, encoded
from numpy.typing import NDArray
from timing import pairs, report, seconds

from analyses.attention import Attention
from analyses.cone_index import ConeIndex
from analyses.flow import Flow
from analyses.gates import Gates
from analyses.heads import HeadsAgainstHeads
from analyses.isotropy import Isotropy
from analyses.kit.analysis import Analysis, State
from analyses.kit.record import TokenizedText
from analyses.layers import Layers
from analyses.rank_collapse import RankCollapse
from analyses.stream import Stream
from bertgeo_cli.corpus import Line, cut
from bertgeo_cli.models import LoadedModel, load_model
from bertgeo_cli.observation import Pass, Task, silent
from bertgeo_cli.options import ModelOptions
from bertgeo_cli.run import merge_tree
from bertgeo_cli.runners import Origin, here

Floats = NDArray[Any]
FOUR: tuple[Analysis[Any], ...] = (
    Attention(metrics="entropy"),
    ConeIndex(points="hidden_state"),
    RankCollapse(metrics="residual_composite"),
    Flow(methods="rollout"),
)
PLACES = {
    "entropy": (0, (..., 1)),  # metrics n, entropy
    "cone index": (1, (..., 0, 1)),  # special tokens kept; values n, cone_index
    "residual": (2, (..., 1)),  # metrics n, residual_composite
    "rollout": (3, (..., 0, 2)),  # its only method; values n, entropy, mass_self
}
"""Which of FOUR holds each quantity, and where in its values."""
EVERY: dict[str, Analysis[Any]] = {
    "attention": Attention(),
    "cone-index": ConeIndex(),
    "rank-collapse": RankCollapse(),
    "flow": Flow(),
    "heads (correlation)": HeadsAgainstHeads(metric="correlation"),
}
STREAM: dict[str, Analysis[Any]] = {
    "gates": Gates(),
    "stream": Stream(),
    "isotropy": Isotropy(),
    "rank-collapse": RankCollapse(),
    "layers": Layers(),
}


# The script that people write


def by_script(loaded: LoadedModel, lines: Sequence[str]) -> dict[str, Floats]:
    """The mean over texts of each quantity: padded batches of 32 in the order of the file, then NumPy text by text."""
    model: Any = loaded.model
    sums: dict[str, Floats] = {}
    for start in range(0, len(lines), 32):
        inputs = loaded.tokenizer(
            list(lines[start : start + 32]),
            padding=True,
            truncation=True,
            max_length=loaded.max_tokens,
            return_tensors="pt",
        )
        with torch.no_grad():
            outputs = model(**inputs, output_attentions=True, output_hidden_states=True)
        for index, mask in enumerate(inputs["attention_mask"]):
            n = int(mask.sum())
            attention = torch.stack([layer[index, :, :n, :n] for layer in outputs.attentions]).float().numpy()
            hidden = torch.stack([depth[index, :n] for depth in outputs.hidden_states]).float().numpy()
            for name, value in of_text(attention, hidden).items():
                sums[name] = sums.get(name, 0.0) + value
    return {name: value / len(lines) for name, value in sums.items()}


def of_text(attention: Floats, hidden: Floats) -> dict[str, Floats]:
    """The four quantities of one text: attention (layer, head, query, key), hidden states (depth, token, width)."""
    entropy = -(attention * np.log(attention + 1e-12)).sum(axis=-1).mean(axis=-1)
    units = hidden / np.linalg.norm(hidden, axis=-1, keepdims=True)
    cone = np.linalg.norm(units.sum(axis=1), axis=-1)
    residual = composite_norm(hidden - hidden.mean(axis=1, keepdims=True)) / composite_norm(hidden)
    mixing = 0.5 * attention.mean(axis=1) + 0.5 * np.eye(attention.shape[-1])
    product, rolled = np.eye(attention.shape[-1]), []
    for layer in mixing:
        product = layer @ product
        rolled.append(product[0, 0])
    return {"entropy": entropy, "cone index": cone, "residual": residual, "rollout": np.array(rolled)}


def composite_norm(matrices: Floats) -> Floats:
    absolute = np.abs(matrices)
    return np.sqrt(absolute.sum(axis=1).max(axis=-1) * absolute.sum(axis=2).max(axis=-1))


# Ours


def observed(
    analyses: Sequence[Analysis[Any]],
    loaded: LoadedModel,
    texts: Sequence[TokenizedText],
    how: Pass,
    workers: int | None = None,
) -> Any:
    """The merged states of a corpus, as `bertgeo run` makes them; without analyses, its bare passes."""
    task = Task({str(at): analysis for at, analysis in enumerate(analyses)}, how)
    shards = cut((Line(text.line, text.text), text) for text in texts)
    origin = Origin.of(ModelOptions(), loaded)
    return merge_tree(seen.observed.whole for _, seen in here(task, origin, loaded, shards, workers, silent))


def means(states: Sequence[State]) -> dict[str, Floats]:
    """The mean over texts of each quantity."""
    return {name: getattr(states[at], "moments").mean[where] for name, (at, where) in PLACES.items()}  # noqa: B009


def of_texts(loaded: LoadedModel, texts: Sequence[TokenizedText]) -> dict[str, Floats]:
    """Each quantity of every text (text, ...)."""
    analyses = [replace(analysis, sample=len(texts)) for analysis in FOUR]  # type: ignore[call-arg]
    states = observed(analyses, loaded, texts, Pass())
    values = [np.stack([item.values for item in state.sample.rows()]) for state in states]
    return {name: values[at][where] for name, (at, where) in PLACES.items()}


# What is printed


def against_the_script(loaded: LoadedModel, lines: Sequence[str], rounds: int) -> None:
    found: dict[str, dict[str, Floats]] = {}

    def script() -> None:
        found["script"] = by_script(loaded, lines)

    def ours() -> None:
        found["ours"] = means(observed(FOUR, loaded, encoded(loaded, lines), Pass()))

    timed = pairs(script, ours, rounds)
    report("four quantities, at least 3 times as fast", timed, "script", "ours")
    for name in PLACES:
        ours, theirs = found["ours"][name], found["script"][name]
        apart = float((np.abs(ours - theirs) / np.maximum(np.abs(ours), 1.0)).max())
        print(f"  {name}: corpus means differ by at most {apart:.1e}, relative above 1 (at most 1e-5)")


def against_bare_passes(loaded: LoadedModel, lines: Sequence[str], rounds: int) -> None:
    """As a corpus run does it; then batch by batch in one process."""
    texts = encoded(loaded, lines)
    as_a_run("four quantities, one shared pass", FOUR, loaded, texts, rounds, 1.25)
    plain, share = added(FOUR, loaded, texts, Pass(), rounds)
    print(f"  batch by batch: {1 + share:.3f} of the bare passes ({plain:.2f} s)")
    tokenising = min(seconds(lambda: encoded(loaded, lines)) for _ in range(rounds))
    print(f"  tokenising beside it: {tokenising:.2f} s")


def as_a_run(
    title: str,
    analyses: Sequence[Analysis[Any]],
    loaded: LoadedModel,
    texts: Sequence[TokenizedText],
    rounds: int,
    bound: float | None = None,
) -> None:
    """As a run does it, by its processes or in one, against its passes alone done likewise."""
    for workers, where in ((None, "its processes"), (1, "one process")):
        timed = pairs(
            partial(observed, analyses, loaded, texts, Pass(), workers),
            partial(observed, (), loaded, texts, Pass(), workers),
            rounds,
        )
        report(f"{title}, {where}", timed, "measured", "bare", bound)


def every_column(loaded: LoadedModel, lines: Sequence[str], rounds: int) -> None:
    each_share("all columns of five analyses", EVERY, loaded, lines, rounds)


def the_stream(loaded: LoadedModel, lines: Sequence[str], rounds: int) -> None:
    each_share("gates and the stream", STREAM, loaded, lines, rounds, 5.0)


def each_share(
    title: str,
    analyses: Mapping[str, Analysis[Any]],
    loaded: LoadedModel,
    lines: Sequence[str],
    rounds: int,
    bound: float | None = None,
) -> None:
    """What all of them cost in one shared pass, as a run and batch by batch, and what each adds alone."""
    texts = encoded(loaded, lines)
    as_a_run(title, list(analyses.values()), loaded, texts, rounds, bound)
    plain, share = added(list(analyses.values()), loaded, texts, Pass(), rounds)
    print(f"  batch by batch: {1 + share:.3f} of the bare passes ({plain:.2f} s); alone, each adds:")
    for name, analysis in analyses.items():
        print(f"  {name}: {added([analysis], loaded, texts, Pass(), rounds)[1]:.3f}", flush=True)


def in_dtype(dtype: str, plain: LoadedModel, other: LoadedModel, lines: Sequence[str], rounds: int) -> None:
    """Time against float32, and how far each quantity of each text moves."""
    texts = encoded(plain, lines)
    timed = pairs(lambda: observed(FOUR, other, texts, Pass()), lambda: observed(FOUR, plain, texts, Pass()), rounds)
    report(f"four quantities in {dtype}", timed, dtype, "float32")
    exact, rounded = of_texts(plain, texts), of_texts(other, texts)
    for name in PLACES:
        error = np.abs(exact[name] - rounded[name])
        print(f"  {name}: error mean {error.mean():.1e}, max {error.max():.1e} (mean value {exact[name].mean():.3f})")


def choices() -> Iterator[tuple[str, int, int | None, Pass]]:
    """What could be chosen, one thing changed at a time: name, threads, workers, and how texts are passed."""
    threads = torch.get_num_threads()
    yield "default", threads, None, Pass()
    yield "sdpa, weights computed again", threads, None, Pass(backend="sdpa")
    for count in (1, 2):
        yield f"one process, threads {count}", count, 1, Pass()
    for tokens in (512, 2048, 4096):
        yield f"batch tokens {tokens}", threads, None, Pass(batch_tokens=tokens)


def compare_choices(loaded: LoadedModel, lines: Sequence[str], rounds: int) -> None:
    texts, threads = encoded(loaded, lines), torch.get_num_threads()
    print(f"choices, four quantities (default: eager, threads {threads}, batch tokens {Pass().batch_tokens}):")
    taken: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, count, workers, how in choices():
            torch.set_num_threads(count)
            taken.setdefault(name, []).append(seconds(partial(observed, FOUR, loaded, texts, how, workers)))
            torch.set_num_threads(threads)
    for name, times in taken.items():
        print(f"  {name}: {statistics.median(times):.2f} s")


PARTS = {
    "script": against_the_script,
    "bare": against_bare_passes,
    "columns": every_column,
    "stream": the_stream,
    "choices": compare_choices,
}


def main() -> None:
    """Print all comparisons, or with --dtype what that type changes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="float32", help="bfloat16 or float16: time and error against float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of both sides")
    parser.add_argument("--only", choices=PARTS, help="one comparison")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    lines = options.corpus.read_text(encoding="utf-8").splitlines()[: options.limit]
    loaded = load_model(options.model, device="cpu")
    loaded.model.set_attn_implementation("eager")
    print(f"{len(lines)} texts, {torch.get_num_threads()} threads")
    if options.dtype != "float32":
        in_dtype(
            options.dtype, loaded, load_model(options.model, device="cpu", dtype=options.dtype), lines, options.rounds
        )
        return
    for name in [options.only] if options.only else PARTS:
        PARTS[name](loaded, lines, options.rounds)


if __name__ == "__main__":
    main()
