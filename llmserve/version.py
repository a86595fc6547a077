"""The version, in a separate module because modules need it while ``llmserve`` is imported."""

__version__ = "0.2.0.dev0"
