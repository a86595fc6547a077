"""What a new plugin is called, in each of the places where it has a name."""

from __future__ import annotations

import re
from dataclasses import dataclass

from llmserve.errors import UsageError

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_LONGEST = 32


@dataclass(frozen=True)
class Names:
    """A plugin's names, made of the one that it is given.

    >>> names = Names.of("acme-words")
    >>> names.distribution, names.package, names.prefix
    ('llmserve-acme-words', 'llmserve_acme_words', 'AcmeWords')
    """

    name: str

    @classmethod
    def of(cls, name: str) -> Names:
        """Check a name that somebody gave."""
        if name.startswith(("llmserve-", "llmserve_")):
            raise UsageError(
                f"{name!r} cannot be a plugin's name",
                mend=f"leave out llmserve: the package of {name[9:]!r} is called llmserve-NAME",
            )
        if not _NAME.fullmatch(name) or len(name) > _LONGEST:
            raise UsageError(
                f"{name!r} cannot be a plugin's name",
                mend=f"use at most {_LONGEST} small letters, digits and single '-', beginning "
                "with a letter, as in acme-words",
            )
        return cls(name)

    @property
    def slug(self) -> str:
        return self.name.replace("-", "_")

    @property
    def distribution(self) -> str:
        return f"llmserve-{self.name}"

    @property
    def package(self) -> str:
        return f"llmserve_{self.slug}"

    @property
    def prefix(self) -> str:
        """What the names of its classes begin with."""
        return "".join(word.capitalize() for word in self.name.split("-"))

    def replaced(self, text: str, role: str) -> str:
        """Return the text of a plugin called scaffold under this name."""
        # What is called acme-tokenizer has an AcmeTokenizer, and nobody an AcmeTokenizerTokenizer.
        prefix = self.prefix.removesuffix(role.capitalize()) or self.prefix
        for old, new in (
            (f"llmserve.scaffold.{role}", self.package),
            ("llmserve_scaffold", self.package),
            ("Scaffold", prefix),
            ("scaffold", self.name),
        ):
            text = text.replace(old, new)
        return text


def check_free(names: Names, role: str) -> None:
    """Refuse a name that something installed has: one of both would be switched off."""
    from importlib.util import find_spec

    from llmserve.names import normal
    from llmserve.registry import Registry

    registry = Registry.load()
    for plugin in registry.plugins:
        if plugin.name == names.name:
            raise _taken(names, f"it is plugin {plugin}")
    for entry in registry.entries:
        if entry.component.name == names.name and entry.role in ("recipe", role):
            raise _taken(names, f"{entry.plugin} has a {entry.role} of that name")
    announced = {normal(plugin.origin) for plugin in registry.plugins}
    if names.distribution in announced or find_spec(names.package) is not None:
        raise _taken(names, f"{names.distribution} is installed here")


def _taken(names: Names, why: str) -> UsageError:
    return UsageError(f"the name {names.name!r} is taken: {why}", mend="choose another")
