"""Fill-in: how models that write what is missing between two texts read these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum


class Text(Enum):
    """A text of the request's own, in the layout of a family."""

    PREFIX = "prefix"
    SUFFIX = "suffix"


@dataclass(frozen=True)
class File:
    """Another file of the project, or a part of one."""

    name: str
    text: str


@dataclass(frozen=True)
class Family:
    """A row: what models that were trained alike read, by the texts of their special tokens."""

    name: str
    layout: tuple[str | Text, ...]
    files: tuple[str, str] | None = None
    """What precedes the name of a project, and that of each of its files."""
    ends: tuple[str, ...] = ()
    """What ends an answer besides the tokens of the layout and those that end any answer."""

    @property
    def needed(self) -> tuple[str, ...]:
        """The tokens that tell the family."""
        return (*(part for part in self.layout if isinstance(part, str)), *(self.files or ()))


def _usual(prefix: str, suffix: str, middle: str) -> tuple[str | Text, ...]:
    return (prefix, Text.PREFIX, suffix, Text.SUFFIX, middle)


_PIPES = _usual("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
_PLAIN = _usual("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
_DEEPSEEK = "<\uff5cfim▁{}\uff5c>".format
_END = "<|endoftext|>"

FAMILIES: Sequence[Family] = (
    Family("Qwen2.5-Coder", _PIPES, ("<|repo_name|>", "<|file_sep|>"), ("<|fim_pad|>", _END)),
    Family("CodeGemma", _PIPES, ends=("<|file_separator|>", "<|fim_pad|>", _END)),
    Family("StarCoder2", _PLAIN, ("<repo_name>", "<file_sep>"), ("<fim_pad>", _END)),
    Family("StarCoder", _PLAIN, ("<reponame>", "<filename>"), ("<fim_pad>", _END)),
    Family("Granite", _PLAIN, ends=("<fim_pad>", "<|end_of_text|>", _END)),
    Family(
        "SantaCoder", _usual("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
        ends=("<fim-pad>", _END),
    ),
    Family("CodeLlama", _usual("▁<PRE>", "▁<SUF>", "▁<MID>"), ends=("▁<EOT>",)),
    Family("DeepSeek-Coder", _usual(*map(_DEEPSEEK, ("begin", "hole", "end")))),
    # These read what follows first.
    Family("Codestral", ("[SUFFIX]", Text.SUFFIX, "[PREFIX]", Text.PREFIX)),
    Family(
        "Seed-Coder", ("<[fim-suffix]>", Text.SUFFIX, "<[fim-prefix]>", Text.PREFIX,
                       "<[fim-middle]>"),
    ),
    Family("GLM-4.5", _usual("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>")),
    Family("Falcon-H1", _usual("<|prefix|>", "<|suffix|>", "<|middle|>")),
)  # fmt: skip
"""The first one whose tokens a vocabulary has is that of its model: those that need more precede
others with the same layout."""

# What stands for the names that a request does not have; llama.cpp's server uses the same.
_PROJECT, _GAP_FILE = "myproject", "filename"
_SNIPPET = "\n\n--- snippet ---\n\n"


@dataclass(frozen=True)
class FillIn:
    """The family of one tokenizer, in its ids."""

    family: Family
    ids: dict[str, int]
    """The ids of the special tokens that its vocabulary has."""

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end an answer: a model that begins another gap has filled this one."""
        return frozenset(self.ids.values())

    def prompt(
        self,
        prefix: str,
        suffix: str,
        files: Sequence[File],
        encode: Callable[[str, bool], list[int]],
    ) -> list[int]:
        """Return what the model reads.

        ``encode`` returns the ids of a text without any special tokens; the flag says whether a
        text goes on in the middle of a line.
        """
        ids = self._files(files, encode)
        for part in self.family.layout:
            if isinstance(part, str):
                ids.append(self.ids[part])
            elif text := prefix if part is Text.PREFIX else suffix:
                ids += encode(text, part is Text.SUFFIX)
        return ids

    def _files(self, files: Sequence[File], encode: Callable[[str, bool], list[int]]) -> list[int]:
        if not files:
            return []
        if self.family.files is None:
            return [token for file in files for token in encode(_SNIPPET + file.text, True)]
        project, begin = (self.ids[text] for text in self.family.files)
        ids = [project, *encode(f"{_PROJECT}\n", True)]
        for file in files:
            ids += [begin, *encode(f"{file.name}\n{file.text}", True)]
        return [*ids, begin, *encode(f"{_GAP_FILE}\n", True)]


def find_fill_in(id_of: Callable[[str], int | None]) -> FillIn | None:
    """Return how the model of a vocabulary fills in a gap; None if it has no tokens for that."""
    for family in FAMILIES:
        found = {text: id_of(text) for text in (*family.needed, *family.ends)}
        ids = {text: token for text, token in found.items() if token is not None}
        if all(text in ids for text in family.needed):
            return FillIn(family, ids)
    return None
