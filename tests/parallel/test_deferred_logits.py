# SPDX-License-Identifier: Apache-2.0
"""Deferred logits: losses as with logits, which are made only for other uses, on one rank and on meshes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import families
import language_models as lm
import pytest
import torch
from catching import assert_raises
from family_models import FAMILIES
from more_families import MORE
from recorded_ranks import Collective, recorded
from torch import Tensor, nn
from torch.nn import functional

import accel
from accel.errors import ConfigError, PrepareError
from accel.parallel.logits._logits import DeferredLogits
from accel.tensors import full_tensor
from accel.testing import Simulator

ONE = accel.single("cpu")
CLASSES = 10


class Words(nn.Module):
    """A table and a head."""

    def __init__(self, *, bias: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, 4)
        self.head = nn.Linear(4, CLASSES, bias=bias)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


IDS, TARGETS = torch.randint(CLASSES, (2, 2, 5), generator=torch.Generator().manual_seed(0))
TARGETS[0, 1] = -100
COUNTED = TARGETS != -100
ADDED = torch.linspace(-1, 1, CLASSES, dtype=torch.float64)[None]
FACTORS = torch.linspace(0.1, 2.0, CLASSES, dtype=torch.float64)
LOGGER = "accel.parallel"


def of_rows(logits: Tensor, **options: Any) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), TARGETS.flatten(), **options)


def shifted(logits: Tensor) -> Tensor:
    rows = logits[..., :-1, :].contiguous().view(-1, logits.size(-1))
    return functional.cross_entropy(rows, TARGETS[..., 1:].reshape(-1))


DEFERRED: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": of_rows,
    "sum by a module": lambda logits: nn.CrossEntropyLoss(reduction="sum")(logits.view(-1, CLASSES), TARGETS.view(-1)),
    "next tokens": shifted,
    "classes in dimension 1": lambda logits: functional.cross_entropy(logits.transpose(1, 2), TARGETS),
    "soft cap": lambda logits: of_rows(torch.tanh(logits / 3) * 3),
    "scale, weights, smoothing": lambda logits: of_rows(0.25 * logits, weight=FACTORS, label_smoothing=0.1),
    "bias": lambda logits: of_rows(logits + ADDED, reduction="none").sum(),
    "mask of rows": lambda logits: functional.cross_entropy(logits[COUNTED], TARGETS[COUNTED]),
    "last token": lambda logits: functional.cross_entropy(logits[:, -1], TARGETS[:, -1]),
    "of accel": lambda logits: accel.parallel.vocab_cross_entropy(ONE, logits, TARGETS),
    "two losses": lambda logits: of_rows(logits, reduction="sum") - of_rows(logits),
    "beside a metric": lambda logits: of_rows(logits) + of_rows(logits.detach().clone()),
    "a view of a view": lambda logits: of_rows(logits.flatten(0, 1).view(2, 5, CLASSES)),
}


def doubled(logits: Tensor) -> Tensor:
    logits.mul_(2)
    return of_rows(logits)


def with_a_value(logits: Tensor) -> Tensor:
    logits[..., 3] = -5.0
    return of_rows(logits)


def with_a_hook(logits: Tensor) -> Tensor:
    _ = logits.register_hook(lambda grad: grad * 2)
    return of_rows(logits)


MADE: dict[str, Callable[[Tensor], Tensor]] = {
    "other function": lambda logits: logits.log_softmax(-1)[COUNTED].sum(),
    "changed in place": doubled,
    "a value written": with_a_value,
    "a hook": with_a_hook,
    "cap twice": lambda logits: of_rows(logits.tanh().tanh()),
    "negative cap": lambda logits: of_rows(logits.tanh() * -2),
    "bias behind a factor": lambda logits: of_rows(logits * 2 + ADDED),
    "probabilities": lambda logits: functional.cross_entropy(logits[0], torch.full((5, CLASSES), 0.1).double()),
    "classes cut": lambda logits: logits[..., :-1].logsumexp(-1).sum(),
    "mask of classes": lambda logits: logits[logits > 0].sum(),
    "a metric without gradient": lambda logits: of_rows(logits) + logits.detach().argmax(-1).sum(),
}


def results(model: nn.Module, loss_of: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], Tensor]:
    model.zero_grad()
    logits = model(IDS)
    loss = loss_of(logits)
    loss.backward()
    return [loss.detach(), *[each.grad for each in model.parameters() if each.grad is not None]], logits


@pytest.mark.parametrize("form", [{}, {"bias": True}, {"tied": True}], ids=str)
def test_values_and_gradients_are_those_with_logits(form: dict[str, bool]) -> None:
    """Logits are not made for cross entropies of rows, views, caps and factors; they are for all else, as they were."""
    torch.manual_seed(0)
    plain = Words(**form).double()
    deferred = accel.defer_logits(Words(**form).double())
    _ = deferred.load_state_dict(plain.state_dict())
    for name, loss_of in (DEFERRED | MADE).items():
        expected, _ = results(plain, loss_of)
        found, logits = results(deferred, loss_of)
        worst = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
        assert worst < 1e-12, (name, worst)
        assert isinstance(logits, DeferredLogits), name
        assert logits.is_made == (name in MADE), name


def test_the_line_that_needs_logits_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    model = accel.defer_logits(Words())
    with caplog.at_level(logging.WARNING, LOGGER):
        for _ in range(2):
            _ = model(IDS).softmax(-1)
    assert len(caplog.messages) == 1
    assert "made at test_deferred_logits.py:" in caplog.text


def test_evaluation_defers_without_a_graph() -> None:
    model = accel.defer_logits(Words())
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            logits = model(IDS)
            assert not of_rows(logits).requires_grad
            assert not logits.is_made
        assert not logits.requires_grad


def test_autocast_is_that_of_the_forward() -> None:
    model = accel.defer_logits(Words())
    plain = Words()
    _ = plain.load_state_dict(model.state_dict())
    found: list[Tensor] = []
    for each in (model, plain):
        with torch.autocast("cpu", torch.bfloat16):
            logits = each(IDS)
        assert logits.dtype == torch.bfloat16
        found.append(of_rows(logits.float()))
    torch.testing.assert_close(*found, rtol=1e-2, atol=1e-2)


class Total(torch.autograd.Function):
    """A function that torch calls without asking classes of tensors."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.shape = logits.shape
        return logits.sum()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return grad_outputs[0].expand(ctx.shape)


def test_a_gradient_never_gets_lost() -> None:
    """An autograd.Function hides its inputs from torch's classes; the error's line makes the logits."""
    model = accel.defer_logits(Words())
    with assert_raises(PrepareError, fix=r"logits \+ 0"):
        Total.apply(model(IDS)).backward()  # pyright: ignore
    logits = model(IDS)
    Total.apply(logits + 0).backward()  # pyright: ignore
    assert model.head.weight.grad is not None


def test_a_retained_graph_needs_logits_made_again() -> None:
    loss = of_rows(accel.defer_logits(Words())(IDS))
    loss.backward(retain_graph=True)
    with assert_raises(ConfigError, fix=r"recompute=True to linear_cross_entropy, or to accel\.defer_logits"):
        loss.backward()
    model = accel.prepare_model(ONE, accel.defer_logits(Words(), recompute=True))
    loss = of_rows(model(IDS))
    loss.backward(retain_graph=True)
    once = [each.grad.clone() for each in model.parameters() if each.grad is not None]
    loss.backward()
    for each, grad in zip(model.parameters(), once, strict=True):
        torch.testing.assert_close(each.grad, 2 * grad)


def test_users_hooks_on_the_head_get_logits() -> None:
    for register in ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"):
        model = accel.defer_logits(Words())
        _ = getattr(model.head, register)(lambda *_: None)
        assert type(model(IDS)) is Tensor, register


def test_a_model_without_one_linear_head_is_refused() -> None:
    with assert_raises(PrepareError, fix=r"defer_logits\(model"):
        _ = accel.defer_logits(nn.Sequential(nn.Linear(3, 3)))
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    assert accel.defer_logits(model, "1") is model
    with pytest.raises(PrepareError):
        _ = accel.prepare_model(ONE, nn.Linear(3, 3), plan=accel.parallel.Plan(logits="deferred"))


def test_prepare_keeps_and_sets_deferral() -> None:
    for model in (
        accel.prepare_model(ONE, accel.defer_logits(Words())),
        accel.prepare_model(ONE, Words(), plan=accel.parallel.Plan(logits="deferred")),
    ):
        assert isinstance(model(IDS), DeferredLogits)


@pytest.mark.slow
def test_whole_model_compile_gets_logits() -> None:
    model = accel.defer_logits(Words())
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    assert type(compiled(IDS)) is Tensor


MESHES: list[tuple[str, Any, dict[str, Any]]] = [
    ("dp=2", "ddp", {}),
    ("dp=2", "fsdp", {}),
    ("tp=2", "ddp", {}),
    ("cp=2", "ddp", {}),
    ("pp=2", "ddp", {}),
    ("dp=2,tp=2", "fsdp", {}),
    ("dp_replicate=2,dp_shard=2", "fsdp", {"tied": True}),
    ("pp=2,tp=2", "ddp", {}),
    ("pp=2,dp=2", "fsdp", {}),
]
QUICK = ("dp=2", "fsdp", {"tied": True})


@pytest.mark.parametrize(
    ("mesh", "strategy", "options"), [QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in MESHES)], ids=str
)
def test_meshes_train_as_with_logits(
    ranks: Simulator, mesh: str, strategy: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters, norms and losses in float64 as on one rank with logits, which are never made."""
    made: list[object] = []
    monkeypatch.setattr("accel.parallel.logits._logits._report", made.append)
    size = 1
    for each in mesh.split(","):
        size *= int(each.partition("=")[2])
    plain = ranks.run(lambda ctx: lm.train(ctx, "dp=1", accumulation=2, **options), 1, default_group=True)[0]
    plan = lm.plan_of(logits="deferred")

    def train(ctx: accel.DistContext) -> lm.Run:
        return lm.train(ctx, mesh, strategy=strategy, accumulation=2, plan=plan, **options)

    for run in ranks.run(train, size, default_group=True):
        for name, each in run.parameters.items():
            assert (each - plain.parameters[name]).abs().max() < 1e-10, name
    assert not made


class WithLoss(Words):
    """Computes its loss in the forward, where targets are given."""

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        logits = super().forward(ids)
        return logits if targets is None else functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def step(ctx: accel.DistContext, *, is_inside: bool = False, **fields: Any) -> list[Tensor]:
    """Return the loss in training and evaluation of a sharded model in float64, and its whole gradients."""
    ctx = accel.replace(ctx, mesh="dp=2", strategy="fsdp")
    with accel.seeding.seeded(ctx, 0):
        made: Any = WithLoss(tied=fields.pop("tied", False)).double()
    model: Any = accel.prepare_model(ctx, made, plan=accel.parallel.Plan(**fields))
    loss = model(IDS, TARGETS) if is_inside else of_rows(model(IDS))
    loss.backward()
    with torch.no_grad():
        logits = model(IDS)
        assert isinstance(logits, DeferredLogits) == (fields.get("logits") == "deferred")
        evaluated = of_rows(logits)
        assert logits.argmax(-1).shape == IDS.shape
    return [loss.detach(), evaluated, *[full_tensor(each.grad) for each in model.parameters()]]


def test_sharded_heads_and_evaluation(ranks: Simulator) -> None:
    """A head of the model's own unit and one that is a unit, its loss in the forward and after it; then an evaluation,
    whose loss and metric read the head after its parameters were resharded."""
    ways: list[dict[str, Any]] = [
        {},
        {"tied": True},
        {"units": ("head",)},
        {"is_inside": True, "reshard_after_forward": True},
    ]
    for way in ways:
        for got, want in zip(
            ranks.run(lambda ctx, way=way: step(ctx, logits="deferred", **way), 2, default_group=True),
            ranks.run(lambda ctx, way=way: step(ctx, **way), 2, default_group=True),
            strict=True,
        ):
            for one, other in zip(got, want, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_loss_after_the_head_was_resharded_is_refused_with_two_ways_out(ranks: Simulator) -> None:
    def refused(ctx: accel.DistContext) -> str:
        with pytest.raises(PrepareError) as caught:
            _ = step(ctx, logits="deferred", reshard_after_forward=True)
        return str(caught.value)

    for message in ranks.run(refused, 2, default_group=True):
        assert 'accel.parallel.Plan(logits="deferred")' in message  # the other test runs both ways
        assert "in the forward" in message


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
def test_messages_are_those_with_logits(ranks: Simulator, mesh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `fsdp` the same collectives; along tp one all-gather in place of the loss's two all-reduces."""

    def messages(**fields: Any) -> list[str]:
        with recorded(monkeypatch) as steps:
            plan = lm.plan_of(**fields)
            _ = ranks.run(lambda ctx: lm.train(ctx, mesh, strategy="fsdp", plan=plan), 2, default_group=True)
        return [each.what for items in steps[0] for each in items if isinstance(each, Collective)]

    found, expected = messages(logits="deferred"), messages()
    assert found == expected if mesh == "dp=2" else len(found) < len(expected)


SOME = ("BART", "Cohere", "Gemma 2", "GPT-2")  # a bias behind the head, a scale, a soft cap, older code
OF_TOKENS = [
    name for name, each in {**FAMILIES, **MORE}.items() if each.kind in ("words", "translation", "captions", "speech")
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SOME[:1] else pytest.mark.nightly) for name in OF_TOKENS]
)
def test_no_family_of_tokens_makes_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses of the loop and of `labels=`, in training and evaluation. Families of classes of images and sounds, and of
    embeddings, have no head of words."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    made: list[object] = []
    monkeypatch.setattr("accel.parallel.logits._logits._report", made.append)
    plain, deferred = families.make(name), accel.defer_logits(families.make(name))
    drawn = families.rows(name)[:3]
    batch = {key: torch.stack([each[key] for each in drawn]) for key in drawn[0]}
    given = {key: each for key, each in batch.items() if key not in ("target", "decoder_input_ids")}

    def losses(model: Any) -> list[Tensor]:
        model.zero_grad()
        loss, _ = families.loss_of(name, model, batch)
        with families.wider(name):
            of_labels = model(**given, labels=batch["target"]).loss
        (loss + of_labels).backward()
        with families.wider(name), torch.no_grad():  # after the backward: RWKV scales its weights in evaluation
            evaluated = model.eval()(**given, labels=batch["target"]).loss
        model.train()
        return [loss, of_labels, evaluated, *[each.grad for each in model.parameters() if each.grad is not None]]

    for want, got in zip(losses(plain), losses(deferred), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    assert not made
