"""Reads command lines and shell scripts, those of ``docker run`` included."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from llmserve_cli.adopting.adopted import Adopted
from llmserve_cli.adopting.env_files import read_variables
from llmserve_cli.adopting.launch import Launch, Port, adopt_launch, engine_of
from llmserve_cli.adopting.source_text import SourceText
from llmserve_cli.adopting.words import Word, commands_in, is_assignment

_DOCKER = frozenset({"docker", "podman", "nerdctl"})
_SWITCHES = frozenset(
    {
        "--rm", "--init", "--privileged", "--read-only", "--tty", "--interactive", "--detach",
        "--publish-all", "--no-healthcheck", "--oom-kill-disable", "--quiet", "-d", "-i", "-t",
        "-P", "-q",
    }
)  # fmt: skip
_GLUED = re.compile(r"-[vpe](?=.)")
_COMBINED = re.compile(r"-[ditqP]+")


def recognises_command(source: SourceText) -> bool:
    """Return whether a text has a command that starts a known server."""
    return any(engine_of(launch) for launch in _launches(source))


def read_commands(source: SourceText) -> Adopted:
    """Read all starts of known servers in a text."""
    adopted = Adopted("a command line")
    names = []
    for launch in _launches(source):
        if found := engine_of(launch):
            names.append(found[0].name)
            adopt_launch(launch, adopted)
    adopted.what = f"a command line of {' and '.join(dict.fromkeys(names))}"
    return adopted


def _launches(source: SourceText) -> Iterator[Launch]:
    for command in commands_in(source):
        words, variables = list(command), {}
        while words and (pair := is_assignment(words[0].text)):
            variables[pair[0]] = Word(pair[1], words.pop(0).line)
        texts = [word.text.rsplit("/", 1)[-1] for word in words]
        starts = [at for at, text in enumerate(texts[:6]) if text in _DOCKER]
        if starts and "run" in texts[starts[0] + 1 : starts[0] + 3]:
            yield docker_run(source, words[texts.index("run", starts[0]) + 1 :])
        else:
            yield Launch(source, words, variables=variables, has_program=True)


def docker_run(source: SourceText, words: Sequence[Word]) -> Launch:
    """Read the words after ``docker run``."""
    launch = Launch(source, in_container=True)
    ports, mounts = [], []
    remaining = list(words)
    while remaining and remaining[0].text.startswith("-"):
        word = remaining.pop(0)
        flag, equals, value = word.text.partition("=")
        if _GLUED.match(word.text) and not word.text.startswith("--"):
            flag, value, equals = word.text[:2], word.text[2:].removeprefix("="), "="
        elif not equals and (flag in _SWITCHES or _COMBINED.fullmatch(flag)):
            continue
        if not equals:
            if not remaining:
                break
            value = remaining.pop(0).text
        match flag:
            case "-p" | "--publish":
                ports.append(Port.parse(value, word.line))
            case "-v" | "--volume":
                parts = value.split(":")
                if len(parts) > 1:
                    mounts.append((parts[0], parts[1]))
            case "--mount":
                fields = dict(part.partition("=")[::2] for part in value.split(","))
                here = fields.get("source") or fields.get("src") or ""
                there = fields.get("target") or fields.get("dst") or fields.get("destination")
                if here and there:
                    mounts.append((here, there))
            case "-e" | "--env":
                name, given, text = value.partition("=")
                if given:
                    launch.variables[name] = Word(text, word.line)
            case "--env-file":
                found = read_variables(source.folder / value) if "\0" not in value else None
                of_file = {name: Word(text, word.line) for name, text in (found or {}).items()}
                launch.variables = {**of_file, **launch.variables}
                if found is None:
                    launch.unread.append(Word(f"--env-file {value}", word.line))
            case "--network" | "--net":
                launch.uses_host_network = value == "host"
            case "--entrypoint":
                launch.words, launch.has_program = [Word(value, word.line)], True
            case _:
                pass
    if remaining:
        launch.image = remaining.pop(0)
    launch.words = [*launch.words, *remaining]
    launch.ports, launch.mounts = ports, mounts
    # A program of its own may follow the image.
    launch.has_program = launch.has_program or bool(
        remaining and not remaining[0].text.startswith("-") and _is_other_program(remaining[0].text)
    )
    return launch


def _is_other_program(word: str) -> bool:
    return word.rsplit("/", 1)[-1] in {"bash", "sh", "python", "python3", "sleep"}
