"""Commands in a text as a shell splits them; nothing is run, and no variable of ours is read."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from llmserve_cli.adopting.source_text import SourceText

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\$|\{([A-Za-z_]\w*)(?::?([-?])([^{}]*))?\}|([A-Za-z_]\w*))")
_KUBERNETES = re.compile(r"\$\(([A-Za-z_][\w.-]*)\)")
_SEPARATORS = frozenset(";&|")
_MOST_LINES = 60
"""The most lines that one quotation mark opens."""


@dataclass(frozen=True)
class Word:
    """A word of a command, and the line it stands in."""

    text: str
    line: int


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """Return a text with the variables that a file itself sets; others stay as they are.

    >>> expanded("${M:-gpt2} $N $P $$", {"N": "2"})
    'gpt2 2 $P $'
    """

    def value(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        name = match[1] or match[4]
        if name in variables and (variables[name] or match[2] != "-"):
            return variables[name]
        return match[3] if match[2] == "-" else match[0]

    return _VARIABLE.sub(value, text)


def expanded_in_pod(text: str, variables: Mapping[str, str]) -> str:
    """Return an argument of a container with ``$(NAME)`` replaced, as Kubernetes does."""
    return _KUBERNETES.sub(lambda match: variables.get(match[1], match[0]), text)


def is_known(text: str) -> bool:
    """Return whether a text has neither a variable nor the output of a command in it."""
    return not ("`" in text or "$(" in text or _VARIABLE.search(text.replace("$$", "")))


def is_assignment(word: str) -> tuple[str, str] | None:
    match = _ASSIGNMENT.fullmatch(word)
    return (match[1], match[2]) if match else None


def split_line(text: str) -> list[str] | None:
    """Split as a shell does; None if a quotation mark is not closed."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|<>")
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        return list(lexer)
    except ValueError:
        return None


def commands_in(source: SourceText) -> Iterator[list[Word]]:
    """Yield the commands of a text, with the variables that it sets put in."""
    variables: dict[str, str] = {}
    command: list[Word] = []
    begun, start = "", 0
    for number, line in enumerate(source.text.splitlines(), 1):
        text = f"{begun}\n{line}" if begun else line
        start = start if begun else number
        goes_on = text.endswith("\\") and not text.endswith("\\\\")
        words = split_line(text[:-1] if goes_on else text)
        if words is None and number - start < _MOST_LINES:
            begun = text
            continue
        begun = ""
        for ended in _split_commands(words or [], start, command):
            yield from _taken(ended, variables)
        if command and not goes_on:
            yield from _taken(command, variables)
            command.clear()
    yield from _taken(command, variables)


def _split_commands(words: Sequence[str], line: int, command: list[Word]) -> Iterator[list[Word]]:
    """Add words to a command, and yield it wherever it ends."""
    skips = False
    for word in words:
        if word.startswith("#") and not command:
            return
        if word.startswith("#"):
            break
        if skips:
            skips = False
        elif set(word) <= {*"<>&|;"} and {*word} & {*"<>"}:
            # The number of a stream stands before it, and a file after.
            if command and command[-1].text.isdecimal():
                command.pop()
            skips = True
        elif word and set(word) <= _SEPARATORS:
            if command:
                ended = list(command)
                command.clear()
                yield ended
        else:
            command.append(Word(word, line))


def _taken(command: Sequence[Word], variables: dict[str, str]) -> Iterator[list[Word]]:
    """Yield a command with variables put in, or take what it sets."""
    words = [Word(expanded(word.text, variables), word.line) for word in command]
    rest = words[1:] if words and words[0].text in ("export", "set", "local") else words
    pairs = [is_assignment(word.text) for word in rest]
    if rest and all(pairs):
        variables.update(pair for pair in pairs if pair)
        # A line of its own sets it for what follows.
        return
    if words:
        yield words
