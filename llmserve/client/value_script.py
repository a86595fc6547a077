#!/usr/bin/env python3
"""A client for the model in this folder. It needs only tritonclient[grpc].

    python client.py "The weather is lovely today."
    python client.py "How is the weather?" --pair "It is sunny." --pair "Cats sleep."
    python client.py - < texts.txt

Each line of standard input is a text. It prints a line of JSON for each: an embedding, a score, or
labels. You can also import it, and change it as you like:

    from client import compute
    print(compute(["The weather is lovely today."])["embedding"][0])
"""

from __future__ import annotations

import argparse
import json
import re
import struct
import sys
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub as Stub

from llmserve.client.script_parts import (
    URL,
    channel,
    check_pin,
    default_model,
    explain,
    run,
    set_parameters,
)

# The formats of Triton's numbers, which are little-endian.
FORMATS = {"BOOL": "?", "FP16": "e", "FP32": "f", "FP64": "d"}
FORMATS |= {"INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q"}
FORMATS |= {"UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q"}


def compute(
    texts: list[str],
    pairs: list[str] | None = None,
    *,
    model: str | None = None,
    url: str = URL,
    timeout: float | None = None,
    pin: str | None = None,
    **options: Any,
) -> dict[str, list[Any]]:
    """Return the model's outputs by name, each with an entry for every text.

    ``pairs`` are second texts, one for each, such as documents that a query is compared with;
    ``pin`` is a fingerprint, and another model is refused; ``options`` are those of the model, such
    as ``truncate=True``.
    """
    model = model or default_model()
    found: dict[str, list[Any]] = {}
    with channel(url) as opened:
        stub = Stub(opened)
        try:
            request = messages.ModelConfigRequest(name=model)
            config = stub.ModelConfig(request, timeout=10).config
            check_pin(config, pin)
            rows = config.max_batch_size or len(texts)
            for first in range(0, len(texts), rows):
                some = slice(first, first + rows)
                request = _request(config, texts[some], pairs and pairs[some], options)
                for name, values in _read(stub.ModelInfer(request, timeout=timeout)).items():
                    found.setdefault(name, []).extend(values)
        except grpc.RpcError as error:
            raise explain(error, model, url) from None
    return found


def _request(
    config: Any, texts: list[str], pairs: list[str] | None, options: dict[str, Any]
) -> Any:
    request = messages.ModelInferRequest(model_name=config.name)
    shape = [len(texts), 1] if config.max_batch_size > 0 else [len(texts)]
    for name, rows in (("text_input", texts), ("text_pair", pairs)):
        if rows:
            request.inputs.add(name=name, datatype="BYTES", shape=shape)
            raw = [text.encode() for text in rows]
            packed = b"".join(struct.pack("<I", len(text)) + text for text in raw)
            request.raw_input_contents.append(packed)
    set_parameters(request, options)
    return request


def _read(response: Any) -> dict[str, list[Any]]:
    """Return the outputs, each with a number, a text or a list for every row."""
    found = {}
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        rows = output.shape[0]
        values = _texts(raw) if output.datatype == "BYTES" else _numbers(output.datatype, raw)
        width = len(values) // rows
        lists = [values[row * width : (row + 1) * width] for row in range(rows)]
        one = output.name in ("score", "num_input_tokens")
        found[output.name] = [values[0] for values in lists] if one else lists
    return found


def _numbers(datatype: str, raw: bytes) -> list[Any]:
    code = FORMATS[datatype]
    return list(struct.unpack(f"<{len(raw) // struct.calcsize(code)}{code}", raw))


def _texts(raw: bytes) -> list[Any]:
    texts, position = [], 0
    while position < len(raw):
        # A text is preceded by its length in four bytes.
        end = position + 4 + int.from_bytes(raw[position : position + 4], "little")
        texts.append(raw[position + 4 : end].decode())
        position = end
    return texts


def _line(values: dict[str, Any]) -> str:
    """Return a line of JSON with its letters as they are, and no control characters."""
    line = json.dumps(values, ensure_ascii=False) + "\n"
    return re.sub(r"[\x7f-\x9f\u2028\u2029]", lambda match: f"\\u{ord(match[0]):04x}", line)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Ask a model that Triton serves for values.")
    parser.add_argument("text", nargs="?", default="-", help="a text; - (default) reads lines")
    parser.add_argument("--pair", action="append", help="a second text (repeatable)")
    parser.add_argument("--url", default=URL, help="gRPC address (default: %(default)s)")
    parser.add_argument("--model", default=None, help="the model's name (default: this folder's)")
    parser.add_argument("--dimensions", type=int, help="numbers of an embedding to keep")
    parser.add_argument("--truncate", action="store_true", default=None, help="cut long texts")
    parser.add_argument("--timeout", type=float, help="seconds for a request")
    parser.add_argument("--pin", help="refuse a model that has not this fingerprint")
    return parser


def _ask() -> None:
    options = vars(_parser().parse_args())
    text, pairs = options.pop("text"), options.pop("pair")
    texts = sys.stdin.read().splitlines() if text == "-" else [text]
    if pairs:
        texts, pairs = [t for t in texts for _ in pairs], pairs * len(texts)
    outputs = compute(texts, pairs, **options) if texts else {}
    for row in range(len(texts)):
        values = {name: rows[row] for name, rows in outputs.items()}
        sys.stdout.write(_line(values))


if __name__ == "__main__":
    sys.exit(run(_ask))
