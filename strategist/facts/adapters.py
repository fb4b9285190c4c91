"""Training less than the weights: which models can have low-rank adapters, and what a job is then.

LoRA: Hu et al. 2021, arXiv 2106.09685, section 4. QLoRA: Dettmers et al. 2023, arXiv 2305.14314, sections 2 and 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from strategist.errors import ImpossibleError, require_known
from strategist.facts.job import Job
from strategist.facts.layers import Layer, build_layer
from strategist.facts.model import Adapters, LayerKind, ModelShape, layer_counts
from strategist.facts.parameters import count
from strategist.facts.profile import with_frozen_base
from strategist.facts.resolved import Assumption
from strategist.records import replace
from strategist.units import plain_text

TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
"""Matrices that may have adapters, in the order in which layers have them."""
DEFAULT_RANK = 16
EVERYWHERE = (
    "Dettmers et al. 2023, arXiv 2305.14314, section 4: adapters beside all matrices of the layers match full training"
)
STACKED = "experts lie stacked in one parameter each, beside which no adapter stands (huggingface/peft: target_modules names linear layers)"
ALPHA_OVER_RANK = 2
"""alpha of the plan: the updates of adapters count twice (hiyouga/LLaMA-Factory: src/llamafactory/hparams/finetuning_args.py, lora_alpha)."""
ATTENTION = TARGETS[:4]
"""Those of attention, beside which alone adapters stand in a mixture of experts: the matrices of its experts lie stacked in one parameter."""
PLAIN = tuple(LayerKind(mixer, ffn) for mixer in ("attention", "sliding") for ffn in ("dense", "moe"))

CODE_BITS, BLOCK, SCALE_BITS, SUPER_BLOCK, SUPER_SCALE_BITS = 4, 64, 8, 256, 32
"""NF4 with double quantisation: a code per weight, a scale of eight bits per block of 64 weights, and one of 32 bits per 256
scales (Dettmers et al. 2023, arXiv 2305.14314, section 3, "Double Quantization")."""
QUANTISED_BYTES = (CODE_BITS + (SCALE_BITS + SUPER_SCALE_BITS / SUPER_BLOCK) / BLOCK) / 8
"""Bytes of one weight of a quantised matrix, 0.516: 4.127 bits."""


def with_adapters(shape: ModelShape, method: str, rank: int, targets: Sequence[str]) -> ModelShape:
    """The model with frozen weights and adapters beside the named matrices of every layer.

    Raises InputError CHOICE for a name that is no matrix, ImpossibleError UNSUPPORTED for layers without plain attention, and in a mixture of
    experts for matrices other than those of attention.
    """
    for name in targets:
        sentence = f"Adapters stand beside {', '.join(TARGETS)}; {name!r} is none of them."
        require_known(name, TARGETS, sentence, "--lora-targets")
    if beside := _outside_attention(shape, targets):
        raise _unsupported(
            f"In a mixture of experts such as {shape.name} adapters stand beside the matrices of attention alone, and "
            f"{', '.join(beside)} {'is none' if len(beside) == 1 else 'are none'} of these.",
            "--lora-targets",
            ",".join(targets),
            f"Use --lora-targets {','.join(ATTENTION)}, or some of them.",
        )
    own = tuple(name for name in TARGETS if name in targets and name in _matrices(shape))
    if not own or any(kind not in PLAIN for kind in layer_counts(shape)):
        raise _unsupported(
            f"Adapters are known beside plain attention with a feed-forward part or experts, and {shape.name} has "
            f"{'other layers' if own else 'no such matrix'}.",
            "--method",
            method,
            "Use --method full, or a decoder such as Llama, Mistral, Mixtral or Qwen.",
        )
    adapters = Adapters(
        method="qlora" if method == "qlora" else "lora", rank=rank, alpha=ALPHA_OVER_RANK * rank, targets=own
    )
    return replace(shape, adapters=adapters, frozen=0)


def usual_targets(shape: ModelShape) -> tuple[str, ...]:
    """The matrices beside which adapters stand where nobody says which: all that may have one."""
    return TARGETS if shape.moe is None else ATTENTION


def asked_adapters(
    shape: ModelShape, method: str, rank: int | None, targets: str | None
) -> tuple[ModelShape, tuple[Assumption, ...]]:
    """The model with the adapters that somebody asked for, and what had to be assumed. Raises what `with_adapters` raises, and ImpossibleError
    UNSUPPORTED for a matrix that the model has not."""
    words = (
        usual_targets(shape) if targets is None else plain_text(targets, "--lora-targets").replace(" ", "").split(",")
    )
    made = with_adapters(shape, method, rank or DEFAULT_RANK, words)
    names = made.adapters.targets if made.adapters is not None else ()
    if targets is not None and (missing := [name for name in words if name not in names]):
        raise _unsupported(
            f"{shape.name} has no matrix {' or '.join(missing)} in its layers.",
            "--lora-targets",
            targets,
            f"Its matrices are {','.join(name for name in TARGETS if name in _matrices(shape))}.",
        )
    own = ",".join(names)
    said = (
        ("rank of the adapters", rank, str(DEFAULT_RANK), "--lora-rank", ""),
        ("matrices with adapters", targets, own, "--lora-targets", EVERYWHERE if shape.moe is None else STACKED),
    )
    return made, tuple(
        Assumption(what=what, value=value, flag=flag, source=source)
        for what, told, value, flag, source in said
        if told is None
    )


def beside_experts(shape: ModelShape) -> tuple[str, ...]:
    """The matrices of a mixture of experts beside which its adapters stand, and for which none are known: all but those of attention."""
    return () if shape.adapters is None else _outside_attention(shape, shape.adapters.targets)


def _outside_attention(shape: ModelShape, targets: Sequence[str]) -> tuple[str, ...]:
    return () if shape.moe is None else tuple(name for name in targets if name not in ATTENTION)


def _unsupported(sentence: str, flag: str, value: str, hint: str) -> ImpossibleError:
    return ImpossibleError("UNSUPPORTED", sentence, flag=flag, value=value, hint=hint)


def _matrices(shape: ModelShape) -> set[str]:
    return {matrix.name for kind in layer_counts(shape) for matrix in build_layer(shape, kind).matrices}


def as_trained(job: Job) -> Job:
    """The job with what follows from what its model trains: all weights, or the share that a live module does not freeze, which rest in one format
    (strategist/executor/build.py, lay_out); of a model with adapters these alone, and the weights rest in the compute format.

    Adapters rest in the format of their gradients, which is torch's own rule."""
    total = count(job.model).total
    if job.model.adapters is None:
        return replace(job, trainable=(total - job.model.frozen) / total)
    return replace(job, profile=with_frozen_base(job.profile), trainable=adapter_parameters(job.model) / total)


@cache
def quantised_weights(shape: ModelShape) -> int:
    """Frozen weights of the whole model that rest in four bits: under QLoRA those of all matrices of its layers."""
    if shape.method != "qlora":
        return 0
    return sum(number * quantised_of(build_layer(shape, kind)) for kind, number in layer_counts(shape).items())


def quantised_of(layer: Layer) -> int:
    """Those of one layer under QLoRA, biases left out."""
    return sum(matrix.copies * matrix.weights for matrix in layer.matrices if not matrix.is_adapter)


@cache
def adapter_parameters(shape: ModelShape) -> int:
    """Trained weights of the whole model."""
    return sum(number * _adapters_of(build_layer(shape, kind)) for kind, number in layer_counts(shape).items())


def _adapters_of(layer: Layer) -> int:
    return sum(matrix.parameters for matrix in layer.matrices if matrix.is_adapter)
