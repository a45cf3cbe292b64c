"""The manifests for gateways and KServe: they fit together, have existing flags, and follow the schemas of their kinds.

The schemas are the parts of the custom resources' that the manifests use, from ``gateway-api-inference-extension`` 1.0,
``gateway-api`` 1.4 and KServe 0.17; unknown members are refused.
"""

from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from support.deploy_tools import validate_manifest

from parley.settings.config import SERVE_OPTIONS
from parley.settings.option_kinds import duration_kind
from parley.settings.options import read_flags

DEPLOY = Path(__file__).parent.parent / "deploy"
FILES = [*sorted((DEPLOY / "gateway").glob("*.yaml")), *sorted((DEPLOY / "kserve").glob("*.yaml"))]
TEXT, PORT = {"type": "string", "minLength": 1}, {"type": "integer", "minimum": 1, "maximum": 65535}
PORT_NUMBER = {"type": "object", "properties": {"number": PORT}, "required": ["number"], "additionalProperties": False}


def objects(texts: str, **others: Any) -> dict[str, Any]:
    """Return the schema of an object with exactly these members: texts by name, and others with their schemas."""
    members = dict.fromkeys(texts.split(), TEXT) | others
    return {"type": "object", "properties": members, "required": list(members), "additionalProperties": False}


def some(items: dict[str, Any], most: int = 16) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": most}


FREE = {"type": "object"}
CONTAINERS = some({"type": "object", "required": ["name", "image"]})
SPECS: dict[tuple[str, str], dict[str, Any]] = {
    ("inference.networking.k8s.io/v1", "InferencePool"): objects(
        "",
        selector=objects("", matchLabels={"type": "object", "additionalProperties": TEXT}),
        targetPorts=some(PORT_NUMBER, 8),
        endpointPickerRef=objects("name", port=PORT_NUMBER),
    ),
    ("gateway.networking.k8s.io/v1", "Gateway"): objects(
        "gatewayClassName", listeners=some(objects("name protocol", port=PORT))
    ),
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): objects(
        "",
        parentRefs=some(objects("group kind name")),
        rules=some(
            objects(
                "",
                matches=some(objects("", path=objects("type value"))),
                backendRefs=some(objects("group kind name")),
                timeouts=objects("", request={"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}),
            )
        ),
    ),
    ("serving.kserve.io/v1alpha1", "ClusterServingRuntime"): objects(
        "",
        annotations={"type": "object", "additionalProperties": TEXT},
        supportedModelFormats=some(
            {
                "type": "object",
                "properties": {"name": TEXT, "version": TEXT, "autoSelect": {"type": "boolean"}, "priority": PORT},
                "required": ["name"],
                "additionalProperties": False,
            }
        ),
        protocolVersions=some({"enum": ["v1", "v2", "grpc-v1", "grpc-v2"]}),
        containers=CONTAINERS,
        volumes=some(FREE),
    ),
    ("serving.kserve.io/v1beta1", "InferenceService"): objects(
        "",
        predictor=objects(
            "",
            minReplicas={"type": "integer"},
            terminationGracePeriodSeconds={"type": "integer"},
            model=objects("runtime storageUri protocolVersion", modelFormat=objects("name")),
        ),
    ),
    ("serving.kserve.io/v1alpha1", "LLMInferenceService"): objects(
        "",
        model=objects("name uri"),
        replicas={"type": "integer"},
        router=objects("", gateway=FREE, route=FREE, scheduler=FREE),
        template={"type": "object", "required": ["containers"], "properties": {"containers": CONTAINERS}},
    ),
}


@cache
def all_manifests() -> list[dict[str, Any]]:
    return [manifest for file in FILES for manifest in yaml.safe_load_all(file.read_text("utf-8"))]


def manifests(*kinds: str) -> list[dict[str, Any]]:
    return [manifest for manifest in all_manifests() if manifest["kind"] in kinds or not kinds]


def parley_pods() -> list[dict[str, Any]]:
    """The parts of the manifests that have parley's containers."""
    pods = [manifest["spec"]["template"]["spec"] for manifest in manifests("Deployment")]
    pods += [manifest["spec"] for manifest in manifests("ClusterServingRuntime")]
    pods += [manifest["spec"]["template"] for manifest in manifests("LLMInferenceService")]
    return [pod for pod in pods if pod["containers"][0]["image"] == "parley"]


def test_custom_resources_follow_their_schemas():
    tested = set()
    for document in manifests():
        kind = document["apiVersion"], document["kind"]
        if kind in SPECS:
            jsonschema.validate(document["spec"], SPECS[kind])
            tested.add(kind)
    assert tested == SPECS.keys()


def test_other_gateway_manifests_match_kubernetes_schemas():
    for document in manifests("Deployment", "Service", "ConfigMap", "ServiceAccount", "Role", "RoleBinding"):
        validate_manifest(document)


def test_pool_route_and_picker_refer_to_each_other():
    (pool,), (route,), (gateway,) = manifests("InferencePool"), manifests("HTTPRoute"), manifests("Gateway")
    deployments = {manifest["metadata"]["name"]: manifest["spec"]["template"] for manifest in manifests("Deployment")}
    labels = deployments["parley"]["metadata"]["labels"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
    ports = [port["containerPort"] for port in deployments["parley"]["spec"]["containers"][0]["ports"]]
    assert [port["number"] for port in pool["spec"]["targetPorts"]] == ports
    picker, (service,) = pool["spec"]["endpointPickerRef"], manifests("Service")
    assert (picker["name"], picker["port"]["number"]) == (
        service["metadata"]["name"],
        service["spec"]["ports"][0]["port"],
    )
    assert service["spec"]["selector"] == deployments["parley-picker"]["metadata"]["labels"]
    arguments = deployments["parley-picker"]["spec"]["containers"][0]["args"]
    assert f"--pool-name={pool['metadata']['name']}" in arguments
    (config,) = manifests("ConfigMap")
    plugins = yaml.safe_load(config["data"]["config.yaml"])
    named = {plugin["pluginRef"] for profile in plugins["schedulingProfiles"] for plugin in profile["plugins"]}
    assert named == {plugin["type"] for plugin in plugins["plugins"]}
    (rule,) = route["spec"]["rules"]
    assert rule["backendRefs"][0]["name"] == pool["metadata"]["name"]
    assert route["spec"]["parentRefs"][0]["name"] == gateway["metadata"]["name"]
    listed = {name for manifest in manifests("Kustomization") for name in manifest["resources"]}
    assert listed == {file.name for file in (DEPLOY / "gateway").glob("*.yaml")} - {"kustomization.yaml"}


def test_services_of_kserve_use_the_runtime():
    (runtime,), (service,) = manifests("ClusterServingRuntime"), manifests("InferenceService")
    model = service["spec"]["predictor"]["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]
    assert model["modelFormat"]["name"] in [
        model_format["name"] for model_format in runtime["spec"]["supportedModelFormats"]
    ]
    (container,) = runtime["spec"]["containers"]
    assert container["name"] == "kserve-container"
    assert runtime["spec"]["annotations"]["prometheus.kserve.io/port"] == str(container["ports"][0]["containerPort"])


def test_gateway_and_kserve_pods_start_servers_with_existing_flags():
    pods = parley_pods()
    assert len(pods) == 3
    for pod in pods:
        (container,) = pod["containers"]
        command, *flags = container["args"]
        assert command == "serve"
        values = {name: raw for name, (raw, _) in read_flags(SERVE_OPTIONS, flags).items()}
        assert values["host"] == "0.0.0.0" and int(values["port"]) == container["ports"][0]["containerPort"]
        probes = {name: member for name, member in container.items() if name.endswith("Probe")}
        assert {"livenessProbe", "readinessProbe"} <= probes.keys()
        assert {probe["httpGet"]["port"] for probe in probes.values()} <= {"http", int(values["port"])}
        drain = duration_kind().parse_raw(values["drain"])
        assert pod.get("terminationGracePeriodSeconds", 90) > drain + 5
