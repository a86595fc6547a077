"""Which models that read images are built for the LLM API."""

from __future__ import annotations

from llmserve.plugin import BuildContext, IncompatibleError, is_for_text, sees_images
from llmserve_trtllm.versions import FIRST_IMAGES, Version

KINDS = ("gemma3", "llava_next", "mistral3", "qwen2_5_vl", "qwen2_vl")
"""The types of models whose processors in TensorRT-LLM were read.

They are Gemma3InputProcessor (_torch/models/modeling_gemma3vl.py), LlavaNextInputProcessor
(modeling_llava_next.py), Mistral3InputProcessor (modeling_mistral.py) and Qwen2VLInputProcessorBase
(modeling_qwen2vl.py). Each makes its tokens of a text and of images of Pillow. For a type that has
no processor, create_input_processor (inputs/registry.py) takes one that leaves images out without a
word.
"""


def reads_images(context: BuildContext, version: Version) -> bool:
    """Return whether a build's model is to read images; refuse one that would, but not here."""
    source, options = context.source, context.options
    if not sees_images(source) or is_for_text(context) or not options["max_images"]:
        return False
    others = "build it with --plugin vllm or hf, or for text alone with --set max_images=0"
    kind = source.config()["model_type"]
    if version < FIRST_IMAGES:
        raise IncompatibleError(
            f"{source.asked} reads images, which is for TensorRT-LLM {FIRST_IMAGES} or later, and "
            f"this build is for {version}",
            hint=f"build it for a later version; or {others}",
        )
    if kind not in KINDS:
        raise IncompatibleError(
            f"{source.asked} reads images, and TensorRT-LLM is not known to read them with models "
            f"of the type {kind}, as it is with {', '.join(KINDS)}",
            hint=others,
        )
    if options["stand_in"]:
        raise IncompatibleError(
            "the stand-in for TensorRT-LLM reads no images",
            hint="leave out --set stand_in=true, or build with --plugin hf",
        )
    if options["enable_kv_cache_reuse"] is True:
        # Its keys have the images' hashes only where making those succeeds, and a second request
        # with images can end the engine's loop for all (NVIDIA/TensorRT-LLM#14125, in 1.2).
        raise IncompatibleError(
            "enable_kv_cache_reuse can give answers about another image, or end the engine",
            hint="leave it out: with a model that reads images it is off",
        )
    return True
