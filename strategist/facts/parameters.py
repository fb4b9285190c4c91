"""How many parameters a model has: what its layers hold plus what lies before and after them. There is no second count."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from strategist.facts.layers import Matrix, build_layer, norm_size
from strategist.facts.model import ModelShape, layer_counts
from strategist.records import dataclass, names_of, replace


@dataclass(frozen=True, slots=True)
class Parameters:
    """`total` weights; `active` ones that a single token meets; `embedding` ones of the token table and output head."""

    total: int
    active: int
    embedding: int


def without_adapters(shape: ModelShape) -> ModelShape:
    """The model as it was before adapters were put beside its matrices."""
    return shape if shape.adapters is None else replace(shape, adapters=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterParameters:
    """Weights outside the layers, by part. A tied output head shares the token table and counts nothing here.

    embedding: the token table. projection: maps between its width and the model's. position: learned positions and
    relative-position tables. embedding_norm: norms right after the embedding. input: patch or audio front end, class
    token, time and label embeddings. final_norm: norms after the last layer. head: output head with its bias, or the
    classifier. extra: weights that no field of the shape explains (poolers, masked-language heads, further towers).
    """

    embedding: int = 0
    projection: int = 0
    position: int = 0
    embedding_norm: int = 0
    input: int = 0
    final_norm: int = 0
    head: int = 0
    extra: int = 0

    @property
    def before(self) -> int:
        """Weights in front of the first layer."""
        return self.embedding + self.projection + self.position + self.embedding_norm + self.input

    @property
    def after(self) -> int:
        """Weights behind the last layer."""
        return self.final_norm + self.head + self.extra

    @property
    def total(self) -> int:
        """All weights outside the layers."""
        return sum(getattr(self, name) for name in names_of(type(self)))


@cache
def count(shape: ModelShape) -> Parameters:
    """The parameters of a model: the sum over its layers (`build_layer`) and the outer parts."""
    layers = [(build_layer(shape, kind), number) for kind, number in layer_counts(shape).items()]
    outer = outer_parameters(shape)
    total = outer.total + sum(layer.parameters * number for layer, number in layers)
    idle = sum((layer.parameters - layer.active_parameters) * number for layer, number in layers)
    return Parameters(total, total - idle, outer.embedding + _table_projection(shape) + _output_head(shape))


@cache
def hidden_matrices(shape: ModelShape) -> int:
    """Elements of the matrices inside the layers, biases left out: what Muon updates."""
    return over_matrices(shape, lambda matrix: matrix.copies * matrix.weights)


def over_matrices(shape: ModelShape, size: Callable[[Matrix], int]) -> int:
    """The sum of a size over the matrices of all layers."""
    return sum(
        number * size(matrix)
        for kind, number in layer_counts(shape).items()
        for matrix in build_layer(shape, kind).matrices
    )


@cache
def outer_parameters(shape: ModelShape) -> OuterParameters:
    """What lies outside the layers, by part."""
    stacks = 2 if shape.formula == "encdec" else 1
    norm = stacks * norm_size(shape, shape.hidden)
    return OuterParameters(
        embedding=shape.vocab * table_width(shape),
        projection=_table_projection(shape),
        position=_positions(shape),
        embedding_norm=norm if shape.embed_norm else 0,
        input=_front_end(shape),
        final_norm=norm if shape.final_norm else 0,
        head=_output_head(shape) + _classifier(shape),
        extra=shape.extra_parameters,
    )


def behind_head(shape: ModelShape) -> int:
    """What lies behind the layers and is no matrix of the vocabulary; below zero where the shape counts more weights than there are."""
    after = outer_parameters(shape).after
    return after if shape.tied else after - shape.vocab * table_width(shape)


def table_width(shape: ModelShape) -> int:
    """Width of one row of the token table."""
    if shape.kind == "dual-encoder":
        return dict(shape.extra).get("text_hidden", shape.hidden)
    return shape.emb_dim or shape.hidden


def _table_projection(shape: ModelShape) -> int:
    """Maps into and out of a token table of another width (OPT-350M), without biases."""
    return 2 * shape.emb_dim * shape.hidden if shape.emb_dim not in (0, shape.hidden) else 0


def _output_head(shape: ModelShape) -> int:
    weights = 0 if shape.tied else shape.vocab * table_width(shape)
    return weights + (shape.vocab if shape.lm_head_bias else 0)


def position_tables(shape: ModelShape) -> tuple[int, ...]:
    """Rows of each table of learned positions: one for each half of an encoder with a decoder. That of sound has sines in front."""
    if shape.pos != "learned":
        return ()
    in_front = dict(shape.extra).get("enc_pos_rows", 0) if shape.kind == "encdec" else 0
    return tuple(rows for rows in (in_front, shape.pos_rows) if rows)


def _positions(shape: ModelShape) -> int:
    extra = dict(shape.extra)
    rows = shape.pos_rows + extra.get("enc_pos_rows", 0)
    relative = 2 * extra.get("rel_buckets", 0) * shape.heads  # one table for the encoder, one for the decoder
    fixed_grid = (extra["input"] // extra["patch"]) ** 2 if shape.formula == "dit" else 0
    return (rows + fixed_grid) * shape.hidden + relative


def _front_end(shape: ModelShape) -> int:
    """Patches (ViT, DiT) or two convolutions over the spectrum (Whisper), and what is added to their output."""
    extra, h = dict(shape.extra), shape.hidden
    if shape.formula == "vit":
        return extra["channels"] * extra["patch"] ** 2 * h + h + extra.get("cls", 1) * h
    if shape.formula == "dit":  # patches, a time embedding through a two-layer map, a table of labels and "no label"
        patches = extra["channels"] * extra["patch"] ** 2 * h + h
        return patches + 256 * h + h + h * h + h + (extra["classes"] + 1) * h
    mel = extra.get("mel", 0)
    return 3 * mel * h + h + 3 * h * h + h if mel else 0


def _classifier(shape: ModelShape) -> int:
    extra, h = dict(shape.extra), shape.hidden
    if shape.formula in ("vit", "resnet"):
        return extra["classes"] * (h + extra.get("head_bias", 1))
    if shape.formula == "dit":  # a last modulation of shift and scale, then noise and variance for every pixel
        pixels = extra["patch"] ** 2 * 2 * extra["channels"]
        return 2 * h * h + 2 * h + h * pixels + pixels
    return 0
