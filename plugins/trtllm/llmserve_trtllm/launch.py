"""Starting Triton where one process is not enough, as NVIDIA's launch_triton_server.py does."""

from __future__ import annotations

from llmserve.plugin import BuildContext, IncompatibleError
from llmserve_trtllm.target import Target
from llmserve_trtllm.versions import Version, container_of

SCRIPT = "launch.sh"
_FIRST_WITHOUT_POOLS = Version(0, 13)
"""From here on NVIDIA's script keeps Triton itself from holding memory of the GPUs."""
_MPIRUN = "mpirun --allow-run-as-root"
_SERVER = (
    'tritonserver --model-repository="$REPOSITORY" --disable-auto-complete-config \\\n'
    "  --backend-config=python,shm-region-prefix-name=prefix{rank}_"
)
_HEAD = """#!/bin/sh
# {what}
# Run it where the model's version of Triton is{where}:
#
#     sh {script} REPOSITORY [further arguments of tritonserver]
set -e
{body}
"""
_REPOSITORY = """REPOSITORY="${1:?name the model repository}"
shift
"""
_LEADER = """RANK=
case "$1" in --rank=*) RANK="${{1#--rank=}}" && shift ;; esac
{repository}if [ -z "$RANK" ]; then
  exec {mpirun} \\
    {ranks}
fi
if [ "$RANK" != 0 ]; then
  # Whatever the first rank loads, the others load the engine and nothing else.
  for word do
    shift
    case "$word" in --load-model=* | --model-control-mode=*) ;; *) set -- "$@" "$word" ;; esac
  done
  set -- --model-control-mode=explicit --load-model={model} "$@"
fi
exec {server} "$@"
"""
_NO_POOLS = """set -- --pinned-memory-pool-byte-size=0 --enable-peer-access=false "$@"
GPU=0
for _ in $(nvidia-smi --list-gpus | cut -d: -f1 | tr -d ' '); do
  set -- --cuda-memory-pool-byte-size=$GPU:0 "$@"
  GPU=$((GPU + 1))
done
"""


def write_engine_script(
    context: BuildContext, engine_model: str, world_size: int, target: Target
) -> None:
    """Write how the server is started for an engine of several processes."""
    mode = str(context.options["multi_gpu"])
    if target.is_first and mode == "orchestrator":
        raise IncompatibleError(
            f"TensorRT-LLM {target.version} knows no orchestrator",
            mend="leave out --set multi_gpu=orchestrator",
        )
    if mode == "orchestrator":
        body = orchestrator(target.version)
    elif world_size > 1:
        body = leader(world_size, engine_model)
    else:
        return
    what = f"Starts Triton for an engine of {world_size} processes, {mode} mode."
    _write(context, target.version, what, body)


def write_llmapi_script(context: BuildContext, target: Target) -> None:
    """Write how the server is started where the LLM API spreads a model over several GPUs."""
    gpus = int(target.options["tensor_parallel"]) * int(target.options["pipeline_parallel"])
    if gpus == 1:
        return
    body = f'{_REPOSITORY}exec {_MPIRUN} -n 1 {_SERVER.format(rank=0)} "$@"'
    what = f"Starts Triton for a model on {gpus} GPUs: the LLM API makes a process for each."
    _write(context, target.version, what, body)


def leader(world_size: int, engine_model: str) -> str:
    """One server for each rank: the first serves, the others only load the engine."""
    ranks = (f'-n 1 sh "$0" --rank={rank} "$REPOSITORY" "$@"' for rank in range(world_size))
    return _LEADER.format(
        repository=_REPOSITORY,
        mpirun=_MPIRUN,
        ranks=" : \\\n    ".join(ranks),
        model=engine_model,
        server=_SERVER.format(rank="${RANK}"),
    ).rstrip()


def orchestrator(version: Version) -> str:
    """One server that starts the engines' processes itself, as several instances need it."""
    return (
        "export TRTLLM_ORCHESTRATOR=1 TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES=1\n"
        + _REPOSITORY
        + (_NO_POOLS if version >= _FIRST_WITHOUT_POOLS else "")
        + f'exec {_MPIRUN} -n 1 {_SERVER.format(rank=0)} "$@"'
    )


def _write(context: BuildContext, version: Version, what: str, body: str) -> None:
    image = container_of(version)
    where = f" ({image})" if image else ""
    path = context.folder.parent / SCRIPT
    path.parent.mkdir(parents=True, exist_ok=True)
    text = _HEAD.format(what=what, where=where, script=SCRIPT, body=body)
    path.write_text(text, encoding="utf-8")
