"""Make the README's picture from a real run: ``python tests/readme/session.py``.

A model is built, served and asked in a folder of its own, and what the commands print is drawn.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

PICTURE = Path(__file__).with_name("session.svg")
COMMAND = Path(sys.executable).with_name("llmserve")
BUILD = ["build", "--plugin", "iterative", "--model", "demo", "--name", "demo"]
QUESTIONS = [
    ["query", "demo", "Programming in C++ is like"],
    ["query", "demo", "What is the capital of Japan?", "--chat"],
    ["query", "demo", "The capital of France is", "--json"],
]
WIDTH = 96


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        picture = Console(record=True, width=WIDTH, file=StringIO())
        for text in session(Path(folder)):
            picture.print(text)
    drawn = picture.export_svg(title="llmserve", theme=MONOKAI, unique_id="session")
    # No font is fetched: the reader's own will do.
    PICTURE.write_text(re.sub(r"@font-face \{.*?\}\n", "", drawn, flags=re.DOTALL), "utf-8")


def session(folder: Path) -> Iterator[Text]:
    yield typed(BUILD)
    yield Text(run(BUILD, folder))
    yield typed(["serve"])
    server = subprocess.Popen(
        [COMMAND, "serve"], cwd=folder, stderr=subprocess.PIPE, text=True, encoding="utf-8"
    )
    try:
        assert server.stderr is not None
        for line in server.stderr:
            if not line.startswith("llmserve:"):
                yield Text(line.rstrip(), style="dim")
            if "Ctrl-C" in line:
                break
        for question in QUESTIONS:
            yield Text()
            yield typed(question)
            yield Text(run(question, folder), style="green")
    finally:
        server.send_signal(signal.SIGINT)
        server.communicate()


def typed(words: list[str]) -> Text:
    quoted = [f'"{word}"' if " " in word else word for word in words]
    return Text.assemble(("$ ", "dim"), ("llmserve ", "bold"), " ".join(quoted))


def run(words: list[str], folder: Path) -> str:
    done = subprocess.run(
        [COMMAND, *words], cwd=folder, capture_output=True, text=True, encoding="utf-8", check=True
    )
    return done.stdout.strip()


if __name__ == "__main__":
    main()
