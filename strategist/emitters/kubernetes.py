"""Kubernetes: three manifests, one for each operator, that run the torchrun files, and a kustomization that brings them.

`kubectl apply -k` makes a ConfigMap of the files as they are then, so that an edited train.py is the one that runs.
Fields as in JobSet v1alpha2 and TrainJob v1alpha1 (kubeflow-trainer-api 2.3.0) and PyTorchJob v1 (kubeflow-training 1.9.4);
what the operators put into the environment as in kubeflow/trainer, pkg/runtime/framework/plugins/torch/torch.go, and
kubeflow/training-operator, pkg/controller.v1/pytorch/envvar.go.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any

from strategist.catalog import rows
from strategist.document.plan import Plan
from strategist.emitters.emitter import Emitter, Files, Options
from strategist.emitters.places import ranks_per_node, refuse_uneven_batch
from strategist.emitters.quoting import fitting_name
from strategist.emitters.serial import yaml_text
from strategist.emitters.torchrun import DEFAULT_PORT, EXECUTOR_AXES, layout_comment
from strategist.emitters.torchrun import write as write_torchrun
from strategist.errors import ImpossibleError, shown

FOLDER = "/job"
"""Where the ConfigMap is mounted."""
IMAGE = "strategist"
"""Stands for an image with torch and strategist: a plan names none."""
MAX_CONFIG_MAP_BYTES = 2**20
"""A ConfigMap holds no more (Kubernetes documentation, concepts/configuration/configmap)."""

_LABEL = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
_TOLD = 'NODE_RANK="${}" MASTER_ADDR="${}" MASTER_PORT={} exec bash {}/launch.sh "$@"'
_APPLY_COMMENT = "kubectl apply -k . Put trainjob.yaml or pytorchjob.yaml for jobset.yaml where that operator runs."
_IMAGE_COMMENT = f"image: {IMAGE} stands for yours, which needs bash, torch 2.13 and strategist."

Manifest = dict[str, Any]


def device_resource(plan: Plan) -> dict[str, str]:
    """What a node of the plan takes. Raises ImpossibleError UNSUPPORTED for uneven batches and devices that have no name there."""
    ranks, vendor = ranks_per_node(plan), plan.cluster.smallest.vendor
    refuse_uneven_batch(plan, "kubernetes")
    if plan.strategy.backend == "gloo":
        return {"cpu": str(ranks)}
    found = [row["resource"] for row in rows("kubernetes_resources") if row["vendor"] == vendor]
    if not found:
        raise ImpossibleError(
            "UNSUPPORTED",
            f"kubernetes cannot express this plan: no resource name is known for devices of {shown(vendor)}.",
            flag="--to",
            value="kubernetes",
            hint="Emit it to torchrun, and start launch.sh in pods of your own.",
        )
    return {found[0]: str(ranks)}


def mounts() -> list[Manifest]:
    """Where the job's files and the shared memory of its ranks are."""
    return [{"name": "job", "mountPath": FOLDER}, {"name": "shared-memory", "mountPath": "/dev/shm"}]


def volumes(name: str) -> list[Manifest]:
    """The ConfigMap, and memory that ranks of a node share: NCCL and data loaders need more than a pod's 64 MiB."""
    return [
        {"name": "job", "configMap": {"name": f"{name}-files"}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    ]


def kustomization(name: str, files: Files) -> Manifest:
    """One manifest, and the files as a ConfigMap. Raises ImpossibleError UNSUPPORTED when they do not fit into one."""
    size = sum(len(text.encode()) for text in files.values())
    if size > MAX_CONFIG_MAP_BYTES:
        raise ImpossibleError(
            "UNSUPPORTED",
            f"kubernetes cannot express this plan: its files take {size} bytes, and a ConfigMap holds {MAX_CONFIG_MAP_BYTES}.",
            flag="--to",
            value="kubernetes",
            hint="Plan without --pareto and --certificate, which fill plan.json.",
        )
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["jobset.yaml"],
        "configMapGenerator": [{"name": f"{name}-files", "files": sorted(map(str, files))}],
        "generatorOptions": {"disableNameSuffixHash": True},
    }


def pod(name: str, container: str, command: list[str], resource: dict[str, str], more: Manifest) -> Manifest:
    """One node of the job."""
    inside = {
        "name": container,
        "image": IMAGE,
        "command": command,
        **more,
        "resources": {"limits": resource},
        "volumeMounts": mounts(),
    }
    return {"containers": [inside], "volumes": volumes(name)}


def job_set(name: str, plan: Plan, port: int) -> Manifest:
    """A JobSet: one indexed Job whose pods are the nodes; each knows its number, and the first one by name."""
    nodes = plan.cluster.nodes
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    meeting = {
        "env": [
            {"name": "NODE_RANK", "valueFrom": index},
            {"name": "MASTER_ADDR", "value": f"{name}-node-0-0.{name}"},
            {"name": "MASTER_PORT", "value": str(port)},
        ],
        "ports": [{"containerPort": port, "protocol": "TCP"}],
    }
    # A node that fails is not started again: the ranks of the others would wait for it in vain.
    inside = {"restartPolicy": "Never"} | pod(
        name, "node", ["bash", f"{FOLDER}/launch.sh"], device_resource(plan), meeting
    )
    template = {"spec": inside}
    job = {"completionMode": "Indexed", "completions": nodes, "parallelism": nodes, "backoffLimit": 0}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": {**job, "template": template}}}]
        },
    }


def train_job(name: str, plan: Plan, port: int) -> Manifest:
    """A TrainJob on the runtime torch-distributed, whose container `node` gets the files by a patch."""
    start = _TOLD.format("PET_NODE_RANK", "PET_MASTER_ADDR", port, FOLDER)
    trainer = {
        "image": IMAGE,
        "command": ["bash", "-c", start, "launch.sh"],
        "numNodes": plan.cluster.nodes,
        "numProcPerNode": ranks_per_node(plan),
        "resourcesPerNode": {"limits": device_resource(plan)},
    }
    inside = {"volumes": volumes(name), "containers": [{"name": "node", "volumeMounts": mounts()}]}
    job = {"name": "node", "template": {"spec": {"template": {"spec": inside}}}}
    patch = {"template": {"spec": {"replicatedJobs": [job]}}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": name},
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": trainer,
            "runtimePatches": [{"manager": "strategist/emit", "trainingRuntimeSpec": patch}],
        },
    }


def pytorch_job(name: str, plan: Plan, port: int) -> Manifest:
    """A PyTorchJob of the former training operator, which calls the number of a node RANK."""
    start = _TOLD.format("RANK", "MASTER_ADDR", port, FOLDER)
    more = {"ports": [{"name": "pytorchjob-port", "containerPort": port, "protocol": "TCP"}]}
    template = pod(name, "pytorch", ["bash", "-c", start, "launch.sh"], device_resource(plan), more)
    counts = {"Master": 1, "Worker": plan.cluster.nodes - 1}
    replicas = {
        role: {"replicas": count, "restartPolicy": "Never", "template": {"spec": template}}
        for role, count in counts.items()
        if count
    }
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name},
        "spec": {"runPolicy": {"backoffLimit": 0, "cleanPodPolicy": "None"}, "pytorchReplicaSpecs": replicas},
    }


def write(plan: Plan, options: Options) -> Files:
    """The torchrun files, jobset.yaml, trainjob.yaml and pytorchjob.yaml, and kustomization.yaml, which applies one of them.

    Raises InputError NAME, ImpossibleError UNSUPPORTED.
    """
    words = "Kubernetes takes small letters, digits and dashes, 40 at most, from a letter on"
    name = fitting_name(options.job_name, _LABEL, words)
    port = options.master_port or DEFAULT_PORT
    files = dict(write_torchrun(plan, options))
    manifests = {
        "kustomization.yaml": (kustomization(name, files), _APPLY_COMMENT),
        "jobset.yaml": (job_set(name, plan, port), _IMAGE_COMMENT),
        "trainjob.yaml": (train_job(name, plan, port), _IMAGE_COMMENT),
        "pytorchjob.yaml": (pytorch_job(name, plan, port), _IMAGE_COMMENT),
    }
    layout = layout_comment(plan).removeprefix("# ")
    texts = {PurePosixPath(path): yaml_text(text, (layout, comment)) for path, (text, comment) in manifests.items()}
    return files | texts


KUBERNETES = Emitter(
    name="kubernetes",
    title="Kubernetes manifests for JobSet, Kubeflow Trainer or its training operator, with strategist's executor",
    engine="strategist",
    versions="JobSet v1alpha2, TrainJob v1alpha1 (Trainer 2.3), PyTorchJob v1 (training operator 1.9), torch 2.13",
    write=write,
    placed=device_resource,
    axes=EXECUTOR_AXES,
    executables=("launch.sh",),
)
