"""Words that other tools have taught, and what they are called here."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

COMMANDS = {
    "ps": "status",
    "ls": "list",
    "show": "list",
    "rm": "remove",
    "stop": "unload",
}
"""Commands of Ollama and Docker, and ours that do the same."""

IN_A_CONVERSATION = {"/clear": "/reset", "/exit": "/bye", "/quit": "/bye", "/?": "/help"}

_BUILDS = ("run", "serve")
OPTIONS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "--served-model-name": dict.fromkeys((*_BUILDS, "build"), ("--name",)),
    # `build` itself takes an option of a plugin as a flag.
    **{
        f"--{name.replace('_', '-')}": dict.fromkeys(_BUILDS, ("--set", f"{name}="))
        for name in (
            "max_model_len",
            "tensor_parallel_size",
            "gpu_memory_utilization",
            "max_num_seqs",
            "quantization",
            "kv_cache_dtype",
            "speculative_config",
            "revision",
        )
    },
}
"""Options of `vllm serve`, and the words that do the same in each of our commands: an option, or an
option and what the value follows."""

_KEYS_OF_SERVER = "keys are in a file: llmserve key new NAME, then --keys FILE"
_KEY_OF_CLIENT = "put the key into OPENAI_API_KEY, which --openai sends"
_CONTEXT = "a model has its context since it was built, and --max-tokens limits an answer"
_ADVICE = {
    "pull": "llmserve run MODEL fetches and builds a model that is not here",
    "create": "llmserve build --model SOURCE --name NAME makes a model",
    "cp": "llmserve build --model SOURCE --name NAME makes another",
    "push": "a model is a folder, which can be copied: llmserve list shows where it is",
    "logs": "llmserve status says where the log of each server is",
    "version": "llmserve --version prints it",
    "run --api-key": _KEYS_OF_SERVER,
    "serve --api-key": _KEYS_OF_SERVER,
    "chat --api-key": _KEY_OF_CLIENT,
    "query --api-key": _KEY_OF_CLIENT,
    "batch --api-key": _KEY_OF_CLIENT,
    "chat --max-model-len": _CONTEXT,
    "query --max-model-len": _CONTEXT,
}
"""What to do instead, where nothing of ours takes the same words."""


def translated(words: Sequence[str], *, known: Container[str]) -> list[str]:
    """Return a command line with our words in place of those that others have taught.

    >>> translated(["ps"], known=()), translated(["ps"], known=("ps",))
    (['status'], ['ps'])
    >>> translated(["serve", "m", "--served-model-name=x", "--max-model-len", "9"], known=())
    ['serve', 'm', '--name=x', '--set', 'max_model_len=9']
    """
    name = words[0] if words[0] in known else COMMANDS.get(words[0], words[0])
    ours, rest = [name], list(words[1:])
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        here = OPTIONS.get(flag, {}).get(name)
        if word == "--":
            return [*ours, word, *rest]
        if here is None:
            ours.append(word)
        elif len(here) == 1:
            ours.append(f"{here[0]}{equals}{value}")
        elif equals or rest:
            ours += [here[0], f"{here[1]}{value if equals else rest.pop(0)}"]
        else:
            ours.append(here[0])  # Without a value; the command says so.
    return ours


def advice(command: str, option: str = "") -> str:
    """Return what to do instead of a word that nothing here is called by; "" if it is unknown."""
    return _ADVICE.get(f"{command} {option}".strip(), "")


def of_commands() -> str:
    """Return the line of ``llmserve --help`` on commands by other names."""
    return "Also: " + ", ".join(f"{theirs} ({ours})" for theirs, ours in COMMANDS.items())


def of_options(command: str) -> str | None:
    """Return the line of a command's help on options by other names."""
    ours = {theirs: words[command] for theirs, words in OPTIONS.items() if command in words}
    if not ours:
        return None
    names = [f"{theirs} ({words[0]})" for theirs, words in ours.items() if len(words) == 1]
    if values := [theirs for theirs, words in ours.items() if len(words) > 1]:
        names.append(f"{', '.join(values)} (--set)")
    return f"Also: {', '.join(names)}"
