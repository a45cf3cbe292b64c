"""``parley chat``: a conversation in the terminal, with a running server or with one that it starts.

In a terminal it edits lines and keeps a history. Given a pipe it answers each line; ``-q`` asks one question. Ctrl-C
stops only the current answer. It uses the OpenAI API, so any such server will do. ``spawn`` starts servers.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from parley.cli.client import Client, ClientError, connect
from parley.cli.spawn import start
from parley.settings.config import CLIENT
from parley.settings.kinds import choice, integer, number, text
from parley.settings.options import Config, ConfigError, Option, explain, nearest

USAGE = """\
usage: parley chat [MODEL] [options]

Talks to the server at --url. Without --url, to one on port 8000, or else to one that runs only as long as the chat.
Lines that begin with / are commands: /help lists them."""

SETTINGS: list[Option] = [
    Option("temperature", number(0, 2), "0 always takes the most probable token.", section="answers"),
    Option("top-p", number(0, 1), "Sample from the most probable tokens up to this total.", section="answers"),
    Option("top-k", integer(0), "Sample from this many most probable tokens; 0 means all.", section="answers"),
    Option("min-p", number(0, 1), "Drop tokens below this share of the best one.", section="answers"),
    Option("repetition-penalty", number(0.01, 10), "Above 1 discourages repetition.", section="answers"),
    Option("presence-penalty", number(-2, 2), "Discourage tokens that occurred.", section="answers"),
    Option("frequency-penalty", number(-2, 2), "Discourage tokens by how often they occurred.", section="answers"),
    Option("seed", integer(0), "The same seed gives the same answer.", section="answers"),
    Option("max-tokens", integer(1), "Longest answer, in tokens.", section="answers"),
    Option("stop", text(), "End the answer before this text.", section="answers"),
    Option("thinking", choice("on", "off"), "Let the model think first, if it can.", section="answers"),
]

OPTIONS = [
    Option("model", text("MODEL"), "Model to start a server with.", unset="the built-in model", positional=True),
    Option("name", text("NAME"), "The server's model to talk to.", unset="its first"),
    Option("question", text(), "Ask this, print the answer and exit.", short="-q"),
    Option("system", text(), "System prompt."),
    *SETTINGS,
    *CLIENT,
]

HELP = """\
/system TEXT      set the system prompt (without TEXT: remove it)
/set NAME VALUE   change a sampling setting (without VALUE: the server's default)
/show             show model, system prompt and settings
/save FILE        write the conversation as JSON
/clear            forget the conversation, keep system prompt and settings
/help             show this text
/bye              end the conversation, as does Ctrl-D

Ctrl-C stops an answer."""


class Chat:
    """One conversation: its turns, its settings, and its server."""

    def __init__(self, client: Client, model: str, system: str | None = None, settings: dict[str, Any] | None = None):
        self.client = client
        self.model = model
        self.system = system
        self.settings = dict(settings or {})
        self.turns: list[dict[str, str]] = []

    def body(self) -> dict[str, Any]:
        """Return the request body: the whole conversation and the changed settings."""
        start = [{"role": "system", "content": self.system}] if self.system else []
        body: dict[str, Any] = {"model": self.model, "messages": start + self.turns, "stream": True}
        for name, value in self.settings.items():
            if name == "thinking":
                body["chat_template_kwargs"] = {"enable_thinking": value == "on"}
            else:
                body[name.replace("-", "_")] = value
        return body

    def ask(self, question: str) -> Generator[tuple[str, str], None, None]:
        """Stream the answer as (part, text), where part is "content" or "reasoning".

        The answer received so far becomes part of the conversation when it ends or the caller stops; a question without
        an answer is dropped. Raises ClientError.
        """
        self.turns.append({"role": "user", "content": question})
        answer: list[str] = []
        try:
            with contextlib.closing(self.client.stream("/v1/chat/completions", self.body())) as events:
                for part, piece in _pieces(events):
                    if part == "content":
                        answer.append(piece)
                    yield part, piece
        finally:
            if answer:
                self.turns.append({"role": "assistant", "content": "".join(answer)})
            else:
                self.turns.pop()

    def command(self, line: str) -> str | None:
        """Execute a line that begins with a slash. Return the text to print, or None to exit. Raises ConfigError."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name in ("/bye", "/exit", "/quit"):
            return None
        if name == "/help":
            return f"{HELP}\n{explain(SETTINGS)}".replace(" --", " ")
        if name == "/system":
            self.system = rest or None
            return "System prompt set." if rest else "System prompt removed."
        if name == "/set":
            return self._set(*rest.partition(" ")[::2])
        if name == "/show":
            return self._show()
        if name == "/clear":
            self.turns.clear()
            return "Conversation cleared."
        if name == "/save":
            return self._save(rest)
        raise ConfigError(f"Unknown command {name}.{nearest(name, ['/' + word for word in COMMANDS])}")

    def _set(self, name: str, value: str) -> str:
        option = next((o for o in SETTINGS if o.name == name.replace("_", "-")), None)
        if option is None:
            names = [o.name for o in SETTINGS]
            raise ConfigError(f"Unknown setting {name!r}.{nearest(name, names) or ' Known: ' + ', '.join(names) + '.'}")
        if not value.strip():
            self.settings.pop(option.name, None)
            return f"{option.name} is the server's default."
        self.settings[option.name] = option.read(value.strip(), option.name)
        return f"{option.name} is {option.show(self.settings[option.name])}."

    def _show(self) -> str:
        rows = [("server", str(self.client.address)), ("model", self.model), ("system", self.system or "(none)")]
        rows += [(o.name, o.show(self.settings[o.name])) for o in SETTINGS if o.name in self.settings]
        rows += [("turns", str(len(self.turns)))]
        return "\n".join(f"{name:<18} {value}" for name, value in rows)

    def _save(self, file: str) -> str:
        if not file:
            raise ConfigError("/save needs the name of a file.")
        body = self.body()
        del body["stream"]
        try:
            Path(file).expanduser().write_text(json.dumps(body, indent=2, ensure_ascii=False) + "\n", "utf-8")
        except OSError as error:
            raise ConfigError(f"{file} cannot be written: {error.strerror}.") from None
        return f"Saved to {file}."


COMMANDS = ("help", "system", "set", "show", "save", "clear", "bye")


def _pieces(events: Iterator[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    for event in events:
        for part in event.get("choices") or []:
            delta = part.get("delta") or {}
            if thought := delta.get("reasoning") or delta.get("reasoning_content"):
                yield "reasoning", thought
            if content := delta.get("content"):
                yield "content", content


def run(config: Config) -> int:
    """Hold the conversation that the options describe. Return the exit code."""
    try:
        with _server(config) as client:
            names = client.models()
            name = config["name"] or (names[0] if names else "")
            if name not in names:
                print(f"parley: The server has no model {name}.{nearest(name, names)}", file=sys.stderr)
                return 1
            settings = {o.name: config[o.name] for o in SETTINGS if config[o.name] is not None}
            chat = Chat(client, name, config["system"], settings)
            if config["question"]:
                return 0 if answer(chat, config["question"]) else 1
            return talk(chat) if sys.stdin.isatty() else feed(chat)
    except ClientError as error:
        print(f"parley: {error}", file=sys.stderr)
        return 1


@contextlib.contextmanager
def _server(config: Config) -> Iterator[Client]:
    """Yield a client of the server at --url, of one that runs already, or of one started until the block ends."""
    if config["url"] and config["model"]:
        raise ConfigError("MODEL starts a new server; with --url, use --name to choose one of its models.")
    client = connect(config)
    if config["url"] or (not config["model"] and _serves(client)):
        yield client
    else:
        with start(config["model"]) as client:
            yield client


def _serves(client: Client) -> bool:
    try:
        return bool(client.models())
    except ClientError as error:
        return error.status in (401, 403)  # it runs, but the key is wrong


def answer(chat: Chat, question: str) -> bool:
    """Print the answer as it arrives. Return False if it failed. Reasoning is shown, dimmed, only in a terminal."""
    colour = sys.stdout.isatty()
    thinking = False
    try:
        with contextlib.closing(chat.ask(question)) as pieces:
            for part, piece in pieces:
                if colour and thinking != (part == "reasoning"):
                    thinking = not thinking
                    sys.stdout.write("\x1b[2m" if thinking else "\x1b[0m\n\n")
                if part == "content" or colour:
                    sys.stdout.write(piece)
                    sys.stdout.flush()
        return True
    except ClientError as error:
        sys.stdout.flush()
        print(f"\nparley: {error}", file=sys.stderr)
        return False
    finally:
        print("\x1b[0m" if thinking else "", flush=True)


def feed(chat: Chat) -> int:
    """Answer every line of standard input. Return the exit code."""
    good = True
    for line in map(str.strip, sys.stdin):
        if line.startswith("/"):
            if (done := _obey(chat, line)) is None:
                break
            good &= done
        elif line:
            good &= answer(chat, line)
    return 0 if good else 1


def talk(chat: Chat) -> int:
    """Read lines from the terminal until /bye or Ctrl-D. Return the exit code."""
    print(f"{chat.model} at {chat.client.address}. /help lists commands, /bye exits.")
    with _history():
        while True:
            try:
                line = input(">>> ").strip()
            except EOFError:
                print()
                return 0
            except KeyboardInterrupt:
                print("\n/bye or Ctrl-D ends the conversation.")
                continue
            if line.startswith("/"):
                if _obey(chat, line) is None:
                    return 0
            elif line:
                try:
                    answer(chat, line)
                except KeyboardInterrupt:
                    print("(stopped)")


def _obey(chat: Chat, line: str) -> bool | None:
    """Return whether a command worked, or None if it ends the conversation."""
    try:
        said = chat.command(line)
    except ConfigError as error:
        print(f"parley: {error}", file=sys.stderr)
        return False
    if said is None:
        return None
    print(said)
    return True


@contextlib.contextmanager
def _history() -> Iterator[None]:
    """Enable line editing, with the history of earlier conversations."""
    try:
        import readline
    except ImportError:  # Python was built without it
        yield
        return
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    file = state / "parley" / "history"
    with contextlib.suppress(OSError):
        readline.read_history_file(file)
    readline.set_history_length(1000)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch(mode=0o600)
            readline.write_history_file(file)
