# SPDX-License-Identifier: Apache-2.0
"""Tiny models of many families, and the law of a cell: on a mesh they train as in a plain loop of one process.

A cell is a family on a mesh. Its loop has AdamW, clipping, windows of micro-batches, a ragged last batch and uneven
token weights; parameters, losses and norms are compared.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from family_models import FAMILIES, Family
from more_families import MORE
from steps import ByState, begin_batch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

import accel
from accel.testing import Simulator

WORDS, TOKENS, ROWS, IGNORED = 95, 12, 10, -100
SOUNDS = ("sound", "spectrum")
TOLERANCE = 1e-10
UNUSED = (
    "logit_scale",
    "logit_bias",
    "mask_token",
    "tower.post_layernorm.weight",
    "tower.post_layernorm.bias",
)  # by the losses
UNUSED_PARTS = ("pooler.", "_global.", "mask_emb", "r_s_bias", "seg_embed", "contact_head.", "indexer.", "compressor.")


def family(name: str) -> Family:
    """Return a family of one of the two tables."""
    return FAMILIES[name] if name in FAMILIES else MORE[name]


class Mesh(NamedTuple):
    """A mesh of a cell, and the way to prepare a model on it.

    Attributes:
        axes: sizes by name.
        strategy: of data parallelism.
        prepare: from context, model, optimizer and a batch of one row to the prepared model and optimizer; None for
            `accel.prepare`.
        plan: further options of the stages.
    """

    axes: str
    strategy: str = "fsdp"
    prepare: Callable[[accel.DistContext, nn.Module, Any, Mapping[str, Tensor]], tuple[nn.Module, Any]] | None = None
    plan: Mapping[str, Any] = {}

    @property
    def has_stages(self) -> bool:
        """Whether the model is cut into the stages of a pipeline."""
        return "pp=" in self.axes

    @property
    def size(self) -> int:
        """Number of ranks; those along ep are ranks of the other axes."""
        sizes = [each.split("=") for each in self.axes.split(",")]
        return torch.Size(int(size) for name, size in sizes if name != "ep").numel()


MESHES: Mapping[str, Mesh] = {  # columns of the table
    "tp=2": Mesh("tp=2"),
    "dp=2,tp=2": Mesh("dp=2,tp=2"),
    "cp=2": Mesh("cp=2"),
    "pp=2": Mesh("pp=2"),
    "pp=2,tp=2": Mesh("pp=2,tp=2"),
    "pp=4": Mesh("pp=4"),
    "dp=2,pp=2": Mesh("dp=2,pp=2"),
}


class Wide(TorchFunctionMode):
    """Lets a forward that computes in fp32 compute in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "float":
            return args[0].double()
        named = {name: _wide(each) for name, each in (kwargs or {}).items()}
        return func(*map(_wide, args), **named)


def wider(name: str) -> contextlib.AbstractContextManager[object]:
    """Return a block in which a family's forward computes in float64."""
    return Wide() if family(name).casts else contextlib.nullcontext()


def _wide(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value is torch.float32 else value


@contextlib.contextmanager
def _one_thread() -> Generator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def make(name: str) -> nn.Module:
    """Return a family's model in float64 and train, without dropout, its parameters moved off initial zeros."""
    given = family(name)
    with torch.random.fork_rng(), _one_thread():  # as on simulated ranks: draws differ by the number of threads
        torch.manual_seed(3)
        if isinstance(given.model, str):
            transformers: Any = importlib.import_module("transformers")
            model = getattr(transformers, given.model)(getattr(transformers, given.config)(**given.settings))
        else:
            model = given.model()
        model = model.double().train()
        with torch.no_grad():
            for each in model.parameters():
                _ = each.add_(torch.randn_like(each) * 0.02)
    for key, each in model.named_parameters():
        if key.endswith(UNUSED) or (given in MORE.values() and any(each in key for each in UNUSED_PARTS)):
            _ = each.requires_grad_(False)
    for module in model.modules():
        if type(module).__name__ == "PhimoeTopKRouter":
            _ = module.eval()  # it draws experts in training
        if type(module).__name__ == "SwitchTransformersTop1Router":
            cast(Any, module).dtype = torch.float64  # its config knows narrower ones alone
        if isinstance(module, nn.BatchNorm2d):
            _ = module.eval()  # its statistics are those of a micro-batch
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for key, value in list(vars(module).items()):
            if "drop" in key and isinstance(value, float):
                setattr(module, key, 0.0)
    if hasattr(getattr(model, "config", None), "layerdrop"):  # where forwards of sounds read it
        cast(Any, model).config.layerdrop = 0.0
    return model


def rows(name: str) -> list[Mapping[str, Tensor]]:
    """Return samples: inputs of the forward, and "target" with some tokens that do not count."""
    draw = torch.Generator().manual_seed(7)
    kind = family(name).kind
    found: list[Mapping[str, Tensor]] = []
    for at in range(ROWS):
        ids = torch.randint(3, WORDS, (TOKENS,), generator=draw)
        mask = (torch.arange(TOKENS) < TOKENS - at % 4).long()
        target = ids.roll(-1).where(mask.bool(), torch.tensor(IGNORED))
        if kind in ("translation", "speech"):
            goal = torch.randint(3, WORDS, (9,), generator=draw)
            given = goal.roll(1)
            target = goal.where(torch.arange(9) < 9 - at % 5, torch.tensor(IGNORED))
            source = {"input_ids": ids, "attention_mask": mask}
            if kind == "speech":
                source = {"input_features": torch.randn(8, 16, generator=draw, dtype=torch.float64)}
            found.append({**source, "decoder_input_ids": given, "target": target})
        elif kind == "captions":
            ids = torch.cat([ids[:5], torch.full((16,), 98), ids[5:]])
            mask = (torch.arange(len(ids)) < len(ids) - at % 4).long()
            target = ids.roll(-1).where(mask.bool() & (ids.roll(-1) != 98), torch.tensor(IGNORED))
            image = torch.randn(3, 16, 16, generator=draw, dtype=torch.float64)
            found.append({"input_ids": ids, "attention_mask": mask, "pixel_values": image, "target": target})
        elif kind in SOUNDS:
            shape = (96,) if kind == "sound" else (16, 8)
            sound = torch.randn(shape, generator=draw, dtype=torch.float64)
            found.append({"input_values": sound, "target": torch.tensor(at % 2)})
        elif kind in ("classes", "vectors"):
            image = torch.randn(3, 16, 16, generator=draw, dtype=torch.float64)
            text = {} if kind == "classes" else {"input_ids": ids, "attention_mask": mask}
            found.append({**text, "pixel_values": image, "target": torch.tensor(at % 2)})
        elif kind == "features":
            source, target = (torch.randn(n, 32, generator=draw, dtype=torch.float64) for n in (TOKENS, 8))
            found.append({"source": source, "target": target})
        else:
            found.append({"input_ids": ids, "attention_mask": mask, "target": target})
    return found


def loss_of(name: str, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    """Return the sum of losses of a batch, and the number of those that count."""
    given = {key: each for key, each in batch.items() if key != "target"}
    target = batch["target"]
    kind = family(name).kind
    if kind == "features":
        given["target"] = target
    with wider(name):
        output = model(**given)
    return loss_sum(kind, output, target)


def loss_sum(kind: str, output: Any, target: Tensor) -> tuple[Tensor, int]:
    """Return the sum of losses of an output, and the number of those that count."""
    if kind == "features":
        return output.square().sum(), target.shape[:2].numel()
    if kind == "vectors":
        return (output.text_embeds * output.image_embeds.roll(1, -1)).sum(), len(target)
    logits = output.logits
    if kind == "classes" or kind in SOUNDS:
        return functional.cross_entropy(logits, target, reduction="sum"), len(target)
    count = int((target != IGNORED).sum())
    return functional.cross_entropy(
        logits.flatten(0, 1), target.flatten(), ignore_index=IGNORED, reduction="sum"
    ), count


class Result(NamedTuple):
    """Parameters, losses of optimizer steps, and norms."""

    parameters: Mapping[str, Tensor]
    losses: list[float]
    norms: list[float]


def plain(name: str, accumulation: int, batch: int) -> Result:
    """Train in a plain loop of one process, without accel."""
    model = make(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    samples = rows(name)
    losses: list[float] = []
    norms: list[float] = []
    micro = [samples[at : at + batch] for at in range(0, len(samples), batch)]
    for at in range(0, len(micro), accumulation):
        window = [torch.utils.data.default_collate(each) for each in micro[at : at + accumulation]]
        parts = [loss_of(name, model, each) for each in window]
        total = sum(count for _, count in parts)
        loss = torch.stack([each for each, _ in parts]).sum() / total
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return Result({key: each.detach() for key, each in model.state_dict().items()}, losses, norms)


def on_mesh(ctx: accel.DistContext, name: str, mesh: Mesh, accumulation: int, batch: int) -> Result:
    """Train on a mesh, `batch` rows of all ranks together."""
    ctx = accel.replace(ctx, mesh=mesh.axes, strategy=mesh.strategy)
    model = make(name)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    samples = rows(name)
    if mesh.prepare is None:
        if family(name).leaves and mesh.axes != "tp=2":
            model = accel.prepare_model(ctx, model, find_unused_parameters=True)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = accel.prepare(ctx, model, optimizer)
    else:
        model, optimizer = mesh.prepare(ctx, model, optimizer, torch.utils.data.default_collate(samples[:1]))
    loader = accel.prepare_loader(ctx, DataLoader(samples, batch_size=batch // ctx.data_parallel[1]))
    run = ByState(ctx, accumulation)
    losses: list[float] = []
    norms: list[float] = []
    sums: list[Tensor] = []
    for each in run.batches(loader):
        valid = int(each.valid)
        count = 0
        data = cut(ctx, name, model, {key: value[:valid] if valid else value for key, value in each.data.items()})
        with run.accumulate(model):
            if valid:
                summed, count = loss_of(name, model, data)
                loss = summed / max(count, 1)
            else:
                summed, _ = loss_of(name, model, data)
                loss = summed * 0.0
            run.backward(loss, weight=count)
        sums.append(torch.tensor([float(loss.detach()) * count, count], dtype=torch.float64))
        if run.sync:
            run.step(optimizer, max_norm=0.5)
            total = accel.reduce(ctx, torch.stack(sums).sum(0))  # copies along other axes cancel out
            losses.append(float(total[0] / total[1]))
            norms.append(float(run.grad_norm))
            sums = []
    return Result(accel.get_state_dict(ctx, model, dst=None), losses, norms)


def cut(ctx: accel.DistContext, name: str, model: nn.Module, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return this rank's tokens of a batch on a mesh with cp; all of them on others."""
    kind = family(name).kind
    if ctx.axis("cp").size == 1 or kind in ("classes", "vectors", *SOUNDS):
        return batch
    part = accel.parallel.split_sequence
    if kind == "features":
        own = part(ctx, {"source": batch["source"]}, shift=())
        goal = part(ctx, {"target": batch["target"]}, shift=())
        return {"source": own["source"], "target": goal["target"]}
    if kind == "speech":  # sounds are not cut
        goal = {key: batch[key] for key in ("decoder_input_ids", "target")}
        filled = part(ctx, goal, shift=(), pad={"decoder_input_ids": 3, "target": IGNORED})
        return {**batch, **{key: filled[key] for key in goal}}
    source = {key: batch[key] for key in ("input_ids", "attention_mask")}
    if kind == "translation":  # two sequences, the second filled up
        goal = {key: batch[key] for key in ("decoder_input_ids", "target")}
        filled = part(ctx, goal, shift=(), pad={"decoder_input_ids": 3, "target": IGNORED})
        own = {**part(ctx, source, shift=()), **{key: filled[key] for key in goal}}
        own["decoder_position_ids"] = filled["position_ids"]
    else:
        own = part(ctx, {**source, "target": batch["target"]}, shift=())
        own |= {key: batch[key] for key in batch if key not in own}  # images are not cut
    names = inspect.signature(accel.unwrap_model(model).forward).parameters
    own = {key: each for key, each in own.items() if not key.endswith("position_ids") or key in names}
    if "position_ids" not in own:
        return own
    for module in model.modules():
        if hasattr(module, "create_position_ids_from_input_ids"):  # keeps the first positions for padding
            own["position_ids"] = own["position_ids"] + cast(int, module.padding_idx) + 1
    if name in ("MPNet", "Longformer"):  # as well, and numbers the whole sequence itself
        del own["position_ids"]
    return own


def on_stages(ctx: accel.DistContext, name: str, mesh: Mesh, accumulation: int, batch: int) -> Result:
    """Train on a mesh with stages, which take a batch of all ranks together in micro-batches of two rows."""
    ctx = accel.replace(ctx, mesh=mesh.axes, strategy=mesh.strategy)
    model = make(name)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    samples, kind = rows(name), family(name).kind
    share, shares = ctx.data_parallel
    size = batch // shares
    example = _given(kind, torch.utils.data.default_collate(samples[:4]))
    micro_batches = max(ctx.axis("pp").size * mesh.plan.get("stages_per_rank", 1), size // 2)
    plan = accel.parallel.Plan(**{"micro_batches": micro_batches, **mesh.plan})
    with wider(name):
        model, optimizer = accel.prepare(ctx, model, optimizer, plan=plan, example=example)
    starts = range(0, len(samples), batch)
    result = Result({}, [], [])
    state = accel.train_state(ctx, accumulation=accumulation)
    sums: list[Tensor] = []
    for at in starts:
        whole = samples[at : at + batch]
        own = whole[share::shares]
        each = torch.utils.data.default_collate(own)
        target = each["target"]
        count = target.shape[:2].numel() if kind == "features" else int((target != IGNORED).sum())
        state = begin_batch(ctx, state, last=at == starts[-1])
        inputs = _given(kind, each)
        with wider(name):
            loss, state = accel.forward_backward(
                ctx, model, state, inputs, targets=target, loss_fn=_summed(kind), weight=count
            )
        sums.append(torch.stack([loss.double() * count, torch.tensor(float(count), dtype=torch.float64)]))
        if state.sync:
            state = accel.optimizer_step(ctx, optimizer, state, max_norm=0.5)
            total = accel.reduce(ctx, torch.stack(sums).sum(0))
            result.losses.append(float(total[0] / total[1]))
            result.norms.append(float(cast(Tensor, state.grad_norm)))
            sums = []
    return result._replace(parameters=cast(Any, accel.get_state_dict(ctx, model, dst=None)))


def _given(kind: str, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inputs of the forward among a batch."""
    return {key: each for key, each in batch.items() if key != "target" or kind == "features"}


def _summed(kind: str) -> Callable[[Any, Tensor], Tensor]:
    return lambda output, target: loss_sum(kind, output, target)[0]


def difference(want: Result, got: Result) -> float:
    """Return the largest difference; not a number where one is not."""
    pairs = [(want.parameters[key], got.parameters[key]) for key in want.parameters]
    pairs += [(torch.tensor(a), torch.tensor(b)) for a, b in ((want.losses, got.losses), (want.norms, got.norms))]
    return float(torch.stack([(a.double() - b.double()).abs().max() for a, b in pairs if a.numel()]).max())


def cell(simulator: Simulator, name: str, mesh: Mesh, *, accumulations: Sequence[int] = (1, 3)) -> float:
    """Return the largest difference between a mesh and a plain loop."""
    return float(torch.tensor([_difference(simulator, name, mesh, each) for each in accumulations]).max())


def _difference(simulator: Simulator, name: str, mesh: Mesh, accumulation: int) -> float:
    def rank(ctx: accel.DistContext) -> Result:
        train = on_stages if mesh.has_stages else on_mesh
        return train(ctx, name, mesh, accumulation, 4)

    want = plain(name, accumulation, 4)
    every = simulator.run(rank, mesh.size, default_group=True)
    return float(torch.tensor([difference(want, each) for each in every]).max())
