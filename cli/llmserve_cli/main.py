"""Where ``llmserve`` begins and ends: an exit code, and one line for each error."""

from __future__ import annotations

import os
import sys

from llmserve_cli import interrupts

BROKEN_PIPE = 141
"""What a shell reports for a program that SIGPIPE has ended."""


def main(args: list[str] | None = None) -> None:
    interrupts.end_at_once()
    _open_what_is_closed()
    if not os.environ.get("HOME", "set"):
        # For many a library the root of the file system would be its home.
        del os.environ["HOME"]
    # Not at the top: this takes a while, and Ctrl-C has to find the line above done.
    from llmserve_cli.group import cli

    try:
        result = cli.main(args=args, prog_name="llmserve", standalone_mode=False)
        code = result if isinstance(result, int) else 0
    except BaseException as error:
        # Not only Exception: a panic in a library written in Rust is none.
        code = _explain(error)
    interrupts.ignore()
    sys.exit(code)


def _open_what_is_closed() -> None:
    """Have all three standard streams: Python has None for one that was closed before."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def _explain(error: BaseException) -> int:
    """Print an error, and return the exit code that it means."""
    import click

    from llmserve.errors import LLMServeError
    from llmserve_cli.group import OutputClosed
    from llmserve_cli.usage import HelpShown, explain_usage

    if interrupts.interrupted() or isinstance(error, (KeyboardInterrupt, click.Abort)):
        newline = "\n" if sys.stderr.isatty() else ""
        return _print(f"{newline}llmserve: interrupted", interrupts.EXIT_CODE)
    if isinstance(error, LLMServeError):
        return _print(f"llmserve: {error}", error.exit_code)
    if isinstance(error, HelpShown):
        return _print(error.format_message(), error.exit_code)
    if isinstance(error, click.ClickException):
        return _print(f"llmserve: {explain_usage(error)}", error.exit_code)
    if isinstance(error, OutputClosed):
        _forget_output()
        return BROKEN_PIPE
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    return _explain_unforeseen(error)


def _explain_unforeseen(error: BaseException) -> int:
    from llmserve.errors import TRACEBACK, reason
    from llmserve_cli.group import cli

    if os.environ.get(TRACEBACK):
        import traceback

        traceback.print_exception(error)
    if isinstance(error, OSError):
        what, mend = "the system refused", "shows where"
        _forget_output()
    else:
        plugin = cli.whose()
        what = f"this is a bug of plugin {plugin!r}" if plugin else "this is a bug"
        mend = "shows where, which belongs in a report"
    again = f"running it again with {TRACEBACK}=1 {mend}"
    return _print(f"llmserve: {what}: {reason(error)}: {again}", 1)


def _print(line: str, code: int) -> int:
    import click

    click.echo(line, err=True)
    return code


def _forget_output() -> None:
    """Keep Python from writing, at its end, what could not be written before."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
