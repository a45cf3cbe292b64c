"""MindIE's own ``config.json``: checked member by member, as MindIE does, and translated into parley's options.

The result is a ``MindIEPlan``. Members with an effect here have it; members without a meaning for this server, or
unknown ones, are only listed. Malformed values raise a ConfigError that names member, value and range.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from parley import hub
from parley.cli.members import Section, adapters, address, files, flag, load, name, one, shown, size, text, whole
from parley.dialects import mindie
from parley.dialects.mindie.rules import Profile, Rules
from parley.serving.options import Listen, ServerOptions
from parley.settings.kinds import Named
from parley.settings.options import ConfigError
from parley.web.options import Tls

MAX_TOKEN_TIMEOUT, MAX_TIMEOUT = 3600, 65_535  # seconds
MAX_LENGTH = 4_194_304
MAX_BATCH = 4096  # limit of parley
STEP_TOKENS = (16, 1 << 20)  # limits of parley
PLANES = (mindie.service, mindie.management_plane, mindie.metrics_plane)
PORT = whole(1024, 65_535)


@dataclass
class Plan:
    """``options``: values of parley's options. ``rules``: the dialect's, by name. ``idle``: members without effect."""

    file: str
    listen: list[Listen]
    options: dict[str, Any]
    rules: dict[str, Any]
    peer_tls: Tls | None
    figures: bool
    weights: str | None
    max_prompt: int
    max_output: int
    token_timeout: float
    timeout: float
    idle: list[str]

    def check(self, models: Sequence[Named]) -> None:
        """Check that there is a model, as far as that is known before loading. Raises ConfigError."""
        member = "BackendConfig.ModelDeployConfig.ModelConfig[0].modelWeightPath"
        if not models:
            raise ConfigError(f"{self.file}: {member} is missing, and no other model is named.")
        folder = hub.find(models[0].model)
        lacking = hub.missing(folder) if folder is not None else ""
        mine = models == self.options.get("model") and not self.options["fake-engine"]
        if lacking and self.weights is not None and mine:
            raise ConfigError(f"{self.file}: {member}: {shown(self.weights)} cannot be served: {lacking}.")

    def profiled(self, profile: Profile) -> Rules:
        """Return the dialect's rules for a profile."""
        return replace(Rules(**self.rules), profile=profile, figures=self.figures or profile != "strict")

    def applied(self, options: ServerOptions, profile: Profile) -> ServerOptions:
        """Return the server's options with this plan applied."""
        rules = self.profiled(profile)
        note = f"{self.file}: without effect here: {', '.join(self.idle)}."
        return replace(
            options,
            listen=(*self.listen, *options.listen),
            apis={made.name: made for made in (plane(rules) for plane in PLANES)},
            notes=(note,) if self.idle else (),
            peer_tls=self.peer_tls or options.peer_tls,
            max_prompt=self.max_prompt,
            max_output=self.max_output,
            timeout=self.timeout,
            token_timeout=self.token_timeout,
        )


def read(file: str, environment: Mapping[str, str]) -> Plan:
    """Read the plan of a configuration file. Raises ConfigError."""
    content = load(file)
    # Its paths are relative to the installation folder, whose ``conf`` folder holds the file.
    folder = Path(file).resolve().parent
    try:
        plan = _plan(Section("", content), folder.parent if folder.name == "conf" else folder, environment)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    return replace(plan, file=file)


def _plan(top: Section, root: Path, environment: Mapping[str, str]) -> Plan:
    top.asked.update(("Version", "LogConfig"))
    unlimited = top.get("EnableDynamicAdjustTimeoutConfig", flag, False)
    server, backend = top.inside("ServerConfig"), top.inside("BackendConfig")
    deploy, schedule = backend.inside("ModelDeployConfig"), backend.inside("ScheduleConfig")
    model = _model(deploy)

    apart = server.get("inferMode", one("standard", "dmi"), "standard") == "dmi"
    peer = server.get("interCommPort", PORT, 1121)
    token_timeout = server.get("tokenTimeout", whole(1, MAX_TOKEN_TIMEOUT), 600)
    timeout = server.get("e2eTimeout", whole(1, MAX_TIMEOUT), 600)
    if unlimited:
        token_timeout, timeout = MAX_TOKEN_TIMEOUT, MAX_TIMEOUT
    length = deploy.get("maxSeqLen", whole(2), 2560)
    prompt = min(deploy.get("maxInputTokenLen", whole(1, MAX_LENGTH), 2048), length - 1)
    truncation = deploy.get("truncation", one(False, True, 0, 1, -1), 0)
    limit = server.get("maxRequestLength", whole(1, 100), 40)
    links = server.get("maxLinkNum", whole(1, 4096), 1000)
    instance = model.get("modelInstanceType", one("Standard", "StandardMock"), "Standard")
    size_ = model.get("npuMemSize", size, -1)
    plan = _schedule(schedule, prompt, length)
    batch = plan["max_batch_size"]
    weights = model.get("modelWeightPath", text, None)

    options: dict[str, Any] = {
        "port": None,  # the port of all APIs opens only if an option asks for it
        "name": [model.get("modelName", name, "llama_65b")],
        "max-batch": min(batch, MAX_BATCH),
        "max-queue": max(0, 3 * links - batch),  # ``links`` requests run, and twice as many wait
        "step-tokens": min(max(plan["max_prefill_tokens"], STEP_TOKENS[0]), STEP_TOKENS[1]),
        "body-limit": limit << 20,
        "drain": float(timeout),
        "fake-engine": instance == "StandardMock",
    }
    if apart:
        options |= {"role": "none", "peer-port": peer}
    if modules := deploy.get("LoraModules", adapters, []):
        options["lora"] = [(called, str(root / path)) for called, path in modules]
    if places := deploy.get("maxLoras", whole(0, 4096), 0):
        options["max-loras"] = places
    if rank := deploy.get("maxLoraRank", whole(0, 256), 0):
        options["max-lora-rank"] = rank
    if weights is not None:
        options["model"] = [Named((), str(root / weights), {})]
        own = _context(root / weights)
        options["max-model-len"] = length if own is None else min(length, own)
    if size_ > 0:
        options["kv-memory"] = max(1 << 20, round(size_ * 2**30))
    rules = plan | {
        "vllm": server.get("openAiSupport", text, "vllm") == "vllm",
        "full_text": server.get("fullTextEnabled", flag, False),
        "limit": limit,
        "truncation": {0: None, 1: "tail", -1: "head"}[-1 if truncation is True else int(truncation)],
        "max_seq_len": length,
        "max_input_token_len": prompt,
        "npu_mem_size": size_,
        "cpu_mem_size": model.get("cpuMemSize", whole(0), 5),
        "world_size": model.get("worldSize", whole(1), 4),
        "weights": Path(weights or "").name,
        "instance": instance,
        "monitored": environment.get("MIES_SERVICE_MONITOR_MODE") == "1",
    }
    return Plan(
        file="",
        listen=_listen(server, root, environment),
        options=options,
        rules=rules,
        peer_tls=_between(server, root) if apart else None,
        figures=environment.get("MINDIE_LLM_BENCHMARK_ENABLE") in ("1", "2"),
        weights=weights,
        max_prompt=prompt,
        max_output=plan["max_iter_times"],
        token_timeout=float(token_timeout),
        timeout=float(timeout),
        idle=[member for section in (top, server, backend, deploy, model, schedule) for member in section.rest()],
    )


def _model(deploy: Section) -> Section:
    """Return the first model, the only one allowed."""

    def objects(value: Any) -> list[Any]:
        if not isinstance(value, list) or not all(isinstance(each, dict) for each in value) or len(value) != 1:
            raise ValueError("a list of one object")
        return value

    return Section(f"{deploy.path}ModelConfig[0].", deploy.get("ModelConfig", objects, [{}])[0])


def _context(weights: Path) -> int | None:
    """Return the context length in the model's own configuration, or None."""
    try:
        said = msgspec.json.decode((weights / "config.json").read_bytes())
        own = (said.get("text_config") or said).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):
        return None
    return own if type(own) is int and own > 0 else None


def _schedule(schedule: Section, prompt: int, length: int) -> dict[str, Any]:
    """Read the scheduling members with a meaning here, and check those whose errors MindIE would refuse."""
    get = schedule.get
    batch = get("maxBatchSize", whole(1, 819_200), 200)
    tokens = get("maxPrefillTokens", whole(1, MAX_LENGTH), max(8192, prompt))
    if tokens < prompt:
        raise schedule.wrong("maxPrefillTokens", f"{tokens} is less than maxInputTokenLen, which is {prompt}")
    schedule.look("maxPreemptCount", whole(0, batch))
    schedule.look("prefillPolicyType", one(0))
    schedule.look("decodePolicyType", one(0))
    schedule.look("templateType", one("Standard", "Mix"))
    block = get("cacheBlockSize", whole(1, 128), 128)
    if block % 16:
        raise schedule.wrong("cacheBlockSize", f"{block} is not a multiple of 16")
    return {
        "max_batch_size": batch,
        "max_prefill_batch_size": get("maxPrefillBatchSize", whole(0, batch), min(50, batch)) or batch,
        "max_prefill_tokens": tokens,
        "max_iter_times": get("maxIterTimes", whole(1, length), min(512, length)),
        "max_n": get("maxN", whole(1, min(8192, batch)), min(128, batch)),
        "cache_block_size": block,
    }


# -- the planes


def _listen(server: Section, root: Path, environment: Mapping[str, str]) -> list[Listen]:
    everywhere = server.get("allowAllZeroIpListening", flag, False)
    own = server.get("ipAddress", address, "127.0.0.1")
    own = _own(environment, "MIES_CONTAINER_IP") or own
    # if absent, it is the address of the service; the shipped file sets another
    inner = server.get("managementIpAddress", address, own)
    inner = _own(environment, "MIES_CONTAINER_MANAGEMENT_IP") or inner
    for member, host in (("ipAddress", own), ("managementIpAddress", inner)):
        if ipaddress.ip_address(host).is_unspecified and not everywhere:
            raise server.wrong(member, f"{host} means every address; that needs allowAllZeroIpListening to be true")
    ports = (
        ("mindie", "", server.get("port", PORT, 1025)),
        ("mindie-management", "management", server.get("managementPort", PORT, 1026)),
        ("mindie-metrics", "metrics", server.get("metricsPort", PORT, 1027)),
    )
    secure = server.get("httpsEnabled", flag, True)
    made = []
    for api, plane, port in ports:
        host = inner if plane else own
        found = _files(server, root, plane if host != own else "")  # checked even if unused: errors are reported
        made.append(Listen(api, host, port, found if secure else None))
    return made


def _own(environment: Mapping[str, str], variable: str) -> str:
    """Return the address that a container variable sets, which overrides the file, or an empty string."""
    value = environment.get(variable, "")
    try:
        return address(value) if value else ""
    except ValueError as wanted:
        raise ConfigError(f"{variable}: {value!r} is not {wanted}") from None


def _files(server: Section, root: Path, plane: str) -> Tls:
    """Return the TLS files of a plane. ``plane`` is empty, management or metrics."""

    def key(member: str) -> str:
        return plane + member[0].upper() + member[1:] if plane else member

    where = f"{plane}/" if plane else ""
    authorities = root / server.get("tlsCaPath", text, "security/ca/")
    lists = root / server.get(key("tlsCrlPath"), text, f"security/certs/{where}")
    revoked = server.get(key("tlsCrlFiles"), files, None)
    password = server.get(key("tlsPkPwd"), text, None)
    usual = root / f"security/pass/{where}key_pwd.txt"
    crl = [lists / each for each in revoked or ["server_crl.pem"]]
    return Tls(
        certificate=root / server.get(key("tlsCert"), text, f"security/certs/{where}server.pem"),
        key=root / server.get(key("tlsPk"), text, f"security/keys/{where}server.key.pem"),
        password=root / password if password else usual if password is None and usual.is_file() else None,
        clients=tuple(
            authorities / each
            for each in server.get(key("tlsCaFile"), files, [f"{plane}_ca.pem" if plane else "ca.pem"])
        ),
        revoked=tuple(each for each in crl if revoked is not None or each.is_file()),
    )


def _between(server: Section, root: Path) -> Tls | None:
    """Return the TLS files of the connections between instances."""
    where = "security/grpc/"
    authorities = root / server.get("interCommTlsCaPath", text, f"{where}ca/")
    lists = root / server.get("interCommTlsCrlPath", text, f"{where}certs/")
    revoked = server.get("interCommTlsCrlFiles", files, None)
    password = server.get("interCommPkPwd", text, None)
    made = Tls(
        certificate=root / server.get("interCommTlsCert", text, f"{where}certs/server.pem"),
        key=root / server.get("interCommPk", text, f"{where}keys/server.key.pem"),
        password=root / password if password else None,
        clients=tuple(authorities / each for each in server.get("interCommTlsCaFiles", files, ["ca.pem"])),
        revoked=tuple(lists / each for each in revoked or ()),
    )
    return made if server.get("interCommTLSEnabled", flag, True) else None
