"""The stand-in for ``platform: "pytorch_libtorch"``."""
