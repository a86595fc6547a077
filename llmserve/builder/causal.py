"""Putting a causal language model into a repository: what plugins over transformers share."""

from __future__ import annotations

from typing import Any

from llmserve.builder.context import BuildContext
from llmserve.errors import ModelSourceError
from llmserve.placement import place_instances
from llmserve.sources import ModelSource
from llmserve.sources.files import weight_files

_CAUSAL = ("ForCausalLM", "LMHeadModel")


def place_causal_model(context: BuildContext) -> dict[str, Any]:
    """Check the model, place its weights and say where it runs.

    Returns the settings that ``llmserve.runtime.causal.load`` reads. The generator has to have
    the options of ``llmserve.placement``.
    """
    options = context.options
    check_causal(context.source, trust_remote_code=bool(options["trust_remote_code"]))
    place_instances(context.config, str(options["device"]), int(options["instances"]))
    pickle = bool(options["pickle"])
    return {
        **context.place(weight_files(context.source, pickle=pickle), "model"),
        "device": options["device"],
        "dtype": options["dtype"],
        "pickle": pickle,
    }


def check_causal(source: ModelSource, *, trust_remote_code: bool) -> None:
    """Refuse what is no causal language model, and code nobody asked to run."""
    config = source.config()
    names = config.get("architectures") or []
    own_code = "AutoModelForCausalLM" in (config.get("auto_map") or {})
    if not own_code and any(name.endswith(_CAUSAL) for name in names):
        return
    # Importing transformers takes a second, so only what the name does not settle gets here.
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if config.get("model_type") in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return
    if own_code and trust_remote_code:
        return
    if own_code:
        raise ModelSourceError(
            f"{source.asked} comes with Python code of its own",
            mend="read it, then allow it with --set trust_remote_code=true",
        )
    kind = ", ".join(names) or config.get("model_type") or "of an unknown architecture"
    raise ModelSourceError(f"{source.asked} is no causal language model: it is {kind}")
