"""The pages of docs/reference that are made from the contract.

``python -m tests.reference`` writes them again; a test compares.
"""

from __future__ import annotations

from pathlib import Path

from llmserve.contract.options import BIASES, INT32, OPTIONS, RequestOption

FOLDER = Path(__file__).parents[1] / "docs" / "reference"

_OPTIONS = """\
# The options of a request

This page is made from the rows of `llmserve/contract/options.py` by `python -m tests.reference`.

Each option is a request parameter and an optional input of its name. Parameters are the better
choice: Triton batches only requests that carry the same optional inputs. A list or an object may
be sent as JSON. A model has those that its generator supports, and refuses the others by name.
The last column is the field of the gateway's APIs, with its limits if they are narrower. Where it
is empty, the gateway has no such field, or one of another kind: `messages`, `max_tokens`,
`logprobs`, `echo` and `chat_template_kwargs`.

| option | value | default | use | gateway |
|---|---|---|---|---|
"""


def options_page() -> str:
    return _OPTIONS + "".join(map(_line, OPTIONS.values()))


def _line(row: RequestOption) -> str:
    names = " or ".join(f"`{name}`" for name in (row.name, *row.aliases))
    default = "" if row.default in (None, (), {}) else f"`{str(row.default).lower()}`"
    return f"| {names} | {_value(row)} | {default} | {row.help} | {_field(row)} |\n"


def _value(row: RequestOption) -> str:
    words = {
        "whole": f"a whole number {_range(row.low, row.high)}",
        "number": f"a number {_range(row.low, row.high, above=row.above)}",
        "flag": "true or false",
        "text": "JSON" if row.json else "text",
        "words": f"up to {row.high} texts",
        "ids": "token ids",
        "biases": f"up to {row.high} numbers {_range(*BIASES)}",
        "object": "an object",
    }
    return words[row.kind]


def _field(row: RequestOption) -> str:
    if not row.api:
        return ""
    if row.group == "forms":
        return f"`structured_outputs.{row.api}`"
    if not row.api_range:
        return f"`{row.api}`"
    low, high = row.api_range
    limits = f"up to {high}" if row.is_list else _range(low, high)
    return f"`{row.api}`, {limits}"


def _range(low: float, high: float, *, above: bool = False) -> str:
    start = f"{'above' if above else 'from'} {low:g}"
    big = {INT32: "", 2**63 - 1: " to 2^63 - 1", 2**64 - 1: " to 2^64 - 1"}
    return start + big.get(int(high), f" to {high:g}")


PAGES = {"options.md": options_page}


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, make in PAGES.items():
        (FOLDER / name).write_text(make(), encoding="utf-8")
