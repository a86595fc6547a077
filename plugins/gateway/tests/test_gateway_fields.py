"""The rows of requests: readers, the OpenAPI document and the reference say the same of a field."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import httpx2 as httpx
import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from starlette.routing import Route

from llmserve.client import BATCH_ENDPOINTS, ToolsError
from llmserve.runtime.contract import TASKS
from llmserve_gateway.app import make_app
from llmserve_gateway.conversation_routes import NEW_ITEMS
from llmserve_gateway.document import make_document
from llmserve_gateway.endpoints import ASKED, ENDPOINTS, PLACES
from llmserve_gateway.errors import ApiError, from_llmserve
from llmserve_gateway.fields import Body, Field, Values, flag
from llmserve_gateway.gateway import Settings
from llmserve_gateway.value_requests import SCORES

from .gateways import NO_TRITON, Triton, app_before

HI = [{"role": "user", "content": "Hi"}]
SMALLEST: Mapping[str, Any] = {
    "messages": HI, "prompt": "Hi", "input": "Hi", "inputs": "Hi", "query": "Hi", "texts": ["a"],
    "documents": ["a"], "model": "m", "max_tokens": 8, "tokens": [1], "file": "x",
    "purpose": "batch", "input_file_id": "x", "endpoint": BATCH_ENDPOINTS[0],
    "completion_window": "1h", "text_1": "a", "text_2": "a", "lora_name": "a",
    "lora_path": "a", "metadata": {"a": "b"}, "items": HI,
    "input_prefix": "a", "input_suffix": "", "state": "a", "questions": {"q": {"type": "noul"}},
}  # fmt: skip
BODIES = [(row, body) for row in ENDPOINTS for body in row.bodies]
READERS = [(row, body) for row in ASKED for body in row.bodies]


def json_values(numbers: st.SearchStrategy[float]) -> st.SearchStrategy[Any]:
    """Return any values of JSON, many of them near what a field may be."""
    words = st.sampled_from(
        ["type", "role", "content", "text", "1", "name", "function", "format", "schema", "effort",
         "json", "regex", "choice", "budget_tokens", "include_usage", "tool_calls", "anchor"]
    )  # fmt: skip
    plain = st.sampled_from([None, True, False, 0, 1, -1, 2**31, 2**64, 0.5, "", "x", "auto"])
    return st.recursive(
        plain | st.text(max_size=4) | st.integers() | numbers,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(words | st.text(max_size=3), inner, max_size=3)
        ),
        max_leaves=6,
    )


def smallest(body: Body) -> dict[str, Any]:
    """Return a request with the fields that have to be there."""
    group = body.any_of[0] if body.any_of else body.one_of[:1]
    names = {name for name, field in body.fields.items() if field.required} | {*group}
    return {name: SMALLEST[name] for name in body.fields if name in names}


def names_of(field: Field[Any]) -> set[str]:
    """Return all that an error may call a field: by its name, or by one within it."""
    inner = field.body.fields.values() if field.body else ()
    return {each for one in (field, *inner) for each in (one.name, one.label) if each}


def refusal_of(read: Any, content: Mapping[str, Any]) -> ApiError | None:
    try:
        read(content)
    except ApiError as error:
        return error
    except ToolsError as error:
        return from_llmserve(error)
    return None


@pytest.mark.parametrize(("row", "body"), BODIES)
def test_the_smallest_request_is_read(row: Any, body: Body) -> None:
    del row
    assert refusal_of(body.read, smallest(body)) is None
    jsonschema.validate(smallest(body), body.schema())


# By their names, which a failure shows.
CASES = st.sampled_from(
    [(index, name) for index, (_, body) in enumerate(BODIES) for name in body.fields]
)


@settings(max_examples=600, deadline=None)
@given(CASES, json_values(st.floats()))
@example(next((i, "text_2") for i, (_, body) in enumerate(BODIES) if body is SCORES), None)
@example(next((i, "items") for i, (_, body) in enumerate(BODIES) if body is NEW_ITEMS), [None])
def test_any_value_of_a_field_is_read_or_refused_by_name(case: tuple[int, str], value: Any) -> None:
    row, body = BODIES[case[0]]
    field = body.fields[case[1]]
    read = row.answer.read if row in ASKED else body.read
    error = refusal_of(read, {**smallest(body), field.name: value})
    if error is None:
        return
    assert error.status == 400
    assert json.loads(error.json())["error"]["message"]
    # A field within an object, or an item of a list, is told by its path.
    named = (error.param or "").partition("[")[0]
    assert named in names_of(field) or named.partition(".")[0] == field.name, (named, field.name)


# What these have inside is read together with the rest, or is longer than a schema should be.
LOOSE = {
    "messages", "input", "system", "tools", "tool_choice", "thinking", "text", "output_config",
    "response_format", "output_format", "output_expires_after", "expires_after",
    "questions",
}  # fmt: skip


@settings(max_examples=600, deadline=None)
@given(CASES, json_values(st.floats().filter(lambda number: number % 1 > 0)))
@example((2, "conversation"), "")
def test_the_schema_of_a_field_allows_what_is_read(case: tuple[int, str], value: Any) -> None:
    """To JSON schema, 1.0 is an integer: it is no value of these."""
    body, name = BODIES[case[0]][1], case[1]
    field = body.fields[name]
    schema = body.schema()["properties"][field.name]
    is_allowed = jsonschema.Draft202012Validator(schema).is_valid(value)
    is_read = refusal_of(body.read, {**smallest(body), field.name: value}) is None
    if field.name not in LOOSE or not isinstance(value, (dict, list)):
        assert is_allowed is is_read, (field.name, value, schema)


@settings(max_examples=60, deadline=None)
@given(CASES, json_values(st.floats()))
def test_no_value_of_a_field_fails_the_gateway(case: tuple[int, str], value: Any) -> None:
    row, body = BODIES[case[0]]
    content = json.dumps({**smallest(body), case[1]: value})

    async def ask() -> int:
        transport = httpx.ASGITransport(app=app_before(Triton()))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            answer = await client.request(row.method, row.name, content=content.encode())
            return int(answer.status_code)

    assert asyncio.run(ask()) != 500


@pytest.mark.parametrize(("row", "body"), READERS, ids=lambda case: getattr(case, "path", ""))
def test_every_row_is_read_by_its_reader(
    row: Any, body: Body, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: set[str] = set()
    plain = Values.__getitem__

    def noting(values: Values, field: Field[Any]) -> Any:
        asked.add(field.name)
        return plain(values, field)

    monkeypatch.setattr(Values, "__getitem__", noting)
    for group in body.any_of or [()]:
        content = smallest(body)
        if group:
            content = {name: content.get(name, "a") for name in ("model", *group)}
        row.answer.read(content)
    wanted = {
        path.rpartition(".")[2]
        for path, field in body.all_fields()
        # A row of one value, or of none, has been read when it is checked.
        if field.use == "read" and not field.option and field.schema.keys() - {"enum", "const"}
    }
    assert wanted <= asked


def test_a_reader_gets_no_field_without_a_row() -> None:
    values = Body(flag("here", "Here.")).read({"here": True, "elsewhere": True})
    assert values[flag("here", "")] is True
    with pytest.raises(KeyError):
        values[flag("elsewhere", "")]
    assert values.unknown == {"elsewhere"}
    with pytest.raises(ValueError, match="same name"):
        Body(flag("here", "Here."), flag("here", "Here again."))


@pytest.mark.parametrize(("row", "body"), BODIES, ids=lambda case: getattr(case, "path", ""))
def test_every_row_is_in_the_document(row: Any, body: Body) -> None:
    document = make_document(["m"], batches=True, responses=True)
    operation = document["paths"][row.name][row.method.lower()]
    (content,) = operation["requestBody"]["content"].values()
    schemas = content["schema"].get("anyOf", [content["schema"]])
    if len(row.bodies) == 1:
        schemas = [content["schema"]]
    schema = schemas[[*row.bodies].index(body)]

    def check(schema: Mapping[str, Any], body: Body) -> None:
        assert schema["properties"].keys() == body.fields.keys()
        assert {*schema.get("required", ())} == {n for n, f in body.fields.items() if f.required}
        for name, field in body.fields.items():
            assert schema["properties"][name]["description"] == field.help
            if field.body:
                check(schema["properties"][name], field.body)

    check(schema, body)


@pytest.mark.parametrize(("row", "body"), BODIES, ids=lambda case: getattr(case, "path", ""))
def test_a_row_says_what_it_is_for(row: Any, body: Body) -> None:
    del row
    for path, field in body.all_fields():
        assert field.help.endswith("."), path
        assert field.help[0].isupper(), path


def test_the_document_has_the_fields_of_each_api_that_shares_a_path() -> None:
    content = make_document([])["paths"]["/rerank"]["post"]["requestBody"]["content"]
    schema = content["application/json"]["schema"]
    for body in (
        {"model": "m", "query": "a", "documents": ["b"], "top_k": 1},
        {"query": "a", "texts": ["b"], "return_text": True},
    ):
        jsonschema.validate(body, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"query": "a"}, schema)


def test_an_endpoint_stands_once() -> None:
    names = [(row.path, row.method) for row in ENDPOINTS]
    assert len(names) == len({*names})
    paths = {row.path for row in ASKED}
    assert {*BATCH_ENDPOINTS} <= paths
    assert PLACES.keys() == TASKS.keys()
    routes = [each for each in make_app(Settings(NO_TRITON)).routes if isinstance(each, Route)]
    assert [route.path for route in routes] == [path for path, _ in names]
