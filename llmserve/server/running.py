"""The ``llmserve serve`` processes of this user, and which of them a command means."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from llmserve.contract.report import ServerReport, State
from llmserve.errors import ModelNotReadyError, UnreachableError, UsageError
from llmserve.names import is_model_name

REPOSITORY_FOLDER = Path("model_repository")
"""The repository of a folder, where commands look if none is named."""


@dataclass(frozen=True)
class Running:
    """A ``serve`` process: its control socket, and what it reports there."""

    socket: Path
    report: ServerReport

    @property
    def url(self) -> str:
        """The gRPC address; empty while it is not known yet."""
        return self.report.url

    @property
    def repository(self) -> Path:
        return Path(self.report.repository)

    @property
    def models(self) -> dict[str, State]:
        """The state of each model."""
        return {model.name: model.state for model in self.report.models}

    @property
    def state(self) -> str:
        """Its state in words."""
        return "stopping" if self.report.stopping else self.report.state.value

    @property
    def is_answering(self) -> bool:
        return self.report.state.answers and not self.report.stopping

    @property
    def is_silent(self) -> bool:
        return self.report.state is State.SILENT

    def process(self) -> str:
        return f"process {self.report.pid}"

    def serves(self, model: str, repository: Path) -> bool:
        return self.repository == repository.resolve() and model in self.models

    def has_built(self, model: str) -> bool:
        """Whether its repository has a model, be it loaded or not."""
        return is_model_name(model) and (self.repository / model / "config.pbtxt").is_file()

    def refuse_unloaded(self, model: str) -> None:
        """Raise if it could answer for a model, and has not loaded it."""
        state = self.models.get(model)
        if state is not State.UNLOADED and (state is not None or not self.has_built(model)):
            return
        words = "its OpenAI API loads it on demand, or" if self.report.on_demand else "load it:"
        raise ModelNotReadyError(
            f"{model!r} is not loaded in the server {self.url}",
            hint=f"{words} llmserve reload {model}",
        )

    def frontend(self, name: str) -> str:
        """Return the address of one of its frontends; empty if it has none of this name."""
        return next((each.url for each in self.report.frontends if each.name == name), "")

    def has_url(self, url: str) -> bool:
        return url in (self.url, *(replica.url for replica in self.report.replicas))

    def has_port(self, ports: Collection[int]) -> bool:
        """Whether it has one of these ports; one that has no address yet may have any."""
        report = self.report
        urls = [each for one in (report, *report.replicas) for each in (one.url, one.http)]
        urls += [frontend.url for frontend in report.frontends]
        own = {urlsplit(url if "//" in url else f"//{url}").port for url in urls if url}
        return not self.url or not own.isdisjoint(ports)

    def __str__(self) -> str:
        of = f" of {self.repository}" if self.report.repository else ""
        return f"{self.url or self.process()}{of}"


def find_servers(url: str | None = None, repository: Path | None = None) -> list[Running]:
    """Return the servers of this user, or those at an address or of a repository."""
    from llmserve.client import parse_url
    from llmserve.server.keep.control import running_servers

    address = str(parse_url(url)) if url else None
    servers = [Running(path, report) for path, report in running_servers()]
    if address:
        servers = [server for server in servers if server.has_url(address)]
    if repository:
        servers = [server for server in servers if server.repository == repository.resolve()]
    return servers


def find_one(url: str | None, repository: Path | None, model: str) -> Running:
    """Return the server that a command means; raise if there is none, or no way to choose."""
    if not (servers := find_servers(url, repository)):
        raise none_runs(url, repository)
    server = choose(servers, model)
    if server.is_silent:
        raise UnreachableError(f"{server} does not answer", hint="continue it, or stop it")
    return server


def none_runs(url: str | None = None, repository: Path | None = None) -> UnreachableError:
    if not url and not repository:
        return UnreachableError("no `llmserve serve` runs here", hint="start one")
    chosen = f"at {url}" if url else f"for {repository}"
    return UnreachableError(
        f"no `llmserve serve` runs {chosen}",
        hint="start one, or look for others: llmserve status without --url or --repository",
    )


def choose(
    servers: Sequence[Running], model: str, option: str = "--url or --repository"
) -> Running:
    """Choose by the model's name, then by the repository of the current folder."""
    here = Path.cwd().resolve()

    def of_this_folder(server: Running) -> bool:
        return server.repository in (here, here / REPOSITORY_FOLDER)

    tests: list[Callable[[Running], bool]] = [
        lambda server: model in server.models,
        lambda server: server.has_built(model),
        of_this_folder,
    ]
    for test in tests:
        servers = [server for server in servers if test(server)] or servers
    if len(servers) > 1:
        raise UsageError(
            f"{len(servers)} servers run here ({', '.join(map(str, servers))})",
            hint=f"choose one with {option}",
        )
    return servers[0]


def frontend_for(model: str, name: str, option: str) -> str | None:
    """Return the address of a frontend of the server that a command means.

    None if no server here has one; ``option`` chooses where several have.
    """
    servers = [server for server in find_servers() if server.frontend(name)]
    return choose(servers, model, option).frontend(name) if servers else None


def url_for(model: str, url: str | None, repository: Path | None) -> str | None:
    """Return where to send a request; None, the default address, if no ``serve`` runs here."""
    if url:
        return url
    servers = find_servers(repository=repository)
    if not servers and not repository:
        return None
    if not servers:
        raise none_runs(repository=repository)
    server = choose(servers, model)
    if not server.is_answering:
        raise ModelNotReadyError(
            f"the server {server} is {server.state}",
            hint="wait until `llmserve status` shows ready",
        )
    server.refuse_unloaded(model)
    return server.url
