"""Writes the script that starts Triton with several processes, like launch_triton_server.py."""

from __future__ import annotations

from pathlib import Path

from llmserve.plugin import BuildContext
from llmserve_trtllm.target import BuildTarget

_SCRIPTS = Path(__file__).with_name("scripts")


def write_launch_script(
    context: BuildContext, target: BuildTarget, engine_model: str, world_size: int
) -> None:
    script = "llmapi" if target.is_llmapi else target.options["multi_gpu"]
    if world_size == 1 and script != "orchestrator":
        return
    image = target.image
    # In leader mode the script starts itself again for each rank; the first rank serves.
    ranks = (f'-n 1 sh "$0" --rank={rank} "$REPOSITORY" "$@"' for rank in range(world_size))
    text = _read(script)
    for name, value in (
        ("WORLD_SIZE", str(world_size)),
        ("WHERE", f" ({image})" if image else ""),
        ("RANKS", " : \\\n    ".join(ranks)),
        ("ENGINE", engine_model),
    ):
        text = text.replace(f"@{name}@", value)
    folder = context.folder.parent
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "launch.sh").write_text(text, encoding="utf-8")


def _read(script: str) -> str:
    return (_SCRIPTS / f"{script}.sh").read_text(encoding="utf-8")
