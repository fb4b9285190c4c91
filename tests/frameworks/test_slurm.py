"""A real Slurm of two pretended nodes runs the emitted job, and refuses one that its nodes cannot hold."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from strategist.document.plan import Plan
from strategist.emitters.emitter import Options
from strategist.judging import judge
from strategist.readers.foreign import keys_of
from tests.emitters.grid import COMMON, plan_on
from tests.frameworks.jobs import WORDS, job_environment, printed_losses, write_job
from tests.frameworks.pretend_slurm import GPUS, NODES, PretendCluster, pretend_cluster
from tests.plans import FLOAT32


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PretendCluster]:
    """Two nodes of eight devices."""
    with pretend_cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


def submitted(cluster: PretendCluster, job: Path, *options: str, words: tuple[str, ...] = ()) -> tuple[int, str]:
    """What sbatch says to an emitted job, and its exit code."""
    command = ["sbatch", *options, "job.sbatch", *words]
    env = cluster.environment(job_environment())
    done = subprocess.run(command, cwd=job, env=env, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.proves("trained")
@pytest.mark.parametrize("target", ["slurm"])
def test_losses_are_those_of_one_rank(
    target: str, cluster: PretendCluster, losses_of_one_rank: list[float], tmp_path: Path
) -> None:
    """The batch job starts torchrun on both nodes, whose ranks print what one rank prints."""
    plan = plan_on(NODES, 1, micro_batch=1, accumulation=2, backend="gloo", formats=FLOAT32)
    job = write_job(tmp_path, target, plan, Options(master_addr="127.0.0.1"))  # its nodes have no names
    code, said = submitted(cluster, job, "--wait", words=WORDS)
    (output,) = job.glob("strategist-*.out")
    text = output.read_text(encoding="utf-8")
    assert code == 0, said + text
    assert printed_losses(text) == pytest.approx(losses_of_one_rank, rel=1e-4)


@pytest.mark.proves("parsed")
@pytest.mark.parametrize("target", ["slurm"])
@pytest.mark.parametrize(
    ("plan", "code"),
    [
        (plan_on(NODES, GPUS, **COMMON), 0),
        (plan_on(NODES, GPUS + 1, **COMMON), 1),
        (plan_on(NODES + 1, GPUS, **COMMON), 1),
    ],
    ids=["fits", "too many devices", "too many nodes"],
)
def test_slurm_judges_what_a_job_asks_for(
    target: str, plan: Plan, code: int, cluster: PretendCluster, tmp_path: Path
) -> None:
    """A job for the cluster's nodes is taken; one device or one node more is refused."""
    job = write_job(tmp_path, target, plan)
    assert submitted(cluster, job, "--test-only")[0] == code


@pytest.mark.parametrize(
    ("option", "rule"),
    [("--ntasks-per-nod=1", "sbatch-beginning"), ("--gpu-per-node=1", "unknown-key"), ("-y 1", "foreign-arguments")],
    ids=str,
)
def test_misspelt_options_are_ours(option: str, rule: str, cluster: PretendCluster, tmp_path: Path) -> None:
    """sbatch takes the beginning of an option for the whole and refuses other words, and our reader says which is which."""
    job = write_job(tmp_path, "slurm", plan_on(1, 1, **COMMON))
    script = (
        (job / "job.sbatch")
        .read_text(encoding="utf-8")
        .replace("#SBATCH --nodes", f"#SBATCH {option}\n#SBATCH --nodes")
    )
    (job / "job.sbatch").write_text(script, encoding="utf-8")
    assert (submitted(cluster, job, "--test-only")[0] == 0) == (rule == "sbatch-beginning")
    (fault,) = judge(str(job / "job.sbatch")).findings
    assert fault.rule == rule


def test_every_option_of_sbatch_is_known(cluster: PretendCluster) -> None:
    """Each long option that the installed sbatch names in its help is in our table."""
    done = subprocess.run(
        ["sbatch", "--help"], env=cluster.environment(job_environment()), capture_output=True, text=True, check=True
    )
    named = set(re.findall(r"(--[a-z][a-z-]+)", done.stdout))
    assert len(named) > 80
    assert named <= set(keys_of("sbatch"))
