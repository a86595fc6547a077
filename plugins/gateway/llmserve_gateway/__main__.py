"""The gateway as a separate process, as ``llmserve serve`` starts it."""

from __future__ import annotations

import sys

from llmserve.errors import LLMServeError
from llmserve_gateway.commands import gateway

if __name__ == "__main__":
    try:
        gateway()
    except LLMServeError as error:
        print(f"llmserve gateway: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(error.exit_code)
