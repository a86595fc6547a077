"""The entry point of ``llmserve``: exit codes, and one line for each error."""

from __future__ import annotations

import os
import sys

from llmserve_cli import interrupts

BROKEN_PIPE = 141
"""The exit code that a shell reports for a program that SIGPIPE ended."""


def main(args: list[str] | None = None) -> None:
    interrupts.exit_at_once()
    _open_standard_streams()
    if not os.environ.get("HOME", "set"):
        # With an empty HOME, many libraries would use the root of the file system.
        del os.environ["HOME"]
    # Not at the top: this import is slow, and Ctrl-C must be handled before it.
    from llmserve_cli.group import cli

    try:
        result = cli.main(args=args, prog_name="llmserve", standalone_mode=False)
        code = result if isinstance(result, int) else 0
    except BaseException as error:
        # Not only Exception: a panic in a library written in Rust is not one.
        code = _explain(error)
    interrupts.ignore()
    sys.exit(code)


def _open_standard_streams() -> None:
    """Replace missing standard streams: Python sets those that were closed to None."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def _explain(error: BaseException) -> int:
    """Print an error and return its exit code."""
    import click

    from llmserve.errors import LLMServeError
    from llmserve_cli.group import OutputClosed
    from llmserve_cli.missing_packages import explained
    from llmserve_cli.usage import HelpShown, explain_usage

    if interrupts.interrupted() or isinstance(error, (KeyboardInterrupt, click.Abort)):
        newline = "\n" if sys.stderr.isatty() else ""
        return _print(f"{newline}llmserve: interrupted", interrupts.EXIT_CODE)
    if isinstance(error, LLMServeError):
        return _print(f"llmserve: {explained(error)}", error.exit_code)
    if isinstance(error, HelpShown):
        return _print(error.format_message(), error.exit_code)
    if isinstance(error, click.ClickException):
        return _print(f"llmserve: {explain_usage(error)}", error.exit_code)
    if isinstance(error, OutputClosed):
        _discard_output()
        return BROKEN_PIPE
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    return _explain_unexpected(error)


def _explain_unexpected(error: BaseException) -> int:
    from llmserve.errors import TRACEBACK, reason
    from llmserve_cli.group import cli

    if os.environ.get(TRACEBACK):
        import traceback

        traceback.print_exception(error)
    if isinstance(error, OSError):
        problem, purpose = "a system call failed", "see where"
        _discard_output()
    else:
        plugin = cli.plugin_of_command()
        problem = f"this is a bug of plugin {plugin!r}" if plugin else "this is a bug"
        purpose = "get a traceback for a bug report"
    hint = f"run it again with {TRACEBACK}=1 to {purpose}"
    return _print(f"llmserve: {problem}: {reason(error)}: {hint}", 1)


def _print(line: str, code: int) -> int:
    import click

    from llmserve.commands import printable

    # It may quote what a file or a plugin says.
    click.echo(printable(line), err=True)
    return code


def _discard_output() -> None:
    """Keep Python from writing, at exit, output that could not be written before."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
