"""Messages of servers and of gRPC become llmserve's errors: one line that names the fix."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmserve import errors
from llmserve.client.failures import Recipient, translate, unknown_model
from llmserve.client.model import ModelState
from llmserve.client.workarounds import one_line
from llmserve.contract.failures import FAILURES, Failure, write
from llmserve.contract.failures import UNKNOWN as UNKNOWN_CODE

DEMO = Recipient("127.0.0.1:8001", "demo", "no complete answer from 'demo' within 2.5 s")
NOWHERE = "failed to connect to all addresses; last error: UNKNOWN: "
REFUSED = f"{NOWHERE}ipv4:127.0.0.1:8001: Failed to connect to remote host: Connection refused"
KEY = "This protocol is restricted, expecting header 'triton-grpc-protocol-key'"
UNKNOWN = "Request for unknown model: 'demo' is not found"
TOO_MANY = "inference request batch-size must be <= 8 for 'demo'"


# Details as tritonserver and gRPC send them.
@pytest.mark.parametrize(
    ("code", "details", "kind", "message"),
    [
        ("UNAVAILABLE", REFUSED, errors.UnreachableError,
         "no Triton answers at 127.0.0.1:8001: start one with `llmserve serve`"),
        ("UNAVAILABLE", "errors resolving x:1: [Domain name not found]", errors.UnreachableError,
         "no T"),
        ("UNAVAILABLE", f"{NOWHERE}Tls handshake failed", errors.UnreachableError,
         "no TLS connection to 127.0.0.1:8001"),
        ("UNAVAILABLE", "Stream removed (Socket closed)", errors.UnreachableError,
         "the connection to 127.0.0.1:8001 broke"),
        ("UNAVAILABLE", "[request id: <id_unknown>] Exceeds maximum queue size",
         errors.QueueFullError, "the queue of 'demo' is full"),
        ("UNAVAILABLE", "[request id: 0] Request timeout expired", errors.RequestTimeoutError,
         "waited too long in the queue"),
        ("UNAVAILABLE", KEY, errors.RequestRejectedError, "expecting header"),
        ("NOT_FOUND", UNKNOWN, errors.ModelNotReadyError, ""),
        ("", UNKNOWN, errors.ModelNotReadyError, "'demo'"),
        ("NOT_FOUND", "no such adapter", errors.RequestRejectedError, "no such adapter"),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", errors.RequestTimeoutError, "within 2.5 s"),
        ("CANCELLED", "Locally cancelled", errors.RequestCancelledError, "was cancelled"),
        ("", "[request id: 5] Server is stopping, scheduler for model has stopped accepting new "
         "inference requests", errors.UnreachableError, "its server is stopping"),
        ("INTERNAL", "Stub process 'demo_0_0' is not healthy.", errors.ModelDiedError,
         "has died: look at the server's log"),
        ("", "in ensemble 'demo', Failed to process the request(s) for model instance 'demo_0_0', "
         "message: Stub process 'demo_0_0' is not healthy.", errors.ModelDiedError,
         "has died: look at the server's log"),
        # Words that a request may contain are not the server's own.
        ("", "the regex cannot be enforced: '(Stub process 'a' is not healthy'",
         errors.RequestRejectedError, "the server refused the request: the regex"),
        ("", "the regex cannot be enforced: 'Exceeds maximum queue size'",
         errors.RequestRejectedError, "the server refused the request: the regex"),
        ("", "the regex cannot be enforced: '[request id: 0] Request timeout expired'",
         errors.RequestRejectedError, "the server refused the request: the regex"),
        ("", "in ensemble 'demo', [request id: 0] Request timeout expired",
         errors.RequestTimeoutError, "waited too long in the queue"),
        ("INVALID_ARGUMENT", f"[request id: <id_unknown>] {TOO_MANY}", errors.RequestRejectedError,
         f"the server refused the request: {TOO_MANY}"),
        ("", "[llmserve context_length_exceeded param=max_tokens context=64] max_tokens 70 is over",
         errors.ContextLengthError, "the server refused the request: max_tokens 70 is over"),
        ("INVALID_ARGUMENT", "[llmserve conflicting_options] send only one",
         errors.InvalidRequestError, "send only one"),
        ("UNAVAILABLE", "[llmserve model_failed] the model failed: KeyError: 'Stub process'",
         errors.ModelFailedError, "the model failed: KeyError"),
        ("", "in ensemble 'demo', Failed to process the request(s) for model instance 'demo_0_0', "
         "message: KeyError: 'Stub process'", errors.ModelFailedError, "KeyError: 'Stub process'"),
        ("", "max_tokens must be at least 0", errors.RequestRejectedError, "max_tokens must be"),
    ],
)  # fmt: skip
def test_a_message_of_the_server_becomes_an_error(
    code: str, details: str, kind: type[errors.ClientError], message: str
) -> None:
    error = translate(code, details, DEMO)
    assert type(error) is kind
    assert message in str(error)


@pytest.mark.parametrize("code", FAILURES)
def test_a_code_reaches_the_user_of_the_client_as_itself(code: str) -> None:
    sent = write(Failure(code, "why", "top_k", {"context": 64}))
    error = translate("", f"in ensemble 'demo', {sent}", DEMO)
    assert (error.code, error.param, error.words) == (code, "top_k", "why")
    assert error.details == {"context": 64}
    if code != UNKNOWN_CODE:
        assert type(error).code == code or issubclass(type(error), SHARED[code])


SHARED = dict.fromkeys(FAILURES, errors.RequestRejectedError) | {
    "timeout_in_queue": errors.RequestTimeoutError,
    "constraint_queue_full": errors.QueueFullError,
}


def test_tracebacks_and_folders_stay_on_the_server() -> None:
    details = (
        "Failed to process the request(s) for model 'demo_0_0', message: ValueError: no file "
        "/srv/models/demo/1/weights.bin\nor it is empty\n\nAt:\n  /srv/models/demo/1/model.py(5): "
        "execute\n"
    )
    assert translate("", details, DEMO).words == "ValueError: no file weights.bin or it is empty"
    python = 'Traceback (most recent call last):\n  File "/a/b/c.py", line 3\n    x()\nKeyError: 1'
    assert one_line(python) == "KeyError: 1"
    assert one_line("see https://example.org/a/b and 3/4") == "see https://example.org/a/b and 3/4"


@given(st.text(), st.sampled_from(["INTERNAL", "INVALID_ARGUMENT", "UNAVAILABLE", "", "UNKNOWN"]))
def test_every_message_becomes_one_line(details: str, code: str) -> None:
    text = str(translate(code, details, DEMO))
    assert text == " ".join(text.splitlines())
    assert len(text) < 1000


def test_an_unknown_model_error_names_ready_models_or_why_the_model_failed() -> None:
    states = [ModelState(name, "1", "READY", "") for name in ("alpha", "demo-chat", "demo", "zeta")]
    assert unknown_model("dmo", states).hint == "choose one of demo, demo-chat, alpha, zeta"
    assert unknown_model("dmo", []).hint == "it has no model that is ready"
    reason = "Internal: RuntimeError: no weights\n\nAt:\n  /srv/m/1/model.py(1): <module>\n"
    error = unknown_model("demo", [ModelState("demo", "1", "UNAVAILABLE", reason)])
    assert error.problem == "'demo' is unavailable: Internal: RuntimeError: no weights"
