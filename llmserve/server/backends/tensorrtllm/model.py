"""What Triton loads for ``backend: "tensorrtllm"`` where there is no TensorRT-LLM."""

from llmserve.server.backends.tensorrtllm.backend import TritonPythonModel as TritonPythonModel
