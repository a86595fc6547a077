"""Reads files of Docker compose and Kubernetes, KServe's InferenceService among them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from llmserve_cli.adopting.adopted import Adopted, Origin, Remark, Value, shown
from llmserve_cli.adopting.env_files import read_variables, without_secrets
from llmserve_cli.adopting.launch import Launch, Port, adopt_launch
from llmserve_cli.adopting.source_text import SourceText
from llmserve_cli.adopting.words import Word, expanded, expanded_in_pod, split_line
from llmserve_cli.adopting.yaml_nodes import Node

_MOST_SERVICES = 64


def is_compose(documents: Sequence[Node]) -> bool:
    return any(_services(each) for each in documents)


def read_compose(source: SourceText, documents: Sequence[Node]) -> Adopted:
    """Read the services of a compose file that are known servers."""
    adopted = Adopted("a compose file")
    # It sets what is named in the file itself.
    known = without_secrets(read_variables(source.folder / ".env") or {})
    for document in documents:
        for name, service in _services(document)[:_MOST_SERVICES]:
            if not adopt_launch(_of_service(source, service, known, adopted), adopted):
                what = service.text_at("image") or "what it builds"
                adopted.unneeded.append(
                    Remark(
                        Origin(source.name, service.line, f"service {name}"),
                        f"{what} is no server of models that is known",
                    )
                )  # fmt: skip
            if (other := service.get("extends")) is not None:
                adopted.miss(
                    Origin(source.name, other.line, "extends"),
                    "other files are not followed: set their values by hand",
                )
    return adopted


def _services(document: Node) -> list[tuple[str, Node]]:
    """Return the services; very old files have them at the top."""
    services = document.get("services") or document
    found = [(name, each) for name, each in services.items() if each.is_mapping]
    return [(name, each) for name, each in found if each.get("image") or each.get("build")]


def _of_service(
    source: SourceText, service: Node, known: Mapping[str, str], adopted: Adopted
) -> Launch:
    entry = _words(service.get("entrypoint"), known)
    ports = []
    for port in service.list_at("ports"):
        if port.text is not None:
            ports.append(Port.parse(expanded(port.text, known), port.line))
        elif target := port.text_at("target"):
            offered, address = port.text_at("published") or "", port.text_at("host_ip") or ""
            ports.append(Port(address, expanded(offered, known), target, port.line))
    mounts = []
    for volume in service.list_at("volumes"):
        if volume.text is not None:
            # A default in braces may have a colon.
            parts = expanded(volume.text, known).split(":")
            if len(parts) > 1:
                mounts.append((parts[0], parts[1]))
        elif (here := volume.text_at("source")) and (there := volume.text_at("target")):
            mounts.append((expanded(here, known), there))
    image = service.get("image")
    count = service.get("deploy", "replicas") or service.get("scale")
    text = expanded(image.text, known) if image and image.text else ""
    return Launch(
        source,
        [*entry, *_words(service.get("command"), known)],
        image=Word(text, image.line) if image else None,
        has_program=bool(entry),
        variables={
            **_of_files(source, service, known, adopted),
            **_variables(service.get("environment"), known),
        },
        ports=ports,
        mounts=mounts,
        in_container=True,
        uses_host_network=service.text_at("network_mode") == "host",
        is_open=bool(ports),
        replicas=_replicas(source, count, known),
    )


def _of_files(
    source: SourceText, service: Node, known: Mapping[str, str], adopted: Adopted
) -> dict[str, Word]:
    """Return the variables of the files that a service names, at the lines that name them."""
    found: dict[str, Word] = {}
    given = service.get("env_file")
    for each in given.entries() or [given] if given is not None else ():
        text = expanded(each.text or each.text_at("path") or "", known)
        variables = read_variables(source.folder / text) if text and "\0" not in text else None
        if variables is None:
            origin = Origin(source.name, each.line, shown("env_file", text))
            adopted.miss(origin, "it cannot be read here: set its values by hand")
        for name, value in (variables or {}).items():
            found[name] = Word(value, each.line)
    return found


def _replicas(
    source: SourceText, node: Node | None, known: Mapping[str, str] | None = None
) -> Value | None:
    if node is None or node.text is None:
        return None
    return Value(
        expanded(node.text, known or {}), Origin(source.name, node.line, f"replicas: {node.text}")
    )


def _words(node: Node | None, known: Mapping[str, str] | None = None) -> list[Word]:
    """Return a command, a list of words or one text, with the line of each word."""
    if node is None:
        return []
    if node.is_list:
        return [
            Word(each.text if known is None else expanded(each.text, known), each.line)
            for each in node.entries()
            if each.text is not None
        ]
    if node.text is None:
        return []
    text = node.text if known is None else expanded(node.text, known)
    words = split_line(text.replace("\\\n", " ")) or []
    line, found = node.line, []
    for word in words:
        # A text of several lines: each word is in the line of the one before, or after it.
        at = node.source.line_of(word, line) if word else line
        line = at if line <= at <= node.last_line else line
        found.append(Word(word, line))
    return found


def _variables(node: Node | None, known: Mapping[str, str]) -> dict[str, Word]:
    if node is None:
        return {}
    pairs = {name: each for name, each in node.items() if each.text is not None}
    found = {
        name: Word(expanded(each.text or "", known), each.line) for name, each in pairs.items()
    }
    for each in node.entries():
        name, equals, value = (each.text or "").partition("=")
        if equals:
            found[name] = Word(expanded(value, known), each.line)
    return found


def is_kubernetes(documents: Sequence[Node]) -> bool:
    return any(each.text_at("apiVersion") and each.text_at("kind") for each in documents)


def read_kubernetes(source: SourceText, documents: Sequence[Node]) -> Adopted:
    """Read the containers of manifests that are known servers, and what KServe is told."""
    adopted = Adopted("Kubernetes manifests")
    for document in _objects(documents):
        kind = document.text_at("kind") or ""
        count = _replicas(source, document.get("spec", "replicas"))
        if kind == "InferenceService":
            adopted.what = "KServe's InferenceService"
            _read_inference_service(source, document, adopted)
            continue
        for pod in _pods(document):
            for container in pod.list_at("containers"):
                adopt_launch(_of_container(source, pod, container, count), adopted)
    return adopted


def _objects(documents: Sequence[Node]) -> Iterator[Node]:
    for document in documents:
        if document.text_at("kind") == "List":
            yield from document.list_at("items")
        else:
            yield document


def _pods(document: Node) -> Iterator[Node]:
    paths = (
        ("spec", "template", "spec"), ("spec",),
        ("spec", "jobTemplate", "spec", "template", "spec"),
        ("spec", "leaderWorkerTemplate", "leaderTemplate", "spec"),
        ("spec", "leaderWorkerTemplate", "workerTemplate", "spec"),
    )  # fmt: skip
    for path in paths:
        pod = document.get(*path)
        if pod is not None and pod.get("containers"):
            yield pod
            return


def _of_container(
    source: SourceText,
    pod: Node,
    container: Node,
    count: Value | None,
    *,
    model: Value | None = None,
    name: Value | None = None,
) -> Launch:
    variables = {}
    for each in container.list_at("env"):
        variable, value = each.text_at("name"), each.get("value")
        if variable and value is not None and value.text is not None:
            variables[variable] = Word(value.text, value.line)
        elif variable and each.get("valueFrom"):
            # Its name is enough: the value is in a secret of the cluster.
            variables[variable] = Word(f"${{{variable}}}", each.line)
    known = {variable: word.text for variable, word in variables.items()}
    program, arguments = _words(container.get("command")), _words(container.get("args"))
    words = [Word(expanded_in_pod(w.text, known), w.line) for w in (*program, *arguments)]
    hosts = {
        volume_name: path
        for volume in pod.list_at("volumes")
        if (volume_name := volume.text_at("name")) and (path := volume.text_at("hostPath", "path"))
    }
    mounts = [
        (hosts.get(mounted, mounted), path)
        for mount in container.list_at("volumeMounts")
        if (mounted := mount.text_at("name")) and (path := mount.text_at("mountPath"))
    ]
    image = container.get("image")
    return Launch(
        source, words, image=Word(image.text or "", image.line) if image else None,
        has_program=bool(program), variables=variables, mounts=mounts, in_container=True,
        replicas=count, model=model, name=name,
    )  # fmt: skip


def _read_inference_service(source: SourceText, document: Node, adopted: Adopted) -> None:
    predictor = document.get("spec", "predictor")
    if predictor is None:
        return
    count = _replicas(source, predictor.get("minReplicas"))
    title = document.get("metadata", "name")
    named = _value(source, title, "metadata.name")
    for container in predictor.list_at("containers"):
        _miss_mounted_model(source, container, adopted)
        adopt_launch(_of_container(source, predictor, container, count), adopted)
    model = predictor.get("model")
    if model is None:
        return
    form = model.text_at("modelFormat", "name") or ""
    place = Origin(source.name, model.line, f"modelFormat {form}")
    if form.lower() not in ("huggingface", "vllm"):
        adopted.miss(place, "no plugin serves models of this format")
        return
    uri = _value(source, model.get("storageUri"), "storageUri")
    launch = _of_container(source, predictor, model, count, model=uri, name=named)
    # The image is that of KServe's runtime for this format.
    launch.image, launch.has_program = Word("kserve/huggingfaceserver", model.line), False
    adopt_launch(launch, adopted)
    if (runtime := model.get("runtime")) is not None:
        adopted.unneeded.append(
            Remark(
                Origin(source.name, runtime.line, f"runtime {runtime.text}"),
                "llmserve chooses a plugin",
            )
        )


def _miss_mounted_model(source: SourceText, container: Node, adopted: Adopted) -> None:
    """Say that the model is the one which KServe puts to /mnt/models."""
    for each in container.list_at("env"):
        if each.text_at("name") == "STORAGE_URI" and (uri := each.text_at("value")):
            adopted.miss(
                Origin(source.name, each.line, f"STORAGE_URI {uri}"),
                "copy the model here, and name it with --model",
            )


def _value(source: SourceText, node: Node | None, name: str) -> Value | None:
    if node is None or node.text is None:
        return None
    return Value(node.text, Origin(source.name, node.line, f"{name}: {node.text}"))
