"""A grammar worker: compiles grammars in a process of its own (``python -m parley.worker.grammar_process FD``).

It compiles one grammar at a time, on request over a stream socket that is inherited as file descriptor FD. The kernel
kills it if a grammar takes too much processor time, even within a library's call; the parent then refuses the grammar
and starts another worker. End of file means that the parent is gone.
"""

from __future__ import annotations

import logging
import resource
import socket
import sys
import time
from collections import OrderedDict

import msgspec

from parley import wire
from parley.child_process import ignore_group_signals, limit_resource
from parley.errors import InvalidValue
from parley.log_lines import set_up_child_logging
from parley.text.grammar.answer_compiler import AnswerGrammarCompiler
from parley.text.grammar.answer_question import (
    AnswerCompiled,
    AnswerRefused,
    CompileAnswer,
    CompilerSetup,
    FindToken,
    FromWorker,
    ToWorker,
    WorkerReady,
    decode_question,
)
from parley.text.grammar.limits import CRASHED, KILL_SECONDS, TOO_DEEP, TOO_LARGE, WORKER_MEMORY

log = logging.getLogger("parley.engine")

KNOWN_MODELS = 8  # models whose compilers, and the grammars that they have compiled, are kept

_decoder = msgspec.msgpack.Decoder(ToWorker)


class RemoteVocabulary:
    """A model's ``GrammarVocabulary``; the parent is asked for all but the special tokens."""

    def __init__(self, sock: socket.socket, setup: CompilerSetup):
        self._socket = sock
        self.marks, self.vocab_size, self.decodes_by_token = setup.marks, setup.vocab_size, setup.decodes_by_token

    def find_token(self, token: int | str) -> int | None:
        """Return the id of a token given as its id or as the vocabulary writes it; None if there is no such token."""
        send_message(self._socket, FindToken(token))
        answer = receive_message(self._socket)
        return None if isinstance(answer, CompileAnswer) else answer.token_id


class GrammarProcess:
    """Answers the questions that arrive over a socket."""

    def __init__(self, sock: socket.socket):
        self._socket = sock
        self._compilers: OrderedDict[bytes, AnswerGrammarCompiler] = OrderedDict()  # by setup

    def serve_questions(self) -> None:
        """Answer questions until the end of file."""
        send_message(self._socket, WorkerReady())
        while True:
            message = receive_message(self._socket)
            if isinstance(message, CompileAnswer):
                limit_resource(resource.RLIMIT_CPU, int(time.process_time()) + 1 + KILL_SECONDS)
                send_message(self._socket, self._answer_question(message))

    def _answer_question(self, message: CompileAnswer) -> AnswerCompiled | AnswerRefused:
        try:
            return AnswerCompiled(self._find_compiler(message.setup).compile_answer(*decode_question(message.question)))
        except InvalidValue as error:
            return AnswerRefused(error.message, error.field)
        except RecursionError:
            return AnswerRefused(TOO_DEEP)
        except MemoryError:
            return AnswerRefused(TOO_LARGE)
        except SystemExit:
            raise
        except BaseException:  # a panic of the library is not an Exception
            log.exception("a grammar could not be compiled")
            return AnswerRefused(CRASHED)

    def _find_compiler(self, setup: bytes) -> AnswerGrammarCompiler:
        compiler = self._compilers.pop(setup, None)
        if compiler is None:
            compiler_setup = msgspec.msgpack.decode(setup, type=CompilerSetup)
            compiler = AnswerGrammarCompiler(RemoteVocabulary(self._socket, compiler_setup), compiler_setup.markup)
        self._compilers[setup] = compiler
        if len(self._compilers) > KNOWN_MODELS:
            self._compilers.popitem(last=False)
        return compiler


def send_message(sock: socket.socket, message: FromWorker) -> None:
    """Send a message to the parent."""
    sock.sendall(wire.encode_frame(message))


def receive_message(sock: socket.socket) -> ToWorker:
    """Return the parent's next message. Raises SystemExit at its end."""
    message: ToWorker | None = wire.receive_frame(sock, _decoder)
    if message is None:
        raise SystemExit(0)
    return message


def serve_grammar_socket(fd: int) -> None:
    """Serve over an inherited socket until it is closed. ``fd``: its file descriptor."""
    ignore_group_signals()
    set_up_child_logging()
    limit_resource(resource.RLIMIT_CORE, 0)
    limit_resource(resource.RLIMIT_AS, WORKER_MEMORY)
    try:
        GrammarProcess(socket.socket(fileno=fd)).serve_questions()
    except (OSError, wire.BrokenFrame):
        sys.exit(0)  # the parent is gone


if __name__ == "__main__":
    serve_grammar_socket(int(sys.argv[1]))
