set -- --pinned-memory-pool-byte-size=0 --enable-peer-access=false "$@"
GPU=0
for _ in $(nvidia-smi --list-gpus | cut -d: -f1 | tr -d ' '); do
  set -- --cuda-memory-pool-byte-size=$GPU:0 "$@"
  GPU=$((GPU + 1))
done
