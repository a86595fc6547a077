"""The key file: who may write to it, and what is noticed of its changes."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from llmserve.errors import ConfigError, UsageError
from llmserve_gateway.commands import key as key_command
from llmserve_gateway.errors import ApiError
from llmserve_gateway.keys import Key, KeyRing, hash_key, new_key, read_keys, take_key


def test_a_file_that_is_nested_too_deeply_is_no_key_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    key = new_key(file, "me")
    ring = KeyRing(file)
    file.write_text('{"keys": ' + "[" * 100_000, encoding="utf-8")
    for _ in range(3):
        assert ring.authenticate(f"Bearer {key}").name == "me"
    assert caplog.text.count("nested too deeply") == 1, "once for each change"
    with pytest.raises(ConfigError, match="nested too deeply"):
        KeyRing(file)


def test_a_key_is_revoked_whatever_the_times_of_its_file_say(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    key, other = new_key(file, "me"), new_key(file, "you")
    ring = KeyRing(file)
    assert ring.authenticate(f"Bearer {key}").name == "me"
    before = file.stat()
    content = file.read_text(encoding="utf-8").replace(hash_key(key), hash_key("another"))
    with file.open("r+", encoding="utf-8") as same:
        same.write(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    assert (after.st_mtime_ns, after.st_ino, after.st_size) == (
        before.st_mtime_ns, before.st_ino, before.st_size,
    )  # fmt: skip
    with pytest.raises(ApiError, match="a valid API key"):
        ring.authenticate(f"Bearer {key}")
    assert ring.authenticate(f"Bearer {other}").name == "you"


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_can_write_to_is_refused(
    tmp_path: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    key = new_key(file, "me")
    ring = KeyRing(file)
    file.chmod(mode)
    with pytest.raises(ConfigError, match="chmod go-w"):
        read_keys(file)
    new = {"name": "evil", "sha256": hash_key("sk-evil")}
    file.write_text(json.dumps({"keys": [new]}), encoding="utf-8")
    assert ring.authenticate(f"Bearer {key}").name == "me", "the previous keys stay valid"
    with pytest.raises(ApiError, match="a valid API key"):
        ring.authenticate("Bearer sk-evil")
    assert "other users can write" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    new_key(file, "me")
    os.chown(file, 12345, -1)
    with pytest.raises(ConfigError, match=r"belongs to another user: chown 0 .*keys"):
        read_keys(file)


def test_a_pipe_or_a_huge_file_is_no_key_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "huge").write_bytes(b" " * (2 << 20))
    (tmp_path / "huge").chmod(0o600)
    for name, why in (("pipe", "is not a file"), ("huge", "is over 1 MB"), ("", "cannot read")):
        with pytest.raises(ConfigError, match=why):
            read_keys(tmp_path / name if name else tmp_path / "none")


def test_an_empty_key_lets_nobody_in(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    entry: dict[str, Any] = {"name": "empty", "sha256": hash_key("")}
    file.write_text(json.dumps({"keys": [entry]}), encoding="utf-8")
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="hash of an empty key"):
        read_keys(file)


def test_what_is_refused_for_its_tokens_is_not_counted_as_a_request(tmp_path: Path) -> None:
    new_key(tmp_path / "keys", "me", requests_per_minute=2, tokens_per_minute=60)
    ring = KeyRing(tmp_path / "keys")
    (key,) = read_keys(tmp_path / "keys")
    ring.charge(key, 50)
    for _ in range(3):
        with pytest.raises(ApiError, match="60 tokens per minute"):
            ring.charge(key, 50)
    ring.charge(key, 1, take=False)
    ring.charge(key, 1)
    with pytest.raises(ApiError, match="2 requests per minute"):
        ring.charge(key, 1)


def test_the_tokens_of_answers_count(tmp_path: Path) -> None:
    new_key(tmp_path / "keys", "me", tokens_per_minute=60)
    ring = KeyRing(tmp_path / "keys")
    (key,) = read_keys(tmp_path / "keys")
    ring.charge(key, 10)
    ring.charge_answer(key, 170)
    with pytest.raises(ApiError, match="60 tokens per minute") as refused:
        ring.charge(key, 1)
    # It may have 60 in advance, and has used 180; one more makes 121 s.
    assert 119 <= int(refused.value.headers["retry-after"]) <= 122
    unlimited = Key("you", hash_key("x"))
    ring.charge_answer(unlimited, 10**9)
    ring.charge(unlimited, 10**9)


def run_key(file: Path, *words: str) -> str:
    done = CliRunner().invoke(key_command, [*words, "--file", str(file)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_keys_are_listed_changed_and_revoked_while_a_gateway_runs(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    limits = ("--requests-per-minute", "60", "--model", "a", "--operator")
    alice = run_key(file, "new", "alice", *limits).strip()
    bob = run_key(file, "new", "bob").strip()
    ring = KeyRing(file)

    def known(key: str) -> Key:
        return ring.authenticate(f"Bearer {key}")

    run_key(file, "set", "bob", "--name", "robert", "--model", "b", "--tokens-per-minute", "9000")
    changed = known(bob)
    assert (changed.name, changed.models, changed.tokens_per_minute) == ("robert", ["b"], 9000)
    run_key(file, "set", "robert", "--all-models", "--tokens-per-minute", "none", "--all-metrics")
    changed = known(bob)
    assert (changed.models, changed.tokens_per_minute, changed.all_metrics) == ([], None, True)
    assert changed.requests_per_minute is None
    assert known(alice) == Key("alice", hash_key(alice), ["a"], 60, operator=True), "as it was"
    listed = [line.split() for line in run_key(file, "list").splitlines()]
    assert listed[1:] == [["alice", "a", "60", "-", "1", "0", "operator"],
                          ["robert", "all", "-", "-", "1", "0", "all-metrics"]]  # fmt: skip
    as_json = run_key(file, "list", "--json")
    assert json.loads(as_json)[0]["requests_per_minute"] == 60
    for output in (as_json, run_key(file, "list")):
        assert not any(secret in output for secret in (alice, bob, *map(hash_key, (alice, bob))))
    run_key(file, "revoke", "alice")
    with pytest.raises(ApiError, match="a valid API key"):
        known(alice)
    assert known(bob).name == "robert"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["keys"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["revoke", "nobody"], "no key named 'nobody'"),
        (["set", "nobody", "--operator"], "no key named 'nobody'"),
        (["set", "me"], "nothing to change"),
        (["set", "me", "--name", "you"], "already has a key named 'you'"),
        (["set", "me", "--name", " "], "needs a name"),
        (["set", "me", "--model", "a", "--all-models"], "contradict"),
        (["new", "me"], "already has a key named 'me': use another name, or llmserve key revoke"),
    ],
)
def test_what_cannot_be_changed_changes_nothing(tmp_path: Path, words: list[str], why: str) -> None:
    file = tmp_path / "keys"
    new_key(file, "me")
    new_key(file, "you")
    before = file.read_bytes()
    with pytest.raises(UsageError, match=why):
        run_key(file, *words)
    assert file.read_bytes() == before
    for wrong in ("0", "-1", "many"):
        done = CliRunner().invoke(key_command, ["set", "me", "--tokens-per-minute", wrong])
        assert done.exit_code == 2
    with pytest.raises(ConfigError, match="cannot read"):
        run_key(tmp_path / "other", "list")


def test_a_name_in_a_list_tells_the_terminal_nothing(tmp_path: Path) -> None:
    new_key(tmp_path / "keys", "\x1b]0;evil\x07")
    assert "\x1b" not in run_key(tmp_path / "keys", "list")


def test_keys_that_are_made_at_once_are_all_there(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    code = "import sys; from llmserve_gateway.commands import key; sys.stdin.read(1); key()"
    makers = [
        subprocess.Popen(
            [sys.executable, "-c", code, "new", f"user{number}", "--file", file],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for number in range(8)
    ]  # fmt: skip
    for maker in makers:
        assert maker.stdin is not None
        maker.stdin.write("x")
        maker.stdin.flush()
    made = {hash_key(maker.communicate(timeout=60)[0].strip()) for maker in makers}
    assert {key.sha256 for key in read_keys(file)} == made
    assert len(made) == 8


def test_who_could_read_a_key_file_still_can(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    new_key(file, "me")
    file.chmod(0o640)
    run_key(file, "set", "me", "--operator")
    assert stat.S_IMODE(file.stat().st_mode) == 0o640


def test_a_key_that_clients_have_is_taken_from_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    words = ["new", "clients", "--file", str(file), "--from-env", "OLD_KEY"]
    with pytest.raises(UsageError, match="OLD_KEY is not set"):
        CliRunner().invoke(key_command, words, catch_exceptions=False, standalone_mode=False)
    monkeypatch.setenv("OLD_KEY", "token-0123456789abc")
    result = CliRunner().invoke(key_command, words, catch_exceptions=False)
    assert "token-0123456789abc" not in result.output
    assert KeyRing(file).authenticate("Bearer token-0123456789abc").name == "clients"
    with pytest.raises(UsageError, match="has this key already"):
        take_key(file, "others", "token-0123456789abc")


@pytest.mark.parametrize("key", ["EMPTY", "aaaaaaaaaaaaaaaaaaaaaaaa", "short-key", ""])
def test_a_key_that_is_easy_to_guess_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(UsageError, match="easy to guess"):
        take_key(tmp_path / "keys", "me", key)
    assert not (tmp_path / "keys").exists()


def test_a_key_that_no_header_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no header"):
        take_key(tmp_path / "keys", "me", "a key with blanks in it")
