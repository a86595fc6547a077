"""Short forms of SVG paths: a timeline has tens of thousands of marks."""

from __future__ import annotations

import re

_STEP = re.compile(r"([MLCQZ])([^MLCQZ]*)")


def compact(path: str) -> str:
    """Write straight lines relative to one another, in tenths of a unit.

    Every point is rounded before the differences are taken, so that errors do not add up.

    >>> compact("M 10.04 20 L 13.96 20 M 15 20 L 15 30 z")
    'm10 20h4m1 0v10z'
    """
    path = path.replace("z", "Z")
    if re.search("[CQ]", path):
        return re.sub(r"\s+", " ", re.sub(r"-?\d+\.\d+", _hundredths, path)).strip()
    written: list[str] = []
    at_x = at_y = start_x = start_y = 0
    for command, arguments in _STEP.findall(path):
        if command == "Z":
            written.append("z")
            at_x, at_y = start_x, start_y
            continue
        x, y = (round(float(part) * 10) for part in arguments.split())
        right, down = x - at_x, y - at_y
        if command == "M":
            written.append(f"m{_pair(right, down)}")
            start_x, start_y = x, y
        elif not down:
            written.append(f"h{_tenth(right)}")
        elif not right:
            written.append(f"v{_tenth(down)}")
        else:
            written.append(f"l{_pair(right, down)}")
        at_x, at_y = x, y
    return "".join(written)


def _pair(right: int, down: int) -> str:
    second = _tenth(down)
    return f"{_tenth(right)}{second if second.startswith('-') else ' ' + second}"


def _tenth(value: int) -> str:
    whole, rest = divmod(abs(value), 10)
    sign = "-" if value < 0 else ""
    return f"{sign}{whole or ''}.{rest}" if rest else f"{sign}{whole}"


def _hundredths(found: re.Match[str]) -> str:
    return f"{float(found[0]):.2f}".rstrip("0").rstrip(".")
