"""BytePS, which nobody maintains: DMLC_* variables around its bpslaunch, with a server on every node, and a training script.

Replicas are its workers, whose gradients servers average. Names as in BytePS at commit f5df52f (2022-02-09),
launcher/launch.py, its page env.md and byteps/torch/__init__.py; how many servers: its page best-practice.md.
"""

from __future__ import annotations

from strategist.document.plan import Plan
from strategist.emitters.coverage import DATA_PARALLEL, FLOAT32, Coverage, causal_models
from strategist.emitters.emitter import Emitter, Files, Options
from strategist.emitters.hugging_face_script import OPTIMIZER, script
from strategist.emitters.places import ranks_per_node
from strategist.emitters.torchrun import Launcher, job_files
from strategist.records import replace

UNMAINTAINED = "unmaintained since 2022-02-09; use torchrun, whose DDP averages the same gradients"

COVERAGE = Coverage(
    framework="BytePS 0.2.5",
    values={
        **DATA_PARALLEL,
        "mesh.dp_shard": (1,),
        "strategy.formats": (FLOAT32, replace(FLOAT32, compute="bfloat16")),
        "strategy.backend": ("nccl",),
        "workload.precision": ("fp32", "bf16"),
    },
    why={
        "mesh.dp_shard": "Its workers keep everything.",
        "mesh.tp": "It is data parallelism alone.",
        "mesh.pp": "It is data parallelism alone.",
        "mesh.cp": "It is data parallelism alone.",
        "mesh.ep": "It is data parallelism alone.",
        "strategy.zero": "Its workers keep everything.",
        "strategy.recompute": "Transformers recomputes whole layers.",
        "strategy.offload": "It keeps everything on the device.",
        "strategy.compile": "The script does not compile.",
        "strategy.formats": "The script keeps weights and gradients in fp32, and scales no losses.",
        "strategy.backend": "Its workers are GPUs.",
        "workload.precision": "It has neither fp8 nor fp4.",
    },
    clashes=(causal_models("BytePS"),),
    hint="Emit it to torchrun, which is maintained.",
)

TRAIN = script(
    f"BytePS ({UNMAINTAINED})",
    "import byteps.torch as bps\n"
    "from torch.utils.data import DataLoader, Dataset, DistributedSampler\n"
    "from transformers import AutoConfig, AutoModelForCausalLM\n",
    OPTIMIZER
    + """

def main():
    bps.init()
    torch.cuda.set_device(bps.local_rank())
    model = make_model().cuda()
    optimizer = bps.DistributedOptimizer(
        make_optimizer(model.parameters()),
        named_parameters=model.named_parameters(),
        backward_passes_per_step=strategy["accumulation"],
    )
    bps.broadcast_parameters(model.state_dict(), root_rank=0)
    data = SyntheticTokens(model.config.vocab_size)
    sampler = DistributedSampler(data, bps.size(), bps.rank(), shuffle=False)
    batches = iter(DataLoader(data, batch_size=strategy["micro_batch"], sampler=sampler))
    compute = getattr(torch, formats["compute"])
    for number in range(options.steps):
        losses = []
        for _ in range(strategy["accumulation"]):
            batch = {name: tensor.cuda() for name, tensor in next(batches).items()}
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=compute != torch.float32):
                loss = model(**batch).loss
            (loss / strategy["accumulation"]).backward()
            losses.append(loss.detach().float())
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
        mean = bps.push_pull(torch.stack(losses).mean(), average=True, name="loss")
        if bps.rank() == 0:
            print(f"step {number}  loss {mean.item():.6f}", flush=True)
    bps.shutdown()


main()
""",
)


_QUOTED = """quote="'\\\\''"
here="'${here//\\'/"$quote"}'"
words=(); for word in "$@"; do words+=("'${word//\\'/"$quote"}'"); done
set -- "${words[@]}"
"""
"""The folder and the words in single quotes, which every shell reads alike; bash's own quoting is not for every shell."""


def byteps_launcher(plan: Plan) -> Launcher:
    """bpslaunch, with a server on every node and the scheduler on the first; one node needs neither.

    bpslaunch joins its words with blanks and gives them to a shell, so each is quoted once more.
    """
    nodes, ranks = plan.cluster.nodes, ranks_per_node(plan)
    devices = ",".join(map(str, range(ranks)))
    worker = f"env DMLC_ROLE=worker NVIDIA_VISIBLE_DEVICES={devices}"
    counts = f"export DMLC_NUM_WORKER={nodes} DMLC_NUM_SERVER={nodes}\n"
    return Launcher(
        one_node=f"{worker} DMLC_WORKER_ID=0 DMLC_PS_ROOT_URI=127.0.0.1 DMLC_PS_ROOT_PORT=1234 bpslaunch python3",
        many_nodes=f'{worker} DMLC_WORKER_ID="$node" bpslaunch python3',
        settings=f"# BytePS is {UNMAINTAINED}.\n{counts}{_QUOTED}",
        companions='export DMLC_PS_ROOT_URI="$address" DMLC_PS_ROOT_PORT="$port"\n'
        'if [[ "$node" == 0 ]]; then DMLC_ROLE=scheduler bpslaunch & fi\n'
        "DMLC_ROLE=server bpslaunch &\n",
    )


def write(plan: Plan, options: Options) -> Files:
    """plan.json, train.py and launch.sh."""
    return job_files(plan, options, TRAIN, byteps_launcher(plan))


BYTEPS = Emitter(
    name="byteps",
    title=f"BytePS, a Hugging Face model ({UNMAINTAINED})",
    engine="byteps",
    versions="BytePS f5df52f of 2022-02-09",
    write=write,
    axes=COVERAGE.axes,
    coverage=COVERAGE,
    executables=("launch.sh",),
)
