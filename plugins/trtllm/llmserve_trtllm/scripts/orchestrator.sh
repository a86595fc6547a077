#!/bin/sh
# Starts Triton for an engine of @WORLD_SIZE@ processes, orchestrator mode.
# Run it where the model's version of Triton is@WHERE@:
#
#     sh launch.sh REPOSITORY [further arguments of tritonserver]
set -e
export TRTLLM_ORCHESTRATOR=1 TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES=1
REPOSITORY="${1:?name the model repository}"
shift
# As in NVIDIA's script, Triton itself reserves no GPU memory.
set -- --pinned-memory-pool-byte-size=0 --enable-peer-access=false "$@"
GPU=0
for _ in $(nvidia-smi --list-gpus | cut -d: -f1 | tr -d ' '); do
  set -- --cuda-memory-pool-byte-size=$GPU:0 "$@"
  GPU=$((GPU + 1))
done
exec mpirun --allow-run-as-root -n 1 tritonserver --model-repository="$REPOSITORY" \
  --disable-auto-complete-config --backend-config=python,shm-region-prefix-name=prefix0_ "$@"
