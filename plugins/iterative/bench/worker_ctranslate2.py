"""CTranslate2 at its best on a CPU, in a Python that has it: prompts in, seconds out, by line."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path


def main() -> None:
    """Convert the model to int8 and answer until the input ends."""
    import ctranslate2  # type: ignore[import-not-found,unused-ignore]
    from ctranslate2.converters import TransformersConverter  # type: ignore[import-not-found,unused-ignore]

    words = json.loads((Path(sys.argv[1]) / "tokenizer.json").read_text())["model"]["vocab"]
    names = {number: word for word, number in words.items()}
    with tempfile.TemporaryDirectory() as folder:
        TransformersConverter(sys.argv[1]).convert(folder, quantization="int8", force=True)
        generator = ctranslate2.Generator(folder, device="cpu", compute_type="int8")
        print(json.dumps(f"CTranslate2 {version('ctranslate2')}, int8"), flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            prompts = [[names[token] for token in prompt] for prompt in asked["prompts"]]
            begun = time.perf_counter()
            answers = generator.generate_batch(
                prompts,
                max_length=asked["tokens"],
                min_length=asked["tokens"],
                end_token=[],
                include_prompt_in_result=False,
            )
            seconds = time.perf_counter() - begun
            made = sum(len(answer.sequences_ids[0]) for answer in answers)
            print(json.dumps([made, seconds]), flush=True)


if __name__ == "__main__":
    main()
