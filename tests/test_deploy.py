"""The files in deploy/ fit together, and the commands and flags they use exist."""

import tomllib
from pathlib import Path

import pytest
import yaml

from parley.settings.config import SERVE
from parley.settings.kinds import duration
from parley.settings.options import read_flags

DEPLOY = Path(__file__).parent.parent / "deploy"
FILES = ["coordinator.yaml", "prefill.yaml", "decode.yaml"]


def documents(kind=None):
    found = [each for name in FILES for each in yaml.safe_load_all((DEPLOY / "k8s" / name).read_text("utf-8"))]
    return [each for each in found if kind in (None, each["kind"])]


def container(document):
    (only,) = document["spec"]["template"]["spec"]["containers"]
    return only


def test_services_select_pods_and_probes_use_existing_ports():
    pods = [each for each in documents() if each["kind"] in ("Deployment", "StatefulSet")]
    assert len(pods) == 3
    for service in documents("Service"):
        (behind,) = [
            pod for pod in pods if pod["spec"]["template"]["metadata"]["labels"] == service["spec"]["selector"]
        ]
        ports = {port["name"] for port in container(behind)["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    for pod in pods:
        assert pod["spec"]["selector"]["matchLabels"] == pod["spec"]["template"]["metadata"]["labels"]
        ports = {port["name"] for port in container(pod)["ports"]}
        probes = [container(pod)[probe] for probe in ("startupProbe", "livenessProbe", "readinessProbe")]
        assert {probe["httpGet"]["port"] for probe in probes} <= ports
        volumes = {volume["name"] for volume in pod["spec"]["template"]["spec"]["volumes"]}
        assert {mount["name"] for mount in container(pod)["volumeMounts"]} <= volumes


def test_manifests_start_instances_with_existing_flags():
    for pod in documents("StatefulSet"):
        command, *flags = container(pod)["args"]
        assert command == "serve"
        given = {name: raw for name, (raw, _) in read_flags(SERVE, flags).items()}
        assert pod["metadata"]["name"] == f"parley-{given['role']}"
        known = {option.key for option in SERVE if option.variable}
        assert {each["name"] for each in container(pod)["env"]} - {"POD_IP"} <= known


def test_pod_grace_period_outlasts_drain():
    from parley.coordinator.coordinator import DRAIN, GRACE

    for pod in [*documents("StatefulSet"), *documents("Deployment")]:
        command, *flags = container(pod)["args"]
        needed = DRAIN + GRACE
        if command == "serve":
            ((raw, _),) = [each for name, each in read_flags(SERVE, flags).items() if name == "drain"]
            needed = duration().read(raw)
        assert pod["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > needed + 5


def test_coordinator_manifest_lists_every_replica():
    from parley.coordinator.config import read

    content = tomllib.loads((DEPLOY / "k8s/coordinator.toml").read_text("utf-8"))
    content["secret"] = content.pop("secret_file")  # the file exists only in the pod
    options = read(content, "coordinator.toml")
    sets = {each["metadata"]["name"]: each["spec"] for each in documents("StatefulSet")}
    urls = {
        f"http://{name}-{number}.{spec['serviceName']}:8000"
        for name, spec in sets.items()
        for number in range(spec["replicas"])
    }
    assert {place.url for place in options.instances} == urls
    (service,) = [each for each in documents("Service") if each["metadata"]["name"] == "parley"]
    assert service["spec"]["selector"]["app.kubernetes.io/component"] == "coordinator"


def test_manifests_match_kubernetes_schemas():
    validate = pytest.importorskip("kubernetes_validate", reason="its schemas take 100 MB")
    for document in documents():
        validate.validate(document, "1.37", strict=True)
