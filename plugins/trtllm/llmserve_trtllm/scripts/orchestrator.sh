#!/bin/sh
# Starts Triton for an engine of @WORLD_SIZE@ processes, orchestrator mode.
# Run it where the model's version of Triton is@WHERE@:
#
#     sh launch.sh REPOSITORY [further arguments of tritonserver]
set -e
export TRTLLM_ORCHESTRATOR=1 TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES=1
REPOSITORY="${1:?name the model repository}"
shift
@NO_POOLS@exec mpirun --allow-run-as-root -n 1 tritonserver --model-repository="$REPOSITORY" \
  --disable-auto-complete-config --backend-config=python,shm-region-prefix-name=prefix0_ "$@"
