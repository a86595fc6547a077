"""Numbers as people read them, and names that can be shown anywhere."""

from __future__ import annotations

import unicodedata
from datetime import datetime, timezone
from math import isfinite

NONE = "-"
"""Stands where there is no figure."""

_MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September",
    "October", "November", "December",
)  # fmt: skip
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def number(value: float | None) -> str:
    """Write a number with three digits that count, and all digits before the point.

    >>> number(8.0649), number(13.0), number(436.51), number(12114.01), number(0.04149), number(98)
    ('8.06', '13.0', '437', '12,114', '0.0415', '98')
    """
    if value is None:
        return NONE
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 0.9995:
        # Counted after rounding: 9.999 is 10.0.
        return f"{value:.{2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0}f}"
    return f"{value:.3g}" if value else "0"


def seconds(value: float | None) -> str:
    """Write a time in the unit that fits it.

    >>> seconds(6.28551), seconds(0.41236), seconds(0.00009), seconds(0.0), seconds(None)
    ('6.29 s', '412 ms', '90.0 µs', '0 s', '-')
    """
    if value is None:
        return NONE
    if not value:
        return "0 s"
    # What would be rounded to 1000 of a unit is 1 of the next.
    for unit, name in _UNITS:
        if abs(value) >= unit * 0.9995:
            return f"{number(value / unit)} {name}"
    return f"{number(value / 1e-6)} µs"


def times(value: float) -> str:
    """Write a ratio; one round says nothing of how far it may reach.

    >>> times(1.9049), times(0.07), times(31.4)
    ('1.90 x', '0.07 x', '31.4 x')
    """
    if not isfinite(value):
        return "any"
    return f"{factor(value)} x"


def factor(value: float) -> str:
    """Write a ratio as a number; what is not 1 is never written as 1.

    >>> factor(1.9049), factor(0.9964), factor(1.0)
    ('1.90', '0.996', '1.00')
    """
    if abs(value) >= 9.995:
        return number(value)
    near = f"{value:.2f}" == "1.00" and value != 1
    return f"{value:.{3 if near else 2}f}"


def tick(value: float, *, time: bool = False) -> str:
    """Write the round number of a tick, without digits that say nothing.

    >>> tick(2.0), tick(0.25, time=True), tick(1500.0), tick(1.5, time=True)
    ('2', '250 ms', '1,500', '1.5 s')
    """
    if not time:
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    for unit, name in _UNITS:
        if abs(value) >= unit * 0.9995:
            return f"{value / unit:.4g} {name}"
    return "0 s" if not value else f"{value / 1e-6:.4g} µs"


def share(value: float | None) -> str:
    """Write a part of a whole.

    >>> share(0.9871), share(1.0), share(None)
    ('98.7 %', '100 %', '-')
    """
    return NONE if value is None else f"{100 * value:.3g} %"


def counted(many: int, one: str, several: str | None = None) -> str:
    """Say how many of something.

    >>> counted(1, "round"), counted(98, "request")
    ('1 round', '98 requests')
    """
    return f"{many:,} {one if many == 1 else several or one + 's'}"


def listed(names: list[str]) -> str:
    """Join names as a sentence does.

    >>> listed(["1", "2", "8"])
    '1, 2 and 8'
    """
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def when(text: str) -> str:
    """Write a moment in ISO form as people do; anything else stays as it is.

    >>> when("2026-01-02T03:04:05+00:00"), when("2026")
    ('2 January 2026, 03:04 UTC', '2026')
    """
    try:
        moment = datetime.fromisoformat(text).astimezone(timezone.utc)
    except ValueError:
        return clean(text)
    # Not strftime, which speaks the language of who runs this.
    return f"{moment.day} {_MONTHS[moment.month - 1]} {moment.year}, {moment:%H:%M} UTC"


def clean(text: object) -> str:
    """Make one line of any text, without what cannot be shown or turns the writing around.

    Names, options and messages come from anywhere, prompts among them; XML has no way at all to
    hold a control character.

    >>> clean("two\\nlines, a bell \\x07")
    'two lines, a bell �'
    """
    kept = (_shown(character) for character in " ".join(str(text).split()))
    return "".join(kept)


def shorten(text: object, most: int) -> str:
    """Take the middle out of what is too long: names of variants differ at both ends.

    >>> shorten("static, max_batch_size 8, instances 2", 20)
    'static, ma…stances 2'
    """
    line = clean(text)
    if len(line) <= most:
        return line
    tail = (most - 1) // 2
    return f"{line[: most - 1 - tail]}…{line[len(line) - tail :]}"


def _shown(character: str) -> str:
    if unicodedata.category(character) in ("Cc", "Cs", "Cn"):
        return "\N{REPLACEMENT CHARACTER}"
    turns = "\u202a" <= character <= "\u202e" or "\u2066" <= character <= "\u2069"
    return "" if turns else character
