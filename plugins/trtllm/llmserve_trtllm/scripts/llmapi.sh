#!/bin/sh
# Starts Triton for a model on @WORLD_SIZE@ GPUs: the LLM API makes a process for each.
# Run it where the model's version of Triton is@WHERE@:
#
#     sh launch.sh REPOSITORY [further arguments of tritonserver]
set -e
REPOSITORY="${1:?name the model repository}"
shift
exec mpirun --allow-run-as-root -n 1 tritonserver --model-repository="$REPOSITORY" \
  --disable-auto-complete-config --backend-config=python,shm-region-prefix-name=prefix0_ "$@"
