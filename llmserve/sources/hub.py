"""Models on the Hugging Face hub: fetched once into ``HF_HOME``, pinned to a commit.

A token is taken from ``HF_TOKEN`` alone and handed to the hub's own client; it is never
written, logged or put into a configuration.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from llmserve.errors import ModelSourceError

_NEEDED = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py"]


def fetch(
    repo_id: str,
    *,
    revision: str,
    pickle: bool,
    weights: Sequence[str],
    report: Callable[[str], None],
) -> Path:
    """Return the folder of a snapshot; its name is the commit."""
    needed = [*_NEEDED, *weights, "*.bin"] if pickle else [*_NEEDED, *weights]
    try:
        from huggingface_hub import errors, snapshot_download
        from huggingface_hub.utils import disable_progress_bars
    except ImportError:
        raise ModelSourceError(
            f"{repo_id} is on the hub, and huggingface_hub is not installed",
            mend="pip install huggingface_hub, or name a local folder",
        ) from None
    if not sys.stderr.isatty():
        disable_progress_bars()
    report(f"fetching {repo_id}")
    try:
        return Path(
            snapshot_download(
                repo_id,
                revision=revision or None,
                # To the hub's client * goes on past a slash: without this, onnx/ and original/,
                # which nothing here reads, would come too.
                ignore_patterns=["*/*"],
                allow_patterns=needed,
                # False keeps a token that was once stored by a login out of it.
                token=os.environ.get("HF_TOKEN") or False,
            )
        )
    except errors.GatedRepoError:
        raise ModelSourceError(
            f"{repo_id} is gated",
            mend="ask for access on its page, then set HF_TOKEN to your token",
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelSourceError(
            f"{repo_id} has no revision {revision!r}", mend="see its page for branches and tags"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelSourceError(
            f"the hub has no model {repo_id!r}, or it is private",
            mend="check the id; for a private model set HF_TOKEN to your token",
        ) from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        raise ModelSourceError(
            f"{repo_id} is not in the cache, and the hub cannot be reached",
            mend="name a local folder, or fill HF_HOME on a machine with a connection",
        ) from None
    except (errors.HfHubHTTPError, OSError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelSourceError(f"{repo_id} could not be fetched: {first}") from None
