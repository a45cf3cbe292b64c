"""Runs the ``parley`` command as ``python -m parley``.

``-m`` puts the working directory first on the path, where a downloaded model may have a file ``uuid.py``. So that
entry is removed before any other module is imported, and ``parley/__init__.py`` imports none. The entry stays if
parley itself was found there, in a checkout that need not be installed; then it is passed on to child processes.
"""

import sys

import parley

if not sys.flags.safe_path:
    if parley.__path__[0] != f"{sys.path[0]}/parley":
        del sys.path[0]
    else:
        import os

        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (sys.path[0], os.environ.get("PYTHONPATH"))))

from parley.cli.entry import main

sys.exit(main())
