"""A conversation in the terminal, with a real server whose scripted engine repeats the prompt."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cli_process import clean_environment, send_answer, send_events
from support.terminal import Terminal

from parley.cli import temporary_server
from parley.cli.chat import TerminalConversation
from parley.cli.client import ClientError, OpenAIClient, ServerAddress
from parley.cli.terminal.messages import read_message
from parley.settings.options import ConfigError


def test_chat_answers_a_single_question(parley, url):
    done = parley("chat", "--url", url, "-q", "the lazy dog", "--max-tokens", "30")
    assert (done.returncode, done.stderr) == (0, "")
    assert "the lazy dog" in done.stdout


def test_chat_takes_a_v1_url_from_the_environment(parley, url):
    assert parley("chat", "-q", "the fox", "--max-tokens", "9", PARLEY_URL=f"{url}/v1/").returncode == 0


def test_piped_chat_answers_each_line_in_one_conversation(parley, url):
    done = parley("chat", "--url", url, "--max-tokens", "80", stdin="first question\n\nsecond question\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("first question") == 2  # the second answer repeats a prompt that begins with the first


def test_piped_chat_understands_commands(parley, url, tmp_path):
    file = tmp_path / "talk.json"
    lines = ["/set temperature 0.5", "/set seed 7", "/system Be brief.", "hello", f"/save {file}", "/bye", "unheard"]
    done = parley("chat", "--url", url, "--max-tokens", "40", stdin="\n".join(lines))
    assert (done.returncode, done.stderr) == (0, "")
    saved = json.loads(file.read_text())
    assert (saved["temperature"], saved["seed"], saved["max_tokens"]) == (0.5, 7, 40)
    assert [turn["role"] for turn in saved["messages"]] == ["system", "user", "assistant"]
    assert saved["messages"][0]["content"] == "Be brief."
    assert "Be brief." in saved["messages"][2]["content"]
    assert "unheard" not in done.stdout


def test_an_unreadable_image_does_not_lose_the_files_for_the_question(url, tmp_path):
    (tmp_path / "notes.txt").write_text("Buy milk")
    (tmp_path / "broken.png").write_bytes(b"no image")
    client = OpenAIClient(ServerAddress.parse_url(url))
    chat = TerminalConversation(client, client.list_models()[0], settings={"max-tokens": 60})
    chat.run_slash_command(f"/read {tmp_path / 'notes.txt'}")
    with pytest.raises(ConfigError, match="cannot be sent"):
        next(chat.ask_question(f"What is {tmp_path / 'broken.png'}?"))
    assert "Buy milk" in "".join(piece for _, piece in chat.ask_question("What do I need?"))


def test_invalid_command_in_piped_chat_sets_the_exit_code(parley, url):
    done = parley(
        "chat", "--url", url, "--max-tokens", "9", stdin="/sytem x\n/set temprature 1\n/set seed x\nthe fox\n"
    )
    assert done.returncode == 1
    assert "Unknown command /sytem. Did you mean /system?" in done.stderr
    assert "Did you mean temperature?" in done.stderr
    assert "seed: 'x' is not a whole number" in done.stderr
    assert done.stdout.strip()


def test_chat_reports_unknown_model_and_missing_key(parley, url, serve):
    done = parley("chat", "--url", url, "--name", "tinny", "-q", "x")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "parley: The server has no model tinny. Did you mean tiny?\n"
    guarded = serve("--api-key", "sesame")
    done = parley("chat", "--url", guarded, "-q", "x")
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and "key" in done.stderr.lower()
    assert parley("chat", "--url", guarded, "-q", "x", "--max-tokens", "2", PARLEY_API_KEY="sesame").returncode == 0


def test_chat_regenerates_undoes_reads_files_and_changes_models(parley, url, tmp_path):
    (tmp_path / "notes.txt").write_text("The secret is swordfish.")
    saved = tmp_path / "saved.json"
    lines = ["one", "/regenerate", "two", "/undo", f"/read {tmp_path / 'notes.txt'}", "What is it?", "/model"]
    lines += ["/model tiny", f"/save {saved}", "/undo", "/undo", "/undo", "/model other", "/read /no/such"]
    done = parley("chat", "--url", url, stdin="\n".join(lines) + "\n")
    turns = json.loads(saved.read_text())["messages"]
    assert [turn["role"] for turn in turns] == ["user", "assistant"] * 2
    assert [turns[0]["content"], turns[2]["content"]] == ["one", "notes.txt:\nThe secret is swordfish.\n\nWhat is it?"]
    assert "* tiny" in done.stdout and "tiny answers from now on." in done.stdout
    assert done.returncode == 1
    for sentence in ("There is no question yet.", "no model other", "/no/such cannot be read"):
        assert sentence in done.stderr


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["one"], "one"),
        (["one \\", "two\\", "three"], "one \ntwo\nthree"),
        (['"""one', "", 'two"""'], "one\n\ntwo"),
        (['"""one"""'], "one"),
        (["pasted\nas it is\n"], "pasted\nas it is"),
    ],
)
def test_messages_have_several_lines(typed, message):
    assert read_message(read_line=lambda prompt: typed.pop(0)) == message
    assert not typed


def test_pasted_lines_are_one_message_and_tab_completes_commands(url, open_terminal):
    terminal = open_terminal("chat", "--url", url)
    terminal.read_until(">>> ")
    terminal.type_text("\x1b[200~first line\nsecond line\x1b[201~\n")
    terminal.read_until("tokens")
    terminal.read_until(">>> ")
    terminal.type_text("/sh\t\n")
    assert "turns              2" in terminal.read_until(">>> ").replace("\r", "")
    terminal.type_text("/bye\n")
    assert terminal.exit_code() == 0


def test_ps_lists_the_models_of_a_server(parley, url):
    done = parley("ps", "--url", url)
    assert done.returncode == 0
    head, model, state = done.stdout.splitlines()
    assert head.split()[0] == "NAME" and model.split()[0] == "tiny" and state == f"{url} is ready."


def test_chat_prints_partial_text_of_a_failed_stream(parley, faulty):
    piece = b'{"choices":[{"delta":{"content":"half"}}]}'
    broken = faulty(lambda handler: send_events(handler, piece))
    done = parley("chat", "--url", broken, "-q", "x")
    assert done.returncode == 1 and done.stdout.strip() == "half"
    assert "closed the connection before the answer was complete" in done.stderr
    failing = faulty(lambda handler: send_events(handler, piece, b'{"error":{"message":"The engine ended."}}'))
    done = parley("chat", "--url", failing, "-q", "x")
    assert done.returncode == 1 and "The engine ended." in done.stderr
    refusing = faulty(lambda handler: send_answer(handler, 429, b'{"error":{"message":"Too many."}}'))
    assert "parley: Too many." in parley("chat", "--url", refusing, "-q", "x").stderr
    strange = faulty(lambda handler: send_answer(handler, 500, b"<html>"))
    assert "answered with status 500" in parley("chat", "--url", strange, "-q", "x").stderr


class LoadingProcess:
    """A server that ends while it loads: its process, and a client to it."""

    def __init__(self) -> None:
        self.results = [None, 1]

    def poll(self) -> int | None:
        return self.results.pop(0)

    def call_json(self, *arguments: Any, **options: Any) -> Any:
        raise ClientError("The model is still loading (0%).", 503)


def test_chat_clears_the_progress_of_a_server_that_does_not_start(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", screen)
    loading: Any = LoadingProcess()
    with pytest.raises(ClientError, match="did not start: no weights"):
        temporary_server.wait_for_server(loading, loading, io.BytesIO(b"no weights"))
    assert "still loading" in screen.getvalue() and screen.getvalue().endswith("\r\x1b[K")


# A network of its own, whose only interface has no address.
UNSHARE = [
    "unshare",
    "--map-root-user",
    "--net",
    "sh",
    "-c",
    'ip link set lo up && ip addr flush dev lo && exec "$@"',
    "-",
]


@pytest.mark.skipif(
    not shutil.which("unshare") or subprocess.run([*UNSHARE, "true"], capture_output=True).returncode != 0,
    reason="a network of its own needs unshare, ip and the permission",
)
def test_chat_on_a_machine_without_addresses_is_refused_by_a_sentence():
    command = [*UNSHARE, sys.executable, "-m", "parley", "chat", "-q", "a"]
    done = subprocess.run(command, capture_output=True, text=True, env=clean_environment(), timeout=60)
    message = "parley: No server can be started: nothing can listen on 127.0.0.1 or ::1.\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", message)


@pytest.fixture
def open_terminal(tmp_path) -> Iterator[Callable[..., Terminal]]:
    """Runs commands on terminals, with the test's folder as home; all are closed at the end."""
    with contextlib.ExitStack() as stack:
        yield lambda *words: stack.enter_context(Terminal(*words, home=tmp_path))


def test_ctrl_c_stops_the_answer_but_not_the_conversation(faulty, tmp_path, open_terminal):
    def hang(handler) -> None:
        send_events(handler, b'{"choices":[{"delta":{"content":"endless"}}]}')
        time.sleep(60)

    terminal = open_terminal("chat", "--url", faulty(hang))
    terminal.read_until(">>> ")
    terminal.type_text("go on\n")
    terminal.read_until("endless")
    terminal.type_text("\x03")
    terminal.read_until("(stopped)")
    terminal.read_until(">>> ")
    terminal.interrupt("/bye or Ctrl-D ends the conversation.")
    terminal.read_until(">>> ")
    terminal.type_text("/show\n")
    assert "turns              2" in terminal.read_until(">>> ").replace("\r", "")
    terminal.type_text("/regenerate\n")
    terminal.read_until("endless")
    terminal.type_text("\x03")
    terminal.read_until("(stopped)")
    terminal.read_until(">>> ")
    terminal.type_text("/bye\n")
    assert terminal.exit_code() == 0
    history = tmp_path / "parley" / "history"
    assert "go on" in history.read_text() and history.stat().st_mode & 0o077 == 0


def test_chat_dims_reasoning_and_ends_on_ctrl_d(faulty, open_terminal):
    thought = b'{"choices":[{"delta":{"reasoning_content":"hm"}}]}'
    answer_event = b'{"choices":[{"delta":{"content":"so"}}]}'
    terminal = open_terminal("chat", "--url", faulty(lambda h: send_events(h, thought, answer_event, b"[DONE]")))
    terminal.read_until(">>> ")
    terminal.type_text("think\n")
    assert "\x1b[2mhm\x1b[0m" in terminal.read_until("so")
    terminal.read_until(">>> ")
    terminal.type_text("\x04")
    assert terminal.exit_code() == 0


def server_pids(folder: Path) -> list[int]:
    """Returns the processes that serve this folder."""
    listing = subprocess.run(["ps", "-ewwo", "pid,args"], capture_output=True, text=True, check=True).stdout
    return [int(line.split()[0]) for line in listing.splitlines() if "parley serve" in line and str(folder) in line]


@pytest.fixture
def own_folder(tiny, tmp_path) -> Path:
    """The tiny model under a path that no other test serves."""
    link = tmp_path / "own"
    link.symlink_to(tiny)
    return link


def test_chat_starts_and_stops_its_own_server(parley, own_folder):
    done = parley("chat", str(own_folder), "-q", "the lazy dog", "--max-tokens", "30", PARLEY_SCRIPTED_ENGINE="1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "the lazy dog" in done.stdout
    assert not server_pids(own_folder)


def test_chat_reports_why_its_server_did_not_start(parley, tmp_path):
    done = parley("chat", str(tmp_path), "-q", "x")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert (
        line.startswith(f"parley: The server did not start: {tmp_path} cannot be served: ") and "no config.json" in line
    )


def test_chat_says_how_an_address_in_place_of_a_model_is_meant(parley):
    done = parley("chat", "http://127.0.0.1:9", "-q", "x")
    assert done.returncode == 2 and "--url http://127.0.0.1:9" in done.stderr


def test_killed_chat_leaves_no_server(own_folder, tmp_path):
    command = [sys.executable, "-m", "parley", "chat", str(own_folder)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, env=clean_environment() | {"PARLEY_SCRIPTED_ENGINE": "1"}
    ) as chat:
        assert wait_until(30, lambda: server_pids(own_folder))
        chat.send_signal(signal.SIGKILL)
    assert wait_until(30, lambda: not server_pids(own_folder))


def wait_until(seconds: float, condition) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def test_chat_keeps_aborted_answers_and_drops_unanswered_questions(url, faulty):
    chat = TerminalConversation(
        OpenAIClient(ServerAddress.parse_url(url)), "tiny", settings={"max-tokens": 40, "thinking": "on"}
    )
    answer = chat.ask_question("the quick brown fox")
    pieces = [next(answer)[1], next(answer)[1]]
    answer.close()
    assert [turn["role"] for turn in chat.turns] == ["user", "assistant"]
    assert chat.turns[1]["content"] == "".join(pieces)
    assert chat.request_body()["chat_template_kwargs"] == {"enable_thinking": True}
    silent = TerminalConversation(
        OpenAIClient(ServerAddress.parse_url(faulty(lambda h: send_events(h, b"[DONE]")))), "m"
    )
    assert list(silent.ask_question("x")) == [] and silent.turns == []
    unreachable = TerminalConversation(OpenAIClient(ServerAddress.parse_url("http://127.0.0.1:9")), "m")
    with pytest.raises(ClientError, match="No server answers"):
        list(unreachable.ask_question("x"))
    assert unreachable.turns == []


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("http://h:1", "http://h:1"),
        ("h:1", "http://h:1"),
        ("https://h", "https://h:443"),
        ("http://h/v1", "http://h:80"),
        ("http://h/openai/v1/", "http://h:80/openai"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_parses_server_addresses_in_common_forms(text, address):
    assert str(ServerAddress.parse_url(text)) == address


@pytest.mark.parametrize("text", ["", "ftp://h", "http://", "http://h:x", "http://h:99999", "http://[::1"])
def test_rejects_invalid_server_addresses(text):
    with pytest.raises(ConfigError):
        ServerAddress.parse_url(text)


IMAGE = b"\x89PNG\r\n\x1a\n" + bytes(20)


def saved_questions(parley, faulty, tmp_path: Path, *lines: str) -> tuple[list[Any], str]:
    """Return the contents of the user's turns after these lines, and what was printed as errors."""
    piece = b'{"choices":[{"delta":{"content":"a cat"}}]}'
    server = faulty(lambda handler: send_events(handler, piece, b"[DONE]"))
    saved = tmp_path / "saved.json"
    done = parley("chat", "--url", server, stdin="\n".join([*lines, f"/save {saved}", "/bye"]))
    turns = json.loads(saved.read_text())["messages"]
    return [turn["content"] for turn in turns if turn["role"] == "user"], done.stderr


def test_chat_sends_images_that_a_command_or_a_question_names(parley, faulty, tmp_path):
    for name in ("cat.png", "my dog.PNG"):
        (tmp_path / name).write_bytes(IMAGE)
    cat, dog = tmp_path / "cat.png", tmp_path / "my dog.PNG"
    escaped = str(dog).replace(" ", "\\ ")
    lines = [f"/image {cat}", "What is this?", f"{cat} and '{dog}'", f"Compare {escaped}", "none.png is text"]
    contents, errors = saved_questions(parley, faulty, tmp_path, *lines)
    assert errors == ""
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgoAAAAAAAAAAAAAAAAAAAAAAAAAAA=="}}
    assert contents == [
        [part, {"type": "text", "text": "What is this?"}],
        [part, part, {"type": "text", "text": "and"}],
        [part, {"type": "text", "text": "Compare"}],
        "none.png is text",
    ]


def test_chat_refuses_files_that_are_no_images(parley, faulty, tmp_path):
    text, large = tmp_path / "text.png", tmp_path / "large.png"
    text.write_text("no image")
    large.touch()
    os.truncate(large, 26 << 20)
    lines = ["/image", f"/image {tmp_path}/none.png", f"/image {large}", f"see {text}", "hello"]
    contents, errors = saved_questions(parley, faulty, tmp_path, *lines)
    assert contents == ["hello"]
    assert errors.splitlines() == [
        "parley: /image needs the name of a file.",
        f"parley: {tmp_path}/none.png cannot be read: No such file or directory.",
        f"parley: {large} is larger than 25 MB.",
        "",
        f"parley: {text} cannot be sent: it is no image, video or audio of a known format.",
    ]
