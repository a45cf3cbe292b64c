"""MindIE's config.json: members with an effect, members that are only listed, and errors for invalid values."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from parley import hub
from parley.cli import serve
from parley.cli.serve import offered_models
from parley.cli.serve_config import mindie_config
from parley.cli.serve_config.server_options import server_options
from parley.dialects.mindie.api_rules import MindieRules
from parley.serving.server_options import ListenAddress
from parley.settings.config import SERVE_OPTIONS
from parley.settings.media_hosts import MediaHost
from parley.settings.option_kinds import NamedModel
from parley.settings.options import ConfigError, resolve_options
from parley.types import ParleySettings
from parley.web.tls.files import TlsFiles

MODEL = "BackendConfig.ModelDeployConfig.ModelConfig[0]."
NAME_RULE = "1 to 256 letters, digits, - . and _, none of these marks at the ends."
EVERY_ADDRESS = "means every address; that needs allowAllZeroIpListening to be true."
FULL_CONFIG: dict[str, Any] = {
    "Version": "1.0.0",
    "LogConfig": {"logLevel": "Info"},
    "ServerConfig": {
        "ipAddress": "127.0.0.1",
        "managementIpAddress": "127.0.0.2",
        "port": 1025,
        "managementPort": 1026,
        "metricsPort": 1027,
        "allowAllZeroIpListening": False,
        "maxLinkNum": 300,
        "httpsEnabled": True,
        "fullTextEnabled": False,
        "tlsCaPath": "security/ca/",
        "tlsCaFile": ["ca.pem"],
        "tlsCert": "security/certs/server.pem",
        "tlsPk": "security/keys/server.key.pem",
        "tlsPkPwd": "security/pass/key_pwd.txt",
        "tlsCrlPath": "security/certs/",
        "tlsCrlFiles": ["server_crl.pem"],
        "managementTlsCaFile": ["management_ca.pem"],
        "managementTlsCert": "security/certs/management/server.pem",
        "managementTlsPk": "security/keys/management/server.key.pem",
        "inferMode": "standard",
        "interCommTLSEnabled": True,
        "openAiSupport": "vllm",
        "tokenTimeout": 600,
        "e2eTimeout": 500,
        "maxRequestLength": 40,
    },
    "BackendConfig": {
        "npuDeviceIds": [[0, 1]],
        "ModelDeployConfig": {
            "maxSeqLen": 2560,
            "maxInputTokenLen": 2048,
            "truncation": False,
            "ModelConfig": [
                {
                    "modelInstanceType": "Standard",
                    "modelName": "llama_65b",
                    "modelWeightPath": "weights",
                    "worldSize": 4,
                    "cpuMemSize": 5,
                    "npuMemSize": 2,
                    "backendType": "atb",
                }
            ],
        },
        "ScheduleConfig": {
            "templateType": "Standard",
            "cacheBlockSize": 128,
            "maxPrefillBatchSize": 50,
            "maxPrefillTokens": 8192,
            "prefillPolicyType": 0,
            "maxBatchSize": 200,
            "maxIterTimes": 512,
            "maxPreemptCount": 0,
        },
    },
    "SomethingNew": 1,
}
SECTIONS = {
    "ServerConfig": ("ServerConfig",),
    "BackendConfig.ModelDeployConfig": ("BackendConfig", "ModelDeployConfig"),
    "BackendConfig.ScheduleConfig": ("BackendConfig", "ScheduleConfig"),
    MODEL[:-1]: ("BackendConfig", "ModelDeployConfig", "ModelConfig", 0),
}


def write_config(folder: Path, content: Any) -> str:
    file = folder / "conf" / "config.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(file)


def changed_config(path: str, value: Any) -> dict[str, Any]:
    """Returns the whole file with one member changed."""
    content = copy.deepcopy(FULL_CONFIG)
    section, _, member = path.rpartition(".")
    parent: Any = content
    for step in SECTIONS.get(section, ()):
        parent = parent[step]
    parent[member] = value
    return content


def read_config(folder: Path, content: Any, **environment: str) -> mindie_config.MindIEPlan:
    return mindie_config.read_mindie_config(write_config(folder, content), environment)


def config_error(folder: Path, content: Any, **environment: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_config(folder, content, **environment)
    return str(caught.value).removeprefix(str(folder / "conf" / "config.json") + ": ")


def test_mindie_config_members_take_effect(tmp_path):
    security_folder = tmp_path / "security"
    (security_folder / "certs").mkdir(parents=True)
    (security_folder / "certs/server_crl.pem").touch()
    plan = read_config(tmp_path, FULL_CONFIG)
    own_tls = TlsFiles(
        certificate=security_folder / "certs/server.pem",
        key=security_folder / "keys/server.key.pem",
        password_file=security_folder / "pass/key_pwd.txt",
        client_authorities=(security_folder / "ca/ca.pem",),
        revocation_lists=(security_folder / "certs/server_crl.pem",),
    )
    management, metrics = plan.listen[1].tls, plan.listen[2].tls
    assert management == TlsFiles(
        certificate=security_folder / "certs/management/server.pem",
        key=security_folder / "keys/management/server.key.pem",
        client_authorities=(security_folder / "ca/management_ca.pem",),
    )
    assert metrics is not None and metrics.certificate == security_folder / "certs/metrics/server.pem"
    assert plan.listen == [
        ListenAddress("mindie", "127.0.0.1", 1025, own_tls),
        ListenAddress("mindie-management", "127.0.0.2", 1026, management),
        ListenAddress("mindie-metrics", "127.0.0.2", 1027, metrics),
    ]
    config = resolve_options(SERVE_OPTIONS, ["--threads", "1"], {}).with_unset_from(plan.options, "there")
    (offer,) = offered_models(config)
    engine = offer.settings
    assert (engine.model, engine.max_batch) == (str(tmp_path / "weights"), 200)
    assert plan.context_length(config["model"]) == 2560
    assert (engine.kv_memory, engine.step_tokens, engine.threads) == (2 << 30, 8192, 1)
    options = plan.apply_to_options(server_options(config), "strict-old")
    assert (options.port, offer.names, options.drain) == (None, ("llama_65b",), 500)
    assert (options.body_limit, options.max_queue) == (40 << 20, 700)  # 300 are connected, 600 more may wait
    limits = (options.max_prompt, options.max_output, options.token_timeout, options.timeout)
    assert limits == (plan.max_prompt, plan.max_output, plan.token_timeout, plan.timeout) and all(limits)
    assert list(options.apis) == ["mindie", "mindie-management", "mindie-metrics"]
    assert options.listen == tuple(plan.listen)
    assert "SomethingNew, ServerConfig.interCommTLSEnabled, BackendConfig.npuDeviceIds" in options.notes[0]
    assert "ServerConfig.port" not in options.notes[0]


def test_media_limits_of_a_mindie_config(tmp_path):
    plan = read_config(tmp_path, FULL_CONFIG, ALLOWED_MEDIA_DOMAINS_ENV="a.example, b.example")
    config = resolve_options(SERVE_OPTIONS, [], {}).with_unset_from(plan.options, "there")
    options = plan.apply_to_options(server_options(config), "strict")
    assert options.media.hosts == (MediaHost("a.example"), MediaHost("b.example"))
    assert options.media.sizes == {"image": 40 << 20, "video": 512 << 20, "audio": 40 << 20}
    assert options.media.counts == {"image": 20, "video": 20, "audio": 20}
    assert (options.media_body_limit, options.media.request_size) == (40 << 20, 1000 << 20)
    assert "media-hosts" not in read_config(tmp_path, FULL_CONFIG).options
    message = config_error(tmp_path, FULL_CONFIG, ALLOWED_MEDIA_DOMAINS_ENV="a.example,*")
    assert message.startswith("ALLOWED_MEDIA_DOMAINS_ENV: '*' is not a host such as example.com")


def test_mindie_config_of_a_cluster_instance(tmp_path):
    content = changed_config("ServerConfig.inferMode", "dmi")
    content["ServerConfig"] |= {"interCommPort": 1200, "interCommPk": "own/key.pem", "interCommTlsCaFiles": ["a.pem"]}
    plan = read_config(tmp_path, content)
    config = resolve_options(SERVE_OPTIONS, [], {}).with_unset_from(plan.options, "there")
    options = plan.apply_to_options(server_options(config), "strict")
    assert (options.role, options.peer_port) == ("none", 1200)
    assert plan.profile_rules("strict").is_separated
    assert not read_config(tmp_path, FULL_CONFIG).profile_rules("strict").is_separated
    security_folder = tmp_path / "security/grpc"
    assert options.peer_tls == TlsFiles(
        security_folder / "certs/server.pem",
        tmp_path / "own/key.pem",
        client_authorities=(security_folder / "ca/a.pem",),
    )
    assert offered_models(config)[0].settings.shared
    assert not [member for member in plan.unused_members if "interComm" in member]
    content["ServerConfig"]["interCommTLSEnabled"] = False
    assert read_config(tmp_path, content).peer_tls is None


def test_empty_mindie_config_has_mindies_defaults(tmp_path):
    plan = read_config(tmp_path, {})
    assert [(listener.host, listener.port) for listener in plan.listen] == [
        ("127.0.0.1", port) for port in (1025, 1026, 1027)
    ]
    assert plan.listen[0].tls == plan.listen[2].tls  # one address, one certificate
    assert (plan.max_prompt, plan.max_output, plan.token_timeout, plan.timeout) == (2048, 512, 600, 600)
    assert plan.options["max-queue"] == 2800 and plan.unused_members == []
    with pytest.raises(ConfigError, match=rf"{MODEL[:-4]}.*modelWeightPath is missing"):
        plan.check_model([])
    plan.check_model([NamedModel((), hub.BUILT_IN, {})])  # a model named on the command line


def test_command_line_options_override_the_mindie_config(tmp_path):
    plan = read_config(tmp_path, FULL_CONFIG)
    flags = ["other", "--port", "9", "--max-batch", "3", "--listen", "tgi=h:1"]
    config = resolve_options(SERVE_OPTIONS, flags, {}).with_unset_from(plan.options, "there")
    options = plan.apply_to_options(server_options(config), "extended")
    assert (options.port, config["model"], config["max-batch"]) == (9, [NamedModel((), "other", {})], 3)
    assert options.listen == (*plan.listen, ListenAddress("tgi", "h", 1))


@pytest.mark.parametrize(
    ("path", "value", "name", "rule"),
    [
        ("ServerConfig.fullTextEnabled", True, "full_text", True),
        ("ServerConfig.openAiSupport", "openai", "vllm", False),
        ("ServerConfig.maxRequestLength", 3, "body_megabytes", 3),
        ("BackendConfig.ModelDeployConfig.maxInputTokenLen", 9000, "max_input_token_len", 2559),
        ("BackendConfig.ScheduleConfig.maxN", 4, "max_n", 4),
        ("BackendConfig.ScheduleConfig.maxPrefillBatchSize", 0, "max_prefill_batch_size", 200),
        (MODEL + "worldSize", 1, "world_size", 1),
        (MODEL + "modelWeightPath", "/a/b", "model_folder_name", "b"),
    ],
)
def test_mindie_config_sets_the_rules_that_clients_see(tmp_path, path, value, name, rule):
    content = changed_config(path, value)
    if value == 9000:
        content["BackendConfig"]["ScheduleConfig"]["maxPrefillTokens"] = 9000
    assert getattr(MindieRules(**read_config(tmp_path, content).rules), name) == rule


@pytest.mark.parametrize(
    ("value", "overlong"), [(True, "head"), (-1, "head"), (1, "tail"), (0, "refuse"), (False, "refuse")]
)
def test_mindie_truncation_values_decide_about_overlong_prompts(tmp_path, value, overlong):
    plan = read_config(tmp_path, changed_config("BackendConfig.ModelDeployConfig.truncation", value))
    options = plan.apply_to_options(server_options(resolve_options(SERVE_OPTIONS, [], {})), "strict")
    assert (MindieRules(**plan.rules).truncation or "refuse", options.max_prompt, options.max_output) == (
        overlong,
        2048,
        512,
    )
    assert (options.timeout, options.token_timeout) == (500, 600)


def test_mindie_environment_variables_take_effect(tmp_path):
    plan = read_config(tmp_path, FULL_CONFIG, MIES_CONTAINER_IP="10.0.0.1", MIES_CONTAINER_MANAGEMENT_IP="::1")
    assert [listener.host for listener in plan.listen] == ["10.0.0.1", "::1", "::1"]
    assert "MIES_CONTAINER_IP: 'x' is not an IPv4 or IPv6 address" in config_error(
        tmp_path, FULL_CONFIG, MIES_CONTAINER_IP="x"
    )
    default_options = server_options(resolve_options(SERVE_OPTIONS, [], {}))
    for variable, profile, figures in (
        ("", "strict", 0),
        ("1", "strict", 1),
        ("", "strict-old", 1),
        ("", "extended", 1),
    ):
        plan = read_config(
            tmp_path, FULL_CONFIG, MINDIE_LLM_BENCHMARK_ENABLE=variable, MIES_SERVICE_MONITOR_MODE=variable
        )
        assert plan.profile_rules(profile).token_costs == bool(figures)
        page = plan.apply_to_options(default_options, profile).apis["mindie-metrics"].routes[0].kind
        assert page == ("metrics" if variable or profile == "extended" else "info")
    assert plan.profile_rules("strict").has_metrics_port is False


def test_mindie_dynamic_timeouts_and_mock_instances(tmp_path):
    plan = read_config(tmp_path, changed_config("EnableDynamicAdjustTimeoutConfig", True))
    assert (plan.token_timeout, plan.timeout) == (3600, 65535)
    plan = read_config(tmp_path, changed_config(MODEL + "modelInstanceType", "StandardMock"))
    assert plan.options["scripted-engine"] is True


def test_mindie_config_caps_the_context_at_the_models_length(tmp_path):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text('{"max_position_embeddings": 100}')
    weights = NamedModel((), str(tmp_path / "weights"), {})
    assert read_config(tmp_path, FULL_CONFIG).context_length([ParleySettings(model=weights.model)]) == 100
    with pytest.raises(ConfigError, match=r'modelWeightPath: "weights" cannot be served: its folder has no tokenizer'):
        read_config(tmp_path, FULL_CONFIG).check_model([weights])


@pytest.mark.parametrize(
    ("flags", "length", "source"),
    [
        ([], 300, "config.json"),
        (["--max-model-len", "99"], 99, "--max-model-len"),
        (["--hf-overrides", '{"max_position_embeddings": 150}'], 150, "config.json"),
    ],
)
def test_mindie_context_length_holds_for_a_model_on_the_command_line(tmp_path, capsys, flags, length, source):
    content = changed_config("BackendConfig.ModelDeployConfig.maxSeqLen", 300)
    content["BackendConfig"]["ScheduleConfig"]["maxIterTimes"] = 300
    content["BackendConfig"]["ModelDeployConfig"]["ModelConfig"][0].pop("modelWeightPath")
    arguments = [hub.BUILT_IN, "--mindie-config", write_config(tmp_path, content), "--show-config", *flags]
    assert serve.run_command(resolve_options(SERVE_OPTIONS, arguments, {})) == 0
    (shown,) = (line for line in capsys.readouterr().out.splitlines() if line.split()[0] == "max-model-len")
    assert shown.split()[1] == str(length)
    assert source in shown


def test_mindie_config_loads_lora_modules(tmp_path):
    content = copy.deepcopy(FULL_CONFIG)
    deploy = content["BackendConfig"]["ModelDeployConfig"]
    modules = [{"name": "a-1", "path": "adapters/a", "baseModelName": "llama_65b"}, {"name": "b", "path": "/x/b"}]
    deploy |= {"maxLoras": 3, "maxLoraRank": 64, "LoraModules": modules}
    plan = read_config(tmp_path, content)
    assert not {"maxLoras", "maxLoraRank", "LoraModules"} & {
        unused_member.rpartition(".")[2] for unused_member in plan.unused_members
    }
    (offer,) = offered_models(resolve_options(SERVE_OPTIONS, [], {}).with_unset_from(plan.options, "there"))
    engine = offer.settings
    assert engine.adapters == {"a-1": str(tmp_path / "adapters/a"), "b": "/x/b"}
    assert (engine.max_adapters, engine.max_rank) == (3, 64)
    for wrong in (5, ["a"], [{"name": "a"}], [{"path": "x"}], [{"name": "a b", "path": "x"}]):
        deploy["LoraModules"] = wrong
        assert "LoraModules" in config_error(tmp_path, content)


def test_default_mindie_password_and_crl_files_are_optional(tmp_path):
    content = {"ServerConfig": {"managementIpAddress": "127.0.0.3"}}
    assert all(
        listener.tls is not None and listener.tls[2:5:2] == (None, ())
        for listener in read_config(tmp_path, content).listen
    )
    for name in ("pass/key_pwd.txt", "certs/server_crl.pem", "pass/management/key_pwd.txt"):
        (tmp_path / "security" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "security" / name).touch()
    own, management, _ = read_config(tmp_path, content).listen
    assert own.tls is not None and own.tls.password_file == tmp_path / "security/pass/key_pwd.txt"
    assert own.tls.revocation_lists == (tmp_path / "security/certs/server_crl.pem",)
    assert (
        management.tls is not None and management.tls.password_file == tmp_path / "security/pass/management/key_pwd.txt"
    )


def test_named_crl_files_that_do_not_exist_are_a_warning_until_one_does(tmp_path):
    default_options = server_options(resolve_options(SERVE_OPTIONS, [], {}))
    content = changed_config("ServerConfig.tlsCrlFiles", ["one.pem", "two.pem"])
    plan = read_config(tmp_path, content)
    assert all(listener.tls is not None and not listener.tls.revocation_lists for listener in plan.listen)
    (note,) = (note for note in plan.apply_to_options(default_options, "strict").notes if "revocation" in note)
    assert note.endswith("certs/one.pem, " + str(tmp_path / "security/certs/two.pem") + " does not exist.")
    (tmp_path / "security/certs").mkdir(parents=True)
    (tmp_path / "security/certs/two.pem").touch()
    plan = read_config(tmp_path, content)
    assert plan.listen[0].tls is not None
    assert [file.name for file in plan.listen[0].tls.revocation_lists] == ["one.pem", "two.pem"]
    assert not any("revocation" in note for note in plan.apply_to_options(default_options, "strict").notes)


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        ("ServerConfig.port", 80, "80 is not a whole number from 1024 to 65535."),
        ("ServerConfig.port", "1025", '"1025" is not a whole number from 1024 to 65535.'),
        ("ServerConfig.managementPort", 65_536, "65536 is not a whole number from 1024 to 65535."),
        ("ServerConfig.metricsPort", True, "true is not a whole number from 1024 to 65535."),
        ("ServerConfig.ipAddress", "localhost", '"localhost" is not an IPv4 or IPv6 address.'),
        ("ServerConfig.ipAddress", "0.0.0.0", f"0.0.0.0 {EVERY_ADDRESS}"),
        ("ServerConfig.managementIpAddress", "::", f":: {EVERY_ADDRESS}"),
        ("ServerConfig.httpsEnabled", 1, "1 is not true or false."),
        ("ServerConfig.maxLinkNum", 0, "0 is not a whole number from 1 to 4096."),
        ("ServerConfig.tlsCaFile", [], "[] is not a list of 1 to 3 file names."),
        ("ServerConfig.tlsCaFile", ["a", "b", "c", "d"], '["a","b","c","d"] is not a list of 1 to 3 file names.'),
        ("ServerConfig.tlsCert", 5, "5 is not a string."),
        ("ServerConfig.inferMode", "pd", '"pd" is not one of "standard", "dmi".'),
        ("ServerConfig.interCommPort", 1023, "1023 is not a whole number from 1024 to 65535."),
        ("ServerConfig.openAiSupport", True, "true is not a string."),
        ("ServerConfig.tokenTimeout", 3601, "3601 is not a whole number from 1 to 3600."),
        ("ServerConfig.e2eTimeout", 65_536, "65536 is not a whole number from 1 to 65535."),
        ("ServerConfig.e2eTimeout", 1.5, "1.5 is not a whole number from 1 to 65535."),
        ("ServerConfig.maxRequestLength", 101, "101 is not a whole number from 1 to 100."),
        ("BackendConfig.ModelDeployConfig.maxSeqLen", 0, "0 is not a whole number of at least 2."),
        (
            "BackendConfig.ModelDeployConfig.maxInputTokenLen",
            2**22 + 1,
            "4194305 is not a whole number from 1 to 4194304.",
        ),
        ("BackendConfig.ModelDeployConfig.truncation", 2, "2 is not one of false, true, 0, 1, -1."),
        ("BackendConfig.ModelDeployConfig.ModelConfig", [], "[] is not a list of one object."),
        ("BackendConfig.ModelDeployConfig.ModelConfig", [{}, {}], "[{},{}] is not a list of one object."),
        (MODEL + "modelName", "-x", f'"-x" is not {NAME_RULE}'),
        (MODEL + "modelName", "", f'"" is not {NAME_RULE}'),
        (MODEL + "modelInstanceType", "Mock", '"Mock" is not one of "Standard", "StandardMock".'),
        (MODEL + "npuMemSize", 0, "0 is not -1 or a number of GB above 0."),
        (MODEL + "cpuMemSize", -1, "-1 is not a whole number of at least 0."),
        ("BackendConfig.ScheduleConfig.cacheBlockSize", 100, "100 is not a multiple of 16."),
        ("BackendConfig.ScheduleConfig.cacheBlockSize", 256, "256 is not a whole number from 1 to 128."),
        ("BackendConfig.ScheduleConfig.maxPrefillTokens", 100, "100 is less than maxInputTokenLen, which is 2048."),
        ("BackendConfig.ScheduleConfig.maxPrefillBatchSize", 201, "201 is not a whole number from 0 to 200."),
        ("BackendConfig.ScheduleConfig.maxIterTimes", 2561, "2561 is not a whole number from 1 to 2560."),
        ("BackendConfig.ScheduleConfig.maxPreemptCount", 201, "201 is not a whole number from 0 to 200."),
        ("BackendConfig.ScheduleConfig.prefillPolicyType", 1, "1 is not one of 0."),
        ("BackendConfig.ScheduleConfig.maxN", 201, "201 is not a whole number from 1 to 200."),
        ("BackendConfig.ScheduleConfig.templateType", "x", '"x" is not one of "Standard", "Mix".'),
    ],
)
def test_names_an_invalid_mindie_config_member_with_its_range(tmp_path, path, value, text):
    assert config_error(tmp_path, changed_config(path, value)) == f"{path}: {text}"


def test_rejects_unreadable_mindie_config_files(tmp_path):
    assert "is not valid JSON" in config_error(tmp_path, "{")
    assert "holds no JSON object" in config_error(tmp_path, "[]")
    assert config_error(tmp_path, {"ServerConfig": []}) == "ServerConfig: [] is not an object."
    for endless in (write_config(tmp_path, " " * (10 << 20) + "{}"), "/dev/zero"):
        with pytest.raises(ConfigError, match="has more than 10 MB"):
            mindie_config.read_mindie_config(endless, {})
    assert (
        read_config(tmp_path, "\ufeff" + json.dumps(FULL_CONFIG)).max_prompt == 2048
    )  # with the BOM that some editors add
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        mindie_config.read_mindie_config(str(tmp_path / "none"), {})
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        mindie_config.read_mindie_config(str(tmp_path), {})
