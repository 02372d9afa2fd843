"""How methods look in all figures. Colour is never alone: each place has a dash and a marker of its own too.

The colours keep apart for readers who see no red, no green or no blue. Those for a dark page are the same hues,
lighter; the page exchanges one for the other.
"""

COLOURS = ("#0072b2", "#d55e00", "#00875f", "#b03a83", "#9a7200", "#1c96d4", "#3d3d3d", "#8a4b2d", "#6f6fce")
_DARK_COLOURS = ("#4aa8e8", "#ff8f4d", "#35c79a", "#ec8fc4", "#e6bb3c", "#8fd3ff", "#e4e4e4", "#d09a77", "#b3b0ff")

DASHES = ("solid", "dash", "dot", "dashdot")  # plotly's names
MARKERS = ("circle", "square", "diamond", "triangle-up", "cross", "triangle-down", "x")
PRINTED_DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
PRINTED_MARKERS = {
    "circle": "o",
    "square": "s",
    "diamond": "D",
    "triangle-up": "^",
    "cross": "P",
    "triangle-down": "v",
    "x": "X",
}

INK, SOFT, GRID, PAPER, WARN = "#1d2530", "#566070", "#e2e6ec", "#ffffff", "#c2410c"
_DARK_INK, _DARK_SOFT, _DARK_GRID, _DARK_PAPER, _DARK_WARN = "#e7eaef", "#a7b0be", "#353c48", "#1a1e25", "#ff9d5c"

SHADES = ("#f1f4f8", "#c3d9ee", "#6fa8d6", "#2470b0", "#08306b")  # from nothing to all, for heat maps
_DARK_SHADES = ("#222832", "#23466b", "#2f76b0", "#6cb4ea", "#d5edff")

GROUND = ("#fbfcfd", "#e4e9ef", "#c9d2dc", "#aab7c5")  # of a loss surface on which lines are drawn
_DARK_GROUND = ("#1c2129", "#2a313c", "#3a4350", "#4d5868")

SIDES = ("#b35806", "#f4f5f7", "#2166ac")  # less, as much, and more than a mean
_DARK_SIDES = ("#ff9d5c", "#232932", "#6cb8f0")

BAND = 0.16  # opacity of a band over seeds


def colour(look: int) -> str:
    return COLOURS[look % len(COLOURS)]


def dash(look: int) -> str:
    return DASHES[look % len(DASHES)]


def marker(look: int) -> str:
    return MARKERS[look % len(MARKERS)]


def see_through(colour: str, opacity: float) -> str:
    """A colour as rgba."""
    red, green, blue = (int(colour[k : k + 2], 16) for k in (1, 3, 5))
    return f"rgba({red}, {green}, {blue}, {opacity:g})"


def for_dark() -> dict[str, str]:
    """Every colour that figures use -> the one for a dark page."""
    light = (*COLOURS, *SHADES, *GROUND, *SIDES, INK, SOFT, GRID, PAPER, WARN)
    dark = (
        *_DARK_COLOURS,
        *_DARK_SHADES,
        *_DARK_GROUND,
        *_DARK_SIDES,
        _DARK_INK,
        _DARK_SOFT,
        _DARK_GRID,
        _DARK_PAPER,
        _DARK_WARN,
    )
    found = dict(zip(light, dark, strict=True))
    faded = {see_through(a, o): see_through(b, o) for a, b in found.items() for o in (BAND, 0.08)}
    return found | faded


# Shapes for the legend, around the middle of a 12 x 12 box
_SHAPES = {
    "circle": "M6 2.6a3.4 3.4 0 1 0 .01 0z",
    "square": "M2.9 2.9h6.2v6.2h-6.2z",
    "diamond": "M6 1.7 10.3 6 6 10.3 1.7 6z",
    "triangle-up": "M6 1.9 10.2 9.3H1.8z",
    "cross": "M4.7 2h2.6v2.7H10v2.6H7.3V10H4.7V7.3H2V4.7h2.7z",
    "triangle-down": "M6 10.1 10.2 2.7H1.8z",
    "x": "M3.2 1.8 6 4.6l2.8-2.8 1.4 1.4L7.4 6l2.8 2.8-1.4 1.4L6 7.4l-2.8 2.8-1.4-1.4L4.6 6 1.8 3.2z",
}
_STROKES = {"solid": "", "dash": "7 4", "dot": "2 3", "dashdot": "7 3 2 3"}


def swatch(look: int) -> dict[str, str]:
    """What the legend draws for a method."""
    return {"colour": colour(look), "shape": _SHAPES[marker(look)], "stroke": _STROKES[dash(look)]}
