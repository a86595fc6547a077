"""A Dockerfile for the container of the version at hand, which brings what TensorRT-LLM needs."""

from __future__ import annotations

from importlib.metadata import version

from llmserve.builder.context import BuildContext
from llmserve_trtllm.models.target import Target
from llmserve_trtllm.versions import container_of

FILE = "Dockerfile"
_PACKAGES = ("llmserve", "llmserve-trtllm", "pluggy")
_TEXT = """# TensorRT-LLM {version} with what the models around the engine need, and nothing that
# would replace a package of its own:
#
#     docker build -t {name}-trtllm -f {name}/{file} .
#
# Packages that are on no index yet come from a folder of wheels: --build-context wheels=DIR

FROM scratch AS wheels

FROM {image}
RUN --mount=type=bind,from=wheels,target=/wheels \\
    pip install --no-cache-dir --no-deps --find-links /wheels \\
        {packages}
CMD ["tritonserver", "--model-repository=/models"]
"""


def write_dockerfile(context: BuildContext, target: Target) -> None:
    """Write it beside the ensemble, where a container of the version is known."""
    image = container_of(target.version)
    if image is None:
        return
    text = _TEXT.format(
        version=target.version,
        name=context.name,
        file=FILE,
        image=image,
        packages=" ".join(f"{name}=={version(name)}" for name in _PACKAGES),
    )
    path = context.folder.parent / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
