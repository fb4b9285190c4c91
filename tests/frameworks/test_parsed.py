"""The frameworks' own parsers take every emitted file, and every key is one that they know, also where they do not look."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch.distributed as dist
import yaml

from strategist import emit
from strategist.document.plan import NumberFormats
from strategist.emitters.emitter import Options
from strategist.emitters.zero_plus_plus import WORDS as ZEROPP
from strategist.readers.foreign import keys_of
from tests.emitters.grid import COMMON, distinct, each_once, plan_for, plan_on, written

Text = dict[str, Any]


def launch_arguments(path: Path) -> Any:
    """What `accelerate launch` makes of a file."""
    from accelerate.commands.config import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    load_config_from_file(str(path))
    arguments, *_ = _validate_launch_command(
        launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    )
    return arguments


@pytest.mark.proves("parsed")
@pytest.mark.parametrize("target", ["accelerate"])
def test_accelerate_takes_every_file(target: str, tmp_path: Path, clean_environment: pytest.MonkeyPatch) -> None:
    """accelerate launch accepts each file, builds FSDP2's plugin from it, and has every nested key as an option."""
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.launch import prepare_multi_gpu_env

    known = {action.dest for action in launch_command_parser()._actions}
    kinds = set()
    for text, world in distinct(target, "accelerate.yaml"):
        path = tmp_path / "accelerate.yaml"
        path.write_text(text, encoding="utf-8")
        arguments, document = launch_arguments(path), yaml.safe_load(text)
        kinds.add(document["distributed_type"])
        assert arguments.num_processes == world
        assert unknown_keys(document, known) == set()
        if document["distributed_type"] == "FSDP":
            for name, value in prepare_multi_gpu_env(arguments).items():
                clean_environment.setenv(name, value)
            plugin = FullyShardedDataParallelPlugin()
            section = document["fsdp_config"]
            assert (plugin.fsdp_version, plugin.reshard_after_forward) == (2, section["fsdp_reshard_after_forward"])
            assert plugin.activation_checkpointing == section["fsdp_activation_checkpointing"]
    assert kinds == {"NO", "MULTI_GPU", "FSDP", "DEEPSPEED"}


def unknown_keys(document: Text, known: set[str]) -> set[str]:
    """Keys of the sections that are no option of the launcher: Accelerate itself takes any."""
    sections = [value for value in document.values() if isinstance(value, dict)]
    return {key for section in sections for key in section} - known


def test_a_misspelt_key_of_accelerate_would_be_seen() -> None:
    """Accelerate swallows a nested typo; the check above does not."""
    from accelerate.commands.launch import launch_command_parser

    known = {action.dest for action in launch_command_parser()._actions}
    assert unknown_keys({"fsdp_config": {"fsdp_verison": 2, "fsdp_version": 2}}, known) == {"fsdp_verison"}


@dataclasses.dataclass
class DataParallel:
    """What DeepSpeedConfig asks for the number of ranks with sequences of their own; without it, it assumes one."""

    world: int

    def get_data_parallel_world_size(self) -> int:
        return self.world


@pytest.fixture
def fake_ranks() -> Iterator[None]:
    """A process group of this process alone that says it has eight, so that DeepSpeed asks how many there are."""
    import deepspeed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    deepspeed.init_distributed(dist_backend="fake", verbose=False)
    yield
    deepspeed.comm.destroy_process_group()


def deepspeed_files() -> list[tuple[str, int]]:
    """The different files of the targets that write one, one with a drive, and one with all of ZeRO++."""
    plan = plan_for(**COMMON | {"dp_shard": 2, "zero": 3, "offload": "nvme"})
    on_drive = emit(plan, "deepspeed", Options(nvme_path="/local_nvme"))[PurePosixPath("deepspeed.json")]
    halves = NumberFormats(**dict.fromkeys(("parameter", "gradient", "reduce", "compute"), "float16"), master="float32")
    more = emit(plan_on(2, 4, **COMMON | {"formats": halves}), "deepspeed", Options(zeropp=ZEROPP))[
        PurePosixPath("deepspeed.json")
    ]
    files = (
        *distinct("deepspeed", "deepspeed.json"),
        *distinct("accelerate", "deepspeed.json"),
        (on_drive, 2),
        (more, 8),
    )
    return sorted(set(files))


@pytest.mark.proves("parsed")
@pytest.mark.parametrize("target", ["deepspeed"])
def test_deepspeed_takes_every_file(target: str, fake_ranks: None) -> None:
    """DeepSpeedConfig accepts each file at its number of ranks and reads the numbers that stand in it: ranks that share sequences
    (sequence_parallel_size) or tensors (autotp_size) are one replica to it."""
    from deepspeed.runtime.config import DeepSpeedConfig

    known = deepspeed_keys()
    assert distinct(target, "deepspeed.json")
    for text, world in deepspeed_files():
        document = json.loads(text)
        tensors = document.get("tensor_parallel", {"autotp_size": 1})["autotp_size"]
        replicas = world // document.get("sequence_parallel_size", 1) // tensors
        read = DeepSpeedConfig(document, mpu=DataParallel(replicas))
        assert read.train_batch_size == document["train_batch_size"]
        assert (
            read.train_micro_batch_size_per_gpu * read.gradient_accumulation_steps * replicas == read.train_batch_size
        )
        assert (read.zero_optimization_stage, read.gradient_clipping) == (document["zero_optimization"]["stage"], 1.0)
        assert tensors == 1 or (
            read.tensor_parallel_config.autotp_size,
            read.tensor_parallel_config.vocab_parallel_lm_head,
        ) == (tensors, True)
        assert set(document) <= known
        zero = document["zero_optimization"]
        assert read.zero_config.zero_hpz_partition_size == zero.get("zero_hpz_partition_size", 1)
        for key in ("zero_quantized_weights", "zero_quantized_gradients"):
            assert getattr(read.zero_config, key) == zero.get(key, False)
        if "aio" in document:
            assert read.aio_config | document["aio"] == read.aio_config
            assert str(read.zero_config.offload_optimizer.nvme_path) == "/local_nvme"
            assert set(document["aio"]) <= table("deepspeed", "aio")
    assert "train_batch_sise" not in known


def deepspeed_keys() -> set[str]:
    """Texts that DeepSpeed's configuration names, or has in its code: it ignores top-level keys that are none of them."""
    from deepspeed.runtime import config, constants, precision_config
    from deepspeed.runtime.swap_tensor import constants as of_drives
    from deepspeed.runtime.tensor_parallel.config import get_tensor_parallel_config
    from deepspeed.runtime.zero import config as zero

    modules = (config, constants, precision_config, zero, of_drives)
    named = {value for module in modules for value in vars(module).values() if isinstance(value, str)}
    code = ast.walk(ast.parse(inspect.getsource(config)))
    written = {node.value for node in code if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return named | written | literals(get_tensor_parallel_config)


@pytest.mark.proves("parsed")
@pytest.mark.parametrize("target", ["deepspeed"])
@pytest.mark.parametrize("change", [{"train_batch_size": 7}, {"zero_optimization": {"stage": 2, "stge": 1}}])
def test_deepspeed_refuses_what_is_wrong(target: str, change: Text, fake_ranks: None) -> None:
    """The parser that takes our files refuses a batch that is no product and a misspelt key of ZeRO."""
    from deepspeed.runtime.config import DeepSpeedConfig

    text, world = distinct(target, "deepspeed.json")[0]
    with pytest.raises((AssertionError, ValueError)):
        DeepSpeedConfig(json.loads(text) | change, mpu=DataParallel(world))


MIXTURES = ("mixtral", "qwen3_moe", "deepseek_v3", "olmoe", "gpt_oss")


@pytest.mark.proves("parsed")
@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("target", ["deepspeed", "accelerate", "fabric", "trainer"])
def test_deepspeed_gathers_mixtures_whole(target: str, family: str) -> None:
    """What each script does to a model marks its mixtures as DeepSpeed's leaf modules, one a layer that has experts, and nothing below."""
    import torch
    from deepspeed.utils import get_z3_leaf_modules
    from transformers import AutoConfig, AutoModelForCausalLM

    scripts = [files[PurePosixPath("train.py")] for _, files in written(target)]
    mark = next(
        node
        for script in scripts
        for node in ast.walk(ast.parse(script))
        if isinstance(node, ast.FunctionDef) and node.name == "keep_mixtures_whole"
    )
    names: Text = {"strategy": {"zero": 3}, "plan": {"model": {"moe": {}}}}
    exec(compile(ast.Module([mark], []), "train.py", "exec"), names)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, num_hidden_layers=4))
    names["keep_mixtures_whole"](model)
    leaves = get_z3_leaf_modules(model)
    with_experts = [name for name, _ in model.named_modules() if name.endswith(".experts")]
    assert len(leaves) == len(with_experts) > 0
    names["plan"] = {"model": {"moe": None}}
    names["keep_mixtures_whole"](torch.nn.Linear(2, 2))  # models without experts are left alone


@pytest.mark.proves("parsed")
@pytest.mark.parametrize(("target", "name"), [("transformers", "training.json"), ("trl", "sft.json")])
def test_transformers_takes_every_file(
    target: str, name: str, tmp_path: Path, clean_environment: pytest.MonkeyPatch
) -> None:
    """HfArgumentParser refuses unknown arguments and takes ours; keys of fsdp_config are those that its code reads."""
    from transformers import HfArgumentParser, TrainingArguments
    from trl import SFTConfig

    clean_environment.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)  # no GPU is here
    known = literals(TrainingArguments._process_fsdp_args)
    sharded = 0
    kind = TrainingArguments if target == "transformers" else SFTConfig
    for text, _ in distinct(target, name):
        document = json.loads(text)
        (read,) = HfArgumentParser(kind).parse_dict(document | {"output_dir": str(tmp_path)})
        own = ("max_length", "packing", "gradient_checkpointing") if target == "trl" else ()
        for field in (
            *own,
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "bf16",
            "fp16",
            "torch_compile",
        ):
            assert getattr(read, field) == document[field]
        assert set(document.get("fsdp_config", ())) <= known
        sharded += bool(document.get("fsdp"))
    assert sharded > 3
    assert "reshard_after_foward" not in known


def literals(function: Any) -> set[str]:
    """Every text in the source of a function."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


@pytest.mark.proves("parsed")
@pytest.mark.parametrize("target", ["fabric", "trainer"])
def test_lightning_has_every_name_that_scripts_import(target: str) -> None:
    """Each name that a script imports is there, and each word that it gives to Fabric, Trainer or a strategy is a parameter."""
    import importlib

    import lightning

    scripts = {files[PurePosixPath("train.py")] for _, files in written(target)}
    assert len(scripts) == 2
    for script in scripts:
        tree, found = ast.parse(script), dict[str, Any]()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                module = importlib.import_module(node.module)
                assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []
                found |= {alias.name: getattr(module, alias.name) for alias in node.names}
        maker, name = (lightning.Fabric, "Fabric") if target == "fabric" else (lightning.Trainer, "Trainer")
        sharding = "DeepSpeedStrategy" if "DeepSpeedStrategy" in found else "ModelParallelStrategy"
        for words, function in ((keywords(tree, name), maker), (keywords(tree, sharding), found[sharding])):
            assert words <= set(inspect.signature(function).parameters)
            assert words


@pytest.mark.proves("parsed")
@pytest.mark.parametrize("target", ["fabric", "trainer"])
def test_lightnings_strategy_takes_every_file_of_deepspeed(target: str) -> None:
    """The strategy is built from each deepspeed.json and knows its stage; the file is the one that the deepspeed target writes."""
    from lightning.fabric.strategies import DeepSpeedStrategy as FabricStrategy
    from lightning.pytorch.strategies import DeepSpeedStrategy as TrainerStrategy

    of_deepspeed = {text for text, _ in distinct("deepspeed", "deepspeed.json")}
    stages = set()
    for plan, files in each_once(target, "deepspeed.json"):
        text = files[PurePosixPath("deepspeed.json")]
        made = (FabricStrategy if target == "fabric" else TrainerStrategy)(config=json.loads(text))
        assert made.zero_stage_3 == (plan.strategy.zero == 3)
        assert text in of_deepspeed
        stages.add(plan.strategy.zero)
    assert stages == {1, 2, 3}


def keywords(tree: ast.AST, name: str) -> set[str]:
    """The words that a script gives to a call by name."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name))
    return {word.arg for call in calls if call.func.id == name for word in call.keywords if word.arg}  # type: ignore[attr-defined]


def table(framework: str, section: str = "") -> set[str]:
    """Keys that our readers know in a section of a framework's files."""
    return set(keys_of(framework, section))


def test_our_table_of_accelerate_is_its_parser() -> None:
    """The keys of Accelerate's file and of its sections are the fields and options of the installed one."""
    from accelerate.commands.config import config_args
    from accelerate.commands.launch import launch_command_parser

    own = {
        field.name for kind in (config_args.BaseConfig, config_args.ClusterConfig) for field in dataclasses.fields(kind)
    }
    options = {action.dest for action in launch_command_parser()._actions}
    assert table("accelerate") == own
    for section, prefix in (("fsdp_config", "fsdp_"), ("parallelism_config", "parallelism_config_")):
        assert table("accelerate", section) == {name for name in options if name.startswith(prefix)}


def test_our_table_of_deepspeed_is_its_models() -> None:
    """The keys of DeepSpeed's sections are the fields of its models, and those of the top level are named in its code."""
    from deepspeed.runtime import config
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    models = {"zero_optimization": DeepSpeedZeroConfig, "bf16": DeepSpeedBF16Config, "fp16": DeepSpeedFP16Config}
    for section, model in models.items():
        fields = {name for key, field in model.model_fields.items() for name in (key, field.alias) if name}
        assert table("deepspeed", section) == fields
    assert table("deepspeed", "aio") == set(AIO_DEFAULT_DICT)
    assert {"train_batch_size", "zero_optimization", "gradient_clipping"} <= table("deepspeed")
    assert set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS) == table("deepspeed", "removed")
    assert set(config._REMOVED_ZERO_CONFIG_KEYS) == table("deepspeed", "zero_optimization removed")


def test_our_table_of_transformers_is_its_arguments() -> None:
    """The keys of TrainingArguments are its fields, and those of fsdp_config are named in its code."""
    from transformers import TrainingArguments

    assert table("transformers") == {field.name for field in dataclasses.fields(TrainingArguments) if field.init}
    assert table("transformers", "fsdp_config") <= literals(TrainingArguments._process_fsdp_args)


def test_our_table_of_a_distributed_config_is_its_fields() -> None:
    """DistributedConfig.from_dict drops what is none of its fields; our table has exactly these."""
    from transformers.distributed import DistributedConfig

    assert table("transformers-distributed") == {field.name for field in dataclasses.fields(DistributedConfig)}


@pytest.mark.proves("parsed")
@pytest.mark.parametrize("target", ["accelerate", "transformers", "trl"])
def test_a_distributed_config_is_read_whole(target: str) -> None:
    """Every file becomes a DistributedConfig with its values, for as many ranks as the plan has."""
    from transformers.distributed import DistributedConfig

    files = distinct(target, "distributed.json")
    assert len(files) >= 3
    for text, world in files:
        document = json.loads(text)
        config = DistributedConfig.from_dict(document)
        assert {name: getattr(config, name) for name in document} == document
        assert config.dp_size * config.tp_size == world
