"""What Triton loads for ``backend: "tensorrtllm"`` where there is no TensorRT-LLM."""

from llmserve_standins.tensorrtllm.backend import TritonPythonModel as TritonPythonModel
