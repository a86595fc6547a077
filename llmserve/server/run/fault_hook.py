"""Tells a command or an address of a user (``--on-fault``) that answers are wrong."""

from __future__ import annotations

import json
import shlex
import subprocess
import urllib.request
from collections.abc import Mapping
from typing import Any

from llmserve.errors import ServerError

_PATIENCE = 30.0


def tell_fault(told: str, content: Mapping[str, Any]) -> None:
    """Give a command JSON on its input, or send it to an address; raise if that fails.

    Neither the command nor the address is in the error: either may have a secret.
    """
    body = json.dumps(content).encode()
    if told.startswith(("http://", "https://")):
        headers = {"content-type": "application/json"}
        try:
            # The scheme is checked above.
            request = urllib.request.Request(told, body, headers)  # noqa: S310
            urllib.request.urlopen(request, timeout=_PATIENCE).close()  # noqa: S310
        except (OSError, ValueError) as error:
            code = getattr(error, "code", None)
            raise ServerError(f"it answered {code}" if code else "no answer") from None
        return
    try:
        done = subprocess.run(
            shlex.split(told), input=body, timeout=_PATIENCE, check=False,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ServerError(f"it did not end in {_PATIENCE:g} s") from None
    except (OSError, ValueError) as error:
        raise ServerError(getattr(error, "strerror", None) or "it cannot be read") from None
    if done.returncode:
        raise ServerError(f"its exit code was {done.returncode}")
