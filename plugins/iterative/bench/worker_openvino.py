"""OpenVINO GenAI's continuous batching, in a Python that has it: prompts in, seconds out."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from importlib.metadata import version


def main() -> None:
    """Export the model, compile it for bf16 and answer until the input ends."""
    import numpy as np
    import openvino  # type: ignore[import-not-found,unused-ignore]
    import openvino_genai as genai  # type: ignore[import-not-found,unused-ignore]
    from optimum.exporters.openvino import main_export  # type: ignore[import-not-found,unused-ignore]

    with tempfile.TemporaryDirectory() as folder:
        main_export(sys.argv[1], folder, task="text-generation-with-past", convert_tokenizer=False)
        scheduler = genai.SchedulerConfig()
        scheduler.max_num_seqs = 64
        scheduler.max_num_batched_tokens = 1024
        scheduler.cache_size = 1
        scheduler.enable_prefix_caching = False
        pipeline = genai.ContinuousBatchingPipeline(
            folder, scheduler, "CPU", {"INFERENCE_PRECISION_HINT": sys.argv[2]}
        )
        name = f"OpenVINO GenAI {version('openvino-genai')}, {sys.argv[2]}"
        print(json.dumps(name), flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            config = genai.GenerationConfig()
            config.max_new_tokens = asked["tokens"]
            config.ignore_eos = True
            config.do_sample = False
            prompts = [openvino.Tensor(np.array([prompt])) for prompt in asked["prompts"]]
            begun = time.perf_counter()
            answers = pipeline.generate(prompts, [config] * len(prompts))
            seconds = time.perf_counter() - begun
            made = sum(len(answer.m_generation_ids[0]) for answer in answers)
            print(json.dumps([made, seconds]), flush=True)


if __name__ == "__main__":
    main()
