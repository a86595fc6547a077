"""Typed options of components, set with ``--set key=value``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from llmserve.errors import OptionError
from llmserve.names import near

Value = bool | int | float | str

INT32_MAX = 2**31 - 1
"""The maximum of a whole number in Triton's configuration or a tensor."""

_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


@dataclass(frozen=True)
class Option:
    """A build-time option of a component; its type is that of its default, which is required."""

    name: str
    default: Value
    help: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    """For a whole number, None means the most that fits into Triton's configuration."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Pairs of an old choice, which is still accepted, and the choice that replaced it."""
    implies: tuple[tuple[str, str, Value], ...] = ()
    """Other defaults: a choice of this option, another option, and its default with that choice."""

    def __post_init__(self) -> None:
        if type(self.default) not in _WORDS:
            problem = f"option {self.name} has the default {self.default!r}"
            raise OptionError(problem, hint="give text, a number, or true or false")

    def parse(self, text: str) -> Value:
        """Parse a value from the command line; refuse one of another type."""
        kind = type(self.default)
        if kind is bool:
            if text not in ("true", "false"):
                raise self._wrong(text)
            return text == "true"
        try:
            return self.check(kind(text))
        except ValueError:
            raise self._wrong(text) from None

    def check(self, value: object) -> Value:
        """Refuse a value of the wrong type or out of range; floats may be whole numbers."""
        kind = type(self.default)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind or not isinstance(value, (bool, int, float, str)):
            raise self._wrong(value)
        value = dict[Value, Value](self.renamed).get(value, value)
        if self.choices and value not in self.choices:
            raise OptionError(
                f"{self.name} cannot be {value!r}", hint=f"choose one of {', '.join(self.choices)}"
            )
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            self._check_range(value)
        return value

    def _check_range(self, value: float) -> None:
        # `not value >= minimum` also refuses nan, which compares false with everything.
        if self.minimum is not None and not value >= self.minimum:
            raise OptionError(f"{self.name} must be at least {self.minimum}, not {value}")
        maximum = INT32_MAX if self.maximum is None and type(value) is int else self.maximum
        if maximum is not None and not value <= maximum:
            raise OptionError(f"{self.name} must be at most {maximum}, not {value}")

    def _wrong(self, value: object) -> OptionError:
        return OptionError(f"{self.name} takes {_WORDS[type(self.default)]}, not {value!r}")


def parse_assignments(assignments: Iterable[str]) -> dict[str, str]:
    """Split ``key=value`` arguments."""
    pairs: dict[str, str] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals or not key:
            raise OptionError(f"--set takes key=value, not {assignment!r}")
        if key in pairs:
            raise OptionError(f"--set gives {key} twice")
        pairs[key] = value
    return pairs


def renamed_values(options: Iterable[Option], values: Mapping[str, object]) -> list[str]:
    """Return a notice for each value that has been renamed."""
    return [
        f"{option.name}={old} is now called {option.name}={new}"
        for option in options
        for old, new in option.renamed
        if values.get(option.name) == old
    ]


def resolve(options: Iterable[Option], values: Mapping[str, object]) -> dict[str, Value]:
    """Return the value of every option, or its default where ``values`` has none.

    Text is parsed, because the command line passes nothing else; other values are checked.
    """
    by_name = {option.name: option for option in options}
    for name in values:
        if name not in by_name:
            raise OptionError(f"no option {name!r} here", hint=near(name, by_name))
    resolved: dict[str, Value] = {}
    for name, option in by_name.items():
        value = values.get(name, option.default)
        is_text = isinstance(value, str) and not isinstance(option.default, str)
        resolved[name] = option.parse(str(value)) if is_text else option.check(value)
    return resolved | _implied(by_name, resolved, values)


def _implied(
    options: Mapping[str, Option], resolved: Mapping[str, Value], values: Mapping[str, object]
) -> dict[str, Value]:
    """Return the defaults that choices imply, for options that are here and were not given."""
    implied: dict[str, Value] = {}
    for option in options.values():
        for choice, name, value in option.implies:
            if resolved[option.name] != choice or name in values or name not in options:
                continue
            try:
                implied[name] = options[name].check(value)
            except OptionError as error:
                problem = f"{option.name}={choice} implies {name}={value}: {error.problem}"
                raise OptionError(problem, hint=f"give another {name}") from None
    return implied
