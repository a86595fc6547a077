"""Starting Triton for an engine of several processes, as NVIDIA's own launcher does."""

from __future__ import annotations

from collections.abc import Sequence

from llmserve.builder.context import BuildContext
from llmserve.errors import IncompatibleError
from llmserve_trtllm.models.target import Target
from llmserve_trtllm.versions import container_of

SCRIPT = "launch.sh"
_MPIRUN = ("mpirun", "--allow-run-as-root")
_HEAD = """#!/bin/sh
# {what}
# Run it where the engine's version of Triton is{where}:
#
#     sh {script} REPOSITORY [further arguments of tritonserver]
set -e
REPOSITORY="${{1:?name the model repository}}"
shift
{body}
"""


def write_scripts(
    context: BuildContext, engine_model: str, world_size: int, target: Target
) -> None:
    """Write how the server is started, if one process is not enough."""
    mode = str(context.options["multi_gpu"])
    if target.is_first and mode == "orchestrator":
        raise IncompatibleError(
            f"TensorRT-LLM {target.version} knows no orchestrator",
            mend="leave out --set multi_gpu=orchestrator",
        )
    if world_size == 1 and mode == "leader":
        return
    body = orchestrator() if mode == "orchestrator" else leader(world_size, engine_model)
    image = container_of(target.version)
    text = _HEAD.format(
        what=f"Starts Triton for an engine of {world_size} processes, {mode} mode.",
        where=f" ({image})" if image else "",
        script=SCRIPT,
        body=body,
    )
    path = context.folder.parent / SCRIPT
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def leader(world_size: int, engine_model: str) -> str:
    """One server for each rank: the first serves, the others only load the engine."""
    ranks = [
        " ".join(["-n 1", *server_arguments(rank, engine_model)]) for rank in range(world_size)
    ]
    return f"exec {' '.join(_MPIRUN)} \\\n  " + " : \\\n  ".join(ranks)


def orchestrator() -> str:
    """One server that starts the engine's processes itself, as several models need it."""
    own = " ".join(server_arguments(0, ""))
    return (
        "export TRTLLM_ORCHESTRATOR=1 TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES=1\n"
        f"exec {' '.join(_MPIRUN)} -n 1 {own}"
    )


def server_arguments(rank: int, engine_model: str) -> Sequence[str]:
    """Return the words of one rank's server."""
    only = ["--model-control-mode=explicit", f"--load-model={engine_model}"] if rank else []
    return [
        "tritonserver",
        '--model-repository="$REPOSITORY"',
        *only,
        "--disable-auto-complete-config",
        f"--backend-config=python,shm-region-prefix-name=prefix{rank}_",
        '"$@"',
    ]
