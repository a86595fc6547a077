#!/bin/sh
# Starts Triton for an engine of @WORLD_SIZE@ processes, leader mode.
# Run it where the model's version of Triton is@WHERE@:
#
#     sh launch.sh REPOSITORY [further arguments of tritonserver]
set -e
RANK=
case "$1" in --rank=*) RANK="${1#--rank=}" && shift ;; esac
REPOSITORY="${1:?name the model repository}"
shift
if [ -z "$RANK" ]; then
  exec mpirun --allow-run-as-root \
    @RANKS@
fi
if [ "$RANK" != 0 ]; then
  # Whatever the first rank loads, the others load the engine and nothing else.
  for word do
    shift
    case "$word" in --load-model=* | --model-control-mode=*) ;; *) set -- "$@" "$word" ;; esac
  done
  set -- --model-control-mode=explicit --load-model=@ENGINE@ "$@"
fi
exec tritonserver --model-repository="$REPOSITORY" --disable-auto-complete-config \
  --backend-config=python,shm-region-prefix-name=prefix${RANK}_ "$@"
