"""Figures: what is written on them, that it fits, and that the same data give the same bytes."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path

import matplotlib as mpl
import matplotlib.figure
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import pdist, squareform

from analyses.kit.result import (
    ClassMap,
    ColouredText,
    Figure,
    Heatmap,
    LayeredGraph,
    Lines,
    Network,
    Panel,
    Points,
    Series,
)
from bertgeo_cli import style
from bertgeo_cli.figures import ValueKey, _scales, draw, save

TEXT = "the quick brown fox jumps over the lazy dog and runs ##ning away from an in ##com ##pre ##hens ##ible bear"
WORDS = TEXT.split()
ODD = (
    "$5", "and", "$6", "[sep]", "[/b]", "\\alpha_1^2", "%", "中文", "アリババ", "😀", "שלום", "شكرا", "नमस्ते",
    "e\u0301te\u0301", "the", "the", "incomprehensibilities-and-more-of-them", "line\nbreak", "<b>", "{x}",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@cache
def drawing(name: str) -> matplotlib.figure.Figure:
    return draw(GALLERY[name])


def tokens(count: int) -> tuple[str, ...]:
    return ("[CLS]", *(WORDS * count)[: count - 2], "[SEP]")


def attention(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.full(count, 0.2), size=count)


def test_a_curve_has_one_colour_in_all_panels_of_a_figure(tmp_path: Path) -> None:
    x, names = np.arange(3.0), (("attention", "rollout", "flow"), ("flow", "attention"))
    panels = tuple(Lines(tuple(Series(name, x, x + at) for at, name in enumerate(row)), "x", "y") for row in names)
    first, second = (axes.get_lines() for axes in draw(Figure("two", "Two", panels, columns=2)).axes)
    assert to_rgba(first[2].get_color()) == to_rgba(second[0].get_color())
    assert to_rgba(first[0].get_color()) == to_rgba(second[1].get_color())
    assert len({to_rgba(line.get_color()) for line in first}) == 3


def heat(count: int, title: str = "", **options: object) -> Heatmap:
    return Heatmap(attention(count), title, tokens(count), tokens(count), **options)  # type: ignore[arg-type]


def page(*panels: Panel, columns: int = 1, title: str = "A figure", note: str = "") -> Figure:
    return Figure("name", title, panels, columns, note)


def heads(clustered: bool) -> Heatmap:
    features = np.random.default_rng(1).normal(size=(144, 5)) + np.repeat(np.arange(12), 12)[:, None]
    tree = linkage(features, "average")
    order = leaves_list(tree) if clustered else np.arange(144)
    names = tuple(f"L{head // 12}H{head % 12}" for head in order)
    return Heatmap(
        squareform(pdist(features))[np.ix_(order, order)], "", names, names, "head", "head", "distance", None, None,
        groups=tuple(int(head) // 12 for head in order), tree=tree if clustered else None,
    )  # fmt: skip


NAMES = ("closed", "directional", "backward contextual", "forward", "symmetric", "instance", "cluster", "open", "mixed")


def classes(layers: int = 6) -> ClassMap:
    """Classes of layers x 12 heads, one without, and marks in those of class 1."""
    values = np.random.default_rng(0).integers(0, 9, (layers, 12)).astype(float)
    values[0, 0] = np.nan
    marks = tuple(tuple("\N{MINUS SIGN}1" if value == 1 else "" for value in row) for row in values)
    sides = tuple(map(str, range(layers))), tuple(map(str, range(12)))
    return ClassMap(values, "Gates", *sides, "layer", "head", names=NAMES, marks=marks)


def curves(count: int, band: bool = False) -> Lines:
    x = np.arange(13.0)
    ys = [np.exp(-x / 5) * (1 + head / 4) for head in range(count)]
    low, high = (0.1, 0.1) if band else (None, None)
    series = [Series(f"H{h}", x, y, y - low if low else None, y + high if high else None) for h, y in enumerate(ys)]
    return Lines(tuple(series), "depth", "entropy / bits")


def cloud(count: int) -> Points:
    x, y = np.random.default_rng(2).normal(size=(2, count)) * [[2.0], [1.0]]
    names = tuple(f"L{head // 12}H{head % 12}" for head in range(count))
    return Points(x, y, names, tuple(head // 12 for head in range(count)), "layer", "first", "second")


def coloured(count: int = 30) -> ColouredText:
    values = np.random.default_rng(3).dirichlet(np.full(count, 0.4), size=3)
    return ColouredText(tokens(count), ("layer 0", "layer 1", "layer 2"), values, "attention received")


def graph(count: int = 12, depths: int = 5) -> LayeredGraph:
    weights = np.random.default_rng(4).dirichlet(np.full(count, 0.1), size=(depths, count))
    edges = [(d, u, v, float(weights[d, u, v])) for d in range(1, depths) for u in range(count) for v in range(count)]
    return LayeredGraph(tokens(count), depths, tuple(edge for edge in edges if edge[3] > 0.05), "attention weight")


def network(layers: int = 12, hubs: int = 8, count: int = 285) -> Network:
    generator = np.random.default_rng(5)
    size = layers * 12
    first, second = np.sort(generator.integers(0, size, (2, 4 * count)), axis=0)
    apart = np.flatnonzero(first // 12 < second // 12)[:count]
    edges = tuple((int(first[at]), int(second[at]), float(generator.gamma(2))) for at in apart)
    named = set(generator.permutation(size)[:hubs].tolist())
    labels = tuple(f"L{at // 12}H{at % 12}" if at in named else "" for at in range(size))
    heads = tuple(at % 12 for at in range(size))
    return Network(tuple(at // 12 for at in range(size)), heads, labels, edges, "projection kernel")


GALLERY = {
    "one cell": page(Heatmap(np.ones((1, 1)), "L0H0", ("word",), ("word",))),
    "one head": page(heat(12, "L0H3"), note="Model: a small one."),
    "60 tokens": page(heat(60, "L0H3")),
    "128 tokens": page(heat(128, "L0H3")),
    "2 x 2": page(*(heat(9, f"L0H{head}") for head in range(4)), columns=2),
    "7 in 3 columns": page(*(heat(14, f"L0H{head}") for head in range(7)), columns=3),
    "12 x 12": page(*(heat(30, f"L{i // 12}H{i % 12}") for i in range(144)), columns=12),
    "two units": page(heat(8), heat(8, unit="score", low=None, high=None), columns=2),
    "144 heads": page(heads(False)),
    "classes": page(classes(), heat(6, "L0"), classes(3), columns=3),
    "classes of 144 heads": page(classes(12)),
    "144 heads clustered": page(heads(True)),
    "one row": page(Heatmap(attention(30)[:1], "", ("mean",), tokens(30))),
    "layers by tokens": page(Heatmap(attention(30)[:6], "", tuple("012345"), tokens(30), "layer", "token")),
    "odd texts": page(
        Heatmap(attention(20), "L0H0 $x$", ODD, ODD), title="$5 and $6 中文 \\alpha_1^2", note="100 % $a$"
    ),
    "two curves": page(curves(2, True)),
    "twelve curves": page(curves(12)),
    "curves side by side": page(curves(12, True), curves(12), columns=2),
    "eight points": page(cloud(8)),
    "144 points": page(cloud(144)),
    "named points": page(replace(cloud(24), names=("river", "money"))),
    "powers of ten": page(replace(curves(3, True), log_y=True), Lines((), "x", "y", log_y=True), columns=2),
    "coloured text": page(coloured()),
    "odd coloured text": page(ColouredText(ODD, ("$a$", "b"), attention(20)[:2], "weight $w$")),
    "graph": page(graph()),
    "long graph": page(graph(40, 13)),
    "network": page(network()),
    "four networks": page(*(network(6, 8, 60) for _ in range(4)), columns=2),
    "sixteen networks": page(*(network(12, 20, 99) for _ in range(16)), columns=4),
    "written cells": page(Heatmap(attention(4), "", tuple("QKVO"), tuple("QKVO"), written=".2f")),
    "no panels": page(),
    "mixture": page(heat(5, "a"), curves(3), cloud(5), coloured(5), graph(4, 3), columns=2, title="Long title " * 30),
}


def written(drawn: matplotlib.figure.Figure) -> list[tuple[str, Bbox]]:
    """Every text on the page and the box of its ink's line."""
    with mpl.rc_context(style.parameters([style.BASE_FONT])):  # type: ignore[arg-type]
        drawn.canvas.draw()
    texts = [text for text in drawn.findobj(Text) if text.get_text() and text.get_visible() and shown(text)]
    return [(text.get_text(), text.get_window_extent()) for text in texts]


def shown(text: Text) -> bool:
    """matplotlib keeps labels of ticks beyond the limits, and on sides that carry none."""
    axis = text.axes
    if axis is None or not axis.axison:
        return axis is None or text in axis.texts
    hidden = [
        label
        for one in (axis.xaxis, axis.yaxis)
        for tick in one.get_major_ticks()
        for label in (tick.label1, tick.label2)
        if not label.get_visible() or not inside(one.get_view_interval(), tick.get_loc())
    ]
    return text not in hidden


def inside(interval: np.ndarray, place: float) -> bool:
    low, high = sorted(interval)
    return bool(low - 1e-9 <= place <= high + 1e-9)


def ticks(axes: Axes, side: str) -> list[str]:
    return [label.get_text() for label in getattr(axes, f"get_{side}ticklabels")()]


def bars(drawn: matplotlib.figure.Figure) -> list[Axes]:
    return [axes for axes in drawn.axes if axes.get_label() == "colour bar"]


@pytest.mark.parametrize("name", GALLERY)
def test_every_text_is_whole_and_apart_from_others(name: str) -> None:
    drawn = drawing(name)
    texts, canvas = written(drawn), drawn.bbox
    for text, box in texts:
        assert canvas.x0 <= box.x0, text
        assert box.x1 <= canvas.x1, text
        assert canvas.y0 <= box.y0, text
        assert box.y1 <= canvas.y1, text
    for (one, box), (other, second) in combinations(texts, 2):
        overlap = Bbox.intersection(box, second)
        # Neighbouring boxes may touch: they include the room of letters that hang or rise.
        assert overlap is None or min(overlap.width, overlap.height) < 1.6, (one, other)


@pytest.mark.parametrize("name", GALLERY)
def test_nothing_is_too_small_to_read(name: str) -> None:
    sizes = [text.get_fontsize() for text in drawing(name).findobj(Text) if text.get_text()]
    assert min(sizes) >= style.SMALLEST


@pytest.mark.parametrize("format", ["png", "svg", "pdf"])
@pytest.mark.parametrize("name", ["odd texts", "mixture", "144 heads clustered", "network"])
def test_same_data_same_bytes(name: str, format: str, tmp_path: Path) -> None:  # noqa: A002
    save(GALLERY[name], tmp_path / "a", format)  # type: ignore[arg-type]
    with mpl.rc_context({"font.size": 30, "svg.hashsalt": "other", "savefig.dpi": 30, "text.parse_math": True}):
        save(GALLERY[name], tmp_path / "b", format)  # type: ignore[arg-type]
    data = (tmp_path / "a").read_bytes()
    assert data == (tmp_path / "b").read_bytes()
    assert b"matplotlib.org" not in data
    assert b"Matplotlib v" not in data


def test_same_bytes_in_another_process(tmp_path: Path) -> None:
    program = (
        "import hashlib, sys; from pathlib import Path; import test_figures as t\n"
        "for f in ('png', 'svg', 'pdf'):\n"
        "    t.save(t.GALLERY['odd texts'], Path(sys.argv[1]), f)\n"
        "    print(hashlib.sha256(Path(sys.argv[1]).read_bytes()).hexdigest())"
    )
    here = Path(__file__).parent
    outputs = []
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": f"{here}{os.pathsep}{here.parent}"}
        command = [sys.executable, "-c", program, str(tmp_path / seed)]
        outputs.append(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert len(outputs[0].split()) == 3
    assert len(set(outputs[0].split())) == 3
    assert outputs[0] == outputs[1]
    assert hashlib.sha256(b"").hexdigest() not in outputs[0]


def test_pyplot_and_global_settings_stay_out() -> None:
    before = dict(mpl.rcParams)
    draw(GALLERY["odd texts"])
    assert dict(mpl.rcParams) == before
    program = "import sys, bertgeo_cli.figures; print('matplotlib.pyplot' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "False\n"
    )


def test_a_head_is_labelled_in_order_with_query_down_and_key_across() -> None:
    axes = draw(page(heat(8, "L0H3"))).axes[0]
    assert (ticks(axes, "y"), ticks(axes, "x")) == (list(tokens(8)), list(tokens(8)))
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("query", "key")
    low, high = axes.get_ylim()
    assert low > high  # the first query is on top
    assert np.array_equal(axes.images[0].get_array(), attention(8))


def test_edited_weights_show_where_they_were_put() -> None:
    values = np.full((3, 3), 0.0)
    values[0, 2] = 1.0
    axes = draw(page(Heatmap(values, "", ("a", "b", "c"), ("a", "b", "c")))).axes[0]
    image = axes.images[0]
    assert image.get_array()[0, 2] == 1.0
    assert [axes.get_xticks()[2], axes.get_yticks()[0]] == [2, 0]
    assert image.origin == "upper"


def test_equal_words_keep_their_own_places() -> None:
    axes = draw(page(Heatmap(attention(4), "", ("the", "cat", "the", "cat"), ("the", "cat", "the", "cat")))).axes[0]
    assert ticks(axes, "x") == ["the", "cat", "the", "cat"]
    assert list(axes.get_xticks()) == [0, 1, 2, 3]


def test_classes_have_their_colours_marks_and_a_legend_of_those_that_occur() -> None:
    values = np.array([[0.0, 4.0], [1.0, np.nan]])
    panel = ClassMap(values, "t", names=NAMES, colours=(8, 3, 2, 2, 1), marks=(("x", ""), ("y", "z")))
    drawn = draw(page(panel))
    axes, image = drawn.axes[0], drawn.axes[0].images[0]
    shown = image.to_rgba(image.get_array())
    for place, colour in (((0, 0), 8), ((0, 1), 1), ((1, 0), 3)):
        assert shown[place] == pytest.approx(to_rgba(style.CLASSES[colour]), abs=1e-6)
    assert shown[1, 1][3] == 0
    assert [text.get_text() for text in axes.texts] == ["x", "y"]
    legend = drawn.legends[0]
    assert [text.get_text() for text in legend.get_texts()] == ["closed", "directional", "symmetric"]
    assert [patch.get_facecolor() for patch in legend.get_patches()] == [
        to_rgba(style.CLASSES[place]) for place in (8, 3, 1)
    ]


def test_panels_of_one_scale_share_one_bar() -> None:
    drawn = draw(GALLERY["2 x 2"])
    assert [axes.get_ylabel() for axes in bars(drawn)] == ["attention weight"]
    assert bars(drawn)[0].get_ylim() == (0.0, 1.0)


def test_panels_of_two_scales_have_their_own_bars() -> None:
    assert [axes.get_ylabel() for axes in bars(draw(GALLERY["two units"]))] == ["attention weight", "score"]


def test_open_limits_are_taken_over_all_panels_alike() -> None:
    panels = (
        Heatmap(np.array([[1.0, 2.0]]), low=None, high=None),
        Heatmap(np.array([[3.0, 5.0]]), low=None, high=None),
    )
    drawn = draw(page(*panels, columns=2))
    assert [axes.images[0].get_clim() for axes in drawn.axes if axes.images] == [(1.0, 5.0), (1.0, 5.0)]


@pytest.mark.parametrize(("most", "extend"), [(1.0 + 4e-16, "neither"), (1.01, "max")])
def test_a_bar_points_beyond_its_limits_only_for_more_than_rounding(most: float, extend: str) -> None:
    scale = _scales([Heatmap(np.array([[0.5, most]]), low=0.0, high=1.0)])[0]
    assert isinstance(scale, ValueKey)
    assert scale.extend == extend


def test_a_diverging_scale_is_centred_on_zero() -> None:
    panel = Heatmap(np.array([[-1.0, 3.0]]), low=None, high=None, diverging=True)
    assert draw(page(panel)).axes[0].images[0].get_clim() == (-3.0, 3.0)


def test_only_outer_panels_carry_labels() -> None:
    axes = drawing("12 x 12").axes[:144]
    assert [bool(one.get_ylabel()) for one in axes] == [place % 12 == 0 for place in range(144)]
    assert [bool(one.get_xlabel()) for one in axes] == [place >= 132 for place in range(144)]


def test_small_panels_number_their_tokens_and_the_note_names_them() -> None:
    assert ticks(drawing("12 x 12").axes[0], "y") == ["0", "10", "20"]
    note = next(text.get_text() for text in drawing("12 x 12").texts if text.get_text().startswith("Numbers along"))
    assert "0 [CLS], 1 the, 2 quick" in note
    assert any("29 [SEP]" in text.get_text() for text in drawing("12 x 12").texts)


def test_panels_of_different_texts_are_each_labelled() -> None:
    drawn = draw(page(heat(5), heat(6), columns=2))
    assert [len(ticks(axes, "x")) for axes in drawn.axes[:2]] == [5, 6]
    assert all(axes.get_ylabel() == "query" for axes in drawn.axes[:2])


def test_labels_that_do_not_match_the_matrix_are_refused() -> None:
    with pytest.raises(ValueError, match="2 labels for 3 cells"):
        draw(page(Heatmap(np.ones((3, 3)), "", ("a", "b"), ("a", "b", "c"))))


def test_missing_values_are_hatched_and_noted(tmp_path: Path) -> None:
    panel = Heatmap(np.array([[0.5, np.nan], [np.inf, 0.5]]))
    axes = draw(page(panel)).axes[0]
    assert axes.patch.get_hatch()
    assert axes.images[0].get_array().mask.tolist() == [[False, True], [True, False]]
    assert axes.images[0].cmap.get_bad()[3] == 0  # the hatch shows through
    assert save(page(panel), tmp_path / "f.png", "png") == ["Hatched grey: no value."]


def test_groups_are_strips_with_a_bar_named_layer() -> None:
    drawn = drawing("144 heads clustered")
    assert [axes.get_ylabel() for axes in bars(drawn)] == ["distance", "layer"]
    assert ticks(bars(drawn)[1], "y") == [str(layer) for layer in range(12)]
    rows, columns = (axes.images[0].get_array() for axes in drawn.axes[1:3])
    assert rows[:, 0].tolist() == columns[0].tolist() == list(heads(True).groups)


def test_the_dendrogram_joins_the_rows_it_stands_beside() -> None:
    values = np.array([[0.0, 9, 9], [9, 0, 1], [9, 1, 0]])  # leaves in the order 2, 0, 1
    tree = np.array([[0.0, 1, 1, 2], [2, 3, 9, 3]])
    drawn = draw(page(Heatmap(values, low=None, high=None, tree=tree)))
    beside = next(axes for axes in drawn.axes if axes.get_xlabel() == "distance")
    ends = [{(float(x), float(y)) for x, y in branch if x == 0} for branch in beside.collections[0].get_segments()]
    assert sorted(map(sorted, ends)) == [[(0.0, 0.0)], [(0.0, 1.0), (0.0, 2.0)]]
    assert beside.get_ylim() == drawn.axes[0].get_ylim()


def test_curves_have_whole_ticks_bands_and_a_legend_beside_them() -> None:
    drawn = draw(page(curves(12, True)))
    axes, legend = drawn.axes[0], drawn.legends[0]
    assert all(float(tick).is_integer() for tick in axes.get_xticks())
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("depth", "entropy / bits")
    assert len(axes.collections) == 12
    assert [text.get_text() for text in legend.get_texts()] == [f"H{head}" for head in range(12)]
    drawn.canvas.draw()
    assert legend.get_window_extent().x0 > axes.get_window_extent().x1
    assert [line.get_color() for line in axes.lines] == [line.get_color() for line in legend.get_lines()]
    assert len({to_rgba(line.get_color()) for line in axes.lines}) == 12


def test_a_single_layer_has_a_single_whole_tick() -> None:
    drawn = draw(page(Lines((Series("one", np.array([3.0]), np.array([0.5])),), "layer", "y", low=0, high=1)))
    axes = drawn.axes[0]
    assert [tick for tick in axes.get_xticks() if inside(np.array(axes.get_xlim()), tick)] == [3.0]
    assert axes.get_ylim()[0] <= 0 < 1 <= axes.get_ylim()[1]


def test_a_logarithmic_axis_has_round_ticks_and_a_marked_place() -> None:
    x = np.array([0.35, 1.0, 5.0, 90.0])
    curve = (Series("one", x, x),)
    axes = draw(page(Lines(curve, "tau", "y", whole=False, log_x=True, mark=5.0, mark_label="own"))).axes[0]
    assert axes.get_xscale() == "log"
    assert axes.get_xticks().tolist() == [0.5, 1, 2, 5, 10, 20, 50, 100]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0.5", "1", "2", "5", "10", "20", "50", "100"]
    assert axes.lines[-1].get_xdata() == [5.0, 5.0]
    assert [(text.get_text(), text.get_position()[0]) for text in axes.texts] == [("own", 5.0)]
    many = draw(page(Lines((Series("one", 10.0 ** np.arange(12), x[:1].repeat(12)),), "tau", "y", log_x=True))).axes[0]
    assert many.get_xticks().tolist() == (10.0 ** np.arange(12)).tolist()


def test_points_are_labelled_as_far_as_they_fit(tmp_path: Path) -> None:
    few, many = draw(page(cloud(8))).axes[0], draw(page(cloud(144))).axes[0]
    assert sorted(text.get_text() for text in few.texts) == sorted(cloud(8).labels)
    assert 40 < len(many.texts) < 144
    (note,) = save(page(cloud(144)), tmp_path / "f.png", "png")
    assert note == f"{len(many.texts)} of 144 labels fit without overlap, the most isolated points first."


def named_cloud() -> Points:
    return replace(cloud(24), names=("river", "money"))


def test_points_with_names_have_a_legend_of_them() -> None:
    drawn = draw(page(named_cloud(), named_cloud(), columns=2))
    (legend,) = drawn.legends
    assert [text.get_text() for text in legend.get_texts()] == ["river", "money"]
    colours = [to_rgba(colour) for colour in style.FEW[:2]]
    assert [patch.get_facecolor() for patch in legend.get_patches()] == colours
    painted = [tuple(colour) for colour in drawn.axes[0].collections[0].get_facecolors()]
    assert painted == [colours[group] for group in cloud(24).groups]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.15, 6.0], ["0.2", "0.5", "1", "2", "5"]),
        ([1e-7, 10.0], ["10⁻⁷", "10⁻⁶", "10⁻⁵", "10⁻⁴", "0.001", "0.01", "0.1", "1", "10"]),
    ],
)
def test_a_logarithmic_axis_is_numbered_by_powers_of_ten(values: list[float], expected: list[str]) -> None:
    axes = draw(page(Lines((Series("a", np.arange(2.0), np.array(values)),), "x", "y", log_y=True))).axes[0]
    assert axes.get_yscale() == "log"
    assert ticks(axes, "y") == expected
    places = axes.transData.transform([(0, tick) for tick in axes.get_yticks()])[:, 1]
    exponents = np.log10(axes.get_yticks())
    np.testing.assert_allclose(np.diff(places) / np.diff(exponents), np.ptp(places) / np.ptp(exponents))


def test_an_inch_is_worth_the_same_both_ways() -> None:
    axes = draw(page(cloud(50))).axes[0]
    (x0, y0), (x1, y1) = axes.transData.transform([(0, 0), (1, 1)])
    assert x1 - x0 == pytest.approx(y1 - y0, rel=1e-6)


def test_words_stand_on_their_colour_in_reading_order() -> None:
    panel = ColouredText(("low", "high", "none"), ("row",), np.array([[0.0, 1.0, np.nan]]), "weight", high=1.0)
    axes = draw(page(panel)).axes[0]
    row, *words = axes.texts
    assert row.get_text() == "row"
    assert [word.get_text() for word in words] == ["low", "high", "none"]
    assert [word.get_color() for word in words] == ["white", "black", "black"]
    assert words[0].get_position()[0] < words[1].get_position()[0]
    assert [bool(patch.get_hatch()) for patch in axes.patches] == [False, False, True]
    assert axes.patches[0].get_facecolor() == pytest.approx(mpl.colormaps["viridis"](0.0))


def test_long_text_wraps_inside_its_panel() -> None:
    axes = draw(page(coloured(90))).axes[0]
    assert len({round(patch.get_y(), 3) for patch in axes.patches}) > 6
    assert max(patch.get_x() + patch.get_width() for patch in axes.patches) <= axes.get_xlim()[1] + 1e-9


def test_edges_run_upwards_and_the_heavy_ones_lie_on_top() -> None:
    panel = LayeredGraph(("a", "b", "c"), 3, ((2, 0, 1, 0.9), (1, 2, 0, 0.1)), "weight")
    drawn = draw(page(panel))
    axes = drawn.axes[0]
    edges = axes.collections[0]
    assert [segment.tolist() for segment in edges.get_segments()] == [[[0, 0], [2, 1]], [[1, 1], [0, 2]]]
    assert edges.get_linewidths()[0] < edges.get_linewidths()[1]
    assert ticks(axes, "x") == ["a", "b", "c"] * 2  # below and above
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("token", "depth")
    assert [bar.get_ylabel() for bar in bars(drawn)] == ["weight"]


def test_links_run_from_layer_to_layer_and_the_strong_ones_lie_on_top() -> None:
    edges = ((0, 2, 5.0), (1, 3, 1.0), (0, 3, 3.0))
    panel = Network((0, 0, 2, 7), (1, 4, 4, 1), ("", "L0H4", "", ""), edges, "kernel")
    drawn = draw(page(panel))
    axes = drawn.axes[0]
    links, nodes = axes.collections
    ends = [(path.vertices[0].tolist(), path.vertices[-1].tolist()) for path in links.get_paths()]
    assert ends == [([0, 1], [2, 0]), ([0, 0], [2, 0]), ([0, 0], [1, 1])]  # weights 1, 3 and 5
    assert list(np.diff(links.get_linewidths()) > 0) == [True, True]
    assert (ticks(axes, "x"), ticks(axes, "y")) == (["0", "2", "7"], ["1", "4"])
    assert nodes.get_offsets().tolist() == [[0, 0], [0, 1], [1, 1], [2, 0]]
    assert nodes.get_sizes().tolist() == pytest.approx([40, 22, 22, 40])
    assert [text.get_text() for text in axes.texts] == ["L0H4"]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # head 0 is on top
    assert [bar.get_ylabel() for bar in bars(drawn)] == ["kernel"]


def test_strong_links_are_dark_whichever_way_strength_runs() -> None:
    edges = ((0, 1, 10.0), (0, 2, 80.0))
    for falling, strongest in ((False, 80.0), (True, 10.0)):
        panel = Network((0, 1, 1), (0, 0, 1), ("",) * 3, edges, "degrees", falling)
        drawn = draw(page(panel))
        links = drawn.axes[0].collections[0]
        assert links.get_edgecolors()[1] == pytest.approx(mpl.colormaps["viridis"](0.0))
        assert links.get_paths()[1].vertices[-1].tolist() == [1, 0 if strongest == 10.0 else 1]
        (bar,) = bars(drawn)
        shades = bar.collections[-1].get_cmap()
        assert shades(1.0 if strongest == 80.0 else 0.0) == pytest.approx(mpl.colormaps["viridis"](0.0))


def test_cells_have_their_values_written_in_them() -> None:
    panel = Heatmap(np.array([[0.125, -2.0], [np.nan, 1.0]]), low=None, high=None, written=".2f")
    texts = draw(page(panel)).axes[0].texts
    assert [text.get_text() for text in texts] == ["0.12", "\N{MINUS SIGN}2.00", "1.00"]
    assert [text.get_position() for text in texts] == [(0, 0), (1, 0), (1, 1)]


def test_user_text_is_literal() -> None:
    texts = [text for text in draw(GALLERY["odd texts"]).findobj(Text) if text.get_text()]
    assert {"$5", "\\alpha_1^2", "[/b]", "%", "L0H0 $x$", "100 % $a$"} <= {text.get_text() for text in texts}
    assert not any(text.get_parse_math() or text.get_usetex() for text in texts)


def test_what_no_font_draws_is_a_code_point_and_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(style, "installed", lambda: (style.BASE_FONT,))
    labels = ("アリババ", "中文 x", "a\tb", "न\u093f")
    figure = page(Heatmap(attention(4), "", labels, labels))
    assert ticks(draw(figure).axes[0], "y") == [
        "[U+30A2 30EA 30D0 30D0]", "[U+4E2D 6587] x", "a[U+0009]b", "[U+0928 093F]",
    ]  # fmt: skip
    (note,) = save(figure, tmp_path / "f.png", "png")
    assert "No installed font draws U+0009, U+0928, U+093F, U+30A2" in note
    assert "中" not in note


def test_fonts_are_added_only_when_a_character_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(style, "installed", lambda: ("DejaVu Sans", "STIXGeneral"))
    setter = style.Typesetter()
    assert setter.label("plain שלום") == "plain שלום"
    assert setter.families == ["DejaVu Sans"]
    only_there = next(chr(c) for c in sorted(style.charmap("STIXGeneral") - style.charmap("DejaVu Sans")) if c > 0x2000)
    assert setter.label(only_there) == only_there
    assert setter.families == ["DejaVu Sans", "STIXGeneral"]
    assert not setter.missing


def test_hebrew_and_arabic_run_from_right_to_left() -> None:
    """The first letter is drawn at the right: the width of ink left of it grows with what follows."""
    drawn = draw(page(Heatmap(np.ones((2, 1)), "", ("וווש", "שווו"), ("x",))))
    drawn.canvas.draw()
    pixels = np.asarray(drawn.canvas.buffer_rgba())[..., 0].astype(int)  # type: ignore[attr-defined]
    boxes = [label.get_window_extent() for label in drawn.axes[0].get_yticklabels()]
    ink = [255 - pixels[-int(b.y1) - 1 : -int(b.y0), int(b.x0) : int(b.x1)] for b in boxes]
    first, last = ink  # shin is wide and dark, vav a thin stroke: its side is the heavier one
    left, right = first[:, : first.shape[1] // 2].sum(), first[:, first.shape[1] // 2 :].sum()
    assert left > right  # written last, so at the left
    assert last[:, : last.shape[1] // 2].sum() < last[:, last.shape[1] // 2 :].sum()


def test_tokens_of_a_right_to_left_text_keep_the_logical_order() -> None:
    labels = ("[CLS]", "שלום", "the", "cat", "شكرا")
    axes = draw(page(Heatmap(attention(5), "", labels, labels))).axes[0]
    assert ticks(axes, "x") == list(labels)
    assert list(axes.get_xticks()) == [0, 1, 2, 3, 4]


def test_long_labels_lose_their_middle() -> None:
    label = style.Typesetter().label("a" * 40 + "b" * 40)
    assert label == "a" * 12 + "…" + "b" * 11
    assert style.Typesetter().label("x" * style.LONGEST_LABEL) == "x" * style.LONGEST_LABEL


NAN = np.full((3, 3), np.nan)
BAD: dict[str, Panel] = {
    "all missing": Heatmap(NAN),
    "all missing, open": Heatmap(NAN, low=None, high=None, diverging=True),
    "classes all missing": ClassMap(NAN, names=("a", "b")),
    "no classes": ClassMap(np.zeros((0, 0)), names=("a", "b")),
    "constant": Heatmap(np.full((3, 3), 2.0), low=None, high=None),
    "constant zero": Heatmap(np.zeros((3, 3)), low=None, high=None, diverging=True),
    "tiny": Heatmap(np.array([[0.0, 1e-300]]), low=None, high=None),
    "huge": Heatmap(np.array([[-1e30, 1e30]]), low=None, high=None),
    "no cells": Heatmap(np.zeros((0, 0))),
    "no columns": Heatmap(np.zeros((3, 0)), "", ("a", "b", "c")),
    "no curves": Lines((), "x", "y"),
    "empty curve": Lines((Series("a", np.array([]), np.array([])),), "x", "y"),
    "missing curve": Lines((Series("a", np.arange(3.0), np.full(3, np.nan)),), "x", "y"),
    "curve with a gap": Lines((Series("", np.arange(3.0), np.array([1, np.nan, 1])),), "x", "y", low=1, high=1),
    "constant by powers": Lines((Series("a", np.arange(3.0), np.full(3, 2.0)),), "x", "y", log_y=True),
    "zeros by powers": Lines((Series("a", np.arange(3.0), np.zeros(3)),), "x", "y", log_y=True),
    "far apart by powers": Lines((Series("a", np.arange(2.0), np.array([1e-30, 1e30])),), "x", "y", log_y=True),
    "no points": Points(np.array([]), np.array([]), (), (), "group", "x", "y"),
    "one point": Points(np.array([1.0]), np.array([1.0]), ("a",), (0,), "group", "x", "y"),
    "equal points": Points(np.ones(5), np.ones(5), tuple("abcde"), (), "group", "x", "y"),
    "missing points": Points(np.array([np.nan, 1]), np.array([1.0, 2]), ("a", "b"), (0, 1), "group", "x", "y"),
    "no words": ColouredText((), (), np.zeros((0, 0)), "unit"),
    "words without value": ColouredText(("a", "b"), ("r",), np.full((1, 2), np.nan), "unit"),
    "no graph": LayeredGraph((), 0, (), "unit"),
    "no edges": LayeredGraph(("a", "b"), 3, (), "unit"),
    "no nodes": Network((), (), (), (), "unit"),
    "nodes alone": Network((0, 1), (0, 0), ("L0H0", ""), (), "unit"),
    "equal links": Network((0, 1, 1), (0, 0, 1), ("", "", ""), ((0, 1, 2.0), (0, 2, 2.0)), "unit"),
    "no cells to write": Heatmap(np.zeros((0, 0)), written=".2f"),
}


@pytest.mark.parametrize("format", ["png", "svg", "pdf"])
@pytest.mark.parametrize("panel", BAD.values(), ids=BAD.keys())
def test_bad_data_still_give_a_page(panel: Panel, format: str, tmp_path: Path) -> None:  # noqa: A002
    save(page(panel, title="", note=""), tmp_path / "f", format)  # type: ignore[arg-type]
    assert (tmp_path / "f").stat().st_size > 500


@pytest.mark.parametrize("format", ["svg", "pdf"])
def test_vector_formats_draw_every_text_without_complaint(format: str, tmp_path: Path) -> None:  # noqa: A002
    for name in ("odd texts", "odd coloured text", "144 points", "graph"):
        save(GALLERY[name], tmp_path / "f", format)  # type: ignore[arg-type]
        assert (tmp_path / "f").stat().st_size > 5000
