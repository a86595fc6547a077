"""A failure crosses Triton as a prefix of its one error string, and nothing else passes for one."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmserve.contract.failures import FAILURES, UNKNOWN, Failure, read, without_wrappers, write
from llmserve.runtime import RequestError, error_of_model
from llmserve.testing.codes import raised_codes
from tests.failure_codes import ROOT, searches, sources

WRAPPERS = [
    "{}",
    "in ensemble 'm', {}",
    "[request id: <id_unknown>] {}",
    "in ensemble 'm', [request id: 5] {}",
    "Failed to process the request(s) for model instance 'm_0_0', message: {}",
    "in ensemble 'm', Failed to process the request(s) for model 'm', message: "
    "TritonModelException: {}",
]
QUOTES = st.one_of(
    st.text(),
    st.sampled_from(
        [
            "[llmserve model_died] ", "] [llmserve queue_full] x", "[request id: 5] ",
            "in ensemble 'm', [llmserve no_memory] x", "TritonModelException: [llmserve unknown]",
            "Stub process 'm' is not healthy", "Exceeds maximum queue size", "x] y", "param=x",
        ]
    ),
)  # fmt: skip
QUOTED = st.lists(QUOTES, max_size=4).map("".join)


@given(
    st.sampled_from(sorted(FAILURES)),
    QUOTED,
    st.one_of(st.none(), st.sampled_from(["top_k", "stop.words"]), QUOTED),
    st.dictionaries(st.sampled_from(["context", "prompt_tokens"]), st.integers(0, 2**40)),
    st.sampled_from(WRAPPERS),
)
def test_what_is_written_is_read_whatever_it_quotes(
    code: str, words: str, param: str | None, details: dict[str, int], wrapper: str
) -> None:
    failure = Failure(code, f"top_k {words}".strip(), param, details)
    found = read(wrapper.format(write(failure)))
    plain = param is not None and param.replace("_", "").replace(".", "").isalnum()
    expected = param if param and plain and param.isascii() else None
    assert found == Failure(code, failure.words, expected, details)


@given(QUOTED, st.sampled_from(WRAPPERS))
def test_words_that_quote_a_request_are_no_failure_of_ours(words: str, wrapper: str) -> None:
    assert read(wrapper.format(f"ValueError: {words}")).code == UNKNOWN


@given(QUOTED)
def test_an_id_that_a_client_chose_hides_no_prefix(words: str) -> None:
    found = read(f"[request id: x{words}] unexpected inference input")
    assert found.code == UNKNOWN


def test_a_code_of_a_newer_server_is_unknown_and_keeps_its_words() -> None:
    found = read("[llmserve out_of_cheese param=x] there is none")
    assert (found.code, found.words, found.param) == (UNKNOWN, "there is none", "x")
    assert read("[llmserve no_memory]") == Failure("no_memory", "")
    assert without_wrappers("in ensemble 'm") == "in ensemble 'm"


def test_a_refusal_has_a_code_of_the_contract() -> None:
    assert RequestError("no").code == "invalid_request"
    with pytest.raises(ValueError, match="'no_cheese'"):
        RequestError("no", code="no_cheese")
    error = RequestError("no", code="invalid_value", param="top_k", context=5)
    assert (
        error.again().failure
        == error.failure
        == Failure("invalid_value", "no", "top_k", {"context": 5})
    )


def test_a_subclass_with_its_own_constructor_is_a_refusal() -> None:
    """As plugins written before refusals had codes may have one."""

    class TooRudeError(RequestError):
        def __init__(self, word: str) -> None:
            self.word = word

        def __str__(self) -> str:
            return f"be nice, not {self.word}"

    assert TooRudeError("rude").failure == Failure("invalid_request", "be nice, not rude")


def test_the_error_of_another_model_is_read_whatever_its_details_are_called() -> None:
    error = error_of_model("[llmserve invalid_value param=top_k code=3 message=4] no")
    assert isinstance(error, RequestError)
    details = {"code": 3, "message": 4}
    assert (
        error.again().failure == error.failure == Failure("invalid_value", "no", "top_k", details)
    )


def test_thousands_of_wrappers_are_not_taken_off_one_by_one() -> None:
    text = "TritonModelException: " * 10_000 + "x"
    tracemalloc.start()
    assert read(text).code == UNKNOWN
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20 * len(text)


SEARCH_ALLOWED = {
    # Triton and gRPC send no code.
    "llmserve/client/workarounds.py",
    # safetensors has the system's number for a full disk in its words alone.
    "llmserve/builder/gguf/workarounds.py",
    # click has one type for several mistakes.
    "cli/llmserve_cli/usage.py",
}


def test_no_module_looks_into_the_words_of_an_error() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{line}"
        for path in sources()
        if str(path.relative_to(ROOT)) not in SEARCH_ALLOWED
        for line in searches(path.read_text(encoding="utf-8"))
    }
    assert not found, "compare the code or the type of the error instead"


@pytest.mark.parametrize(
    "code",
    [
        'if "has died" in error.problem: pass',
        "_QUEUE_FULL.match(str(error))",
        "re.search('full', error.message)",
        'str(error).startswith("no")',
        'error.message().partition(": ")',
        'error.words == "no"',
    ],
)
def test_a_search_of_words_would_be_found(code: str) -> None:
    assert [*searches(code)] == [1]


def test_only_the_workarounds_use_patterns_on_what_a_server_says() -> None:
    users = {
        path.relative_to(ROOT).as_posix()
        for path in sources()
        if path.parent.name in ("client", "contract") or path.name == "errors.py"
        if "\nimport re\n" in path.read_text(encoding="utf-8")
    }
    assert users <= {
        "llmserve/client/workarounds.py",
        "llmserve/client/script.py",
        "llmserve/client/value_script.py",
        "llmserve/client/url.py",
        "llmserve/contract/container.py",
        "llmserve/contract/images.py",
    }


def test_every_code_that_is_raised_has_a_row_and_every_row_a_status() -> None:
    assert raised_codes(sources()) <= FAILURES.keys()
    assert all(400 <= row.status < 600 and row.meaning for row in FAILURES.values())
