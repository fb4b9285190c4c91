"""Names find exactly one GPU or node, or say why not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategist.catalog import rows
from strategist.errors import ImpossibleError, InputError
from strategist.facts.gpus import backend_of, find_gpu, gpu_by_id, gpus, possible_gpus
from strategist.facts.lookup import MOST_WORDS, words
from strategist.facts.nodes import find_node, nodes, reference_node

GPU_NAMES = [name for row in rows("gpus") for name in (row["name"], *row.get("aliases", ()))]
NODE_NAMES = [name for row in rows("nodes") for name in (row["name"], *row.get("aliases", ()))]


@st.composite
def respelled(draw: st.DrawFn, names: list[str]) -> tuple[str, str]:
    """A known name and the same name with other case and separators."""
    name = draw(st.sampled_from(names))
    out = ""
    for character in name:
        if character in " -_":
            out += draw(st.sampled_from(["", " ", "-", "_", "--"]))
        else:
            out += draw(st.sampled_from([character.lower(), character.upper(), f"{character}-"]))
    return name, out


@given(respelled(GPU_NAMES))
def test_spelling_does_not_change_the_gpu(pair: tuple[str, str]) -> None:
    """Case, blanks, dashes and underscores never change which GPU a name means, and such a name assumes nothing."""
    known, spelled = pair
    assert find_gpu(spelled) == find_gpu(known)
    assert find_gpu(spelled).assumed is None


@given(respelled(NODE_NAMES))
def test_spelling_does_not_change_the_node(pair: tuple[str, str]) -> None:
    """Case, blanks, dashes and underscores never change which node type a name means."""
    known, spelled = pair
    assert find_node(spelled) == find_node(known)
    assert find_node(spelled).assumed is None


@given(st.sampled_from([row["name"] for row in rows("gpus")]).flatmap(lambda name: st.permutations(words(name))))
def test_words_of_a_name_may_stand_in_any_order(some: list[str]) -> None:
    """Somebody's 80GB H100 SXM is a card of the catalogue, or one of those that are named because it is not clear which."""
    meant = [row["name"] for row in rows("gpus") if sorted(words(row["name"])) == sorted(some)]
    found = possible_gpus(" ".join(some))
    assert set(meant) <= set(found) or len(some) > MOST_WORDS


@given(st.sampled_from(["h100", "a100-sxm-80", "mi300", "a100-40", "rtx", "gb10"]), st.randoms())
def test_spelling_does_not_change_short_names_either(name: str, random: object) -> None:
    """A shortened name with other separators has the same answer, found or ambiguous."""
    spelled = "-".join(name.replace("-", "")).upper()
    outcomes = []
    for said in (name, spelled):
        try:
            outcomes.append(find_gpu(said).value.name)
        except InputError as error:
            outcomes.append(error.code + error.message.partition("fits")[2])
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(
    ("said", "name"),
    [("h100", "h100-sxm-80gb"), ("H200", "h200-sxm-141gb"), ("b200", "b200-sxm-180gb"), ("h100-sxm", "h100-sxm-80gb"),
     ("a100-sxm-80", "a100-sxm-80gb"), ("H100 NVL", "h100-nvl-94gb"), ("h20", "h20-96gb"), ("b300", "b300-sxm-288gb"),
     ("80GB H100 SXM", "h100-sxm-80gb"), ("h100 80gb sxm5", "h100-sxm-80gb"), ("40gb a100 pcie", "a100-pcie-40gb")],
)  # fmt: skip
def test_short_names_are_found_and_reported(said: str, name: str) -> None:
    """A shorthand of the closed list, and a name that fits one row only, is found and says what it was taken for."""
    found = find_gpu(said)
    assert found.value.name == name
    assert found.assumed is not None
    assert name in found.assumed


@pytest.mark.parametrize(
    ("said", "name"),
    [("rtx 4090", "rtx-4090"), ("NVIDIA H100 80GB HBM3", "h100-sxm-80gb"), ("Tesla V100-SXM3-32GB", "v100-sxm2-32gb"), ("cpu", "cpu"), ("L40", "l40"), ("h100-sxm5-80gb", "h100-sxm-80gb")],
)  # fmt: skip
def test_full_names_and_aliases_assume_nothing(said: str, name: str) -> None:
    """Canonical names, driver names and aliases are exact."""
    assert find_gpu(said).value.name == name
    assert find_gpu(said).assumed is None


@pytest.mark.parametrize(
    ("said", "choices"),
    [("a100", ["a100-pcie-40gb", "a100-pcie-80gb", "a100-sxm-40gb", "a100-sxm-64gb", "a100-sxm-80gb"]),
     ("a100-40", ["a100-pcie-40gb", "a100-sxm-40gb"]),
     ("v100", ["v100-sxm2-16gb", "v100-sxm2-32gb", "v100-pcie-16gb", "v100-pcie-32gb"]), ("mi300", ["mi300a", "mi300x"])],
)  # fmt: skip
def test_names_that_fit_several_rows_are_refused(said: str, choices: list[str]) -> None:
    """A name that fits several rows is ambiguous, and every choice is named."""
    with pytest.raises(InputError) as caught:
        find_gpu(said)
    assert caught.value.code == "AMBIGUOUS"
    assert all(choice in caught.value.message for choice in choices)
    assert f"fits {len(choices)} rows" in caught.value.message


@pytest.mark.parametrize(
    ("said", "code"),
    [("h101-sxm-80gb", "UNKNOWN_GPU"), ("", "EMPTY"), ("  ", "EMPTY"), ("h100\x1b[2J", "CONTROL_CHAR"), ("h100‮", "CONTROL_CHAR"), ("x" * 300, "NAME_TOO_LONG")],
)  # fmt: skip
def test_other_names_are_errors(said: str, code: str) -> None:
    """Unknown, empty, hostile and endless names are refused, never guessed, and echoed only in a safe form."""
    with pytest.raises(InputError) as caught:
        find_gpu(said)
    assert caught.value.code == code
    assert "\x1b" not in caught.value.message + str(caught.value.value)


def test_unknown_names_come_with_near_ones() -> None:
    """An unknown name is answered with up to three near ones and with where all of them are listed."""
    with pytest.raises(InputError) as caught:
        find_gpu("h101-sxm-80gb")
    assert "h100-sxm-80gb" in str(caught.value.hint)
    assert "h101-sxm-80gb" in caught.value.message
    assert "catalog gpus" in str(caught.value.hint)
    with pytest.raises(InputError) as caught:
        find_node("dgx-h101")
    assert (caught.value.code, "dgx-h100" in str(caught.value.hint)) == ("UNKNOWN_NODE", True)


@given(st.text(max_size=40))
def test_no_text_breaks_the_lookup(text: str) -> None:
    """Any text finds a GPU or raises an input error of the closed list."""
    try:
        assert find_gpu(text).value in gpus()
    except InputError as error:
        assert error.code in ("UNKNOWN_GPU", "AMBIGUOUS", "EMPTY", "CONTROL_CHAR", "NAME_TOO_LONG")


def test_nodes_are_found_without_their_provider() -> None:
    """A cloud node is found with and without its provider's name; a bare name that fits several is ambiguous."""
    assert find_node("p4d.24xlarge").value.name == "aws-p4d.24xlarge"
    assert find_node("AWS p4d.24xlarge").value.name == "aws-p4d.24xlarge"
    with pytest.raises(InputError) as caught:
        find_node("8x-h100")
    assert caught.value.code == "AMBIGUOUS"
    assert "nebius-8x-h100" in caught.value.message


def test_reference_nodes_have_the_asked_cards() -> None:
    """The reference node of a GPU has that GPU and count, and vendor systems go before cloud nodes; rows of one computing
    centre and parts of machines stand for a GPU only where no other row carries it."""
    placed = {row["name"] for row in rows("nodes") if row["kind"] in ("site", "part")}
    free = {node.gpu.name for node in nodes() if node.name not in placed}
    for node in nodes():
        if node.name in placed and node.gpu.name in free:
            continue
        reference = reference_node(node.gpu.name, node.gpus)
        assert reference is not None
        assert (reference.gpu.name, reference.gpus) == (node.gpu.name, node.gpus)
    chosen = reference_node("h100-sxm-80gb", 8)
    assert chosen is not None
    assert chosen.name == "dgx-h100"
    assert reference_node("h100-sxm-80gb", 3) is None
    for gpu, gpus_, name in (("l4", 1, None), ("a100-sxm-40gb", 4, "hgx-a100-4-40gb"), ("a100-sxm-80gb", 4, "hgx-a100-4"), ("a100-sxm-64gb", 4, "leonardo-booster")):  # fmt: skip
        found = reference_node(gpu, gpus_)
        assert (found and found.name) == name


@pytest.mark.parametrize(
    ("said", "name"),
    [("V100-PCIE-32GB", "v100-pcie-32gb"), ("RTX 4060", "rtx-4060"), ("RTX 2080", "rtx-2080"), ("L2", "l2"), ("h20 141gb", "h20-141gb"),
     ("NVIDIA GeForce RTX 4070 Ti SUPER", "rtx-4070ti-super"), ("H800 PCIe", "h800-pcie-80gb")],
)  # fmt: skip
def test_a_card_is_not_taken_for_its_larger_sister(said: str, name: str) -> None:
    """A V100 was taken for a V100S, a 4060 of 8 GB for a 4060 Ti of 16 GB, an L2 for an L20, an H20 for an H200."""
    assert find_gpu(said).value.name == name


def test_numbers_of_names_are_not_cut() -> None:
    """What is short of a digit, or of letters that make another product, is an unknown name with near ones."""
    for said in ("gtx-1080", "rtx-309", "v100s-pcie-3"):
        with pytest.raises(InputError) as caught:
            find_gpu(said)
        assert caught.value.code == "UNKNOWN_GPU", said
    with pytest.raises(InputError) as caught:
        find_node("g2-standard-3")
    assert caught.value.code == "UNKNOWN_NODE"
    assert find_node("g2-standard-4").value.gpus == 1


@pytest.mark.parametrize(
    ("said", "name"),
    [("GeForce RTX 3090", "rtx-3090"), ("nvidia-h100-nvl-94gb", "h100-nvl-94gb"), ("NVIDIA RTX 4090", "rtx-4090"), ("nvidia-tesla-t4", "t4"),
     ("NVIDIA L4", "l4"), ("AMD MI300X", "mi300x"), ("Radeon RX 7900 XTX", "rx-7900-xtx"), ("Instinct MI210", "mi210"), ("nvidia-h100", "h100-sxm-80gb")],
)  # fmt: skip
def test_brands_may_stand_before_a_name(said: str, name: str) -> None:
    """Drivers, schedulers and shops write a maker's brands before a card's name."""
    assert find_gpu(said).value.name == name


@pytest.mark.parametrize(
    "said", ["AMD H100", "NVIDIA MI300X", "Radeon RTX 4090", "NVIDIA", "GeForce RTX 4060 Laptop GPU"]
)
def test_a_brand_of_another_maker_is_no_name(said: str) -> None:
    """Nor are brands alone, nor a card of another form."""
    with pytest.raises(InputError) as caught:
        find_gpu(said)
    assert caught.value.code == "UNKNOWN_GPU"


@pytest.mark.parametrize(
    ("said", "name", "gpus_"),
    [("Standard_ND96isr_H100_v5", "azure-nd96isr_h100_v5", 8), ("Standard_ND96asr_v4", "azure-nd96asr_a100_v4", 8), ("ml.p4d.24xlarge", "aws-p4d.24xlarge", 8),
     ("ml.g5.xlarge", "aws-g5.xlarge", 1), ("g6e.24xlarge", "aws-g6e.24xlarge", 4), ("gd-8xh100ib-i128", "coreweave-8x-h100", 8), ("gpu_8x_h100_sxm5", "lambda-8x-h100", 8),
     ("BM.GPU.B4.8", "oci-bm.gpu4.8", 8), ("hgx-b200", "hgx-b200-8", 8), ("perlmutter", "perlmutter-gpu", 4), ("lumi", "mi250x-node-frontier-like", 8)],
)  # fmt: skip
def test_nodes_are_found_by_their_providers_own_names(said: str, name: str, gpus_: int) -> None:
    """Names as Azure, SageMaker, CoreWeave, Lambda, Oracle and computing centres print them."""
    found = find_node(said)
    assert (found.value.name, found.value.gpus) == (name, gpus_)


def test_a_card_of_servers_stands_in_a_server_and_not_under_a_desk() -> None:
    """NVIDIA sells the A100 of 80 GB in stations of four, too, which are joined by 20 Gb/s."""
    usual = reference_node("a100-sxm-80gb")
    assert usual is not None and (usual.name, usual.gpus) == ("dgx-a100-80gb", 8)


def test_backends_are_known_for_devices_torch_drives() -> None:
    """NVIDIA and AMD cards use nccl, CPU ranks gloo, and anything else is impossible with a sentence."""
    assert backend_of(gpu_by_id("h100-sxm-80gb")) == "nccl"
    assert backend_of(gpu_by_id("mi300x")) == "nccl"
    assert backend_of(gpu_by_id("cpu")) == "gloo"
    for name in ("tpu-v5p", "trainium2", "gaudi3"):
        with pytest.raises(ImpossibleError) as caught:
            backend_of(gpu_by_id(name))
        assert (caught.value.code, caught.value.exit_code) == ("UNSUPPORTED_DEVICE", 3)
        assert gpu_by_id(name).title in caught.value.message
