"""What was found of one word in many contexts, as tables and notes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from .contexts import Contexts
from .maths import ratio
from .occurrences import Occurrence
from .result import Table
from .senses import divisions

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
RARE = 0.05
"""A p that is small by custom: where none as small is possible, that is said."""

DEPTHS = {
    "depth": "0 is the first layer's input, l + 1 the output of layer l",
    "occurrences": "occurrences of the word that were kept",
    "texts": "texts that they stand in",
    "self_similarity": "mean cosine over all pairs of occurrences in different texts, -1 to 1; empty with one text",
    "baseline": "the same over all ordinary (not special) tokens of all texts that hold the word: exact, not sampled",
    "self_similarity_adjusted": "self_similarity - baseline",
}
SEPARATION = {
    "silhouette": "mean silhouette (Rousseeuw 1987) of the occurrences by their senses, cosine distance, -1 to 1",
    "nearest_sense": "share of occurrences whose nearest neighbour (cosine) in another text has their sense, 0 to 1",
    "nearest_by_chance": "the same for a neighbour drawn at random from the other texts",
    "same_sense": "mean cosine of occurrences in different texts with the same sense; empty without any",
    "other_sense": "the same of those with different senses",
    "p": "share of random deals of the senses to the texts with no smaller silhouette, this one counted among them: "
    "(1 + k) / (1 + permutations); of this depth alone",
}
OCCURRENCES = {
    "occurrence": "number of the occurrence, from 0",
    "line": "line of the text, from 1",
    "part": "part of a split line, from 0",
    "id": "the line's id, as the corpus gives it",
    "sense": "its sense, as the corpus gives it; empty without",
    "cluster": "2-means cluster of its vector at the last depth, found from the vectors: no evidence of senses",
    "start": "first character in the text, from 0",
    "end": "one past the last character",
    "pieces": "tokens that the word is cut into",
    "text": "the text",
}
MAP = {
    "occurrence": OCCURRENCES["occurrence"],
    "depth": DEPTHS["depth"],
    "x": "place on the first principal component of the occurrences' vectors",
    "y": "place on the second",
    "x_share": "share of the variance along the first, 0 to 1; empty without variance",
    "y_share": "share of the variance along the second",
    "norm": "length of the vector",
    "silhouette": "silhouette of the occurrence, -1 to 1; empty without a sense",
}
PULL = {
    "norm": "|sum_h A_ij f_h(x_j)|, what the token adds to the word's attention output, mean over the word's pieces",
    "norm_share": "norm / sum of the norms of all tokens of the text, 0 to 1",
    "update_share": "c_j . u / |u|^2 with u the word's attention output, b_O included: its share of u along u's "
    "own direction (this project's own definition); signed, over all tokens and b_O it adds up to 1",
}
TOKENS = {
    "occurrence": OCCURRENCES["occurrence"],
    "line": OCCURRENCES["line"],
    "sense": OCCURRENCES["sense"],
    "layer": "layer, from 0",
    "place": "1 for the largest norm",
    "token": "position of the token in the text, from 0",
    "token_text": "the token as it stands in the text",
    "own": "whether it belongs to the word itself",
    "special": "whether it is a special token",
}
KINDS = {
    "layer": TOKENS["layer"],
    "kind": "own: the word itself; special: special tokens; other: all other tokens; bias: b_O",
    "norm_share": "sum of the kind's shares of norms, mean over occurrences, 0 to 1; empty for b_O",
    "update_share": "sum of the kind's shares of the update, mean over occurrences; over the kinds it adds up to 1",
}
MEANS = {
    "sense": "sense of the occurrences, or all",
    "layer": TOKENS["layer"],
    "place": "1 for the largest mean norm",
    "piece": "the token as it stands in the vocabulary",
    "occurrences": "occurrences whose text has it",
    "norm": "sum of its norms in a text, mean over the occurrences of this sense; 0 where the text lacks it",
    "update_share": "sum of its shares of the update in a text, mean over the same",
}


def depth_table(seen: Contexts) -> Table:
    """The word's cosines and how its senses separate, by depth."""
    own, baseline = seen.cosines
    frame = pd.DataFrame({"depth": range(len(own))})
    frame["occurrences"], frame["texts"] = len(seen.items), len(set(seen.text_of.tolist()))
    frame["self_similarity"], frame["baseline"] = own, baseline
    frame["self_similarity_adjusted"] = own - baseline
    found, columns = seen.separation, dict(DEPTHS)
    if found:
        chance = np.full(len(own), found.chance)
        values = (found.silhouette, found.nearest, chance, found.same, found.other, found.p)
        for name, value in zip(SEPARATION, values, strict=True):
            frame[name] = value
        columns |= SEPARATION
    return Table("context", f"{seen.word}: contexts by depth", frame, columns, ("texts", "occurrences"))


def headline(table: Table) -> Table:
    """What the terminal shows of the table by depth."""
    usual = ("self_similarity", "baseline", "self_similarity_adjusted", "silhouette", "nearest_sense", "p")
    shown = ["depth", *(name for name in usual if name in table.frame)]
    return Table(table.name, table.title, table.frame[shown], table.columns)


def occurrence_table(seen: Contexts) -> Table:
    """Every kept occurrence and the text that it stands in."""
    frame = pd.DataFrame([_described(at, item) for at, item in enumerate(seen.items)])
    if seen.clusters is not None:
        frame.insert(list(frame).index("sense") + 1, "cluster", seen.clusters)
    if not frame["id"].any():
        del frame["id"]
    about = {name: OCCURRENCES[name] for name in map(str, frame)}
    return Table("context-occurrences", f"{seen.word}: occurrences", frame, about)


def _described(at: int, item: Occurrence) -> dict[str, object]:
    text, pieces = item.text, item.tokens
    return {
        "occurrence": at,
        "line": text.line,
        "part": text.part,
        "id": text.id,
        "sense": item.sense,
        "start": text.start[pieces[0]],
        "end": text.end[pieces[-1]],
        "pieces": len(pieces),
        "text": (text.pair or "") if text.segment[pieces[0]] else text.text,
    }


def map_table(seen: Contexts) -> Table:
    """Places on the principal components by depth, and the silhouette of each occurrence."""
    silhouettes = np.full(seen.vectors.shape[:2], np.nan)
    if seen.separation:
        silhouettes[:, seen.separation.known] = seen.separation.silhouettes
    frames = []
    for depth, (places, shares) in enumerate(seen.planes):
        norms = np.sqrt((seen.vectors[depth] ** 2).sum(axis=1))
        values = (range(len(places)), depth, *places.T, *shares, norms, silhouettes[depth])
        frames.append(pd.DataFrame(dict(zip(MAP, values, strict=True))))
    return Table("context-map", f"{seen.word}: map by depth", pd.concat(frames, ignore_index=True), MAP)


def vector_table(seen: Contexts) -> Table:
    """The vectors themselves."""
    depths, items, width = seen.vectors.shape
    names = [f"v{entry}" for entry in range(width)]
    frame = pd.DataFrame(seen.vectors.reshape(-1, width), columns=names)
    frame.insert(0, "occurrence", np.tile(np.arange(items), depths))
    frame.insert(1, "depth", np.repeat(np.arange(depths), items))
    about = {name: MAP[name] for name in ("occurrence", "depth")}
    entries = {name: f"entry {entry} of the vector" for entry, name in enumerate(names)}
    return Table("context-vectors", f"{seen.word}: vectors by depth", frame, about | entries)


def own_and_special(item: Occurrence) -> tuple[Flags, Flags]:
    """Which tokens of the text are the word's own, and which are special."""
    return np.isin(np.arange(len(item.text)), item.tokens), np.array(item.text.special, dtype=bool)


def norm_shares(item: Occurrence) -> Floats:
    """Norms of what tokens add divided by their sum (layer, token)."""
    return ratio(item.norms, item.norms.sum(axis=1, keepdims=True))


def token_table(seen: Contexts, top: int) -> Table:
    """For every occurrence and layer the tokens that added most."""
    frames = [frame for at, item in enumerate(seen.items) for frame in _strongest(at, item, top)]
    frame = pd.concat(frames, ignore_index=True)
    return Table("context-pull", f"{seen.word}: the {top} tokens that added most", frame, TOKENS | PULL)


def _strongest(at: int, item: Occurrence, top: int) -> Iterator[pd.DataFrame]:
    own, special = own_and_special(item)
    shares, labels = norm_shares(item), np.array(item.text.labels, dtype=object)
    for layer, norms in enumerate(item.norms):
        first = np.argsort(-norms, kind="stable")[:top]
        keys = (at, item.text.line, item.sense, layer, range(1, len(first) + 1), first, labels[first])
        values = (own[first], special[first], norms[first], shares[layer][first], item.shares[layer][first])
        yield pd.DataFrame(dict(zip(TOKENS | PULL, (*keys, *values), strict=True)))


def kind_table(seen: Contexts) -> Table:
    """How much the word itself, special tokens, others and b_O add, by layer."""
    layers = len(seen.items[0].norms)
    flags = [own_and_special(item) for item in seen.items]
    sums = np.array(
        [
            [_of_kinds(norm_shares(item), *own), _of_kinds(item.shares, *own)]
            for item, own in zip(seen.items, flags, strict=True)
        ]
    ).mean(axis=0)
    bias = np.mean([item.bias_shares for item in seen.items], axis=0)
    kinds = ["own", "special", "other", "bias"]
    frame = pd.DataFrame({"layer": np.repeat(np.arange(layers), len(kinds)), "kind": kinds * layers})
    frame["norm_share"] = np.vstack([sums[0], np.full(layers, np.nan)]).T.ravel()
    frame["update_share"] = np.vstack([sums[1], bias]).T.ravel()
    return Table("context-pull-kinds", f"{seen.word}: what pulled it, by kind of token", frame, KINDS)


def _of_kinds(shares: Floats, own: Flags, special: Flags) -> Floats:
    """Sums over own, special and other tokens: (kind, layer)."""
    kinds = np.stack([own, special & ~own, ~(own | special)], axis=1)
    return (shares @ kinds).T


def mean_table(seen: Contexts, top: int) -> Table:
    """The tokens of the vocabulary that added most over all occurrences, and over those of each sense."""
    groups: dict[str, list[Occurrence]] = {"all": seen.items}
    if len(seen.senses) > 1:
        groups |= {sense: [item for item in seen.items if item.sense == sense] for sense in seen.senses}
    frames = [frame for sense, items in groups.items() for frame in _means(sense, items, top)]
    frame = pd.concat(frames, ignore_index=True)
    title = f"{seen.word}: the {top} tokens that added most, mean over occurrences"
    return Table("context-pull-means", title, frame, MEANS, ("occurrences",))


def _means(sense: str, items: Sequence[Occurrence], top: int) -> Iterator[pd.DataFrame]:
    pieces = sorted({piece for item in items for piece in item.text.tokens})
    number = {piece: at for at, piece in enumerate(pieces)}
    total = np.zeros((2, len(items[0].norms), len(pieces)))
    count = np.zeros(len(pieces), np.int64)
    for item in items:
        at = np.array([number[piece] for piece in item.text.tokens])
        for kind, values in enumerate((item.norms, item.shares)):
            np.add.at(total[kind].T, at, values.T)
        count[np.unique(at)] += 1
    norms, shares = total / len(items)
    for layer in range(len(norms)):
        first = np.argsort(-norms[layer], kind="stable")[:top]
        named = np.array(pieces, dtype=object)[first]
        means = (norms[layer][first], shares[layer][first])
        row = (sense, layer, range(1, len(first) + 1), named, count[first], *means)
        yield pd.DataFrame(dict(zip(MEANS, row, strict=True)))


def notes_of(seen: Contexts) -> tuple[str, ...]:
    """What a reader must know: how much there was, where senses separate, and what the data cannot say."""
    found, kept = seen.found, len(seen.items)
    many = f"{found.seen} occurrence{'s' * (found.seen != 1)} of {seen.word!r}"
    counted = f"{many} in {found.texts} of {found.read} texts."
    if kept < found.seen:
        counted += f" Kept are {kept}, those of smallest hash with seed {found.seed}."
    if len(set(seen.text_of.tolist())) < 2:
        counted += " Its similarity to itself needs two texts; what each token adds to it is in context-pull."
    return (counted, *_on_unknown(seen), *(_on_senses(seen) if seen.senses else _on_clusters(seen)))


def _on_unknown(seen: Contexts) -> Iterator[str]:
    unknown = sum(any(item.text.unknown[token] for token in item.tokens) for item in seen.items)
    if unknown:
        yield f"The vocabulary lacks the word, or a piece of it, in {unknown} of them."


def _on_clusters(seen: Contexts) -> Iterator[str]:
    if len(seen.items) > 1:
        yield (
            "No senses were given (--group-column names them): the maps are coloured by 2-means clusters of the last "
            "depth, which are found from the same vectors and are no evidence of senses."
        )


def _on_senses(seen: Contexts) -> Iterator[str]:
    by_sense = {sense: sum(item.sense == sense for item in seen.items) for sense in seen.senses}
    listed = ", ".join(f"{sense} {count}" for sense, count in by_sense.items())
    found = seen.separation
    if found is None:
        yield f"Senses: {listed}. They cannot be told apart: it takes two senses, one of them twice."
        return
    yield f"Senses: {listed}. {_best(found.silhouette, found.nearest, found.best)}{_p_of_best(seen)}."
    ways = _ways(seen, found.known.tolist())
    if 1 / ways > RARE:
        yield (
            f"So few texts can be dealt to the senses in only {ways} ways: no p below {1 / ways:.2g} is possible. "
            "Give more texts by --texts and --group-column."
        )


def _best(silhouette: Floats, nearest: Floats, best: int) -> str:
    return (
        f"They separate best at depth {best}: silhouette {silhouette[best]:.3f}, "
        f"nearest neighbour of the same sense {nearest[best]:.0%}"
    )


def _p_of_best(seen: Contexts) -> str:
    found = seen.separation
    if found is None or not seen.permutations:
        return ""
    return f", p {found.p_of_best:.3g} with the choice of the depth paid for ({seen.permutations} permutations)"


def _ways(seen: Contexts, known: Sequence[int]) -> int:
    senses: Mapping[int, str] = {int(seen.text_of[at]): seen.items[at].sense for at in known}
    return divisions(list(senses.values()))
