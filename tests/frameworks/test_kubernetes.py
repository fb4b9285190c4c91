"""The operators' own models and Kubernetes' own schemas take every manifest, and each of its keys is one of theirs."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubeflow.training import models as training
from kubeflow.training.api_client import ApiClient
from kubeflow_trainer_api import models as trainer
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob

from strategist.readers.foreign import keys_of
from tests.emitters.grid import distinct

VERSION = "1.30"
"""Of Kubernetes, whose strict schemas have every key of a pod."""


def pytorch_job(document: Any) -> Any:
    """What the training operator's client reads from a PyTorchJob and would send."""
    client = ApiClient()
    read = client.deserialize(SimpleNamespace(data=json.dumps(document)), "KubeflowOrgV1PyTorchJob")
    return client.sanitize_for_serialization(read)


def job_set(document: Any) -> Any:
    """What the model of a JobSet keeps of a document."""
    return JobsetV1alpha2JobSet.from_dict(document).to_dict()  # type: ignore[union-attr]


def train_job(document: Any) -> Any:
    """What the model of a TrainJob keeps of a document."""
    return TrainerV1alpha1TrainJob.from_dict(document).to_dict()  # type: ignore[union-attr]


READ: dict[str, Callable[[Any], Any]] = {
    "jobset.yaml": job_set,
    "trainjob.yaml": train_job,
    "pytorchjob.yaml": pytorch_job,
}


def pods(document: Any) -> list[Any]:
    """The pods of a JobSet or a PyTorchJob as documents of their own."""
    spec = document["spec"]
    if "pytorchReplicaSpecs" in spec:
        specs = [role["template"]["spec"] for role in spec["pytorchReplicaSpecs"].values()]
    else:
        specs = [job["template"]["spec"]["template"]["spec"] for job in spec["replicatedJobs"]]
    return [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "node"}, "spec": pod} for pod in specs]


@pytest.mark.proves("parsed")
@pytest.mark.parametrize("target", ["kubernetes"])
@pytest.mark.parametrize("name", READ)
def test_models_keep_every_key(target: str, name: str) -> None:
    """A manifest is the same after its operator's model has read it, so that it has no key that is not known."""
    texts = distinct(target, name)
    assert texts
    for text, _ in texts:
        document = yaml.safe_load(text)
        assert READ[name](document) == document


@pytest.mark.proves("parsed")
@pytest.mark.parametrize("target", ["kubernetes"])
@pytest.mark.parametrize("name", ["jobset.yaml", "pytorchjob.yaml"])
def test_pods_are_those_of_kubernetes(target: str, name: str) -> None:
    """Kubernetes' strict schemas take every pod, and the Job of a JobSet."""
    for text, _ in distinct(target, name):
        document = yaml.safe_load(text)
        assert pods(document)
        for pod in pods(document):
            kubernetes_validate.validate(pod, VERSION, strict=True)
        for job in document["spec"].get("replicatedJobs", ()):
            whole = {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "metadata": {"name": "x"},
                "spec": job["template"]["spec"],
            }
            kubernetes_validate.validate(whole, VERSION, strict=True)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("jobset.yaml", {"replicatedJob": []}),
        ("trainjob.yaml", {"trainers": {}}),
        ("pytorchjob.yaml", {"runPolicies": {}}),
    ],
)
def test_a_misspelt_key_would_be_seen(name: str, wrong: Any) -> None:
    """The models drop a key that they do not know, which is what the comparison above finds."""
    document = yaml.safe_load(distinct("kubernetes", name)[0][0])
    document["spec"] |= wrong
    assert READ[name](document) != document


def test_a_misspelt_key_of_a_pod_would_be_seen() -> None:
    """Kubernetes' strict schema refuses a pod with a key of nobody's."""
    (pod,) = pods(yaml.safe_load(distinct("kubernetes", "jobset.yaml")[0][0]))
    pod["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(pod, VERSION, strict=True)


TYPES = {
    "jobset": {
        "": "JobsetV1alpha2JobSet", "spec": "JobsetV1alpha2JobSetSpec", "spec.replicatedJobs.*": "JobsetV1alpha2ReplicatedJob",
        "spec.replicatedJobs.*.template.spec": "IoK8sApiBatchV1JobSpec", "spec.failurePolicy": "JobsetV1alpha2FailurePolicy",
        "spec.network": "JobsetV1alpha2Network", "spec.successPolicy": "JobsetV1alpha2SuccessPolicy",
        "spec.startupPolicy": "JobsetV1alpha2StartupPolicy", "spec.coordinator": "JobsetV1alpha2Coordinator",
    },
    "trainjob": {
        "": "TrainerV1alpha1TrainJob", "spec": "TrainerV1alpha1TrainJobSpec", "spec.trainer": "TrainerV1alpha1Trainer",
        "spec.runtimeRef": "TrainerV1alpha1RuntimeRef", "spec.initializer": "TrainerV1alpha1Initializer",
        "spec.runtimePatches.*": "TrainerV1alpha1RuntimePatch", "spec.trainer.env.*": "IoK8sApiCoreV1EnvVar",
        "spec.trainer.resourcesPerNode": "IoK8sApiCoreV1ResourceRequirements",
    },
    "pod": {
        "": "IoK8sApiCoreV1PodSpec", "containers.*": "IoK8sApiCoreV1Container", "initContainers.*": "IoK8sApiCoreV1Container",
        "containers.*.resources": "IoK8sApiCoreV1ResourceRequirements", "containers.*.env.*": "IoK8sApiCoreV1EnvVar",
        "containers.*.ports.*": "IoK8sApiCoreV1ContainerPort", "containers.*.volumeMounts.*": "IoK8sApiCoreV1VolumeMount",
        "volumes.*": "IoK8sApiCoreV1Volume",
    },
    "pytorchjob": {
        "": "KubeflowOrgV1PyTorchJob", "spec": "KubeflowOrgV1PyTorchJobSpec",
        "spec.pytorchReplicaSpecs.*": "KubeflowOrgV1ReplicaSpec", "spec.runPolicy": "KubeflowOrgV1RunPolicy",
        "spec.elasticPolicy": "KubeflowOrgV1ElasticPolicy",
    },
}  # fmt: skip
"""The operators' models of the places whose keys our reader knows."""


@pytest.mark.parametrize(("kind", "place"), [(kind, place) for kind, places in TYPES.items() for place in places])
def test_our_table_is_the_model(kind: str, place: str) -> None:
    """The keys that we know at a place of a manifest are those of the operator's model."""
    name = TYPES[kind][place]
    if kind == "pytorchjob":
        own = set(getattr(training, name).attribute_map.values())
    else:
        own = {field.alias or key for key, field in getattr(trainer, name).model_fields.items()}
    assert set(keys_of(kind, place)) == own
