"""What the Python parts of an ensemble share: every request is answered, each for itself."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy.typing as npt

from llmserve.runtime.errors import RequestError, failure_line, panics_as_errors
from llmserve.runtime.protocols import Parts

Tensors = Mapping[str, npt.NDArray[Any]]


def respond(requests: Sequence[Any], answer: Callable[[Any], Tensors], parts: Parts) -> list[Any]:
    """Return a response to every request of a part that is not decoupled.

    ``answer`` returns a request's output tensors. What it raises becomes that request's error:
    its own fault where it is a :class:`RequestError`, else the model's, with a traceback in the
    log.
    """
    return [_response(raw, answer, parts) for raw in requests]


def tensors_of(raw: Any) -> dict[str, npt.NDArray[Any]]:
    return {tensor.name(): tensor.as_numpy() for tensor in raw.inputs()}


def _response(raw: Any, answer: Callable[[Any], Tensors], parts: Parts) -> Any:
    pb = parts.pb_utils
    try:
        with panics_as_errors():
            tensors = answer(raw)
    except RequestError as error:
        message = str(error).encode(errors="replace").decode()
        refusal = pb.TritonError(message, pb.TritonError.INVALID_ARG)
        return pb.InferenceResponse(output_tensors=[], error=refusal)
    except Exception as error:
        return pb.InferenceResponse(output_tensors=[], error=failure(error, parts))
    outputs = [pb.Tensor(name, values) for name, values in tensors.items()]
    return pb.InferenceResponse(output_tensors=outputs)


def failure(error: Exception, parts: Parts) -> Any:
    """Return Triton's error for a failure that is not the request's; the log gets the rest."""
    pb = parts.pb_utils
    pb.Logger.log_error("".join(traceback.format_exception(error)))
    return pb.TritonError(failure_line(error), pb.TritonError.INTERNAL)
