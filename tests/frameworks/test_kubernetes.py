"""The operators' own models and Kubernetes' own schemas take every manifest, and each of its keys is one of theirs."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubeflow.training.api_client import ApiClient
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob

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
    """The pods of a manifest as documents of their own; a TrainJob has none, its runtime has."""
    spec = document["spec"]
    if "pytorchReplicaSpecs" in spec:
        specs = [role["template"]["spec"] for role in spec["pytorchReplicaSpecs"].values()]
    else:
        specs = [job["template"]["spec"]["template"]["spec"] for job in spec.get("replicatedJobs", ())]
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
@pytest.mark.parametrize("name", READ)
def test_pods_are_those_of_kubernetes(target: str, name: str) -> None:
    """Kubernetes' strict schemas take every pod, and the Job of a JobSet."""
    for text, _ in distinct(target, name):
        document = yaml.safe_load(text)
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
