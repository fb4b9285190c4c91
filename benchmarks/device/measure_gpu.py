"""Measure what one GPU gives to training, kernel by kernel and layer by layer.

Writes JSON lines: one that says what the machine is, then one per measurement, told apart by `what`:

    matmul          seconds of a product by shape and format, random data (and zeros, to see what those hide)
    sustained       the same product, and a layer, second by second: what is left under the power limit
    launch          what the host takes for one kernel, and the device for the smallest one
    attention       scaled_dot_product_attention, causal, by sequence, width of a head and kernel
    memory          kernels that move bytes, with the bytes that they must move
    host_link       copies between host and device
    update          optimizers on the device and on the host
    layer, ends     one block, and the embedding's other end, of catalogue shapes: forward and backward, eager and compiled
    kernels         which kernels a layer launches, how many and how long
    convolutions    a ResNet of transformers, forward and backward, by format, order of channels and images

    python -m benchmarks.device.measure_gpu --out rows.jsonl
    python -m benchmarks.device.measure_gpu --cpu --out rows.jsonl     to try the script, on small sizes

A section that fails leaves a line that says so, and the next one runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from benchmarks.device.gpu_clock import GpuClock
from benchmarks.record import circumstances
from strategist.executor.loss import summed_token_loss
from strategist.executor.models.block import Block
from strategist.executor.models.head import Head
from strategist.executor.models.norms import make_norm
from strategist.executor.models.positions import places, rotate
from strategist.facts.model import ModelShape, layer_sequence
from strategist.facts.models import load_model

Row = dict[str, Any]
HALF = torch.bfloat16


class Bench:
    """The device, its clock, and sizes that fit it."""

    def __init__(self, device: torch.device, *, is_small: bool) -> None:
        self.device, self.clock, self.is_small = device, GpuClock(device), is_small

    def random(self, *size: int, dtype: torch.dtype = HALF, grad: bool = False) -> Tensor:
        """Normal numbers."""
        return torch.randn(*size, device=self.device, dtype=torch.float32).to(dtype).requires_grad_(grad)

    def size(self, full: int, small: int) -> int:
        """The size to measure with."""
        return small if self.is_small else full


def main() -> None:
    """Measure and write, line by line, so that what was measured stays when something fails."""
    asked = _arguments()
    bench = Bench(torch.device("cpu" if asked.cpu else "cuda"), is_small=asked.cpu)
    begin = time.perf_counter()
    with open(asked.out, "x", encoding="utf-8") as file:

        def put(row: Row) -> None:
            file.write(json.dumps(row) + "\n")
            file.flush()

        put({"what": "machine", **circumstances(("torch", "triton")), **machine(bench)})
        for name in asked.sections.split(","):
            for row in careful(SECTIONS[name], bench):
                put({"what": name, **row})
            put({"what": "section", "name": name, "end_s": round(time.perf_counter() - begin, 1), **state(bench)})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="small sizes on the CPU, to try the script")
    parser.add_argument("--out", required=True, help="a new file for the lines")
    parser.add_argument("--sections", default=",".join(SECTIONS))
    return parser.parse_args()


def careful(section: Callable[[Bench], Iterator[Row]], bench: Bench) -> Iterator[Row]:
    """The rows of a section; where it fails, one that says so."""
    try:
        yield from section(bench)
    except (RuntimeError, TypeError, ValueError, AttributeError, ImportError) as problem:
        yield {"failed": type(problem).__name__, "why": str(problem)[:600]}


def machine(bench: Bench) -> Row:
    """What the device says of itself."""
    if bench.device.type == "cpu":
        return {"gpu": "cpu"}
    about = torch.cuda.get_device_properties(bench.device)
    return {
        "gpu": about.name,
        "memory_bytes": about.total_memory,
        "multiprocessors": about.multi_processor_count,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "driver": asked_of_driver("driver_version"),
        "power_limit_W": asked_of_driver("power.limit"),
    }


def state(bench: Bench) -> Row:
    """Clock, power and warmth right now."""
    if bench.device.type == "cpu":
        return {}
    clock, power, warmth = asked_of_driver("clocks.sm,power.draw,temperature.gpu").split(", ")
    return {"clock_MHz": clock, "power_W": power, "celsius": warmth}


def asked_of_driver(fields: str) -> str:
    """What nvidia-smi says, without units."""
    words = ("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()


# Products


def matmul(bench: Bench) -> Iterator[Row]:
    """Rates over rows and width; then formats, alignment, transposition and zeros at one large size."""
    rows = (128, 256, 512, 1024, 2048, 4096, 8192, 16384) if not bench.is_small else (64, 128)
    widths = (512, 1024, 2048, 4096, 8192, 14336) if not bench.is_small else (64, 128)
    for width in widths:
        for m in rows:
            yield product(bench, m, width, width, HALF)
    yield from _products_of_one_size(bench, bench.size(8192, 128))


def _products_of_one_size(bench: Bench, large: int) -> Iterator[Row]:
    """Formats, widths that do not fill lines, narrow and transposed matrices, zeros."""
    for dtype in (torch.float16, torch.float32):
        yield product(bench, large, large, large, dtype)
    torch.backends.cuda.matmul.allow_tf32 = True
    yield product(bench, large, large, large, torch.float32, name="tf32")
    torch.backends.cuda.matmul.allow_tf32 = False
    for n in (large - 4, large - 8, large - 32, large + 8, large + 64):
        yield product(bench, large, n, large, HALF)
        yield product(bench, large, large, n, HALF)
    yield product(bench, large, large, large, HALF, zeros=True)
    for m in (1024, 4096, 16384) if not bench.is_small else (64,):
        for narrow in (512, 1024, 2048) if not bench.is_small else (64,):
            yield product(bench, m, narrow, large, HALF)
            yield product(bench, m, large, narrow, HALF)
    for layout in ("tn", "nn", "nt"):
        yield product(bench, large, bench.size(4096, 64), bench.size(14336, 96), HALF, layout=layout)
    if not bench.is_small:
        for size in (2048, 4096, 8192):
            for is_fast in (False, True):
                yield eight_bit_product(bench, size, is_fast)


def product(
    bench: Bench, m: int, n: int, k: int, dtype: torch.dtype, *, zeros: bool = False, layout: str = "tn", name: str = ""
) -> Row:
    """One (m, k) x (k, n) product; `tn` is how a linear layer multiplies, `nn` its input's gradient, `nt` its weight's."""
    left, right = bench.random(m, k, dtype=dtype), bench.random(n, k, dtype=dtype)
    if zeros:
        left, right = torch.zeros_like(left), torch.zeros_like(right)
    if layout == "nn":
        right = right.t().contiguous().t()
    if layout == "nt":
        left, right = left.t().contiguous().t(), right.t().contiguous().t()
    into = torch.empty(m, n, device=bench.device, dtype=dtype)
    seconds = bench.clock.timed(lambda: torch.mm(left, right.t(), out=into))
    return {
        "dtype": name or str(dtype).removeprefix("torch."), "m": m, "n": n, "k": k, "layout": layout, "zeros": zeros,
        **seconds, "TFLOPs": round(2 * m * n * k / seconds["device_us"] / 1e6, 1),
    }  # fmt: skip


def eight_bit_product(bench: Bench, size: int, is_fast: bool) -> Row:
    """A product of 8-bit numbers with one scale per tensor."""
    left, right = (bench.random(size, size).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=bench.device)
    seconds = bench.clock.timed(
        lambda: torch._scaled_mm(left, right.t(), one, one, out_dtype=HALF, use_fast_accum=is_fast)
    )
    rate = round(2 * size**3 / seconds["device_us"] / 1e6, 1)
    return {"dtype": "fp8", "m": size, "n": size, "k": size, "fast_accumulation": is_fast, **seconds, "TFLOPs": rate}


def sustained(bench: Bench) -> Iterator[Row]:
    """A product and a whole layer, second by second."""
    size = bench.size(8192, 256)
    left, right = bench.random(size, size), bench.random(size, size)
    into = torch.empty(size, size, device=bench.device, dtype=HALF)
    times = bench.clock.sustained(lambda: torch.mm(left, right.t(), out=into), bench.size(6, 1), 20)
    yield {"work": "matmul", "size": size, "us": times, "TFLOPs": [round(2 * size**3 / t / 1e6, 1) for t in times], **state(bench)}  # fmt: skip
    name = "llama-debug" if bench.is_small else "llama-3.1-8b"
    layer = LayerBench(bench, name, load_model(name), 1, bench.size(4096, 32))

    def step() -> None:
        layer.backward(layer.forward())

    yield {"work": "layer", **layer.about(), "us": bench.clock.sustained(step, bench.size(6, 1), 10), **state(bench)}  # fmt: skip


# Launches


def launch(bench: Bench) -> Iterator[Row]:
    """Host microseconds per kernel of several operations, and device microseconds per kernel inside a graph."""
    x, many = bench.random(64, 64), bench.size(500, 10)
    linear, norm = nn.Linear(64, 64, device=bench.device, dtype=HALF), nn.LayerNorm(64, device=bench.device, dtype=HALF)
    operations: dict[str, Callable[[], object]] = {
        "add in place": lambda: x.add_(1.0),
        "add": lambda: x + x,
        "linear": lambda: linear(x),
        "layer norm": lambda: norm(x),
        "gelu": lambda: functional.gelu(x),
    }
    for name, operation in operations.items():
        with torch.no_grad():
            yield {"operation": name, "autograd": False, **_each(bench, operation, many)}
    for name in ("linear", "layer norm"):
        yield {"operation": name, "autograd": True, **_each(bench, operations[name], many)}
    if not bench.is_small:
        yield {"operation": "add in place", "graph": True, **_graph(bench, operations["add in place"], many)}
    yield from _blocks(bench)


def _blocks(bench: Bench) -> Iterator[Row]:
    """Wall microseconds of small blocks one after the other, which the host cannot launch as fast as the device runs them."""
    for name in ("gpt2", "llama-3.2-1b") if not bench.is_small else ("llama-debug",):
        each = LayerBench(bench, name, load_model(name), 1, bench.size(128, 16))

        def unrecorded(each: LayerBench = each) -> None:
            with torch.no_grad():
                each.forward()

        def both(each: LayerBench = each) -> None:
            each.backward(each.forward())

        for passes, work in (("forward, no gradients", unrecorded), ("forward and backward", both)):
            times = bench.clock.sustained(work, 2, 50)
            yield {**each.about(), "operation": "block", "passes": passes, "wall_us": times[-1]}


def _each(bench: Bench, operation: Callable[[], object], many: int) -> Row:
    def run() -> None:
        for _ in range(many):
            operation()

    found = bench.clock.timed(run, repeats=5)
    return {name: round(value / many, 3) for name, value in found.items()}


def _graph(bench: Bench, operation: Callable[[], object], many: int) -> Row:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(many):
            operation()
    found = bench.clock.timed(graph.replay)
    return {"device_us": round(found["device_us"] / many, 3), "host_us_of_all": found["host_us"]}


# Attention

BACKENDS = {
    "default": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


def attention(bench: Bench) -> Iterator[Row]:
    """Causal attention of 16 Ki tokens, forward and backward, by sequence, width and kernel; then grouped queries, and heads of 80."""
    tokens = bench.size(16384, 128)
    lengths = (512, 1024, 2048, 4096, 8192, 16384) if not bench.is_small else (64,)
    for head_dim in (64, 96, 128, 256):
        kernels_here = BACKENDS if head_dim in (64, 128) and not bench.is_small else ("default",)
        for length, name in itertools.product(lengths, kernels_here):
            yield attended(bench, name, tokens // length, 2048 // head_dim, 2048 // head_dim, length, head_dim)
    length = bench.size(4096, 64)
    for heads, kv_heads, head_dim in ((32, 8, 128), (32, 8, 64), (16, 16, 80)):
        yield attended(bench, "default", tokens // length, heads, kv_heads, length, head_dim)


def attended(bench: Bench, name: str, batch: int, heads: int, kv_heads: int, length: int, head_dim: int) -> Row:
    """One shape. FLOP count the causal half: 2 products of 2 x length^2 / 2 x head_dim forward, 2.5 times as many backward."""
    q = bench.random(batch, heads, length, head_dim, grad=True)
    k, v = (bench.random(batch, kv_heads, length, head_dim, grad=True) for _ in range(2))
    backend = BACKENDS[name]

    def forward() -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)

    def chosen() -> Tensor:
        if backend is None:
            return forward()
        with sdpa_kernel(backend):
            return forward()

    heads_of = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    about = {"kernel": name, "batch": batch, "length": length, **heads_of}
    try:
        there, back = bench.clock.both_ways(chosen, (q, k, v))
    except RuntimeError as problem:
        return {**about, "failed": type(problem).__name__, "why": str(problem)[:200]}
    FLOP = 2.0 * batch * heads * length**2 * head_dim
    return {
        **about, "forward": there, "backward": back,
        "forward_TFLOPs": round(FLOP / there["device_us"] / 1e6, 1),
        "backward_TFLOPs": round(2.5 * FLOP / back["device_us"] / 1e6, 1),
    }  # fmt: skip


# Bytes


def memory(bench: Bench) -> Iterator[Row]:
    """Kernels that are bound by memory, with the bytes each must move: every input read once, every output written once."""
    for power in range(16, 31, 2) if not bench.is_small else (16,):
        source = torch.empty(2**power, dtype=torch.uint8, device=bench.device).random_()
        target = torch.empty_like(source)
        yield _moved("copy", 2 * 2**power, bench.clock.timed(lambda s=source, t=target: t.copy_(s)))
    tokens, width = bench.size(8192, 64), bench.size(8192, 128)
    one = 2.0 * tokens * width
    x, y = bench.random(tokens, width), bench.random(tokens, width)
    plain: dict[str, tuple[float, Callable[[], object]]] = {
        "add": (3 * one, lambda: x + y),
        "multiply": (3 * one, lambda: x * y),
        "gelu": (2 * one, lambda: functional.gelu(x)),
        "silu": (2 * one, lambda: functional.silu(x)),
        "dropout": (2.5 * one, lambda: functional.dropout(x, 0.1)),
        "cast to float32": (3 * one, lambda: x.float()),
        "sum": (one, lambda: x.sum()),
        "norm of all": (one, lambda: torch.linalg.vector_norm(x)),
        "transpose": (2 * one, lambda: x.t().contiguous()),
    }
    for name, (bytes_, work) in plain.items():
        with torch.no_grad():
            yield _moved(name, bytes_, bench.clock.timed(work))
    yield from _both_ways(bench, "softmax", lambda h: functional.softmax(h, dim=-1), x, (2 * one, 3 * one))
    yield from _norms_by_width(bench, 2.0 * tokens * width)
    yield from _parts_of_layers(bench)
    yield from _losses(bench)


def _norms_by_width(bench: Bench, bytes_: float) -> Iterator[Row]:
    """Norms of as many numbers in rows of several widths."""
    for width in (768, 1280, 2048, 4096, 5120, 8192, 16384) if not bench.is_small else (64,):
        rows = int(bytes_ / 2 / width)
        scale = torch.ones(width, device=bench.device, dtype=HALF, requires_grad=True)
        x, one = bench.random(rows, width), 2.0 * rows * width
        norms: dict[str, Callable[[Tensor], Tensor]] = {
            "rms norm": lambda h, w=width, s=scale: functional.rms_norm(h, (w,), s),
            "layer norm": lambda h, w=width, s=scale: functional.layer_norm(h, (w,), s, s),
        }
        for name, norm in norms.items():
            yield from _both_ways(bench, name, norm, x, (2 * one, 3 * one), (scale,), width=width)


def _parts_of_layers(bench: Bench) -> Iterator[Row]:
    """Rotation and gated activation as the executor computes them; bytes of inputs read and outputs written once."""
    tokens, width = bench.size(4096, 32), bench.size(14336, 64)
    shape = load_model("llama-3.1-8b")
    where = places(shape, tokens, bench.random(1, 1, 1))
    for heads in (32, 8):
        x = bench.random(1, tokens, heads, shape.head_dim)
        yield from _both_ways(
            bench, f"rotation of {heads} heads", lambda h: rotate(h, where.cos, where.sin), x, (2.0 * x.nbytes, 2.0 * x.nbytes)
        )  # fmt: skip
    gate, up = bench.random(tokens, width), bench.random(tokens, width, grad=True)
    yield from _both_ways(
        bench,
        "gated activation",
        lambda h: functional.silu(h) * up,
        gate,
        (3.0 * gate.nbytes, 5.0 * gate.nbytes),
        (up,),
    )


def _moved(name: str, bytes_: float, seconds: dict[str, float], **more: Any) -> Row:
    rate = round(bytes_ / seconds["device_us"] / 1e3, 1)
    return {"operation": name, "bytes": bytes_, **seconds, "GBps": rate, **more}


def _both_ways(
    bench: Bench,
    name: str,
    work: Callable[[Tensor], Tensor],
    x: Tensor,
    bytes_: tuple[float, float],
    others: Sequence[Tensor] = (),
    **more: Any,
) -> Iterator[Row]:
    """`others` are what gets gradients beside `x`."""
    source = x.detach().clone().requires_grad_()
    there, back = bench.clock.both_ways(lambda: work(source), (source, *others))
    yield _moved(name, bytes_[0], there, **more)
    yield _moved(f"{name}, backward", bytes_[1], back, **more)


def _losses(bench: Bench) -> Iterator[Row]:
    """Cross entropy of half-precision logits in float32, as the executor computes it; `bytes` are those of the logits, once."""
    tokens = bench.size(8192, 32)
    for vocab in (32000, 50304, 128256) if not bench.is_small else (512,):
        logits, bytes_ = bench.random(1, tokens, vocab), 2.0 * tokens * vocab
        labels = torch.randint(vocab, (1, tokens), device=bench.device)
        yield from _both_ways(
            bench, "cross entropy", lambda g, t=labels: summed_token_loss(g, t), logits, (bytes_, bytes_), vocab=vocab, tokens=tokens
        )  # fmt: skip


def host_link(bench: Bench) -> Iterator[Row]:
    """Copies of pinned and of ordinary memory, each way and both ways at once."""
    for size in (2**16, 2**20, 2**24, 2**28, 2**30) if not bench.is_small else (2**16,):
        for pinned in (True, False) if not bench.is_small else (False,):
            if not pinned and size not in (2**16, 2**28):
                continue
            host = _filled(size, pinned)
            device = torch.empty(size, dtype=torch.uint8, device=bench.device)
            for way, work in {
                "to device": lambda h=host, d=device, p=pinned: d.copy_(h, non_blocking=p),
                "to host": lambda h=host, d=device, p=pinned: h.copy_(d, non_blocking=p),
            }.items():
                found = bench.clock.timed(work, repeats=5)
                yield {"way": way, "pinned": pinned, **_moved("copy", size, found)}
    if not bench.is_small:
        yield _at_once(bench, 2**28)


def _filled(size: int, pinned: bool) -> Tensor:
    return torch.ones(size, dtype=torch.uint8, pin_memory=pinned)


def _at_once(bench: Bench, size: int) -> Row:
    """Both ways at once, on two streams; bytes of one way."""
    hosts = [_filled(size, pinned=True) for _ in range(2)]
    devices = [torch.empty(size, dtype=torch.uint8, device=bench.device) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def work() -> None:
        for index, stream in enumerate(streams):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                pair = (devices[index], hosts[index]) if index == 0 else (hosts[index], devices[index])
                pair[0].copy_(pair[1], non_blocking=True)
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)

    return {"way": "both at once", "pinned": True, **_moved("copy", size, bench.clock.timed(work, repeats=5))}


# Updates


def update(bench: Bench) -> Iterator[Row]:
    """AdamW over a layer's worth of float32 elements, and the norm of all gradients, on the device; AdamW on the host."""
    sizes = [(4096, 4096), (1024, 4096), (14336, 4096), (4096,)] if not bench.is_small else [(64, 64), (64,)]
    on_device = _parameters(sizes * 4, bench.device)
    yield from _adamw("device", bench.clock, on_device)
    elements = sum(p.numel() for p in on_device)
    norm = bench.clock.timed(lambda: nn.utils.clip_grad_norm_(on_device, 1e30, foreach=True))
    yield {"where": "device", "elements": elements, **_moved("norm and scale of gradients", 12.0 * elements, norm)}
    host = torch.device("cpu")
    for row in _adamw("host", GpuClock(host), _parameters(sizes, host)):
        yield {**row, "threads": torch.get_num_threads()}


def _adamw(where: str, clock: GpuClock, parameters: list[nn.Parameter]) -> Iterator[Row]:
    elements = sum(p.numel() for p in parameters)
    for word in ("fused", "foreach"):
        optimizer = torch.optim.AdamW(parameters, lr=1e-4, **{word: True})
        found = clock.timed(optimizer.step)
        yield {"where": where, "elements": elements, **_moved(f"AdamW, {word}", 28.0 * elements, found)}


def _parameters(sizes: list[tuple[int, ...]], device: torch.device) -> list[nn.Parameter]:
    found = [nn.Parameter(torch.randn(*size, device=device)) for size in sizes]
    for parameter in found:
        parameter.grad = torch.randn_like(parameter)
    return found


# Layers

SHAPES = (
    ("gpt2", 8, 1024), ("gpt2", 1, 128), ("gpt2-large", 8, 1024), ("llama-3.2-1b", 4, 4096), ("llama-3.1-8b", 1, 4096),
    ("llama-3.1-8b", 2, 8192), ("olmoe-1b-7b", 1, 4096),
)  # fmt: skip
"""Model, sequences of a micro-batch, tokens of a sequence."""
SMALL_SHAPES = (("llama-debug", 1, 32),)


class LayerBench:
    """One block of a shape, its weights and hidden states in half precision, as FSDP2 computes with cast weights."""

    def __init__(self, bench: Bench, name: str, shape: ModelShape, micro_batch: int, seq_len: int) -> None:
        self.name, self.shape, self.micro_batch, self.seq_len = name, shape, micro_batch, seq_len
        kinds = layer_sequence(shape)
        with torch.device(bench.device):
            self.block: Any = Block(shape, kinds[-1], "scored").to(HALF)
        for parameter in self.block.parameters():
            nn.init.normal_(parameter, 0.0, 0.02)
        self.h = bench.random(micro_batch, seq_len, shape.hidden, grad=True)
        self.places = places(shape, seq_len, self.h)
        self.grad = bench.random(micro_batch, seq_len, shape.hidden)

    def about(self) -> Row:
        """What was measured."""
        return {"model": self.name, "micro_batch": self.micro_batch, "seq_len": self.seq_len}

    def forward(self) -> Tensor:
        """The block's output."""
        out: Tensor = self.block(self.h, self.places)
        return out

    def backward(self, out: Tensor) -> None:
        """Gradients of weights, made anew, and of the hidden states."""
        for parameter in (*self.block.parameters(), self.h):
            parameter.grad = None
        out.backward(self.grad)


def _shapes(bench: Bench) -> tuple[tuple[str, int, int], ...]:
    return SMALL_SHAPES if bench.is_small else SHAPES


def _layers(bench: Bench) -> Iterator[LayerBench]:
    for name, micro_batch, seq_len in _shapes(bench):
        yield LayerBench(bench, name, load_model(name), micro_batch, seq_len)


def layer(bench: Bench) -> Iterator[Row]:
    """Forward and backward of a block, as it is."""
    for each in _layers(bench):
        yield {**each.about(), "compiled": False, **_passes(bench, each)}


def compiled(bench: Bench) -> Iterator[Row]:
    """The same, compiled: the first of each model's sizes, and no experts, which are not compiled."""
    done: set[str] = set()
    for each in _layers(bench):
        if each.shape.moe is not None or each.name in done:
            continue
        done.add(each.name)
        each.block = torch.compile(each.block)
        begin = time.perf_counter()
        each.backward(each.forward())
        bench.clock.wait()
        took = round(time.perf_counter() - begin, 2)
        yield {**each.about(), "compiled": True, "compile_s": took, **_passes(bench, each)}


def _passes(bench: Bench, each: LayerBench) -> Row:
    there = bench.clock.timed(each.forward)
    back = bench.clock.timed(each.backward, lambda: (each.forward(),))
    elements = sum(p.numel() for p in each.block.parameters())
    return {"forward": there, "backward": back, "elements": elements}


def kernels(bench: Bench) -> Iterator[Row]:
    """Kernels of one forward and of one backward, by name: how many, and microseconds of all."""
    for each in _layers(bench):
        each.backward(each.forward())
        bench.clock.wait()
        with profile(activities=_activities(bench)) as forward:
            out = each.forward()
            bench.clock.wait()
        with profile(activities=_activities(bench)) as backward:
            each.backward(out)
            bench.clock.wait()
        for name, seen in (("forward", forward), ("backward", backward)):
            yield {**each.about(), "pass": name, **_counted(seen)}


def _activities(bench: Bench) -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU if bench.device.type == "cpu" else ProfilerActivity.CUDA]


def _counted(seen: Any) -> Row:
    found: dict[str, list[float]] = defaultdict(list)
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name[:90]].append(event.time_range.elapsed_us())
    table = {name: [len(times), round(sum(times), 1)] for name, times in found.items()}
    return {"launched": sum(len(times) for times in found.values()), "by_name": table}


def ends(bench: Bench) -> Iterator[Row]:
    """The last norm, the head and the loss of its logits, forward and backward."""
    for name, micro_batch, seq_len in _shapes(bench):
        shape = load_model(name)
        with torch.device(bench.device):
            norm, head = make_norm(shape).to(HALF), Head(shape.hidden, shape.vocab, bias=False).to(HALF)
        nn.init.normal_(head.weight, 0.0, 0.02)
        h = bench.random(micro_batch, seq_len, shape.hidden, grad=True)
        labels = torch.randint(shape.vocab, (micro_batch, seq_len), device=bench.device)

        def forward(h: Tensor = h, norm: nn.Module = norm, head: nn.Module = head, labels: Tensor = labels) -> Tensor:
            return summed_token_loss(head(norm(h)), labels)

        def chunked(h: Tensor = h, norm: nn.Module = norm, head: nn.Module = head, labels: Tensor = labels) -> Tensor:
            return head(norm(h), labels)

        for loss, work in (("whole", forward), ("in chunks", chunked)):
            there, back = bench.clock.both_ways(work, (h, *norm.parameters(), *head.parameters()), repeats=5)
            about = {"model": name, "micro_batch": micro_batch, "seq_len": seq_len, "loss": loss}
            yield {**about, "forward": there, "backward": back}


def convolutions(bench: Bench) -> Iterator[Row]:
    """Forward and backward of ResNets from images to the loss, in bfloat16 under autocast, float32 and TF32."""
    for name, depths, images in (
        ("resnet50", (3, 4, 6, 3), 256),
        ("resnet50", (3, 4, 6, 3), 64),
        ("resnet18", (2, 2, 2, 2), 256),
    ):
        for order, format_ in itertools.product(("channels last", "channels first"), ("bfloat16", "float32", "tf32")):
            count = bench.size(images, 2)
            about = {"model": name, "images": count, "order": order, "format": format_}
            yield {**about, **_of_images(bench, name, depths, count, order, format_)}


def _of_images(bench: Bench, name: str, depths: tuple[int, ...], images: int, order: str, format_: str) -> Row:
    from transformers import ResNetConfig, ResNetForImageClassification  # other sections do without it

    kind = "basic" if name == "resnet18" else "bottleneck"
    widths = [64, 128, 256, 512] if kind == "basic" else [256, 512, 1024, 2048]
    config = ResNetConfig(depths=list(depths), hidden_sizes=widths, layer_type=kind, num_labels=1000)
    layout = torch.channels_last if order == "channels last" else torch.contiguous_format
    model = ResNetForImageClassification(config).to(bench.device).to(memory_format=layout)
    pictures = bench.random(images, 3, 224, 224, dtype=torch.float32).to(memory_format=layout)
    labels = torch.randint(1000, (images,), device=bench.device)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = format_ == "tf32"

    def forward() -> Tensor:
        with torch.autocast(bench.device.type, HALF, enabled=format_ == "bfloat16"):
            return functional.cross_entropy(model(pictures).logits.float(), labels)

    there, back = bench.clock.both_ways(forward, tuple(model.parameters()), repeats=bench.size(7, 1))
    return {"forward": there, "backward": back}


SECTIONS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "launch": launch,
    "host_link": host_link,
    "memory": memory,
    "attention": attention,
    "layer": layer,
    "ends": ends,
    "kernels": kernels,
    "update": update,
    "matmul": matmul,
    "sustained": sustained,
    "compiled": compiled,
    "convolutions": convolutions,
}


if __name__ == "__main__":
    main()
