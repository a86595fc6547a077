"""Versions of TensorRT-LLM, the containers that include them, and the reader of the data tables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from llmserve.plugin import IncompatibleError, OptionError

_VERSION = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?([.a-z+-].*)?")
_TAG = re.compile(r"(?:\S+:)?(\d\d\.\d\d)(?:-\S+)?")


@dataclass(frozen=True, order=True)
class Version:
    """A release of TensorRT-LLM; suffixes after the patch number change no interface.

    >>> Version.parse("v0.19.0") < Version.parse("1.2.0rc6.post2")
    True
    >>> str(Version.parse("0.19"))
    '0.19.0'
    """

    major: int
    minor: int
    patch: int = 0

    @classmethod
    def parse(cls, text: str) -> Version:
        match = _VERSION.fullmatch(text.strip())
        if match is None:
            raise OptionError(
                f"{text!r} is not a version of TensorRT-LLM", mend="write it like 0.19.0 or 1.2.1"
            )
        return cls(int(match[1]), int(match[2]), int(match[3] or 0))

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"

    def same_release(self, other: Version) -> bool:
        """Whether this version runs the other's engines: patches of a release share the format."""
        return (self.major, self.minor) == (other.major, other.minor)


@dataclass(frozen=True)
class Range:
    """The versions from ``since`` on, and before ``until`` if it is set."""

    since: Version
    until: Version | None

    @classmethod
    def parse(cls, text: str) -> Range:
        since, _, until = text.partition(":")
        return cls(Version.parse(since), Version.parse(until) if until else None)

    @classmethod
    def parse_all(cls, text: str) -> list[Range]:
        return [cls.parse(word) for word in text.split()]

    def __contains__(self, version: Version) -> bool:
        return self.since <= version and (self.until is None or version < self.until)

    def __str__(self) -> str:
        end = f" and before {self.until.major}.{self.until.minor}" if self.until else ""
        return f"from {self.since.major}.{self.since.minor} on{end}"


@cache
def sections(table: str) -> Mapping[str, tuple[str, ...]]:
    """Return a table's lines by section heading."""
    rows: dict[str, list[str]] = {}
    heading = ""
    for line in Path(__file__).with_name(table).read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            heading = line.strip("[]")
        elif line and not line.startswith("#"):
            rows.setdefault(heading, []).append(line)
    return {heading: tuple(lines) for heading, lines in rows.items()}


def columns(table: str, heading: str) -> list[list[str]]:
    """Return the lines of a section, each split at the bars."""
    return [[word.strip() for word in line.split("|")] for line in sections(table)[heading]]


def pairs(table: str, heading: str) -> dict[str, str]:
    return dict(line.split() for line in sections(table)[heading])


CONTAINERS = {
    tag: Version.parse(version)
    for version, *tags in map(str.split, sections("containers.txt")["containers"])
    for tag in tags
}

TUTORIALS = Version(0, 5)
# Between the version of the tutorials and this one the templates changed in every release.
FIRST_CONFIGURABLE = Version(0, 19)
# The first version whose LLM API serves a model without an engine.
FIRST_LLMAPI = Version(1, 0)
# The newest version that still runs engines; NVIDIA/TensorRT-LLM#15907 removed their backend.
DEFAULT = Version(1, 2, 1)


def choose_version(version: str, container: str) -> Version:
    """Return the version to build for, from either option, which must be supported.

    A container is a tag such as 25.05, or the image's full name.
    """
    chosen = _named_version(version, container)
    if chosen < FIRST_CONFIGURABLE and not chosen.same_release(TUTORIALS):
        raise IncompatibleError(
            f"TensorRT-LLM {chosen} is not supported",
            mend=f"build for {TUTORIALS}, or for {FIRST_CONFIGURABLE} or later",
        )
    return chosen


def _named_version(version: str, container: str) -> Version:
    requested = Version.parse(version) if version else None
    if not container:
        return requested or DEFAULT
    tag = _TAG.fullmatch(container.strip())
    included = CONTAINERS.get(tag[1]) if tag else None
    if included is None:
        raise OptionError(
            f"the version of TensorRT-LLM in container {container!r} is unknown",
            mend=f"give --set trtllm_version=…, or one of {', '.join(sorted(CONTAINERS))}",
        )
    if requested and not requested.same_release(included):
        raise IncompatibleError(
            f"trtllm_version {requested} contradicts container {container}, which has {included}",
            mend="give a version and a container that match",
        )
    return included


def container_of(version: Version) -> str | None:
    """Return the newest container that includes a version, if one is known."""
    tags = [tag for tag, included in CONTAINERS.items() if included.same_release(version)]
    return f"nvcr.io/nvidia/tritonserver:{max(tags)}-trtllm-python-py3" if tags else None
