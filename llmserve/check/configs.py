"""What a single model's configuration and folder must agree on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tritonclient.grpc import model_config_pb2 as pb

from llmserve.check.problem import Problem
from llmserve.modelconfig import ModelConfig

_FILES = {
    "python": "model.py",
    "onnxruntime": "model.onnx",
    "pytorch": "model.pt",
    "tensorrt": "model.plan",
}
_PLATFORMS = {"pytorch_libtorch": "pytorch", "onnxruntime_onnx": "onnxruntime"}


def check_config(folder: Path, config: ModelConfig) -> Iterator[Problem]:
    """Check a configuration against its folder and against itself."""
    yield from _check_name(folder, config)
    yield from _check_versions(folder, config)
    yield from _check_tensors(folder.name, config)
    yield from _check_batching(folder.name, config)
    for group in config.instance_group:
        if group.kind == pb.ModelInstanceGroup.KIND_GPU and not group.gpus:
            yield Problem(
                folder.name,
                "KIND_GPU without gpus makes a copy of the model on every GPU",
                "list the GPUs, or use KIND_MODEL",
                fatal=False,
            )


def _check_name(folder: Path, config: ModelConfig) -> Iterator[Problem]:
    if config.name and config.name != folder.name:
        yield Problem(
            folder.name,
            f"its configuration is called {config.name!r}",
            "give the folder and the configuration the same name",
        )


def _check_versions(folder: Path, config: ModelConfig) -> Iterator[Problem]:
    versions = [child for child in folder.iterdir() if child.is_dir() and child.name.isdigit()]
    if not versions:
        yield Problem(folder.name, "it has no version folder", "put its files into a folder 1/")
        return
    backend = config.backend or _PLATFORMS.get(config.platform, "")
    if config.platform == "ensemble":
        return
    if not backend:
        yield Problem(folder.name, "it names no backend", 'write backend: "python", for example')
        return
    wanted = config.default_model_filename or _FILES.get(backend)
    for version in versions:
        path = version / wanted if wanted else None
        if path is None:
            continue
        if not path.exists():
            yield Problem(
                folder.name,
                f"{version.name}/{wanted} is missing",
                f"the {backend} backend loads that file",
            )
        elif backend == "python":
            yield from _check_source(folder.name, path)


def _check_source(model: str, path: Path) -> Iterator[Problem]:
    try:
        compile(path.read_bytes(), str(path), "exec")
    except (SyntaxError, ValueError) as error:
        yield Problem(model, f"{path.parent.name}/{path.name} is no Python: {error}", "mend it")


def _check_tensors(model: str, config: ModelConfig) -> Iterator[Problem]:
    for kind, tensors in (("input", config.input), ("output", config.output)):
        names = [tensor.name for tensor in tensors]
        for name in dict.fromkeys(name for name in names if names.count(name) > 1):
            yield Problem(model, f"{kind} {name} is declared twice", "declare it once")
        for tensor in tensors:
            if tensor.data_type == pb.DataType.TYPE_INVALID:
                yield Problem(model, f"{kind} {tensor.name} has no data_type", "give it one")
            if not tensor.dims:
                yield Problem(model, f"{kind} {tensor.name} has no dims", "give it dims: 1, say")


def _check_batching(model: str, config: ModelConfig) -> Iterator[Problem]:
    scheduler = config.WhichOneof("scheduling_choice")
    if scheduler == "dynamic_batching" and config.max_batch_size < 1:
        yield Problem(
            model,
            "dynamic_batching needs a batch dimension",
            "set max_batch_size to 1 or more, or take dynamic_batching out",
        )
    for size in config.dynamic_batching.preferred_batch_size:
        if size > config.max_batch_size:
            yield Problem(
                model,
                f"preferred_batch_size {size} is over max_batch_size {config.max_batch_size}",
                "lower one or raise the other",
            )
    sequence = config.sequence_batching
    if sequence.iterative_sequence and not config.model_transaction_policy.decoupled:
        yield Problem(
            model,
            "iterative_sequence on a model that is not decoupled answers once at the end",
            "set model_transaction_policy { decoupled: true } to stream",
            fatal=False,
        )
