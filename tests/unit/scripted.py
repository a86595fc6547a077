"""A Triton in this process that behaves as a test prescribes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

from llmserve.client.messages import pack_texts, unpack_texts

CONFIG = """
name: "m"
model_transaction_policy { decoupled: true }
input { name: "text_input" data_type: TYPE_STRING dims: [1] }
output { name: "text_output" data_type: TYPE_STRING dims: [1] }
"""


class Scripted(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Sends ``pieces``; ``finish`` is "complete", "early" (no final response) or "silent".

    If there is a ``reason``, the last piece has it, and the number of pieces as that of tokens.
    """

    def __init__(self) -> None:
        self.pieces = ["cut ", "off"]
        self.finish = "complete"
        self.reason = ""
        self.messages: list[str] = []
        self.delay = 0.0
        self.prompts: list[str] = []
        self.stopped = threading.Event()

    def ModelConfig(self, request: Any, context: Any) -> Any:
        # A C string ends at its first NUL, so Triton reads no further.
        if request.name.partition("\0")[0] != "m":
            unknown = f"Request for unknown model: '{request.name}' is not found"
            context.abort(grpc.StatusCode.NOT_FOUND, unknown)
        config = text_format.Parse(CONFIG, model_config_pb2.ModelConfig())
        return service_pb2.ModelConfigResponse(config=config)

    def ModelStreamInfer(self, requests: Any, context: Any) -> Iterator[Any]:
        (request,) = requests
        self.prompts += unpack_texts(request.raw_input_contents[0])
        self.messages.append(request.parameters["messages"].string_param)
        time.sleep(self.delay)
        for number, text in enumerate(self.pieces, start=1):
            message = service_pb2.ModelStreamInferResponse()
            message.infer_response.id = request.id
            message.infer_response.outputs.add(name="text_output", datatype="BYTES", shape=[1])
            message.infer_response.raw_output_contents.append(pack_texts([text]))
            if self.reason and number == len(self.pieces):
                end = {"finish_reason": ("BYTES", pack_texts([self.reason]))}
                end["num_output_tokens"] = ("INT32", number.to_bytes(4, "little"))
                for name, (datatype, raw) in end.items():
                    message.infer_response.outputs.add(name=name, datatype=datatype, shape=[1])
                    message.infer_response.raw_output_contents.append(raw)
            yield message
        if self.finish == "silent":
            self.stopped.wait(20)
        elif self.finish == "complete":
            assert request.parameters["triton_enable_empty_final_response"].bool_param
            message = service_pb2.ModelStreamInferResponse()
            message.infer_response.id = request.id
            message.infer_response.parameters["triton_final_response"].bool_param = True
            yield message

    def RepositoryIndex(self, request: Any, context: Any) -> Any:
        if self.finish == "silent":
            self.stopped.wait(20)
        context.abort(grpc.StatusCode.UNAVAILABLE, "This protocol is restricted, expecting header")

    def ModelStatistics(self, request: Any, context: Any) -> Any:
        names = ("m", "other")
        return service_pb2.ModelStatisticsResponse(model_stats=[{"name": name} for name in names])

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Listen on a free port and yield its address."""
        server = grpc.server(ThreadPoolExecutor(8))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        self.stopped.set()
        server.stop(None)
