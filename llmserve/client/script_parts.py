"""What the clients that models are emitted with have in common.

A client is emitted as one file: ``llmserve.builder.client_script`` puts this between its imports
and the rest of it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

URL = os.environ.get("LLMSERVE_URL") or "127.0.0.1:8001"
RUNTIME, USAGE, UNREACHABLE, NOT_READY, TIMED_OUT, REJECTED, INTERRUPTED = 1, 2, 4, 5, 6, 7, 130

INCOMPATIBLE = 3
FINGERPRINT = "llmserve.fingerprint"
# What a model's answers depend on: each has its place in the fingerprint.
PARTS = ("weights", "tokenizer", "chat template", "defaults", "settings", "engine")


class RequestError(Exception):
    """A failed request: a one-line message and the exit code."""

    def __init__(self, message: str, exit_code: int = RUNTIME) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def about_model() -> dict[str, Any]:
    """Return what llmserve.json next to this file says of the model."""
    folder = Path(__file__).resolve().parent
    manifest = folder / "llmserve.json"
    if not manifest.is_file():
        return {"name": folder.name}
    about: dict[str, Any] = json.loads(manifest.read_text(encoding="utf-8"))
    return about


def default_model() -> str:
    """Return the name of this folder's model, else that of the folder."""
    return str(about_model()["name"])


def set_parameters(request: Any, options: dict[str, Any]) -> None:
    for name, value in options.items():
        if isinstance(value, bool):
            request.parameters[name].bool_param = value
        elif isinstance(value, int) and -(2**63) <= value < 2**63:
            request.parameters[name].int64_param = value
        elif isinstance(value, float):
            request.parameters[name].double_param = value
        elif isinstance(value, (list, tuple)):
            request.parameters[name].string_param = json.dumps(value)
        elif value is not None:
            request.parameters[name].string_param = str(value)


def channel(url: str) -> Any:
    scheme, _, address = url.rpartition("://")
    if scheme not in ("", "grpc", "grpcs") or ":" not in address:
        raise RequestError(f"{url}: give Triton's gRPC port (usually 8001) as host:port", USAGE)
    options = [
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        # Detects a server that died. Triton allows at most one ping every five minutes.
        ("grpc.keepalive_time_ms", 330_000),
        # Despite its name, this also limits each attempt to connect.
        ("grpc.min_reconnect_backoff_ms", 5_000),
    ]
    if scheme == "grpcs":
        return grpc.secure_channel(address, grpc.ssl_channel_credentials(), options=options)
    return grpc.insecure_channel(address, options=options)


def check_pin(config: Any, pin: str | None) -> None:
    """Refuse a model that is not the one of a fingerprint, and say what of it has changed."""
    if pin is None:
        return
    pinned = pin.removeprefix("fp_").split("-")
    if not pin.startswith("fp_") or len(pinned) != len(PARTS):
        raise RequestError(f"{pin} is not a fingerprint: llmserve list shows a model's own", USAGE)
    if FINGERPRINT not in config.parameters:
        raise RequestError(f"{config.name} has no fingerprint to compare with {pin}", INCOMPATIBLE)
    own = config.parameters[FINGERPRINT].string_value
    now = own.removeprefix("fp_").split("-")
    rows = zip(PARTS, pinned, now, strict=False)
    if what := " and ".join(part for part, was, is_now in rows if was != is_now):
        problem = f"{config.name} is not the model of that fingerprint: it has other {what}"
        raise RequestError(f"{problem} (its own is {own})", INCOMPATIBLE)


def explain(error: Any, model: str, url: str) -> RequestError:
    code, details = error.code(), one_line(error.details() or "")
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return RequestError("no complete answer in time: allow more with --timeout", TIMED_OUT)
    if code == grpc.StatusCode.CANCELLED:
        return RequestError("the request was cancelled", INTERRUPTED)
    if details.startswith("Request for unknown model"):
        return RequestError(f"the server at {url} has no model {model!r} that is ready", NOT_READY)
    if code == grpc.StatusCode.UNAVAILABLE and "queue" not in details:
        return RequestError(
            f"no Triton answers at {url}: give its gRPC port (usually 8001) with --url, or wait if "
            "it is still loading",
            UNREACHABLE,
        )
    return RequestError(f"refused: {details}", REJECTED)


def one_line(message: str) -> str:
    # A model of llmserve puts "[llmserve code] " in front; another Python model's traceback follows
    # after "At:".
    ensemble, coded, words = message.partition("[llmserve ")
    if coded and (not ensemble or ensemble.startswith("in ensemble '")):
        message = words.partition("] ")[2]
    return " ".join(message.split("\n\nAt:")[0].split()) or "no reason given"


def run(ask: Callable[[], None]) -> int:
    """Do what the command line asks for, and return the exit code."""
    try:
        ask()
    except RequestError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except UnicodeError:
        sys.stderr.write("error: what is sent or answered is not UTF-8\n")
        return RUNTIME
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # The reader has closed the pipe.
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0
