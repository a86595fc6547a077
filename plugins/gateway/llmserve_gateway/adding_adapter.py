"""The program that reads an adapter which a request names, and adds it to a model.

Whoever wrote the adapter may want to harm the one who reads it, so that is done in a process with
limits, which ends with its gateway. It prints an object that says what came of it.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import stat
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from llmserve.errors import LLMServeError
from llmserve.plugin import Repository, add_adapter

FILES = ("adapter_config.json", "adapter_model.safetensors")
LARGEST = 1 << 30
"""The most bytes of a file; an adapter of rank 64 for 70 B parameters has 0.8 GB."""
_CPU_SECONDS = 120
_MEMORY = 4 << 30
"""What the largest takes twice, beside the libraries."""
_NICE = 10


class Refused(Exception):
    """The files are none that may be read."""


def copy_adapter(home: Path, path: str, to: Path) -> bool:
    """Copy the files of an adapter from within a folder; return whether there are any.

    Where a file is is asked of the one that is open, which nobody can exchange any more.
    """
    folder = Path(os.path.normpath(home / path))
    if "\0" in path or not folder.is_relative_to(home):
        raise Refused("lora_path leads out of the folder that this server takes adapters from")
    within, found = home.resolve(), False
    for name in FILES:
        try:
            # Opening a pipe would wait for its other end.
            descriptor = os.open(folder / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            continue
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            real = Path(f"/proc/self/fd/{descriptor}").readlink()
            if not real.is_relative_to(within):
                raise Refused(f"{name} is a link out of the folder for adapters")
            if not stat.S_ISREG(status.st_mode):
                raise Refused(f"{name} is no file")
            if status.st_size > LARGEST:
                raise Refused(f"{name} is over {LARGEST >> 30} GB")
            with (to / name).open("wb") as copy:
                # One that grows meanwhile ends at the limit of this process.
                shutil.copyfileobj(file, copy, 1 << 20)
        found = True
    return found


def main() -> None:
    """Add an adapter: its home, the model's folder, its name and its path are the arguments."""
    home, model, name, path = map(json.loads, sys.argv[1:])
    for number in (signal.SIGTERM, signal.SIGXCPU):
        # What was copied is taken away on the way out.
        signal.signal(number, lambda *_: sys.exit(1))
    threading.Thread(target=_end_with_gateway, daemon=True).start()
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS + 5))
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST, LARGEST))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answer = _answer(Path(home), Path(model), name, path)
    sys.stdout.write(json.dumps(answer))
    sys.stdout.flush()
    # The thread still reads.
    os._exit(0)


def _answer(home: Path, folder: Path, name: str, path: str) -> dict[str, Any]:
    notes: list[str] = []
    try:
        with tempfile.TemporaryDirectory() as copies:
            if not copy_adapter(home, path, Path(copies)):
                return {"missing": path}
            model = Repository.open(folder.parent).model(folder.name)
            add_adapter(model, name, Path(copies), notes.append)
    except Refused as error:
        return {"refused": str(error)}
    except LLMServeError as error:
        return {"refused": error.problem}
    except OSError as error:
        return {"refused": f"the adapter {name} cannot be copied: {error.strerror}"}
    except MemoryError:
        return {"refused": f"the adapter {name} takes too much memory to read"}
    return {"added": name, "notes": notes}


def _end_with_gateway() -> None:
    """Wait for the end of the standard input, which the gateway keeps open."""
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
