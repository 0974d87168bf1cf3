"""The overlays as `kubectl apply -k` would send them, checked without a cluster.

Core kinds and the Ray pods' templates against Kubernetes' own strict schemas, the RayService
against the few fields of its CRD that we use, and what one manifest says of another.
"""

import json
import shutil
import subprocess
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from deployments.commands.serve import RAY_SETTINGS
from deployments.config import OutriderConfig

ROOT = Path(__file__).parents[3]
OVERLAYS = sorted(path.name for path in (ROOT / "k8s" / "overlays").iterdir())
RAYSERVICE = json.loads((Path(__file__).parent / "rayservice.schema.json").read_text())
KUBERNETES = "1.32"  # the oldest version supported

pytestmark = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl, which renders the overlays, is not installed"
)
each_overlay = pytest.mark.parametrize("overlay", OVERLAYS)

Manifest = dict[str, Any]


@cache
def rendered(overlay: str) -> list[Manifest]:
    done = subprocess.run(
        ["kubectl", "kustomize", str(ROOT / "k8s" / "overlays" / overlay)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def only(overlay: str, kind: str) -> Manifest:
    [manifest] = [each for each in rendered(overlay) if each["kind"] == kind]
    return manifest


def pod_templates(overlay: str) -> list[Manifest]:
    """The head's, then the workers'."""
    cluster = only(overlay, "RayService")["spec"]["rayClusterConfig"]
    return [cluster["headGroupSpec"]["template"]] + [
        group["template"] for group in cluster["workerGroupSpecs"]
    ]


def serve_config(overlay: str) -> Manifest:
    return yaml.safe_load(only(overlay, "RayService")["spec"]["serveConfigV2"])


def check(manifest: Manifest) -> None:
    kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


@each_overlay
def test_core_kinds_fit_their_schemas(overlay: str) -> None:
    core = [each for each in rendered(overlay) if each["kind"] != "RayService"]

    assert {"Deployment", "Service", "PersistentVolumeClaim"} <= {each["kind"] for each in core}
    for manifest in core:
        check(manifest)


@each_overlay
def test_the_rayservice_fits_its_schema(overlay: str) -> None:
    jsonschema.validate(only(overlay, "RayService"), RAYSERVICE)


@each_overlay
def test_the_ray_pods_fit_their_schema(overlay: str) -> None:
    for template in pod_templates(overlay):
        meta = {"name": "checked"}
        check({"apiVersion": "v1", "kind": "PodTemplate", "metadata": meta, "template": template})


@each_overlay
def test_the_server_understands_its_arguments(overlay: str) -> None:
    [application] = serve_config(overlay)["applications"]

    assert set(application) == {"name", "import_path", "route_prefix", "args"}
    assert application["import_path"] == "deployments.app:build"
    config = OutriderConfig.model_validate(application["args"])
    assert len(config.pool) >= 4


@each_overlay
def test_every_ray_process_starts_with_the_settings_of_outrider_serve(overlay: str) -> None:
    settings = only(overlay, "ConfigMap")
    assert settings["data"] == RAY_SETTINGS
    for template in pod_templates(overlay):
        for container in template["spec"]["containers"]:
            source = {"configMapRef": {"name": settings["metadata"]["name"]}}
            assert source in container["envFrom"]


@each_overlay
def test_a_worker_has_the_cpus_and_gpus_that_a_verifier_reserves(overlay: str) -> None:
    from deployments.placement import bundles

    [application] = serve_config(overlay)["applications"]
    reserved = bundles(OutriderConfig.model_validate(application["args"]))
    limits = pod_templates(overlay)[1]["spec"]["containers"][0]["resources"]["limits"]

    # Half a CPU is left for the router and the ingress.
    assert sum(bundle["CPU"] for bundle in reserved) <= float(limits["cpu"]) - 0.5
    assert sum(bundle.get("GPU", 0) for bundle in reserved) == float(
        limits.get("nvidia.com/gpu", 0)
    )


def test_the_large_overlay_splits_its_target_over_all_its_gpus() -> None:
    [application] = serve_config("llama-70b")["applications"]
    config = OutriderConfig.model_validate(application["args"])
    worker = pod_templates("llama-70b")[1]["spec"]["containers"][0]

    assert config.target.device == "cuda"
    assert str(config.target.tensor_parallel) == worker["resources"]["limits"]["nvidia.com/gpu"]


@each_overlay
def test_serve_knows_every_key(overlay: str) -> None:
    """Serve ignores keys that it does not know, so they are compared with its schema here."""
    from ray.serve.schema import ServeDeploySchema

    config = serve_config(overlay)
    read = ServeDeploySchema.model_validate(config).model_dump(exclude_unset=True)

    assert read.keys() == config.keys()
    assert read["http_options"] == config["http_options"]


@each_overlay
def test_versions_agree(overlay: str) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    ray = only(overlay, "RayService")["spec"]["rayClusterConfig"]["rayVersion"]

    assert f"ray=={ray}\n" in (ROOT / "requirements.lock").read_text()
    assert f"rayproject/ray:{ray}-" in (ROOT / "k8s" / "Dockerfile").read_text()
    for template in pod_templates(overlay):
        image = template["spec"]["containers"][0]["image"]
        assert image.endswith(f"outrider:{version}")


@each_overlay
def test_redis_is_found_where_the_pods_look(overlay: str) -> None:
    service, deployment = only(overlay, "Service"), only(overlay, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    address = f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    options = only(overlay, "RayService")["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]

    assert service["spec"]["selector"].items() <= labels.items()
    assert options["redisAddress"] == address
    for template in pod_templates(overlay):
        [container] = template["spec"]["containers"]
        environment = {entry["name"]: entry for entry in container["env"]}
        assert f"@{address}/" in environment["OUTRIDER_REDIS_URL"]["value"]
        # A variable is expanded only in those that stand after it.
        names = list(environment)
        assert names.index("OUTRIDER_REDIS_PASSWORD") < names.index("OUTRIDER_REDIS_URL")


@each_overlay
def test_everything_lies_in_one_namespace_and_volumes_exist(overlay: str) -> None:
    namespaced = [each for each in rendered(overlay) if each["kind"] != "Namespace"]
    claims = {
        each["metadata"]["name"] for each in namespaced if each["kind"] == "PersistentVolumeClaim"
    }
    templates = [*pod_templates(overlay), only(overlay, "Deployment")["spec"]["template"]]
    claimed = {
        volume["persistentVolumeClaim"]["claimName"]
        for template in templates
        for volume in template["spec"].get("volumes", [])
        if "persistentVolumeClaim" in volume
    }

    assert {each["metadata"]["namespace"] for each in namespaced} == {"outrider"}
    assert claimed == claims


def test_the_checks_catch_a_field_that_does_not_exist() -> None:
    service = json.loads(json.dumps(only("local", "RayService")))
    service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["replica"] = 2
    with pytest.raises(jsonschema.ValidationError, match="'replica' was unexpected"):
        jsonschema.validate(service, RAYSERVICE)

    deployment = json.loads(json.dumps(only("local", "Deployment")))
    deployment["spec"]["template"]["spec"]["containers"][0]["imagePolicy"] = "Always"
    with pytest.raises(kubernetes_validate.ValidationError):
        check(deployment)
