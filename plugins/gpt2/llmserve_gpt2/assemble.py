"""How the ensemble is wired: text, session, text; and the graph that the session asks."""

from __future__ import annotations

import json

from tritonclient.grpc import model_config_pb2 as pb

from llmserve import modelconfig
from llmserve.builder.assembly import Assembly
from llmserve.builder.context import BuildContext
from llmserve.runtime.contract import Tensor
from llmserve_gpt2.generator import SETTINGS, build_graph

_PROMPT_IDS = Tensor("prompt_ids", "TYPE_INT64", (-1,), optional=False, ragged=True)
_WISHES = Tensor("wishes", "TYPE_STRING", optional=False)
_READ = (_PROMPT_IDS, _WISHES)
_SAID = (
    Tensor("piece", "TYPE_STRING", optional=False),
    Tensor("so_far", "TYPE_STRING", optional=False),
    Tensor("echo", "TYPE_STRING", optional=False),
    Tensor("reason", "TYPE_STRING", optional=False),
    Tensor("counts", "TYPE_INT32", (2,), optional=False),
)


def assemble(assembly: Assembly, form: str, backend: str) -> None:
    """Make the four parts and lead every tensor from one to the next."""
    seed = assembly.options["layout"] == "seed"
    text = "INPUT_TOKENS" if seed else "text_input"
    generator = _generator(assembly, backend)
    read = assembly.add("preprocess")
    session = assembly.add("session")
    told = assembly.add("postprocess", max_batch_size=0 if seed else None)

    assembly.stage(
        read,
        "llmserve_gpt2.stages.preprocess:Preprocess",
        roles=("tokenizer",),
        settings={"text": text},
    )
    batching = assembly.prepare("batching", session)
    settings = build_graph(generator, form, slots=batching["settings"]["slots"])
    (session.folder / SETTINGS).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    assembly.stage(
        session,
        batching["runtime"],
        roles=("tokenizer", "generator"),
        settings=batching["settings"],
    )
    last = "NextTokens" if seed else "Postprocess"
    assembly.stage(told, f"llmserve_gpt2.stages.postprocess:{last}", roles=("formatter",))

    inputs = [Tensor(text, "TYPE_STRING", optional=False)] if seed else assembly.plan.inputs
    outputs = assembly.plan.formatter.outputs
    modelconfig.add_inputs(read.config, inputs)
    modelconfig.add_outputs(read.config, _READ)
    modelconfig.add_inputs(session.config, _READ)
    modelconfig.add_outputs(session.config, _SAID)
    if seed:
        _seed(assembly, told)
        outputs = (Tensor("NEXT_TOKENS", "TYPE_STRING", optional=False),)
    else:
        modelconfig.add_inputs(told.config, _SAID)
        modelconfig.add_outputs(told.config, outputs)
        assembly.context.exchange = "sequence"
    for part in (read, session, told):
        part.config.instance_group.add(count=1, kind=pb.ModelInstanceGroup.KIND_CPU)
    assembly.step(read, _same(inputs), _same(_READ))
    assembly.step(session, _same(_READ), _same(_SAID))
    assembly.step(told, _same(_SAID), _same(outputs))


def _generator(assembly: Assembly, backend: str) -> BuildContext:
    if backend == "pytorch_libtorch":
        return assembly.add("generator", platform=backend)
    return assembly.add("generator", backend=backend)


def _seed(assembly: Assembly, told: BuildContext) -> None:
    """Declare the tutorial's tensors; its client reads NEXT_TOKENS as a list without rows."""
    config = assembly.context.config
    config.max_batch_size = 0
    config.input.add(name="INPUT_TOKENS", data_type=pb.TYPE_STRING, dims=[-1, 1])
    config.output.add(name="NEXT_TOKENS", data_type=pb.TYPE_STRING, dims=[-1])
    for tensor in _SAID:
        kind = pb.DataType.Value(tensor.data_type)
        told.config.input.add(name=tensor.name, data_type=kind, dims=[-1, *tensor.dims])
    told.config.output.add(name="NEXT_TOKENS", data_type=pb.TYPE_STRING, dims=[-1])


def _same(tensors: object) -> dict[str, str]:
    return {tensor.name: tensor.name for tensor in tensors}  # type: ignore[attr-defined]
