"""``parley chat``: a conversation in the terminal, with a running server or with one that it starts.

In a terminal it edits lines and keeps a history. Given a pipe it answers each line; ``-q`` asks one question. Ctrl-C
stops only the current answer. It uses the OpenAI API, so any such server will do. ``temporary_server``
starts servers.
"""

from __future__ import annotations

import contextlib
import glob
import json
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parley.cli.chat_media import read_media_file, split_pasted_files
from parley.cli.client import ClientError, OpenAIClient, client_from_options
from parley.cli.temporary_server import spawn_server
from parley.cli.terminal.messages import edited_lines, read_message
from parley.settings.config import CLIENT_OPTIONS
from parley.settings.option_kinds import choice_kind, integer_kind, number_kind, text_kind
from parley.settings.options import ConfigError, Option, ResolvedOptions, did_you_mean, format_help

USAGE = """\
usage: parley chat [MODEL] [options]

Talks to the server at --url. Without --url, to one on port 8000, or else to one that runs only as long as the chat.
Lines that begin with / are commands: /help lists them."""

ANSWER_OPTIONS: list[Option] = [
    Option("temperature", number_kind(0, 2), "0 always takes the most probable token.", section="answers"),
    Option("top-p", number_kind(0, 1), "Sample from the most probable tokens up to this total.", section="answers"),
    Option("top-k", integer_kind(0), "Sample from this many most probable tokens; 0 means all.", section="answers"),
    Option("min-p", number_kind(0, 1), "Drop tokens below this share of the best one.", section="answers"),
    Option("repetition-penalty", number_kind(0.01, 10), "Above 1 discourages repetition.", section="answers"),
    Option("presence-penalty", number_kind(-2, 2), "Discourage tokens that occurred.", section="answers"),
    Option("frequency-penalty", number_kind(-2, 2), "Discourage tokens by how often they occurred.", section="answers"),
    Option("seed", integer_kind(0), "The same seed gives the same answer.", section="answers"),
    Option("max-tokens", integer_kind(1), "Longest answer, in tokens.", section="answers"),
    Option("stop", text_kind(), "End the answer before this text.", section="answers"),
    Option("thinking", choice_kind("on", "off"), "Let the model think first, if it can.", section="answers"),
]

OPTIONS = [
    Option(
        "model", text_kind("MODEL"), "Model to start a server with.", unset_text="the built-in model", positional=True
    ),
    Option("name", text_kind("NAME"), "The server's model to talk to.", unset_text="its first"),
    Option("question", text_kind(), "Ask this, print the answer and exit.", short="-q"),
    Option("system", text_kind(), "System prompt."),
    *ANSWER_OPTIONS,
    *CLIENT_OPTIONS,
]

CHAT_HELP = '''\
/system TEXT      set the system prompt (without TEXT: remove it)
/set NAME VALUE   change a sampling setting (without VALUE: the server's default)
/show             show model, system prompt and settings
/model NAME       continue with another model of the server (without NAME: list them)
/regenerate       answer the last question again
/undo             forget the last question and its answer
/read FILE        send a text file with the next question
/image FILE       send an image or audio file with the next question; a path in the question does the same
/save FILE        write the conversation as JSON
/clear            forget the conversation, keep system prompt and settings
/help             show this text
/bye              end the conversation, as does Ctrl-D

Pasted text is one message. A line that ends with \\ continues, and """ begins and ends a message of several lines.
Ctrl-C stops an answer; the Tab key completes commands.'''


@dataclass(frozen=True)
class AnswerUsage:
    """How many tokens an answer has, and the seconds from its first to its last."""

    tokens: int
    seconds: float

    def describe(self) -> str:
        """Return both, and the tokens per second if there is more than one."""
        rate = f", {(self.tokens - 1) / self.seconds:.1f} tokens/s" if self.tokens > 1 and self.seconds > 0 else ""
        return f"({self.tokens} token{'s' * (self.tokens != 1)}{rate})"


class TerminalConversation:
    """One conversation: its turns, its settings, and its server."""

    def __init__(
        self, client: OpenAIClient, model: str, system: str | None = None, settings: dict[str, Any] | None = None
    ):
        self.client = client
        self.model = model
        self.system = system
        self.settings = dict(settings or {})
        self.turns: list[dict[str, Any]] = []
        self.usage: AnswerUsage | None = None  # the last answer's usage, if the server reports it
        self._media_parts: list[dict[str, Any]] = []  # images and audio for the next question
        self._texts: list[str] = []  # texts of files, which the next question will contain

    def request_body(self) -> dict[str, Any]:
        """Return the request body: the whole conversation and the changed settings."""
        start = [{"role": "system", "content": self.system}] if self.system else []
        body: dict[str, Any] = {"model": self.model, "messages": start + self.turns, "stream": True}
        body["stream_options"] = {"include_usage": True}
        for name, value in self.settings.items():
            if name == "thinking":
                body["chat_template_kwargs"] = {"enable_thinking": value == "on"}
            else:
                body[name.replace("-", "_")] = value
        return body

    def ask_question(self, question: str) -> Generator[tuple[str, str], None, None]:
        """Stream the answer as (part, text), where part is "content" or "reasoning".

        The answer received so far becomes part of the conversation when it ends or the caller stops; a question without
        an answer is dropped. Raises ClientError, and ConfigError for a file in the question that cannot be sent.
        """
        self.turns.append({"role": "user", "content": self._question_content(question)})
        yield from self._stream_answer()

    def _stream_answer(self) -> Generator[tuple[str, str], None, None]:
        """Stream the answer to the last turn, which is the user's."""
        answer: list[str] = []
        self.usage = None
        started = 0.0
        try:
            with contextlib.closing(self.client.stream_events("/v1/chat/completions", self.request_body())) as events:
                for part, piece in _answer_pieces(events):
                    started = started or time.monotonic()
                    if part == "usage":
                        self.usage = AnswerUsage(int(piece), time.monotonic() - started)
                        continue
                    if part == "content":
                        answer.append(piece)
                    yield part, piece
        finally:
            if answer:
                self.turns.append({"role": "assistant", "content": "".join(answer)})
            else:
                self.turns.pop()

    def ask_again(self) -> Generator[tuple[str, str], None, None]:
        """Stream another answer to the last question, as ``ask_question`` does. Raises ConfigError without one."""
        question = self.forget_last_turn()
        self.turns.append(question)
        yield from self._stream_answer()

    def forget_last_turn(self) -> dict[str, Any]:
        """Remove the last question and its answer. Return the question. Raises ConfigError without one."""
        while self.turns:
            turn = self.turns.pop()
            if turn["role"] == "user":
                return turn
        raise ConfigError("There is no question yet.")

    def _question_content(self, question: str) -> str | list[dict[str, Any]]:
        """Return a question as a message's content, with the images and audio that belong to it."""
        question = "\n\n".join([*self._texts, question])
        text, files = split_pasted_files(question)
        parts = [*self._media_parts, *map(read_media_file, files)]
        self._texts, self._media_parts = [], []  # only now: an unreadable file must not lose the others
        if not parts:
            return question
        return [*parts, {"type": "text", "text": text}] if text else parts

    def run_slash_command(self, line: str) -> str | None:
        """Execute a line that begins with a slash. Return the text to print, or None to exit. Raises ConfigError."""
        name, _, argument = line.partition(" ")
        argument = argument.strip()
        if name in ("/bye", "/exit", "/quit"):
            return None
        if name == "/help":
            return f"{CHAT_HELP}\n{format_help(ANSWER_OPTIONS)}".replace(" --", " ")
        if name == "/system":
            self.system = argument or None
            return "System prompt set." if argument else "System prompt removed."
        if name == "/set":
            return self._change_setting(*argument.partition(" ")[::2])
        if name == "/show":
            return self._show_settings()
        if name == "/clear":
            self.turns.clear()
            return "Conversation cleared."
        if name == "/image":
            return self._add_media_file(argument)
        if name == "/read":
            return self._add_text_file(argument)
        if name == "/model":
            return self._change_model(argument)
        if name == "/undo":
            self.forget_last_turn()
            return "The last question is forgotten."
        if name == "/save":
            return self._save_conversation(argument)
        raise ConfigError(f"Unknown command {name}.{did_you_mean(name, ['/' + word for word in SLASH_COMMANDS])}")

    def _change_setting(self, name: str, value: str) -> str:
        option = next((option for option in ANSWER_OPTIONS if option.name == name.replace("_", "-")), None)
        if option is None:
            names = [option.name for option in ANSWER_OPTIONS]
            raise ConfigError(
                f"Unknown setting {name!r}.{did_you_mean(name, names) or ' Known: ' + ', '.join(names) + '.'}"
            )
        if not value.strip():
            self.settings.pop(option.name, None)
            return f"{option.name} is the server's default."
        self.settings[option.name] = option.parse_raw(value.strip(), option.name)
        return f"{option.name} is {option.format_value(self.settings[option.name])}."

    def _show_settings(self) -> str:
        rows = [("server", str(self.client.address)), ("model", self.model), ("system", self.system or "(none)")]
        rows += [
            (option.name, option.format_value(self.settings[option.name]))
            for option in ANSWER_OPTIONS
            if option.name in self.settings
        ]
        rows += [("turns", str(len(self.turns)))]
        return "\n".join(f"{name:<18} {value}" for name, value in rows)

    def _add_media_file(self, file: str) -> str:
        if not file:
            raise ConfigError("/image needs the name of a file.")
        self._media_parts.append(read_media_file(file.strip("'\"")))
        return f"{file} will be sent with the next question."

    def _add_text_file(self, file: str) -> str:
        if not file:
            raise ConfigError("/read needs the name of a file.")
        try:
            text = Path(file.strip("'\"")).expanduser().read_text("utf-8")
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error.strerror}.") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{file} is not text in UTF-8.") from None
        self._texts.append(f"{Path(file).name}:\n{text}")
        return f"{file} ({len(text):,} characters) will be sent with the next question."

    def _change_model(self, name: str) -> str:
        try:
            names = self.client.list_models()
        except ClientError as error:
            raise ConfigError(str(error)) from None
        if not name:
            return "\n".join(f"{'*' if name == self.model else ' '} {name}" for name in names)
        if name not in names:
            raise ConfigError(f"The server has no model {name}.{did_you_mean(name, names)}")
        self.model = name
        return f"{name} answers from now on."

    def _save_conversation(self, file: str) -> str:
        if not file:
            raise ConfigError("/save needs the name of a file.")
        body = self.request_body()
        del body["stream"], body["stream_options"]
        try:
            Path(file).expanduser().write_text(json.dumps(body, indent=2, ensure_ascii=False) + "\n", "utf-8")
        except OSError as error:
            raise ConfigError(f"{file} cannot be written: {error.strerror}.") from None
        return f"Saved to {file}."


SLASH_COMMANDS = (
    "help", "system", "set", "show", "model", "regenerate", "undo", "read", "image", "save", "clear", "bye",
)  # fmt: skip


def _answer_pieces(events: Iterator[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    for event in events:
        if tokens := (event.get("usage") or {}).get("completion_tokens"):
            yield "usage", str(tokens)
        for part in event.get("choices") or []:
            delta = part.get("delta") or {}
            if thought := delta.get("reasoning") or delta.get("reasoning_content"):
                yield "reasoning", thought
            if content := delta.get("content"):
                yield "content", content


def run_command(config: ResolvedOptions) -> int:
    """Hold the conversation that the options describe. Return the exit code."""
    try:
        with _open_server(config) as client:
            names = client.list_models()
            name = config["name"] or (names[0] if names else "")
            if name not in names:
                print(f"parley: The server has no model {name}.{did_you_mean(name, names)}", file=sys.stderr)
                return 1
            settings = {
                option.name: config[option.name] for option in ANSWER_OPTIONS if config[option.name] is not None
            }
            chat = TerminalConversation(client, name, config["system"], settings)
            if config["question"]:
                return 0 if print_answer(chat, config["question"]) else 1
            return read_terminal(chat) if sys.stdin.isatty() else answer_lines(chat)
    except ClientError as error:
        print(f"parley: {error}", file=sys.stderr)
        return 1


@contextlib.contextmanager
def _open_server(config: ResolvedOptions) -> Iterator[OpenAIClient]:
    """Yield a client of the server at --url, of one that runs already, or of one started until the block ends."""
    if config["url"] and config["model"]:
        raise ConfigError("MODEL starts a new server; with --url, use --name to choose one of its models.")
    if config["model"] and "://" in config["model"]:
        address = config["model"]
        raise ConfigError(f"{address} is an address: `parley chat --url {address}` talks to the server there.")
    client = client_from_options(config)
    if config["url"] or (not config["model"] and _is_serving(client)):
        yield client
    else:
        with spawn_server(config["model"]) as client:
            yield client


def _is_serving(client: OpenAIClient) -> bool:
    try:
        return bool(client.list_models())
    except ClientError as error:
        return error.status in (401, 403)  # it runs, but the key is wrong


def print_answer(chat: TerminalConversation, question: str | None) -> bool:
    """Print the answer as it arrives; None: another answer to the last question. Return False if it failed.

    Reasoning and tokens per second are shown, dimmed, only in a terminal.
    """
    colour = sys.stdout.isatty()
    thinking = False
    try:
        stream = chat.ask_again() if question is None else chat.ask_question(question)
        with contextlib.closing(stream) as pieces:
            for part, piece in pieces:
                if colour and thinking != (part == "reasoning"):
                    thinking = not thinking
                    sys.stdout.write("\x1b[2m" if thinking else "\x1b[0m\n\n")
                if part == "content" or colour:
                    sys.stdout.write(piece)
                    sys.stdout.flush()
        if colour and chat.usage is not None:
            sys.stdout.write(f"\n\x1b[2m{chat.usage.describe()}\x1b[0m")
        return True
    except (ClientError, ConfigError) as error:
        sys.stdout.flush()
        print(f"\nparley: {error}", file=sys.stderr)
        return False
    finally:
        print("\x1b[0m" if thinking else "", flush=True)


def answer_lines(chat: TerminalConversation) -> int:
    """Answer every line of standard input. Return the exit code."""
    succeeded = True
    for line in map(str.strip, sys.stdin):
        if _is_command(line):
            if (command_succeeded := _execute_line(chat, line)) is None:
                break
            succeeded &= command_succeeded
        elif line:
            succeeded &= print_answer(chat, line)
    return 0 if succeeded else 1


def read_terminal(chat: TerminalConversation) -> int:
    """Read lines from the terminal until /bye or Ctrl-D. Return the exit code."""
    print(f"{chat.model} at {chat.client.address}. /help lists commands, /bye exits.")
    with edited_lines("history", chat_words):
        while True:
            try:
                line = read_message()
            except EOFError:
                print()
                return 0
            except KeyboardInterrupt:
                print("\n/bye or Ctrl-D ends the conversation.")
                continue
            try:
                if _is_command(line):
                    if _execute_line(chat, line) is None:
                        return 0
                elif line:
                    print_answer(chat, line)
            except KeyboardInterrupt:
                print("(stopped)")


def _is_command(line: str) -> bool:
    """Whether a line is a command and does not begin with the path of an image."""
    return line.startswith("/") and (line.split()[0][1:] in SLASH_COMMANDS or not split_pasted_files(line)[1])


def _execute_line(chat: TerminalConversation, line: str) -> bool | None:
    """Return whether a command worked, or None if it ends the conversation."""
    if line == "/regenerate":
        return print_answer(chat, None)
    try:
        output = chat.run_slash_command(line)
    except ConfigError as error:
        print(f"parley: {error}", file=sys.stderr)
        return False
    if output is None:
        return None
    print(output)
    return True


def chat_words(line: str) -> list[str]:
    """Return the words that may complete the last word of a line: commands, names of settings, files."""
    command, space, arguments = line.partition(" ")
    if not space:
        return ["/" + word for word in SLASH_COMMANDS] if line.startswith("/") else []
    if command == "/set":
        return [option.name for option in ANSWER_OPTIONS]
    if command in ("/read", "/image", "/save"):
        return [*glob.glob(glob.escape(arguments) + "*")]
    return []
