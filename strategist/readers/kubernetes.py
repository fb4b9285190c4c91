"""Kubernetes manifests of training jobs: JobSet, TrainJob and PyTorchJob, and the kustomization that brings them.

Keys as in JobSet v1alpha2 and TrainJob v1alpha1 (kubeflow-trainer-api 2.3.0), PyTorchJob v1 (kubeflow-training 1.9.4) and
kustomize 04e51ad. What the operators refuse as in kubeflow/training-operator 06f6008.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from strategist.catalog import rows
from strategist.document.judgement import Finding
from strategist.readers.foreign import Foreign, Reader, Source, Tables, finding, section_of, tables_at, told, whole
from strategist.readers.script import Script, script_faults, unequal
from strategist.readers.shell import split
from strategist.records import dataclass

Table = Mapping[str, Any]
FATE = "kubectl refuses the file, where other clients drop the key"
JOB = "spec.replicatedJobs.*"
ROLES = "spec.pytorchReplicaSpecs"
PATCH = "spec.runtimePatches.*"


def _tables(framework: str, title: str, *places: str) -> Tables:
    return Tables(framework=framework, title=title, swallows=dict.fromkeys(("", *places), FATE))


POD = _tables(
    "pod", "A pod", "containers.*", "initContainers.*", "containers.*.resources", "containers.*.env.*",
    "containers.*.ports.*", "containers.*.volumeMounts.*", "volumes.*",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of manifest: its keys, where its pods stand, its nodes, and the faults of its own.

    processes: the place where it says the ranks of a node, if it has one. names_nodes: whether its operator tells torchrun how many nodes there are.
    """

    tables: Tables
    pods: str
    nodes: Callable[[Table], int | None]
    processes: str
    faults: Callable[[Table], Iterator[Finding]]
    names_nodes: bool


def read(source: Source, ranks: int | None) -> Foreign:
    """What a manifest says, and its faults."""
    table, kind = source.table, KINDS[str(source.table.get("kind"))]
    nodes, devices, each = kind.nodes(table), devices_of(table, kind), whole(value_at(table, kind.processes))
    count = each or devices
    world = nodes * count if nodes and count else None
    found = [*kind.tables.unknown(table), *kind.faults(table)]
    for pod in tables_at(table, kind.pods):
        found += [*POD.unknown(pod), *_requests(pod)]
    for script in map(script_of_container, _starters(table, kind)):
        found += [*script_faults(script), *unequal(script, nodes, devices, names_nodes=kind.names_nodes)]
    if each and devices and each != devices:
        name = kind.processes.rpartition(".")[2]
        found.append(finding("devices-differ", name, devices=devices, ranks=each, name=name))
    return Foreign(says=told(nodes=nodes, ranks=world), findings=tuple(found))


def value_at(table: Table, place: str) -> Any:
    """What stands at a place, or None."""
    section, _, name = place.rpartition(".")
    return next((inner.get(name) for inner in tables_at(table, section)), None)


def devices_of(table: Table, kind: Kind) -> int | None:
    """GPUs of each node, from the limits of the container that has them."""
    names = {row["resource"] for row in rows("kubernetes_resources")}
    limits = (section_of(section, "limits") for section in _resources(table, kind))
    return next((whole(limit[name]) for limit in limits for name in limit if name in names), None)


def _resources(table: Table, kind: Kind) -> Iterator[Table]:
    """Sections of resources: of the trainer, and of each container."""
    yield from tables_at(table, "spec.trainer.resourcesPerNode")
    yield from tables_at(table, f"{kind.pods}.containers.*.resources")


def _starters(table: Table, kind: Kind) -> Iterator[Table]:
    """What has a command: the trainer, and each container."""
    yield from tables_at(table, "spec.trainer")
    yield from tables_at(table, f"{kind.pods}.containers.*")


def script_of_container(container: Table) -> Script:
    """Words of a container's command, those inside a text for a shell too, and its variables."""
    words: list[str] = []
    variables = {
        str(entry.get("name")): None if "valueFrom" in entry else str(entry.get("value", ""))
        for entry in tables_at(container, "env.*")
    }
    for part in ("command", "args"):
        said = container.get(part)
        for word in said if isinstance(said, list) else ():
            words += _split(_with_values(str(word), variables))
    return Script(words=tuple(words), variables=variables, directives={})


_REFERENCE = re.compile(r"(?<!\$)\$\(([A-Za-z_][A-Za-z0-9_]*)\)")


def _with_values(word: str, variables: Mapping[str, str | None]) -> str:
    """A word of a command with the container's own variables put in for $(NAME), as Kubernetes does before a shell reads it; what it does
    not know, and $$(NAME), stays (kubernetes/kubernetes 02604f7, third_party/forked/golang/expansion/expand.go)."""

    def value(match: re.Match[str]) -> str:
        known = variables.get(match[1])
        return match[0] if known is None else known

    return _REFERENCE.sub(value, word)


def _commands(source: Source) -> str:
    """The command of the first container, or of the trainer, that has one, behind its variables."""
    scripts = map(script_of_container, _starters(source.table, KINDS[str(source.table.get("kind"))]))
    first = next((script for script in scripts if script.words), None)
    if first is None:
        return ""
    variables = (f"{name}={shlex.quote(value)}" for name, value in first.variables.items() if value is not None)
    return "\n".join((*variables, shlex.join(first.words)))


def _split(word: str) -> list[str]:
    """The words of a text for a shell; one whose quotes do not close stays whole."""
    try:
        return split(word)
    except ValueError:
        return [word]


def _requests(pod: Table) -> Iterator[Finding]:
    """Devices that are requested otherwise than they are limited."""
    names = {row["resource"] for row in rows("kubernetes_resources")}
    for section in tables_at(pod, "containers.*.resources"):
        requests, limits = section_of(section, "requests"), section_of(section, "limits")
        for name in sorted(names & set(requests)):
            if whole(requests[name]) != whole(limits.get(name)):
                words = {"requests": str(requests[name]), "limits": str(limits.get(name, 0)), "resource": name}
                yield finding("device-requests", f"requests.{name}", **words)


def _no_faults(table: Table) -> Iterator[Finding]:
    yield from ()


def _nodes_of_job_set(table: Table) -> int | None:
    """Pods of the one job that there is; of several jobs it is not known which ones hold ranks."""
    jobs = list(tables_at(table, JOB))
    if len(jobs) != 1:
        return None
    spec = section_of(section_of(jobs[0], "template"), "spec")
    return (whole(jobs[0].get("replicas")) or 1) * (whole(spec.get("parallelism")) or 1)


def _job_set_faults(table: Table) -> Iterator[Finding]:
    """Pods that wait for each other and do not run at once, and pods that may not be started again."""
    for spec in tables_at(table, f"{JOB}.template.spec"):
        completions, parallelism = whole(spec.get("completions")), whole(spec.get("parallelism", 1))
        if completions and parallelism and parallelism < completions:
            yield finding("pods-not-at-once", "parallelism", completions=completions, parallelism=parallelism)
        pod = section_of(section_of(spec, "template"), "spec")
        if pod.get("restartPolicy") == "Always":
            yield finding("restarted-pods", "restartPolicy")


def _nodes_of_roles(table: Table) -> int | None:
    """Replicas of all roles; one that says no number has one."""
    roles = list(tables_at(table, f"{ROLES}.*"))
    return sum(whole(role.get("replicas", 1)) or 0 for role in roles) or None


def _role_faults(table: Table) -> Iterator[Finding]:
    """What the training operator refuses: another container than its own, and several masters."""
    for name, role in section_of(section_of(table, "spec"), "pytorchReplicaSpecs").items():
        if not isinstance(role, dict):
            continue
        if name == "Master" and role.get("replicas", 1) != 1:
            yield finding("pytorchjob-master", "Master.replicas", replicas=str(role["replicas"]))
        containers = list(tables_at(role, "template.spec.containers.*"))
        if containers and all(container.get("name") != "pytorch" for container in containers):
            yield finding("pytorchjob-container", f"{name}.containers", role=name)


KINDS: Mapping[str, Kind] = {
    "JobSet": Kind(
        tables=_tables(
            "jobset", "A JobSet", "spec", JOB, f"{JOB}.template.spec", "spec.failurePolicy", "spec.network",
            "spec.successPolicy", "spec.startupPolicy", "spec.coordinator",
        ),
        pods=f"{JOB}.template.spec.template.spec",
        nodes=_nodes_of_job_set,
        processes="",
        faults=_job_set_faults,
        names_nodes=False,
    ),
    "TrainJob": Kind(
        tables=_tables(
            "trainjob", "A TrainJob", "spec", "spec.trainer", "spec.runtimeRef", "spec.initializer", PATCH,
            "spec.trainer.resourcesPerNode", "spec.trainer.env.*",
        ),
        pods=f"{PATCH}.trainingRuntimeSpec.template.{JOB}.template.spec.template.spec",
        nodes=lambda table: whole(value_at(table, "spec.trainer.numNodes")),
        processes="spec.trainer.numProcPerNode",
        faults=_no_faults,
        names_nodes=True,
    ),
    "PyTorchJob": Kind(
        tables=_tables(
            "pytorchjob", "A PyTorchJob", "spec", ROLES, f"{ROLES}.*", "spec.runPolicy", "spec.elasticPolicy",
        ),
        pods=f"{ROLES}.*.template.spec",
        nodes=_nodes_of_roles,
        processes="spec.nprocPerNode",
        faults=_role_faults,
        names_nodes=True,
    ),
    "Kustomization": Kind(
        tables=Tables(framework="kustomization", title="A Kustomization", swallows={"": "kustomize refuses it"}),
        pods="none",
        nodes=lambda table: None,
        processes="",
        faults=_no_faults,
        names_nodes=False,
    ),
}  # fmt: skip
"""Kinds of manifests, by their names."""


def recognises(source: Source) -> bool:
    """A manifest of one of these kinds."""
    return "apiVersion" in source.table and str(source.table.get("kind")) in KINDS


KUBERNETES = Reader(
    name="kubernetes",
    title="Kubernetes jobs",
    recognises=recognises,
    read=read,
    profile="strategist",
    commands=_commands,
)
