"""What differs between frameworks that run the same layout: number formats, buffers, kernels. One data row each."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

from strategist.catalog import rows
from strategist.errors import ImpossibleError, require_known
from strategist.facts.act_forms import ActForm, find_act_form
from strategist.facts.hardware import Basis
from strategist.facts.keeping import Keeping, find_keeping
from strategist.facts.model import ModelShape
from strategist.records import dataclass, replace

OF_EIGHT_BITS = ("adamw8bit",)
"""Optimizers whose moments have a format of their own."""

ENGINE, AUTOCAST = "deepspeed", "deepspeed-autocast"
"""The profiles of DeepSpeed's ZeRO: low weights beside fp32 masters, and fp32 weights under torch.autocast."""
ZERO_3 = "deepspeed-zero3"
"""The profile of DeepSpeed's ZeRO-3 on modules of torch."""
COPIES = "deepspeed-autocast-copies"
"""The profile of its ZeRO-1 and 2 where weights rest in fp32."""
_ON_MODULES = {ENGINE: ZERO_3, AUTOCAST: "deepspeed-zero3-autocast"}

BYTES = {"float64": 8.0, "float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "float8": 1.0}
"""Bytes of one number by format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """Formats of numbers at rest (parameter, gradient, master), on the wire (reduce) and in matmuls (compute)."""

    parameter: str
    gradient: str
    reduce: str
    compute: str
    master: str


Adapts = Literal["joint", "compiled", "apart", "widened"]
"""One product that scales and adds; a kernel for both behind it; operations of torch, dropout among them; the same in float32 where weights are not quantised."""
Unpacks = Literal["nf4", "gptq"]
"""bitsandbytes' kernel, in either pass; AutoGPTQ's operations of torch, whose result backward reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """How memory-bound work is cut into kernels. Counts are elements that forward reads and writes per element of the
    tensor in question: a norm's input, a residual sum, rotated queries and keys, a gated or plain activation, what
    dropout sees (hidden states, twice per layer). `logit_bytes` are moved by the loss per token and vocabulary entry,
    both passes, `score_forward_bytes` and `score_backward_bytes` by unfused attention per score, `cast_bytes` by turning one input of a matrix to fp8, and its transpose. `forward` and `backward` count launches per layer, with `moe_` those of routing and
    permutation on top, with `expert_` those of each local expert; `host_s` is the CPU's
    time for one of them, `unit_s` that for each gather or reduction of a unit of weights (0 where nobody measured it; with `hooks_again` once more for a layer
    that full recompute runs again), and with `catches_up` a CPU that falls behind gets ahead again while head and loss run (others' times were set with runs, layer by
    layer: docs/decisions/0159). `adapts` says how an adapter's result is scaled and added, `modules` under which name the
    table of modules has what other sorts of models move (`of_modules`), nothing where all are alike, `unpacks` whose weights of four bits are brought back to the compute format."""

    name: str
    norm: float
    residual: float
    rotary: float
    gated: float
    plain: float
    dropout: float
    logit_bytes: float
    cast_bytes: float
    score_forward_bytes: float
    score_backward_bytes: float
    forward: int
    backward: int
    moe_forward: int
    moe_backward: int
    expert_forward: int
    expert_backward: int
    host_s: float
    unit_s: float
    hooks_again: bool
    catches_up: bool
    adapts: Adapts
    modules: str
    source: str
    unpacks: Unpacks = "nf4"


Attention = Literal["flash1", "flash", "flash2", "cudnn", "sdpa", "unfused"]
"""`sdpa` is what torch of today chooses, `flash` what it chose before it preferred cuDNN on Hopper, `flash2` FlashAttention-2 by its own name."""
Hides = Literal["gradients", "weights", "updates", "tensor", "pipeline", "experts"]
Light = Literal["elementwise", "attention", "alternate", "half-blocks"]
Sends = Literal["whole", "shards", "turns"]
Updates = Literal["whole", "tensors", "ranks"]
UpdateKernels = Literal["one", "stages", "operations", "partitions"]
Segments = Literal["fixed", "expandable"]
AddsTerms = Literal["unit", "step"]


_STORED_AS = {"fp4": "fp8", "tf32": "fp32"}
"""Precisions whose tensors are those of another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One framework's habits. `has_units` says that weights lie in units of fully_shard or replicate below ZeRO-2 too, and
    that pipelines hold a receive buffer per micro-batch, not per message; `hides` says which
    traffic runs behind compute (gradients and weights of data parallelism, weights updated under ZeRO-1, collectives of cut products, sends of
    interleaved stages, tokens of one micro-batch for their experts behind the opposite pass over another); `replicas_wait` that replicas average gradients after the last micro-batch, not after each; `accumulates_whole` that sharded gradients are whole
    until then, in the compute format and of frozen weights too (FSDP under no_sync); `light` what selective recompute runs again (`alternate`: memory-bound
    kernels and every second matrix, `half-blocks`: every second layer whole); `sends` whether pipeline stages exchange whole hidden states or a tp-th of them, or `turns`: a tp-th, one message after the other; `updates` whether ZeRO-1 gathers new weights whole, or
    broadcasts them tensor by tensor or rank by rank; `adds_terms` whether gradients of weights that ranks of tp hold whole are added up
    weight by weight, with their unit where there are units, or all in one message a step;
    `merges_copies` that copies of a token for experts of one rank travel once, and between nodes those for one node; `dispatches_fp8` that tokens and gradients
    of what experts gave travel to the experts in fp8, as a run says; `casts_fp8` that matrices run in fp8 where
    asked, `gathers_fp8` that what cut matrices read is cast before it is gathered, `casts_apart` that each matrix casts in
    kernels of their own, forward and backward; `gradient_passes` times the update moves gradients beside its own reading (their norm, and their limit where that is no part of the update's kernel),
    `update_kernels` how AdamW's update is cut into kernels: `one` reads and writes everything once, LAMB's two `stages` have norms of weights and of their changes
    between them, `operations` of torch are single ones (neither fused nor compiled), DeepSpeed's `partitions` copy gradients and weights before and after one; `pads_vocabulary` that the head is made a multiple of 64 numbers wide, `update_copies` of the trained weights are held while it runs, `accumulate_bytes` are moved per weight and
    micro-batch to add up gradients; `keeping` says what is kept in memory, `fp16_state_bytes` more per weight
    belong to the state under fp16; `unties` that embedding and head are two weights where the model ties them; `segments` of the caching allocator are as large as they were asked for, or `expandable`;
    `redoes` names modules that selective recompute runs again, where a run says so; `zero`, `recompute` and
    `sequence_parallel` are what its users get when they say nothing; with `picks_recompute` its recipes choose a recompute
    policy by model and machine, so that silence says little; `host_gradient_bytes` of every weight's gradient lie beside an optimizer that rests
    on the host, and none on the device once ZeRO shares them out; `reduce_bucket` is how many gradients DeepSpeed's ZeRO has room for in the buffers from
    which it reduces them; `launches_wait` that the CPU waits for every kernel before it issues the
    next (CUDA_LAUNCH_BLOCKING=1), as a run or its machine says; `head_tokens` is the share of tokens that head and loss see, where
    only those that were masked are picked out before them; `loads_all` that torch is of before 2.0, whose processes hold all of its kernels; `holds_passed`
    that layers which are computed again keep their input and its gradient until backward is over; `stays_whole`
    that under ZeRO-2 every rank has all weights at all times, and gets all gradients to keep its part of them; `reuse_distance` that ZeRO-3 lets go of no
    weight that work on so many others, one after the other, leads back to."""

    name: str
    title: str
    formats: tuple[tuple[str, Formats], ...]
    optimizer_state_bytes: tuple[tuple[str, float], ...]
    fp16_state_bytes: float
    unties: bool
    segments: Segments
    ddp_bucket_bytes: int
    has_units: bool
    kernels: Kernels
    keeping: Keeping
    attention: Attention
    hides: tuple[Hides, ...]
    replicas_wait: bool
    accumulates_whole: bool
    light: Light
    sends: Sends
    updates: Updates
    adds_terms: AddsTerms
    merges_copies: bool
    casts_fp8: bool
    gathers_fp8: bool
    casts_apart: bool
    gradient_passes: float
    update_kernels: UpdateKernels
    pads_vocabulary: bool
    update_copies: float
    accumulate_bytes: float
    zero: int
    recompute: str
    picks_recompute: bool
    sequence_parallel: bool
    basis: Basis
    source: str
    redoes: tuple[str, ...] = ()
    launches_wait: bool = False
    dispatches_fp8: bool = False
    host_gradient_bytes: float = 0.0
    reduce_bucket: int = 0
    head_tokens: float = 1.0
    loads_all: bool = False
    holds_passed: bool = False
    stays_whole: bool = False
    reuse_distance: int = 0

    def formats_for(self, precision: str) -> Formats:
        """Number formats of a precision policy; fp4 differs from fp8, and tf32 from fp32, inside of matrix products alone."""
        return dict(self.formats)[_STORED_AS.get(precision, precision)]

    def master_for(self, precision: str) -> str:
        """The format of copies of the weights that lie among the optimizer's state, which is then larger than the momentum of SGD; "none"
        where weights rest in fp32 or have none."""
        is_low = BYTES[self.formats_for(precision).parameter] < BYTES["float32"]
        return "float32" if is_low and dict(self.optimizer_state_bytes)["sgd"] > BYTES["float32"] else "none"

    def state_bytes(self, optimizer: str, precision: str) -> float:
        """Bytes of optimizer state per parameter: moments, and what is sharded like them: master copies, and under fp16
        copies of scaled gradients. Raises ImpossibleError UNSUPPORTED for an optimizer that nobody measured there."""
        more, known = self.fp16_state_bytes if precision == "fp16" else 0.0, dict(self.optimizer_state_bytes)
        if optimizer not in known:
            raise ImpossibleError(
                "UNSUPPORTED",
                f"What {optimizer} holds and sends is known of strategist's own executor; in {self.title} it is not.",
                flag="--optimizer",
                value=optimizer,
                hint=f"Leave out the framework, or use --optimizer {' or '.join(known)}.",
            )
        return known[optimizer] + more


AUTO = "auto"
"""In place of a front end: rules choose it for the plan (rules/frontends.toml), by what the job is for."""
PURPOSES = ("research", "production", "performance", "debugging", "unsure")


def frontends() -> tuple[str, ...]:
    """Names of the frameworks and launchers whose limits are known; `any` stands for what holds everywhere."""
    return tuple(row["name"] for row in rows("frontends"))


def engine_of(frontend: str) -> str:
    """What runs a job of that front end, as rules call it; `any` for no limits. Raises InputError CHOICE with the known names."""
    known = {row["name"]: str(row["engine"]) for row in rows("frontends")}
    require_known(frontend, known, f"There is no front end {frontend!r}.")
    return known[frontend]


def profile_for(
    frontend: str, precision: str, by_deepspeed: bool = False, zero: int = 0, alone: bool = True
) -> Profile:
    """The profile of what a front end's files start, or of DeepSpeed where it trains; `zero` and `alone` as in `deepspeed_profile`."""
    row = next(row for row in rows("frontends") if row["name"] == frontend)
    if by_deepspeed:
        return find_profile(deepspeed_profile(row["deepspeed"], precision, zero, alone))
    profile = find_profile(row["profile"])
    return with_gradients(profile, reduce=row["reduce"]) if "reduce" in row else profile


def deepspeed_profile(engine: str, precision: str, zero: int, alone: bool) -> str:
    """DeepSpeed's profile by its stage of ZeRO, which may stand `alone`, without other cuts of weights. Where weights rest in fp32, stages 1 and 2
    copy a rank's part of them all the same, and stage 3 does not (runtime/zero/stage_1_and_2.py, single_partition_of_fp32_groups; stage3.py,
    _create_fp32_partitions)."""
    engine = AUTOCAST if precision in ("fp32", "tf32") else engine
    if zero == 3 and alone:
        return _ON_MODULES[engine]
    return COPIES if zero in (1, 2) and engine == AUTOCAST else engine


def frameworks() -> tuple[str, ...]:
    """Names of the profiles: frameworks whose kernels, formats and habits are known."""
    return tuple(row["name"] for row in rows("profiles"))


@cache
def find_kernels(name: str) -> Kernels:
    """The kernels of that name, which must exist."""
    row = next(row for row in rows("kernels") if row["name"] == name)
    seconds = {f"{what}_s": row[f"{what}_us"] * 1e-6 for what in ("host", "unit")}
    return Kernels(**{key: value for key, value in row.items() if not key.endswith("_us")}, **seconds)


_LIKE_GPT2 = ("gpt2", "gpt-neo", "gpt-j", "phi")
"""Families whose modules are GPT-2's, as far as norms, masks and losses go."""


def of_modules(kernels: Kernels, shape: ModelShape, formats: Formats) -> Kernels:
    """What the modules of one sort of model move, where a framework runs those of a library, operation by operation, with an activation that may be several
    of them."""
    if not kernels.modules:
        return kernels
    sort = "rmsnorm" if shape.norm.startswith("rms") else "gpt2" if shape.family in _LIKE_GPT2 else "layernorm"
    found, form = _of_sort(kernels, sort, numbers_of(formats)), act_form_of(kernels, shape, formats)
    return found if form is None else replace(found, gated=found.gated + form.moved, plain=found.plain + form.moved)


def act_form_of(kernels: Kernels, shape: ModelShape, formats: Formats) -> ActForm | None:
    """The activation of a model where the modules that a framework runs have it in several operations of torch, else None."""
    return find_act_form(kernels.modules, shape.act_form or shape.mlp_act, numbers_of(formats))


def numbers_of(formats: Formats) -> str:
    """How the catalogue's tables of a library's modules call formats: `low` is 16 bits, `wide` float32, and `mixed` is by torch.autocast, where weights
    rest in float32 beside products of 16 bits."""
    wide = [BYTES[name] >= BYTES["float32"] for name in (formats.parameter, formats.compute)]
    return "wide" if wide[1] else "mixed" if wide[0] else "low"


@cache
def _of_sort(kernels: Kernels, sort: str, numbers: str) -> Kernels:
    known = (row for row in rows("modules") if row["name"] == kernels.modules)
    row = next(row for row in known if (row["sort"], row["numbers"]) == (sort, numbers))
    return replace(kernels, **{name: row[name] for name in _MOVED})


_MOVED = (
    "norm", "residual", "rotary", "gated", "plain", "dropout", "logit_bytes", "score_forward_bytes", "score_backward_bytes",
)  # fmt: skip
"""Columns of the table of modules that stand in place of the kernels' own."""


@cache
def profile_of(framework: str, arch: str = "", *, is_flash: bool = False) -> Profile | None:
    """The profile that a framework's own words stand for ("Megatron-Core r0.8.0") on devices of an architecture, none where it is not
    known, where its runs say that they call flash attention, and with what its published runs keep where that is other than the framework's
    default; None when no row of the catalogue recognises them."""
    said = framework.lower()
    known = (row for row in rows("framework_names") if arch in row.get("chips", (arch,)))
    row = next((row for row in known if row["word"] in said and row.get("flash", is_flash) == is_flash), None)
    if row is None:
        return None
    profile = find_profile(row["profile"])
    return replace(profile, keeping=find_keeping(row["keeping"])) if "keeping" in row else profile


def with_habits(
    profile: Profile,
    *,
    kernels: str | None = None,
    attention: Attention | None = None,
    hides: tuple[Hides, ...] = (),
    redoes: tuple[str, ...] = (),
    cast_bytes: float | None = None,
    light: Light | None = None,
    unpacks: Unpacks = "nf4",
) -> Profile:
    """The profile under other kernels, another attention, more overlap or another recomputation, as a run states them; with `cast_bytes`, under scales of their own per row, which are found after the gather."""
    keeping = profile.keeping
    if kernels == "compiled":  # what is bound by memory is computed again in backward, inside the kernels that need it
        keeping = replace(keeping, activated=False, rms_bytes=0.0)
    if kernels == "eager-composite" and profile.kernels.name == "compiled":
        # Nothing is computed again in backward then.
        keeping = find_keeping("eager")
    found = profile.kernels if kernels is None else find_kernels(kernels)
    own = (
        profile.kernels.adapts if kernels == "fused" else found.adapts
    )  # kernels of norms and activations leave adapters as they are
    found = replace(found, unpacks=unpacks, adapts=own)
    return replace(
        profile,
        kernels=found if cast_bytes is None else replace(found, cast_bytes=cast_bytes),
        gathers_fp8=profile.gathers_fp8 and cast_bytes is None,
        keeping=keeping,
        attention=attention or profile.attention,
        hides=(*profile.hides, *hides),
        redoes=redoes,
        light=light or profile.light,
    )


def with_fused_loss(profile: Profile) -> Profile:
    """The profile of a run whose loss is one kernel: it finds log-probabilities as it goes and writes the gradient over the float32 logits that it read, so
    that one float32 tensor of the vocabulary is never made (Dao-AILab/flash-attention: flash_attn/ops/triton/cross_entropy.py, inplace_backward;
    unslothai/unsloth: unsloth/kernels/cross_entropy_loss.py). Where losses do so anyhow, it is the same."""
    keeping = profile.keeping
    if not keeping.forward_float32 < keeping.backward_float32:
        return profile
    fewer = {name: getattr(keeping, name) - 1 for name in ("forward_float32", "backward_float32")}
    return replace(profile, keeping=replace(keeping, **fewer))


def as_compiled(profile: Profile) -> Profile:
    """The profile of a run that compiles its blocks, by the name that the catalogue has for such runs, if it has one."""
    found = with_habits(profile, kernels="compiled")
    name = next(row.get("compiled_as") for row in rows("profiles") if row["name"] == profile.name)
    return found if name is None else replace(found, name=name, title=find_profile(name).title)


def with_dispatcher(
    profile: Profile, *, merges: bool | None = None, fp8: bool = False, overlaps: bool = False
) -> Profile:
    """The profile with other ways to experts, as a run states them: copies for one node sent once or each for itself, tokens in fp8, both ways
    behind passes over other micro-batches."""
    return replace(
        profile,
        merges_copies=profile.merges_copies if merges is None else merges,
        dispatches_fp8=profile.dispatches_fp8 or fp8,
        hides=(*profile.hides, "experts") if overlaps else profile.hides,
    )


def merges_copies(said: str) -> bool | None:
    """Whether the dispatcher that some words name sends copies of a token for one node there once; None where they name none."""
    words = "".join(letter for letter in said.lower() if letter.isalnum())
    return next((bool(row["merges_copies"]) for row in rows("dispatchers") if row["word"] in words), None)


def with_frozen_base(profile: Profile, *, adapts_all: bool = False, stored: str = "") -> Profile:
    """The profile for training adapters, beside every matrix with `adapts_all`: weights that are not trained lie in the compute format (Hu et al. 2021, arXiv
    2106.09685; huggingface/peft loads the base model as it computes), or as `stored`: nobody updates them, so that Transformer Engine may hold them
    in fp8 alone (NVIDIA/TransformerEngine: transformer_engine/pytorch/fp8.py, fp8_model_init)."""
    formats = tuple((precision, replace(own, parameter=stored or own.compute)) for precision, own in profile.formats)
    return replace(profile, formats=formats, keeping=replace(profile.keeping, adapts_all=adapts_all))


def with_gradients(profile: Profile, **named: str) -> Profile:
    """The profile with gradients at rest (`gradient`) or added up between ranks (`reduce`) in the formats that a file says."""
    formats = tuple((precision, replace(own, **named)) for precision, own in profile.formats)
    return replace(profile, formats=formats)


def with_narrow_weights(profile: Profile, stored: str, reduce: str) -> Profile:
    """The profile of a run whose weights rest in a narrow format without copies in fp32: gradients are as wide, and so are the moments
    that an optimizer of torch makes like its weights (torch/optim/adamw.py, zeros_like), where they were in fp32; those of eight bits
    stay what they are. Gradients are added up between ranks in `reduce`."""
    share = BYTES[stored] / BYTES["float32"]
    moments = ((name, of if name in OF_EIGHT_BITS else share * of) for name, of in profile.optimizer_state_bytes)
    formats = ((word, replace(own, parameter=stored, gradient=stored, reduce=reduce)) for word, own in profile.formats)
    return replace(
        profile,
        formats=tuple(formats),
        optimizer_state_bytes=tuple(moments),
        accumulate_bytes=share * profile.accumulate_bytes,
    )


def with_states(profile: Profile, optimizer: str, state: float, copies: float) -> Profile:
    """The profile of a run that keeps its optimizer's state in so many bytes per weight, and makes so many more of them in fp32 while it
    updates (NVIDIA/TransformerEngine 04912bf, optimizers/fused_adam.py, get_unscaled_state)."""
    known = dict(profile.optimizer_state_bytes) | {optimizer: state}
    stored = BYTES[profile.formats_for("bf16").parameter]
    return replace(profile, optimizer_state_bytes=tuple(known.items()), update_copies=copies / stored)


def as_made(shape: ModelShape, profile: Profile) -> ModelShape:
    """The model as the framework makes it: with two weights for tied ends where it unties them."""
    return replace(shape, tied=False, parameters_stated=None) if shape.tied and profile.unties else shape


@cache
def find_profile(name: str = "strategist") -> Profile:
    """The profile of that name. Raises InputError CHOICE with the known names."""
    known: dict[str, dict[str, Any]] = {row["name"]: row for row in rows("profiles")}
    require_known(name, known, f"There is no framework profile {name!r}.")
    row = known[name]
    return Profile(
        name=name,
        title=row["title"],
        formats=tuple((precision, Formats(**formats)) for precision, formats in row["formats"].items()),
        optimizer_state_bytes=tuple(row["optimizer_state_bytes"].items()),
        fp16_state_bytes=row["fp16_state_bytes"],
        unties=row["unties"],
        segments=row["segments"],
        ddp_bucket_bytes=row["ddp_bucket_MiB"] * 2**20,
        has_units=row["has_units"],
        replicas_wait=row["replicas_wait"],
        accumulates_whole=row["accumulates_whole"],
        kernels=find_kernels(row["kernels"]),
        keeping=find_keeping(row["keeping"]),
        attention=row["attention"],
        hides=tuple(row["hides"]),
        light=row["light"],
        sends=row["sends"],
        updates=row["updates"],
        adds_terms=row["adds_terms"],
        merges_copies=row["merges_copies"],
        casts_fp8=row["casts_fp8"],
        gathers_fp8=row["gathers_fp8"],
        casts_apart=row["casts_apart"],
        gradient_passes=row["gradient_passes"],
        update_kernels=row["update_kernels"],
        pads_vocabulary=row["pads_vocabulary"],
        update_copies=row["update_copies"],
        accumulate_bytes=row["accumulate_bytes"],
        zero=row["zero"],
        recompute=row["recompute"],
        picks_recompute=row["picks_recompute"],
        sequence_parallel=row["sequence_parallel"],
        basis=row["basis"],
        source=row["source"],
        host_gradient_bytes=row.get("host_gradient_bytes", 0.0),
        reduce_bucket=row.get("reduce_bucket", 0),
        head_tokens=row.get("head_tokens", 1.0),
        loads_all=row.get("loads_all", False),
        stays_whole=row.get("stays_whole", False),
        reuse_distance=row.get("reuse_distance", 0),
    )
