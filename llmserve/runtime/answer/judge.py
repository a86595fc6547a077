"""Decides in a process of its own which constraints may be compiled.

A few bytes can keep llguidance busy for minutes, take all memory, or overflow its stack, which
ends the process. So each constraint is first compiled in a child process with limits; only what
stays within them is compiled in the model's process as well, with the same effort.

The module is also the script of that process, which has no packages but llguidance: it reads a
:class:`Setup` and then constraints, one line of JSON each, and answers each with a line. It forks
for every constraint, since only a new process has its own limits, and no thread but one.
"""

from __future__ import annotations

import json
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

CPU_SECONDS = 0.1
"""The processor time that a constraint may take. A large schema takes 0.01."""
_WALL_SECONDS = 3.0
"""Ends a child that hardly gets any processor time."""
_MEMORY = 64 << 20
# A thread of the model's process has at least 2 MiB, and other frames below.
_STACK = 1 << 20
_START_SECONDS = 60.0
# What llguidance checks itself. At each token, it may create this much of the automaton: about
# 4 ms of work. The states are what a constraint may grow to, up to 2 kB each.
LIMITS = {"initial_lexer_fuel": 100_000, "step_lexer_fuel": 50_000, "max_lexer_states": 20_000}
# A space, or a line break and its indentation. llguidance's default allows unlimited whitespace,
# and small models tend to write it forever.
_JSON_DEFAULTS = {"whitespace_pattern": r"(\n {0,12}| )?"}
# llguidance's own dates have a 29th of February in each year.
_YEAR = r"(\d{3}[1-9]|\d\d[1-9]\d|\d[1-9]\d\d|[1-9]\d{3})"
_FOURTH = "(0[48]|[2468][048]|[13579][26])"
_DAY = (
    rf"({_YEAR}-(0[13-9]|1[0-2])-\d\d|{_YEAR}-02-([01]\d|2[0-8])"
    rf"|(\d\d{_FOURTH}|{_FOURTH}00)-02-29)"
)
_DAYS = {"date": f"^{_DAY}$", "date-time": f"^{_DAY}"}
# Their values have schemas by names of the user's.
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
# Their values are no schemas.
_VALUES = ("const", "enum", "default", "examples")

_ONE_OF = (
    "oneOf: a value may be of two of its schemas, as far as can be told: send anyOf, or give each "
    "a required property with a const of its own"
)

Rewrite = Callable[[Any], Any]
"""Returns a schema of the same meaning in words that can be enforced."""


class UnenforceableError(Exception):
    """The constraint cannot be compiled, or not within the limits."""


def compiled(library: Any, table: Any, grammar: str) -> Any:
    """Return llguidance's matcher for a grammar."""
    limits = library.LLParserLimits(**LIMITS)
    matcher = library.LLMatcher(table, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise UnenforceableError(matcher.get_error())
    # The first mask reveals a form that can never begin or end. It also does most of the work.
    matcher.compute_bitmask()
    if matcher.is_error():
        error = matcher.get_error()
        large = "too many" in error or "too big" in error
        raise UnenforceableError("it is too large" if large else "no text matches it")
    return matcher


class SetupError(Exception):
    """No constraint can be checked for this tokenizer, however often the process is started."""


class Judge:
    """The process that decides, for one tokenizer. It ends with the process that started it."""

    def __init__(self, tokenizer_json: str, eos_token: int, library: Path) -> None:
        setup = {"tokenizer": tokenizer_json, "eos": eos_token, "library": str(library)}
        # The interpreter in Triton's stub may not know its own path.
        command = [sys.executable or "python3", "-I", "-S", __file__]
        near, far = socket.socketpair()
        with far:
            self._process = subprocess.Popen(command, stdin=far.fileno(), stdout=far.fileno())
        self._stream = near.makefile("rwb")
        self._socket = near
        try:
            self._send(setup)
            answer = self._receive(_START_SECONDS)
            if "error" in answer:
                raise SetupError(answer["error"])
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def grammar(self, kind: str, text: str) -> tuple[str, int]:
        """Return the grammar of a form that may be compiled, and the bytes that it takes then.

        Raise :class:`UnenforceableError` for any other form, and :class:`OSError` if the process
        has ended.
        """
        self._send([kind, text])
        answer = self._receive(2 * _WALL_SECONDS)
        if "error" in answer:
            raise UnenforceableError(answer["error"])
        return str(answer["grammar"]), int(answer["bytes"])

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._socket.close()
        with suppress(OSError):
            self._stream.close()

    def _send(self, value: Any) -> None:
        self._stream.write(json.dumps(value).encode() + b"\n")
        self._stream.flush()

    def _receive(self, seconds: float) -> Mapping[str, Any]:
        self._socket.settimeout(seconds)
        line = self._stream.readline()
        if not line.endswith(b"\n"):
            raise OSError("the process that checks constraints has ended")
        answer: Mapping[str, Any] = json.loads(line)
        return answer


def main() -> None:
    """Answer forms until the model's process has ended."""
    setup = json.loads(sys.stdin.buffer.readline())
    # Ctrl-C reaches all processes of a terminal; the model's process decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path.append(setup["library"])
    try:
        import llguidance

        table = llguidance.LLTokenizer(setup["tokenizer"], eos_token=setup["eos"])
    except (MemoryError, OSError):
        # There may be enough for it next time.
        raise
    except BaseException as error:  # a panic is no Exception
        _answer({"error": f"{type(error).__name__}: {error}"})
        return
    del setup
    # It is run as a script, which is in no package.
    rewrite = runpy.run_path(str(Path(__file__).with_name("rewriting.py")))["enforceable"]
    _answer({})
    for line in sys.stdin.buffer:
        _answer(_judged(llguidance, table, rewrite, *json.loads(line)))


def _answer(value: Mapping[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(value).encode() + b"\n")
    sys.stdout.buffer.flush()


def _judged(library: Any, table: Any, rewrite: Rewrite, kind: str, text: str) -> Mapping[str, Any]:
    """Compile a form in a child process and return what it says, or why it ended."""
    far_end, near_end = os.pipe()
    child = os.fork()
    if not child:
        os.close(far_end)
        _judge(library, table, rewrite, kind, text, near_end)
    os.close(near_end)
    said = _read(far_end, time.monotonic() + _WALL_SECONDS)
    os.close(far_end)
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if said:
        with suppress(ValueError):
            answer: Mapping[str, Any] = json.loads(said)
            return answer
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    slow = ended_by in (signal.SIGPROF, signal.SIGKILL)
    return {"error": "compiling it takes too long" if slow else "it is too large"}


def _read(pipe: int, deadline: float) -> bytes:
    """Read until the child ends; nothing if that takes too long."""
    parts: list[bytes] = []
    while True:
        ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return b""
        part = os.read(pipe, 1 << 16)
        if not part:
            return b"".join(parts)
        parts.append(part)


def _judge(library: Any, table: Any, rewrite: Rewrite, kind: str, text: str, out: int) -> None:
    """Compile a form within the limits and write the grammar; end the process."""
    try:
        with Path(os.devnull).open("wb") as nowhere:
            # The library prints what it panics about.
            os.dup2(nowhere.fileno(), 2)
        used, resident = _memory()
        resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY, used + _MEMORY))
        resource.setrlimit(resource.RLIMIT_STACK, (_STACK, _STACK))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # SIGPROF ends the process unless it is handled.
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        try:
            try:
                grammar = grammar_of(library.LLMatcher, rewrite, kind, text)
                matcher = compiled(library, table, grammar)
                answer = {"grammar": grammar, "bytes": max(0, _memory()[1] - resident)}
                del matcher
            except UnenforceableError:
                if kind == "json_schema" and (as_any := _with_any_of(rewrite, text)):
                    compiled(library, table, grammar_of(library.LLMatcher, rewrite, kind, as_any))
                    raise UnenforceableError(_ONE_OF) from None
                raise
        except UnenforceableError as error:
            answer = {"error": str(error)}
        with open(out, "wb") as pipe:
            pipe.write(json.dumps(answer).encode())
    finally:
        os._exit(0)


def _memory() -> tuple[int, int]:
    """Return the bytes of this process: all, and those in memory."""
    pages = Path("/proc/self/statm").read_bytes().split()
    return int(pages[0]) * resource.getpagesize(), int(pages[1]) * resource.getpagesize()


def grammar_of(grammars: Any, rewrite: Rewrite, kind: str, text: str) -> str:
    """Return a form as llguidance's grammar."""
    if kind == "regex":
        return str(grammars.grammar_from_regex(text))
    if kind == "json_schema":
        try:
            text = _with_leap_years(_rewritten(rewrite, text))
            grammar = str(grammars.grammar_from_json_schema(text, defaults=_JSON_DEFAULTS))
        except ValueError as error:
            raise UnenforceableError(str(error)) from None
        _check_keys(json.loads(text))
        return grammar
    if kind == "ebnf_grammar":
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            text = any_to_lark(text)
        except Exception as error:  # its parser raises bare exceptions
            raise UnenforceableError(str(error)) from None
    return str(grammars.grammar_from_lark(text))


def _rewritten(rewrite: Rewrite, text: str) -> str:
    """Return a schema in the words that can be enforced; a malformed one as it is."""
    schema = json.loads(text)
    with suppress(TypeError, AttributeError, ValueError, KeyError):
        changed = rewrite(schema)
        return text if changed == schema else json.dumps(changed)
    return text


def _with_any_of(rewrite: Rewrite, text: str) -> str:
    """Return a schema with anyOf for each oneOf that is left; nothing if there is none."""
    schema, found = json.loads(_rewritten(rewrite, text)), False
    for part in _schemas(schema):
        if isinstance(branches := part.pop("oneOf", None), list):
            part["allOf"] = [*part.get("allOf", ()), {"anyOf": branches}]
            found = True
    return json.dumps(schema) if found else ""


def _with_leap_years(text: str) -> str:
    """Have dates of the 29th of February in leap years only, and none in a year 0."""
    schema, found = json.loads(text), False
    for part in _schemas(schema):
        kind, others = part.get("format"), part.get("allOf", [])
        if isinstance(kind, str) and kind in _DAYS and isinstance(others, list):
            part["allOf"] = [*others, {"pattern": _DAYS[kind]}]
            found = True
    return json.dumps(schema) if found else text


def _check_keys(schema: Any) -> None:
    """Refuse a schema that counts keys of any name: its grammar lets one key come twice."""
    for part in _schemas(schema):
        least, named = part.get("minProperties"), part.get("required")
        is_open = part.get("additionalProperties") is not False or "patternProperties" in part
        known = len({*named}) if isinstance(named, list) else 0
        if isinstance(least, (int, float)) and least > max(1, known) and is_open:
            raise UnenforceableError("minProperties above 1 needs additionalProperties false")


def _schemas(schema: Any) -> list[dict[str, Any]]:
    """Return a schema and all that are in it."""
    found, rest = [], [schema]
    while rest:
        part = rest.pop()
        if isinstance(part, list):
            rest += part
        elif isinstance(part, dict):
            found.append(part)
            for name, value in part.items():
                if name in _BY_NAME and isinstance(value, dict):
                    rest += value.values()
                elif name not in _VALUES:
                    rest.append(value)
    return found


if __name__ == "__main__":
    main()
