"""The files in deploy/ fit together, and the commands and flags they use exist."""

import json
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml
from support.deploy_tools import find_helm, validate_manifest

from parley.cli import coordinator
from parley.settings.config import SERVE_OPTIONS
from parley.settings.key_file import add_key, make_key
from parley.settings.option_kinds import duration_kind
from parley.settings.options import read_flags, resolve_options

DEPLOY = Path(__file__).parent.parent / "deploy"
FILES = ["secret.yaml", "coordinator.yaml", "prefill.yaml", "decode.yaml"]


def manifests(kind=None):
    loaded = [manifest for name in FILES for manifest in yaml.safe_load_all((DEPLOY / "k8s" / name).read_text("utf-8"))]
    return [manifest for manifest in loaded if kind in (None, manifest["kind"])]


def only_container(document):
    (only,) = document["spec"]["template"]["spec"]["containers"]
    return only


def test_services_select_pods_and_probes_use_existing_ports():
    pods = [manifest for manifest in manifests() if manifest["kind"] in ("Deployment", "StatefulSet")]
    assert len(pods) == 3
    for service in manifests("Service"):
        (selected_pod,) = [
            pod for pod in pods if pod["spec"]["template"]["metadata"]["labels"] == service["spec"]["selector"]
        ]
        ports = {port["name"] for port in only_container(selected_pod)["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    for pod in pods:
        assert pod["spec"]["selector"]["matchLabels"] == pod["spec"]["template"]["metadata"]["labels"]
        ports = {port["name"] for port in only_container(pod)["ports"]}
        probes = [only_container(pod)[probe] for probe in ("startupProbe", "livenessProbe", "readinessProbe")]
        assert {probe["httpGet"]["port"] for probe in probes} <= ports
        volumes = {volume["name"] for volume in pod["spec"]["template"]["spec"]["volumes"]}
        assert {mount["name"] for mount in only_container(pod)["volumeMounts"]} <= volumes


def test_probes_wait_longer_than_kubernetes_own_second():
    """A server on busy processors may take longer to answer, and must not be restarted for it."""
    names = ("k8s/*.yaml", "gateway/parley.yaml", "kserve/*.yaml", "vllm/*.yaml", "helm/parley/templates/*")
    files = [path for name in names for path in DEPLOY.glob(name)]
    lines = [line for path in files for line in path.read_text("utf-8").splitlines() if "nessProbe: " in line]
    assert len(lines) >= 18 and all("timeoutSeconds: 5" in line for line in lines)


def test_pods_that_clients_reach_serve_until_load_balancers_know_of_their_end():
    """Requests that come after the signal to end are refused, and a pod is taken off its service a little later."""
    folders = {
        "k8s": "coordinator.yaml", "gateway": "parley.yaml", "vllm": "leader-workers.yaml", "kserve": "runtime.yaml",
    }  # fmt: skip
    for path in [DEPLOY / folder / name for folder, name in folders.items()] + [DEPLOY / "kserve/llm.yaml"]:
        (line,) = (line for line in path.read_text("utf-8").splitlines() if "preStop" in line)
        hook = yaml.safe_load(line)["lifecycle"]["preStop"]["exec"]["command"]
        assert hook[1:] == ["-c", "import time; time.sleep(5)"]
    (runtime,) = yaml.safe_load_all((DEPLOY / "kserve/runtime.yaml").read_text("utf-8"))
    (service,) = yaml.safe_load_all((DEPLOY / "kserve/service.yaml").read_text("utf-8"))
    _, *flags = runtime["spec"]["containers"][0]["args"]
    ((drain, _),) = [flag_values for name, flag_values in read_flags(SERVE_OPTIONS, flags).items() if name == "drain"]
    grace = service["spec"]["predictor"]["terminationGracePeriodSeconds"]  # a runtime has no member for it
    assert grace > duration_kind().parse_raw(drain) + 5 + 5


def test_manifests_start_instances_with_existing_flags():
    for pod in manifests("StatefulSet"):
        command, *flags = only_container(pod)["args"]
        assert command == "serve"
        flag_values = {name: raw for name, (raw, _) in read_flags(SERVE_OPTIONS, flags).items()}
        assert pod["metadata"]["name"] == f"parley-{flag_values['role']}"
        known = {option.variable_name for option in SERVE_OPTIONS if option.configurable}
        assert {variable["name"] for variable in only_container(pod)["env"]} - {"POD_IP"} <= known


def test_pod_grace_period_outlasts_drain():
    from parley.coordinator.coordinator import DRAIN_SECONDS, GRACE_SECONDS

    for pod in [*manifests("StatefulSet"), *manifests("Deployment")]:
        command, *flags = only_container(pod)["args"]
        needed = DRAIN_SECONDS + GRACE_SECONDS
        if command == "serve":
            ((raw, _),) = [
                flag_values for name, flag_values in read_flags(SERVE_OPTIONS, flags).items() if name == "drain"
            ]
            needed = duration_kind().parse_raw(raw)
        needed += 5  # of the hook preStop
        assert pod["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > needed + 5


def coordinator_options():
    from parley.coordinator.config import parse_coordinator_config

    content = tomllib.loads((DEPLOY / "k8s/coordinator.toml").read_text("utf-8"))
    content["secret"] = content.pop("secret_file")  # the file exists only in the pod
    return parse_coordinator_config(content, "coordinator.toml")


def test_container_memory_suffices_for_the_bodies_that_are_accepted():
    (body_memory,) = [option.default for option in SERVE_OPTIONS if option.name == "body-memory"]
    for pod in [*manifests("StatefulSet"), *manifests("Deployment")]:
        bodies = body_memory if pod["kind"] == "StatefulSet" else coordinator_options().memory_limit
        limit = only_container(pod)["resources"]["limits"]["memory"]
        assert limit.endswith("Gi")
        assert (int(limit[:-2]) << 30) > 3 * bodies + (200 << 20)  # bytes, decoded values, and the process itself


def test_coordinator_manifest_lists_every_replica():
    options = coordinator_options()
    sets = {manifest["metadata"]["name"]: manifest["spec"] for manifest in manifests("StatefulSet")}
    urls = {
        f"http://{name}-{number}.{spec['serviceName']}:8000"
        for name, spec in sets.items()
        for number in range(spec["replicas"])
    }
    assert {place.url for place in options.instances} == urls
    (service,) = [manifest for manifest in manifests("Service") if manifest["metadata"]["name"] == "parley"]
    assert service["spec"]["selector"]["app.kubernetes.io/component"] == "coordinator"


def test_manifests_match_kubernetes_schemas():
    for document in manifests():
        validate_manifest(document)


def test_leader_and_workers_fit_together():
    service, group = yaml.safe_load_all((DEPLOY / "vllm/leader-workers.yaml").read_text("utf-8"))
    template = group["spec"]["leaderWorkerTemplate"]
    leader, worker = template["leaderTemplate"], template["workerTemplate"]
    assert service["spec"]["selector"].items() <= leader["metadata"]["labels"].items()
    assert not service["spec"]["selector"].items() <= worker["metadata"]["labels"].items()
    for pod in (leader["spec"], worker["spec"]):
        (container,) = pod["containers"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    server = leader["spec"]["containers"][0]
    end = server["args"].index("--")
    command, model, *flags = server["args"][:end]
    assert command == "serve" and not model.startswith("-")
    read_flags(SERVE_OPTIONS, flags)
    vllm_flags = dict(flag.split("=") for flag in server["args"][end + 1 :])
    gpus = sum(int(pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]) for pod in (leader, worker))
    tensor, pipeline = (int(vllm_flags[f"--{kind}-parallel-size"]) for kind in ("tensor", "pipeline"))
    assert tensor * pipeline == gpus and pipeline == template["size"]
    port = server["command"][2].partition("--port=")[2].split()[0]
    assert f"$LWS_LEADER_ADDRESS:{port}" in worker["spec"]["containers"][0]["command"][2]
    assert "ray start --head" in server["command"][2] and vllm_flags["--distributed-executor-backend"] == "ray"


CHARTS = {
    "single": [],
    "cluster": ["mode=cluster", "keysSecret=keys", "prefill.replicas=1"],
    "everything": [
        "gpu.enabled=true", "models.persistence.enabled=true", "autoscaling.enabled=true", "ingress.enabled=true",
        "ingress.host=parley.example", "model=owner/model", "keysSecret=keys", "arguments={--max-batch,8}",
    ],
    "several pods": ["gpu.enabled=true", "gpu.count=8", "gpu.pods=2", "model=owner/model", "keysSecret=keys"],
}  # fmt: skip


def render_chart(*values):
    settings = [word for value in values for word in ("--set", value)]
    helm = [find_helm(), "template", "release", str(DEPLOY / "helm/parley"), *settings]
    done = subprocess.run(helm, capture_output=True, text=True, check=True)
    return [manifest for manifest in yaml.safe_load_all(done.stdout) if manifest]


@pytest.mark.parametrize("values", CHARTS.values(), ids=CHARTS)
@pytest.mark.skipif(find_helm() is None, reason="helm renders the chart: make deploy-tools")
def test_chart_renders_servers_with_existing_flags(values):
    settings = [word for value in values for word in ("--set", value)]
    subprocess.run([find_helm(), "lint", str(DEPLOY / "helm/parley"), *settings], capture_output=True, check=True)
    documents = render_chart(*values)
    pods = [manifest for manifest in documents if manifest["kind"] in ("Deployment", "StatefulSet")]
    for pod in pods:
        assert pod["spec"]["selector"]["matchLabels"].items() <= pod["spec"]["template"]["metadata"]["labels"].items()
        command, *flags = only_container(pod)["args"]
        if command == "serve":
            read_flags(SERVE_OPTIONS, flags)
        volumes = {volume["name"] for volume in pod["spec"]["template"]["spec"]["volumes"]}
        assert {mount["name"] for mount in only_container(pod)["volumeMounts"]} <= volumes
    for group in [manifest for manifest in documents if manifest["kind"] == "LeaderWorkerSet"]:
        (leader,) = group["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["spec"]["containers"]
        _, _, *flags = leader["args"][: leader["args"].index("--")]
        read_flags(SERVE_OPTIONS, flags)
    for document in [manifest for manifest in documents if manifest["kind"] != "LeaderWorkerSet"]:
        validate_manifest(document)


@pytest.mark.parametrize("own_secret", ["", "mine"])
@pytest.mark.skipif(find_helm() is None, reason="helm renders the chart: make deploy-tools")
def test_chart_configures_a_coordinator_that_accepts_its_files(tmp_path, own_secret):
    documents = render_chart("mode=cluster", "keysSecret=keys", f"clusterSecret={own_secret}")
    (config,) = (document["data"]["coordinator.toml"] for document in documents if document["kind"] == "ConfigMap")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret/secret").write_text("the cluster's secret")
    (tmp_path / "keys").mkdir()
    add_key(tmp_path / "keys/keys.toml", make_key("alice")[1])
    (tmp_path / "coordinator.toml").write_text(config.replace("/etc/parley", str(tmp_path)))
    flags = ["--config", str(tmp_path / "coordinator.toml")]
    options = coordinator.coordinator_options(resolve_options(coordinator.OPTIONS, flags, {}))
    assert [hashed_key.name for hashed_key in options.hashed_keys] == [
        "alice"
    ] and options.secret == "the cluster's secret"

    secrets = {document["metadata"]["name"] for document in documents if document["kind"] == "Secret"}
    assert secrets == (set() if own_secret else {"release-parley-cluster"})
    used = set()
    for pod in (document for document in documents if document["kind"] in ("Deployment", "StatefulSet")):
        volumes = pod["spec"]["template"]["spec"]["volumes"]
        used |= {volume["secret"]["secretName"] for volume in volumes if "secret" in volume}
        used |= {
            variable["valueFrom"]["secretKeyRef"]["name"]
            for variable in only_container(pod).get("env", ())
            if "secretKeyRef" in variable.get("valueFrom", {})
        }
    assert used == {"keys", own_secret or "release-parley-cluster"}


def test_service_of_systemd_waits_for_the_server_and_stops_after_its_drain():
    lines = (DEPLOY / "systemd/parley.service").read_text("utf-8").splitlines()
    service = dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    program, command, *flags = service["ExecStart"].split()
    assert (program, command) == ("/opt/parley/bin/parley", "serve")
    assert set(read_flags(SERVE_OPTIONS, flags)) == {"config"}
    (drain,) = [option.default for option in SERVE_OPTIONS if option.name == "drain"]
    assert service["Type"] == "notify" and int(service["TimeoutStopSec"]) > drain
    assert service["OOMPolicy"] == "continue"  # the server itself restarts an engine that the kernel has killed


def test_compose_file_mounts_existing_files_and_serves_with_existing_flags():
    services = yaml.safe_load((DEPLOY / "compose/compose.yaml").read_text("utf-8"))["services"]
    command, *flags = services["parley"]["command"]
    assert command == "serve" and read_flags(SERVE_OPTIONS, flags)
    sources = [mount.split(":")[0] for service in services.values() for mount in service["volumes"]]
    files = [source for source in sources if source.startswith("./")]
    assert files and all((DEPLOY / "compose" / source).is_file() for source in files)


def test_image_listens_for_other_machines_and_is_not_root():
    dockerfile = (DEPLOY / "Dockerfile").read_text("utf-8")
    assert "PARLEY_HOST=0.0.0.0" in dockerfile and "USER 10001" in dockerfile and "HEALTHCHECK" in dockerfile
    kept = [line[1:] for line in (DEPLOY.parent / ".dockerignore").read_text("utf-8").splitlines() if line[0] == "!"]
    assert {"parley", "pyproject.toml", "setup.py", "requirements.lock", "README.md", "LICENSE"} <= set(kept)


class ReadyOrNot(BaseHTTPRequestHandler):
    """Answers ``/health/ready`` with the server's ``status``."""

    def do_GET(self):
        self.send_response(self.server.status if self.path == "/health/ready" else 404)
        self.end_headers()

    def log_message(self, *_):
        pass


def test_health_check_of_the_image_asks_the_port_of_the_variable():
    lines = (DEPLOY / "Dockerfile").read_text("utf-8").replace("\\\n", "").splitlines()
    (check,) = [line for line in lines if line.startswith("HEALTHCHECK")]
    _, *words = json.loads(check.partition("CMD ")[2])
    with HTTPServer(("127.0.0.1", 0), ReadyOrNot) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        environment = {"PARLEY_PORT": str(server.server_port)}
        for server.status, code in ((200, 0), (503, 1)):
            done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, timeout=60)
            assert done.returncode == code, done.stderr
        server.shutdown()


def test_nobody_can_log_in_to_the_grafana_of_compose():
    services = yaml.safe_load((DEPLOY / "compose/compose.yaml").read_text("utf-8"))["services"]
    environment = services["grafana"]["environment"]
    assert environment["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"  # with the password "admin"
    assert (environment["GF_AUTH_DISABLE_LOGIN_FORM"], environment["GF_AUTH_BASIC_ENABLED"]) == ("true", "false")


class SecretsApi(BaseHTTPRequestHandler):
    """The part of Kubernetes' API that makes secrets. The server keeps them in ``made``."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        exists = body["metadata"]["name"] in self.server.made
        allowed = self.headers["authorization"] == "Bearer t" and self.path == "/api/v1/namespaces/parley/secrets"
        if allowed and not exists:
            self.server.made[body["metadata"]["name"]] = body["stringData"]["secret"]
        self.send_response(409 if exists else 201 if allowed else 403)
        self.end_headers()

    def log_message(self, *args):
        """Log nothing."""


def test_job_makes_a_random_secret_once(tmp_path):
    (tmp_path / "namespace").write_text("parley")
    (tmp_path / "token").write_text("t\n")
    made = []
    for _ in range(2):
        with HTTPServer(("127.0.0.1", 0), SecretsApi) as server:
            server.made = {}
            threading.Thread(target=server.serve_forever, daemon=True).start()
            address = f"http://127.0.0.1:{server.server_port}"
            environment = {"ACCOUNT_FOLDER": str(tmp_path), "API_SERVER": address, "no_proxy": "*"}
            script = [sys.executable, "-I", str(DEPLOY / "k8s/make_secret.py")]
            outputs = [subprocess.run(script, env=environment, capture_output=True, text=True).stdout for _ in range(2)]
            assert outputs == ["parley-cluster is made\n", "parley-cluster exists already\n"]
            made.append(server.made["parley-cluster"])
            server.shutdown()
    assert made[0] != made[1] and all(len(secret) == 64 for secret in made)


def test_pods_use_the_secret_that_the_job_makes():
    (job,) = manifests("Job")
    assert only_container(job)["command"] == ["python", "/etc/parley/make_secret.py"]
    (role,) = manifests("Role")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["secrets"], "verbs": ["create"]}]
    for pod in manifests("StatefulSet"):
        (variable,) = (
            variable for variable in only_container(pod)["env"] if variable["name"] == "PARLEY_CLUSTER_SECRET"
        )
        assert variable["valueFrom"]["secretKeyRef"] == {"name": "parley-cluster", "key": "secret"}
