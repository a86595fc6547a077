"""The options of a build, read from ``options.txt``, and which of them a version has no use for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from llmserve.plugin import INT32_MAX, IncompatibleError, Option, Tensor, Value, contract
from llmserve_trtllm.tables import Range, lines
from llmserve_trtllm.versions import Version

_HONOURED = {
    "temperature", "top_k", "top_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "seed", "random_seed", "min_tokens", "ignore_eos", "end_id", "bad_words",
}  # fmt: skip
SAMPLING: tuple[Tensor, ...] = (
    *(tensor for tensor in contract.SAMPLING if tensor.name in _HONOURED),
    Tensor("min_length", "TYPE_INT32"),
    Tensor("pad_id", "TYPE_INT32"),
    Tensor("length_penalty", "TYPE_FP32"),
    Tensor("beam_width", "TYPE_INT32"),
)
"""What the engine does of what a request asks for."""

_KINDS: Mapping[str, type[Value]] = {"int": int, "float": float, "bool": bool, "text": str}
_ALWAYS: Mapping[str, Value] = {
    "kv_cache_free_gpu_mem_fraction": 0.9,
    "exclude_input_in_output": True,
}
"""Parameters that are always written, so that every version does the same."""
_MODES = {"redrafter": "0.16:", "lookahead": "0.16:", "eagle": "0.16:"}
"""Modes of decoding that not every version knows; the others it has had since 0.12."""


@dataclass(frozen=True)
class TypedOption(Option):
    """An option with a type, which may be unset: its default is then the backend's.

    >>> TypedOption("enable_kv_cache_reuse", "", "", kind=bool).check("false")
    False
    """

    kind: type[Value] = str

    def parse(self, text: str) -> Value:
        return self.check(text)

    def check(self, value: object) -> Value:
        if value == "" == self.default:
            return ""
        typed = Option(self.name, self.kind(), self.help, self.choices, self.minimum, self.maximum)
        is_text = isinstance(value, str) and self.kind is not str
        return typed.parse(str(value)) if is_text else typed.check(value)


@dataclass(frozen=True)
class Setting:
    """An option, and the versions and layouts that have a use for it."""

    option: TypedOption
    versions: tuple[Range, ...]
    used_by: frozenset[str]
    keys: Mapping[Range, str] = field(default_factory=dict)
    """What some versions call the parameter, if it is one."""

    def key(self, version: Version) -> str:
        return next((k for some, k in self.keys.items() if version in some), self.option.name)

    def exists_in(self, version: Version) -> bool:
        return not self.versions or any(version in some for some in self.versions)

    @classmethod
    def parse(cls, section: str, line: str) -> Setting:
        """Read a line of ``options.txt``."""
        name, kind, third, limits, text, last = [*map(str.strip, line.split("|")), ""][:6]
        is_parameter = section == "parameters"
        where = third if is_parameter else last
        low, colon, high = limits.partition(":")
        most = 2**63 - 1 if is_parameter else INT32_MAX
        option = TypedOption(
            name,
            "",
            text,
            choices=() if colon else tuple(limits.split()),
            minimum=float(low) if colon else None,
            maximum=float(high or most) if colon else None,
            kind=_KINDS[kind],
        )
        default = option.check(_ALWAYS.get(name, "" if is_parameter else third))
        option = TypedOption(**{**vars(option), "default": default})
        words = where.split()
        return cls(
            option,
            tuple(Range.parse(word) for word in words if ":" in word),
            frozenset(word for word in words if ":" not in word),
            {Range.parse(last.split()[0]): last.split()[1]} if is_parameter and last else {},
        )


def _settings() -> Iterator[tuple[str, Setting]]:
    section = ""
    for line in lines("options.txt"):
        if line.startswith("["):
            section = line.strip("[]")
        else:
            yield section, Setting.parse(section, line)


_ALL = tuple(_settings())
OPTIONS: tuple[Option, ...] = tuple(setting.option for _, setting in _ALL)
PARAMETERS = tuple(setting for section, setting in _ALL if section == "parameters")


def engine_parameters(options: Mapping[str, Value], version: Version) -> dict[str, str]:
    """Return the parameters that were given, as the backend reads them; refuse what it would not.

    >>> engine_parameters({p.option.name: p.option.default for p in PARAMETERS}, Version(0, 19))
    {'kv_cache_free_gpu_mem_fraction': '0.9', 'exclude_input_in_output': 'true'}
    """
    mode = str(options["decoding_mode"])
    if version not in Range.parse(_MODES.get(mode, "0.5:")):
        raise IncompatibleError(
            f"TensorRT-LLM {version} has no decoding_mode {mode}: it would fall back to another",
            mend="leave it out, or build for 0.16 or later",
        )
    found = {}
    for parameter in PARAMETERS:
        value = options[parameter.option.name]
        if value != "" and parameter.exists_in(version):
            text = str(value)
            found[parameter.key(version)] = text.lower() if isinstance(value, bool) else text
    return found


def refuse_unused(options: Mapping[str, Value], version: Version) -> None:
    """Refuse an option that was given and that the version or the layout has no use for."""
    for section, setting in _ALL:
        name = setting.option.name
        if options[name] == setting.option.default:
            continue
        if why := _unused(setting, section == "parameters", options, version):
            raise IncompatibleError(why, mend=f"leave out --{name.replace('_', '-')}")


def _unused(
    setting: Setting, is_parameter: bool, options: Mapping[str, Value], version: Version
) -> str:
    """Say why an option has no effect, or nothing."""
    name, used_by = setting.option.name, setting.used_by
    if options["layout"] == "llmapi":
        if (is_parameter or used_by) and "llmapi" not in used_by:
            return f"the layout llmapi serves a model as it is and has no {name}"
    elif used_by == {"llmapi"} and not is_parameter:
        return f"{name} is for the layout llmapi: an engine has its stand-in by itself"
    elif "building" in used_by and not options["build_engine"]:
        return f"{name} says how an engine is built, and this one is there already"
    elif not setting.exists_in(version):
        when = " or ".join(map(str, setting.versions))
        return f"TensorRT-LLM {version} has no {name}: it is there {when}"
    return ""
