"""MindIE's own ``config.json``: checked member by member, as MindIE does, and translated into parley's options.

The result is a ``MindIEPlan``. Members with an effect here have it; members without a meaning for this server, or
unknown ones, are only listed. Malformed values raise a ConfigError that names member, value and range.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from parley import hub
from parley.cli.serve_config.json_members import (
    ConfigSection,
    check_adapters,
    check_file_names,
    check_flag,
    check_ip_address,
    check_memory_size,
    check_name,
    check_string,
    integer_between,
    load_json_object,
    one_of,
    show_value,
)
from parley.dialects import mindie
from parley.dialects.mindie.api_rules import MindieProfile, MindieRules
from parley.serving.server_options import ListenAddress, ServerOptions
from parley.settings.media_hosts import MediaHost, parse_media_host
from parley.settings.option_kinds import NamedModel
from parley.settings.options import ConfigError
from parley.types import EngineSettings
from parley.web.tls.files import TlsFiles

MAX_TOKEN_TIMEOUT, MAX_TIMEOUT = 3600, 65_535  # seconds
MAX_LENGTH = 4_194_304
MAX_BATCH = 4096  # limit of parley
STEP_TOKENS = (16, 1 << 20)  # limits of parley
PLANES = (mindie.service_dialect, mindie.management_dialect, mindie.metrics_dialect)
PORT = integer_between(1024, 65_535)
MEDIA_HOSTS_VARIABLE = "ALLOWED_MEDIA_DOMAINS_ENV"
MAX_MEDIA_ITEMS = 20  # of each message, and here of each kind in a request
MAX_VIDEO_SIZE, MAX_MEDIA_SIZE = 512 << 20, 1000 << 20  # bytes of a video, and of all media of a request


@dataclass
class MindIEPlan:
    """What a MindIE config.json means for parley.

    * ``options``: values of parley's options.
    * ``rules``: values of the dialect's rules, by name.
    * ``unused_members``: members without effect.
    * ``missing_lists``: revocation lists that the file names but that do not exist.
    """

    file: str
    listen: list[ListenAddress]
    options: dict[str, Any]
    rules: dict[str, Any]
    peer_tls: TlsFiles | None
    token_costs: bool
    weights: str | None
    max_length: int
    max_prompt: int
    max_output: int
    token_timeout: float
    timeout: float
    unused_members: list[str]
    missing_lists: list[Path]

    def check_model(self, models: Sequence[NamedModel]) -> None:
        """Check that there is a model, as far as that is known before loading. Raises ConfigError."""
        member = "BackendConfig.ModelDeployConfig.ModelConfig[0].modelWeightPath"
        if not models:
            raise ConfigError(f"{self.file}: {member} is missing, and no other model is named.")
        try:
            folder = hub.find_model(models[0].model)
            lacking = hub.folder_problem(folder) if folder is not None else ""
        except hub.ModelMissing as error:
            raise ConfigError(f"{self.file}: {member}: {error}") from None
        mine = models == self.options.get("model") and not self.options["scripted-engine"]
        if lacking and self.weights is not None and mine:
            raise ConfigError(f"{self.file}: {member}: {show_value(self.weights)} cannot be served: {lacking}.")

    def context_length(self, models: Sequence[EngineSettings]) -> int:
        """Return ``maxSeqLen``, or the shortest context of these models if that is less."""
        return min([self.max_length, *filter(None, map(_model_context_length, models))])

    def profile_rules(self, profile: MindieProfile) -> MindieRules:
        """Return the dialect's rules for a profile."""
        return replace(MindieRules(**self.rules), profile=profile, token_costs=self.token_costs or profile != "strict")

    def apply_to_options(self, options: ServerOptions, profile: MindieProfile) -> ServerOptions:
        """Return the server's options with this plan applied."""
        rules = self.profile_rules(profile)
        notes = [f"{self.file}: without effect here: {', '.join(self.unused_members)}."] if self.unused_members else []
        if self.missing_lists:
            missing_files = ", ".join(map(str, dict.fromkeys(self.missing_lists)))
            notes.append(
                f"{self.file}: client certificates are not checked for revocation: {missing_files} does not exist."
            )
        return replace(
            options,
            listen=(*self.listen, *options.listen),
            apis={api.name: api for api in (plane(rules) for plane in PLANES)},
            notes=tuple(notes),
            peer_tls=self.peer_tls or options.peer_tls,
            max_prompt=self.max_prompt,
            max_output=self.max_output,
            timeout=self.timeout,
            token_timeout=self.token_timeout,
        )


def read_mindie_config(file: str, environment: Mapping[str, str]) -> MindIEPlan:
    """Read the plan of a configuration file. Raises ConfigError."""
    content = load_json_object(file)
    # Its paths are relative to the installation folder, whose ``conf`` folder holds the file.
    folder = Path(file).resolve().parent
    try:
        plan = _build_plan(ConfigSection("", content), folder.parent if folder.name == "conf" else folder, environment)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    return replace(plan, file=file)


def _read_media_host(entry: str) -> MediaHost:
    """Read a host of MindIE's list, which names hosts only. Raises ConfigError."""
    try:
        return parse_media_host(entry)
    except ValueError as form:
        raise ConfigError(f"{MEDIA_HOSTS_VARIABLE}: {entry[:60]!r} is not {form}.") from None


class _Sections(NamedTuple):
    """The sections of a file that have members with an effect here. ``model``: the only one of the models."""

    top: ConfigSection
    server: ConfigSection
    backend: ConfigSection
    deploy: ConfigSection
    model: ConfigSection
    schedule: ConfigSection


class _MainMembers(NamedTuple):
    """Members that options and rules both depend on. ``body_megabytes``: the largest body, in MiB."""

    is_separated: bool
    peer_port: int
    token_timeout: float
    timeout: float
    max_seq_len: int
    max_prompt_len: int
    truncation: bool | int
    body_megabytes: int
    max_links: int
    instance: str
    kv_gigabytes: float
    schedule: dict[str, Any]
    weights: str | None


def _build_plan(top: ConfigSection, root: Path, environment: Mapping[str, str]) -> MindIEPlan:
    """Return the plan of a file, without its name. ``root``: the folder of its relative paths. Raises ConfigError."""
    top.read_members.update(("Version", "LogConfig"))
    server, backend = top.get_section("ServerConfig"), top.get_section("BackendConfig")
    deploy, schedule = backend.get_section("ModelDeployConfig"), backend.get_section("ScheduleConfig")
    sections = _Sections(top, server, backend, deploy, _first_model(deploy), schedule)
    members = _read_main_members(sections)
    options = _plan_options(sections, members, root, environment)
    rules = _plan_rules(sections, members, environment)
    missing_lists: list[Path] = []
    return MindIEPlan(
        file="",
        listen=_read_listeners(server, root, environment, missing_lists),
        options=options,
        rules=rules,
        peer_tls=_peer_tls_files(server, root, missing_lists) if members.is_separated else None,
        token_costs=environment.get("MINDIE_LLM_BENCHMARK_ENABLE") in ("1", "2"),
        weights=members.weights,
        max_length=members.max_seq_len,
        max_prompt=members.max_prompt_len,
        max_output=members.schedule["max_iter_times"],
        token_timeout=members.token_timeout,
        timeout=members.timeout,
        unused_members=[member for section in sections for member in section.unread_members()],
        missing_lists=missing_lists,
    )


def _read_main_members(sections: _Sections) -> _MainMembers:
    """Read the main members, in the order in which MindIE reports errors in them. Raises ConfigError."""
    server, deploy, model = sections.server, sections.deploy, sections.model
    separated = server.get_member("inferMode", one_of("standard", "dmi"), "standard") == "dmi"
    peer_port = server.get_member("interCommPort", PORT, 1121)
    token_timeout, timeout = _read_timeouts(sections.top, server)
    length = deploy.get_member("maxSeqLen", integer_between(2), 2560)
    prompt = min(deploy.get_member("maxInputTokenLen", integer_between(1, MAX_LENGTH), 2048), length - 1)
    return _MainMembers(
        separated,
        peer_port,
        token_timeout,
        timeout,
        length,
        prompt,
        truncation=deploy.get_member("truncation", one_of(False, True, 0, 1, -1), 0),
        body_megabytes=server.get_member("maxRequestLength", integer_between(1, 100), 40),
        max_links=server.get_member("maxLinkNum", integer_between(1, 4096), 1000),
        instance=model.get_member("modelInstanceType", one_of("Standard", "StandardMock"), "Standard"),
        kv_gigabytes=model.get_member("npuMemSize", check_memory_size, -1),
        schedule=_read_schedule(sections.schedule, prompt, length),
        weights=model.get_member("modelWeightPath", check_string, None),
    )


def _plan_options(
    sections: _Sections, members: _MainMembers, root: Path, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Return the values of parley's options that a file sets. Raises ConfigError."""
    limit, batch = members.body_megabytes << 20, members.schedule["max_batch_size"]
    options: dict[str, Any] = {
        "port": None,  # the port of all APIs opens only if an option asks for it
        "name": [sections.model.get_member("modelName", check_name, "llama_65b")],
        "max-batch": min(batch, MAX_BATCH),
        "max-queue": max(0, 3 * members.max_links - batch),  # ``max_links`` requests run, and twice as many wait
        "step-tokens": min(max(members.schedule["max_prefill_tokens"], STEP_TOKENS[0]), STEP_TOKENS[1]),
        "body-limit": limit,
        "media-body-limit": limit,
        "media-size": [("image", limit), ("video", MAX_VIDEO_SIZE), ("audio", limit)],
        "media-request-size": MAX_MEDIA_SIZE,
        "media-limit": [("image", MAX_MEDIA_ITEMS), ("video", MAX_MEDIA_ITEMS), ("audio", MAX_MEDIA_ITEMS)],
        "drain": members.timeout,
        "scripted-engine": members.instance == "StandardMock",
        **_adapter_options(sections.deploy, root),
    }
    if members.is_separated:
        options |= {"role": "none", "peer-port": members.peer_port}
    if members.weights is not None:
        options["model"] = [NamedModel((), str(root / members.weights), {})]
    if members.kv_gigabytes > 0:
        options["kv-memory"] = max(1 << 20, round(members.kv_gigabytes * 2**30))
    if allowed_hosts := environment.get(MEDIA_HOSTS_VARIABLE):
        options["media-hosts"] = [_read_media_host(entry.strip()) for entry in allowed_hosts.split(",")]
    return options


def _plan_rules(sections: _Sections, members: _MainMembers, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of ``MindieRules`` that a file sets. Raises ConfigError."""
    server, model, truncation = sections.server, sections.model, members.truncation
    return members.schedule | {
        "vllm": server.get_member("openAiSupport", check_string, "vllm") == "vllm",
        "full_text": server.get_member("fullTextEnabled", check_flag, False),
        "body_megabytes": members.body_megabytes,
        "is_separated": members.is_separated,
        "truncation": {0: None, 1: "tail", -1: "head"}[-1 if truncation is True else int(truncation)],
        "max_seq_len": members.max_seq_len,
        "max_input_token_len": members.max_prompt_len,
        "npu_mem_size": members.kv_gigabytes,
        "cpu_mem_size": model.get_member("cpuMemSize", integer_between(0), 5),
        "world_size": model.get_member("worldSize", integer_between(1), 4),
        "model_folder_name": Path(members.weights or "").name,
        "instance_type": members.instance,
        "has_metrics_port": environment.get("MIES_SERVICE_MONITOR_MODE") == "1",
    }


def _read_timeouts(top: ConfigSection, server: ConfigSection) -> tuple[float, float]:
    """Return the seconds that the next token, and a whole request, may take."""
    token_timeout = server.get_member("tokenTimeout", integer_between(1, MAX_TOKEN_TIMEOUT), 600)
    timeout = server.get_member("e2eTimeout", integer_between(1, MAX_TIMEOUT), 600)
    if top.get_member("EnableDynamicAdjustTimeoutConfig", check_flag, False):
        token_timeout, timeout = MAX_TOKEN_TIMEOUT, MAX_TIMEOUT
    return float(token_timeout), float(timeout)


def _adapter_options(deploy: ConfigSection, root: Path) -> dict[str, Any]:
    """Return the options for adapters that the file sets. ``root``: the folder of relative paths."""
    options: dict[str, Any] = {}
    if modules := deploy.get_member("LoraModules", check_adapters, []):
        options["lora"] = [(called, str(root / path)) for called, path in modules]
    if places := deploy.get_member("maxLoras", integer_between(0, 4096), 0):
        options["max-loras"] = places
    if rank := deploy.get_member("maxLoraRank", integer_between(0, 256), 0):
        options["max-lora-rank"] = rank
    return options


def _first_model(deploy: ConfigSection) -> ConfigSection:
    """Return the first model, the only one allowed."""

    def check_single_object(value: Any) -> list[Any]:
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value) or len(value) != 1:
            raise ValueError("a list of one object")
        return value

    return ConfigSection(
        f"{deploy.path}ModelConfig[0].", deploy.get_member("ModelConfig", check_single_object, [{}])[0]
    )


def _model_context_length(model: EngineSettings) -> int | None:
    """Return the context length in the model's own configuration, after overrides, or None."""
    try:
        folder = hub.find_model(model.model, overrides=model.overrides)
        if folder is None:
            return None
        model_config = msgspec.json.decode((folder / "config.json").read_bytes())
        model_limit = (model_config.get("text_config") or model_config).get("max_position_embeddings")
    except (hub.ModelMissing, OSError, ValueError, AttributeError):
        return None
    return model_limit if type(model_limit) is int and model_limit > 0 else None


def _read_schedule(schedule: ConfigSection, prompt: int, length: int) -> dict[str, Any]:
    """Read the scheduling members with a meaning here, and check those whose errors MindIE would refuse."""
    get = schedule.get_member
    batch = get("maxBatchSize", integer_between(1, 819_200), 200)
    tokens = get("maxPrefillTokens", integer_between(1, MAX_LENGTH), max(8192, prompt))
    if tokens < prompt:
        raise schedule.member_error("maxPrefillTokens", f"{tokens} is less than maxInputTokenLen, which is {prompt}")
    schedule.check_unused("maxPreemptCount", integer_between(0, batch))
    schedule.check_unused("prefillPolicyType", one_of(0))
    schedule.check_unused("decodePolicyType", one_of(0))
    schedule.check_unused("templateType", one_of("Standard", "Mix"))
    block = get("cacheBlockSize", integer_between(1, 128), 128)
    if block % 16:
        raise schedule.member_error("cacheBlockSize", f"{block} is not a multiple of 16")
    return {
        "max_batch_size": batch,
        "max_prefill_batch_size": get("maxPrefillBatchSize", integer_between(0, batch), min(50, batch)) or batch,
        "max_prefill_tokens": tokens,
        "max_iter_times": get("maxIterTimes", integer_between(1, length), min(512, length)),
        "max_n": get("maxN", integer_between(1, min(8192, batch)), min(128, batch)),
        "cache_block_size": block,
    }


# -- the planes


def _read_listeners(
    server: ConfigSection, root: Path, environment: Mapping[str, str], missing_lists: list[Path]
) -> list[ListenAddress]:
    everywhere = server.get_member("allowAllZeroIpListening", check_flag, False)
    own_address = server.get_member("ipAddress", check_ip_address, "127.0.0.1")
    own_address = _container_address(environment, "MIES_CONTAINER_IP") or own_address
    # if absent, it is the address of the service; the shipped file sets another
    inner = server.get_member("managementIpAddress", check_ip_address, own_address)
    inner = _container_address(environment, "MIES_CONTAINER_MANAGEMENT_IP") or inner
    for member, host in (("ipAddress", own_address), ("managementIpAddress", inner)):
        if ipaddress.ip_address(host).is_unspecified and not everywhere:
            raise server.member_error(
                member, f"{host} means every address; that needs allowAllZeroIpListening to be true"
            )
    ports = (
        ("mindie", "", server.get_member("port", PORT, 1025)),
        ("mindie-management", "management", server.get_member("managementPort", PORT, 1026)),
        ("mindie-metrics", "metrics", server.get_member("metricsPort", PORT, 1027)),
    )
    secure = server.get_member("httpsEnabled", check_flag, True)
    listeners = []
    for api, plane, port in ports:
        host = inner if plane else own_address
        # Checked even if unused: errors are reported.
        tls_files = _plane_tls_files(server, root, plane if host != own_address else "", missing_lists)
        listeners.append(ListenAddress(api, host, port, tls_files if secure else None))
    return listeners


def _container_address(environment: Mapping[str, str], variable: str) -> str:
    """Return the address that a container variable sets, which overrides the file, or an empty string."""
    value = environment.get(variable, "")
    try:
        return check_ip_address(value) if value else ""
    except ValueError as expectation:
        raise ConfigError(f"{variable}: {value!r} is not {expectation}") from None


def _plane_tls_files(server: ConfigSection, root: Path, plane: str, missing_lists: list[Path]) -> TlsFiles:
    """Return the TLS files of a plane. ``plane`` is empty, management or metrics. Adds to ``missing_lists``."""

    def member_name(member: str) -> str:
        return plane + member[0].upper() + member[1:] if plane else member

    path_prefix = f"{plane}/" if plane else ""
    authorities = root / server.get_member("tlsCaPath", check_string, "security/ca/")
    lists = root / server.get_member(member_name("tlsCrlPath"), check_string, f"security/certs/{path_prefix}")
    revoked = server.get_member(member_name("tlsCrlFiles"), check_file_names, None)
    password = server.get_member(member_name("tlsPkPwd"), check_string, None)
    usual = root / f"security/pass/{path_prefix}key_pwd.txt"
    return TlsFiles(
        certificate=root
        / server.get_member(member_name("tlsCert"), check_string, f"security/certs/{path_prefix}server.pem"),
        key=root / server.get_member(member_name("tlsPk"), check_string, f"security/keys/{path_prefix}server.key.pem"),
        password_file=root / password if password else usual if password is None and usual.is_file() else None,
        client_authorities=tuple(
            authorities / file_name
            for file_name in server.get_member(
                member_name("tlsCaFile"), check_file_names, [f"{plane}_ca.pem" if plane else "ca.pem"]
            )
        ),
        revocation_lists=_revocation_lists(lists, revoked, ["server_crl.pem"], missing_lists),
    )


def _revocation_lists(
    folder: Path, named: Sequence[str] | None, usual: Sequence[str], missing_lists: list[Path]
) -> tuple[Path, ...]:
    """Return the revocation lists of a plane. Adds named ones to ``missing_lists`` if none of them exists.

    MindIE's shipped configuration names a list that does not exist, so this must not stop the start. One list that
    exists turns checking on: then a missing one stops the start, when it is loaded.
    """
    files = tuple(folder / name for name in (usual if named is None else named))
    if any(file.is_file() for file in files):
        return files
    missing_lists.extend(files if named is not None else ())
    return ()


def _peer_tls_files(server: ConfigSection, root: Path, missing_lists: list[Path]) -> TlsFiles | None:
    """Return the TLS files of the connections between instances. Adds to ``missing_lists``."""
    path_prefix = "security/grpc/"
    authorities = root / server.get_member("interCommTlsCaPath", check_string, f"{path_prefix}ca/")
    lists = root / server.get_member("interCommTlsCrlPath", check_string, f"{path_prefix}certs/")
    revoked = server.get_member("interCommTlsCrlFiles", check_file_names, None)
    password = server.get_member("interCommPkPwd", check_string, None)
    tls_files = TlsFiles(
        certificate=root / server.get_member("interCommTlsCert", check_string, f"{path_prefix}certs/server.pem"),
        key=root / server.get_member("interCommPk", check_string, f"{path_prefix}keys/server.key.pem"),
        password_file=root / password if password else None,
        client_authorities=tuple(
            authorities / file_name
            for file_name in server.get_member("interCommTlsCaFiles", check_file_names, ["ca.pem"])
        ),
        revocation_lists=_revocation_lists(lists, revoked, [], missing_lists),
    )
    return tls_files if server.get_member("interCommTLSEnabled", check_flag, True) else None
