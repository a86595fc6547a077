"""In-flight or static, and by which policy: the words of each version, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

from llmserve.errors import IncompatibleError
from llmserve_trtllm.versions import FIRST_UNBATCHED_V1, Version

INFLIGHT = "inflight"
STATIC = "static"
NO_EVICT = "guaranteed_no_evict"
UTILIZATION = "max_utilization"
ALIAS = "guaranteed_completion"
SCHEDULERS = (NO_EVICT, UTILIZATION, ALIAS)

MODEL_TYPES = {INFLIGHT: "inflight_fused_batching", STATIC: "V1"}


def check_batching(name: str) -> str:
    """Refuse a batching strategy that is neither of TensorRT-LLM's."""
    if name not in MODEL_TYPES:
        raise IncompatibleError(
            f"TensorRT-LLM cannot be driven by batching {name!r}",
            mend=f"choose one of {', '.join(MODEL_TYPES)}",
        )
    return name


def scheduler_of(asked: str, report: Callable[[str], None]) -> str:
    """Return the policy that is meant; the tutorials' word for it is taken with a warning."""
    if asked != ALIAS:
        return asked
    report(
        f"warning: no version of TensorRT-LLM has ever known {ALIAS}: the word is taken for "
        f"{NO_EVICT}, which is what those that read it fell back to"
    )
    return NO_EVICT


def engine_batching(batching: str, scheduler: str, version: Version) -> dict[str, str]:
    """Return the parameters of the engine backend, or refuse what the version cannot do."""
    if batching == STATIC and version >= FIRST_UNBATCHED_V1:
        raise IncompatibleError(
            f"TensorRT-LLM {version} does not run static batches (V1) with an engine: its executor "
            "refuses them",
            mend="build with --batching inflight, or with --set layout=llmapi for static batches",
        )
    return {
        "gpt_model_type": MODEL_TYPES[check_batching(batching)],
        "batch_scheduler_policy": scheduler,
    }


def llmapi_policy(batching: str, scheduler: str) -> str:
    """Return the LLM API's ``capacity_scheduler_policy``."""
    if check_batching(batching) == STATIC:
        if scheduler != NO_EVICT:
            raise IncompatibleError(
                f"static batches have no scheduler {scheduler}",
                mend="leave it out, or build with --batching inflight",
            )
        return "STATIC_BATCH"
    return scheduler.upper()
