"""Says a JSON schema in the words that llguidance knows, where its meaning stays the same.

What cannot be said exactly is left as it is, and llguidance refuses it by name. The module imports
nothing of llmserve: it is part of the process that decides which constraints may be compiled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, permutations
from typing import Any

_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas",
            "dependencies")  # fmt: skip
_SEVERAL = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "not", "if", "then", "else", "propertyNames")
_NOTES = frozenset(
    {"title", "description", "$comment", "default", "examples", "deprecated", "readOnly",
     "writeOnly", "discriminator"}
)  # fmt: skip
# Any other format is a note to the reader, by the specification.
_FORMATS = frozenset(
    {"date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname",
     "ipv4", "ipv6", "uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template",
     "json-pointer", "relative-json-pointer", "regex"}
)  # fmt: skip
_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null",
          list: "array", dict: "object"}  # fmt: skip
_HOPS = 8
_MAX_DISTINCT = 4
"""Of so many values, all lists without a repetition are written out."""

Schema = Any
"""A schema: an object, true or false."""


def enforceable(schema: Schema) -> Schema:
    """Return a schema with the same meaning, in words that can be enforced as far as possible."""
    return _Rewriter(schema).rewritten(schema)


class _Rewriter:
    def __init__(self, root: Schema) -> None:
        self._root = root

    def rewritten(self, schema: Schema) -> Schema:
        if not isinstance(schema, dict):
            return schema
        part = {name: self._inner(name, value) for name, value in schema.items()}
        if isinstance(part.get("format"), str) and part["format"] not in _FORMATS:
            del part["format"]
        for rule in (
            self._names, self._distinct, self._dependencies, self._condition, self._negation,
            self._one_of,
        ):  # fmt: skip
            part = rule(part)
        return part

    def _inner(self, name: str, value: Any) -> Any:
        if name in _BY_NAME and isinstance(value, dict):
            return {key: self.rewritten(part) for key, part in value.items()}
        if name in _SEVERAL and isinstance(value, list):
            return [self.rewritten(part) for part in value]
        return self.rewritten(value) if name in _SINGLE else value

    # Rules, each for one keyword

    def _names(self, part: dict[str, Any]) -> dict[str, Any]:
        """Say which names an object's keys may have by its properties."""
        if "propertyNames" not in part:
            return part
        names = self._resolved(part["propertyNames"])
        rest = {key: value for key, value in part.items() if key != "propertyNames"}
        others = rest.get("additionalProperties", True)
        if names is True or (isinstance(names, dict) and _allows_text(names)):
            return rest
        if not isinstance(names, dict) or "patternProperties" in part:
            return part
        values, known = _values(names), rest.get("properties", {})
        required = rest.get("required", [])
        if values is not None and isinstance(known, dict) and set(required) <= {*map(str, values)}:
            if _NOTES | {"type", "const", "enum"} >= names.keys():
                named = {name: known.get(name, others) for name in values if isinstance(name, str)}
                return {**rest, "properties": named, "additionalProperties": False}
        elif _NOTES | {"type", "pattern"} >= names.keys() and not known and others is not False:
            pattern = names.get("pattern")
            if isinstance(pattern, str) and names.get("type", "string") == "string":
                patterns = {pattern: others}
                return {**rest, "patternProperties": patterns, "additionalProperties": False}
        return part

    def _distinct(self, part: dict[str, Any]) -> dict[str, Any]:
        """Write out the lists without a repetition, if there are few."""
        unique = part.get("uniqueItems")
        if unique is None:
            return part
        rest = {key: value for key, value in part.items() if key != "uniqueItems"}
        least, most = part.get("minItems", 0), part.get("maxItems")
        if unique is False or (type(most) is int and most <= 1):
            return rest
        items = self._resolved(part.get("items"))
        values = _values(items) if isinstance(items, dict) else None
        bounds = _NOTES | {"type", "items", "minItems", "maxItems"}
        if (
            unique is not True
            or values is None
            or not _NOTES | {"type", "const", "enum"} >= items.keys()
            or not bounds >= rest.keys()
            or _kinds(part) != {"array"}
            or type(least) is not int
        ):
            return part
        if any(isinstance(value, (list, dict)) for value in values):
            return part
        values = list({_key(value): value for value in values}.values())
        if len(values) > _MAX_DISTINCT:
            return part
        longest = len(values) if type(most) is not int else min(most, len(values))
        counts = range(least, longest + 1)
        lists = [list(each) for count in counts for each in permutations(values, count)]
        notes = {key: value for key, value in rest.items() if key in _NOTES}
        return {**notes, "enum": lists} if lists else part

    def _dependencies(self, part: dict[str, Any]) -> dict[str, Any]:
        """What a key requires: either it is not there, or what it requires is."""
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            depends = part.get(keyword)
            if not isinstance(depends, dict):
                continue
            part = {key: value for key, value in part.items() if key != keyword}
            for name, needed in depends.items():
                schema = {"required": needed} if isinstance(needed, list) else needed
                part = _with_any(part, [{"properties": {name: False}}, schema])
        return part

    def _condition(self, part: dict[str, Any]) -> dict[str, Any]:
        words = ("if", "then", "else")
        if not any(word in part for word in words):
            return part
        rest = {key: value for key, value in part.items() if key not in words}
        if "if" not in part or not ("then" in part or "else" in part):
            return rest  # By the specification, they mean nothing then.
        negated = self._negated(part["if"], rest)
        if negated is None:
            return part
        cases = [_both(part["if"], part.get("then", True))]
        cases += [_both(case, part.get("else", True)) for case in negated]
        return _with_any(rest, cases)

    def _negation(self, part: dict[str, Any]) -> dict[str, Any]:
        if "not" not in part:
            return part
        rest = {key: value for key, value in part.items() if key != "not"}
        negated = self._negated(part["not"], rest)
        return _with_any(rest, negated) if negated else part

    def _one_of(self, part: dict[str, Any]) -> dict[str, Any]:
        """One of several is any of them, if no value is of two."""
        branches = part.get("oneOf")
        if not isinstance(branches, list) or not branches:
            return part
        rest = {key: value for key, value in part.items() if key != "oneOf"}
        is_object = _kinds(rest) == {"object"}
        overlaps: dict[int, list[int]] = {}
        for one, other in combinations(range(len(branches)), 2):
            if not self._disjoint(branches[one], branches[other], is_object):
                overlaps.setdefault(one, []).append(other)
                overlaps.setdefault(other, []).append(one)
        cases = []
        for index, branch in enumerate(branches):
            for other in overlaps.get(index, ()):
                negated = self._negated(branches[other], rest)
                if negated is None:
                    return part
                branch = _both(branch, {"anyOf": negated} if negated else False)
            cases.append(branch)
        return _with_any(rest, cases)

    # What schemas mean

    def _resolved(self, part: Schema) -> Schema:
        """Return what a schema refers to, if it is nothing else."""
        for _ in range(_HOPS):
            reference = part.get("$ref") if isinstance(part, dict) else None
            if not isinstance(reference, str) or not reference.startswith("#/"):
                return part
            if not _NOTES | {"$ref"} >= part.keys():
                return part
            found = self._root
            for step in reference[2:].split("/"):
                key = step.replace("~1", "/").replace("~0", "~")
                found = found.get(key) if isinstance(found, dict) else None
            if found is None:
                return part
            part = found
        return part

    def _disjoint(self, one: Schema, other: Schema, is_object: bool, depth: int = 4) -> bool:
        """Return whether it is certain that no value is of both."""
        one, other = self._resolved(one), self._resolved(other)
        if one is False or other is False:
            return True
        if not isinstance(one, dict) or not isinstance(other, dict) or not depth:
            return False
        kinds = _kinds(one), _kinds(other)
        if kinds[0] is not None and kinds[1] is not None and not kinds[0] & kinds[1]:
            numbers = {"integer", "number"}
            if not (kinds[0] & numbers and kinds[1] & numbers):
                return True
        values = _values(one), _values(other)
        if values[0] is not None and values[1] is not None:
            return not any(value in values[1] for value in values[0])
        if not is_object and {"object"} not in kinds:
            return False
        properties = one.get("properties") or {}, other.get("properties") or {}
        required = {*one.get("required", ())} | {*other.get("required", ())}
        for name in sorted(name for name in required if isinstance(name, str)):
            parts = [
                has.get(name, self._others(schema))
                for has, schema in zip(properties, (one, other), strict=True)
            ]
            if self._disjoint(parts[0], parts[1], False, depth - 1):
                return True
        return False

    @staticmethod
    def _others(schema: Mapping[str, Any]) -> Schema:
        """Return the schema of properties that are not listed."""
        return True if "patternProperties" in schema else schema.get("additionalProperties", True)

    def _negated(self, part: Schema, beside: Mapping[str, Any]) -> list[Schema] | None:
        """Return schemas of which a value is one if it is not of this one; None if unknown.

        It must be of the schema ``beside`` as well, which says what else there is.
        """
        part = self._resolved(part)
        if isinstance(part, bool):
            return [] if part else [True]
        if not isinstance(part, dict):
            return None
        is_object = _kinds(beside) == {"object"}
        negated: list[Schema] = []
        for name, value in part.items():
            found: list[Schema] | None = None
            listed = {"const", "enum"} & part.keys()
            if name in _NOTES or (name == "type" and (listed or (is_object and value == "object"))):
                found = []
            elif name == "required" and is_object and isinstance(value, list):
                found = [{"properties": {key: False}} for key in value]
            elif name == "properties" and is_object and isinstance(value, dict):
                found = self._negated_properties(value, beside.get("properties") or {})
            elif name in ("const", "enum"):
                names = ("type", "const", "enum")
                rest = self._rest(beside, {key: part[key] for key in names if key in part})
                found = None if rest is None else [{"enum": rest}] if rest else []
            if found is None:
                return None
            negated += found
        return negated

    def _negated_properties(
        self, properties: Mapping[str, Schema], known: Mapping[str, Schema]
    ) -> list[Schema] | None:
        negated: list[Schema] = []
        for name, taken in properties.items():
            rest = self._rest(known.get(name), taken)
            if rest is None:
                return None
            if rest:
                negated.append({"properties": {name: {"enum": rest}}, "required": [name]})
        return negated

    def _rest(self, whole: Schema, taken: Schema) -> list[Any] | None:
        """Return the values of one schema that are not of another, if both have a list of them."""
        whole, taken = self._resolved(whole), self._resolved(taken)
        if not isinstance(whole, dict) or not isinstance(taken, dict):
            return None
        all_values, values = _values(whole), _values(taken)
        plain = _NOTES | {"type", "const", "enum"} >= taken.keys()
        if _kinds(whole) == {"boolean"} and all_values is None:
            all_values = [False, True]
        if all_values is None or values is None or not plain:
            return None
        if any(isinstance(value, (list, dict)) for value in (*all_values, *values)):
            return None
        taken_keys = set(map(_key, values))
        return [value for value in all_values if _key(value) not in taken_keys]


def _key(value: Any) -> tuple[bool, Any]:
    """Return what tells a value of JSON from others: 1 is 1.0, and not true."""
    return isinstance(value, bool), value


def _kinds(part: Mapping[str, Any]) -> set[str] | None:
    """Return the kinds of value that a schema allows, None if that is not said."""
    kind = part.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {each for each in kind if isinstance(each, str)}
    values = _values(part)
    return None if values is None else {_KINDS[type(value)] for value in values}


def _values(part: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that a schema lists, None if it lists none."""
    values = [part["const"]] if "const" in part else part.get("enum")
    if not isinstance(values, list):
        return None
    kind = part.get("type")
    kinds = {kind} if isinstance(kind, str) else {*kind} if isinstance(kind, list) else None
    if kinds is not None and "number" in kinds:
        kinds.add("integer")
    return [value for value in values if kinds is None or _KINDS[type(value)] in kinds]


def _allows_text(part: Mapping[str, Any]) -> bool:
    """Return whether any text is of a schema."""
    kinds = _kinds(part)
    return _NOTES | {"type"} >= part.keys() and (kinds is None or "string" in kinds)


def _both(one: Schema, other: Schema) -> Schema:
    if one is False or other is False:
        return False
    if other is True or other == {}:
        return one
    return other if one is True or one == {} else {"allOf": [one, other]}


def _with_any(part: dict[str, Any], cases: Sequence[Schema]) -> dict[str, Any]:
    """Return a schema whose values are of one of these as well."""
    cases = [case for case in cases if case is not False]
    if not part:
        return {"anyOf": cases}
    return {**part, "allOf": [*part.get("allOf", ()), {"anyOf": cases}]}
