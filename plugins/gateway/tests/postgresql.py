"""A PostgreSQL for tests, of which each has a database of its own: Debian's package, as a user."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

PASSWORD = "s3cret/pa@ss"
"""As it is; in an address it is escaped."""
_ESCAPED = "s3cret%2Fpa%40ss"
_STARTS_WITHIN = 60.0


def programs() -> Path | None:
    """Return the folder of PostgreSQL's programs, the newest that is installed."""
    debians = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: path.parent.name)
    on_path = shutil.which("postgres")
    found = [*debians, *([Path(on_path).parent] if on_path else [])]
    return next((path for path in reversed(found) if (path / "initdb").exists()), None)


def missing() -> str:
    """Return what a machine lacks for these tests, which ``.ci/run`` installs."""
    if programs() is None:
        return "PostgreSQL is not installed: apt-get install postgresql"
    return "" if find_spec("psycopg") else "psycopg is not installed: see requirements-dev.txt"


class Postgresql:
    """A server on a free port of this machine, which ends with its test."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port = folder, port
        self._count = 0

    def new_database(self) -> str:
        """Return the address of a new database."""
        import psycopg

        self._count += 1
        name = f"test{self._count}"
        with psycopg.connect(self.address("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        return self.address(name)

    def address(self, name: str) -> str:
        return f"postgresql://tester:{_ESCAPED}@127.0.0.1:{self.port}/{name}"


@contextmanager
def running_postgresql() -> Iterator[Postgresql]:
    """Run a server in a folder of its own; root, whom it refuses, has another user run it."""
    bin = programs()
    assert bin is not None
    folder = Path(tempfile.mkdtemp(prefix="llmserve-postgresql-"))
    as_user: dict[str, object] = {"cwd": folder}
    if os.geteuid() == 0:
        user = pwd.getpwnam("nobody")
        os.chown(folder, user.pw_uid, user.pw_gid)
        as_user |= {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    data, password = folder / "data", folder / "password"
    password.write_text(PASSWORD, encoding="utf-8")
    password.chmod(0o644)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
    settings = {
        "listen_addresses": "127.0.0.1", "unix_socket_directories": "", "max_connections": "50",
        "fsync": "off", "shared_buffers": "16MB",
    }  # fmt: skip
    flags = [word for pair in settings.items() for word in ("-c", "=".join(pair))]
    try:
        made = subprocess.run(  # type: ignore[call-overload]
            [bin / "initdb", "-D", data, "-U", "tester", "--pwfile", password, "--no-sync",
             "-A", "scram-sha-256", "-E", "UTF8", "--locale=C"],
            capture_output=True, text=True, **as_user,
        )  # fmt: skip
        assert made.returncode == 0, made.stderr
        password.unlink()
        with (folder / "log").open("w", encoding="utf-8") as log:
            process = subprocess.Popen(  # type: ignore[call-overload]
                [bin / "postgres", "-D", data, "-p", str(port), *flags], stderr=log, **as_user
            )
        try:
            _wait(Postgresql(folder, port), process)
            yield Postgresql(folder, port)
        finally:
            # It writes nothing more: with hundreds of databases, that takes half a minute.
            process.send_signal(signal.SIGQUIT)
            process.wait(30)
    finally:
        shutil.rmtree(folder)


def _wait(server: Postgresql, process: subprocess.Popen[bytes]) -> None:
    import psycopg

    deadline = time.monotonic() + _STARTS_WITHIN
    while True:
        try:
            psycopg.connect(server.address("postgres")).close()
        except psycopg.OperationalError:
            log = (server.folder / "log").read_text(encoding="utf-8")
            assert process.poll() is None, log
            assert time.monotonic() < deadline, log
            time.sleep(0.05)
        else:
            return
