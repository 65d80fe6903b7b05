"""Draws figures that are data: each panel says how much room it needs, the page places it, and it is painted there.

All lengths are inches and run from the page's upper left corner, as on paper.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property, singledispatch
from math import ceil, floor, log10
from pathlib import Path
from typing import Any, Literal, TypeVar

import matplotlib.figure
import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.colors import BoundaryNorm, ListedColormap, Normalize, to_hex, to_rgba
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.path import Path as Curve
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from scipy.cluster.hierarchy import dendrogram
from scipy.spatial import KDTree

from analyses.kit.result import (
    ClassMap,
    ColouredText,
    Figure,
    Floats,
    Heatmap,
    LayeredGraph,
    Lines,
    Network,
    Panel,
    Points,
    Series,
)
from bertgeo_cli import style
from bertgeo_cli.style import Typesetter

Format = Literal["png", "svg", "pdf"]
Whole = NDArray[np.intp]
T = TypeVar("T")

# Inches, and the size of type, in scatters and coloured texts.
DOT, POINT_LABEL, MOST_LABELS = 0.03, 6.0, 500
NODE_LABEL = 6.5
LINE, PARAGRAPH = 0.2, 0.08
KEY_LEAST = 1.0  # the shortest colour bar

# Without these matplotlib writes its version and the time of day into the file.
METADATA: dict[Format, dict[str, None]] = {
    "png": {"Software": None},
    "svg": {"Creator": None, "Date": None},
    "pdf": {"Creator": None, "Producer": None, "CreationDate": None},
}


def draw(figure: Figure) -> matplotlib.figure.Figure:
    """The figure as matplotlib holds it, apart from pyplot and from the user's own settings."""
    setter = Typesetter()
    readable = _readable(figure, setter)
    with _settings(setter):
        return _Page(readable, setter).draw()


def save(figure: Figure, path: Path, format: Format) -> list[str]:  # noqa: A002
    """Write the figure; the same data give the same bytes. Returns what it could not show as asked."""
    setter = Typesetter()
    readable = _readable(figure, setter)
    with _settings(setter):
        page = _Page(readable, setter)
        drawn = page.draw()
        dpi = min(style.DPI, style.LARGEST / max(drawn.get_size_inches()))
        drawn.savefig(path, format=format, dpi=dpi, metadata=METADATA[format])
    return page.notes


@contextmanager
def _settings(setter: Typesetter) -> Iterator[None]:
    with matplotlib.style.context(["default", style.parameters(setter.families)]):
        yield


# ---------------------------------------------------------------------------------------------------------- texts

LABELS = ("rows", "columns", "labels", "tokens", "label")


def _readable(value: T, setter: Typesetter, name: str = "") -> T:
    """The same data with every text made drawable, and short where it labels something."""
    made: Any = value
    if isinstance(value, str):
        made = setter.label(value) if name in LABELS else setter.text(value)
    elif isinstance(value, tuple):
        made = tuple(_readable(item, setter, name) for item in value)
    elif is_dataclass(value) and not isinstance(value, type):
        made = replace(value, **{f.name: _readable(getattr(value, f.name), setter, f.name) for f in fields(value)})
    return made


def _missing(characters: set[str]) -> str:
    codes = [f"U+{ord(character):04X}" for character in sorted(characters)]
    more = f" and {len(codes) - 12} more" if len(codes) > 12 else ""
    return f"No installed font draws {', '.join(codes[:12])}{more}: shown as code points in brackets."


# ----------------------------------------------------------------------------------------------- keys to the colours


@dataclass(frozen=True)
class ValueKey:
    """A colour bar of values."""

    unit: str
    low: float
    high: float
    colours: str
    extend: str = "neither"

    @property
    def norm(self) -> Normalize:
        """The values from the bar's one end to its other."""
        return Normalize(self.low, self.high)


@dataclass(frozen=True)
class GroupKey:
    """A colour bar of groups, such as layers."""

    label: str
    groups: tuple[int, ...]

    def places(self, groups: Sequence[int]) -> list[int]:
        """Where each of `groups` stands among the key's groups."""
        return [self.groups.index(group) for group in groups]


@dataclass(frozen=True)
class LineKey:
    """A legend of curves."""

    labels: tuple[str, ...]
    dashed: tuple[bool, ...]


@dataclass(frozen=True)
class ClassKey:
    """A legend of classes: those that occur."""

    labels: tuple[str, ...]
    colours: tuple[str, ...]


Key = ValueKey | GroupKey | LineKey | ClassKey


@singledispatch
def _keys(panel: Panel, scale: ValueKey | None) -> list[Key]:
    return [scale] if scale else []


@_keys.register
def _(panel: Heatmap, scale: ValueKey) -> list[Key]:
    return [scale, GroupKey("layer", tuple(sorted(set(panel.groups))))] if panel.groups else [scale]


@_keys.register
def _(panel: ClassMap, scale: None) -> list[Key]:
    occurring = [at for at in range(len(panel.names)) if (panel.values == at).any()]
    colours = _class_colours(panel)
    names = tuple(panel.names[at] for at in occurring)
    return [ClassKey(names, tuple(colours[at] for at in occurring))] if occurring else []


@_keys.register
def _(panel: Points, scale: None) -> list[Key]:
    if panel.names:
        return [ClassKey(panel.names, tuple(map(to_hex, _name_colours(panel))))]
    return [GroupKey(panel.group_label, tuple(sorted(set(panel.groups))))] if panel.groups else []


@_keys.register
def _(panel: Lines, scale: None) -> list[Key]:
    return [_line_key(panel)] if any(series.label for series in panel.series) else []


def _line_key(panel: Lines) -> LineKey:
    return LineKey(tuple(s.label for s in panel.series), tuple(s.dashed for s in panel.series))


def _scales(panels: Sequence[Panel]) -> list[ValueKey | None]:
    """The colour scale of each panel. Panels declared alike share one, so that their colours can be compared."""
    declared = [_declared(panel) for panel in panels]
    return [_scale(d, [_values(p) for p, e in zip(panels, declared, strict=True) if e == d]) for d in declared]


Declared = tuple[str, float | None, float | None, str]


def _declared(panel: Panel) -> Declared | None:
    match panel:
        case ClassMap():
            return None
        case Heatmap():
            return panel.unit, panel.low, panel.high, style.DIVERGING if panel.diverging else style.SEQUENTIAL
        case ColouredText():
            return panel.unit, panel.low, panel.high, style.SEQUENTIAL
        case LayeredGraph():
            return panel.unit, 0.0, None, style.EDGES
        case Network():
            return panel.unit, None, None, style.LINKS[panel.falling]
        case _:
            return None


def _values(panel: Panel) -> Floats:
    if isinstance(panel, (LayeredGraph, Network)):
        values = np.array([edge[-1] for edge in panel.edges], dtype=float)
    else:
        values = np.asarray(getattr(panel, "values", []), dtype=float).ravel()
    return values[np.isfinite(values)]


def _scale(declared: Declared | None, values: Sequence[Floats]) -> ValueKey | None:
    if declared is None:
        return None
    unit, low, high, colours = declared
    least, most = _range(np.concatenate(values))
    low, high = least if low is None else low, most if high is None else high
    if colours == style.DIVERGING:
        low, high = -max(abs(low), abs(high)), max(abs(low), abs(high))
    low, high = _apart(low, high)
    outside = {(True, True): "both", (True, False): "min", (False, True): "max", (False, False): "neither"}
    rounding = 1e-9 * (high - low)
    return ValueKey(unit, low, high, colours, outside[least < low - rounding, most > high + rounding])


def _range(values: Floats) -> tuple[float, float]:
    return (float(values.min()), float(values.max())) if values.size else (0.0, 1.0)


def _apart(low: float, high: float) -> tuple[float, float]:
    """Limits that a scale can divide by; a constant lies in the middle."""
    if high - low > 1e-12 * max(abs(low), abs(high), 1e-290):
        return low, high
    half = 0.5 * abs(low) or 0.5
    return low - half, low + half


# ------------------------------------------------------------------------------------------------------------ the page


@dataclass(frozen=True)
class Room:
    """The inches that a panel asks for: its inside, and around it."""

    width: float
    height: float
    left: float = 0.05
    right: float = 0.1
    top: float = 0.05
    bottom: float = 0.1


@dataclass(frozen=True)
class Box:
    """A place on the page: left, top, width, height."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class Seat:
    """Where in the grid a panel sits: whether it must label its left and its lower side itself."""

    left: bool
    bottom: bool
    columns: int


class _Page:
    """One figure being drawn."""

    def __init__(self, figure: Figure, setter: Typesetter):
        self.figure, self.setter = figure, setter
        self.panels = figure.panels or (Lines((), "", ""),)
        self.columns = max(1, min(figure.columns, len(self.panels)))
        self.notes: list[str] = []
        self.canvas = matplotlib.figure.Figure()
        FigureCanvasAgg(self.canvas)

    def note(self, text: str) -> None:
        """Something to be said below the figure, once."""
        if text not in self.notes:
            self.notes.append(text)

    def line_colours(self, key: LineKey) -> list[str | style.Colour]:
        """A colour for each curve; one that stands in several panels has the same in all of them."""
        if len(set(key.labels)) < len(key.labels):  # curves that only their order tells apart
            return _line_colours(key.dashed)
        return [self._curves[label] for label in key.labels]

    @cached_property
    def _curves(self) -> dict[str, str | style.Colour]:
        dashed: dict[str, bool] = {}
        for panel in self.panels:
            for series in panel.series if isinstance(panel, Lines) else ():
                dashed.setdefault(series.label, series.dashed)
        return dict(zip(dashed, _line_colours(list(dashed.values())), strict=True))

    def axes(self, box: Box, label: str = "") -> Axes:
        """Empty axes at a place on the page."""
        width, height = self.canvas.get_size_inches()
        rect = (box.x / width, 1 - (box.y + box.height) / height, box.width / width, box.height / height)
        return self.canvas.add_axes(rect, label=label)

    def write(self, x: float, y: float, text: str, size: float, colour: str = style.INK) -> None:
        """A line of type, its upper left corner at (x, y)."""
        width, height = self.canvas.get_size_inches()
        self.canvas.text(x / width, 1 - y / height, text, size=size, color=colour, va="top")

    def draw(self) -> matplotlib.figure.Figure:
        self._plan()
        if self.setter.missing:
            self.note(_missing(self.setter.missing))
        title, note = self._set_type()
        head = _lines_height(title, style.TITLE)
        self.canvas.set_size_inches(self.width, 2 * style.MARGIN + head + self.height + _lines_height(note, style.NOTE))
        self._write_lines(title, style.MARGIN, style.TITLE, style.INK)
        self._paint(style.MARGIN + head)
        self._write_lines(note, style.MARGIN + head + self.height, style.NOTE, style.QUIET)
        return self.canvas

    def _plan(self) -> None:
        self.scales = _scales(self.panels)
        keys = [_keys(panel, scale) for panel, scale in zip(self.panels, self.scales, strict=True)]
        self.shared = _shared(self.panels, keys)
        self.own = [[key for key in mine if key not in self.shared] for mine in keys]
        self.seats = [self._seat(place) for place in range(len(self.panels))]
        self.rooms = [self._room(place) for place in range(len(self.panels))]
        grid = range(self.columns), range(ceil(len(self.panels) / self.columns))
        self.across = [self._span([r for i, r in enumerate(self.rooms) if i % self.columns == c], 0) for c in grid[0]]
        self.down = [self._span([r for i, r in enumerate(self.rooms) if i // self.columns == c], 1) for c in grid[1]]
        self._measure()

    def _measure(self) -> None:
        self.grid_width, grid_height = sum(map(sum, self.across)), sum(map(sum, self.down))
        keys = sum(_key_width(key, self.setter, self._key_height()) for key in self.shared)
        self.width = max(2 * style.MARGIN + self.grid_width + keys, 3.6)
        self.height = max(grid_height, self.down[0][0] + self._key_height() + 0.15 if self.shared else 0.0)

    def _key_height(self) -> float:
        inside = sum(map(sum, self.down)) - self.down[0][0] - self.down[-1][2]
        legend = any(isinstance(key, LineKey | ClassKey) for key in self.shared)
        return max(inside, 1.3) if legend else min(max(inside, 1.3), 4.0)

    def _seat(self, place: int) -> Seat:
        alike = isinstance(self.panels[place], Heatmap) and len({_sides(panel) for panel in self.panels}) == 1
        left, bottom = place % self.columns == 0, place + self.columns >= len(self.panels)
        return Seat(left or not alike, bottom or not alike, self.columns)

    def _room(self, place: int) -> Room:
        room = _plan(self.panels[place], self, self.seats[place])
        height = max(room.height, KEY_LEAST)
        keys = sum(_key_width(key, self.setter, height) + 0.1 for key in self.own[place])
        bottom = max(room.bottom, height + 0.1 - room.height) if keys else room.bottom
        title = style.PANEL_TITLE / 72 * 1.5 if self._panel_title(place) else 0.0
        return replace(room, right=room.right + keys, top=room.top + title, bottom=bottom)

    def _panel_title(self, place: int) -> str:
        title = self.panels[place].title.replace("\n", " ")
        return "" if len(self.panels) == 1 and title == self.figure.title else title

    @staticmethod
    def _span(rooms: Sequence[Room], side: int) -> tuple[float, float, float]:
        names = (("left", "width", "right"), ("top", "height", "bottom"))[side]
        before, inside, after = (max(getattr(room, name) for room in rooms) for name in names)
        return before, inside, after

    def _set_type(self) -> tuple[list[str], list[str]]:
        room = self.width - 2 * style.MARGIN
        title = self.setter.wrapped(self.figure.title, style.TITLE, room)
        if len(title) > 3:
            title = [*title[:2], self.setter.fitted(title[2] + " …", style.TITLE, room)]
        notes = [self.figure.note, *self.notes]
        return title, [line for note in notes for line in self.setter.wrapped(note, style.NOTE, room)]

    def _write_lines(self, lines: Sequence[str], y: float, size: float, colour: str) -> None:
        for number, line in enumerate(lines):
            self.write(style.MARGIN, y + number * size * 1.3 / 72, line, size, colour)

    def _paint(self, y: float) -> None:
        for place, panel in enumerate(self.panels):
            box = self._box(place, y)
            self._write_panel_title(place, box)
            _paint(panel, self, box, self.seats[place], self.scales[place])
            right, height = box.x + box.width + self.rooms[place].right - 0.1, max(box.height, KEY_LEAST)
            self._paint_keys(self.own[place], right, box.y, height, before=True)
        self._paint_keys(
            self.shared, style.MARGIN + self.grid_width, y + self.down[0][0], self._key_height(), before=False
        )

    def _box(self, place: int, y: float) -> Box:
        row, column = divmod(place, self.columns)
        x = style.MARGIN + sum(map(sum, self.across[:column])) + self.across[column][0]
        room = self.rooms[place]
        return Box(x, y + sum(map(sum, self.down[:row])) + self.down[row][0], room.width, room.height)

    def _write_panel_title(self, place: int, box: Box) -> None:
        room = self.rooms[place]
        title = self.setter.fitted(self._panel_title(place), style.PANEL_TITLE, box.width + room.right * 0.8)
        self.write(box.x, box.y - room.top + 0.02, title, style.PANEL_TITLE)

    def _paint_keys(self, keys: Sequence[Key], x: float, y: float, height: float, before: bool) -> None:
        """Keys side by side from x on, or up to x when `before`."""
        widths = [_key_width(key, self.setter, height) for key in keys]
        x -= sum(widths) if before else 0.0
        for key, width in zip(keys, widths, strict=True):
            _paint_key(key, self, Box(x, y, width, height))
            x += width


def _lines_height(lines: Sequence[str], size: float) -> float:
    return len(lines) * size * 1.3 / 72 + 0.06 if lines else 0.0


def _shared(panels: Sequence[Panel], keys: Sequence[Sequence[Key]]) -> list[Key]:
    """The keys that all panels agree on; panels of several kinds each keep their own beside them."""
    if len({type(panel) for panel in panels}) > 1:
        return []
    different = list(dict.fromkeys(key for mine in keys for key in mine))
    return [key for key in different if sum(type(other) is type(key) for other in different) == 1]


def _sides(panel: Panel) -> tuple[object, ...]:
    if not isinstance(panel, Heatmap):
        return (type(panel),)
    return panel.rows, panel.columns, panel.row_label, panel.column_label, panel.values.shape


# ------------------------------------------------------------------------------------------------------- drawing keys


def _key_width(key: Key, setter: Typesetter, height: float) -> float:
    if isinstance(key, LineKey | ClassKey):
        columns, handle = ceil(len(key.labels) / _legend_rows(height)), 0.42 if isinstance(key, LineKey) else 0.28
        return 0.15 + columns * (setter.widest(key.labels, style.TICK) * 1.03 + handle)
    if isinstance(key, GroupKey):
        return 0.5 + style.BAR + setter.widest(map(str, key.groups), style.TICK)
    return 0.5 + style.BAR + setter.widest(_bar_ticks(key, height)[1], style.TICK)


def _legend_rows(height: float) -> int:
    return max(1, int(height * 72 / (style.TICK * 1.45)))


def _bar_ticks(key: ValueKey, height: float) -> tuple[list[float], list[str]]:
    locator = MaxNLocator(min(6, max(2, int(height * 3.5))), steps=[1, 2, 2.5, 5, 10])
    ticks = _round_places(locator, key.low, key.high)
    return ticks, _numbers(ticks)


def _round_places(locator: MaxNLocator, low: float, high: float) -> list[float]:
    slack = 1e-9 * (high - low)
    return [float(place) for place in locator.tick_values(low, high) if low - slack <= place <= high + slack]


def _numbers(ticks: Sequence[float]) -> list[str]:
    """Evenly spaced numbers with the fewest decimals that tell them exactly."""
    step = min(np.diff(ticks), default=1.0)
    decimals = next((d for d in range(5) if all(abs(round(t, d) - t) < 1e-6 * step for t in ticks)), None)
    plain = decimals is not None and max(map(abs, ticks), default=0.0) < 1e5
    texts = [f"{tick:.{decimals}f}" if plain else f"{tick:.3g}" for tick in ticks]
    return [text.replace("-", "\N{MINUS SIGN}") for text in texts]


@singledispatch
def _paint_key(key: Key, page: _Page, box: Box) -> None:
    raise TypeError(f"no such key: {key!r}")


@_paint_key.register
def _(key: ValueKey, page: _Page, box: Box) -> None:
    axes = page.axes(Box(box.x + 0.14, box.y, style.BAR, box.height), "colour bar")
    colours = ScalarMappable(key.norm, style.value_map(key.colours))
    bar = page.canvas.colorbar(colours, cax=axes, extend=key.extend, extendfrac=0.04)
    ticks, texts = _bar_ticks(key, box.height)
    bar.set_ticks(ticks, labels=texts)
    bar.set_label(page.setter.fitted(key.unit, style.LABEL, box.height * 1.1), size=style.LABEL)
    bar.outline.set_linewidth(0.5)


@_paint_key.register
def _(key: GroupKey, page: _Page, box: Box) -> None:
    count = len(key.groups)
    axes = page.axes(Box(box.x + 0.14, box.y, style.BAR, box.height), "colour bar")
    colours = ScalarMappable(BoundaryNorm(np.arange(count + 1) - 0.5, count), style.group_map(count))
    bar = page.canvas.colorbar(colours, cax=axes)
    shown = range(0, count, _step(count, box.height, style.TICK))
    bar.set_ticks(list(shown), labels=[str(key.groups[place]) for place in shown])
    bar.ax.tick_params(length=0)
    bar.ax.minorticks_off()
    bar.set_label(page.setter.fitted(key.label, style.LABEL, box.height * 1.1), size=style.LABEL)
    bar.outline.set_linewidth(0.5)


@_paint_key.register
def _(key: ClassKey, page: _Page, box: Box) -> None:
    handles = [Patch(facecolor=colour, label=label) for label, colour in zip(key.labels, key.colours, strict=True)]
    _paint_legend(page, box, handles, key.labels, 0.8)


@_paint_key.register
def _(key: LineKey, page: _Page, box: Box) -> None:
    handles = [
        Line2D([], [], color=colour, linestyle="--" if dashed else "-", label=label or "–")
        for label, dashed, colour in zip(key.labels, key.dashed, page.line_colours(key), strict=True)
    ]
    _paint_legend(page, box, handles, key.labels, 2.0)


def _paint_legend(
    page: _Page, box: Box, handles: Sequence[Line2D | Patch], labels: Sequence[str], length: float
) -> None:
    width, height = page.canvas.get_size_inches()
    page.canvas.legend(
        handles=list(handles),
        labels=list(labels),
        loc="upper left",
        bbox_to_anchor=((box.x + 0.1) / width, 1 - box.y / height),
        borderaxespad=0.0,
        borderpad=0.0,
        handlelength=length,
        columnspacing=0.8,
        handletextpad=0.5,
        labelspacing=0.25,
        ncols=ceil(len(handles) / _legend_rows(box.height)),
    )


# ------------------------------------------------------------------------------------------------------------- panels


@singledispatch
def _plan(panel: Panel, page: _Page, seat: Seat) -> Room:
    raise TypeError(f"no such panel: {panel!r}")


@singledispatch
def _paint(panel: Panel, page: _Page, box: Box, seat: Seat, scale: ValueKey | None) -> None:
    raise TypeError(f"no such panel: {panel!r}")


def _widest_panel(seat: Seat) -> float:
    return min(style.PANEL, style.PAGE / seat.columns - 0.1)


def _span(count: int, longest: float) -> float:
    """The length of a side with `count` cells, each large enough to be labelled if they all fit."""
    cell = min(max(4.5 / max(count, 1), 0.125), 0.4)
    return min(max(count * cell, 0.8), longest)


def _step(count: int, length: float, size: float) -> int:
    """Every which cell along `length` inches can carry a line of type of that size."""
    least = ceil(count * size * style.LEADING / 72 / length - 1e-9) if length > 0 else 1
    nice = [ten * n for ten in (1, 10, 100, 1000) for n in (1, 2, 3, 4, 5, 6)]
    return next((n for n in nice if n >= least), max(count, 1))


def _nothing(axes: Axes, text: str = "no data") -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=style.QUIET)
    axes.set_xticks([])
    axes.set_yticks([])


def _hatched(axes: Axes) -> None:
    axes.set_facecolor(style.BLANK)
    axes.patch.set(hatch="/////", edgecolor=style.HATCH, linewidth=0.0)


# ------------------------------------------------------------------------------------------------------------ heat map


@dataclass(frozen=True)
class Ticks:
    """What is written along a side of a matrix."""

    places: list[int]
    texts: list[str]
    size: float
    upright: bool = False
    numbered: bool = False


@dataclass(frozen=True)
class Sides:
    """Both sides of a matrix."""

    left: Ticks
    lower: Ticks


def _ticks(labels: Sequence[str], count: int, length: float) -> Ticks:
    """All labels if they fit, every second or so in a large panel, positions in a small one."""
    if labels and len(labels) != count:
        raise ValueError(f"{len(labels)} labels for {count} cells: {labels[:3]}...")
    size = min(style.TICK, length / max(count, 1) * 72 / style.LEADING)
    if labels and size >= style.SMALLEST:
        return Ticks(list(range(count)), list(labels), size)
    if labels and length > 3.0:
        places = list(range(0, count, _step(count, length, style.SMALLEST)))
        return Ticks(places, [labels[place] for place in places], style.SMALLEST)
    step = _step(count, length, style.TICK * 1.6)
    places = list(range(0, count, 10 * ceil(step / 10) if step > 6 else step))
    return Ticks(places, list(map(str, places)), min(style.TICK, 72 * length), numbered=True)


def _heat_sides(panel: Heatmap, page: _Page, width: float, height: float) -> Sides:
    left, lower = _ticks(panel.rows, len(panel.values), height), _ticks(panel.columns, panel.values.shape[-1], width)
    gap = width / max(panel.values.shape[-1], 1) * (lower.places[1] if len(lower.places) > 1 else 1)
    return Sides(left, replace(lower, upright=page.setter.widest(lower.texts, lower.size) > gap - 0.04))


def _legible(panel: Heatmap) -> float:
    """The side at which the labels of a short text can all be read, even in a page of many panels."""
    count = max(len(panel.rows), len(panel.columns))
    return count * style.SMALLEST * style.LEADING / 72 + 0.01 if count <= style.SHORT_TEXT else 0.0


def _heat_size(panel: Heatmap, longest: float) -> tuple[float, float]:
    rows, columns = panel.values.shape
    width, height = _span(columns, longest), _span(rows, longest)
    if min(rows, columns) * 4 > max(rows, columns):
        cell = min(width / columns, height / rows)
        width, height = cell * columns, cell * rows
    return width, height


@_plan.register
def _(panel: Heatmap, page: _Page, seat: Seat) -> Room:
    if panel.values.size == 0:
        return Room(2.0, 1.2, 0.25, 0.1, 0.05, 0.3)
    width, height = _heat_size(panel, max(_widest_panel(seat), _legible(panel)))
    sides = _heat_sides(panel, page, width, height)
    _heat_notes(panel, page, sides)
    strip = style.STRIP + 0.03 if panel.groups else 0.0
    left = _beside(sides.left, page.setter, lengthwise=True) + strip if seat.left else 0.04
    below = _beside(sides.lower, page.setter, lengthwise=sides.lower.upright) if seat.bottom else 0.04
    tree = style.TREE + 0.05 if panel.tree is not None else 0.0
    between = 0.04 if width < 1.2 else 0.12
    return Room(width, height, left, between + tree, 0.03 + strip, below + between)


def _beside(ticks: Ticks, setter: Typesetter, lengthwise: bool) -> float:
    """The inches that tick labels and the label of the axis need beside it."""
    tick = setter.widest(ticks.texts, ticks.size) if lengthwise else ticks.size / 72
    return tick + 0.08 + style.LABEL * 1.5 / 72


def _heat_notes(panel: Heatmap, page: _Page, sides: Sides) -> None:
    if not np.isfinite(panel.values).all():
        page.note("Hatched grey: no value.")
    alike = sides.lower.texts == sides.left.texts and panel.columns == panel.rows
    names = dict.fromkeys([panel.row_label, panel.column_label])
    _tick_note(page, sides.left, panel.rows, " and ".join(names) if alike else panel.row_label)
    if not alike:
        _tick_note(page, sides.lower, panel.columns, panel.column_label)


def _tick_note(page: _Page, ticks: Ticks, labels: Sequence[str], what: str) -> None:
    if ticks.numbered and labels:
        page.note(f"Numbers along {what} are positions: {_listed(labels)}.")
    elif len(ticks.texts) < len(labels):
        page.note(f"One label in {ticks.places[1]} is shown along {what}.")


def _listed(labels: Sequence[str], most: int = 60) -> str:
    listed = ", ".join(f"{place} {label}" for place, label in enumerate(labels[:most]))
    return f"{listed}, …" if len(labels) > most else listed


@_paint.register
def _(panel: Heatmap, page: _Page, box: Box, seat: Seat, scale: ValueKey) -> None:
    axes = page.axes(box)
    _label_sides(axes, panel, page, box, seat)
    if panel.values.size == 0:
        return _nothing(axes)
    values = np.ma.masked_invalid(panel.values)
    if values.mask.any():
        _hatched(axes)
    axes.imshow(values, norm=scale.norm, cmap=style.value_map(scale.colours), aspect="auto", interpolation="nearest")
    if panel.written:
        _write_cells(axes, panel, scale)
    if panel.groups:
        _paint_strips(panel, page, box)
    if panel.tree is not None:
        _paint_tree(panel.tree, page, Box(box.x + box.width + 0.03, box.y, style.TREE, box.height))
    return None


def _write_cells(axes: Axes, panel: Heatmap, scale: ValueKey) -> None:
    colours = style.value_map(scale.colours)
    for (row, column), value in np.ndenumerate(panel.values):
        if np.isfinite(value):
            ink = style.ink_on(colours(float(scale.norm(value))))
            text = format(value, panel.written).replace("-", "\N{MINUS SIGN}")
            axes.text(column, row, text, size=style.TICK, color=ink, ha="center", va="center")


@_paint.register
def _(panel: ClassMap, page: _Page, box: Box, seat: Seat, scale: None) -> None:
    axes = page.axes(box)
    _label_sides(axes, panel, page, box, seat)
    if panel.values.size == 0:
        return _nothing(axes)
    if not np.isfinite(panel.values).all():
        _hatched(axes)
    colours = _class_colours(panel)
    shown = ListedColormap(colours).with_extremes(bad=(0.0, 0.0, 0.0, 0.0))
    classes = np.ma.masked_invalid(panel.values)
    axes.imshow(classes, norm=BoundaryNorm(np.arange(len(colours) + 1) - 0.5, len(colours)), cmap=shown, aspect="auto")
    rows, columns = panel.values.shape
    axes.hlines(np.arange(rows - 1) + 0.5, -0.5, columns - 0.5, colors="white", linewidths=0.5)
    axes.vlines(np.arange(columns - 1) + 0.5, -0.5, rows - 0.5, colors="white", linewidths=0.5)
    _paint_marks(axes, panel, page, box)
    return None


def _class_colours(panel: ClassMap) -> list[str]:
    """A colour of the palette for each class."""
    places = panel.colours or range(len(panel.names))
    return [style.CLASSES[place % len(style.CLASSES)] for place in places]


def _paint_marks(axes: Axes, panel: ClassMap, page: _Page, box: Box) -> None:
    """Texts in the cells, where they can be read."""
    rows, columns = panel.values.shape
    widest = page.setter.widest((mark for row in panel.marks for mark in row), style.TICK)
    if widest > 0.95 * box.width / columns or box.height / rows < style.TICK * style.LEADING / 72:
        return
    colours = _class_colours(panel)
    for (row, column), at in np.ndenumerate(panel.values):
        if panel.marks and np.isfinite(at) and panel.marks[row][column]:
            ink = style.ink_on(to_rgba(colours[int(at)]))
            axes.text(column, row, panel.marks[row][column], size=style.TICK, ha="center", va="center", color=ink)


def _label_sides(axes: Axes, panel: Heatmap, page: _Page, box: Box, seat: Seat) -> None:
    if panel.values.size:
        sides, strip = _heat_sides(panel, page, box.width, box.height), 72 * (style.STRIP + 0.03) if panel.groups else 0
        axes.set_xticks(sides.lower.places, labels=sides.lower.texts, size=sides.lower.size)
        axes.set_yticks(sides.left.places, labels=sides.left.texts, size=sides.left.size)
        axes.tick_params("x", rotation=90 if sides.lower.upright else 0, labelbottom=seat.bottom, bottom=seat.bottom)
        axes.tick_params("y", labelleft=seat.left, left=seat.left and not panel.groups, pad=2 + strip)
    axes.set_ylabel(page.setter.fitted(panel.row_label, style.LABEL, box.height) if seat.left else "", labelpad=2)
    axes.set_xlabel(page.setter.fitted(panel.column_label, style.LABEL, box.width) if seat.bottom else "", labelpad=2)


def _paint_strips(panel: Heatmap, page: _Page, box: Box) -> None:
    """The group of every row at its left, of every column above it."""
    key = GroupKey("layer", tuple(sorted(set(panel.groups))))
    places = np.asarray(key.places(panel.groups))
    beside = Box(box.x - style.STRIP - 0.03, box.y, style.STRIP, box.height)
    above = Box(box.x, box.y - style.STRIP - 0.03, box.width, style.STRIP)
    for place, cells in ((beside, places[:, None]), (above, places[None, :])):
        axes = page.axes(place)
        axes.imshow(
            cells, cmap=style.group_map(len(key.groups)), vmin=-0.5, vmax=len(key.groups) - 0.5,
            aspect="auto", interpolation="nearest",
        )  # fmt: skip
        axes.set_axis_off()


def _paint_tree(tree: Floats, page: _Page, box: Box) -> None:
    """The dendrogram of the rows, its root at the right; SciPy puts leaf i at 10 i + 5."""
    drawn = dendrogram(tree, no_plot=True)
    branches = [
        np.column_stack([d, (np.asarray(i) - 5) / 10]) for i, d in zip(drawn["icoord"], drawn["dcoord"], strict=True)
    ]
    axes = page.axes(box)
    axes.add_collection(LineCollection(branches, colors=style.QUIET, linewidths=0.6))
    lowest, highest = float(tree[:, 2].min()), float(tree[:, 2].max())
    start = lowest - 0.1 * (highest - lowest) if lowest > highest / 2 and lowest < highest else 0.0
    axes.set(ylim=(len(tree) + 0.5, -0.5), xlim=(start, 1.03 * highest or 1.0), yticks=[], xlabel="distance")
    places = _round_places(MaxNLocator(2), *axes.get_xlim())
    axes.set_xticks(places, labels=_numbers(places))
    axes.get_xticklabels()[0].set_horizontalalignment("left")  # not into the last label of the map beside it
    axes.spines[["left", "top", "right"]].set_visible(False)


# --------------------------------------------------------------------------------------------------------------- lines


def _line_colours(dashed: Sequence[bool]) -> list[str | style.Colour]:
    """A sequence of colours for many curves, distinct ones for a few; grey for the only dashed one."""
    alone = sum(dashed) == 1 < len(dashed)
    count = len(dashed) - alone
    colours: list[str | style.Colour] = list(style.FEW[:count])
    if count > len(style.FEW):
        colours = list(style.map_colours(style.GROUPS, count))
    following = iter(colours)
    return [style.QUIET if alone and dash else next(following) for dash in dashed]


@_plan.register
def _(panel: Lines, page: _Page, seat: Seat) -> Room:
    width = min(4.6, style.PAGE / seat.columns - 0.9)
    return Room(max(width, 1.0), max(width, 1.0) * 0.66, 0.72, 0.12, 0.06, 0.5)


@_paint.register
def _(panel: Lines, page: _Page, box: Box, seat: Seat, scale: None) -> None:
    axes = page.axes(box)
    _label_plane(axes, panel, page, box)
    panel = _positive(panel) if panel.log_y else panel
    if not any(np.isfinite(series.y).any() for series in panel.series):
        return _nothing(axes)
    axes.set_yscale("log" if panel.log_y else "linear")
    for series, colour in zip(panel.series, page.line_colours(_line_key(panel)), strict=True):
        _paint_series(axes, series, colour)
    axes.set_xscale("log" if panel.log_x else "linear")
    _limit(axes, panel)
    _number(axes, box, whole=panel.whole, log_x=panel.log_x, log_y=panel.log_y)
    if panel.mark is not None:
        _mark(axes, panel.mark, panel.mark_label)
    return None


def _positive(panel: Lines) -> Lines:
    """Without what has no logarithm."""
    curves = []
    for curve in panel.series:
        low = None if curve.low is None else np.where(curve.low > 0, curve.low, np.nan)
        curves.append(replace(curve, y=np.where(curve.y > 0, curve.y, np.nan), low=low))
    return replace(panel, series=tuple(curves))


def _number(axes: Axes, box: Box, *, whole: bool = False, log_x: bool = False, log_y: bool = False) -> None:
    """Ticks at round places inside the limits, whole ones across where `whole`; of logarithms at 1, 2, 5 or powers."""
    _number_axis(axes.xaxis, int(box.width * 3), log_x, integer=whole, min_n_ticks=1)
    _number_axis(axes.yaxis, int(box.height * 2), log_y)


def _number_axis(axis: Axis, most: int, log: bool, **how: Any) -> None:
    if log:
        places = _log_places(*axis.get_view_interval(), most=2 * most)
        axis.set_ticks(places, labels=[_power(place) for place in places])
        axis.set_ticks([], minor=True)
    else:
        places = _round_places(MaxNLocator(max(3, most), steps=[1, 2, 2.5, 5, 10], **how), *axis.get_view_interval())
        axis.set_ticks(places, labels=_numbers(places))


def _log_places(low: float, high: float, most: int) -> list[float]:
    """1, 2 and 5 times the powers of ten inside the limits; where those are more than `most` powers alone."""
    exponents = range(floor(log10(low)), ceil(log10(high)) + 1)
    fine, coarse = (
        [
            place
            for exponent in exponents[::step]
            for factor in factors
            if low <= (place := factor * 10.0**exponent) <= high
        ]
        for factors, step in (((1, 2, 5), 1), ((1,), ceil(len(exponents) / most)))
    )
    return fine if len(fine) <= most else coarse


def _mark(axes: Axes, at: float, label: str) -> None:
    """A vertical line with its label above."""
    axes.axvline(at, color=style.QUIET, linewidth=0.8, linestyle=":", zorder=0)
    above = axes.get_xaxis_transform()
    axes.text(at, 1.0, label, transform=above, size=style.TICK, color=style.QUIET, ha="center", va="bottom")


def _power(tick: float) -> str:
    exponent = floor(log10(tick) + 1e-9)
    if -3 <= exponent <= 3:
        return f"{tick:.6g}"
    factor = round(tick / 10.0**exponent)
    raised = str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"10{raised}" if factor == 1 else f"{factor}·10{raised}"


def _label_plane(axes: Axes, panel: Lines | Points, page: _Page, box: Box) -> None:
    axes.set_xlabel(page.setter.fitted(panel.x_label, style.LABEL, box.width * 1.15))
    axes.set_ylabel(page.setter.fitted(panel.y_label, style.LABEL, box.height * 1.15))
    axes.spines[["top", "right"]].set_visible(False)


def _paint_series(axes: Axes, series: Series, colour: str | style.Colour) -> None:
    dots = "o" if len(series.x) <= 30 else None
    axes.plot(series.x, series.y, color=colour, linestyle="--" if series.dashed else "-", linewidth=1.2,
              marker=dots, markersize=2.5)  # fmt: skip
    if series.low is not None and series.high is not None:
        axes.fill_between(series.x, series.low, series.high, color=colour, alpha=0.15, linewidth=0)


def _limit(axes: Axes, panel: Lines) -> None:
    """The limits asked for, a little wider: a curve on the edge is drawn whole."""
    if panel.whole and np.ptp(axes.get_xlim()) < 1:
        axes.set_xlim(*_centred(*axes.get_xlim(), 1.2))
    if panel.log_y:
        return
    low, high = axes.get_ylim()
    low, high = low if panel.low is None else panel.low, high if panel.high is None else panel.high
    low, high = _apart(low, high)
    pad = 0.02 * (high - low)
    axes.set_ylim(low - pad * (panel.low is not None), high + pad * (panel.high is not None))


# -------------------------------------------------------------------------------------------------------------- points


@dataclass(frozen=True)
class Plane:
    """Points placed in a box: limits of the axes, inches of the points, and where labels go that fit."""

    x: tuple[float, float]
    y: tuple[float, float]
    there: NDArray[np.bool_]
    labels: dict[int, tuple[float, float]]


@_plan.register
def _(panel: Points, page: _Page, seat: Seat) -> Room:
    side = max(min(5.2, style.PAGE / seat.columns - 0.9), 1.0)
    there = np.isfinite(panel.x) & np.isfinite(panel.y)
    room = Room(side, side * _slimness(panel, there), 0.72, 0.12, 0.06, 0.5)
    if not there.all():
        page.note(f"{int((~there).sum())} of {there.size} points have no place.")
    labels = _plane(panel, page, room.width, room.height).labels if there.any() else {}
    if len(labels) < there.sum() and panel.labels:
        page.note(f"{len(labels)} of {there.sum()} labels fit without overlap, the most isolated points first.")
    return room


@_paint.register
def _(panel: Points, page: _Page, box: Box, seat: Seat, scale: None) -> None:
    axes = page.axes(box)
    _label_plane(axes, panel, page, box)
    if not (np.isfinite(panel.x) & np.isfinite(panel.y)).any():
        return _nothing(axes)
    plane = _plane(panel, page, box.width, box.height)
    x, y, colours = panel.x[plane.there], panel.y[plane.there], _point_colours(panel, plane.there)
    axes.scatter(x, y, s=14, c=colours, linewidths=0.3, edgecolors="white")
    axes.set(xlim=plane.x, ylim=plane.y, aspect="equal" if panel.equal else "auto")
    _number(axes, box)
    for place, (left, bottom) in plane.labels.items():
        at = left / box.width, bottom / box.height
        axes.text(*at, panel.labels[place], transform=axes.transAxes, size=POINT_LABEL, va="bottom")
    return None


def _slimness(panel: Points, there: NDArray[np.bool_]) -> float:
    """Height by width: that of the cloud where an inch is worth the same both ways, within reason."""
    if not (panel.equal and there.any()):
        return 0.8
    (left, right), (low, high) = (_apart(*_range(axis[there])) for axis in (panel.x, panel.y))
    return min(max((high - low) / (right - left) * 1.05, 0.5), 1.0)


def _name_colours(panel: Points) -> Sequence[str | style.Colour]:
    few = len(panel.names) <= len(style.FEW)
    return style.FEW[: len(panel.names)] if few else style.map_colours(style.GROUPS, len(panel.names))


def _point_colours(panel: Points, there: NDArray[np.bool_]) -> list[str | style.Colour] | str:
    if not panel.groups:
        return style.FEW[0]
    if panel.names:
        names = _name_colours(panel)
        return [names[panel.groups[place]] for place in np.flatnonzero(there)]
    key = GroupKey(panel.group_label, tuple(sorted(set(panel.groups))))
    colours = style.map_colours(style.GROUPS, len(key.groups))
    return [colours[place] for place, is_there in zip(key.places(panel.groups), there, strict=True) if is_there]


def _plane(panel: Points, page: _Page, width: float, height: float) -> Plane:
    there = np.isfinite(panel.x) & np.isfinite(panel.y)
    x_limits, y_limits = _plane_limits(panel, there, width, height)
    across = (panel.x[there] - x_limits[0]) / (x_limits[1] - x_limits[0]) * width
    up = (panel.y[there] - y_limits[0]) / (y_limits[1] - y_limits[0]) * height
    names = [panel.labels[place] for place in np.flatnonzero(there)] if panel.labels else []
    sizes = [(page.setter.inches(name, POINT_LABEL), POINT_LABEL * 1.05 / 72) for name in names]
    fitting = _fit_labels(np.column_stack([across, up]), sizes, (width, height))
    return Plane(x_limits, y_limits, there, {int(np.flatnonzero(there)[i]): at for i, at in fitting.items()})


def _plane_limits(
    panel: Points, there: NDArray[np.bool_], width: float, height: float
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Limits around the points, with room for labels; an inch is worth the same both ways where `equal`."""
    x_limits, y_limits = (_apart(*_range(axis[there])) for axis in (panel.x, panel.y))
    x_inch, y_inch = 1.2 * (x_limits[1] - x_limits[0]) / width, 1.15 * (y_limits[1] - y_limits[0]) / height
    if panel.equal:
        x_inch = y_inch = max(x_inch, y_inch)
    return _centred(*x_limits, x_inch * width), _centred(*y_limits, y_inch * height)


def _centred(low: float, high: float, length: float) -> tuple[float, float]:
    middle = (low + high) / 2
    return middle - length / 2, middle + length / 2


def _fit_labels(
    places: Floats, sizes: Sequence[tuple[float, float]], room: tuple[float, float]
) -> dict[int, tuple[float, float]]:
    """The lower left corners of the labels that hit no point, no other label and no edge."""
    taken = np.column_stack([places - DOT, places + DOT])
    fitting: dict[int, tuple[float, float]] = {}
    for number in _loneliest(places)[: MOST_LABELS if sizes else 0]:
        box = next((b for b in _around(places[number], sizes[number]) if _free(b, taken, room)), None)
        if box is not None:
            fitting[int(number)] = float(box[0]), float(box[1])
            taken = np.vstack([taken, box])
    return fitting


def _loneliest(places: Floats) -> NDArray[np.int_]:
    """Points in the order of the distance to their nearest neighbour, the farthest first."""
    if len(places) < 2:
        return np.arange(len(places))
    nearest = KDTree(places).query(places, k=2)[0][:, 1]
    return np.argsort(-nearest, kind="stable")


def _around(place: Floats, size: tuple[float, float]) -> Iterator[Floats]:
    """Boxes (left, bottom, right, top) for a label about its point: right, above, left, below, then the corners."""
    half = np.asarray(size) / 2
    for x, y in ((1, 0), (0, 1), (-1, 0), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1)):
        middle = place + np.multiply((x, y), half + DOT + 0.01)
        yield np.concatenate([middle - half, middle + half])


def _free(box: Floats, taken: Floats, room: tuple[float, float]) -> bool:
    inside = box[0] > 0 and box[1] > 0 and box[2] < room[0] and box[3] < room[1]
    apart = (box[0] >= taken[:, 2]) | (taken[:, 0] >= box[2]) | (box[1] >= taken[:, 3]) | (taken[:, 1] >= box[3])
    return bool(inside and apart.all())


# ------------------------------------------------------------------------------------------------------- coloured text


@dataclass(frozen=True)
class Laid:
    """Tokens laid out in lines: the line of each, its left edge, its width."""

    tokens: tuple[str, ...]
    places: tuple[tuple[int, float, float], ...]

    @property
    def lines(self) -> int:
        """How many lines the text takes."""
        return self.places[-1][0] + 1 if self.places else 1


def _lay_out(tokens: Sequence[str], page: _Page, width: float) -> Laid:
    line, x, places = 0, 0.0, []
    for token in tokens:
        length = page.setter.inches(token, style.TOKEN) + 0.07
        if x and x + length > width:
            line, x = line + 1, 0.0
        places.append((line, x, length))
        x += length + 0.02
    return Laid(tuple(tokens), tuple(places))


@_plan.register
def _(panel: ColouredText, page: _Page, seat: Seat) -> Room:
    width = max(min(6.5, style.PAGE / seat.columns - 0.9), 1.5)
    laid = _lay_out(panel.tokens, page, width)
    width = max([0.8, *(x + length for _, x, length in laid.places)])
    if not np.isfinite(panel.values).all():
        page.note("Hatched grey: no value.")
    left = page.setter.widest(panel.rows, style.LABEL) + 0.12
    height = len(panel.rows) * (laid.lines * LINE + PARAGRAPH) - PARAGRAPH if panel.rows and panel.tokens else 0.4
    return Room(width, height, left, 0.1, 0.06, 0.12)


@_paint.register
def _(panel: ColouredText, page: _Page, box: Box, seat: Seat, scale: ValueKey) -> None:
    axes = page.axes(box)
    axes.set(xlim=(0, box.width), ylim=(box.height, 0))
    axes.set_axis_off()
    if not (panel.tokens and panel.rows):
        return _nothing(axes)
    laid = _lay_out(panel.tokens, page, max(min(6.5, style.PAGE / seat.columns - 0.9), 1.5))
    for number, (row, values) in enumerate(zip(panel.rows, panel.values, strict=True)):
        top = number * (laid.lines * LINE + PARAGRAPH)
        axes.text(-0.1, top + LINE / 2, row, size=style.LABEL, ha="right", va="center")
        _paint_tokens(axes, laid, values, scale, top)
    return None


def _paint_tokens(axes: Axes, laid: Laid, values: Floats, scale: ValueKey, top: float) -> None:
    colours = style.value_map(scale.colours)
    for token, (line, x, length), value in zip(laid.tokens, laid.places, values, strict=True):
        y = top + line * LINE
        known = bool(np.isfinite(value))
        ground = colours(float(scale.norm(value))) if known else style.BLANK
        patch = Rectangle((x, y), length, LINE - 0.03, facecolor=ground, linewidth=0)
        if not known:
            patch.set(hatch="/////", edgecolor=style.HATCH)
        axes.add_patch(patch)
        at, ink = (x + length / 2, y + (LINE - 0.03) * 0.72), style.ink_on(ground)
        axes.text(*at, token, size=style.TOKEN, ha="center", va="baseline", color=ink)


# ------------------------------------------------------------------------------------------------------- layered graph


@_plan.register
def _(panel: LayeredGraph, page: _Page, seat: Seat) -> Room:
    width = min(max(1.6, 0.32 * len(panel.tokens)), _widest_panel(seat) - 0.5)
    ticks = _ticks(panel.tokens, len(panel.tokens), width)
    _tick_note(page, ticks, panel.tokens, "token")
    tall = page.setter.widest(ticks.texts, ticks.size) + 0.08
    return Room(width, min(max(1.6, 0.42 * _top(panel)), 6.5), 0.5, 0.12, 0.06 + tall, tall + 0.3)


def _top(panel: LayeredGraph) -> int:
    return max([panel.depths - 1, *(edge[0] for edge in panel.edges)])


@_paint.register
def _(panel: LayeredGraph, page: _Page, box: Box, seat: Seat, scale: ValueKey) -> None:
    axes = page.axes(box)
    axes.set(xlabel="token", ylabel="depth")
    axes.spines[:].set_visible(False)
    if not panel.tokens:
        return _nothing(axes)
    count, top = len(panel.tokens), _top(panel)
    axes.set(xlim=(-0.5, count - 0.5), ylim=(-0.3, top + 0.3))
    axes.add_collection(_edges(panel, scale))
    x, y = np.meshgrid(np.arange(count), np.arange(top + 1))
    axes.scatter(x.ravel(), y.ravel(), s=5, color=style.QUIET, zorder=3, linewidths=0)
    ticks = _ticks(panel.tokens, count, box.width)
    axes.set_xticks(ticks.places, labels=ticks.texts, size=ticks.size, rotation=90)
    axes.tick_params("x", labeltop=True, length=0)
    depths = range(0, top + 1, _step(top + 1, box.height, style.TICK))
    axes.set_yticks(list(depths), labels=list(map(str, depths)))
    return None


def _edges(panel: LayeredGraph, scale: ValueKey) -> LineCollection:
    """Heavier edges are darker, wider, and above lighter ones."""
    edges = sorted((edge for edge in panel.edges if np.isfinite(edge[3])), key=lambda edge: edge[3])
    share = scale.norm(np.array([edge[3] for edge in edges], dtype=float)).clip(0, 1)
    lines = [((lower, depth - 1), (upper, depth)) for depth, upper, lower, _ in edges]
    return LineCollection(lines, colors=style.value_map(scale.colours)(share), linewidths=0.3 + 2.0 * share)


# ------------------------------------------------------------------------------------------------------------- network


@_plan.register
def _(panel: Network, page: _Page, seat: Seat) -> Room:
    layers, heads = len(set(panel.layers)), len(set(panel.heads))
    widest = style.PAGE / seat.columns - 0.9
    width = min(max(0.75 * layers, 1.6), 6.5, max(widest, 1.0))
    beyond = _overhang(panel, page, width)
    return Room(width, min(max(0.36 * heads, 1.2), max(1.3 * width, 1.2)), 0.5 + beyond, 0.12 + beyond, 0.06, 0.45)


def _overhang(panel: Network, page: _Page, width: float) -> float:
    """The inches by which a label of the first or the last layer may reach beyond the panel."""
    return max(0.0, (page.setter.widest(panel.labels, NODE_LABEL) - width / max(len(set(panel.layers)), 1)) / 2)


@_paint.register
def _(panel: Network, page: _Page, box: Box, seat: Seat, scale: ValueKey) -> None:
    axes = page.axes(box)
    axes.set(xlabel="layer", ylabel="head")
    axes.spines[:].set_visible(False)
    if not panel.layers:
        return _nothing(axes)
    (layers, x), (heads, y) = (np.unique(side, return_inverse=True) for side in (panel.layers, panel.heads))
    axes.set(xlim=(-0.5, len(layers) - 0.5), ylim=(len(heads) - 0.4, -0.7))
    axes.add_collection(_links(panel, scale, x, y))
    _paint_nodes(axes, panel, page, box, (x, y))
    wide = 72 * page.setter.widest(map(str, layers), style.TICK)
    for axis, names, room, size in ((axes.xaxis, layers, box.width, wide), (axes.yaxis, heads, box.height, style.TICK)):
        shown = range(0, len(names), _step(len(names), room, size))
        axis.set_ticks(list(shown), labels=[str(names[place]) for place in shown])
    axes.tick_params(length=0)
    axes.tick_params("y", pad=2 + 72 * _overhang(panel, page, box.width))
    return None


def _links(panel: Network, scale: ValueKey, x: Whole, y: Whole) -> PathCollection:
    """Curves that leave and arrive level, and pass beside the nodes between; stronger ones darker, wider and on top."""
    norm = scale.norm
    share = np.array([float(norm(edge[2])) for edge in panel.edges]).clip(0, 1)
    share = 1 - share if panel.falling else share
    order = np.argsort(share, kind="stable")
    curves = [_curve(panel.edges[at][0], panel.edges[at][1], x, y) for at in order]
    colours = style.value_map(style.LINKS[False])(share[order])
    return PathCollection(curves, facecolors="none", edgecolors=colours, linewidths=0.5 + 1.2 * share[order])


def _curve(start: int, end: int, x: Whole, y: Whole) -> Curve:
    reach, bow = (x[end] - x[start]) / 2, 0.3 * (abs(x[end] - x[start]) > 1)
    points = [
        (x[start], y[start]),
        (x[start] + reach, y[start] - bow),
        (x[end] - reach, y[end] - bow),
        (x[end], y[end]),
    ]
    return Curve(points, [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4])


def _paint_nodes(axes: Axes, panel: Network, page: _Page, box: Box, places: tuple[Whole, Whole]) -> None:
    """Dots as large as they have edges, and the labels that hit no other, those of the largest dots first."""
    x, y = places
    ends = [place for edge in panel.edges for place in edge[:2]]
    degree = np.bincount(np.array(ends, dtype=np.intp), minlength=len(x))
    sizes = 4 + 36 * degree / max(degree.max(), 1)
    axes.scatter(x, y, s=sizes, color=style.QUIET, zorder=3, linewidths=0.4, edgecolors="white")
    halo = [withStroke(linewidth=1.8, foreground="white")]
    for place in _fitting(panel, page, box, places, np.argsort(-degree, kind="stable")):
        axes.annotate(
            panel.labels[place], (x[place], y[place]), (0, 3.5), textcoords="offset points", size=NODE_LABEL,
            ha="center", va="bottom", zorder=4, path_effects=halo,
        )  # fmt: skip


def _fitting(panel: Network, page: _Page, box: Box, places: tuple[Whole, Whole], order: Whole) -> list[int]:
    """Nodes whose labels hit no label of one before them in `order`."""
    x, y = (side * room / (side.max() + 1) for side, room in zip(places, (box.width, box.height), strict=True))
    kept: list[int] = []
    for place in (int(at) for at in order if panel.labels[at]):
        wide, tall = page.setter.inches(panel.labels[place], NODE_LABEL), NODE_LABEL * style.LEADING / 72 + 0.02
        if all(abs(x[place] - x[other]) > wide or abs(y[place] - y[other]) > tall for other in kept):
            kept.append(place)
    return kept
