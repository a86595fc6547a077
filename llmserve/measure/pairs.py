"""Comparisons that many ask for, ready made.

They name recipes of plugins that need not be installed; a build says so where one is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Pair:
    """Two subjects, as :func:`llmserve.measure.subjects.parse_subject` reads them.

    The first is what the second is held against. ``common`` is what both are built with as far
    as they know it, unless one of ``unless`` is asked for.
    """

    first: str
    second: str
    common: Mapping[str, str] = field(default_factory=dict)
    unless: tuple[str, ...] = ()

    def defaults(self, asked: Mapping[str, str]) -> Mapping[str, str]:
        """Give what both are built with where nothing else is asked for.

        >>> Pair("a:", "b:", {"size": "8"}, ("size", "sizes")).defaults({"sizes": "1 2"})
        {}
        """
        return {} if any(name in asked for name in self.unless) else self.common


# Any model can be served so, and without TensorRT-LLM a stand-in answers, which is told with
# every figure. Who has an engine says where: --build engine=DIR.
_LLMAPI = {"layout": "llmapi", "stand_in": "true"}
_ENGINE = ("layout", "engine", "build_engine")

PAIRS: Mapping[str, Pair] = {
    "static-inflight": Pair("static=iterative:batching=static", "inflight=iterative:"),
    "static-iterative": Pair("static=hf:batching=static", "iterative=iterative:"),
    "trtllm-static-inflight": Pair(
        "static=trtllm:batching=static", "inflight=trtllm:", _LLMAPI, _ENGINE
    ),
    "hf-trtllm": Pair("hf=hf:", "trtllm=trtllm:", _LLMAPI, _ENGINE),
    "sequence-direct-oldest": Pair(
        "direct=gpt2-onnx:batching=sequence-direct", "oldest=gpt2-onnx:batching=sequence-oldest"
    ),
}
"""Pairs by their names."""
