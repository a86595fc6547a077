"""The memory of a server on this machine: that of its process and of all below it."""

from __future__ import annotations

import ipaddress
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

_PROC = Path("/proc")
_LISTENS = "0A"
_METRIC = re.compile(rb"^process_resident_memory_bytes(?:\{[^}]*\})? ([0-9.eE+]+)$", re.MULTILINE)
_MOST = 1 << 22
_FORWARDS = {"docker-proxy", "rootlessport", "slirp4netns", "kubectl", "ssh", "sshd", "nginx"}
"""Programs that listen in place of a server, whose memory would say nothing."""


def memory_at(url: str) -> int | None:
    """Return the bytes of the server at an address; None if they cannot be known.

    That is what listens there, if it is on this machine, or what it says of itself.
    """
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        return None
    if _is_here(host) and (pid := listener(port)) and (found := memory_of(pid)):
        return found
    return _told(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}/metrics")


def memory_of(pid: int) -> int | None:
    """Return the bytes of a process and of all below it; what they share counts once."""
    sizes = [_share(each) for each in (pid, *_below(pid))]
    known = [size for size in sizes if size is not None]
    # One that has ended meanwhile has none; the first one has to be known.
    return sum(known) if known and sizes[0] is not None else None


def listener(port: int) -> int | None:
    """Return the process that listens on a port of this machine, if it may be seen."""
    sockets = set(_listening(port))
    for folder in _PROC.glob("[0-9]*") if sockets else ():
        try:
            names = {_target(each) for each in (folder / "fd").iterdir()}
            program = (folder / "comm").read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            continue
        if names & sockets:
            return None if program in _FORWARDS else int(folder.name)
    return None


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        # Closed meanwhile, as is what the folder itself is read through.
        return ""


def _listening(port: int) -> Iterator[str]:
    for name in ("tcp", "tcp6"):
        try:
            lines = (_PROC / "net" / name).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                yield f"socket:[{fields[9]}]"


def _below(pid: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for folder in _PROC.glob("[0-9]*"):
        try:
            text = (folder / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        # The name of a program, in brackets, may have anything in it.
        parent = int(text.rpartition(")")[2].split()[1])
        parents.setdefault(parent, []).append(int(folder.name))
    found, pending = [], [pid]
    while pending:
        children = parents.get(pending.pop(), [])
        found += children
        pending += children
    return found


def _share(pid: int) -> int | None:
    """Return the bytes of a process, of which those that are shared are divided."""
    try:
        text = (_PROC / str(pid) / "smaps_rollup").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    match = re.search(r"^Pss: +(\d+) kB", text, re.MULTILINE)
    return int(match[1]) << 10 if match else None


def _is_here(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _told(url: str) -> int | None:
    if not url.startswith(("http://", "https://")):
        return None
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310 - checked above
            match = _METRIC.search(answer.read(_MOST))
        return int(float(match[1])) if match else None
    except (OSError, ValueError, OverflowError):
        return None
