"""``llmserve chat``: a conversation in the terminal."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from llmserve.commands import asks_a_server, built_models, printable
from llmserve.errors import LLMServeError, UsageError
from llmserve.server import url_for
from llmserve_cli.conversation import KNOWN, Conversation, Ended, run_command
from llmserve_cli.history import history
from llmserve_cli.interrupts import (
    interrupted,
    raise_on_interrupt,
    stoppable,
    while_importing,
)
from llmserve_cli.options import request_option
from llmserve_cli.other_tools import IN_A_CONVERSATION
from llmserve_cli.terminal import echo_answer, typing_kept
from llmserve_cli.wrapped_text import WordWrap

PROMPT = ">>> "
SYSTEM = click.option("--system", metavar="TEXT", default="", help="System message of the chat.")


@click.command()
@click.argument("model", shell_complete=built_models)
@asks_a_server
@SYSTEM
@request_option("max_tokens")
@request_option("temperature")
@request_option("top_k")
@request_option("top_p")
@request_option("seed")
def chat(
    model: str,
    url: str | None,
    repository: Path | None,
    openai: str | None,
    system: str,
    **options: Any,
) -> None:
    """Talk to a served model.

    /help shows what can be typed. Ctrl-C stops an answer, Ctrl-D ends the conversation. If standard
    input is no terminal, all of it is one message.

    \b
    llmserve chat demo
    llmserve chat gpt2 --openai http://127.0.0.1:8080/v1 --temperature 0.7
    """
    with while_importing():
        from llmserve.client import OpenAIClient, connect

        client: Any = OpenAIClient(openai) if openai else connect(url_for(model, url, repository))
    with closing(client):
        talk(client, model, system=system, **options)


def talk(
    client: Any,
    model: str,
    text: str | None = None,
    *,
    system: str = "",
    check: Callable[[], None] = lambda: None,
    **options: Any,
) -> None:
    """Answer a text, or all of standard input if that is no terminal; else have a conversation.

    ``check`` is called before each message, and raises if there is nothing left to talk to. A
    conversation stays open then: what was said can still be saved.
    """
    conversation = begin(client, model, system, options)
    if text is None and sys.stdin.isatty():
        if not sys.stdout.isatty():
            raise UsageError(
                "standard output is no terminal to have a conversation in",
                hint="write a message to standard input",
            )
        # A terminal must have its modes again before this ends.
        raise_on_interrupt(signal.SIGTERM)
        converse(conversation, check)
        return
    from llmserve_cli.prompts import read_prompt

    for piece in conversation.ask(read_prompt(text, model)):
        echo_answer(piece, nl=False)
        sys.stdout.flush()
    click.echo()


def begin(client: Any, model: str, system: str, options: Mapping[str, Any]) -> Conversation:
    """Return a conversation without a turn; an option that is None is not given."""
    given = {name: value for name, value in options.items() if value is not None}
    return Conversation(client, model, system, given)


def converse(conversation: Conversation, check: Callable[[], None] = lambda: None) -> None:
    """Have a conversation until the user ends it."""
    with while_importing():
        read = _reader()
    # All the time, for what is typed between an answer and the next prompt is kept as well.
    with typing_kept():
        _take_turns(conversation, read, check)


def _take_turns(
    conversation: Conversation, read: Callable[[], str], check: Callable[[], None]
) -> None:
    note(f"{conversation.model}: /help shows what can be typed, Ctrl-D ends it")
    has_template = True
    while True:
        try:
            line = read()
        except KeyboardInterrupt as typed:
            if interrupted():
                raise
            # As in a shell, it discards the line; without one, somebody wants to leave.
            if not str(typed).strip():
                note("Ctrl-D ends the conversation, and so does /bye")
            continue
        except EOFError:
            return
        if not line.strip():
            continue
        try:
            if line.startswith("/"):
                note(run_command(conversation, line))
            else:
                check()
                _answer(conversation, line)
                if has_template and not conversation.takes_messages:
                    note(f"{conversation.model} has no chat template: it continues each text alone")
                has_template = conversation.takes_messages
        except Ended:
            return
        except LLMServeError as error:
            click.echo(f"llmserve: {printable(str(error))}", err=True)


def _answer(conversation: Conversation, text: str) -> None:
    """Print an answer as it arrives, and how fast it came; Ctrl-C stops it."""
    from prompt_toolkit.utils import get_cwidth

    newline = ""

    def show(words: str) -> None:
        nonlocal newline
        newline = "\n"
        click.echo(words, nl=False)
        sys.stdout.flush()

    before = len(conversation.speeds)
    stopped = ""
    wrap = WordWrap(show, lambda: shutil.get_terminal_size().columns, get_cwidth)
    try:
        with typing_kept(), stoppable(), closing(conversation.ask(text)) as pieces:
            for piece in pieces:
                wrap.write(printable(piece))
    except KeyboardInterrupt:
        if interrupted():
            raise
        stopped = "stopped"
    finally:
        wrap.end()
        click.echo(newline, nl=False)
    speed = str(conversation.speeds[-1]) if len(conversation.speeds) > before else ""
    if found := ", ".join(filter(None, (stopped, speed))):
        note(f"[{found}]")


def note(text: str) -> None:
    """Print what is not the model's."""
    click.secho(printable(text), dim=True)


def _reader() -> Callable[[], str]:
    """Return a function that reads a message, which may have several lines.

    Enter ends a message. Lines that are pasted stay together, where the terminal says what is.
    """
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    def end_message(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    def begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    def discard(event: KeyPressEvent) -> None:
        typed = KeyboardInterrupt(event.current_buffer.text)
        event.app.exit(exception=typed, style="class:aborting")

    keys.add("c-c")(discard)
    keys.add("enter")(end_message)
    keys.add("escape", "enter")(begin_line)
    keys.add("c-j")(begin_line)
    session: PromptSession[str] = PromptSession(
        PROMPT,
        multiline=True,
        prompt_continuation=" " * len(PROMPT),
        key_bindings=keys,
        completer=WordCompleter([*KNOWN, *IN_A_CONVERSATION], sentence=True),
        complete_while_typing=False,
        history=history(),
    )
    return session.prompt
