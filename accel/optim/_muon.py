# SPDX-License-Identifier: Apache-2.0
"""Muon for sharded matrices: momentum on each rank's part, and each matrix orthogonalized once, by its owner.

`_matrices.py` plans the owners and exchanges the parts. Everything that is no matrix is stepped by AdamW in the same
optimizer.
"""

from __future__ import annotations

import fnmatch
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw as adamw_

from accel.errors import ConfigError
from accel.errors._checks import check_kind
from accel.optim._matrices import Matrix, RankedOptimizer, Spec, Where, loss_of, plan_matrices, put, through_owners
from accel.tensors import local_part, mesh_of, placements_of, word_layers
from accel.terminal import show_names

AdjustLr = Literal["original", "match_rms_adamw"]

_KIND = "kind"  # key of a group: "muon" or "adamw"
_CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


class _MatrixBucket(NamedTuple):
    """Parameters by number, and their matrices, which are sent together."""

    numbers: Sequence[int]
    matrices: Sequence[Matrix]


class Muon(RankedOptimizer):
    """Muon for the matrices of a model and AdamW for its other parameters, on any mesh.

    Matrices are the 2-d parameters, and each element of 3-d ones, such as stacked experts. Embeddings, the head,
    convolutions and vectors go to AdamW; one line of the logger `accel.optim` says which. Where ranks hold parts of
    matrices, or copies, each matrix is orthogonalized on one rank, with at most two messages for each `bucket_bytes`.

    `accel.optimizer_step` steps it, and gives it the ranks. Momentum and AdamW's averages are sharded as parameters
    are, so checkpoints load on any mesh.

    Args:
        model: plain, or from `prepare_model`. Parameters that need no gradient are left out.
        lr: learning rate of the matrices.
        adamw_lr: learning rate of AdamW; None for `lr`, which `adjust_lr_fn="match_rms_adamw"` makes comparable.
        weight_decay: decoupled weight decay, of both.
        momentum: factor of the momentum.
        nesterov: whether to take Nesterov's momentum.
        ns_coefficients: coefficients of the Newton-Schulz polynomial.
        eps: smallest divisor in its normalization.
        ns_steps: its iterations.
        adjust_lr_fn: "original" or None for `sqrt(max(1, rows / columns))` as a factor of `lr`; "match_rms_adamw" for
            `0.2 * sqrt(max(rows, columns))`.
        adamw_betas, adamw_eps: AdamW's, as in torch.optim.AdamW.
        dtype: of the iterations and the messages; None for the dtype of the gradients.
        muon, adamw: patterns of parameter names, such as "*.router.weight", that go there in any case.
        packs: rows of the matrices in fused projections, by pattern: {"*.qkv.weight": (64, 16, 16)}.
        bucket_bytes: bytes of matrices that are sent at a time, in `dtype`.

    Raises:
        ConfigError: no parameter, a pattern that matches none, one parameter in `muon` and `adamw`, or packs that do
            not add up to the rows.

    Reference:
        Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks"; torch.optim.Muon, for names and
        defaults; Liu et al. 2025, "Muon is scalable for LLM training", arXiv:2502.16982.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 6))
        >>> optimizer = accel.optim.Muon(model, lr=0.02, adamw_lr=1e-3)
        >>> [(group["kind"], len(group["params"])) for group in optimizer.param_groups]
        [('muon', 1), ('adamw', 2)]
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        *,
        adamw_lr: float | None = None,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: AdjustLr | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        dtype: torch.dtype | None = torch.bfloat16,
        muon: Sequence[str] = (),
        adamw: Sequence[str] = (),
        packs: Mapping[str, Sequence[int]] | None = None,
        bucket_bytes: int = 256 * 2**20,
    ) -> None:
        _check_options(lr, adamw_lr, momentum, ns_steps, adjust_lr_fn, bucket_bytes)
        kinds = _sorted(model, muon, adamw)
        sizes = _packs(kinds, packs or {})
        of_matrices = {
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": tuple(ns_coefficients),
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        of_others = {"weight_decay": weight_decay, "betas": tuple(adamw_betas), "eps": adamw_eps}
        groups = list[dict[str, Any]]()
        for rows in dict.fromkeys(sizes.values()):
            own: list[nn.Parameter] = [kinds.matrices[name] for name, each in sizes.items() if each == rows]
            groups.append({"params": own, _KIND: "muon", "lr": lr, "packs": rows, **of_matrices})
        if kinds.others:
            other_lr = lr if adamw_lr is None else adamw_lr
            groups.append({"params": [*kinds.others.values()], _KIND: "adamw", "lr": other_lr, **of_others})
        super().__init__(groups, {})
        self.dtype = dtype
        self.bucket_bytes = bucket_bytes
        note = "Muon steps %d matrices (%s), AdamW %d other parameters (%s)"
        listed = (show_names([*kinds.matrices], 6), show_names([*kinds.others], 6))
        logging.getLogger("accel.optim").info(note, len(kinds.matrices), listed[0], len(kinds.others), listed[1])

    def __getstate__(self) -> dict[str, Any]:
        """Return the state with the settings of all groups."""
        return {**super().__getstate__(), "dtype": self.dtype, "bucket_bytes": self.bucket_bytes}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] - torch's overloads
        """Step all parameters that have a gradient. Messages of the ranks that `accel.optimizer_step` gave it."""
        loss = loss_of(closure)
        matrices = list[tuple[Tensor, Mapping[str, Any]]]()
        for group in self.param_groups:
            stepped = [each for each in group["params"] if each.grad is not None]
            if group[_KIND] == "adamw":
                self._step_others(stepped, group)
            else:
                matrices += [(each, group) for each in stepped]
        if matrices:
            for bucket in self._planned(matrices):
                self._step_bucket(bucket, matrices)
        return loss

    def _step_others(self, stepped: Sequence[Tensor], group: Mapping[str, Any]) -> None:
        states = [self.state[each] for each in stepped]
        for each, state in zip(stepped, states, strict=True):
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(each, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(each, memory_format=torch.preserve_format)
        if stepped:
            adamw_(
                [*stepped],
                [cast(Tensor, each.grad) for each in stepped],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )

    def _planned(self, matrices: Sequence[tuple[Tensor, Mapping[str, Any]]]) -> Sequence[_MatrixBucket]:
        """The buckets of parameters, planned once for each set of them."""
        specs = [Spec(each, tuple(group["packs"])) for each, group in matrices]
        kept = [(id(mesh_of(each)), placements_of(each), each.shape, each.dtype, packs) for each, packs in specs]
        key = tuple(kept)
        if key not in self._plans:
            self._plans[key] = self._buckets(specs)
        return self._plans[key]

    def _buckets(self, specs: Sequence[Spec]) -> Sequence[_MatrixBucket]:
        tensors = [each.tensor for each in specs]
        found = plan_matrices(specs, self.ranks_of(tensors))
        buckets = list[list[int]]()
        held = 0
        for at, each in enumerate(tensors):
            nbytes = each.numel() * (self.dtype or each.dtype).itemsize
            is_new = not buckets or held + nbytes > self.bucket_bytes
            if is_new or (self.dtype is None and tensors[buckets[-1][0]].dtype != each.dtype):
                buckets.append([])
                held = 0
            buckets[-1].append(at)
            held += nbytes
        return [_MatrixBucket(own, [each for each in found if each.at in set(own)]) for own in buckets]

    def _step_bucket(self, bucket: _MatrixBucket, matrices: Sequence[tuple[Tensor, Mapping[str, Any]]]) -> None:
        """Add gradients to momentum, orthogonalize, and step the bucket's parameters."""
        updates = dict[int, Tensor]()
        results = dict[int, Tensor]()
        for at in bucket.numbers:
            parameter, group = matrices[at]
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            grad = local_part(cast(Tensor, parameter.grad))
            momentum = local_part(state["momentum_buffer"])
            momentum.lerp_(grad.to(momentum.dtype), 1 - group["momentum"])
            update = grad.lerp(momentum.to(grad.dtype), group["momentum"]) if group["nesterov"] else momentum
            updates[at] = update.to(self.dtype or update.dtype)
            results[at] = torch.zeros_like(local_part(parameter))

        def place(matrix: Matrix, where: Where, values: Tensor) -> None:
            factor = _factor(matrices[matrix.at][1]["adjust_lr_fn"], matrix.shape)
            put(results[matrix.at], where, values.to(results[matrix.at].dtype) * factor)

        def compute(matrix: Matrix, values: Tensor) -> Tensor:
            return newton_schulz(matrices[matrix.at][1], values)

        through_owners(updates, bucket.matrices, self._group, compute, place)
        for at in bucket.numbers:
            parameter, group = matrices[at]
            part = local_part(parameter)
            part.mul_(1 - group["lr"] * group["weight_decay"])
            part.add_(results[at], alpha=-float(group["lr"]))


def newton_schulz(options: Mapping[str, Any], matrix: Tensor) -> Tensor:
    """Return the orthogonalized matrix [rows, columns]: singular values of about 1, as torch.optim.Muon has it."""
    a, b, c = options["ns_coefficients"]
    is_tall = matrix.shape[0] > matrix.shape[1]
    x: Any = matrix.mT if is_tall else matrix
    x = x / x.norm().clamp(min=options["eps"])
    for _ in range(options["ns_steps"]):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def _factor(adjust: AdjustLr | None, shape: tuple[int, int]) -> float:
    return 0.2 * math.sqrt(max(shape)) if adjust == "match_rms_adamw" else math.sqrt(max(1, shape[0] / shape[1]))


class _Kinds(NamedTuple):
    """Parameters by name."""

    matrices: dict[str, nn.Parameter]
    others: dict[str, nn.Parameter]


def _sorted(model: nn.Module, muon: Sequence[str], adamw: Sequence[str]) -> _Kinds:
    """Give each parameter to Muon or AdamW."""
    check_kind(  # other optimizers take lists
        model,
        nn.Module,
        "Muon takes a model, and chooses its matrices",
        expected="a torch.nn.Module",
        where="Muon",
        fix="accel.optim.Muon(model, adamw=[...]) leaves parameters to AdamW by their names.",
    )
    kept_ids = _embeddings_and_head(model)
    kinds = _Kinds({}, {})
    used = set[str]()
    seen = set[int]()
    for path, module in cast("Iterator[tuple[str, nn.Module]]", model.named_modules()):
        for key, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen or not parameter.requires_grad:
                continue
            seen.add(id(parameter))
            name = f"{path}.{key}" if path else key
            to_muon = {each for each in muon if fnmatch.fnmatchcase(name, each)}
            to_adamw = {each for each in adamw if fnmatch.fnmatchcase(name, each)}
            used |= to_muon | to_adamw
            if to_muon and to_adamw:
                got = f"{name} in {sorted(to_muon)} and {sorted(to_adamw)}"
                raise ConfigError("a parameter for two optimizers", expected="one", got=got, where="Muon")
            is_matrix = parameter.ndim in (2, 3) and parameter.is_floating_point() and parameter.numel() > 0
            if to_muon and not is_matrix:
                got = f"{name} of shape {list(parameter.shape)}"
                raise ConfigError("no matrix", expected="2 or 3 dimensions", got=got, where="Muon, muon=")
            kept = id(parameter) in kept_ids or isinstance(module, _CONVOLUTIONS)
            chosen = kinds.matrices if is_matrix and not to_adamw and (to_muon or not kept) else kinds.others
            chosen[name] = parameter
    unused = [each for each in (*muon, *adamw) if each not in used]
    if unused:
        _refuse_pattern(unused[0], kinds)
    if not seen:
        raise ConfigError("no parameter to train", expected="one with requires_grad", got="none", where="Muon")
    return kinds


def _refuse_pattern(pattern: str, kinds: _Kinds) -> None:
    names = ", ".join([*kinds.matrices, *kinds.others][:5])
    raise ConfigError("a pattern that matches no parameter", expected=f"one of {names}, ...", got=pattern, where="Muon")


def _embeddings_and_head(model: nn.Module) -> set[int]:
    """Identities of the weights of embeddings, and of layers that may give logits."""
    every = word_layers(model)
    layers = [*every.tables.values(), *every.sized.values(), *every.heads.values()]
    return {id(getattr(each, "weight", None)) for each in layers}


def _packs(kinds: _Kinds, packs: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """The rows of the matrices in each parameter; none for one matrix."""
    found = dict.fromkeys(kinds.matrices, cast("tuple[int, ...]", ()))
    for pattern, rows in packs.items():
        names = fnmatch.filter(kinds.matrices, pattern)
        if not names:
            _refuse_pattern(pattern, kinds)
        for name in names:
            shape = kinds.matrices[name].shape
            if len(shape) != 2 or sum(rows) != shape[0] or min(rows) < 1:
                got, expected = f"{list(rows)} of shape {list(shape)}", f"{shape[0]} rows in all"
                raise ConfigError(f"packs of {name} do not add up", expected=expected, got=got, where="Muon, packs=")
            found[name] = tuple(rows)
    return found


def _check_options(
    lr: float, adamw_lr: float | None, momentum: float, ns_steps: int, adjust: str | None, bucket_bytes: int
) -> None:
    choices = (
        ("lr", lr >= 0 and (adamw_lr is None or adamw_lr >= 0), "at least 0", (lr, adamw_lr)),
        ("momentum", 0 <= momentum < 1, "from 0, below 1", momentum),
        ("ns_steps", 0 < ns_steps < 100, "from 1 to 99", ns_steps),
        ("adjust_lr_fn", adjust in (None, "original", "match_rms_adamw"), '"original" or "match_rms_adamw"', adjust),
        ("bucket_bytes", bucket_bytes > 0, "at least 1", bucket_bytes),
    )
    for name, is_right, expected, got in choices:
        if not is_right:
            raise ConfigError(f"{name} is out of its range", expected=expected, got=repr(got), where="Muon")
