"""Draw the README's picture from a real run: ``python tests/readme/session.py``.

A model is built, served and queried in a temporary folder; the picture shows the real output.
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
QUERIES = [
    ["query", "demo", "Programming in C++ is like"],
    ["query", "demo", "What is the capital of Japan?", "--chat"],
    ["query", "demo", "The capital of France is", "--json"],
]
WIDTH = 96


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        console = Console(record=True, width=WIDTH, file=StringIO())
        for text in session(Path(folder)):
            console.print(text)
    svg = console.export_svg(title="llmserve", theme=MONOKAI, unique_id="session")
    # No font is downloaded: the reader's own fonts are good enough.
    PICTURE.write_text(re.sub(r"@font-face \{.*?\}\n", "", svg, flags=re.DOTALL), "utf-8")


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
        for query in QUERIES:
            yield Text()
            yield typed(query)
            yield Text(run(query, folder), style="green")
    finally:
        server.send_signal(signal.SIGINT)
        server.communicate()


def typed(args: list[str]) -> Text:
    quoted = [f'"{arg}"' if " " in arg else arg for arg in args]
    return Text.assemble(("$ ", "dim"), ("llmserve ", "bold"), " ".join(quoted))


def run(args: list[str], folder: Path) -> str:
    done = subprocess.run(
        [COMMAND, *args], cwd=folder, capture_output=True, text=True, encoding="utf-8", check=True
    )
    return done.stdout.strip()


if __name__ == "__main__":
    main()
