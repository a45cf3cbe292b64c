"""The entry point of the ``parley`` command: Ctrl-C ends it without a traceback before ``main`` can catch it.

Importing the modules of the command line takes a tenth of a second, and Ctrl-C during that time would print a
traceback. So this module catches Ctrl-C before it imports any of them. It has no influence on the start of Python
itself. In the same way, SIGHUP does not end a server before it has a handler for it.
"""

import os
import signal
import sys

from parley.early_hang_up import EarlyHangUp

SERVERS = (["serve"], ["coordinator"])  # commands that read their configuration again at SIGHUP
INTERRUPTED = 130  # the exit code of a command that Ctrl-C has ended: 128 + SIGINT


def main() -> int:
    """Run the command line of this process and return its exit code."""
    raises_interrupt = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not where a parent ignores it
    if raises_interrupt:
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    if sys.argv[1:2] in SERVERS:
        signal.signal(signal.SIGHUP, EarlyHangUp())
    try:
        from parley.cli.main import main as run_main

        if raises_interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return run_main()
    except KeyboardInterrupt:  # between the lines above and those of ``run_main``
        return INTERRUPTED
