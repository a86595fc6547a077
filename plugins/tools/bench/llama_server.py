"""llama.cpp's own server, as the package xllamacpp has it, with options of ``llama-server``.

python llama_server.py FOLDER --model FILE --port PORT …
"""

from __future__ import annotations

import argparse
import signal
import sys
from importlib import import_module
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="Where the package is unpacked.")
    for name in ("model", "alias", "host"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("port", "threads", "parallel", "ctx-size"):
        parser.add_argument(f"--{name}", required=True, type=int)
    for name in ("cache-type-k", "cache-type-v"):
        parser.add_argument(f"--{name}", default="f16")
    args = parser.parse_args()
    sys.path.insert(0, args.folder)
    package: Any = import_module("xllamacpp")
    params = package.CommonParams()
    params.model.path, params.model_alias = args.model, {args.alias}
    params.hostnames, params.port = [args.host], args.port
    params.n_parallel, params.n_ctx = args.parallel, args.ctx_size
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
    kinds = package.ggml_type
    params.cache_type_k = getattr(kinds, f"GGML_TYPE_{args.cache_type_k.upper()}")
    params.cache_type_v = getattr(kinds, f"GGML_TYPE_{args.cache_type_v.upper()}")
    server = package.Server(params)
    print(package.get_system_info(), server.listening_address, file=sys.stderr, flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
