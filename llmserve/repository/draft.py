"""Writes what makes a folder of prepared files a model: configuration, client and manifest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from llmserve.contract.container import DOCKERFILE, PLAIN, python_in
from llmserve.contract.passport import DECLARED as FINGERPRINT
from llmserve.contract.shared_stream import DECLARED
from llmserve.contract.tasks import GENERATE, PARAMETER
from llmserve.errors import IncompatibleError
from llmserve.repository import config as modelconfig
from llmserve.repository import dockerfile
from llmserve.repository.config import ModelConfig
from llmserve.repository.manifest import Manifest, hashes
from llmserve.repository.passport import BuiltFiles, passport_of
from llmserve.repository.wheels import Wheels


@dataclass(frozen=True)
class Draft:
    """A model whose components have prepared their files; its manifest has no hashes yet."""

    folder: Path
    config: ModelConfig
    manifest: Manifest
    client: str = ""
    """The source of its client; empty for a part of another model."""


def write(drafts: Iterable[Draft], wheels: Wheels) -> None:
    """Write the remaining files of a model and its parts; a manifest has the hashes of all others.

    Each part is before the model.
    """
    written = []
    for draft in drafts:
        folder, manifest = draft.folder, draft.manifest
        # Clients read these from a running server. The parts are all models behind a
        # name: an ensemble's steps do not include models that are called by another part.
        parameters = {
            "llmserve.version": manifest.llmserve,
            "llmserve.recipe": manifest.recipe,
            "llmserve.exchange": manifest.exchange,
            **({"llmserve.parts": " ".join(manifest.parts)} if manifest.parts else {}),
            **(
                {DECLARED: str(number)}
                if (number := manifest.contract.get("shared_stream"))
                else {}
            ),
            **({PARAMETER: manifest.task} if manifest.task != GENERATE else {}),
        }
        # Weights are large, and read only once.
        files = hashes(folder)
        written.append(BuiltFiles(folder, manifest, files))
        if not manifest.part_of:
            parameters[FINGERPRINT] = passport_of(written).fingerprint
        modelconfig.set_parameters(draft.config, parameters)
        texts = {modelconfig.FILE: modelconfig.to_text(draft.config), "client.py": draft.client}
        if manifest.image != PLAIN:
            model = manifest.name
            _check_python(manifest)
            texts[DOCKERFILE] = dockerfile.of_model(model, manifest, folder, wheels)
        for name, text in texts.items():
            if text:
                (folder / name).write_text(text, encoding="utf-8")
                files[name] = sha256(text.encode()).hexdigest()
        manifest.write(folder, files)


def _check_python(manifest: Manifest) -> None:
    """Refuse a model whose image has a Python that its packages cannot be installed with."""
    image = manifest.image
    if package := dockerfile.misfit(manifest, image):
        raise IncompatibleError(
            f"{package} {manifest.packages[package]} needs Python {manifest.pythons[package]}, and "
            f"the image {image} has {python_in(image)}",
            hint=f"name a newer image, or install an older {package} here",
        )
