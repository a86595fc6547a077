"""Draw the README's picture from a real run: ``python -m tests.readme.session``.

A real chat model (`make real-model`) is built, served and asked in a temporary folder; the picture
shows what the terminal showed, without the lines that are replaced while one waits.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from tests.real.model import real_model
from tests.terminal import CTRL_D, Terminal

PICTURE = Path(__file__).with_name("session.svg")
MESSAGES = (
    "What is the capital of Japan?",
    "Explain in two sentences what a compiler does.",
    "/stats",
)
WIDTH = 96
_BUILDING = 300.0


def main() -> None:
    model = real_model()
    with tempfile.TemporaryDirectory() as folder:
        shutil.copyfile(model, Path(folder, model.name))
        os.chdir(folder)
        console = Console(record=True, width=WIDTH, file=StringIO())
        for text in session(model.name, Path(folder, "home")):
            console.print(text)
        os.chdir("/")
    svg = console.export_svg(title="llmserve", theme=MONOKAI, unique_id="session")
    # No font is downloaded: the reader's own fonts are good enough.
    PICTURE.write_text(re.sub(r"@font-face \{.*?\}\n", "", svg, flags=re.DOTALL), "utf-8")


def session(model: str, home: Path) -> Iterator[Text]:
    yield Text.assemble(("$ ", "dim"), ("llmserve ", "bold"), f"run {model}")
    with Terminal("run", model, env={"LLMSERVE_HOME": str(home)}, columns=WIDTH) as terminal:
        screen = terminal.wait_for(r"/help shows .*\n", _BUILDING)
        for line in (
            r"llmserve: \S+ is built",
            r"openai http\S+, grpc \S+",
            r"\S+: /help shows .*",
        ):
            found = re.search(line, screen)
            assert found, screen
            yield Text(found[0], style="" if "built" in line else "dim")
        for message in MESSAGES:
            yield Text.assemble(">>> ", (message, "bold"))
            yield from answer(terminal, message)
        terminal.say("", CTRL_D)
        terminal.ends()


def answer(terminal: Terminal, message: str) -> Iterator[Text]:
    """Yield what is screen after a message; how fast it came is below it."""
    terminal.say(message)
    end = r"last prompt.*\n" if message.startswith("/") else r"first after \S+ s.*\]\n"
    screen = terminal.wait_for(end)
    lines = screen.rpartition(message)[2].strip().splitlines()
    for line in lines:
        yield Text(line, style="dim" if line.startswith("[") else "green")


if __name__ == "__main__":
    main()
