"""The servers that are known, how one is recognised, and what it does when it is told nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from llmserve_cli.adopting.llama_options import LLAMA
from llmserve_cli.adopting.rows import KSERVE, OVMS, TGI, TRITON, TRTLLM, Row
from llmserve_cli.adopting.vllm_options import VLLM
from llmserve_cli.adopting.words import Word

ANYWHERE = "0.0.0.0"  # noqa: S104 - what others listen on, and not where we do
_PYTHON = re.compile(r"python[\d.]*")


@dataclass(frozen=True)
class Engine:
    """A server of somebody else."""

    name: str
    programs: tuple[tuple[str, ...], ...]
    """What its command begins with; ``python -m`` is any Python's."""
    rows: tuple[Row, ...]
    image: str = ""
    """What an image of it is called, as a regular expression."""
    port: int = 8000
    newest_port: int = 0
    """The port of its newest sources, if another: a command does not say what it starts."""
    container_port: int = 0
    """The port in its image, if another."""
    host: str = ANYWHERE
    """The address that it listens on unless it is told another."""
    key_variable: str = ""
    prefix: str = ""
    """What its variables begin with, whose rest is the name of an option; - if it has none."""
    positional: bool = False
    """Whether its model is a word of its own."""
    skips: tuple[str, ...] = ()
    """Words after the program that mean nothing."""
    variables: dict[str, str] = field(default_factory=dict)
    """Variables that are called otherwise than its options."""

    def row(self, name: str) -> Row | None:
        """Return the row of an option; in a long one, _ is the same as -."""
        plain = name.replace("_", "-") if name.startswith("--") else name
        if found := self._row(plain):
            return found
        if plain.startswith("--no-") and (found := self._row(f"--{plain[5:]}")):
            return None if found.takes else _turned_off(found)
        if plain.startswith("-O") and not plain.startswith("--"):
            # A short option whose value is glued to it, as in -O3.
            return self._row("--optimization-level")
        # A part of a value that is an object, as in --compilation-config.mode.
        whole, dot, _ = plain.partition(".")
        return self._row(whole) if dot else None

    def _row(self, name: str) -> Row | None:
        return next((row for row in self.rows if name in row.names), None)

    def flag_of(self, variable: str) -> str:
        """Return the option that a variable of the environment sets, if any."""
        if variable in self.variables:
            return self.variables[variable]
        is_one = variable.isupper() and variable.startswith(self.prefix)
        if self.prefix == "-" or not is_one:
            return ""
        flag = f"--{variable.removeprefix(self.prefix).lower().replace('_', '-')}"
        return flag if self.row(flag) else ""


def _turned_off(row: Row) -> Row:
    """Return what a switch means that is turned off."""
    if row.goal in ("option", "engine_arg"):
        return replace(row, fixed="false")
    return replace(row, goal="unneeded", says="it asks for nothing")


ENGINES: tuple[Engine, ...] = (
    Engine(
        "vLLM",
        (("vllm", "serve"), ("-m", "vllm.entrypoints.openai.api_server"),
         ("-m", "vllm.entrypoints.api_server"), ("-m", "vllm.entrypoints.cli.main", "serve")),
        VLLM, image=r"vllm[-/]openai|/vllm(-cpu|-rocm|server)?[:@]|/vllm$|\bvllm:",
        key_variable="VLLM_API_KEY", prefix="-", positional=True,
        variables={"VLLM_API_KEY": "--api-key", "VLLM_PORT": "", "VLLM_HOST": ""},
    ),
    Engine(
        "TGI", (("text-generation-launcher",),), TGI, image=r"text-generation-inference",
        port=3000, container_port=80, key_variable="API_KEY", variables={"HOSTNAME": ""},
    ),
    Engine(
        "trtllm-serve", (("trtllm-serve", "serve"), ("trtllm-serve",)), TRTLLM,
        image=r"tensorrt-llm/release", host="localhost", prefix="-", positional=True,
    ),
    Engine(
        "llama.cpp", (("llama-server",), ("llama-cpp-server",)), LLAMA,
        image=r"llama\.cpp:|llama-server:", port=8080, newest_port=9931,
        host="127.0.0.1", key_variable="LLAMA_API_KEY", prefix="LLAMA_ARG_",
        variables={"LLAMA_API_KEY": "--api-key", "LLAMA_ARG_N_PARALLEL": "--parallel",
                   "LLAMA_ARG_HF_REPO": "--hf-repo", "LLAMA_ARG_CONT_BATCHING": "--cont-batching"},
    ),
    Engine(
        "OpenVINO Model Server", (("ovms",),), OVMS, image=r"openvino/model_server|/ovms",
        port=0, prefix="-",
    ),
    Engine(
        "KServe's Hugging Face server", (("-m", "huggingfaceserver"),), (*KSERVE, *VLLM),
        image=r"kserve/huggingfaceserver", port=8080, prefix="-",
    ),
    Engine("Triton", (("tritonserver",),), TRITON, image=r"", port=0, prefix="-"),
)  # fmt: skip


def engine_named(name: str) -> Engine:
    return next(engine for engine in ENGINES if engine.name == name)


def program_in(words: Sequence[Word]) -> tuple[Engine, int] | None:
    """Return the server that a command starts, and where its arguments begin.

    The command may stand behind another one, as in ``nohup env A=1 vllm serve``.
    """
    texts = [word.text.rsplit("/", 1)[-1] for word in words]
    for at in range(min(len(texts), 24)):
        for engine in ENGINES:
            for program in engine.programs:
                if tuple(texts[at : at + len(program)]) != program:
                    continue
                if program[0] == "-m" and not (at and _PYTHON.fullmatch(texts[at - 1])):
                    continue
                return engine, at + len(program)
    return None


def engine_of_image(image: str) -> Engine | None:
    """Return the server that an image starts by itself."""
    return next(
        (each for each in ENGINES if each.image and re.search(each.image, image, re.IGNORECASE)),
        None,
    )
