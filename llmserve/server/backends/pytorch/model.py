"""What Triton loads for ``platform: "pytorch_libtorch"`` where it has no backend of that name."""

from llmserve.server.backends.pytorch.backend import TritonPythonModel as TritonPythonModel
