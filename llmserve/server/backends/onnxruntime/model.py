"""What Triton loads for ``backend: "onnxruntime"`` where it has no backend of that name."""

from llmserve.server.backends.onnxruntime.backend import TritonPythonModel as TritonPythonModel
