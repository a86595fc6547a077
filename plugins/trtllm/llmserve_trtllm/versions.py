"""Versions of TensorRT-LLM, which container has which, and the tables of what else each has."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from llmserve.plugin import IncompatibleError, OptionError

_FORM = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?([.a-z+-].*)?")
_TAG = re.compile(r"(?:\S+:)?(\d\d\.\d\d)(?:-\S+)?")


@dataclass(frozen=True, order=True)
class Version:
    """A release of TensorRT-LLM; what follows the patch number changes no interface.

    >>> Version.parse("v0.12.0") < Version.parse("1.2.0rc6.post2")
    True
    >>> str(Version.parse("0.19"))
    '0.19.0'
    """

    major: int
    minor: int
    patch: int = 0

    @classmethod
    def parse(cls, text: str) -> Version:
        found = _FORM.fullmatch(text.strip())
        if found is None:
            raise OptionError(
                f"{text!r} is no version of TensorRT-LLM", mend="write it like 0.12.0 or 1.2.1"
            )
        return cls(int(found[1]), int(found[2]), int(found[3] or 0))

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"

    def same_release(self, other: Version) -> bool:
        """Whether an engine of the other can be run: patches of one release share their format."""
        return (self.major, self.minor) == (other.major, other.minor)


@dataclass(frozen=True)
class Range:
    """Some versions: from the first on, and before the second if there is one."""

    since: Version
    until: Version | None

    @classmethod
    def parse(cls, text: str) -> Range:
        since, _, until = text.partition(":")
        return cls(Version.parse(since), Version.parse(until) if until else None)

    def __contains__(self, version: Version) -> bool:
        return self.since <= version and (self.until is None or version < self.until)

    def __str__(self) -> str:
        end = f" and before {self.until.major}.{self.until.minor}" if self.until else ""
        return f"from {self.since.major}.{self.since.minor} on{end}"


@cache
def sections(table: str) -> Mapping[str, tuple[str, ...]]:
    """Return a table's lines by the heading that they stand under."""
    found: dict[str, list[str]] = {}
    heading = ""
    for line in Path(__file__).with_name(table).read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            heading = line.strip("[]")
        elif line and not line.startswith("#"):
            found.setdefault(heading, []).append(line)
    return {name: tuple(rows) for name, rows in found.items()}


def columns(table: str, heading: str) -> list[list[str]]:
    """Return the lines under a heading, each cut at its bars."""
    return [[word.strip() for word in line.split("|")] for line in sections(table)[heading]]


def pairs(table: str, heading: str) -> dict[str, str]:
    return dict(line.split() for line in sections(table)[heading])


CONTAINERS = {
    tag: Version.parse(version)
    for version, *tags in map(str.split, sections("containers.txt")["containers"])
    for tag in tags
}

# Between 0.5.0, which is the tutorials', and this the templates changed with every release.
FIRST_CONFIGURABLE = Version(0, 12)
# The first whose LLM API takes a model as it is, without an engine.
FIRST_LLMAPI = Version(1, 0)
# The newest that still runs engines; NVIDIA/TensorRT-LLM#15907 removed their backend.
DEFAULT = Version(1, 2, 1)


def choose_version(version: str, container: str) -> Version:
    """Return the version to build for, from either of the options; they may not contradict.

    A container is a tag such as 24.08, or the image's whole name.
    """
    asked = Version.parse(version) if version else None
    if not container:
        return asked or DEFAULT
    tag = _TAG.fullmatch(container.strip())
    found = CONTAINERS.get(tag[1]) if tag else None
    if found is None:
        raise OptionError(
            f"it is not known which TensorRT-LLM is in container {container!r}",
            mend=f"give --set trtllm_version=…, or one of {', '.join(sorted(CONTAINERS))}",
        )
    if asked and not asked.same_release(found):
        raise IncompatibleError(
            f"trtllm_version {asked} was asked for, and container {container} has {found}",
            mend="give those that belong together",
        )
    return found


def container_of(version: Version) -> str | None:
    """Return the newest container that has a version, if one is known."""
    tags = [tag for tag, has in CONTAINERS.items() if has.same_release(version)]
    return f"nvcr.io/nvidia/tritonserver:{max(tags)}-trtllm-python-py3" if tags else None
