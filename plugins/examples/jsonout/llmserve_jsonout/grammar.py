"""JSON, a character at a time: what may come next, and how few characters would complete it.

A state is a value that never changes, so that many continuations can be tried from one.

>>> state = BEGIN.feed('{"a": [1')
>>> state.shortest, state.feed("}") is None, state.feed("]}").is_complete
(2, True, True)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

_SPACE = " \t\n\r"
_DIGITS = "0123456789"
_HEX = "0123456789abcdefABCDEF"
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}
# In each part of a number: what may follow, the part that it leads to, and if it may end there.
_NUMBERS: dict[str, tuple[dict[str, str], bool]] = {
    "sign": ({"0": "zero", "123456789": "whole"}, False),
    "zero": ({".": "point", "eE": "e"}, True),
    "whole": ({_DIGITS: "whole", ".": "point", "eE": "e"}, True),
    "point": ({_DIGITS: "fraction"}, False),
    "fraction": ({_DIGITS: "fraction", "eE": "e"}, True),
    "e": ({"+-": "power sign", _DIGITS: "power"}, False),
    "power sign": ({_DIGITS: "power"}, False),
    "power": ({_DIGITS: "power"}, True),
}
# How many characters complete what stands within the innermost bracket, part by part.
_SHORTEST = {
    "begin": 2, "value": 1, "first": 0, "key or end": 0, "key": 4, "colon": 2, "after": 0,
    "text": 1, "escape": 2, "key text": 3, "key escape": 4,
}  # fmt: skip


@dataclass(frozen=True)
class State:
    """Where in a document we are: the open brackets, and the part of what is being written."""

    part: str
    stack: str = ""
    left: str = ""
    """What must still come of a literal, or of the four digits of an escape."""

    @property
    def is_complete(self) -> bool:
        """Whether the document could end here."""
        return self.part == "after" and not self.stack

    @property
    def shortest(self) -> int:
        """How many characters would complete the document."""
        if self.part in _NUMBERS:
            own = 0 if _NUMBERS[self.part][1] else 1
        elif self.part == "literal":
            own = len(self.left)
        elif self.part.endswith("digits"):
            own = len(self.left) + _SHORTEST[self.part.removesuffix("digits") + "text"]
        else:
            own = _SHORTEST[self.part]
        return own + len(self.stack)

    def feed(self, text: str) -> State | None:
        """Return the state after a text, or None if no document goes on like that."""
        state: State | None = self
        for character in text:
            state = state and state._after(character)
        return state

    def _after(self, character: str) -> State | None:
        if self.part in _NUMBERS:
            return self._in_number(character)
        if self.part == "literal":
            done = self.left[1:]
            if character != self.left[0]:
                return None
            return replace(self, left=done) if done else replace(self, part="after", left="")
        if self.part.endswith(("text", "escape", "digits")):
            return self._in_text(character)
        if character in _SPACE:
            return self
        return self._between(character)

    def _between(self, character: str) -> State | None:
        part = self.part
        if part == "begin":
            return State("key or end", "{") if character == "{" else None
        if part in ("key", "key or end") and character == '"':
            return replace(self, part="key text")
        if part == "colon":
            return replace(self, part="value") if character == ":" else None
        if part in ("key or end", "after") and character == "}" and self.stack[-1:] == "{":
            return self._closed()
        if part in ("first", "after") and character == "]" and self.stack[-1:] == "[":
            return self._closed()
        if part == "after" and character == "," and self.stack:
            return replace(self, part="key" if self.stack[-1] == "{" else "value")
        return self._value(character) if part in ("value", "first") else None

    def _value(self, character: str) -> State | None:
        if character in "{[":
            part = "key or end" if character == "{" else "first"
            return State(part, self.stack + character)
        if character == '"':
            return replace(self, part="text")
        if character in _LITERALS:
            return replace(self, part="literal", left=_LITERALS[character])
        if character == "-":
            return replace(self, part="sign")
        return replace(self, part="sign")._in_number(character)

    def _closed(self) -> State:
        return State("after", self.stack[:-1])

    def _in_number(self, character: str) -> State | None:
        follows, may_end = _NUMBERS[self.part]
        for characters, part in follows.items():
            if character in characters:
                return replace(self, part=part)
        return replace(self, part="after")._after(character) if may_end else None

    def _in_text(self, character: str) -> State | None:
        # What is written is a key or a value: "key text" and "text", and so on.
        kind = "key " if self.part.startswith("key ") else ""
        part = self.part.removeprefix("key ")
        if part == "escape":
            if character == "u":
                return replace(self, part=f"{kind}digits", left="0000")
            return replace(self, part=f"{kind}text") if character in '"\\/bfnrt' else None
        if part == "digits":
            if character not in _HEX:
                return None
            left = self.left[1:]
            return replace(self, part=f"{kind}{'digits' if left else 'text'}", left=left)
        if character == '"':
            return replace(self, part="colon" if kind else "after")
        if character == "\\":
            return replace(self, part=f"{kind}escape")
        return None if character < " " else self


BEGIN = State("begin")
"""Before anything is written; a document is an object."""
