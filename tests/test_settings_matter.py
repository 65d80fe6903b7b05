"""No setting is read and ignored: of these analyses each one, changed, changes the answer."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from analyses.gates import Gates
from analyses.growth import Growth
from analyses.isotropy import Isotropy
from analyses.kit.analysis import Analysis, Selection
from analyses.kit.result import Result
from analyses.layers import Layers
from analyses.paths import Paths
from analyses.rank_collapse import RankCollapse
from analyses.stream import Stream
from analyses.weight_norms import WeightNorms
from bertgeo_cli.corpus import Encoder
from bertgeo_cli.models import LoadedModel
from bertgeo_cli.run import Pass, analyse_corpus, analyse_weights

LINES = (
    "the old cat sat on the mat by the river",
    "we ran to the bank and the money was not in it",
    "playing dogs",
    "the river bank",
    "is the tree very old",
)
FIRST = Selection("0")
Settings = dict[str, Any]
CHANGES: dict[type[Analysis[Any]], tuple[tuple[Settings, Settings], ...]] = {
    Gates: (
        *(({}, {name: FIRST}) for name in ("layers", "heads")),
        ({}, {"words": True}),
        ({}, {"window": 1}),
        ({}, {"top": 0.5}),
        ({}, {"confident": 0.9}),
        *(({}, {name: 0.01}) for name in ("closed", "directional", "contextual", "instance", "cluster", "open")),
        ({"instance": 0.01, "column_spread": 1.0}, {"column_spread": 0.01}),
        ({"fixed": 0.9}, {"fixed": 0.01}),
        ({}, {"pattern": 0.01}),
        ({"directional": 0.1}, {"open_as": "identity"}),
        ({}, {"directional_as": "column"}),
        ({}, {"example_units": 2}),
        ({}, {"sample": 1}),
        ({"sample": 2}, {"seed": 1}),
    ),
    Stream: (
        *(({}, {name: FIRST}) for name in ("layers", "heads")),
        ({}, {"parts": "all"}),
        ({}, {"special": "drop"}),
        ({}, {"outliers": 1}),
    ),
    RankCollapse: (
        ({}, {"layers": FIRST}),
        ({"spectra": True}, {"heads": FIRST}),
        ({}, {"metrics": "stable_rank"}),
        ({}, {"ablate": "skip"}),
        ({}, {"spectra": True}),
        ({}, {"special": "drop"}),
        ({}, {"sample": 1}),
        ({"sample": 2}, {"seed": 1}),
    ),
    Paths: (
        ({}, {"path_samples": 7}),
        ({}, {"order": "code"}),
        ({}, {"rank_one": "svd"}),
        ({}, {"sample": 1}),
        ({}, {"seed": 1}),
    ),
    WeightNorms: (({}, {"layers": FIRST}), ({}, {"through": "V"})),
    Isotropy: (
        ({}, {"layers": FIRST}),
        ({}, {"special": "drop"}),
        ({}, {"spectrum": False}),
        ({}, {"outliers": 1}),
        ({}, {"pairs": 2}),
        ({}, {"words": 1}),
        ({"pairs": 3}, {"seed": 1}),
    ),
    Layers: (
        ({}, {"layers": FIRST}),
        ({}, {"special": "drop"}),
        ({}, {"tokens": 20}),
        ({}, {"variance": 60}),
        ({}, {"principal": 2}),
        ({"tokens": 20}, {"seed": 1}),
    ),
    Growth: (
        *(({}, {name: FIRST}) for name in ("layers", "heads")),
        ({}, {"sample": 1}),
        ({"sample": 2}, {"seed": 1}),
    ),
}
"""Settings of each analysis, and what is then changed."""
CASES = [(kind, base, change) for kind, changes in CHANGES.items() for base, change in changes]


@pytest.mark.parametrize("kind", CHANGES)
def test_every_setting_is_changed_somewhere_below(kind: type[Analysis[Any]]) -> None:
    assert {name for _, change in CHANGES[kind] for name in change} == {field.name for field in fields(kind)}


@pytest.mark.parametrize(("kind", "base", "change"), CASES, ids=lambda part: getattr(part, "__name__", str(part)))
def test_a_changed_setting_changes_a_table(
    kind: type[Analysis[Any]], base: Settings, change: Settings, tiny_model: LoadedModel
) -> None:
    before, after = (_tables(kind(**chosen), tiny_model) for chosen in (base, base | change))
    assert before != after


def _tables(analysis: Analysis[Any], model: LoadedModel) -> tuple[str, ...]:
    """The answer as text: its tables and notes."""
    result = _answer(analysis, model)
    return (*(table.frame.to_csv() for table in result.tables), *result.notes)


def _answer(analysis: Analysis[Any], model: LoadedModel) -> Result:
    if not analysis.needs:
        return analyse_weights([analysis], model)[0]
    encoder = Encoder(model.tokenizer, model.max_tokens)
    texts = [encoder.encode(line, line=number) for number, line in enumerate(LINES, start=1)]
    return analyse_corpus([analysis], model, texts, Pass())[0]
