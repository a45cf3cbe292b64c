"""``parley doctor``: checks whether ``parley serve`` with these options would work here. It changes nothing.

Every check is a function that yields findings and never raises. ``CHECKS`` lists them.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from parley import control_groups, hub
from parley.child_process import python_command
from parley.cli.doctor_engines import Finding, Level, check_server, check_vllm, lacks_video_decoder
from parley.cli.serve import offered_models, plan_models, planned_server_options
from parley.cli.serve_config.server_options import check_written_files
from parley.gguf.folder import LINK_PATTERN
from parley.settings.config import SERVE_OPTIONS
from parley.settings.options import ConfigError, ResolvedOptions
from parley.settings.serve_options.model_options import DTYPE_NAMES
from parley.types import AttachedSettings, ParleySettings, VLLMSettings
from parley.web.auth import is_loopback
from parley.worker.check import ModelCheck, check_in_process

if TYPE_CHECKING:
    from parley.serving.server_options import OfferedModel, ServerOptions
    from parley.types import EngineSettings

OPTIONS = SERVE_OPTIONS
USAGE = """\
usage: parley doctor [MODEL] [options of serve]

Checks whether this machine, the installation and the model have what `parley serve` with the same options needs.
Exit code 1 if it would fail."""

COLOURS = {"ok": "\x1b[32m", "warn": "\x1b[33m", "fail": "\x1b[31m"}
PROBE = """
import torch
print(torch.__version__, torch.get_num_threads(), torch.cuda.is_available(), flush=True)
from parley.native import build, library
try:
    build.find_compiler()
    compiler = "compiler"
except build.BuildError:
    compiler = "none"
print(library.installed_level() or "none", compiler, *library.wanted_levels())
"""
SPARE = 1 << 30  # bytes that a server needs in addition to weights and KV cache


def run_command(config: ResolvedOptions) -> int:
    """Print the findings of all checks. Return 1 if any of them is a failure, else 0."""
    worst = 0
    for check in CHECKS:
        for finding in check(config):
            print(format_finding(finding, sys.stdout.isatty()), flush=True)
            worst |= finding.level == "fail"
    return worst


def format_finding(finding: Finding, colour: bool) -> str:
    """Return a finding as text."""
    level = f"{finding.level:<4}"
    level = f"{COLOURS[finding.level]}{level}\x1b[0m" if colour else level
    return f"{level}  {finding.subject:<11}  {finding.observation}" + (
        f"\n{'':19}-> {finding.hint}" if finding.hint else ""
    )


def check_python(config: ResolvedOptions) -> Iterator[Finding]:
    """Check the version of Python."""
    level: Level = "ok" if sys.version_info >= (3, 11) else "fail"
    yield Finding(level, "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def check_torch(config: ResolvedOptions) -> Iterator[Finding]:
    """Check torch, in a separate process because a broken torch may kill its process instead of raising."""
    try:
        answer = subprocess.run(python_command("-c", PROBE), capture_output=True, text=True, timeout=120, check=True)
        torch_line, _, kernels_line = answer.stdout.strip().partition("\n")
        version, threads, cuda = torch_line.split()
    except (OSError, subprocess.SubprocessError, ValueError):
        yield Finding(
            "fail", "torch", "cannot be imported", "Install parley again: pip install --force-reinstall torch"
        )
        return
    yield Finding("ok", "torch", f"{version}, {threads} threads, {'CUDA' if cuda == 'True' else 'CPU only'}")
    if config["device"].startswith("cuda") and cuda != "True":
        yield Finding("fail", "device", f"{config['device']} is not available", "Leave out --device to run on the CPU.")
    yield kernels_finding(*kernels_line.split())


def kernels_finding(installed: str, compiler: str, *usable_levels: str) -> Finding:
    """Return the finding about the level of the compiled kernels.

    ``installed`` and ``compiler``: "none" if there is none. ``usable_levels``: those that may be used, best first.
    """
    if installed == "off":
        return Finding("ok", "kernels", "torch's, by PARLEY_NATIVE")
    if not usable_levels:
        level = os.environ.get("PARLEY_NATIVE", "")
        return Finding(
            "warn", "kernels", f"torch's are used: PARLEY_NATIVE is {level}, which this CPU does not support"
        )
    if installed == usable_levels[0]:
        return Finding("ok", "kernels", installed)
    if compiler != "none":
        return Finding("ok", "kernels", f"{usable_levels[0]}, which the first start compiles")
    there = "torch's are used" if installed == "none" else f"{installed} is used"
    return Finding(
        "warn", "kernels", f"{usable_levels[0]} is missing, and {there}", "Install g++, or a wheel that has all levels."
    )


def check_packages(config: ResolvedOptions) -> Iterator[Finding]:
    """Check installed versions against the lock file in a checkout, else against the package's requirements."""
    lock = Path(__file__).parents[2] / "requirements.lock"
    try:
        required = lock.read_text("utf-8").splitlines() if lock.is_file() else importlib.metadata.requires("parley-llm")
    except (OSError, importlib.metadata.PackageNotFoundError) as error:
        yield Finding("warn", "packages", f"nothing to compare with ({type(error).__name__})")
        return
    from packaging.requirements import InvalidRequirement, Requirement

    wrong, count = [], 0
    for text in required or ():
        try:
            requirement = Requirement(text.partition("#")[0])
        except InvalidRequirement:
            continue
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        count += 1
        try:
            installed = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            installed = ""
        if not installed or not requirement.specifier.contains(installed, prereleases=True):
            wrong.append(f"{requirement.name} {installed or 'is missing'} (wanted {requirement.specifier})")
    if wrong:
        yield Finding("warn", "packages", "; ".join(wrong[:5]), "make setup installs the versions that are tested.")
    else:
        yield Finding("ok", "packages", f"{count} as {'locked' if lock.is_file() else 'required'}")


def check_processor(config: ResolvedOptions) -> Iterator[Finding]:
    """Check the CPU's cores and vector extensions."""
    try:
        info = Path("/proc/cpuinfo").read_text("utf-8")
    except OSError:
        yield Finding("warn", "processor", f"{os.cpu_count()} cores of an unknown kind")
        return
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", info, re.M)
    flags = set(match[1].split()) if match else set()
    useful = [name for name in ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "bf16", "asimd") if name in flags]
    cores = control_groups.describe_cores()
    if flags & {"avx512_bf16", "amx_bf16", "bf16"} or DTYPE_NAMES[config["dtype"]] == "float32":
        yield Finding("ok", "processor", f"{cores}, {', '.join(useful) or 'no vector extensions'}")
    else:
        yield Finding(
            "warn", "processor", f"{cores}, no bf16 arithmetic", "bf16 is emulated; --dtype fp32 may be faster."
        )


def check_models(config: ResolvedOptions) -> Iterator[Finding]:
    """Check every model, and whether all of them fit into memory."""
    try:
        offered = offered_models(plan_models(config)[1])
    except ConfigError as error:
        yield Finding("fail", "model", str(error))
        return
    total_bytes, is_complete = 0, True
    for offer in offered:
        settings = offer.settings
        try:
            folder = hub.find_model(settings.model, overrides=settings.overrides)
        except hub.ModelMissing as error:
            yield Finding("fail", "model", str(error), "serve would refuse it with the same words.")
            is_complete = False
            continue
        size = yield from _check_model(offer, folder)
        total_bytes += size + (settings.kv_memory or 0)
        is_complete = is_complete and bool(size)
    if is_complete:
        yield from _check_memory(total_bytes, all(offer.settings.kv_memory for offer in offered))


def _check_model(offered_model: OfferedModel, folder: Path | None) -> Generator[Finding, None, int]:
    """Check one model as serve does. Return the bytes that it takes besides the KV cache, or 0 if it is not served."""
    name = offered_model.settings.model or hub.BUILT_IN
    if folder is None:
        yield Finding("warn", "model", f"{name} is not on this machine", "serve will download it from the hub.")
        return 0
    try:
        hub.check_model_folder(folder, name, needs_weights=offered_model.engine != "attached")
    except hub.ModelMissing as error:
        yield Finding("fail", "model", str(error), "Give a folder in Hugging Face format or a GGUF file.")
        return 0
    settings = msgspec.structs.replace(offered_model.settings, model=str(folder))
    if isinstance(settings, AttachedSettings):
        yield Finding("ok", "model", f"{name}; the server has the weights")
        yield from _check_text(settings)
        yield from check_server(settings, offered_model.names[0])
        return 0
    if isinstance(settings, VLLMSettings) and (yield from check_vllm(settings)):
        return 0
    if isinstance(settings, ParleySettings) and (draft := settings.draft_model):
        try:
            draft_folder = hub.find_draft_model(draft)
        except hub.ModelMissing as error:
            yield Finding("fail", "model", str(error), "serve would refuse it with the same words.")
            return 0
        if draft_folder is None:
            yield Finding("warn", "model", f"{draft} is not on this machine", "serve will download it from the hub.")
            return 0
        settings = msgspec.structs.replace(settings, speculate=f"draft={draft_folder}")
    checked = _check_loading(offered_model, settings)
    if checked.refusal:
        yield Finding("fail", "model", f"{name}: {checked.refusal}", "serve would refuse it with the same words.")
        return 0
    weights = sorted([*folder.glob("*.safetensors"), *folder.glob(LINK_PATTERN)])
    size = sum(file.stat().st_size for file in weights)
    observation = f"{name}, {len(weights)} weight file{'s' * (len(weights) != 1)}, {_format_bytes(size)}"
    yield Finding(
        "warn" if checked.load_caveat else "ok",
        "model",
        observation + f"; {checked.load_caveat}" * bool(checked.load_caveat),
    )
    yield from _check_text(settings)
    yield from _check_media(folder, settings)
    if checked.memory_bytes is not None:
        return checked.memory_bytes + checked.table_bytes
    return size * (2 if settings.dtype == "float32" and _saved_dtype(folder) != "float32" else 1)


def _check_loading(offered_model: OfferedModel, settings: EngineSettings) -> ModelCheck:
    """Check whether parley's own engine would load the model. Whether vLLM would, only its start shows."""
    if offered_model.engine == "scripted" or not isinstance(settings, ParleySettings) or settings.costs:
        return ModelCheck()
    return check_in_process(settings)


def _check_text(settings: EngineSettings) -> Iterator[Finding]:
    """Check the tokenizer and the chat template."""
    from parley.text.text_pipeline import TextPipeline
    from parley.text.tokens.json_files import BadTokenizer

    try:
        pipeline = TextPipeline.from_folder(settings.model, settings.tool_parser, settings.reasoning_parser)
    except BadTokenizer as error:
        yield Finding("fail", "tokenizer", str(error), "Download it again.")
        return
    yield Finding("ok", "tokenizer", f"{pipeline.tokenizer.backend.get_vocab_size()} tokens")
    if not pipeline.template.all_sources:
        yield Finding("warn", "template", "the model has no chat template", "It completes text, but cannot chat.")


def _check_media(folder: Path, settings: EngineSettings) -> Iterator[Finding]:
    """Check whether the packages that decode media are installed, if the model reads any. vLLM has its own Python."""
    from parley.serving.media.workers import missing_packages
    from parley.text.media_family import has_unread_media, read_media_family
    from parley.text.tokens.json_files import read_json_object

    config = read_json_object(folder / "config.json")
    family = read_media_family(config)
    if family is None:
        if has_unread_media(config):
            observation = f"encoders of {config.get('model_type')} models are not supported"
            yield Finding("warn", "media", observation, "It reads text only.")
        return
    kinds = ", ".join(sorted(family.kinds))
    if isinstance(settings, VLLMSettings):
        if family.kinds - {"image"} and lacks_video_decoder(settings):
            observation = f"the model reads {kinds}, but PyAV is not installed for vLLM's Python"
            yield Finding("warn", "media", observation, "pip install av there; until then it reads images only.")
        else:
            yield Finding("ok", "media", kinds)
    elif missing := missing_packages():
        observation = f"the model reads {kinds}, but {', '.join(missing)} is not installed"
        yield Finding("warn", "media", observation, "pip install 'parley-llm[media]'; until then it reads text only.")
    else:
        yield Finding("ok", "media", kinds)


def _check_memory(models: int, cached: bool) -> Iterator[Finding]:
    """Check memory for ``models`` bytes. ``cached``: these include the KV caches."""
    free = control_groups.free_host_memory()
    needed_bytes = models + SPARE
    observation = f"{_format_bytes(free)} free, about {_format_bytes(needed_bytes)} needed"
    observation += "" if cached else " plus the KV cache"
    if needed_bytes > free:
        yield Finding("fail", "memory", observation, "Take a smaller model or --kv-memory, or end other programs.")
    else:
        yield Finding("ok", "memory", observation)


def _saved_dtype(folder: Path) -> str:
    """Return the dtype of the saved weights, according to the model's configuration."""
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        return str(config.get("dtype") or config.get("torch_dtype"))
    except (OSError, ValueError, AttributeError):
        return "unknown"


def check_network(config: ResolvedOptions) -> Iterator[Finding]:
    """Check that the server's options fit together, that its ports are free, and that keys protect public ones."""
    try:
        options = planned_server_options(*plan_models(config))
        check_written_files(options)
    except ConfigError as error:
        yield Finding("fail", "options", str(error))
        return
    yield from _check_server_options(options)
    yield from _check_ports(options)
    if options.api_processes > 1:
        yield _count_processes(options.api_processes)
    keys = len(options.api_keys) + len(options.hashed_keys or ())
    if not options.has_keys and not is_loopback(options.host):
        yield Finding("warn", "keys", f"none, and {options.host} can be reached from outside", "Set PARLEY_API_KEY.")
    else:
        yield Finding("ok", "keys", f"{keys} set" if options.has_keys else "none needed: only this machine can connect")


def _count_processes(api_processes: int) -> Finding:
    """Return the finding about several API processes, each of which can keep a core busy."""
    cores = control_groups.core_count()
    observation = f"{api_processes} API processes and a main process on {cores} core{'s' * (cores != 1)}"
    if api_processes >= cores:
        return Finding("warn", "processes", observation, "Fewer --api-processes leave the engine cores of its own.")
    return Finding("ok", "processes", observation)


def _check_server_options(options: ServerOptions) -> Iterator[Finding]:
    """Make the checks of serve before it listens: planes open to strangers, certificates, the endpoints file."""
    from parley.boot.listening_places import find_unprotected_port, listening_places
    from parley.serving.endpoints.traffic_split import BadEndpointFile, read_endpoint_file
    from parley.web.tls.contexts import client_tls_context, server_tls_context
    from parley.web.tls.files import TlsFileError

    places = listening_places(options)
    if unprotected_port := find_unprotected_port(options, places):
        yield Finding("fail", "options", unprotected_port)
    try:
        for files in filter(None, (*(place.tls for place in places), options.peer_tls)):
            server_tls_context(files)
        if options.peer_tls is not None:
            client_tls_context(options.peer_tls)
        if options.endpoints is not None:
            read_endpoint_file(Path(options.endpoints))
    except (TlsFileError, BadEndpointFile) as error:
        yield Finding("fail", "options", str(error))


def _check_ports(options: ServerOptions) -> Iterator[Finding]:
    """Check that the ports that serve listens on are free."""
    from parley.boot.listening_places import listening_places
    from parley.web.port import describe_address, listen_error_reason, open_listener, remove_unix_socket

    ports = [(place.host, place.port, "--listen") for place in listening_places(options)]
    if options.port is not None:
        ports[0] = (options.host, options.port, "--port, or --port 0")
    ports += [(listener.host, listener.port, "--grpc-port or --listen") for listener in options.grpc]
    if options.peer_port is not None and options.peer_port_attempts == 1:
        ports.append((ports[0][0], options.peer_port, "--peer-port"))
    for host, port, flag in ports:
        address = describe_address(host, port)
        try:
            with open_listener(host, port) as listener:
                remove_unix_socket(listener)
        except OSError as error:
            hint = f"Choose another with {flag}." if port else "Check --host or --uds."
            yield Finding("fail", "port", f"{address}: {listen_error_reason(error)}", hint)
        else:
            yield Finding("ok", "port", f"{address} is free")


def check_open_files(config: ResolvedOptions) -> Iterator[Finding]:
    """Check the limit of open files."""
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)  # a server raises its limit to this one
    if limit == resource.RLIM_INFINITY:
        yield Finding("ok", "open files", "unlimited")
    elif limit < 1024:
        yield Finding("warn", "open files", f"at most {limit}", "Every client needs one: ulimit -Hn 4096")
    else:
        yield Finding("ok", "open files", f"at most {limit}")


def _format_bytes(count: int) -> str:
    """Return a number of bytes, rounded for reading."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


CHECKS = (check_python, check_torch, check_packages, check_processor, check_models, check_network, check_open_files)
