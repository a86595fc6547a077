"""Every parameter of the templates that makes sense for a model of text, as a typed option.

A parameter that keeps its default is left out of the configuration, which to the backend is the
same as a placeholder that was never filled in, and a version that does not have it is not asked.
"""

from __future__ import annotations

from collections.abc import Mapping

from llmserve.errors import IncompatibleError
from llmserve.options import Option
from llmserve_trtllm.parameters.cache import CACHE, LORA
from llmserve_trtllm.parameters.decoding import DECODING, GUIDED
from llmserve_trtllm.parameters.parameter import Parameter
from llmserve_trtllm.parameters.runtime import RUNTIME
from llmserve_trtllm.versions import Version

PARAMETERS: tuple[Parameter, ...] = (*RUNTIME, *CACHE, *LORA, *DECODING, *GUIDED)

OPTIONS: tuple[Option, ...] = tuple(parameter.option for parameter in PARAMETERS)


def engine_parameters(options: Mapping[str, object], version: Version) -> dict[str, str]:
    """Return the parameters of the model ``tensorrt_llm``; refuse what the version lacks.

    >>> defaults = {option.name: option.default for option in OPTIONS}
    >>> engine_parameters(defaults, Version(0, 19))
    {'exclude_input_in_output': 'true', 'kv_cache_free_gpu_mem_fraction': '0.9'}
    """
    found = {}
    for parameter in PARAMETERS:
        value = options[parameter.option.name]
        if parameter.exists_in(version):
            if parameter.always or value != parameter.option.default:
                found[parameter.key] = _text(value)
        elif value != parameter.option.default:
            raise IncompatibleError(
                f"TensorRT-LLM {version} has no {parameter.option.name}: {parameter.when}",
                mend=parameter.instead or f"leave out --set {parameter.option.name}",
            )
    return found


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
