"""Comparisons that many ask for, ready made.

They name recipes of plugins that need not be installed; a build says so where one is not.
"""

from __future__ import annotations

from collections.abc import Mapping

PAIRS: Mapping[str, tuple[str, str]] = {
    "static-inflight": ("static=iterative:batching=static", "inflight=iterative:"),
    "static-iterative": ("hf=hf:", "iterative=iterative:"),
    "trtllm-static-inflight": ("static=trtllm:batching=static", "inflight=trtllm:"),
    "hf-trtllm": ("hf=hf:", "trtllm=trtllm:"),
    "sequence-direct-oldest": (
        "direct=gpt2:batching=sequence-direct",
        "oldest=gpt2:batching=sequence-oldest",
    ),
}
"""Names of pairs to their two subjects, as :func:`llmserve.measure.subjects.parse_subject` reads
them; the first is what the second is held against."""
