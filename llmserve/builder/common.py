"""Options that every model has, whatever it is made of."""

from __future__ import annotations

from llmserve.options import INT32_MAX, Option

SOURCE_OPTIONS = (
    Option("revision", "", "Branch, tag or commit of a model on the hub."),
    Option(
        "weights",
        "auto",
        "copy puts the model's files into the repository, reference leaves them where they are; "
        "auto copies local folders and leaves the hub's in its cache.",
        choices=("auto", "copy", "reference"),
    ),
    Option("trust_remote_code", False, "Run Python code that comes with the model."),
    Option("pickle", False, "Load pickled weights, which can run code."),
)

REQUEST_OPTIONS = (
    Option(
        "max_tokens",
        64,
        "Longest answer of a request that does not say.",
        minimum=1,
        maximum=INT32_MAX,
    ),
    Option("stream", False, "Send pieces to a request that does not say."),
    Option("chat", False, "Treat text_input as a user's message in the model's chat template."),
    Option("echo", False, "Begin the answer with the prompt, as Triton's tutorial does."),
)
