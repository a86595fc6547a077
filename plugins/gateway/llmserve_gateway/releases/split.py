"""Which users a new build answers: always the same ones, of each release others."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

_PLACES = 1 << 64


@dataclass(frozen=True)
class Split:
    """A share of all users, from 0 to 1.

    Each user has a place that only the release's ``salt`` and the user's name decide. So all
    gateways agree about it, it outlives a restart, and a larger share moves others without moving
    anybody back.
    """

    salt: str
    share: float

    def takes(self, user: str) -> bool:
        """Return whether a user is answered by the new build."""
        return place_of(self.salt, user) < self.share


def place_of(salt: str, user: str) -> float:
    """Return where a user is among all others, from 0 to below 1."""
    # Lengths keep apart what a mere joint would make the same.
    words = b"".join(
        len(word).to_bytes(8, "big") + word
        for word in (each.encode(errors="surrogatepass") for each in (salt, user))
    )
    digest = hashlib.blake2b(words, digest_size=8).digest()
    # A float has 53 bits: one that were rounded up to 1 would never be taken.
    return (int.from_bytes(digest, "big") >> 11 << 11) / _PLACES


def user_of(key: str, named: str, address: str) -> str:
    """Return who asks: whom a key's request names, else the key itself, else an address.

    Two keys may each have a user of the same name.
    """
    if named:
        return f"user {len(key)} {key} {named}"
    return f"key {key}" if key else f"address {address}"
