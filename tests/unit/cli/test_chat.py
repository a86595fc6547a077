"""`llmserve chat`: what is sent, what can be typed, and how it behaves in a terminal."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from llmserve.client import Piece
from llmserve.errors import (
    InvalidRequestError,
    ModelNotReadyError,
    UnreachableError,
    UsageError,
)
from llmserve.testing import ScriptedTriton
from llmserve.testing.client import ScriptedClient
from llmserve_cli.chat import converse
from llmserve_cli.conversation import Conversation, Ended, Speed, run_command
from llmserve_cli.group import cli
from llmserve_cli.history import history
from tests.terminal import CTRL_C, CTRL_D, CTRL_J, UP, Terminal, pasted


def client_of(*inputs: str) -> ScriptedClient:
    return ScriptedClient(["answer ", "end"], inputs, ["m", "other"])


def test_each_message_is_sent_with_those_before_it() -> None:
    client = client_of("messages")
    conversation = Conversation(client, "m", "Be brief.", {"seed": 1})
    assert "".join(conversation.ask("one")) == "answer end"
    client.pieces = ["another"]
    assert "".join(conversation.ask("two")) == "another"
    assert client.requests[1] == {
        "model": "m", "seed": 1, "fill_context": True,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "answer end"},
            {"role": "user", "content": "two"},
        ],
    }  # fmt: skip
    conversation.reset()
    assert [sent["content"] for sent in conversation.messages("x")] == ["Be brief.", "x"]


def test_a_length_that_was_given_holds() -> None:
    client = client_of("messages")
    list(Conversation(client, "m", options={"max_tokens": 5}).ask("x"))
    assert "fill_context" not in client.requests[0]


def test_an_answer_that_is_stopped_stays_and_one_that_fails_does_not() -> None:
    client = client_of("messages")
    conversation = Conversation(client, "m")
    pieces = conversation.ask("one")
    next(pieces)
    pieces.close()
    assert conversation.turns == [("one", "answer ")]
    client.error = UnreachableError("gone")
    with pytest.raises(UnreachableError):
        list(conversation.ask("two"))
    assert conversation.turns == [("one", "answer ")]
    assert len(conversation.speeds) == 1


@pytest.mark.parametrize("inputs", [[], ["messages"]])
def test_a_model_without_a_template_continues_each_text(inputs: list[str]) -> None:
    client = client_of(*inputs)
    conversation = Conversation(client, "m")
    if inputs:
        client.error = InvalidRequestError("it has none", code="no_chat_template")
        with pytest.raises(InvalidRequestError):
            list(conversation.ask("one"))
        assert not conversation.takes_messages
        client.error = None
    list(conversation.ask("two"))
    assert client.requests[-1] == {"model": "m", "prompt": "two", "fill_context": True}


def test_a_server_of_another_kind_is_only_asked_for_answers() -> None:
    class OnlyStream:
        def __init__(self, client: ScriptedClient) -> None:
            self.stream = client.stream

    client = client_of()
    list(Conversation(OnlyStream(client), "m").ask("one"))
    assert client.requests == [{"model": "m", "messages": [{"role": "user", "content": "one"}]}]


IMAGE = b"\xff\xd8\xff\xe0 photo"
URL = "data:image/jpeg;base64,/9j/4CBwaG90bw=="


def test_an_image_goes_with_the_next_message_and_stays_in_the_conversation(tmp_path: Path) -> None:
    (tmp_path / "my photo.jpg").write_bytes(IMAGE)
    client = client_of("messages", "image_url")
    conversation = Conversation(client, "m")
    words = "1 image will go with the next message"
    assert run_command(conversation, "/image").startswith("no images will go with the next")
    assert run_command(conversation, f"/image '{tmp_path}/my photo.jpg'") == words
    client.error = UnreachableError("gone")
    with pytest.raises(UnreachableError):
        list(conversation.ask("one"))
    client.error = None
    list(conversation.ask("one"))
    list(conversation.ask("two"))
    assert client.requests[-1] == {
        "model": "m", "fill_context": True, "image_url": [URL],
        "messages": [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "one"}]},
            {"role": "assistant", "content": "answer end"},
            {"role": "user", "content": "two"},
        ],
    }  # fmt: skip
    run_command(conversation, f"/save {tmp_path}/talk.md")
    assert "(1 image)\n\none" in (tmp_path / "talk.md").read_text()
    run_command(conversation, f"/save {tmp_path}/talk.json")
    assert URL in (tmp_path / "talk.json").read_text()
    run_command(conversation, "/reset")
    list(conversation.ask("three"))
    assert "image_url" not in client.requests[-1]


def test_a_server_of_another_kind_gets_images_in_parts(tmp_path: Path) -> None:
    class OnlyStream:
        def __init__(self, client: ScriptedClient) -> None:
            self.stream = client.stream

    (tmp_path / "a.jpg").write_bytes(IMAGE)
    client = client_of()
    conversation = Conversation(OnlyStream(client), "m")
    run_command(conversation, f"/image {tmp_path}/a.jpg")
    list(conversation.ask("one"))
    part = {"type": "image_url", "image_url": {"url": URL}}
    content = [part, {"type": "text", "text": "one"}]
    assert client.requests == [{"model": "m", "messages": [{"role": "user", "content": content}]}]


@pytest.mark.parametrize(
    ("argument", "words"),
    [("a b", "/image takes a file: as in"), ("/no/such", "/no/such is no file"),
     ("/dev/zero", "/dev/zero is no file"), ("~", "is no file")],
)  # fmt: skip
def test_what_is_no_image_file_is_refused_at_once(argument: str, words: str) -> None:
    conversation = Conversation(client_of("messages", "image_url"), "m")
    with pytest.raises(UsageError, match=words):
        run_command(conversation, f"/image {argument}")
    assert not conversation.waiting


def test_a_model_of_text_is_shown_no_images(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(IMAGE)
    with pytest.raises(UsageError, match="m reads only text"):
        run_command(Conversation(client_of("messages"), "m"), f"/image {tmp_path}/a.jpg")


@pytest.fixture
def conversation() -> Conversation:
    return Conversation(client_of("messages"), "m", clock=iter(range(100)).__next__)


def test_the_speed_is_of_the_tokens_after_the_first(conversation: Conversation) -> None:
    assert run_command(conversation, "/stats") == "no answer yet"
    list(conversation.ask("one"))
    assert str(conversation.speeds[0]) == "2 tokens, 1.0 tokens/s, first after 1.00 s"
    assert run_command(conversation, "/stats").splitlines() == [
        "1 answer, 2 tokens",
        "tokens/s       1.0",
        "first after    1.00 s",
        "last prompt    7 tokens",
    ]
    list(conversation.ask("two"))
    assert "2 answers, 4 tokens" in run_command(conversation, "/stats")
    assert "(from 1.00 to 1.00) s" in run_command(conversation, "/stats")


def test_an_answer_that_was_cut_off_says_so() -> None:
    speed = Speed(clock=iter([0, 1]).__next__)
    speed.follow(Piece("x", finish_reason="length", output_tokens=1))
    assert str(speed) == "1 token, first after 1.00 s, cut off at the limit"
    assert str(Speed()) == "no text"


def test_commands_change_the_conversation(conversation: Conversation) -> None:
    def run(line: str) -> str:
        return run_command(conversation, line)

    assert run("/system").startswith("system message: none")
    assert run("/system  Be brief. ") == "set, from the next message on"
    assert conversation.system == "Be brief."
    assert run("/system") == "system message: Be brief."
    list(conversation.ask("one"))
    assert run("/reset") == "a new conversation, with the same system message"
    assert run('/system ""') == "there is none now"
    assert run("/model").startswith("model: m; ")
    assert run("/model other").startswith("other answers from now on")
    assert conversation.model == "other"
    with pytest.raises(ModelNotReadyError):
        run("/model missing")
    assert conversation.model == "other"
    text = run("/help")
    for name in (
        "/help",
        "/reset",
        "/system",
        "/image",
        "/save",
        "/model",
        "/stats",
        "/bye",
        "Ctrl-C",
    ):
        assert name in text
    assert max(map(len, text.splitlines())) <= 72
    with pytest.raises(Ended):
        run("/bye")


def test_options_are_set_for_the_messages_to_come() -> None:
    client = client_of("messages", "temperature", "max_tokens", "ignore_eos", "stop_words")
    conversation = Conversation(client, "m")

    def run(line: str) -> str:
        return run_command(conversation, line)

    assert run("/set").startswith("nothing is set; /set NAME VALUE")
    assert run("/set temperature 0.2") == "temperature=0.2, from the next message on"
    assert run("/set max-tokens=9") == "max_tokens=9, from the next message on"
    assert run("/set ignore_eos true") == "ignore_eos=True, from the next message on"
    list(conversation.ask("one"))
    sent = {key: client.requests[0][key] for key in ("temperature", "max_tokens", "ignore_eos")}
    assert sent == {"temperature": 0.2, "max_tokens": 9, "ignore_eos": True}
    assert run("/set temperature").startswith("temperature=0.2; ")
    assert run("/set").startswith("temperature=0.2, max_tokens=9, ignore_eos=True; ")
    assert run("/set temperature default").startswith("temperature has its default")
    for line, message in {
        "/set temprature 1": "m has no option temprature: did you mean 'temperature'?",
        "/set temperature hot": "temperature: 'hot' is not a number",
        "/set max_tokens 0": "max_tokens: 0 is not in the range x>=1",
        "/set messages x": "/set cannot set messages",
    }.items():
        with pytest.raises(UsageError, match=re.escape(message)):
            run(line)
    list(conversation.ask("two"))
    assert "temperature" not in client.requests[1]
    # As OpenAI's API calls it.
    assert run("/set stop END") == "stop_words=END, from the next message on"
    assert run("/set stop").startswith("stop_words=END; ")
    assert run("/set stop default").startswith("stop_words has its default")
    # What others call them.
    assert run("/clear") == "a new conversation"
    assert conversation.turns == []
    with pytest.raises(Ended):
        run("/exit")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/sytem x", "/sytem is no command: did you mean '/system'"),
        ("/etc/passwd is a file", "/etc/passwd is no command: /help shows them"),
        ("/reset all", "/reset takes nothing after it"),
        ("/save", "/save takes a file: as in /save talk.md"),
        ("/save a b", "/save takes a file"),
        ("/save 'a", "/save takes a file"),
        ("/save x", "nothing was said yet"),
    ],
)
def test_a_mistake_is_one_line(conversation: Conversation, line: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        run_command(conversation, line)


def test_a_conversation_is_saved_and_replaces_no_file(
    conversation: Conversation, tmp_path: Path
) -> None:
    conversation.system = "Be brief."
    list(conversation.ask("ünö"))
    path = tmp_path / "two words.json"
    assert run_command(conversation, f"/save '{path}'") == f"saved to {path}"
    # What was said is nobody else's.
    assert path.stat().st_mode & 0o777 == 0o600
    assert json.loads(path.read_text(encoding="utf-8")) == conversation.messages()
    with pytest.raises(UsageError, match="File exists: give another name"):
        run_command(conversation, f"/save '{path}'")
    with pytest.raises(UsageError, match="cannot be written: No such file or directory: give an"):
        run_command(conversation, "/save /no/such/folder/x")
    run_command(conversation, f"/save {tmp_path}/talk.md")
    text = (tmp_path / "talk.md").read_text(encoding="utf-8")
    assert text.startswith("**system**\n\nBe brief.\n\n**user**\n\nünö\n\n**assistant**\n\nanswer")


# In a terminal, and without one


@pytest.fixture
def scripted() -> ScriptedTriton:
    models = {"m": "stream", "other": "unary"}
    return ScriptedTriton(models=models, inputs=["messages"], pieces=["red \x1b[31m", "end"])


def chat(*words: str, stdin: str) -> Result:
    return CliRunner().invoke(cli, ["chat", "m", *words], input=stdin, standalone_mode=False)


def test_without_a_terminal_all_of_the_input_is_one_message(
    scripted: ScriptedTriton, url: str
) -> None:
    result = chat("--url", url, "--system", "Be brief.", stdin="one\ntwo\n")
    assert (result.stdout, result.stderr) == ("red \x1b[31mend\n", "")
    assert json.loads(scripted.messages[0]) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one\ntwo"},
    ]
    assert "standard input is empty" in str(chat("--url", url, stdin="").exception)


def test_a_conversation_in_a_terminal(scripted: ScriptedTriton, url: str) -> None:
    with Terminal("chat", "m", "--url", url) as terminal:
        terminal.wait_for("m: /help shows what can be typed, Ctrl-D ends it")
        terminal.say("one", CTRL_J, "two", "\r")
        terminal.wait_for(r"red \\x1b\[31mend\n\[2 tokens, .*first after \d\.\d\d s\]")
        terminal.say(pasted("a page\nof text"))
        terminal.wait_for("2 tokens")
        # What was typed is discarded, and the program goes on.
        terminal.say("nothing", CTRL_C)
        terminal.say("/nope")
        terminal.wait_for("llmserve: /nope is no command")
        scripted.pieces, scripted.gap = ["slow "] * 100, 0.05
        terminal.say("three")
        terminal.wait_for("slow slow")
        terminal.type(CTRL_C)
        # The terminal does not write ^C into the answer.
        assert "^C" not in terminal.wait_for(r"\[stopped, \d+ tokens")
        scripted.pieces = ["fast"]
        terminal.say("four")
        terminal.wait_for("fast")
        terminal.say("", CTRL_D)
        terminal.ends(0)
    asked = [json.loads(sent) for sent in scripted.messages]
    assert [sent[-1]["content"] for sent in asked] == [
        "one\ntwo",
        "a page\nof text",
        "three",
        "four",
    ]
    assert asked[-1][-2]["content"].startswith("slow slow")
    assert len(asked[-1][-2]["content"]) < 200


def test_what_is_typed_during_an_answer_waits_for_the_next_turn(
    scripted: ScriptedTriton, url: str
) -> None:
    """Nothing of it is answer in the answer; an Enter ends a message as it does elsewhere."""
    scripted.pieces, scripted.gap = [f"slow{number} " for number in range(20)], 0.05
    with Terminal("chat", "m", "--url", url) as terminal:
        terminal.say("one")
        terminal.wait_for("slow1 ")
        terminal.type("typed mean", "while\r", pasted("a page\nof text"), "\r", "and half")
        answer = terminal.wait_for(r"\[20 tokens, .* s\]\n")
        assert "typed" not in answer
        assert "half" not in answer
        assert [int(number) for number in re.findall(r"slow(\d+)", answer)] == list(range(2, 20))
        terminal.wait_for(">>> ?typed meanwhile\n")
        assert "page" not in terminal.wait_for(r"\[20 tokens, .* s\]\n")
        terminal.wait_for("of text\n")
        terminal.wait_for(r"\[20 tokens, .* s\]\n")
        # What had no Enter is there to be gone on with, and not sent.
        terminal.wait_for(">>> ?and half")
        assert len(scripted.messages) == 3
        terminal.type(" a message\r")
        terminal.wait_for("slow1 ")
        # A message that is typed is not lost with the answer that is stopped.
        terminal.type("kept", CTRL_C)
        terminal.wait_for(r"\[stopped, \d+ tokens.*\n")
        terminal.wait_for(">>> ?kept")
        terminal.type(CTRL_C, CTRL_D)
        terminal.ends(0)
    assert [json.loads(sent)[-1]["content"] for sent in scripted.messages] == [
        "one",
        "typed meanwhile",
        "a page\nof text",
        "and half a message",
    ]


def test_what_was_typed_is_there_in_the_next_conversation(
    scripted: ScriptedTriton, url: str, tmp_path: Path
) -> None:
    env = {"XDG_STATE_HOME": str(tmp_path / "state")}
    kept = tmp_path / "state" / "llmserve" / "history"
    with Terminal("chat", "m", "--url", url, env={**env, "LLMSERVE_HISTORY": ""}) as terminal:
        terminal.say("not kept")
        terminal.wait_for("2 tokens")
        terminal.say("", CTRL_C)
        terminal.wait_for("Ctrl-D ends the conversation, and so does /bye\n")
        terminal.say("", CTRL_D)
    assert not kept.exists()
    for message in ("one\nof two lines", "two"):
        with Terminal("chat", "m", "--url", url, env=env) as terminal:
            terminal.say(pasted(message))
            terminal.wait_for("2 tokens")
            terminal.say("", CTRL_D)
            terminal.ends(0)
    assert (kept.stat().st_mode & 0o777, kept.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    with Terminal("chat", "m", "--url", url, env=env) as terminal:
        terminal.say("", UP, UP, UP, "\r")
        terminal.wait_for("2 tokens")
        assert json.loads(scripted.messages[-1])[-1]["content"] == "one\nof two lines"


@pytest.mark.parametrize("kind", ["of others", "link", "folder"])
def test_a_history_that_is_not_the_users_alone_is_not_touched(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, target = tmp_path / "history", tmp_path / "target"
    target.write_text("kept")
    if kind == "link":
        path.symlink_to(target)
    elif kind == "folder":
        path.mkdir()
    else:
        path.touch(mode=0o644)
    monkeypatch.setenv("LLMSERVE_HISTORY", str(path))
    history().store_string("secret")
    assert target.read_text() == "kept"
    assert kind != "of others" or path.read_text() == ""


def test_a_long_history_is_cut_between_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "history"
    monkeypatch.setenv("LLMSERVE_HISTORY", str(path))
    kept = history()
    for number in range(30):
        kept.store_string(f"{number} " + "x" * 40_000)
    assert path.stat().st_size > 1 << 20
    cut = [entry.split()[0] for entry in history().load_history_strings()]
    assert cut == [str(number) for number in range(29, 23, -1)]


def test_an_answer_is_stopped_before_its_first_word(scripted: ScriptedTriton, url: str) -> None:
    scripted.first = 30.0
    with Terminal("chat", "m", "--url", url) as terminal:
        terminal.say("one")
        terminal.wait_for("one\n")
        while not scripted.requests:
            pass
        terminal.type(CTRL_C)
        terminal.wait_for(r"\[stopped\]")
        terminal.say("/bye")
        terminal.ends(0)


def test_a_program_that_is_ended_leaves_the_terminal_as_it_was(
    scripted: ScriptedTriton, url: str
) -> None:
    scripted.pieces, scripted.gap = ["slow "] * 100, 0.05
    with Terminal("chat", "m", "--url", url) as terminal:
        terminal.say("one")
        terminal.wait_for("slow slow")
        assert not terminal.shows_control
        terminal.process.terminate()
        terminal.ends(130)
        assert terminal.shows_control


def test_a_conversation_survives_its_server(scripted: ScriptedTriton) -> None:
    scripted.gap, scripted.pieces = 0.05, ["x "] * 200
    with scripted.in_a_process() as (url, process), Terminal("chat", "m", "--url", url) as terminal:
        terminal.say("one")
        terminal.wait_for("x x")
        process.kill()
        terminal.wait_for("llmserve: the connection to .* broke")
        terminal.say("two")
        terminal.wait_for("llmserve: no Triton answers at")
        terminal.say("", CTRL_D)
        terminal.ends(0)


def test_a_server_with_openais_api_can_be_talked_to(tmp_path: Path) -> None:
    from llmserve.testing.web import http_server, reply

    bodies: list[Any] = []
    events = [
        {"choices": [{"index": 0, "delta": {"content": "Tokyo"}}]},
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}},
    ]
    stream = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"

    def answer(request: Any) -> None:
        bodies.append(json.loads(request.rfile.read(int(request.headers["content-length"]))))
        reply(request, stream.encode())

    with http_server(answer) as url:
        result = chat("--openai", f"{url}/v1", "--max-tokens", "9", stdin="Where?")
    assert result.stdout == "Tokyo\n"
    assert bodies[0]["messages"] == [{"role": "user", "content": "Where?"}]
    assert bodies[0]["max_tokens"] == 9


def test_what_was_said_can_be_saved_when_the_server_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = iter(["one", f"/save {tmp_path / 'talk.md'}", "/bye"])
    monkeypatch.setattr("llmserve_cli.chat._reader", lambda: lines.__next__)

    def check() -> None:
        raise UnreachableError("the server has ended")

    client = client_of("messages")
    conversation = Conversation(client, "m", turns=[("zero", "none")])
    converse(conversation, check)
    assert "llmserve: the server has ended" in capsys.readouterr().err
    assert "none" in (tmp_path / "talk.md").read_text()
    assert not client.requests
