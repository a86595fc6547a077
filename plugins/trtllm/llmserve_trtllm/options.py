"""The options of a build, read from ``options.txt``, and which of them it refuses."""

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
"""What the engine does of what a request asks for."""

_KINDS: Mapping[str, type[Value]] = {"int": int, "float": float, "bool": bool, "text": str}
_INT64_MAX = 2**63 - 1


@dataclass(frozen=True)
class BuildOption(Option):
    """An option with a type, which may be unset: its default is then the backend's."""

    kind: type[Value] = str
    versions: tuple[Range, ...] = ()
    uses: frozenset[str] = frozenset()
    older_key: tuple[Range, str] | None = None

    @classmethod
    def read(cls, row: list[str], most: int) -> BuildOption:
        """Read a row of ``options.txt``; a number without a limit is ``most`` at most."""
        name, kind, default, limits, text, where, key = [*row, "", ""][:7]
        low, is_range, high = limits.partition(":")
        unset = cls(
            name,
            "",
            text,
            choices=() if is_range else tuple(limits.split()),
            minimum=float(low) if is_range else None,
            maximum=float(high or most) if is_range else None,
            kind=_KINDS[kind],
            versions=tuple(Range.parse(word) for word in where.split() if ":" in word),
            uses=frozenset(word for word in where.split() if ":" not in word),
            older_key=(Range.parse(key.split()[0]), key.split()[1]) if key else None,
        )
        return replace(unset, default=unset.check(default)) if default else unset

    def check(self, value: object) -> Value:
        if value == "" == self.default:
            return ""
        typed = Option(self.name, self.kind(), self.help, self.choices, self.minimum, self.maximum)
        is_text = isinstance(value, str) and self.kind is not str
        return typed.parse(str(value)) if is_text else typed.check(value)

    def exists_in(self, version: Version) -> bool:
        return not self.versions or any(version in some for some in self.versions)

    def key(self, version: Version) -> str:
        return self.older_key[1] if self.older_key and version in self.older_key[0] else self.name

    def unused(self, options: Mapping[str, Value], version: Version) -> str:
        """Return why the option has no effect in a build, or nothing."""
        if options["layout"] == "llmapi":
            if self.uses and "llmapi" not in self.uses:
                return f"the layout llmapi serves a model as it is and has no {self.name}"
        elif self.uses == {"llmapi"}:
            return f"{self.name} is for the layout llmapi: an engine has its stand-in by itself"
        elif "building" in self.uses and not options["build_engine"]:
            return f"{self.name} says how an engine is built, and this one is there already"
        elif not self.exists_in(version):
            when = " or ".join(map(str, self.versions))
            return f"TensorRT-LLM {version} has no {self.name}: it is there {when}"
        return ""


PARAMETERS = tuple(BuildOption.read(row, _INT64_MAX) for row in columns(_TABLE, "parameters"))
"""Those that the engine's model takes as parameters."""
WRITTEN = columns(_TABLE, "written")
"""Parameters that are written in any case: the versions, the key and the value."""
OPTIONS = (*(BuildOption.read(row, INT32_MAX) for row in columns(_TABLE, "options")), *PARAMETERS)


def engine_parameters(options: Mapping[str, Value], version: Version) -> dict[str, str]:
    found = {key: value for versions, key, value in WRITTEN if version in Range.parse(versions)}
    for parameter in PARAMETERS:
        value = options[parameter.name]
        if value != "" and parameter.exists_in(version):
            text = str(value)
            found[parameter.key(version)] = text.lower() if isinstance(value, bool) else text
    return found


def refuse(options: Mapping[str, Value], version: Version) -> None:
    """Refuse what has no effect in a build, and what its version or layout cannot do.

    ``options`` has the ``batching`` too.
    """
    for option in OPTIONS:
        given = options[option.name] != option.default
        if given and (why := option.unused(options, version)):
            raise IncompatibleError(why, mend=f"leave out --{option.name.replace('_', '-')}")
    for versions, conditions, what, mend in columns(_TABLE, "refused"):
        applies = all(_is_so(condition, options) for condition in conditions.split())
        if applies and version in Range.parse(versions):
            raise IncompatibleError(what.format_map({**options, "version": version}), mend=mend)


def _is_so(condition: str, options: Mapping[str, Value]) -> bool:
    names, _, values = condition.partition("=")
    found = {str(options[name]).lower() for name in names.rstrip("!").split(",")}
    has_one = not found.isdisjoint(values.split(","))
    return has_one != names.endswith("!")
