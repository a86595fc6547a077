"""Refuses prompts that are too long for their model, before they wait for it."""

from __future__ import annotations

from llmserve_gateway.catalog import Catalog
from llmserve_gateway.errors import bad_request
from llmserve_gateway.text_requests import ParsedRequest
from llmserve_gateway.value_requests import ValueRequest


async def check_fits(request: ParsedRequest | ValueRequest, catalog: Catalog) -> None:
    """Refuse a prompt that cannot fit into its model, before it counts or the model reads it."""
    if request.cuts:
        return
    context = await catalog.context_length(request.model)
    longest = await catalog.longest_prompt(request.model)
    messages = request.options.get("messages") or ()
    for prompt in request.prompts:
        if isinstance(prompt, str):
            contents = [message.get("content") or "" for message in messages]
            parts = [p for c in contents if not isinstance(c, str) for p in c]
            texts = [c for c in contents if isinstance(c, str)] + [p.get("text", "") for p in parts]
            size = len(prompt) + sum(map(len, texts))
            limit, unit = longest, "characters"
        else:
            size, limit, unit = len(prompt), context, "tokens"
        if limit is not None and size > limit:
            raise bad_request(
                f"this model's maximum context length is {context} tokens, which the prompt's "
                f"{size} {unit} exceed: shorten it",
                "messages" if messages else request.sent.get("text_input", "prompt"),
                "context_length_exceeded",
            )
