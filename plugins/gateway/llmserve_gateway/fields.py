"""The fields of requests as data: from them come the readers, the OpenAPI document and the pages.

A :class:`Body` has a row for each field that an API of the gateway knows, those that it refuses by
name or ignores among them. A :class:`Reader` makes a request of what a body has read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, Protocol, TypeVar, cast

from llmserve.runtime.contract import BIASES, INT32, RequestOption
from llmserve_gateway.errors import bad_request

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Check = Callable[[Any, str], T]
"""Reads a value, which may be None if the field has to be there; the text is what errors name."""
Use = Literal["read", "ignored", "refused"]

STRING: Mapping[str, Any] = {"type": "string"}
TOKEN_IDS: Mapping[str, Any] = {
    "type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": INT32},
}  # fmt: skip
_TOKENS = range(INT32 + 1)


@dataclass(frozen=True, eq=False)
class Field(Generic[T_co]):
    """A row: one field of a body, whose value is of type ``T`` when it has been read."""

    name: str
    help: str
    check: Check[T_co]
    schema: Mapping[str, Any]
    """JSON schema of the values that can be read, besides null."""
    required: bool = False
    absent: Any = None
    """What it is if it is not there, or null."""
    option: str = ""
    """The option of the tensor contract that it is as it is."""
    label: str = ""
    """What errors call it, if not by its name."""
    use: Use = "read"
    body: Body | None = None
    """The fields of its value, if that is an object with fields of its own."""

    def read(self, value: Any) -> T_co:
        return self.check(value, self.label or self.name)

    @property
    def full_schema(self) -> dict[str, Any]:
        """The schema for the document."""
        schema = self.body.schema() if self.body else dict(self.schema)
        return {**(schema if self.required else _or_null(schema)), "description": self.help}


class Reads(Protocol[T_co]):
    """What reads requests, by the fields that its bodies have."""

    @property
    def bodies(self) -> tuple[Body, ...]: ...
    def __call__(self, content: Mapping[str, Any], /) -> T_co: ...


class Values:
    """What a body has read: the value of each of its fields, and what it does not know."""

    __slots__ = ("_content", "_read", "options", "unknown")

    def __init__(
        self,
        content: Mapping[str, Any],
        read: Mapping[str, Any],
        options: dict[str, Any],
        unknown: frozenset[str],
    ) -> None:
        self._content = content
        self._read = read
        self.options = options
        """The fields that are options, by the names of the tensor contract."""
        self.unknown = unknown

    def __getitem__(self, field: Field[T]) -> T:
        value: T = self._read[field.name]
        return value

    def given(self, field: Field[Any]) -> Any:
        """Return what was sent as a field, as it was sent; None if nothing was."""
        return self._content.get(field.name)

    @property
    def is_empty(self) -> bool:
        return not self._content

    def has(self, field: Field[Any]) -> bool:
        """Return whether a field was sent, be it as null."""
        return field.name in self._content


class Body:
    """The fields of an object, in the order of the document.

    Of the groups ``any_of`` one has to be there, and of the fields ``one_of`` a single one: what
    reads the body refuses others. A ``closed`` object within a request has no fields but these.
    """

    def __init__(
        self,
        *fields: Field[Any],
        any_of: Sequence[Sequence[str]] = (),
        one_of: Sequence[str] = (),
        closed: bool = False,
    ) -> None:
        self.fields: Mapping[str, Field[Any]] = {field.name: field for field in fields}
        if len(self.fields) < len(fields):
            raise ValueError("two rows have the same name")
        self.any_of, self.one_of, self.closed = any_of, one_of, closed
        self._absent = {field.name: field.absent for field in fields}
        self._required = [field for field in fields if field.required]

    def read(self, content: Mapping[str, Any]) -> Values:
        """Read a body; raise an error that names the first field that cannot be read."""
        fields, read, options, unknown = self.fields, self._absent.copy(), {}, []
        for name, value in content.items():
            field = fields.get(name)
            if field is None:
                unknown.append(name)
            elif value is not None:
                read[name] = value = field.check(value, field.label or name)
                if field.option and value is not None:
                    options[field.option] = value
        for field in self._required:
            if content.get(field.name) is None:
                # It says what it needs, as for any other value.
                field.read(None)
        return Values(content, read, options, frozenset(unknown))

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of the bodies that can be read."""
        schema: dict[str, Any] = {"type": "object"}
        if required := [name for name, field in self.fields.items() if field.required]:
            schema["required"] = required
        if self.any_of:
            schema["anyOf"] = [{"required": [*group]} for group in self.any_of]
        if self.one_of:
            schema["oneOf"] = [{"required": [name]} for name in self.one_of]
        if self.closed:
            schema["additionalProperties"] = {"type": "null"}
        schema["properties"] = {name: row.full_schema for name, row in self.fields.items()}
        return schema

    def all_fields(self, before: str = "") -> Iterator[tuple[str, Field[Any]]]:
        """Yield the path of each field with its row, and of those within it."""
        for name, row in self.fields.items():
            yield f"{before}{name}", row
            if row.body:
                yield from row.body.all_fields(f"{before}{name}.")


@dataclass(frozen=True, eq=False)
class Reader(Generic[T_co]):
    """Reads requests: its body checks each field, and ``make`` what they mean together."""

    body: Body
    make: Callable[[Values], T_co]

    @property
    def bodies(self) -> tuple[Body, ...]:
        return (self.body,)

    def __call__(self, content: Mapping[str, Any]) -> T_co:
        return self.make(self.body.read(content))


@dataclass(frozen=True, eq=False)
class Readers(Generic[T_co]):
    """Reads what several APIs send to one path, told apart by a field of the ``other``."""

    usual: Reader[T_co]
    other: Reader[T_co]
    if_sent: Field[Any]

    @property
    def bodies(self) -> tuple[Body, ...]:
        return self.usual.body, self.other.body

    def __call__(self, content: Mapping[str, Any]) -> T_co:
        return (self.other if self.if_sent.name in content else self.usual)(content)


def reads(body: Body) -> Callable[[Callable[[Values], T]], Reader[T]]:
    """Make a reader of a function, which gets the values of a body's fields."""
    return lambda make: Reader(body, make)


# Kinds of fields


def needed(field: Field[T | None]) -> Field[T]:
    """Return a row whose field has to be there; its check refuses None."""
    return cast("Field[T]", replace(field, required=True))


def text(name: str, help: str) -> Field[str | None]:
    """A text that is not empty."""
    return Field(name, help, _text, {"type": "string", "minLength": 1})


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value:
        raise bad_request(f"{name} must be a non-empty string", name)
    check_encodable(value, name)
    return value


def any_text(name: str, help: str) -> Field[str]:
    """A text that may be empty, as it is if it is not sent."""
    return Field(name, help, _any_text, STRING, absent="")


def _any_text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise bad_request(f"{name} must be a string", name)
    check_encodable(value, name)
    return value


def flag(name: str, help: str) -> Field[bool]:
    """True or false, which it is if it is not sent."""
    return Field(name, help, check_flag, {"type": "boolean"}, absent=False)


def said(name: str, help: str) -> Field[bool | None]:
    """True or false, or not sent, which is not the same."""
    return Field(name, help, check_flag, {"type": "boolean"})


def check_flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise bad_request(f"{name} must be true or false", name)
    return value


def whole(name: str, help: str, low: int, high: float = math.inf) -> Field[int | None]:
    return _number(name, help, int, low, high)


def _number(
    name: str, help: str, kind: type[T], low: float, high: float, *, above: bool = False
) -> Field[T | None]:
    """A number of at least ``low``, or greater than ``low`` if ``above`` is set."""
    expected = "an integer" if kind is int else "a number"
    minimum = "greater than" if above else "of at least"
    maximum = "" if high == math.inf else f" and at most {high}"
    what = f"must be {expected} {minimum} {low:g}{maximum}"
    types = int if kind is int else (int, float)

    def check(value: Any, name: str) -> T:
        is_number = isinstance(value, types) and not isinstance(value, bool)
        if not is_number or not low <= value <= high or (above and value == low):
            raise bad_request(f"{name} {what}", name)
        try:
            return kind(value)  # type: ignore[call-arg]
        except OverflowError:
            raise bad_request(f"{name} is too large for a number", name) from None

    schema: dict[str, Any] = {"type": "integer" if kind is int else "number"}
    schema["exclusiveMinimum" if above else "minimum"] = low
    schema |= {} if high == math.inf else {"maximum": high}
    return Field(name, help, check, schema)


def length(name: str, help: str, *, low: int = 1) -> Field[int | None]:
    """The longest answer that a request wants; -1 is none, as user interfaces send it."""

    def check(value: Any, name: str) -> int | None:
        if value == -1 and type(value) is int:
            return None
        if type(value) is not int or not low <= value <= INT32:
            what = f"{name} must be an integer from {low} to {INT32}, or -1 for no limit"
            raise bad_request(what, name)
        return value

    numbers = {"type": "integer", "minimum": low, "maximum": INT32}
    return Field(name, help, check, {"anyOf": [numbers, {"const": -1}]})


def _words(name: str, help: str, most: int) -> Field[list[str] | None]:
    """A text, or a list of texts."""

    def check(value: Any, name: str) -> list[str] | None:
        words = [value] if isinstance(value, str) else value
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise bad_request(f"{name} must be a string or a list of strings", name)
        if len(words) > most:
            raise bad_request(f"{name} accepts at most {most} strings", name)
        return [word for word in words if word] or None

    array = {"type": "array", "maxItems": most, "items": STRING}
    return Field(name, help, check, {"anyOf": [STRING, array]})


def mapping(name: str, help: str) -> Field[dict[str, Any] | None]:
    """An object with any fields."""
    return Field(name, help, check_mapping, {"type": "object"})


def check_mapping(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise bad_request(f"{name} must be an object", name)
    return value


def part(name: str, help: str, body: Body) -> Field[Values]:
    """An object with fields of its own."""

    def check(value: Any, name: str) -> Values:
        values = body.read(check_mapping(value, name))
        others = (each for each in value if each in values.unknown and value[each] is not None)
        if body.closed and (other := next(others, None)) is not None:
            raise bad_request(f"{other[:40]!r} is not supported", name)
        return values

    return Field(name, help, check, {"type": "object"}, absent=body.read({}), body=body)


def option(
    row: RequestOption,
    name: str = "",
    *,
    low: float | None = None,
    high: float | None = None,
    then: Callable[[Any], Any] | None = None,
    passed: bool = True,
) -> Field[Any]:
    """An option of the model, by another name and with other limits if the API has them.

    Values that are the default are None, for models that do not know the option. The model gets
    it if it is ``passed``, or else if a reader says so.
    """
    lowest, highest = row.api_range or (row.low, row.high)
    low, high = lowest if low is None else low, highest if high is None else high
    field = _option(name or row.api or row.name, row, low, high)
    check = field.check
    return replace(
        field,
        option=row.name if passed else "",
        check=(lambda value, name: then(check(value, name))) if then else check,
    )


def _option(name: str, row: RequestOption, low: float, high: float) -> Field[Any]:
    if row.kind in ("whole", "number"):
        kind: type[Any] = int if row.kind == "whole" else float
        return _number(name, row.help, kind, low, high, above=row.above)
    if row.kind == "flag":
        # One that has no default, or true, may be switched off.
        return replace(
            said(name, row.help),
            check=lambda value, name: None if check_flag(value, name) == row.default else value,
        )
    if row.kind == "text":
        return text(name, row.help)
    if row.kind == "words":
        return _words(name, row.help, int(high))
    most = int(high) if row.kind == "biases" else 0

    def check(value: Any, name: str) -> dict[str, Any] | None:
        content = check_mapping(value, name)
        return (_biases(name, content, most) if most else content) or None

    low, high = BIASES
    numbers = {"type": "number", "minimum": low, "maximum": high}
    schema = {"type": "object", **(
        {"propertyNames": {"pattern": "^[0-9]+$"}, "additionalProperties": numbers,
         "maxProperties": most} if most else {}
    )}  # fmt: skip
    return Field(name, row.help, check, schema)


def _biases(name: str, biases: dict[str, Any], most: int) -> dict[str, float]:
    low, high = BIASES

    def is_valid(token: str, bias: Any) -> bool:
        is_number = isinstance(bias, (int, float)) and not isinstance(bias, bool)
        return token.isascii() and token.isdecimal() and is_number and low <= bias <= high

    if len(biases) > most or not all(map(is_valid, biases, biases.values())):
        what = f"{name} must map token ids to numbers from {low} to {high}, at most {most} of them"
        raise bad_request(what, name)
    return biases


def only(name: str, why: str, *values: Any) -> Field[None]:
    """A field of which the gateway has only some values, which say what is so anyway."""

    def check(value: Any, name: str) -> None:
        # In Python, 1 is true and 0 is false.
        if not any(type(value) is type(each) and value == each for each in values):
            raise bad_request(f"{name}: {why}", name)

    return Field(name, _sentence(why), check, {"enum": [*values]})


def refused(why: str, *names: str) -> Iterator[Field[None]]:
    """Fields that ask for something unsupported, with any value that is not empty."""

    def check(value: Any, name: str) -> None:
        if value:
            raise bad_request(f"{name}: {why}", name)

    for name in names:
        nothing = {"enum": [False, 0, "", [], {}]}
        yield Field(name, f"Refused: {_sentence(why)}", check, nothing, use="refused")


def refused_if_sent(why: str, *names: str) -> Iterator[Field[None]]:
    """Fields that ask for something with every value but false, an empty list and object."""

    def check(value: Any, name: str) -> None:
        if value is not False and value not in ([], {}):
            raise bad_request(f"{name}: {why}", name, "unsupported_parameter")

    for name in names:
        nothing = {"enum": [False, [], {}]}
        yield Field(name, f"Refused: {_sentence(why)}", check, nothing, use="refused")


def _sentence(why: str) -> str:
    return f"{why[:1].upper()}{why[1:]}."


def ignored(*names: str) -> Iterator[Field[None]]:
    """Fields that are accepted, but without any effect on the answer."""
    for name in names:
        yield Field(name, "Accepted, without any effect.", lambda _value, _name: None, {},
                    use="ignored")  # fmt: skip


# Values


def is_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(token) is int and token in _TOKENS for token in value)
    )


def check_encodable(text: str, where: str, param: str | None = None) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        problem = f"{where} has a character that UTF-8 cannot encode"
        raise bad_request(problem, param or where) from None


def _or_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema for the same values and null."""
    if not schema:
        return {}
    if "type" in schema:
        return {**schema, "type": [schema["type"], "null"]}
    if "enum" in schema:
        return {**schema, "enum": [*schema["enum"], None]}
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}]}
    return {"anyOf": [schema, {"type": "null"}]}
