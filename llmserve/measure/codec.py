"""Frozen dataclasses to plain JSON values and back, by their annotations alone."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from math import inf, isfinite
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
_DIGITS = 6
"""Times are kept to the microsecond: what lies below is noise and would double a file."""


def encode(value: Any) -> Any:
    """Give plain JSON values; empty and missing fields are written all the same.

    What is without end becomes null, and :func:`decode` makes it infinite again.

    >>> encode((1.23456789, None, "x"))
    [1.234568, None, 'x']
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): encode(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(part) for part in value]
    if isinstance(value, float):
        # JSON has no infinity, and readers that are no Python refuse it.
        return round(value, _DIGITS) if isfinite(value) else None
    return value


def decode(kind: type[T], content: Any) -> T:
    """Build a dataclass from what :func:`encode` gave; unknown fields are passed over.

    ValueError, TypeError or KeyError where the content has another form.
    """
    hints = get_type_hints(kind)
    given = {
        field.name: _decode(hints[field.name], content[field.name])
        for field in fields(kind)  # type: ignore[arg-type]
        if field.name in content
    }
    return kind(**given)


def _decode(hint: Any, value: Any) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        plain = [argument for argument in arguments if argument is not type(None)]
        return _decode(plain[0], value) if len(plain) == 1 else value
    if origin is tuple:
        return tuple(_decode(arguments[0], part) for part in value)
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        return {key: _decode(arguments[1], part) for key, part in value.items()}
    if is_dataclass(hint):
        return decode(hint, value)  # type: ignore[arg-type]
    if hint is float and value is None:
        return inf
    if hint is float and isinstance(value, int):
        return float(value)
    return value
