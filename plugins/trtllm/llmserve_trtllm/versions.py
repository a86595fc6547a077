"""Versions of TensorRT-LLM, the containers that include them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from llmserve.plugin import IncompatibleError, OptionError

_VERSION = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?([.a-z+-].*)?")
_NVIDIA = "nvcr.io/nvidia/tritonserver:"
_VARIANT = "-trtllm-python-py3"
_TAG = re.compile(r"([a-z0-9][A-Za-z0-9._/:-]*:)?(\d\d\.\d\d)(-[A-Za-z0-9._-]+)?")


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
                f"{text!r} is not a version of TensorRT-LLM", hint="write it like 0.19.0 or 1.2.1"
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

    def __contains__(self, version: Version) -> bool:
        return self.since <= version and (self.until is None or version < self.until)

    def __str__(self) -> str:
        end = f" and before {self.until.major}.{self.until.minor}" if self.until else ""
        return f"from {self.since.major}.{self.since.minor} on{end}"


def since(first: str, before: str = "") -> Range:
    return Range(Version.parse(first), Version.parse(before) if before else None)


ALL, ONLY_0_5, LATER = since("0.5"), since("0.5", "0.6"), since("0.19")

_RELEASES = {
    "0.5.0": "23.10",
    "0.9.0": "24.04 24.05",
    "0.10.0": "24.06",
    "0.11.0": "24.07",
    "0.12.0": "24.08",
    "0.13.0": "24.09",
    "0.14.0": "24.10",
    "0.15.0": "24.11",
    "0.16.0": "24.12",
    "0.17.0": "25.01 25.02",
    "0.18.0": "25.03",
    "0.18.2": "25.04",
    "0.19.0": "25.05",
    "0.20.0": "25.06 25.07",
    "0.21.0": "25.08",
    "1.0.0": "25.09 25.10",
    "1.0.3": "25.11",
    "1.1.0": "25.12 26.01 26.02",
    "1.2.0": "26.03",
    "1.2.1": "26.04 26.05 26.06 26.07",
}
CONTAINERS = {
    tag: Version.parse(version) for version, tags in _RELEASES.items() for tag in tags.split()
}
"""The version of TensorRT-LLM in each tritonserver:TAG-trtllm-python-py3.

From docs/introduction/compatibility.md of triton-inference-server/server; 23.10 is older than that
page. The version of an unlisted tag is not guessed.
"""

BROUGHT = (
    "accelerate", "huggingface-hub", "numpy", "pillow", "safetensors", "sentencepiece",
    "tensorrt-llm", "tokenizers", "torch", "transformers",
)  # fmt: skip
"""Packages installed with TensorRT-LLM: other versions of them may break it."""

TUTORIALS = Version(0, 5)
# Between the version of the tutorials and this one the templates changed in every release.
FIRST_CONFIGURABLE = Version(0, 19)
# The first version whose LLM API serves a model without an engine.
FIRST_LLMAPI = Version(1, 0)
# The first version that loads an adapter again which it has evicted; a request for one fails in 1.0
# (NVIDIA/TensorRT-LLM#6510).
FIRST_ADAPTERS = Version(1, 1)
# The first version whose LLM API is known to read images: what was read of its sources is of about
# that time. NVIDIA's own model for Triton has them later (NVIDIA/TensorRT-LLM#18381), which needed
# no change elsewhere than in that model, and was begun on 1.2.1.
FIRST_IMAGES = Version(1, 2)
# The newest version that still runs engines; NVIDIA/TensorRT-LLM#15907 removed their backend.
DEFAULT = Version(1, 2, 1)
OLDEST_TRITON = "25.08"
"""The oldest release of Triton that an image with a version after these can have.

TensorRT-LLM's own docker/Dockerfile.multi takes this one since 1.0.
"""
FIRST_BOUNDED = "25.11"
"""The first release of Triton whose ensembles have max_inflight_requests (core#455).

An earlier one does not load a model with a field that it does not know.
"""
# What was read of NVIDIA's templates and backend: nothing of the releases between these two.
_READ = (Version(0, 19), Version(1, 2))


def choose_version(version: str, container: str) -> Version:
    """Return the version to build for, from either option, which must be supported.

    A container is a tag such as 25.05, or the image's full name.
    """
    chosen = _named_version(version, container)
    if chosen < FIRST_CONFIGURABLE and not chosen.same_release(TUTORIALS):
        raise IncompatibleError(
            f"TensorRT-LLM {chosen} is not supported",
            hint=f"build for {TUTORIALS}, or for {FIRST_CONFIGURABLE} or later",
        )
    return chosen


def _named_version(version: str, container: str) -> Version:
    requested = Version.parse(version) if version else None
    if not container:
        return requested or DEFAULT
    image = image_of(container)
    included = CONTAINERS.get(image[1]) if image else None
    if included is None:
        raise OptionError(
            f"the version of TensorRT-LLM in container {container!r} is unknown",
            hint=f"give --set trtllm_version=…, or one of {', '.join(sorted(CONTAINERS))}",
        )
    if requested and not requested.same_release(included):
        raise IncompatibleError(
            f"trtllm_version {requested} contradicts container {container}, which has {included}",
            hint="give a version and a container that match",
        )
    return included


def image_of(container: str) -> tuple[str, str] | None:
    """Return the image that is named by its tag or in full, and its release.

    >>> image_of("25.09")
    ('nvcr.io/nvidia/tritonserver:25.09-trtllm-python-py3', '25.09')
    >>> image_of("example.com/mine:25.09-2")
    ('example.com/mine:25.09-2', '25.09')
    """
    match = _TAG.fullmatch(container.strip())
    if match is None:
        return None
    place, release, variant = match.groups()
    if (place or _NVIDIA) == _NVIDIA and variant not in (None, _VARIANT):
        # NVIDIA's other images of a release have no TensorRT-LLM.
        return None
    return f"{place or _NVIDIA}{release}{variant or ('' if place else _VARIANT)}", release


def container_of(version: Version, container: str = "") -> str | None:
    """Return the image to run a version in: the one that is named, else the newest, if it is known.

    Patches of a release may have other versions of TensorRT and CUDA, and engines do not run with
    those: the newest is one with exactly this version, if there is one.
    """
    if container and (image := image_of(container)):
        return image[0]
    tags = [tag for tag, included in CONTAINERS.items() if included == version] or [
        tag for tag, included in CONTAINERS.items() if included.same_release(version)
    ]
    return f"{_NVIDIA}{max(tags)}{_VARIANT}" if tags else None


def unread(version: Version) -> str:
    """Return what is not known of a version, in words; empty if its files were read."""
    first, last = _READ
    if version < first or version.same_release(first) or version.same_release(last):
        return ""
    between = version < last
    return (
        f"nothing of NVIDIA's files between TensorRT-LLM {first} and {last} was read: a build for "
        f"{version} has what {first} has"
        if between
        else f"nothing of NVIDIA's files after TensorRT-LLM {last} was read: a build for {version} "
        f"has what {last} has"
    )
