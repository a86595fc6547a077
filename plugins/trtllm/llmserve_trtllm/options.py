"""The options of a build, read from ``options.txt``, and the checks that refuse some of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from llmserve.plugin import INT32_MAX, IncompatibleError, Option, Tensor, Value, contract
from llmserve_trtllm.versions import Range, Version, columns

_TABLE = "options.txt"
_SAMPLING = {
    "temperature", "top_k", "top_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "seed", "random_seed", "min_tokens", "ignore_eos", "end_id", "bad_words",
}  # fmt: skip
SAMPLING: tuple[Tensor, ...] = (
    *(tensor for tensor in contract.SAMPLING if tensor.name in _SAMPLING),
    Tensor("min_length", "TYPE_INT32"),
    Tensor("pad_id", "TYPE_INT32"),
    Tensor("length_penalty", "TYPE_FP32"),
    Tensor("beam_width", "TYPE_INT32"),
    *(tensor for tensor in contract.FORMS if tensor.name != "grammar"),
)
"""The request parameters that the engine supports."""

_TYPES: Mapping[str, type[Value]] = {"int": int, "float": float, "bool": bool, "text": str}
_INT64_MAX = 2**63 - 1


@dataclass(frozen=True)
class BuildOption(Option):
    """An option with a type, which may be unset: then the backend's own default applies."""

    kind: type[Value] = str
    versions: tuple[Range, ...] = ()
    uses: frozenset[str] = frozenset()

    @classmethod
    def read(cls, row: list[str], maximum: int) -> BuildOption:
        """Read a row of ``options.txt``; numbers without an upper limit get ``maximum``."""
        name, kind, default, limits, text, scope = [*row, ""][:6]
        low, is_range, high = limits.partition(":")
        unset = cls(
            name,
            "",
            text,
            choices=() if is_range else tuple(limits.split()),
            minimum=float(low) if is_range else None,
            maximum=float(high or maximum) if is_range else None,
            kind=_TYPES[kind],
            versions=tuple(Range.parse(word) for word in scope.split() if ":" in word),
            uses=frozenset(word for word in scope.split() if ":" not in word),
        )
        return replace(unset, default=unset.check(default)) if default else unset

    def check(self, value: object) -> Value:
        if value == "" == self.default:
            return ""
        typed = Option(self.name, self.kind(), self.help, self.choices, self.minimum, self.maximum)
        is_text = isinstance(value, str) and self.kind is not str
        return typed.parse(str(value)) if is_text else typed.check(value)

    def exists_in(self, version: Version) -> bool:
        return not self.versions or any(version in versions for versions in self.versions)

    def unused(self, options: Mapping[str, Value], version: Version) -> str:
        """Return why the option has no effect in a build, or an empty string."""
        if options["layout"] == "llmapi":
            if self.uses and "llmapi" not in self.uses:
                return f"the layout llmapi serves a model without an engine and has no {self.name}"
        elif self.uses == {"llmapi"}:
            return f"{self.name} is for the layout llmapi: an engine gets its stand-in without it"
        elif "building" in self.uses and not options["build_engine"]:
            return f"{self.name} is for building an engine, and this engine already exists"
        elif not self.exists_in(version):
            versions = " or ".join(map(str, self.versions))
            return f"TensorRT-LLM {version} has no {self.name}: it exists {versions}"
        return ""


PARAMETERS = tuple(BuildOption.read(row, _INT64_MAX) for row in columns(_TABLE, "parameters"))
"""Options that become parameters of the engine's model."""
WRITTEN = columns(_TABLE, "written")
"""Parameters that are always written: the versions, the key and the value."""
OPTIONS = (*(BuildOption.read(row, INT32_MAX) for row in columns(_TABLE, "options")), *PARAMETERS)


def engine_parameters(options: Mapping[str, Value], version: Version) -> dict[str, str]:
    written = {key: value for versions, key, value in WRITTEN if version in Range.parse(versions)}
    for parameter in PARAMETERS:
        value = options[parameter.name]
        if value != "" and parameter.exists_in(version):
            text = str(value)
            written[parameter.name] = text.lower() if isinstance(value, bool) else text
    return written


def refuse(options: Mapping[str, Value], version: Version) -> None:
    """Refuse options without effect, and options that the version or layout does not support.

    ``options`` also contains the ``batching``.
    """
    for option in OPTIONS:
        is_set = options[option.name] != option.default
        if is_set and (reason := option.unused(options, version)):
            raise IncompatibleError(reason, mend=f"leave out --{option.name.replace('_', '-')}")
    for versions, conditions, problem, mend in columns(_TABLE, "refused"):
        applies = all(_is_true(condition, options) for condition in conditions.split())
        if applies and version in Range.parse(versions):
            raise IncompatibleError(problem.format_map({**options, "version": version}), mend=mend)


def refused_requests(options: Mapping[str, Value], version: Version) -> dict[str, str]:
    """Return the request options that a build refuses, with the reason; options as above."""
    return {
        name: problem.format(version=version)
        for versions, conditions, name, problem in columns(_TABLE, "refused requests")
        if all(_is_true(condition, options) for condition in conditions.split())
        and version in Range.parse(versions)
    }


def _is_true(condition: str, options: Mapping[str, Value]) -> bool:
    names, _, values = condition.partition("=")
    actual = {str(options[name]).lower() for name in names.rstrip("!").split(",")}
    has_match = not actual.isdisjoint(values.split(","))
    return has_match != names.endswith("!")
