"""Weights in safetensors files under Hugging Face's names: out of a checkpoint, and into a session of any layout.

Llamas and their relatives, dense or with experts, and GPT-2; `catalog/data/weight_names.jsonl` says which family has which names.
Moments, steps and configurations are not in such files, so `constants_of` reads what of a configuration the numbers of a model depend on. Their files have each matrix of each expert for itself, ours are F x E x H.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from strategist.catalog import rows
from strategist.document.plan import Plan
from strategist.document.write import as_document
from strategist.errors import ImpossibleError, InputError, StaleError, shown
from strategist.executor.checkpoint import follow_weights, named_parameters, read_tensors
from strategist.executor.initialise import Home, PackedHome, cut_like, homes, local_part
from strategist.executor.models import ReferenceModel, model_from_shape
from strategist.executor.models.reference import constants_of_model
from strategist.executor.session import Session
from strategist.facts.constants import PLAIN, Constants, constants_from
from strategist.facts.model import ModelShape
from strategist.facts.parameters import without_adapters
from strategist.reading import checked, parse_json, read_model_config, read_text
from strategist.records import dataclass
from strategist.runs.checkpoints import read_manifest

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""The files that transformers looks for: one with everything, or a list of parts."""
LARGEST_FILE_BYTES = 4 * 2**30
FILE_NAME = re.compile(r"[\w-][\w.-]*\.safetensors")

LLAMA = {
    "token_embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head",
    "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
    **{f"attention.{x}": f"self_attn.{x}_proj" for x in "qkvo"}, **{f"attention.{x}_norm": f"self_attn.{x}_norm" for x in "qk"},
    **{f"mlp.{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
}  # fmt: skip
GPT2 = {
    "token_embedding": "transformer.wte", "position_embedding": "transformer.wpe", "norm": "transformer.ln_f",
    "head": "lm_head", "attention_norm": "ln_1", "mlp_norm": "ln_2", **{f"attention.{x}": "attn.c_attn" for x in "qkv"},
    "attention.o": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
}  # fmt: skip
SCHEMES = {"llama": (LLAMA, "model.layers"), "gpt2": (GPT2, "transformer.h")}
"""Our module names to theirs, and where theirs has its layers."""
MATRICES = ("gate", "up", "down")
EXPERTS = {
    "mixtral": ({"mlp.router": "block_sparse_moe.gate"}, "block_sparse_moe.experts", dict(zip(MATRICES, ("w1", "w3", "w2"), strict=True))),
    "projections": (
        {"mlp.router": "mlp.gate", "mlp.shared_gate": "mlp.shared_expert_gate", **{f"mlp.shared.{x}": f"mlp.shared_expert.{x}_proj" for x in MATRICES}},
        "mlp.experts", {x: f"{x}_proj" for x in MATRICES},
    ),
}  # fmt: skip
"""The same of parts that mixtures have more, where theirs has its experts, and what it calls their matrices."""
CONFIG, NORMALISED = "config.json", "norm_topk_prob"
TRAINED_WITH = "strategist.constants"
"""Beside the tensors of exported files: the constants of their model, as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor of Hugging Face's and those of ours that lie side by side in it; `turned` says in x out instead of out x in.
    With an `expert` it is that one of our stack alone."""

    theirs: str
    ours: tuple[str, ...]
    turned: bool
    expert: int | None = None

    def joined(self, parts: Iterable[Tensor]) -> Tensor:
        """Their tensor from ours."""
        own = (part if self.expert is None else part[:, self.expert] for part in parts)
        return torch.cat([part.t() if self.turned else part for part in own], dim=-1).contiguous()

    def parted(self, whole: Tensor) -> dict[str, Tensor]:
        """Ours from their tensor; of a stack the one expert."""
        parts = whole.chunk(len(self.ours), dim=-1)
        return {name: part.t() if self.turned else part for name, part in zip(self.ours, parts, strict=True)}

    def shape(self, sizes: Mapping[str, torch.Size]) -> tuple[int, ...]:
        """The shape of their tensor, by the sizes of ours."""
        size = tuple(sizes[self.ours[0]])
        size = size if self.expert is None else (size[0], *size[2:])
        size = size[::-1] if self.turned else size
        return (*size[:-1], size[-1] * len(self.ours)) if len(self.ours) > 1 else size


def entries(shape: ModelShape) -> tuple[Entry, ...]:
    """Every tensor of the model under Hugging Face's names; adapters, which are no weights of it, left out. Raises ImpossibleError
    UNSUPPORTED for families without."""
    scheme, experts = _schemes(shape)
    found: dict[str, list[str]] = {}
    every: list[Entry] = []
    for name in named_parameters(model_from_shape(without_adapters(shape))):
        if shape.moe is not None and ".experts." in name:
            every += _expert_entries(name, scheme, experts, shape.moe.experts)
        else:
            found.setdefault(_their_name(name, scheme, experts), []).append(name)
    others = (
        Entry(theirs=theirs, ours=tuple(ours), turned=scheme == "gpt2" and _is_linear(ours[0]))
        for theirs, ours in found.items()
    )
    return (*others, *every)


def _schemes(shape: ModelShape) -> tuple[str, str]:
    """The schemes of names of a model and of its experts, "" for none. Raises ImpossibleError UNSUPPORTED."""
    kind = "scheme" if shape.moe is None else "experts"
    known = {row["family"]: row for row in rows("weight_names") if kind in row}
    if shape.family not in known:
        what = "Dense models" if shape.moe is None else "Mixtures"
        raise ImpossibleError(
            "UNSUPPORTED",
            f"The weights of {shape.name} have no known names in Hugging Face's files.",
            flag="model",
            value=shape.family,
            hint=f"{what} of these families have: {', '.join(sorted(known))}.",
        )
    row = known[shape.family]
    return row["scheme"], row["experts"] if shape.moe is not None else ""


def constants_of(folder: str | Path, shape: ModelShape) -> Constants:
    """The constants of the model whose weights lie in a folder: what the config.json beside them says, else what files of
    `export_weights` say. `model_from_shape` takes them.

    Raises InputError FILE_NOT_FOUND where nothing says them and CONFLICT where both do and differ, ImpossibleError UNSUPPORTED for rotary
    angles that the built-in model has not got.
    """
    place = Path(folder)
    return _constants(place, shape, _files_of(place).values())


def _constants(place: Path, shape: ModelShape, files: Iterable[str]) -> Constants:
    _schemes(shape)  # a family without names has no row
    row = next(row for row in rows("weight_names") if row["family"] == shape.family)
    trained = _trained_with(place, files)
    config: Any = {}
    if (place / CONFIG).is_file():
        config = read_model_config(str(place / CONFIG), CONFIG)
    elif trained is not None:
        return trained
    elif shape.pos == "rope":
        raise InputError(
            "FILE_NOT_FOUND",
            f"{shown(str(place))} has no {CONFIG}, so nothing says by which base rotary angles were made when its weights were trained.",
            flag="folder",
            value=str(place),
            hint=f"Put the model's {CONFIG} beside its weights.",
        )
    if not isinstance(config, dict):
        raise InputError("TYPE", f"{CONFIG} of {shown(str(place))} is no object.", flag=CONFIG, value=config, hint="Fetch it again.")  # fmt: skip
    said = constants_from(config, row, f"{CONFIG} of {shown(str(place))}", rotary=shape.pos == "rope")
    if trained not in (None, said):
        raise InputError(
            "CONFLICT",
            f"The weights in {shown(str(place))} were trained with {trained}; {CONFIG} beside them says {said}.",
            flag=CONFIG,
            value=str(said),
            hint=f"Write into {CONFIG} what the weights were trained with.",
        )
    return said


def _trained_with(place: Path, files: Iterable[str]) -> Constants | None:
    """What `export_weights` wrote beside the tensors; None for files of others."""
    from safetensors import safe_open

    for name in sorted(set(files)):
        with safe_open(place / name, framework="pt") as file:
            text = (file.metadata() or {}).get(TRAINED_WITH)
        if text is not None:
            return checked(Constants, parse_json(text, TRAINED_WITH), TRAINED_WITH)
    return None


def _their_name(name: str, scheme: str, experts: str) -> str:
    table, layers = SCHEMES[scheme]
    module, _, kind = name.rpartition(".")
    if not name.startswith("layers."):
        return f"{table[module]}.{kind}"
    _, number, inner = module.split(".", 2)
    own = table | (EXPERTS[experts][0] if experts else {})
    return f"{layers}.{number}.{own[inner]}.{kind}"


def _expert_entries(name: str, scheme: str, experts: str, count: int) -> Iterator[Entry]:
    """A matrix of all experts of a layer, one entry each."""
    _, place, matrices = EXPERTS[experts]
    _, number, _ = name.split(".", 2)
    matrix = name.rpartition(".")[2]
    prefix = f"{SCHEMES[scheme][1]}.{number}.{place}"
    for expert in range(count):
        theirs = f"{prefix}.{expert}.{matrices[matrix]}.weight"
        yield Entry(theirs=theirs, ours=(name,), turned=matrix == "down", expert=expert)


def _is_linear(name: str) -> bool:
    return name.startswith("layers.") and name.endswith(".weight") and "norm" not in name


def export_weights(checkpoint: str | Path, plan: Plan, folder: str | Path) -> tuple[str, ...]:
    """Write the parameters of a checkpoint into a new folder as transformers reads them; the names of its files.

    A config.json, which transformers needs beside them, is yours, and must say the base of rotary angles and the epsilon of norms that
    the checkpoint was trained with: 10,000 and 1e-5 unless its model was given others. The files' metadata repeat them.
    One process does it, whether it is in a group or not; it holds one file of at most 4 GiB in memory at a time. Raises InputError EXISTS, and
    what `Session.load` raises for a checkpoint that is not sound or not of the plan's model; ImpossibleError UNSUPPORTED beside adapters.
    """
    from safetensors.torch import save_file

    target = Path(folder)
    if plan.model.adapters is not None:
        raise ImpossibleError(
            "UNSUPPORTED",
            "Adapters are not merged into the weights yet, so a checkpoint with them is not written as safetensors.",
            flag="model.adapters",
            value=plan.model.method,
            hint="Load the checkpoint in a session, whose parameters have them.",
        )
    if target.exists():
        raise InputError(
            "EXISTS", f"{shown(str(target))} exists; it was not touched.", flag="folder", value=str(target), hint="Name a new folder."
        )  # fmt: skip
    listed = entries(plan.model)
    sizes = {name: p.size() for name, p in named_parameters(model_from_shape(plan.model)).items()}
    parts = list(_in_files(listed, sizes, torch.finfo(getattr(torch, plan.strategy.formats.parameter)).bits // 8))
    names = (
        [SINGLE]
        if len(parts) == 1
        else [f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i in range(len(parts))]
    )
    tensors = read_tensors(Path(checkpoint), sizes, getattr(torch, plan.strategy.formats.parameter))
    constants = read_manifest(Path(checkpoint)).constants or PLAIN
    told = {"format": "pt", TRAINED_WITH: json.dumps(as_document(constants))}
    target.mkdir(parents=True)
    total, where = 0, dict[str, str]()
    for name, part in zip(names, parts, strict=True):
        ours = tensors([each for entry in part for each in entry.ours])
        theirs = {entry.theirs: entry.joined(ours[each] for each in entry.ours) for entry in part}
        save_file(theirs, target / name, metadata=told)
        total += sum(value.nbytes for value in theirs.values())
        where |= dict.fromkeys(theirs, name)
    if len(names) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (target / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
    return (*names, *([INDEX] if len(names) > 1 else []))


def _in_files(listed: tuple[Entry, ...], sizes: Mapping[str, torch.Size], width: int) -> Iterator[list[Entry]]:
    """The entries in runs of at most 4 GiB."""
    run: list[Entry] = []
    filled = 0
    for entry in listed:
        size = width * prod(entry.shape(sizes))
        if run and filled + size > LARGEST_FILE_BYTES:
            yield run
            run, filled = [], 0
        run.append(entry)
        filled += size
    yield run


@torch.no_grad()
def import_weights(session: Session, folder: str | Path) -> None:
    """Put the weights of Hugging Face's files into a session, whatever its layout; every rank must call it.

    Meant for the start: optimizer state is left alone, but copies of the weights in the host's memory follow. Raises, before anything changes and on every rank alike, InputError
    for a folder without such files, StaleError FACTS_DIFFER when a tensor is missing or has another shape, and ImpossibleError UNSUPPORTED
    when the configuration beside them says another base of rotary angles, scaling of them or epsilon of norms than the session's model has
    (`model_from_shape(shape, constants=constants_of(folder, shape))` has them), or that experts are weighed in another way than the
    built-in model's, or when the session's model is not that; and what `constants_of` raises.
    """
    from safetensors import safe_open

    _require_built_in(session.parts.model)

    place, shape = Path(folder), session.job.plan.model
    model = session.parts.model
    mine = homes(model, named_parameters(model))
    sizes = {name: p.size() for name, p in named_parameters(model_from_shape(without_adapters(shape))).items()}
    where = _files_of(place)
    listed = [(entry, _stored_name(entry, where)) for entry in entries(shape)]
    _require_fit(place, listed, where, sizes)
    _require_same_router(place, shape)
    _require_same_constants(place, _constants(place, shape, where.values()), constants_of_model(model))
    server, tables = session.parts.server, {}
    for entry, name in listed:
        if server is None and not any(ours in mine and _holds(mine[ours], entry.expert) for ours in entry.ours):
            continue  # another stage's, or another rank's expert
        with safe_open(place / where[name], framework="pt") as file:
            parts = entry.parted(file.get_tensor(name))
        for ours, whole in parts.items():
            if ours in mine:
                _put(mine[ours], whole, entry.expert)
            else:  # of a server's workers every one has all the others
                tables[f"model/{ours}"] = whole
    follow_weights(model, session.parts.optimizer)
    if server is not None:
        server.take(tables)


def _require_built_in(model: nn.Module) -> None:
    if not any(isinstance(module, ReferenceModel) for module in model.modules()):
        raise ImpossibleError(
            "UNSUPPORTED",
            "Weights of files come in under the names of the built-in model, and the session trains another.",
            flag="folder",
            value="a model of yours",
            hint="Load the weights into the model before it is given to build(); those of rank 0 count.",
        )


def _put(home: Home | PackedHome, whole: Tensor, expert: int | None) -> None:
    """This rank's part of a tensor into its home, or of one expert (F, H) into a stack (F, E, H)."""
    if expert is None:
        home.take(whole)
        return
    if isinstance(home, PackedHome):
        home.take_one(whole, expert)
        return
    (parameter,) = home.parts
    part = cut_like(parameter, whole.unsqueeze(1).expand(parameter.shape))[:, 0]
    local_part(parameter)[:, _experts_here(parameter).index(expert)].copy_(part)


def _holds(home: Home | PackedHome, expert: int | None) -> bool:
    """Whether some of a weight, or of one expert's, lies on this rank; all in four bits are on every rank."""
    return expert is None or isinstance(home, PackedHome) or expert in _experts_here(home.parts[0])


def _experts_here(parameter: nn.Parameter) -> list[int]:
    """The numbers of the experts of a stack (F, E, H) that lie on this rank."""
    numbers = torch.arange(parameter.shape[1]).view(1, -1, 1).expand(parameter.shape)
    return cut_like(parameter, numbers)[:1, :, 0].flatten().tolist()


def _require_same_router(folder: Path, shape: ModelShape) -> None:
    """The built-in router weighs the chosen experts by the softmax over them; a configuration may say that it was taken over all."""
    if shape.moe is None or _schemes(shape)[1] != "projections" or not (folder / CONFIG).is_file():
        return
    config: Any = read_model_config(str(folder / CONFIG), CONFIG)
    said = config.get(NORMALISED, False) if isinstance(config, dict) else False
    if said is not True:
        raise ImpossibleError(
            "UNSUPPORTED",
            f"{CONFIG} in {shown(str(folder))} does not set {NORMALISED}, so its experts' weights do not add up to one; those of the "
            "built-in model do.",
            flag="folder",
            value=said,
            hint=f"Name the weights of a model with {NORMALISED}.",
        )


def _require_same_constants(folder: Path, theirs: Constants, own: Constants) -> None:
    """Weights fit whatever turns the heads; with other angles they are another model."""
    if theirs != own:
        raise ImpossibleError(
            "UNSUPPORTED",
            f"The weights in {shown(str(folder))} are of a model with {theirs}; the session's model has {own}.",
            flag="folder",
            value=str(theirs),
            hint="Build the session from model_from_shape(plan.model, constants=constants_of(folder, plan.model)); the latter is "
            "in strategist.executor.weights.",
        )


def _files_of(folder: Path) -> dict[str, str]:
    """Which file holds which tensor. Raises InputError for a folder without them, and for lists that name other folders."""
    from safetensors import SafetensorError, safe_open

    if not (folder / INDEX).is_file():
        if not (folder / SINGLE).is_file():
            raise InputError(
                "FILE_NOT_FOUND",
                f"{shown(str(folder))} has neither {SINGLE} nor {INDEX}.",
                flag="folder",
                value=str(folder),
                hint="Name a folder of weights in safetensors.",
            )
        files = [SINGLE]
    else:
        listed: Any = parse_json(read_text(str(folder / INDEX), INDEX), INDEX)
        files = (
            sorted({str(name) for name in listed.get("weight_map", {}).values()}) if isinstance(listed, dict) else []
        )
    try:
        return {name: file for file in files for name in _names_in(folder, file, safe_open)}
    except (SafetensorError, OSError) as problem:
        raise _no_weights(folder, str(problem)) from None


def _names_in(folder: Path, file: str, safe_open: Any) -> list[str]:
    if Path(file).name != file:
        raise InputError(
            "PATH_ESCAPE",
            f"{INDEX} of {shown(str(folder))} names {shown(file)}, which does not lie in that folder.",
            flag="weight_map",
            value=file,
            hint="Name files beside the index; fetch the files again.",
        )
    if not FILE_NAME.fullmatch(file):
        raise _no_weights(folder, f"it names {file}")
    with safe_open(folder / file, framework="pt") as opened:
        return list(opened.keys())


def _no_weights(folder: Path, why: str) -> InputError:
    return InputError(
        "KIND",
        f"{shown(str(folder))} does not hold sound safetensors: {shown(why)}.",
        flag="folder",
        value=str(folder),
        hint="Fetch the files again.",
    )


def _stored_name(entry: Entry, where: Mapping[str, str]) -> str:
    """The name under which an entry is stored: files of GPT-2's inner model leave the first word out."""
    short = entry.theirs.removeprefix("transformer.")
    return short if entry.theirs not in where and short in where else entry.theirs


def _require_fit(
    folder: Path, listed: Iterable[tuple[Entry, str]], where: Mapping[str, str], sizes: Mapping[str, torch.Size]
) -> None:
    from safetensors import safe_open

    for entry, name in listed:
        found: tuple[int, ...] | None = None
        if name in where:
            with safe_open(folder / where[name], framework="pt") as file:
                found = tuple(file.get_slice(name).get_shape())
        if found != entry.shape(sizes):
            raise StaleError(
                "FACTS_DIFFER",
                f"{name} in {shown(str(folder))} is {found or 'missing'}; the plan's model has {entry.shape(sizes)}.",
                flag="folder",
                value=name,
                hint="Name the weights of the model that was planned.",
            )
