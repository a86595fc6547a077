"""The pages of docs/reference that are made from the contract.

``python -m tests.reference`` writes them again; a test compares.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import starmap
from pathlib import Path
from typing import Any

from llmserve.builder.server_file import GATEWAY, MODEL, SERVE, TOP, Key, schema, value_words
from llmserve.client.failures import type_of
from llmserve.contract.failures import FAILURES, Row
from llmserve.contract.options import BIASES, INT32, OPTIONS, RequestOption
from llmserve_gateway.endpoints import ENDPOINTS
from llmserve_gateway.fields import Body

FOLDER = Path(__file__).parents[1] / "docs" / "reference"

_OPTIONS = """\
# The options of a request

This page is made from the rows of `llmserve/contract/options.py` by `python -m tests.reference`.

Each option is a request parameter and an optional input of its name. Parameters are the better
choice: Triton batches only requests that carry the same optional inputs. A list or an object may
be sent as JSON. A model has those that its generator supports, and refuses the others by name.
The last column is the field of the gateway's APIs, with its limits if they are narrower. Where it
is empty, the gateway has no such field, or one of another kind: `messages`, `max_tokens`,
`logprobs`, `echo`, `suffix` and `chat_template_kwargs`.

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


_FAILURES = """\
# Why a request fails

This page is made from the rows of `llmserve/contract/failures.py` by `python -m tests.reference`.

A failure has a code. In Python it is the `code` of the error that the client raises, with the
option that is at fault in `param` and numbers, such as the model's `context`, in `details`; some
codes have a type of their own in `llmserve.errors`. The gateway answers with the HTTP status, sends
`Retry-After` if the same request may succeed later, and calls it as the last column says. Triton
has a single text for an error, so that the code stands in front of the words there:

    [llmserve context_length_exceeded param=max_tokens context=64] max_tokens 70 and …

A server or model that is not llmserve's has no such codes. What Triton itself says is recognised;
the rest is `unknown`, with its words.

| code | type | HTTP status | meaning | API |
|---|---|---|---|---|
"""


def failures_page() -> str:
    lines = [
        f"| `{row.code}` | `{type_of(row.code).__name__}` | {_status(row)} | {row.meaning} "
        f"| `{row.api_code}` |\n"
        for row in FAILURES.values()
    ]
    return _FAILURES + "".join(lines)


def _status(row: Row) -> str:
    return f"{row.status}, again after {row.retry_after} s" if row.retry_after else f"{row.status}"


_FILE = """\
# llmserve.toml

This page is made from the rows of `llmserve/builder/server_file.py` and
`llmserve/contract/serve_options.py` by `python -m tests.reference`, and so is
[its JSON schema](llmserve.schema.json) for editors.

One file says which models a repository has, what they are built from, and how they are served:

```toml
[models.small]
source = "demo"
plugin = "iterative"
options = { max_tokens = 64 }

[models.large]
source = "./my-model"

[serve]
replicas = 2

[gateway]
port = 9000
```

`llmserve serve --config FILE` builds what is missing or not from the same any more, and serves it;
without `--config`, `serve` reads `llmserve.toml` in the current folder, unless it is given what to
serve. `llmserve build --config FILE` only builds. Options of the command line come first. Paths are
from the folder of the file. A key that means nothing is refused. A file that `--config` does not
name may have come with a folder from somewhere: it may not name a path outside its folder, nor set
`no_auth` or `open_triton`.
"""


def file_page() -> str:
    tables = {"": TOP, "[models.NAME]": MODEL, "[serve]": SERVE, "[gateway]": GATEWAY}
    return _FILE + "".join(starmap(_file_table, tables.items()))


def _file_table(name: str, keys: Mapping[str, Key]) -> str:
    heading = f"\n## `{name}`\n" if name else ""
    lines = [f"| `{key}` | {value_words(row)} | {row.help} |\n" for key, row in keys.items()]
    return f"{heading}\n| key | value | use |\n|---|---|---|\n" + "".join(lines)


def schema_page() -> str:
    return json.dumps(schema(), indent=2) + "\n"


_REQUESTS = """\
# The fields of requests

This page is made from the rows of the gateway's endpoints by `python -m tests.reference`.

The fields that each endpoint of [the gateway](../plugins/gateway.md) knows. Null is the same as
none. What is refused would change the answer, and cannot be had here: such a field is refused with
a 400 that names it, unless its value asks for nothing, such as false or an empty list. Fields that
are not here are accepted without any effect, and logged once. A gateway serves the same as OpenAPI
at `/openapi.json`.
"""


def requests_page() -> str:
    """Return a section for each body, with all endpoints that read it."""
    places: dict[int, tuple[Body, list[str]]] = {}
    for row in ENDPOINTS:
        for body in row.bodies:
            places.setdefault(id(body), (body, []))[1].append(f"{row.method} {row.name}")
    return _REQUESTS + "".join(starmap(_body_section, places.values()))


def _body_section(body: Body, names: Sequence[str]) -> str:
    rows = [(name, field) for name, field in body.all_fields() if field.use == "read"]
    lines = [
        f"| `{name}` | {schema_words(field.schema)} | {'yes' if field.required else ''} "
        f"| {field.help} |\n"
        for name, field in rows
    ]
    text = f"\n## {', '.join(names)}\n\n| field | value | needed | use |\n|---|---|---|---|\n"
    text += "".join(lines)
    if body.any_of or body.one_of:
        groups = [*body.any_of, *([name] for name in body.one_of)]
        texts = [" and ".join(f"`{name}`" for name in group) for group in groups]
        text += f"\nIt needs {', or '.join(texts)}.\n"
    for use in ("refused", "ignored"):
        if found := [f"`{name}`" for name, field in body.all_fields() if field.use == use]:
            text += f"\n{use.capitalize()}: {', '.join(found)}.\n"
    return text


def schema_words(schema: Mapping[str, Any]) -> str:
    """Return what a JSON schema says of a value, in words."""
    if "enum" in schema:
        return " or ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(map(schema_words, choices)))
    kind = schema.get("type", "any")
    words = " or ".join(kind) if isinstance(kind, list) else str(kind)
    if words == "array" and "items" in schema:
        words = f"array of {schema_words(schema['items'])}"
    limits = [f"{word} {_big(schema[key])}" for key, word in _LIMITS.items() if key in schema]
    return " ".join([words, *limits])


def _big(number: float) -> str:
    near = {INT32: "2^31 - 1", 2**63 - 1: "2^63 - 1", -(2**63): "-2^63"}
    return near.get(int(number), f"{number:g}")


_LIMITS = {"exclusiveMinimum": "above", "minimum": "from", "maximum": "to"}


PAGES = {
    "options.md": options_page,
    "requests.md": requests_page,
    "failures.md": failures_page,
    "llmserve.toml.md": file_page,
    "llmserve.schema.json": schema_page,
}


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, make in PAGES.items():
        (FOLDER / name).write_text(make(), encoding="utf-8")
