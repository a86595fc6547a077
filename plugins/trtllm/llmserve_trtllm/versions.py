"""Which TensorRT-LLM runs where, and what changed when: the version table, as data."""

from __future__ import annotations

import re
from dataclasses import dataclass

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
        """Read a version as NVIDIA writes them."""
        found = _FORM.fullmatch(text.strip())
        if found is None:
            raise OptionError(
                f"{text!r} is no version of TensorRT-LLM", mend="write it like 0.12.0 or 1.2.1"
            )
        return cls(int(found[1]), int(found[2]), int(found[3] or 0))

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"

    @property
    def short(self) -> str:
        """The release without its patch number."""
        return f"{self.major}.{self.minor}"

    def same_release(self, other: Version) -> bool:
        """Whether an engine of the other can be run: patches of one release share their format."""
        return (self.major, self.minor) == (other.major, other.minor)


def _v(text: str) -> Version:
    return Version.parse(text)


# From docs/introduction/compatibility.md of triton-inference-server/server; 23.10 is older than
# that page. A tag that is not here is not guessed.
_RELEASES = """
0.5.0 23.10 | 0.9.0 24.04 24.05 | 0.10.0 24.06 | 0.11.0 24.07 | 0.12.0 24.08 | 0.13.0 24.09
0.14.0 24.10 | 0.15.0 24.11 | 0.16.0 24.12 | 0.17.0 25.01 25.02 | 0.18.0 25.03 | 0.18.2 25.04
0.19.0 25.05 | 0.20.0 25.06 25.07 | 0.21.0 25.08 | 1.0.0 25.09 25.10 | 1.0.3 25.11
1.1.0 25.12 26.01 26.02 | 1.2.0 26.03 | 1.2.1 26.04 26.05 26.06 26.07
"""
CONTAINERS = {
    tag: _v(version)
    for line in _RELEASES.replace("|", "\n").splitlines()
    for version, *tags in [line.split() or [""]]
    for tag in tags
}
"""``tritonserver:TAG-trtllm-python-py3`` and what is in it."""

DEFAULT = _v("1.2.1")
"""The newest that still runs engines."""
FIRST = _v("0.5.0")
FIRST_CONFIGURABLE = _v("0.12.0")
"""Between 0.5.0, which is the tutorials', and this the templates changed with every release."""
FIRST_UNBATCHED_V1 = _v("0.20.0")
"""From here on the executor is known to refuse V1."""
LAST_ENGINE = _v("1.2.99")
"""What follows has no engine backend: NVIDIA/TensorRT-LLM#15907 removed it."""
FIRST_LLMAPI = _v("1.0.0")
"""The first whose LLM API takes a model as it is, without an engine."""


def choose_version(version: str, container: str) -> Version:
    """Return the version to build for, from either of the options; they may not contradict."""
    if not container:
        return _v(version) if version else DEFAULT
    found = container_version(container)
    if version and not _v(version).same_release(found):
        raise IncompatibleError(
            f"trtllm_version {_v(version)} was asked for, and container {container} has {found}",
            mend="give one of them, or those that belong together",
        )
    return found


def container_version(container: str) -> Version:
    """Return what is in a container: a tag such as 24.08, or the image's whole name."""
    found = _TAG.fullmatch(container.strip())
    if found is None or found[1] not in CONTAINERS:
        raise OptionError(
            f"it is not known which TensorRT-LLM is in container {container!r}",
            mend=f"give --set trtllm_version=…, or one of {', '.join(sorted(CONTAINERS))}",
        )
    return CONTAINERS[found[1]]


def container_of(version: Version) -> str | None:
    """Return the newest container that has a version, if one is known.

    >>> container_of(Version(0, 12))
    'nvcr.io/nvidia/tritonserver:24.08-trtllm-python-py3'
    """
    tags = [tag for tag, has in sorted(CONTAINERS.items()) if has.same_release(version)]
    return f"nvcr.io/nvidia/tritonserver:{tags[-1]}-trtllm-python-py3" if tags else None


def check_engine_layout(version: Version) -> None:
    """Refuse a version whose Triton cannot run engines, or whose templates are not in the table."""
    if version > LAST_ENGINE:
        raise IncompatibleError(
            f"TensorRT-LLM {version} has no engine backend: it was removed after 1.2",
            mend="build with --set layout=llmapi, or for a version up to 1.2",
        )
    known = version.same_release(FIRST) or version >= FIRST_CONFIGURABLE
    if not known:
        raise IncompatibleError(
            f"the tensors of TensorRT-LLM {version} are not in the table",
            mend=f"build for {FIRST}, or for {FIRST_CONFIGURABLE} and later",
        )


def check_llmapi_layout(version: Version) -> None:
    """Refuse a version without an LLM API that serves a model as it is."""
    if version < FIRST_LLMAPI:
        raise IncompatibleError(
            f"TensorRT-LLM {version} serves engines only: the LLM API without one came with "
            f"{FIRST_LLMAPI}",
            mend="build with --set layout=engine, or for a later version",
        )
