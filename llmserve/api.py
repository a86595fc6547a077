"""What plugins may rely on: which modules are public, and the number of this state of them.

``API`` is raised when something that was public goes or changes, so that a plugin made for
another number is refused in one line instead of failing somewhere inside. What is only added
does not raise it. A plugin says what it is made for by the group of its entry point, which is
read before anything of it is imported::

    [project.entry-points."llmserve.api1"]
    acme = "acme_llmserve"

In the group ``llmserve`` a plugin says nothing, and counts as made for the current number.

``api.txt`` beside this file has everything that is public, a line each.
"""

from __future__ import annotations

API = 1
"""The number of the API that this llmserve has."""

MODULES = (
    "llmserve",
    "llmserve.builder",
    "llmserve.builder.assembly",
    "llmserve.builder.causal",
    "llmserve.builder.context",
    "llmserve.builtin",
    "llmserve.check",
    "llmserve.client",
    "llmserve.demo",
    "llmserve.errors",
    "llmserve.hookspecs",
    "llmserve.manifest",
    "llmserve.modelconfig",
    "llmserve.options",
    "llmserve.placement",
    "llmserve.roles",
    "llmserve.runtime.batch",
    "llmserve.runtime.causal",
    "llmserve.runtime.contract",
    "llmserve.runtime.errors",
    "llmserve.runtime.generation",
    "llmserve.runtime.hf_tokenizer",
    "llmserve.runtime.job",
    "llmserve.runtime.located",
    "llmserve.runtime.logprobs",
    "llmserve.runtime.model",
    "llmserve.runtime.params",
    "llmserve.runtime.protocols",
    "llmserve.runtime.request",
    "llmserve.runtime.responder",
    "llmserve.runtime.sampling",
    "llmserve.runtime.stage",
    "llmserve.runtime.text",
    "llmserve.runtime.text_formatter",
    "llmserve.server",
    "llmserve.server.backends.tensorrtllm",
    "llmserve.sources",
    "llmserve.sources.files",
    "llmserve.sources.intact",
    "llmserve.sources.vocabulary",
    "llmserve.testing",
)
"""The public modules: in these, every name without an underscore at its beginning."""
