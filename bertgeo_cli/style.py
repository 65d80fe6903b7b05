"""The only look: sizes, colours, fonts, and how a text becomes one that the fonts can draw."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from matplotlib import colormaps
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.colors import Colormap, ListedColormap
from matplotlib.font_manager import FontProperties, findfont, fontManager
from matplotlib.ft2font import FT2Font
from numpy.typing import ArrayLike

Colour = tuple[float, float, float, float]

# Sizes of type in points. Below SMALLEST nothing is written.
TITLE, PANEL_TITLE, LABEL, TICK, TOKEN, NOTE, SMALLEST = 10.0, 8.5, 8.0, 7.0, 8.5, 6.5, 5.5
LEADING = 1.18  # distance of two lines of type, in sizes

# Lengths in inches.
MARGIN = 0.12
PAGE = 10.0  # panels of one row, side by side
PANEL = 7.5  # the largest single panel
SHORT_TEXT = 24  # labels that every panel has room for, though the page grows wider than PAGE
BAR = 0.13  # thickness of colour bars
STRIP = 0.10  # thickness of the group strips beside a matrix
TREE = 0.9  # depth of a dendrogram
DPI = 200
LARGEST = 20_000  # pixels along one side of a PNG

LONGEST_LABEL = 24  # characters
INK, QUIET, HATCH = "0.1", "0.4", "0.65"
BLANK: Colour = (0.88, 0.88, 0.88, 1.0)
SEQUENTIAL, DIVERGING, EDGES, GROUPS = "viridis", "RdBu_r", "magma_r", "plasma"
LINKS = ("viridis_r", "viridis")  # strong is dark: the larger weight, or the smaller one
FEW = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito: safe for colour blindness

# The same and its two lights, between a dark and a light grey, for classes.
CLASSES = ("0.3", "#0072B2", "#D55E00", "#E69F00", "#CC79A7", "#009E73", "#56B4E9", "#F0E442", "0.8")

BASE_FONT = "DejaVu Sans"  # ships with matplotlib
# No colour fonts: their bitmaps cannot be scaled or embedded.
FALLBACK_FONTS = (
    "Noto Sans",
    "Noto Sans CJK SC",
    "Noto Sans CJK TC",
    "Noto Sans CJK JP",
    "Noto Sans CJK KR",
    "Source Han Sans",
    "WenQuanYi Micro Hei",
    "WenQuanYi Zen Hei",
    "IPAGothic",
    "IPAexGothic",
    "Hiragino Sans",
    "Hiragino Sans GB",
    "PingFang SC",
    "Apple SD Gothic Neo",
    "Arial Unicode MS",
    "Kohinoor Devanagari",
    "Microsoft YaHei",
    "Yu Gothic",
    "Malgun Gothic",
    "Nirmala UI",
    "Segoe UI Symbol",
    "Noto Emoji",
    "Symbola",
    "FreeSans",
    "Unifont",
)


def parameters(families: Sequence[str]) -> dict[str, object]:
    """matplotlib's settings for a figure in these font families: user text is literal, output is reproducible."""
    return {
        "font.family": list(families),
        "font.size": TICK,
        "text.parse_math": False,
        "text.usetex": False,
        "text.hinting": "none",  # so that widths grow with size, and a text fits at every resolution
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": QUIET,
        "axes.labelsize": LABEL,
        "axes.titlesize": PANEL_TITLE,
        "axes.linewidth": 0.6,
        "axes.formatter.useoffset": False,
        "axes.formatter.limits": (-3, 5),
        "xtick.labelsize": TICK,
        "ytick.labelsize": TICK,
        "xtick.color": INK,
        "ytick.color": INK,
        "xtick.major.width": 0.6,
        "ytick.major.width": 0.6,
        "xtick.major.size": 2.5,
        "ytick.major.size": 2.5,
        "xtick.major.pad": 2.0,
        "ytick.major.pad": 2.0,
        "hatch.linewidth": 0.5,
        "legend.fontsize": TICK,
        "legend.frameon": False,
        "savefig.facecolor": "white",
        "svg.fonttype": "path",
        "svg.hashsalt": "bertgeo",
        "pdf.fonttype": 42,
    }


def map_colours(name: str, count: int) -> list[Colour]:
    """`count` colours in the order of a map, without its palest end."""
    return [_rgba(colormaps[name](place)) for place in np.linspace(0.0, 0.9, max(count, 1))]


def group_map(count: int) -> ListedColormap:
    """One colour a group, dark to light."""
    return ListedColormap(map_colours(GROUPS, count))


def value_map(name: str) -> Colormap:
    """The colours of a value, see-through where there is none (the hatched ground shows)."""
    return colormaps[name].with_extremes(bad=(0.0, 0.0, 0.0, 0.0))


def ink_on(ground: Colour) -> str:
    """Black or white, whichever stands out more on a ground (relative luminance of WCAG 2).

    >>> ink_on((1.0, 1.0, 0.8, 1.0)), ink_on((0.2, 0.0, 0.3, 1.0))
    ('black', 'white')
    """
    channels = np.asarray(ground[:3])
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return "black" if linear @ [0.2126, 0.7152, 0.0722] > 0.179 else "white"


def _rgba(colour: ArrayLike) -> Colour:
    red, green, blue, alpha = np.asarray(colour, dtype=float)
    return float(red), float(green), float(blue), float(alpha)


@cache
def charmap(family: str) -> frozenset[int]:
    """The code points that a family's regular face draws."""
    return frozenset(FT2Font(findfont(FontProperties(family=[family]))).get_charmap())


@cache
def installed() -> tuple[str, ...]:
    """The font families to try, best first: the base, the preferred ones found here, then any other Noto Sans."""
    names = {font.name for font in fontManager.ttflist}
    noto = sorted(name for name in names if name.startswith("Noto Sans ") and name not in FALLBACK_FONTS)
    return (BASE_FONT, *(name for name in FALLBACK_FONTS if name in names), *noto)


@dataclass
class Typesetter:
    """Makes texts drawable and measures them. `families` grows with the fonts needed, `missing` with what none has."""

    families: list[str] = field(default_factory=lambda: [BASE_FONT])
    missing: set[str] = field(default_factory=set)
    _drawn: dict[str, bool] = field(default_factory=dict)
    _widths: dict[tuple[str, float], float] = field(default_factory=dict)
    # At 72 dots per inch a pixel is a point.
    _renderer: RendererAgg = field(default_factory=lambda: RendererAgg(1, 1, 72))

    def text(self, text: str) -> str:
        """`text` with every character that no font draws written as its code point; line breaks stay."""
        return "\n".join(_join(self._pieces(line)) for line in text.split("\n"))

    def label(self, text: str) -> str:
        """The same on one line, the middle left out where it is too long for an axis."""
        return _join(shortened(self._pieces(text)))

    def inches(self, text: str, size: float) -> float:
        """The width of a line of type."""
        if (text, size) not in self._widths:
            font = FontProperties(family=self.families, size=size)
            extent = self._renderer.get_text_width_height_descent(text, font, False)
            self._widths[text, size] = 1.01 * float(extent[0]) / 72
        return self._widths[text, size]

    def widest(self, texts: Iterable[str], size: float) -> float:
        """The width of the widest of some lines, 0 if there are none."""
        return max((self.inches(text, size) for text in texts), default=0.0)

    def wrapped(self, text: str, size: float, width: float) -> list[str]:
        """The lines of a text, none wider than `width` inches."""
        return [line for paragraph in text.split("\n") for line in self._wrapped(paragraph, size, width)]

    def fitted(self, text: str, size: float, width: float) -> str:
        """The text, the middle left out so that it fits `width` inches."""
        keep = len(text)
        while keep > 1 and self.inches(text, size) > width:
            keep -= 1
            text = "".join(shortened(list(text), keep))
        return text

    def _wrapped(self, text: str, size: float, width: float) -> list[str]:
        lines = [""]
        for word in text.split(" "):
            longer = f"{lines[-1]} {word}" if lines[-1] else word
            if self.inches(longer, size) <= width:
                lines[-1] = longer
            else:
                lines += self._broken(word, size, width)
        return [line for line in lines if line]

    def _broken(self, word: str, size: float, width: float) -> list[str]:
        lines = [""]
        for piece in graphemes(word):
            if lines[-1] and self.inches(lines[-1] + piece, size) > width:
                lines.append("")
            lines[-1] += piece
        return lines

    def _pieces(self, text: str) -> list[str]:
        return [piece if self._draws(piece) else _codes(piece) for piece in graphemes(text)]

    def _draws(self, piece: str) -> bool:
        drawn = [self._draws_character(character) for character in piece]  # all of them: each missing one is noted
        return all(drawn)

    def _draws_character(self, character: str) -> bool:
        if character not in self._drawn:
            self._drawn[character] = self._find(character)
        return self._drawn[character]

    def _find(self, character: str) -> bool:
        control = unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp")
        family = next((name for name in installed() if not control and ord(character) in charmap(name)), None)
        if family is None:
            self.missing.add(character)
        elif family not in self.families:
            self.families.append(family)
        return family is not None


def graphemes(text: str) -> list[str]:
    """Characters, each with the accents that combine with it.

    >>> len("e\u0301a"), len(graphemes("e\u0301a"))
    (3, 2)
    """
    pieces: list[str] = []
    for character in text:
        if pieces and unicodedata.category(character) in ("Mn", "Mc", "Me"):
            pieces[-1] += character
        else:
            pieces.append(character)
    return pieces


def shortened(pieces: Sequence[str], longest: int = LONGEST_LABEL) -> list[str]:
    """The pieces, those in the middle replaced by an ellipsis where all together exceed `longest` characters.

    >>> "".join(shortened("incomprehensibilities", 9))
    'inco…ties'
    """
    kept, total = list(pieces), sum(map(_cost, pieces))
    if total <= longest:
        return kept
    while kept and total > longest - 1:
        total -= _cost(kept.pop(len(kept) // 2))
    middle = (len(kept) + 1) // 2
    return [*kept[:middle], "…", *kept[middle:]]


def _cost(piece: str) -> int:
    # The code points of neighbours share brackets.
    return len(piece) - 3 if piece.startswith("[U+") else len(piece)


def _codes(piece: str) -> str:
    return f"[U+{' '.join(f'{ord(character):04X}' for character in piece)}]"


def _join(pieces: Sequence[str]) -> str:
    text = ""
    for before, piece in zip(["", *pieces], pieces, strict=False):
        follows = before.startswith("[U+") and piece.startswith("[U+")
        text = f"{text[:-1]} {piece[3:]}" if follows else text + piece
    return text
