"""The colours of plots and pages, for light and for dark."""

from __future__ import annotations

LIGHT = {
    "paper": "#ffffff",
    "panel": "#f5f6f8",
    "ink": "#1b1f24",
    "soft": "#57606a",
    "line": "#d3d8de",
    "faint": "#b4bcc6",
    "good": "#1a7f37",
    "bad": "#c62828",
    "link": "#0b57b8",
    "1": "#1f5fbf",
    "2": "#b85a00",
    "3": "#0a7c6a",
    "4": "#8a3fb2",
    "5": "#c2255d",
    "6": "#6e6a00",
    "7": "#4c6274",
    "8": "#7b4a2a",
}
DARK = {
    "paper": "#12151a",
    "panel": "#1b2027",
    "ink": "#e7eaee",
    "soft": "#a3adb8",
    "line": "#39414b",
    "faint": "#565f6b",
    "good": "#57c878",
    "bad": "#ff8a80",
    "link": "#7ab4ff",
    "1": "#6ea8ff",
    "2": "#ffa64d",
    "3": "#4fd1b8",
    "4": "#cf9bf2",
    "5": "#ff8fb4",
    "6": "#d3cf62",
    "7": "#a9bccc",
    "8": "#d6a37d",
}
"""The keys of both are the same. Plots are drawn in the light colours, each of which stands for
its key: no two may be alike."""

SERIES = tuple(LIGHT[str(at)] for at in range(1, 9))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "h")
DASHES = ("-", "--", "-.", ":")


def series(at: int) -> tuple[str, str]:
    """Give a colour and a marker; they repeat, but not together until many are drawn."""
    return SERIES[at % len(SERIES)], MARKERS[(at + at // len(SERIES)) % len(MARKERS)]
