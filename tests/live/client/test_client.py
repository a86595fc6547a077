"""The clients with a real Triton: blocking, asyncio, and the script that ``build`` writes.

Small models implement the contract in different ways, and record what they receive.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from llmserve import errors
from llmserve.builder.client_script import client_script
from llmserve.client import AsyncClient, Client, Completion, connect, connect_async
from llmserve.server import Server, ServerSettings, start
from tests.live.servers import eventually

MODELS = Path(__file__).with_name("models")
SOURCES = {"echo": "echo", "plain": "echo", "foreign": "echo", "words": "words", "steps": "steps"}
EXCHANGES = {
    "echo": "unary", "plain": "unary", "foreign": "unary", "words": "stream", "steps": "sequence",
}  # fmt: skip
LONG = "word " * 200
BIG = 2**64 - 1


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("client") / "repository"
    for name, source in SOURCES.items():
        (folder / name / "1").mkdir(parents=True)
        shutil.copy(MODELS / f"{name}.pbtxt", folder / name / "config.pbtxt")
        shutil.copy(MODELS / f"{source}.py", folder / name / "1" / "model.py")
    return folder


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Server]:
    settings = ServerSettings(repository, http_port=0, grpc_port=0, metrics_port=0)
    with start(settings) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with connect(server.grpc_url, timeout=60) as client:
        yield client


@dataclass(frozen=True)
class Journal:
    """What the models recorded: cancelled requests, and sequences that started and ended."""

    repository: Path

    def read(self, model: str) -> list[str]:
        path = self.repository / model / "journal"
        return path.read_text().splitlines() if path.exists() else []

    def shows_cancelled(self, *prompts: str) -> bool:
        return bool(eventually(lambda: set(prompts) <= set(self.read("words"))))

    def shows_all_ended(self, started: int) -> bool:
        """Wait until at least this many sequences have started, and all of them have ended."""

        def all_ended() -> bool:
            events = Counter(line.split()[0] for line in self.read("steps"))
            return events["start"] == events["end"] >= started

        return bool(eventually(all_ended))


@pytest.fixture
def journal(repository: Path) -> Journal:
    return Journal(repository)


def with_async_client(server: Server, body: Callable[[AsyncClient], Any]) -> Any:
    async def main() -> Any:
        async with connect_async(server.grpc_url, timeout=60) as client:
            return await body(client)

    return asyncio.run(main())


def test_the_server_and_its_models_are_described(client: Client) -> None:
    assert client.server_ready()
    assert client.model_ready("echo")
    assert not client.model_ready("nothing")
    assert client.models() == sorted(EXCHANGES)
    assert {name: client.model(name).exchange for name in EXCHANGES} == EXCHANGES


def test_the_asyncio_client_has_the_same_methods(server: Server) -> None:
    async def body(client: AsyncClient) -> None:
        assert await client.server_ready()
        assert not await client.model_ready("nothing")
        assert "steps" in await client.models()
        assert (await client.model("steps")).exchange == "sequence"
        assert await client.generate("words", "a b") == Completion("a b", "stop")
        answers = await client.generate("steps", ["a b", "c"])
        assert [answer.text for answer in answers] == ["ab", "c"]
        async with client.sequence("steps") as steps:
            assert ((await steps.send("x y")).text, (await steps.send()).text) == ("x", "y")

    with_async_client(server, body)


def test_options_reach_our_models_as_parameters(client: Client) -> None:
    options = {"max_tokens": 3, "temperature": 0.1, "ignore_eos": True, "seed": BIG}
    answer = client.generate("echo", "wie schön", stop_words=["ü", "\0"], **options)
    assert (answer.finish_reason, answer.input_tokens, answer.output_tokens) == ("stop", 10, 10)
    seen = json.loads(answer.text)
    assert (seen["text"], seen["inputs"]) == ("wie schön", {})
    assert json.loads(seen["parameters"].pop("stop_words")) == ["ü", "\0"]
    assert seen["parameters"] == options | {"seed": str(BIG)}


def test_options_reach_other_models_as_inputs(client: Client) -> None:
    options: dict[str, Any] = {"max_tokens": 3, "ignore_eos": True, "seed": 7, "other": "x"}
    answers = client.generate("foreign", ["a", "b"], stop_words=["u", "v"], **options)
    for answer in answers:
        seen = json.loads(answer.text)
        assert seen["parameters"] == {"other": "x"}
        assert seen["inputs"] == {
            "max_tokens": "[[3], [3]]",
            "ignore_eos": "[[True], [True]]",
            "random_seed": "[[7], [7]]",
            "stop_words": "[[b'u', b'v'], [b'u', b'v']]",
        }


def test_requests_with_different_options_share_a_batch(client: Client) -> None:
    def ask(number: int) -> int:
        options = {"seed": number} if number % 2 else {"max_tokens": number}
        return int(json.loads(client.generate("echo", "p", **options).text)["batch_size"])

    with ThreadPoolExecutor(8) as pool:
        # The model's queue waits for more requests, but on a slow machine they may arrive too late.
        assert eventually(lambda: max(pool.map(ask, range(8))) > 4)


@pytest.mark.parametrize("model", ["echo", "plain", "words", "steps"])
def test_many_prompts_get_their_own_answers(client: Client, model: str) -> None:
    prompts = [f"prompt {number}" for number in range(20)]
    answers = client.generate(model, prompts)
    assert [answer.finish_reason for answer in answers] == ["stop"] * 20
    texts = [answer.text for answer in answers]
    if model in ("echo", "plain"):
        texts = [json.loads(text)["text"] for text in texts]
    # The model of steps returns words without spaces.
    spaced = {"steps": [prompt.replace(" ", "") for prompt in prompts]}
    assert texts == spaced.get(model, prompts)
    assert client.generate(model, []) == []


@pytest.mark.parametrize("model", ["words", "steps"])
def test_an_answer_comes_in_pieces(client: Client, model: str) -> None:
    pieces = list(client.stream(model, ["a b c", "x"]))
    rows = [[p.text for p in pieces if p.index == row] for row in (0, 1)]
    assert rows == [["a", "b", "c"], ["x"]]
    assert [p.index for p in pieces if p.finish_reason] == [1, 0]


def test_a_unary_model_streams_one_piece(client: Client) -> None:
    (piece,) = client.stream("echo", "p")
    assert json.loads(piece.text)["text"] == "p"


def model_and_words(number: int) -> tuple[str, list[str]]:
    return ("words", "steps")[number % 2], [f"{number}-{step}" for step in range(20)]


def test_concurrent_streams_on_one_client_do_not_mix(client: Client, server: Server) -> None:
    barrier = threading.Barrier(32)

    def ask(number: int) -> bool:
        model, words = model_and_words(number)
        barrier.wait()
        return [piece.text for piece in client.stream(model, " ".join(words))] == words

    with ThreadPoolExecutor(32) as pool:
        assert all(pool.map(ask, range(32)))

    async def ask_async(client: AsyncClient, number: int) -> bool:
        model, words = model_and_words(number)
        return [piece.text async for piece in client.stream(model, " ".join(words))] == words

    async def body(client: AsyncClient) -> list[bool]:
        return await asyncio.gather(*(ask_async(client, number) for number in range(32)))

    assert with_async_client(server, body) == [True] * 32


@pytest.mark.parametrize(
    ("model", "options", "kind", "message"),
    [
        ("wrods", {}, errors.ModelNotReadyError, "choose one of words, echo"),
        ("echo", {"prompt": "raise no /srv/w.bin"}, errors.ModelFailedError, "no w.bin"),
        ("echo", {"prompt": "bytes"}, errors.ClientError, "not UTF-8"),
        ("echo", {"max_tokens": {}}, errors.OptionError, "max_tokens cannot be a dict"),
        ("foreign", {"max_tokens": 2**40}, errors.OptionError, "does not fit into INT32"),
        ("steps", {"prompt": "refuse"}, errors.RequestRejectedError, "no such word"),
        ("steps", {"prompt": LONG, "delay": 0.1, "timeout": 0.3}, errors.RequestTimeoutError,
         "no complete answer from 'steps' within 0.3 s"),
    ],
)  # fmt: skip
def test_failures_are_one_line(
    client: Client, server: Server, model: str, options: Any, kind: type[Exception], message: str
) -> None:
    def ask_async(client: AsyncClient) -> Any:
        return client.generate(model, **options)

    calls: list[Callable[[], Any]] = [
        lambda: client.generate(model, **options),
        lambda: with_async_client(server, ask_async),
    ]
    for call in calls:
        with pytest.raises(errors.LLMServeError) as caught:
            call()
        assert type(caught.value) is kind
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
        assert "/srv" not in str(caught.value)


def test_an_error_inside_a_stream_comes_after_its_pieces(client: Client) -> None:
    pieces = client.stream("words", "one two refuse three")
    assert [next(pieces).text, next(pieces).text] == ["one", "two"]
    with pytest.raises(errors.RequestRejectedError, match="no such word"):
        next(pieces)


def test_deadlines_and_abandoned_streams_reach_the_server(client: Client, journal: Journal) -> None:
    with pytest.raises(errors.RequestTimeoutError):
        # The whole answer would take 40 seconds.
        for _ in client.stream("words", f"late {LONG}", delay=0.2, timeout=0.5):
            pass
    for _ in client.stream("words", f"early {LONG}"):
        break
    assert journal.shows_cancelled(f"late {LONG}", f"early {LONG}")


def test_cancellation_of_a_task_reaches_the_server(server: Server, journal: Journal) -> None:
    async def consume(pieces: AsyncGenerator[Any, None], started: asyncio.Event) -> None:
        async for _ in pieces:
            started.set()

    async def body(client: AsyncClient) -> None:
        for model in ("words", "steps"):
            started = asyncio.Event()
            pieces = client.stream(model, f"task {LONG}", delay=0.1)
            task = asyncio.create_task(consume(pieces, started))
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            async for _ in client.stream(model, f"break {LONG}"):
                break
            async with aclosing(client.stream(model, f"aclose {LONG}")) as pieces:
                await anext(pieces)

    with_async_client(server, body)
    assert journal.shows_cancelled(*(f"{prefix} {LONG}" for prefix in ("task", "break", "aclose")))
    assert journal.shows_all_ended(3)


def test_a_sequence_is_ended_whatever_happens(server: Server, journal: Journal) -> None:
    with connect(server.grpc_url) as client:
        for _ in client.stream("steps", LONG):
            break
        with suppress(errors.RequestRejectedError):
            client.generate("steps", "a refuse")
        with suppress(errors.RequestTimeoutError):
            client.generate("steps", LONG, delay=0.2, timeout=0.3)
        with suppress(ZeroDivisionError), client.sequence("steps") as steps:
            assert (steps.send("a b").text, steps.send().finish_reason) == ("a", "stop")
            raise ZeroDivisionError
        unfinished = client.stream("steps", LONG)
        next(unfinished)
    assert journal.shows_all_ended(5)


def test_closing_the_client_ends_its_streams(server: Server) -> None:
    client = connect(server.grpc_url)
    pieces = client.stream("words", LONG)
    next(pieces)
    client.close()
    with pytest.raises(errors.RequestCancelledError):
        list(pieces)
    with pytest.raises(errors.UsageError, match="closed"):
        client.generate("words", "a")


class Emitted:
    """The script in a separate folder, without llmserve next to it."""

    def __init__(self, folder: Path, url: str) -> None:
        folder.mkdir()
        self.path = folder / "client.py"
        self.path.write_text(client_script("llmserve.client.script"), encoding="utf-8")
        self.environment = {**os.environ, "LLMSERVE_URL": url}
        self.environment.pop("PYTHONPATH", None)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *arguments],
            env=self.environment, cwd=self.path.parent, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(self, *arguments: str, stdin: str = "") -> tuple[int, str, str]:
        process = self.start("client.py", *arguments)
        out, err = process.communicate(stdin, timeout=120)
        return process.returncode, out, err


@pytest.fixture
def emitted(tmp_path: Path, server: Server) -> Emitted:
    return Emitted(tmp_path / "words", server.grpc_url)


def test_the_script_uses_the_model_in_whose_folder_it_is(emitted: Emitted) -> None:
    # The model returns words without spaces, so joined pieces have none either.
    assert emitted.run("so long") == (0, "solong\n", "")
    assert emitted.run("--no-stream", stdin="so long\n") == (0, "so long\n", "")
    code, out, _ = emitted.run("--model", "plain", "p")
    assert (code, json.loads(out)["text"]) == (0, "p")
    (emitted.path.parent / "llmserve.json").write_text('{"name": "steps"}')
    assert emitted.run("a b c") == (0, "abc\n", "")


def test_the_script_takes_options_and_prints_json(emitted: Emitted) -> None:
    options = ["--max-tokens", "3", "--temperature", "0.5", "--top-p", "0.25", "--top-k", "4"]
    options += ["--seed", str(BIG), "--stop", "é", "--stop", "\n"]
    code, out, err = emitted.run("--model", "echo", "--json", "grün", *options)
    assert (code, err) == (0, "")
    answer = json.loads(out)
    seen = json.loads(answer.pop("text"))
    assert answer == {"finish_reason": "stop", "input_tokens": 5, "output_tokens": 5}
    assert seen["text"] == "grün"
    assert json.loads(seen["parameters"].pop("stop_words")) == ["é", "\n"]
    numbers = {"max_tokens": 3, "temperature": 0.5, "top_p": 0.25, "top_k": 4}
    assert seen["parameters"] == {**numbers, "seed": str(BIG)}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--url", "127.0.0.1:9", "p"], 4, "no Triton answers at 127.0.0.1:9"),
        (["--url", "http://127.0.0.1:8000", "p"], 2, "gRPC port (usually 8001)"),
        (["--nonsense"], 2, "unrecognized arguments"),
        (["--model", "nothing", "p"], 5, "no model 'nothing' that is ready"),
        (["--timeout", "0.3", LONG], 6, "no complete answer in time"),
        (["one refuse"], 7, "refused: no such word"),
        (["--model", "steps", "refuse"], 7, "refused: no such word"),
        (["--model", "echo", "bytes"], 1, "not UTF-8"),
    ],
)
def test_failures_of_the_script_have_their_exit_codes(
    emitted: Emitted, arguments: list[str], code: int, message: str
) -> None:
    returned, _, err = emitted.run(*arguments)
    assert (returned, message in err) == (code, True), err
    assert "Traceback" not in err


@pytest.mark.parametrize("model", ["words", "steps"])
def test_ctrl_c_ends_the_script_and_its_request(
    emitted: Emitted, journal: Journal, model: str
) -> None:
    process = emitted.start("client.py", "--model", model, f"interrupted {LONG}")
    assert process.stdout is not None
    assert process.stdout.read(11) == "interrupted"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")
    if model == "words":
        assert journal.shows_cancelled(f"interrupted {LONG}")
    else:
        assert journal.shows_all_ended(1)


def test_a_closed_output_pipe_is_not_an_error(emitted: Emitted) -> None:
    process = emitted.start("client.py", LONG)
    assert process.stdout is not None
    process.stdout.read(4)
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    assert process.stderr is not None
    assert process.stderr.read() == ""


def test_the_script_can_be_imported(emitted: Emitted) -> None:
    code = (
        "import client, sys\n"
        "print(client.generate('a b').text, [p.text for p in client.stream('a b')])\n"
        "print('llmserve' in sys.modules)"
    )
    assert emitted.start("-c", code).communicate(timeout=60)[0] == "a b ['a', 'b']\nFalse\n"


def test_a_server_that_dies_is_an_error_and_not_a_hang(server: Server) -> None:
    """This test is the last one, because it stops the server."""
    with connect(server.grpc_url) as client:
        pieces = client.stream("words", LONG, delay=0.1)
        next(pieces)
        threading.Timer(0.2, lambda: server.stop(grace=0)).start()
        with pytest.raises(errors.UnreachableError, match="broke"):
            list(pieces)
        server.wait(20)
        assert not client.server_ready()
        with pytest.raises(errors.UnreachableError, match="llmserve serve"):
            client.generate("words", "a")
