"""The command line from outside: exit codes, output streams, and the modules that printing help imports."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from parley import __version__
from parley.cli.machine import version
from parley.cli.main import COMMANDS, main

HEAVY = {"torch", "transformers", "starlette", "uvicorn", "tokenizers", "huggingface_hub", "msgspec", "numpy", "jinja2"}


def run_parley(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PARLEY_")}
    return subprocess.run(
        [sys.executable, "-m", "parley", *words],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment | variables,
        stdin=subprocess.DEVNULL,
    )


def imported_modules(code: str) -> set[str]:
    """Returns the top-level modules that a statement imports in a fresh interpreter."""
    script = f"import sys\n{code}\nprint('\\n'.join(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    return {name.partition(".")[0] for name in done.stderr.split()}


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",), ("help",)])
def test_help_fits_a_screen_and_names_every_command(words):
    done = run_parley(*words)
    assert done.returncode == 0 and not done.stderr
    assert len(done.stdout.splitlines()) <= 24
    assert all(f"  {name} " in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name):
    done = run_parley(name, "--help")
    assert done.returncode == 0 and not done.stderr
    assert done.stdout.startswith(f"usage: parley {name}")
    assert run_parley("help", name).stdout == done.stdout


def test_version_prints_the_package_version():
    for word in ("version", "--version", "-V"):
        assert run_parley(word).stdout == f"parley {__version__}\n"


def test_versions_of_everything_name_packages_processor_and_compiler():
    rows = dict(version.all_versions())
    assert rows["torch"].startswith("2.") and rows["python"].startswith("3.")
    assert {"kernels in use", "processor", "compiler", "system"} <= rows.keys() or rows["kernels"]


@pytest.mark.parametrize(
    "call", [["--help"], ["serve", "--help"], ["chat", "--help"], ["bench", "--help"], ["serve", "--show-config"]]
)
def test_help_imports_no_heavy_modules(call):
    assert not imported_modules(f"from parley.cli.main import main; main({call!r})") & HEAVY


def test_importing_parley_imports_neither_torch_nor_transformers():
    assert not imported_modules("import parley") & {"torch", "transformers"}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("serv",), "Unknown command serv. Did you mean serve?"),
        (("--serve",), "Unknown flag --serve. Did you mean serve?"),
        (("serve", "--prot", "1"), "Unknown flag --prot. Did you mean --port?"),
        (("serve", "--port", "99999"), "--port: '99999' is not a whole number from 0 to 65535."),
        (("serve", "--dtype", "fp8"), "--dtype: 'fp8' is not one of bf16, fp32, fp16, auto,"),
        (("serve", "--api-key-file", "/does/not/exist"), "--api-key-file: /does/not/exist cannot be read"),
        (("chat", "--url", "ftp://x"), "--url: 'ftp://x' is not a URL such as http://127.0.0.1:8000."),
        (("chat", "model", "--url", "http://x"), "MODEL starts a new server"),
        (("cluster", "scale", "decode=5000"), "scale: '5000' is not a whole number from 0 to 1000."),
        (("cluster", "scale", "decode=²"), "scale: '²' is not a whole number from 0 to 1000."),
        (("bench", "--shared-prefix", "9", "--prompt-len", "8"), "--shared-prefix must be at most --prompt-len"),
    ],
)
def test_invalid_arguments_exit_with_2_and_a_sentence(words, sentence):
    done = run_parley(*words)
    assert done.returncode == 2 and not done.stdout
    assert sentence in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        ("[coordinator]\npredict_prot = 1\n[[instances]]", "coordinator: unknown key predict_prot. Did you mean"),
        ("[coordinator]\nslo_ttft = 1979-05-27\n[[instances]]", "coordinator: slo_ttft"),
        ("[[instances]]\nkv-memry = 1", "mixed: unknown key kv-memry. Did you mean kv-memory?"),
        ('[[instances]]\nrole = "flex"\nmax-batch = 1979-05-27', "flex: max-batch: "),
    ],
)
def test_cluster_up_rejects_an_invalid_plan_at_once(tmp_path, plan, sentence):
    (tmp_path / "plan.toml").write_text(plan)
    done = run_parley("cluster", "up", str(tmp_path / "plan.toml"))
    assert done.returncode == 2 and not done.stdout
    assert sentence in done.stderr and "Traceback" not in done.stderr


def test_unknown_environment_variable_prints_a_warning():
    done = run_parley("serve", "--show-config", PARLEY_PROT="1")
    assert done.returncode == 0
    assert "Unknown variable PARLEY_PROT. Did you mean PARLEY_PORT?" in done.stderr


def test_unreachable_server_exits_with_1_and_one_sentence():
    for command in (("chat", "-q", "hello"), ("bench",)):
        done = run_parley(*command, "--url", "http://127.0.0.1:9")
        assert done.returncode == 1
        assert done.stderr.startswith("parley: No server answers at http://127.0.0.1:9")
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", ["--help", "serve --help", "serve --show-config"])
def test_closed_output_pipe_prints_no_error(words, unbuffered):
    script = f"{sys.executable} -m parley {words} | true; exit ${{PIPESTATUS[0]}}"
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode in (0, 1)  # 0 if it had written everything before the reader closed the pipe
    assert done.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
@pytest.mark.parametrize("words", [["routes"], ["--help"], ["list"], ["version"]])
def test_output_to_a_full_disk_is_one_sentence(words):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "parley", *words], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    sentence = "parley: The output cannot be written: No space left on device.\n"
    assert (done.returncode, done.stderr) == (1, sentence)


def test_ctrl_c_exits_with_130_and_no_traceback(monkeypatch):
    def interrupted(config):
        raise KeyboardInterrupt

    monkeypatch.setattr("parley.cli.bench.run_command", interrupted)
    assert main(["bench"]) == 130


def test_help_after_two_dashes_belongs_to_the_other_program(capsys):
    assert main(["serve", "--engine", "vllm", "--", "--help"]) == 2
    assert "`vllm serve --help`" in capsys.readouterr().err
    assert main(["serve", "--help", "--", "--tensor-parallel-size", "2"]) == 0
    assert capsys.readouterr().out.startswith("usage: parley serve")
    assert main(["migrate", "vllm", "--", "serve", "m", "--port", "9", "--help"]) == 0
    assert "parley serve m --port 9" in capsys.readouterr().out


INTERRUPT_AT_IMPORT = """
import os, runpy, signal, sys
class Interrupt:
    def find_spec(self, name, *_):
        if name == "parley.cli.main":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
"""


@pytest.mark.parametrize("way_in", ["console script", "python -m parley"])
@pytest.mark.parametrize("ignored", [False, True])
def test_ctrl_c_while_the_command_line_is_imported_exits_quietly(way_in, ignored):
    if way_in == "console script":
        project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
        module, _, name = project["project"]["scripts"]["parley"].partition(":")
        call = f"from {module} import {name} as run; sys.exit(run())"
    else:
        call = "runpy.run_module('parley', run_name='__main__')"
    handler = "SIG_IGN" if ignored else "default_int_handler"  # SIG_IGN as nohup and `command &` do, also of the tests
    script = f"{INTERRUPT_AT_IMPORT}sys.argv[1:] = ['version']\nsignal.signal(signal.SIGINT, signal.{handler})\n{call}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert (done.returncode, done.stdout) == ((0, f"parley {__version__}\n") if ignored else (130, ""))


def test_engine_process_imports_neither_tokenizers_nor_templates():
    modules = imported_modules("import parley.worker.process, parley.core.engine_loop, parley.model.load.loader")
    assert "torch" in modules and not modules & {"tokenizers", "jinja2"}
