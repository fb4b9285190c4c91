"""SkyPilot's own Task takes every file and reads the plan's machines from it."""

from __future__ import annotations

from pathlib import Path

import pytest
import sky
import yaml
from sky.utils import schemas
from sky.utils.gpu_names import CANONICAL_GPU_NAMES

from strategist.catalog import rows
from strategist.readers.foreign import keys_of
from tests.emitters.grid import distinct


@pytest.mark.proves("parsed")
@pytest.mark.parametrize("target", ["skypilot"])
def test_skypilot_takes_every_file(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Task reads each file beside the job and has its nodes, its command, and devices or processors."""
    monkeypatch.chdir(tmp_path)
    kinds = set()
    for text, world in distinct(target, "task.yaml"):
        document = yaml.safe_load(text)
        task = sky.Task.from_yaml_config(yaml.safe_load(text))  # which takes the document apart
        (resources,) = task.resources
        assert (task.name, task.num_nodes, task.run) == ("strategist", 1, document["run"])
        kinds.add(next(iter(document["resources"])))
        if "accelerators" in document["resources"]:
            assert resources.accelerators == {"H100": world}
        else:
            assert resources.cpus == f"{world}+"
    assert kinds == {"accelerators", "cpus"}


@pytest.mark.proves("parsed")
@pytest.mark.parametrize("target", ["skypilot"])
@pytest.mark.parametrize("place", ["task", "resources"])
def test_skypilot_refuses_a_misspelt_key(
    target: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader that takes our files refuses a key that is none of its own, at both levels."""
    monkeypatch.chdir(tmp_path)
    document = yaml.safe_load(distinct(target, "task.yaml")[0][0])
    (document if place == "task" else document["resources"])["num_node"] = 1
    with pytest.raises(ValueError, match="num_node"):
        sky.Task.from_yaml_config(document)


@pytest.mark.proves("parsed")
@pytest.mark.parametrize("target", ["skypilot"])
def test_accelerators_are_skypilots(target: str) -> None:
    """Each name that a GPU of the catalogue gets is one of SkyPilot's."""
    assert {row["accelerator"] for row in rows("skypilot_accelerators")} <= set(CANONICAL_GPU_NAMES)


def test_our_tables_are_skypilots() -> None:
    """The keys that we know of a task and its resources are the properties of SkyPilot's schemas, but for inner ones."""
    resources = schemas.get_resources_schema()["properties"]
    own = {
        "": schemas.get_task_schema()["properties"],
        "resources": resources,
        "resources.any_of.*": resources["any_of"]["items"]["properties"],
        "resources.ordered.*": resources["ordered"]["items"]["properties"],
    }
    for place, names in own.items():
        assert set(keys_of("skypilot", place)) == {name for name in names if not name.startswith("_")}
