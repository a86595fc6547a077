"""Typed options: what a component takes with ``--set key=value``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from llmserve.errors import OptionError
from llmserve.names import near

Value = bool | int | float | str

INT32_MAX = 2**31 - 1
"""The most that a whole number can be which goes into Triton's configuration or a tensor."""

_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


@dataclass(frozen=True)
class Option:
    """One option of a component at build time.

    The type is that of the default, so an option always has one.
    """

    name: str
    default: Value
    help: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    """For a whole number what fits into Triton's configuration, where nothing is said."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Choices that had another name: the old one is still taken, and means the new one."""

    def __post_init__(self) -> None:
        if type(self.default) not in _WORDS:
            problem = f"option {self.name} has the default {self.default!r}"
            raise OptionError(problem, mend="give text, a number, or true or false")

    def parse(self, text: str) -> Value:
        """Read a value from the command line; refuse what is not of the option's type."""
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
        """Refuse a value of the wrong type or out of range; whole numbers pass for numbers."""
        kind = type(self.default)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind or not isinstance(value, (bool, int, float, str)):
            raise self._wrong(value)
        value = dict[Value, Value](self.renamed).get(value, value)
        if self.choices and value not in self.choices:
            raise OptionError(
                f"{self.name} cannot be {value!r}", mend=f"choose one of {', '.join(self.choices)}"
            )
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            self._check_range(value)
        return value

    def _check_range(self, value: float) -> None:
        # Written so that nan, which compares false with everything, is refused too.
        if self.minimum is not None and not value >= self.minimum:
            raise OptionError(f"{self.name} must be at least {self.minimum}, not {value}")
        most = INT32_MAX if self.maximum is None and type(value) is int else self.maximum
        if most is not None and not value <= most:
            raise OptionError(f"{self.name} must be at most {most}, not {value}")

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


def renamed_values(options: Iterable[Option], given: Mapping[str, object]) -> list[str]:
    """Return a line for each value that was given by its old name."""
    return [
        f"{option.name}={old} is called {option.name}={new} now"
        for option in options
        for old, new in option.renamed
        if given.get(option.name) == old
    ]


def resolve(options: Iterable[Option], given: Mapping[str, object]) -> dict[str, Value]:
    """Give every option its value: the one that was given, else the default.

    Text is parsed, because the command line has nothing else; other values are checked.
    """
    known = {option.name: option for option in options}
    for name in given:
        if name not in known:
            raise OptionError(f"no option {name!r} here", mend=near(name, known))
    values: dict[str, Value] = {}
    for name, option in known.items():
        value = given.get(name, option.default)
        is_text = isinstance(value, str) and not isinstance(option.default, str)
        values[name] = option.parse(str(value)) if is_text else option.check(value)
    return values
