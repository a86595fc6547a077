"""Comparisons that a recipe offers by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Pair:
    """Two builds worth comparing: ``compare --pair`` measures ``second`` against ``first``.

    Both are written ``label=recipe:option=value``. ``common`` are options of both, used where a
    recipe has them and the user has set none of ``unless``.
    """

    name: str
    first: str
    second: str
    common: Mapping[str, str] = field(default_factory=dict)
    unless: tuple[str, ...] = ()

    def defaults(self, asked: Mapping[str, str]) -> Mapping[str, str]:
        return {} if any(name in asked for name in self.unless) else self.common
