"""rules/legality.toml once more, as plain conditions on one layout: the first that holds refuses it."""

from __future__ import annotations

from collections.abc import Callable

from strategist.facts.job import Job
from strategist.facts.model import ModelShape, layer_sequence
from tests.oracle.compression import word_of
from tests.oracle.rates import peak_FLOPs
from tests.oracle.served import is_served, sides_of_tables
from tests.oracle.stages import IN_A_V, Layout, depths

SPLITTABLE = ("decoder", "encoder", "hybrid", "ssm", "vit")

Violation = Callable[[Job, Layout], bool]


def stack(shape: ModelShape) -> int:
    """Layers of the model, an encoder's included."""
    return shape.layers + shape.enc_layers


def is_splittable(shape: ModelShape) -> bool:
    """One uniform stack of layers that a pipeline can cut, or a module that only calls its parts."""
    if shape.kind == "module":
        return ("runs_in_order", 1) in shape.extra
    return shape.kind in SPLITTABLE and shape.enc_layers == 0


def _experts(job: Job) -> int:
    return job.model.moe.experts if job.model.moe else 0


def _expert_width(job: Job) -> int:
    return job.model.moe.ffn if job.model.moe else 0


def _ring_cannot(job: Job, a: Layout) -> bool:
    """Our ring sees whole blocks: no window, nothing kept of its inside."""
    looks_near = job.model.window is not None and job.model.window < job.workload.seq_len
    return a["context_parallel"] in ("ring", "hierarchical") and (looks_near or a["recompute"] == "selective")


def _ring_in_float32(job: Job, a: Layout) -> bool:
    """No kernel for it takes float32 on GPUs."""
    is_wide = job.workload.precision == "fp32" and job.cluster.smallest.vendor != "CPU"
    return a["context_parallel"] in ("ring", "hierarchical") and is_wide


def _spreads_experts_otherwise(job: Job, a: Layout) -> bool:
    """Ours are cut over all tp ranks or over none, which then hold other tokens each; they lie apart on ranks that share state,
    or on replicas that share none."""
    tp, etp = a["tp"], a["etp"]
    if a["ep"] == 1:
        return bool(etp != (tp if job.model.moe else 1))
    if etp not in (1, tp) or (tp != etp and not a["sequence_parallel"]):
        return True
    ranks = a["cp"] * (tp // etp) * (a["dp_shard"] if a["zero"] else a["dp_replicate"])
    return bool(ranks % a["ep"] != 0)


def _too_few_heads_for_exchange(job: Job, a: Layout) -> bool:
    return a["context_parallel"] == "all-to-all" and (job.model.kv_heads / a["tp"]) % a["cp"] != 0


def _too_few_heads_inside(job: Job, a: Layout) -> bool:
    return a["context_parallel"] == "hierarchical" and (job.model.kv_heads / a["tp"]) % a["cp_inner"] != 0


def _sequence_does_not_divide(job: Job, a: Layout) -> bool:
    return a["sequence_parallel"] == 1 and (job.workload.seq_len / a["cp"]) % a["tp"] != 0


def is_uneven(a: Layout) -> bool:
    """Whether replicas run different numbers of micro-batches."""
    return a.get("uneven_batch", 0) == 1


def ours(violation: Violation) -> Violation:
    """A limit of strategist's own executor, which counts only where it is asked for."""
    return lambda job, a: job.frontend == "strategist" and violation(job, a)


def with_muon(violation: Violation) -> Violation:
    """A limit of Muon."""
    return lambda job, a: job.workload.optimizer == "muon" and violation(job, a)


def in_fp8(violation: Violation) -> Violation:
    """A limit of fp8 in strategist's own executor."""
    return ours(lambda job, a: job.workload.precision == "fp8" and violation(job, a))


def _has_odd_sides(shape: ModelShape) -> bool:
    """Something that a matrix of a layer reads or gives, dense attention and feed-forward, is no multiple of 16."""
    attended = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim)
    return any(side % 16 for side in (shape.hidden, shape.ffn_hidden, *attended))


BEHIND_OR_IN_CHUNKS = ("olmo2", "llama4", "llama4_text")


def is_buildable(shape: ModelShape) -> bool:
    """A decoder that a few choices make from a bare one of its sizes, with attention and a feed-forward part in each layer."""
    kept = (
        "name", "family", "max_seq", "tied", "qkv_bias", "o_bias", "mlp_bias", "lm_head_bias", "mlp_gated", "window",
        "full_every", "pattern", "moe", "pos_rows", "parameters_stated", "basis", "source", "notes",
        "act_form", "model_type",
    )  # fmt: skip
    chosen = {
        "norm": ("rmsnorm", "layernorm", "layernorm_nobias", "layernorm_nonparam"), "pos": ("rope", "learned"),
        "qk_norm": ("", "head", "full"), "mlp_act": ("silu", "gelu", "relu", "relu2"),
    }  # fmt: skip
    sizes = ("layers", "hidden", "vocab", "heads", "kv_heads", "head_dim")
    if any(getattr(shape, name) not in known for name, known in chosen.items()):
        return False
    copied = {name: getattr(shape, name) for name in (*kept, *chosen, *sizes, "ffn_hidden")}
    if shape != ModelShape(kind="decoder", **copied) or shape.family in BEHIND_OR_IN_CHUNKS:
        return False
    if min(getattr(shape, name) for name in sizes) < 1 or shape.heads % shape.kv_heads:
        return False
    if (shape.pos == "learned") != (shape.pos_rows > 0) or (shape.pos == "rope" and shape.head_dim % 2):
        return False
    return _has_feed_forward(shape)


def _has_feed_forward(shape: ModelShape) -> bool:
    """Every layer has experts, or a feed-forward part of some width."""
    moe, words = shape.moe, shape.pattern.split()
    if moe and (moe.latent or moe.router_bias or moe.expert_bias or moe.ffn < 1 or not 1 <= moe.top_k <= moe.experts):
        return False
    if words:
        return all(word in (("*E", "sE", "*-", "s-") if shape.ffn_hidden else ("*E", "sE")) for word in words)
    return shape.ffn_hidden > 0 or (moe is not None and moe.layers >= shape.layers and moe.first_dense == 0)


def _tiles_what_is_not_sliced(job: Job, a: Layout) -> bool:
    """Slices of dense layers are gathered by ZeRO-3 alone, and selective recompute would keep what each of them gives."""
    alone = (a["zero"], a["tp"], a["pp"]) == (3, 1, 1) and job.model.moe is None
    return a["tiling"] > 1 and not (alone and a["recompute"] != "selective")


def _is_not_full_alone(job: Job, a: Layout) -> bool:
    """Some layers run again where nothing is weighed or said of it."""
    others = a["tiling"] > 1 or job.model.method != "full" or job.frontend == "deepspeed"
    return bool(others or a["recompute"] != "full")


def _layers_differ(job: Job) -> bool:
    """Some layers have experts, and some have none."""
    have = [layer.ffn == "moe" for layer in layer_sequence(job.model)]
    return any(have) and not all(have)


def _beyond_the_table(shape: ModelShape, tokens: int) -> bool:
    """Learned positions end with the rows of their table, or before where its first rows are for no token."""
    return any(0 < limit < tokens for limit in (shape.pos_rows, shape.max_seq))


def _beyond_its_inputs(shape: ModelShape, tokens: int) -> bool:
    """An encoder of sound has a table of its own, which is longer than the decoder's."""
    frames = dict(shape.extra).get("enc_pos_rows", 0) if shape.kind == "encdec-audio" else 0
    return frames < tokens if frames else _beyond_the_table(shape, tokens)


def _targets(job: Job) -> int:
    """Tokens of a decoder's sequence."""
    return job.workload.target_len or job.workload.seq_len


def in_threads(a: Layout) -> bool:
    """Whether the replicas are threads of one process."""
    return a.get("replicas") == "threads"


VIOLATIONS: dict[str, Violation] = {
    "LEG001": lambda job, a: not all(peak_FLOPs(g.node.gpu, job.workload.precision) for g in job.cluster.groups),
    "LEG011": ours(lambda job, a: job.workload.precision == "fp4"),
    "LEG013": ours(lambda job, a: not is_buildable(job.model)),
    "LEG014": lambda job, a: job.model.pos == "learned" and _beyond_its_inputs(job.model, job.workload.seq_len),
    "LEG015": lambda job, a: (
        job.model.pos == "learned" and job.model.enc_layers > 0 and _beyond_the_table(job.model, _targets(job))
    ),
    "LEG101": lambda job, a: job.model.heads % a["tp"] != 0,
    "LEG102": lambda job, a: job.model.kv_heads % a["tp"] != 0,
    "LEG103": lambda job, a: job.model.ffn_hidden % a["tp"] != 0,
    "LEG104": lambda job, a: a["tp"] > 1 and 0 < job.model.vocab < a["tp"],
    "LEG105": lambda job, a: _expert_width(job) % a["etp"] != 0,
    "LEG106": lambda job, a: a["ep"] > 1 and _experts(job) > 0 and _experts(job) % a["ep"] != 0,
    "LEG107": lambda job, a: a["ep"] > 1 and _experts(job) == 0,
    "LEG108": lambda job, a: (a["tp"] > 1 or a["cp"] > 1) and job.model.kind == "module",
    "LEG109": lambda job, a: max(a["tp"], a["cp"], a["tiling"]) > 1 and job.model.kind == "cnn",
    "LEG110": lambda job, a: job.workload.precision in ("fp8", "fp4") and job.model.kind == "cnn",
    "LEG201": lambda job, a: a["pp"] * a["virtual_stages"] > stack(job.model),
    "LEG202": lambda job, a: a["virtual_stages"] > 1 and stack(job.model) % (a["pp"] * a["virtual_stages"]) != 0,
    "LEG203": lambda job, a: a["schedule"] != "gpipe" and a["accumulation"] < a["pp"],
    "LEG204": lambda job, a: a["schedule"] in ("interleaved", "zb_h1") and a["accumulation"] % a["pp"] != 0,
    "LEG205": lambda job, a: a["pp"] > 1 and not is_splittable(job.model),
    "LEG206": lambda job, a: a["schedule"] in ("zb_h1", *IN_A_V) and a["recompute"] != "none",
    "LEG207": lambda job, a: (
        a["schedule"] in ("zb_h1", *IN_A_V)
        and (a["zero"] == 3 or a["cp"] > 1 or _experts(job) > 0 or not is_buildable(job.model))
    ),
    "LEG208": lambda job, a: a["schedule"] == "zbv" and a["accumulation"] < 2 * a["pp"] - 1,
    "LEG209": lambda job, a: a["schedule"] in IN_A_V and job.model.tied,
    "LEG210": lambda job, a: a["schedule"] == "dualpipev" and a["accumulation"] < 2 * a["pp"],
    "LEG301": _sequence_does_not_divide,
    "LEG302": lambda job, a: a["cp"] > 1 and job.workload.seq_len % (2 * a["cp"]) != 0,
    "LEG303": _too_few_heads_for_exchange,
    "LEG304": lambda job, a: a["cp"] > 1 and job.model.heads == 0,
    "LEG305": _too_few_heads_inside,
    "LEG306": lambda job, a: (
        a["sequence_parallel"] == 1 and job.model.enc_layers > 0 and (_targets(job) / a["cp"]) % a["tp"] != 0
    ),
    "LEG307": lambda job, a: a["cp"] > 1 and job.model.enc_layers > 0 and _targets(job) != job.workload.seq_len,
    "LEG401": lambda job, a: not is_uneven(a) and job.workload.global_batch % (a["dp_replicate"] * a["dp_shard"]) != 0,
    "LEG501": lambda job, a: a["offload"] != "none" and a["pp"] > 1,
    "LEG601": lambda job, a: job.frontend == "deepspeed" and a["pp"] > 1 and a["zero"] >= 2,
    "LEG602": lambda job, a: job.frontend == "deepspeed" and a["stage_split"] != "even",
    "LEG612": ours(_spreads_experts_otherwise),
    "LEG613": ours(_tiles_what_is_not_sliced),
    "LEG614": ours(lambda job, a: (a["offload"], a["zero"]) == ("optimizer", 1)),
    "LEG615": ours(
        lambda job, a: a["offload"] in ("parameters", "nvme") and (a["zero"], a["tp"], a["pp"]) != (3, 1, 1)
    ),
    "LEG617": ours(lambda job, a: job.model.moe is not None and job.model.moe.shared_ffn % a["tp"] != 0),
    "LEG618": ours(lambda job, a: job.model.qk_norm == "full" and a["tp"] > 1),
    "LEG619": ours(_ring_cannot),
    "LEG620": ours(_ring_in_float32),
    "LEG701": lambda job, a: (
        job.model.method != "full"
        and (
            any(a[axis] > 1 for axis in ("tp", "pp", "cp", "ep", "tiling")) or a["zero"] == 1 or a["offload"] != "none"
        )
    ),
    "LEG702": ours(lambda job, a: job.model.method != "full" and job.workload.precision == "fp16"),
    "LEG711": lambda job, a: in_threads(a) and job.cluster.smallest.vendor == "CPU",
    "LEG712": lambda job, a: in_threads(a) and job.cluster.nodes > 1,
    "LEG703": lambda job, a: job.model.frozen > 0 and (a["pp"] > 1 or a["ep"] > 1 or a["zero"] == 1),
    "LEG713": lambda job, a: in_threads(a) and job.frontend == "deepspeed",
    "LEG714": lambda job, a: in_threads(a) and job.model.method != "full",
    "LEG721": lambda job, a: word_of(a) != "none" and job.model.method != "full",
    "LEG722": lambda job, a: word_of(a) in ("powersgd", "topk") and job.workload.precision == "fp16",
    "LEG723": lambda job, a: word_of(a) != "none" and in_threads(a),
    "LEG724": lambda job, a: word_of(a) != "none" and job.frontend == "deepspeed",
    "LEG731": lambda job, a: (
        a.get("loss") == "chunked" and (job.frontend == "deepspeed" or not is_buildable(job.model))
    ),
    "LEG741": lambda job, a: a.get("recompute_layers", 0) * a["pp"] * a["virtual_stages"] > stack(job.model),
    "LEG742": lambda job, a: a.get("recompute_layers", 0) > 0 and _is_not_full_alone(job, a),
    "LEG743": lambda job, a: a.get("recompute_every", 0) > stack(job.model) / (a["pp"] * a["virtual_stages"]),
    "LEG744": lambda job, a: (
        a.get("recompute_every", 0) > 0 and (_is_not_full_alone(job, a) or a.get("recompute_layers", 0) > 0)
    ),
    "LEG745": lambda job, a: a.get("recompute_every", 0) > 0 and _layers_differ(job),
    "LEG746": lambda job, a: a["stage_split"] != "balanced" and max(depths(a), default=0) > _longest_chunk(job, a),
    "LEG747": lambda job, a: (
        a.get("recompute_depth", "alike") == "by-stage"
        and (_is_not_full_alone(job, a) or a.get("recompute_layers", 0) + a.get("recompute_every", 0) > 0)
    ),
    "LEG751": with_muon(
        lambda job, a: job.model.moe is not None or job.model.method != "full" or not is_buildable(job.model)
    ),
    "LEG752": with_muon(lambda job, a: job.frontend == "deepspeed"),
    "LEG753": with_muon(lambda job, a: (a["tp"] > 1 and a["zero"] == 1) or a["offload"] != "none" or a["tiling"] > 1),
    "LEG761": in_fp8(
        lambda job, a: job.model.moe is not None or job.model.method != "full" or _has_odd_sides(job.model)
    ),
    "LEG762": in_fp8(
        lambda job, a: (
            max(a["tp"], a["tiling"]) > 1
            or in_threads(a)
            or word_of(a) != "none"
            or a["schedule"] in ("zb_h1", *IN_A_V)
        )
    ),
    "LEG763": in_fp8(lambda job, a: a["micro_batch"] * job.workload.seq_len / a["cp"] % 16 != 0),
    "LEG771": lambda job, a: is_served(a) and not sides_of_tables(job.model),
    "LEG772": lambda job, a: is_served(a) and job.cluster.nodes > 1,
    "LEG773": lambda job, a: is_served(a) and job.frontend == "deepspeed",
    "LEG774": lambda job, a: is_served(a) and _is_other_way(job, a),
    "LEG781": lambda job, a: is_uneven(a) and a["zero"] in (2, 3),
    "LEG782": lambda job, a: is_uneven(a) and a["pp"] * a["cp"] * a["ep"] > 1,
    "LEG783": lambda job, a: is_uneven(a) and _is_untried_when_uneven(job, a),
    "LEG784": lambda job, a: is_uneven(a) and job.frontend not in ("any", "strategist"),
}
"""Rule id -> the condition that refuses a layout, in the order of the book."""


def _longest_chunk(job: Job, a: Layout) -> int:
    """Layers of a chunk where the last has one and the others share the rest."""
    others = a["pp"] * a["virtual_stages"] - 1
    return -(-(stack(job.model) - 1) // others) if others else stack(job.model)


def _is_other_way(job: Job, a: Layout) -> bool:
    """What was not tried beside a server."""
    asked = job.model.method != "full" or job.workload.optimizer == "muon" or job.workload.precision == "fp8"
    return asked or word_of(a) != "none" or in_threads(a)


def _is_untried_when_uneven(job: Job, a: Layout) -> bool:
    """What was not tried beside an uneven batch."""
    asked = job.model.method != "full" or job.workload.precision == "fp8" or a["offload"] != "none"
    return asked or word_of(a) != "none" or in_threads(a) or is_served(a)


def violation(job: Job, layout: Layout) -> str | None:
    """The first rule that refuses a layout; None for a legal one."""
    return next((name for name, holds in VIOLATIONS.items() if holds(job, layout)), None)
