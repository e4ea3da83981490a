# SPDX-License-Identifier: Apache-2.0
"""Bytes of operators on a rank, from sizes: activations kept for the backward, and memory traffic of a step; pure."""

from __future__ import annotations

from typing import NamedTuple

from accel.errors import ConfigError
from accel.estimate._model import Latent, Model, Tower, Transformer, sizes_of
from accel.estimate._step import (
    OPTIMIZERS,
    Engine,
    EstimatedStep,
    HeldParameters,
    divides_logits,
    formats,
    own_heads,
    stream_bytes,
    tower_side,
)
from accel.topology import Axes, Plan

_FP32 = 4


class KeptBlock(NamedTuple):
    """Bytes of a micro-batch in a block."""

    whole: int  # of all that it keeps
    entry: int  # of its input, which it keeps where it computes again in backward
    products: int = 0  # of outputs of matmuls and attention


_LEAST_ROWS = 256  # of a chunk of deferred logits


class Kept(NamedTuple):
    """Bytes of a micro-batch."""

    block: KeptBlock  # of one block
    dense: KeptBlock  # of one with an MLP in the place of experts; as `block` where there are none
    ends: int  # of modules behind the blocks, without the logits
    logits: int  # of the logits, until their backward is done
    peak: int  # further ones while the loss's backward computes
    inside: int  # further ones while a block's backward computes
    # Of parameters in the compute dtype, if a forward has been measured; None if they are computed.
    copies: int | None = None
    # Of a block of an encoder of images, and the number of those that are used; None without one.
    tower: tuple[int, KeptBlock] | None = None
    around: int = 0  # of modules before and behind the encoder's blocks


def kept_by(
    model: Model | Transformer, axes: Axes, plan: Plan, step: EstimatedStep, engine: Engine, blocks: int
) -> Kept:
    """Return what one micro-batch keeps on a rank with so many blocks: by sizes, or as measured in equal parts.

    `fully_shard` gives autocast parameters in the compute dtype, other engines fp32 ones.
    """
    sizes = sizes_of(model)
    if step.keep and sizes is None:
        raise ConfigError(
            "the outputs of products that blocks keep are not known", expected='keep=""',
            got="a model without the sizes of a transformer", where="EstimatedStep.keep",
        )  # fmt: skip
    if sizes is not None:
        return _kept_by_sizes(sizes, axes, plan, step, engine)
    # autocast over parameters of 16 bits, as stored or as gathered, keeps no fp32 stream
    is_low = step.stored_bytes == 2 or (engine == "fully_shard" and step.compute_bytes == 2)
    compute = "pure-bf16" if is_low else formats(step.precision).compute
    found = model.activations.get(compute) if isinstance(model, Model) else None
    if found is None:
        nothing = KeptBlock(0, 0)
        return Kept(nothing, nothing, 0, 0, 0, 0)
    each = found.saved // blocks if blocks else 0
    block = KeptBlock(each, each)
    return Kept(block, block, found.saved - blocks * each, 0, 0, 0, found.copies)


def _kept_by_sizes(model: Transformer, axes: Axes, plan: Plan, step: EstimatedStep, engine: Engine) -> Kept:
    tokens = step.rows * step.tokens // axes.cp
    own = tokens // axes.tp if plan.sequence else tokens  # of the tensors between matmuls
    size = step.compute_bytes
    stream = stream_bytes(step, engine)
    block = _block(model, axes, plan, own, tokens, stream, size)
    dense = _block(model, axes, plan, own, tokens, stream, size, dense=True) if model.dense else block
    if step.chunks > 1:
        block = dense = _of_inputs(model, axes, block, own, tokens, stream, size)
    logits, peak = _loss(model, axes, plan, step, tokens)
    return Kept(
        block=block,
        dense=dense,
        ends=_norm(model, own, tokens, stream, size, 0 if model.compared else 1),
        logits=logits,
        peak=peak,
        inside=_inside(model, axes, own, tokens, size)
        if step.chunks == 1
        else _inside_parts(model, axes, step, own, tokens, stream, engine),
        tower=_of_tower(model.tower, axes, step, stream),
        around=_around_tower(model.tower, step, stream),
    )


def _loss(model: Transformer, axes: Axes, plan: Plan, step: EstimatedStep, tokens: int) -> tuple[int, int]:
    """Return the bytes that head and loss keep until their backward, and further bytes at the peak."""
    if model.compared:
        return 0, 0
    if plan.logits == "full":
        split = axes.tp if divides_logits(plan) else 1
        logits = tokens * -(-model.vocabulary // split) * _FP32
        if split > 1:  # powers of them, in place from then on, beside those of the head
            return logits, logits + (0 if step.compute_bytes == _FP32 else logits * step.compute_bytes // _FP32)
        return logits, 2 * logits
    split = axes.tp if model.divided_ends else 1
    vocabulary = -(-model.vocabulary // split)
    rows = min(tokens, max(_LEAST_ROWS, -(-tokens * model.width // vocabulary)))  # of a chunk
    weight = vocabulary * model.width
    further = weight * _FP32 + 3 * rows * vocabulary * _FP32
    if split > 1:  # logits are made again in the backward
        return 0, further
    gradients = (weight + tokens * model.width) * step.compute_bytes
    return gradients, further - weight * step.compute_bytes


def _of_tower(tower: Tower | None, axes: Axes, step: EstimatedStep, stream: int) -> tuple[int, KeptBlock] | None:
    if tower is None:
        return None
    patches = step.rows * step.images * tower.patches(tower_side(tower, step))
    parts = Axes(tp=axes.tp if tower.divided else 1)
    return tower.taken, _block(tower.blocks, parts, Plan(), patches, patches, stream, step.compute_bytes)


def _around_tower(tower: Tower | None, step: EstimatedStep, stream: int) -> int:
    """Bytes of inputs of the matmuls around an encoder's blocks, of outputs between two of them, and of a norm."""
    if tower is None:
        return 0
    images = step.rows * step.images
    found = list(tower.matrices(tower_side(tower, step)))
    inputs = sum(rows * (each.count // each.shape[0]) for rows, each in found)
    between = sum(rows * each.shape[0] for rows, each in found[1:-1])
    norm = images * tower.patches(tower_side(tower, step)) * tower.blocks.width * stream
    return images * (inputs + between) * step.compute_bytes + norm


def _block(
    model: Transformer, axes: Axes, plan: Plan, own: int, tokens: int, stream: int, size: int, *, dense: bool = False
) -> KeptBlock:
    """Return what one block keeps: the last one, or one with an MLP in the place of experts."""
    first = 1 if model.fused else 3 if model.latent is None else 2  # matmuls behind a norm
    second = 2 if model.gated else 1
    norms = _norm(model, own, tokens, stream, size, first) + _norm(model, own, tokens, stream, size, second)
    return KeptBlock(
        whole=norms + _attention(model, axes, plan, tokens, size) + _mlp(model, axes, tokens, size, dense=dense),
        entry=own * model.width * stream,
        products=_products(model, axes, plan, tokens, size, dense=dense),
    )


def _of_inputs(
    model: Transformer, axes: Axes, block: KeptBlock, own: int, tokens: int, stream: int, size: int
) -> KeptBlock:
    """Return the memory of a block if its MLP only keeps its input."""
    if model.experts:
        raise ConfigError(
            "experts cannot run on parts of a sequence", expected="chunks=1", got="a mixture of experts",
            where="EstimatedStep.chunks",
        )  # fmt: skip
    second = 2 if model.gated else 1
    read = _norm(model, own, tokens, stream, size, second) - _norm(model, own, tokens, stream, size, 0)
    mlp = _mlp(model, axes, tokens, size) + read - tokens * model.width * stream
    return block._replace(whole=block.whole - mlp)


def _inside_parts(
    model: Transformer, axes: Axes, step: EstimatedStep, own: int, tokens: int, stream: int, engine: Engine
) -> int:
    """Bytes of temporaries in a block's backward with an MLP on parts: in the MLP, or in the norm before it."""
    size = step.compute_bytes
    part = _mlp(model, axes, -(-tokens // step.chunks), size)
    weights = (2 + model.gated) * model.width * -(-model.inner // axes.tp)
    gradient = size if engine == "fully_shard" else step.stored_bytes
    slopes = 2 * tokens * model.width * stream
    norm = model.width * (2 * tokens * size + own * (3 * _FP32 + size))
    return max(2 * part + weights * (_FP32 + gradient) + slopes, norm)


def _norm(model: Transformer, own: int, tokens: int, stream: int, size: int, products: int) -> int:
    """Bytes of a norm: its input, its intermediate result, and the input of the matmuls behind it."""
    between = stream if model.layer_norms else _FP32 + stream  # an RMSNorm keeps both in fp32, and normalised
    casts = products if stream > size else min(products, 1)  # autocast converts for each product
    return own * model.width * between + tokens * model.width * size * casts


def _attention(model: Transformer, axes: Axes, plan: Plan, tokens: int, size: int) -> int:
    """Bytes of queries, keys, values and outputs, and of the sums of the softmax."""
    heads, keys = own_heads(model, axes)
    if model.latent is not None:
        return tokens * _of_latents(model, model.latent, heads, axes, plan, size)
    values = 2 * heads + 2 * keys
    if model.fused:
        values += 2 * heads  # queries and keys are cut from one product, which the values keep whole
    # a norm of queries and keys keeps them in fp32, normalised, and a factor for each head
    norms = (heads + keys) * (model.head_width * (_FP32 + size) + _FP32) if model.head_norms else 0
    if axes.cp > 1 and plan.context == "heads":
        values = 4 * heads  # keys repeated for the heads that share them
    if axes.cp > 1 and plan.context == "gather":
        # each half of the queries keeps the keys up to its end; together the keys of the sequence and half a part
        seen = heads * (2 * axes.cp + 1) if keys < heads else 2 * keys * axes.cp
        values = 2 * heads + seen
    return tokens * (values * model.head_width * size + heads * _FP32 + norms)


def _of_latents(model: Transformer, latent: Latent, heads: int, axes: Axes, plan: Plan, size: int) -> int:
    """Bytes of a token: latents in fp32, normalised and scaled; queries, keys, values, outputs and sums of heads."""
    given = model.head_width + latent.values  # of a query and of an output
    # keys are joined with their positions in a tensor of their own; values are cut from one product, kept whole
    seen = model.head_width - latent.rotated + latent.values
    joined = model.heads * model.head_width  # by all ranks along tp
    if axes.cp > 1:
        joined = 0
        seen = given * (axes.cp if plan.context == "gather" else 1)
    latents = (latent.queries + latent.keys) * (_FP32 + 2 * size)
    return latents + joined * size + heads * ((given + seen) * size + _FP32)


def _mlp(model: Transformer, axes: Axes, tokens: int, size: int, *, dense: bool = False) -> int:
    if not model.experts or dense:
        inner = model.dense_inner if dense else model.inner
        return tokens * -(-inner // axes.tp) * size * model.inner_kept
    # ranks along tp that hold all experts compute all tokens; those that send them to others send a part each
    rows = tokens * model.experts_per_token // (axes.tp if axes.ep > 1 else 1)
    shared = tokens * -(-model.shared_inner // axes.tp) * size * model.inner_kept
    router = tokens * model.width * _FP32 if model.shared_inner else 0  # DeepSeek's computes in fp32
    return rows * (4 * model.inner + 2 * model.width) * size + shared + router


def _inside(model: Transformer, axes: Axes, own: int, tokens: int, size: int) -> int:
    """Bytes of temporaries in a block's backward: in its MLP, or in the norm before, when what the MLP kept is free."""
    mlp = _mlp(model, axes, tokens, size)
    if model.layer_norms or model.experts:
        return 3 * mlp // 4
    # gradients of two matmuls in the compute dtype; an RMSNorm's, in fp32, of its result and of both factors
    norm = model.width * (2 * tokens * size + own * (3 * _FP32 + size))
    return max(3 * mlp // 4, norm - mlp)


def _products(model: Transformer, axes: Axes, plan: Plan, tokens: int, size: int, *, dense: bool = False) -> int:
    """Bytes of the outputs of matmuls and attention."""
    heads, keys = own_heads(model, axes)
    # a rank of a ring has an output of attention for each part of the keys; the last rank's are all whole
    parts = axes.cp if plan.context == "ring" else 1
    attended = (heads + 2 * keys) * model.head_width + parts * heads * model.value_width
    if (latent := model.latent) is not None:
        joined = latent.queries + latent.keys + latent.rotated
        attended = joined + heads * (2 * model.head_width - latent.rotated + (1 + parts) * latent.values)
    token = (attended + model.width) * size + parts * heads * _FP32
    first = 2 if model.gated else 1
    if not model.experts or dense:
        inner = model.dense_inner if dense else model.inner
        return tokens * (token + (-(-inner // axes.tp) * first + model.width) * size)
    rows = tokens * model.experts_per_token // (axes.tp if axes.ep > 1 else 1)
    routed = model.experts * (_FP32 if model.shared_inner else size)
    if model.shared_inner:
        routed += (-(-model.shared_inner // axes.tp) * first + model.width) * size
    return tokens * (token + routed) + rows * (first * model.inner + model.width) * size


# Bytes that the operators between matmuls read and write, for each value of a token between blocks, in heads and
# inside the MLP, in a step and in its forward alone: of transformers' Llama, where RMSNorm and rotations are many
# operators, and of a block of torch's LayerNorm and GELU.
_EAGER = ((307, 52, 28), (79, 20, 10))
_PLAIN = ((60, 0, 10), (20, 0, 4))
# The same where each chain of operators reads its inputs once and writes its result, as torch.compile fuses them.
_FUSED = ((48, 8, 16), (18, 4, 6))
_LOGIT = {False: 45, True: 10}
_CAST = 15  # of fp8: a tensor is read for its maximum, read again and written, for three matmuls of two tensors


def passed_bytes(
    model: Transformer, axes: Axes, step: EstimatedStep, plan: Plan, held: HeldParameters, *, heads: int
) -> float:
    """Return the bytes that operators other than matmuls and attention read and write; `heads`: runs of the head."""
    tokens = step.rows * step.tokens // axes.cp
    own = tokens // axes.tp if plan.sequence else tokens
    dense = sum(held.dense)
    total = (sum(held.layers) - dense) * _passed(model, axes, step, own, tokens)
    if dense:
        total += dense * _passed(model, axes, step, own, tokens, dense=True)
    if model.tower is not None and held.is_first:
        blocks = model.tower.blocks
        patches = step.rows * step.images * model.tower.patches(tower_side(model.tower, step))
        parts = Axes(tp=axes.tp if model.tower.divided else 1)
        total += blocks.layers * _passed(blocks, parts, step, patches, patches)
    vocabulary = 0 if model.compared else model.vocabulary / (axes.tp if divides_logits(plan) else 1)
    ends = tokens * vocabulary * _LOGIT[step.compiled] * step.compute_bytes / 2
    return step.micro_batches * total + heads * ends + _exchanged_bytes(held, step)


def _passed(
    model: Transformer, axes: Axes, step: EstimatedStep, own: int, tokens: int, *, dense: bool = False
) -> float:
    """Bytes of one block in a micro-batch."""
    spread = (model.heads + model.kv_heads) * model.head_width / axes.tp
    inner = (model.inner * (model.experts_per_token or 1) + model.shared_inner) / axes.tp
    if dense:
        inner = model.dense_inner / axes.tp
    whole, forward = (_FUSED if step.compiled else _EAGER) if model.gated else _PLAIN
    times = [one + again * step.recompute for one, again in zip(whole, forward, strict=True)]
    block = step.compute_bytes / 2 * (own * model.width * times[0] + tokens * (spread * times[1] + inner * times[2]))
    if formats(step.precision).fp8 is not None:
        block += _CAST * tokens * (4 * model.width / axes.tp + 2 * model.width + 3 * inner)
    return block


def _exchanged_bytes(held: HeldParameters, step: EstimatedStep) -> float:
    """Bytes of parameters copied from and to messages or converted, and of the optimizer's step with `foreach`."""
    size = step.compute_bytes
    passes = step.micro_batches * (4 * size if step.held else 5 * size + _FP32)
    optimizer = OPTIMIZERS[step.optimizer]
    return held.every.whole * (passes + size + _FP32) + held.every.trained * (2 + 6 * optimizer.values)
