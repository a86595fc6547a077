#!/usr/bin/env python3
"""A client for the model in this folder. It needs only tritonclient[grpc].

    python client.py "Programming in C++ is like" --max-tokens 32
    echo "Programming in C++ is like" | python client.py --json

You can also import it, and change it as you like:

    from client import generate, stream
    print(generate("Programming in C++ is like", max_tokens=32).text)
    for piece in stream("Programming in C++ is like", temperature=0.7):
        print(piece.text, end="", flush=True)
"""

from __future__ import annotations

import argparse
import base64
import json
import re
import secrets
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub as Stub

from llmserve.client.script_parts import (
    REJECTED,
    UNREACHABLE,
    URL,
    USAGE,
    RequestError,
    about_model,
    channel,
    check_pin,
    default_model,
    explain,
    one_line,
    run,
    set_parameters,
)


class Answer(NamedTuple):
    """A whole answer or a piece of one; a field is None if the model does not return it."""

    text: str
    finish_reason: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    logprobs: list[Any] | None = None


def generate(prompt: str, **options: Any) -> Answer:
    """Return the whole answer; the arguments are those of :func:`stream`."""
    pieces = list(stream(prompt, pieces=False, **options))
    logprobs = [entry for piece in pieces for entry in piece.logprobs or ()]
    answer = (pieces or [Answer("")])[-1]._replace(text="".join(piece.text for piece in pieces))
    return answer._replace(logprobs=logprobs or None)


def stream(
    prompt: str,
    *,
    images: Sequence[str | Path | bytes] = (),
    model: str | None = None,
    url: str = URL,
    timeout: float | None = None,
    pin: str | None = None,
    pieces: bool = True,
    **options: Any,
) -> Iterator[Answer]:
    """Yield the answer in pieces as they arrive; leaving the loop cancels the request.

    ``images`` are files, or what is in them, for a model that reads images: the message of the
    prompt shows them in their order. ``timeout`` is in seconds, for the whole request; ``pin`` is a
    fingerprint (``fp_...``), and a model that is another one is refused; ``options`` are those of
    the model, such as ``max_tokens=32``.
    """
    model = model or default_model()
    options |= _shown(prompt, images)
    deadline = None if timeout is None else time.monotonic() + timeout

    def remaining() -> float | None:
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    with channel(url) as opened:
        stub = Stub(opened)
        try:
            config_request = messages.ModelConfigRequest(name=model)
            config_timeout = 10 if deadline is None else remaining()
            config = stub.ModelConfig(config_request, timeout=config_timeout).config
            check_pin(config, pin)
            exchange = _exchange(config)
            if exchange == "stream":
                request = _request(config, prompt, {**options, "stream": pieces})
                request.parameters["triton_enable_empty_final_response"].bool_param = True
                complete = False
                # gRPC closes our side after the one request, so the stream ends with the answer.
                for message in stub.ModelStreamInfer(iter([request]), timeout=remaining()):
                    if message.error_message:
                        raise RequestError(f"refused: {one_line(message.error_message)}", REJECTED)
                    yield from _read(message.infer_response)
                    complete = message.infer_response.parameters["triton_final_response"].bool_param
                if not complete:
                    raise RequestError(f"{url} ended the stream too early", UNREACHABLE)
            elif exchange == "sequence":
                yield from _sequence(stub, config, prompt, options, remaining, pieces)
            else:
                request = _request(config, prompt, options)
                yield from _read(stub.ModelInfer(request, timeout=remaining()))
        except grpc.RpcError as error:
            raise explain(error, model, url) from None


def _shown(prompt: str, images: Sequence[str | Path | bytes]) -> dict[str, Any]:
    """Return the options of a prompt with images: a message, and a data URL for each of them."""
    if not images:
        return {}
    content = [*({"type": "image"} for _ in images), {"type": "text", "text": prompt}]
    messages = json.dumps([{"role": "user", "content": content}])
    return {"messages": messages, "image_url": [_data_url(image) for image in images]}


def _data_url(image: str | Path | bytes) -> str:
    # Of which type it is, the model finds out.
    content = image if isinstance(image, bytes) else _content(Path(image))
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}", USAGE) from None


def _exchange(config: Any) -> str:
    if "llmserve.exchange" in config.parameters:
        return str(config.parameters["llmserve.exchange"].string_value)
    if config.model_transaction_policy.decoupled:
        return "stream"
    sequences = config.WhichOneof("scheduling_choice") == "sequence_batching"
    return "sequence" if sequences and not config.sequence_batching.iterative_sequence else "unary"


def _sequence(
    stub: Any, config: Any, prompt: str, options: dict[str, Any], remaining: Any, pieces: bool
) -> Iterator[Answer]:
    """Send requests until the answer is complete; the model keeps its state between them."""
    sequence: dict[str, Any] = {"sequence_id": secrets.randbits(63) or 1}
    end = {**sequence, "sequence_end": True}
    if any(tensor.name == "step_tokens" for tensor in config.input):
        # Tokens per request: few, to stream them, or as many as the model generates.
        sequence["step_tokens"] = options.get("step_tokens", 4 if pieces else 1 << 20)
        end["step_tokens"] = 0
    request = _request(config, prompt, {**options, **sequence, "sequence_start": True})
    try:
        finished = False
        while not finished:
            answers = _read(stub.ModelInfer(request, timeout=remaining()))
            yield from answers
            finished = not answers or answers[-1].finish_reason is not None
            request = _request(config, "", sequence)
    finally:
        # Without an end request, the model would keep the state for minutes.
        with suppress(grpc.RpcError):
            stub.ModelInfer(_request(config, "", end), timeout=5)


def _request(config: Any, prompt: str, options: dict[str, Any]) -> Any:
    # Options are sent as parameters: Triton batches only requests that carry the same inputs.
    request = messages.ModelInferRequest(model_name=config.name)
    shape = [1, 1] if config.max_batch_size > 0 else [1]
    request.inputs.add(name="text_input", datatype="BYTES", shape=shape)
    text = prompt.encode()
    request.raw_input_contents.append(struct.pack("<I", len(text)) + text)
    set_parameters(request, options)
    return request


def _read(response: Any) -> list[Answer]:
    names = [output.name for output in response.outputs]
    outputs = dict(zip(names, response.raw_output_contents, strict=True))
    if not outputs.get("text_output"):
        return []  # Some models end a stream with an empty response.
    # A text is preceded by its length in four bytes; a count is a little-endian INT32.
    text = outputs["text_output"][4:].decode()
    reason = outputs.get("finish_reason", b"")[4:].decode() or None
    raw_counts = [outputs.get(name) for name in ("num_input_tokens", "num_output_tokens")]
    counts = [None if raw is None else int.from_bytes(raw, "little") for raw in raw_counts]
    logprobs = json.loads(outputs["logprobs"][4:]) if "logprobs" in outputs else None
    return [Answer(text, reason, counts[0], counts[1], logprobs)]


def _printable(text: str) -> str:
    """Escape control characters, so that an answer cannot control the terminal."""
    if not sys.stdout.isatty():
        return text
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda match: repr(match[0])[1:-1], text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Query a model that Triton serves.")
    parser.add_argument(
        "prompt", nargs="?", default="-", help="the prompt; - (default) reads stdin"
    )
    parser.add_argument("--url", default=URL, help="gRPC address (default: %(default)s)")
    parser.add_argument("--model", default=None, help="the model's name (default: this folder's)")
    for option in ("--max-tokens", "--top-k", "--seed", "--logprobs"):
        parser.add_argument(option, type=int)
    for option in ("--temperature", "--top-p"):
        parser.add_argument(option, type=float)
    if "image_url" in about_model().get("contract", {}).get("inputs", ()):
        image = "an image to ask about (repeatable)"
        parser.add_argument("--image", dest="images", action="append", default=[], help=image)
    parser.add_argument("--stop", dest="stop_words", action="append", help="repeatable")
    parser.add_argument("--stream", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", action="store_true", help="print the whole answer as JSON")
    parser.add_argument("--timeout", type=float, help="seconds for the whole request")
    parser.add_argument("--pin", help="refuse a model that has not this fingerprint")
    return parser


def _ask() -> None:
    options = vars(_parser().parse_args())
    prompt, as_json = options.pop("prompt"), options.pop("json")
    pieces = options.pop("stream") and not as_json
    if prompt == "-":
        prompt = sys.stdin.read().removesuffix("\n")
    for answer in stream(prompt, **options) if pieces else [generate(prompt, **options)]:
        fields = answer._asdict()
        if answer.logprobs is None:
            del fields["logprobs"]
        sys.stdout.write(json.dumps(fields) if as_json else _printable(answer.text))
        sys.stdout.flush()
    sys.stdout.write("\n")


if __name__ == "__main__":
    sys.exit(run(_ask))
