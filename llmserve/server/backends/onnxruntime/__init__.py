"""The stand-in for ``backend: "onnxruntime"``."""
