"""The layouts of a model: llmserve's tensors, or exactly those of Triton's two tutorials."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmserve.plugin import Option

if TYPE_CHECKING:
    from llmserve.plugin import ModelConfig

TUTORIAL = "tutorial"
"""``llama_python`` of the tutorial that compares TensorRT-LLM with Hugging Face."""
TUTORIAL_TEXT = "tutorial-text"
"""``falcon7b`` of the tutorial that deploys Hugging Face models."""

LAYOUT_OPTION = Option(
    "layout",
    "llmserve",
    "tutorial has the tensors of the model llama_python in Triton's tutorials: text_input, "
    "max_tokens as UINT32, and text_output; tutorial-text those of their falcon7b, without "
    "max_tokens. Both are unbatched, repeat the prompt and do not stream, unless told otherwise.",
    choices=("llmserve", TUTORIAL, TUTORIAL_TEXT),
    implies=(
        *(
            (layout, *default)
            for layout in (TUTORIAL, TUTORIAL_TEXT)
            for default in (("max_batch_size", 0), ("decoupled", False), ("echo", True))
        ),
        # The tutorial's max_output_length.
        (TUTORIAL_TEXT, "max_tokens", 15),
    ),
)


def apply_layout(config: ModelConfig, layout: str) -> None:
    """Replace the tensors in a configuration by those of a tutorial's model.

    Everything else that a request can set still works as a request parameter. A model without
    ``max_tokens`` exists because perf_analyzer sends a random number as any input that it finds.
    """
    from tritonclient.grpc import model_config_pb2 as pb

    if layout not in (TUTORIAL, TUTORIAL_TEXT):
        return
    # With a batch dimension, each row has one prompt.
    one_prompt = layout == TUTORIAL_TEXT or config.max_batch_size > 0
    size = 1 if one_prompt else -1
    del config.input[:], config.output[:]
    config.input.add(name="text_input", data_type=pb.TYPE_STRING, dims=[size])
    if layout == TUTORIAL:
        # The tutorial requires it; here it has a default, so that curl can leave it out.
        config.input.add(name="max_tokens", data_type=pb.TYPE_UINT32, dims=[size], optional=True)
    config.output.add(name="text_output", data_type=pb.TYPE_STRING, dims=[-1])
