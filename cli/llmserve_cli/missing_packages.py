"""Which of llmserve's own packages has a command or a plugin that is not installed."""

from __future__ import annotations

from llmserve.errors import LLMServeError, MissingPluginError

COMMANDS = {
    **dict.fromkeys(("bench", "compare", "sweep", "report"), "llmserve-bench"),
    "certify": "llmserve-certify",
    **dict.fromkeys(("gateway", "key", "release"), "llmserve-gateway"),
    "deploy": "llmserve-deploy",
}
PLUGINS = {
    **dict.fromkeys(("hf", "iterative", "openvino", "trtllm", "vllm"), ""),
    **dict.fromkeys(("embed", "rerank", "classify"), "llmserve-embed"),
    **dict.fromkeys(("gpt2-onnx", "gpt2-torchscript"), "llmserve-gpt2"),
}
"""Names of ``--plugin``, and the packages of those whose package has another name."""


def comes_with(package: str) -> str:
    from llmserve.plugin import install_command

    return f"comes with {package}: {install_command(package)}"


def explained(error: LLMServeError) -> str:
    """Return the line for an error, which names the package to install if that is known."""
    if isinstance(error, MissingPluginError) and error.name in PLUGINS:
        package = PLUGINS[error.name] or f"llmserve-{error.name}"
        return f"plugin {error.name} is not installed, it {comes_with(package)}"
    return str(error)
