"""What a model's answers depend on, each with a digest; all together in a short fingerprint.

The fingerprint is in a model's ``config.pbtxt``, so that a client can tell that a model is not what
it was, and which part of it differs, without its files.
"""

from __future__ import annotations

from base64 import b32encode
from dataclasses import astuple, dataclass, fields

DECLARED = "llmserve.fingerprint"
"""The parameter in ``config.pbtxt``."""

_PREFIX = "fp_"
_LENGTH = 5
"""Characters of each part; one that changes is overlooked once in 33 million."""


@dataclass(frozen=True)
class Passport:
    """A SHA-256 digest in hexadecimal of each part."""

    weights: str
    """With the configuration of the architecture."""
    tokenizer: str
    chat_template: str
    defaults: str
    """What a request gets that does not say otherwise: end tokens, sampling, lengths."""
    settings: str
    """How the model is run, as its number type and its limits."""
    engine: str
    """The versions of the packages that run it, and llmserve's own part in it."""

    @property
    def fingerprint(self) -> str:
        """A short name of all that, in which each part has its place.

        >>> Passport(*["00" * 32] * 6).fingerprint
        'fp_aaaaa-aaaaa-aaaaa-aaaaa-aaaaa-aaaaa'
        """
        parts = (b32encode(bytes.fromhex(digest)).decode()[:_LENGTH] for digest in astuple(self))
        return _PREFIX + "-".join(parts).lower()


PARTS = tuple(part.name for part in fields(Passport))


def is_fingerprint(text: str) -> bool:
    """Return whether a text has the form of a fingerprint."""
    parts = text.removeprefix(_PREFIX).split("-")
    return (
        text.startswith(_PREFIX)
        and len(parts) == len(PARTS)
        and all(len(part) == _LENGTH and part.isalnum() and part.isascii() for part in parts)
    )


def changed_parts(old: str, new: str) -> list[str]:
    """Return the names of the parts in which two fingerprints differ.

    >>> one, other = "fp_aaaaa-" + "-".join(["aaaaa"] * 5), "fp_aaaab-" + "-".join(["aaaaa"] * 5)
    >>> changed_parts(one, other)
    ['weights']
    """
    pairs = zip(PARTS, _split(old), _split(new), strict=True)
    return [name for name, before, after in pairs if before != after]


def _split(fingerprint: str) -> list[str]:
    return fingerprint.removeprefix(_PREFIX).split("-")
