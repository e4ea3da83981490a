# SPDX-License-Identifier: Apache-2.0
"""Heads of the style "colwise": logits that leave a model, real or deferred, and losses of the wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import pytest
import torch
from catching import assert_raises
from steps import begin_batch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm

import accel
from accel import post_training
from accel.errors import ConfigError, PrepareError, StepError
from accel.random import Key
from accel.tensors import full_tensor
from accel.testing import Simulator

WORDS, WIDTH = 33, 4
IDS = torch.arange(12).view(2, 6) * 7 % WORDS
TARGETS = (IDS + 1) % WORDS


class Named(NamedTuple):
    logits: Tensor
    more: object


@dataclass
class Record:
    logits: Tensor
    loss: Tensor | None = None


RETURNED: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tensor": (lambda logits: logits, lambda output: output),
    "dict in a list": (lambda logits: [{"logits": logits}], lambda output: output[0]["logits"]),
    "named tuple": (lambda logits: Named(logits, 3), lambda output: output.logits),
    "dataclass": (Record, lambda output: output.logits),
    "dataclass in a tuple": (lambda logits: (3, Record(logits)), lambda output: output[1].logits),
    "scaled last token": (lambda logits: logits[:, -1] / 0.7, lambda output: output),
    "rows": (lambda logits: logits.view(-1, WORDS), lambda output: output),
    "with a bias of all words": (lambda logits: logits + torch.linspace(0, 1, WORDS), lambda output: output),
}
WHOLE: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda logits: logits.mean(-1),
    "twice": lambda logits: torch.cat([logits, logits], -1),
    "cross entropy": lambda logits: functional.cross_entropy(logits.flatten(0, 1), IDS.flatten()),
}
REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "greedy": lambda logits: logits.argmax(-1),
    "top-k": lambda logits: logits.topk(3, -1).values,
    "some words": lambda logits: logits[..., :20],
    "a word that is masked": lambda logits: logits.index_fill(-1, IDS[0, :1], -1.0),
    "log-probability": lambda logits: logits.log_softmax(-1).gather(-1, IDS[..., None]),
}


class Net(nn.Module):
    def __init__(self, made: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.made = made
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Any:
        return self.made(self.head(self.embed(ids)))


def net(ctx: accel.DistContext, made: Callable[[Tensor], Any], style: Any = "colwise", **plan: Any) -> nn.Module:
    torch.manual_seed(0)
    if ctx.world_size == 1:
        return Net(made).double()
    ctx = accel.replace(ctx, mesh=f"tp={ctx.world_size}")
    return accel.prepare_model(ctx, Net(made).double(), plan=accel.parallel.Plan(tensor={"head": style}, **plan))


def run(ctx: accel.DistContext, made: Callable[[Tensor], Any], read: Callable[[Any], Tensor], **plan: Any) -> Any:
    """The output, real, and all gradients."""
    model = net(ctx, made, **plan)
    logits = read(model(IDS)) + 0
    assert type(logits) is Tensor
    logits.square().sum().backward()
    return logits.detach(), [full_tensor(each.grad) for each in model.parameters() if each.grad is not None]


KINDS: list[dict[str, Any]] = [{}, {"logits": "deferred"}, {"sequence": True}]


@pytest.mark.parametrize("plan", KINDS, ids=str)
def test_own_words_leave_a_model_in_any_container(ranks: Simulator, plan: dict[str, Any]) -> None:
    for made, read in RETURNED.values():
        expected, grads = run(accel.single(), made, read)
        found = ranks.run(lambda ctx, made=made, read=read: run(ctx, made, read, **plan), 2, default_group=True)
        torch.testing.assert_close(torch.cat([each for each, _ in found], -1), expected, rtol=1e-10, atol=1e-10)
        for _, own in found:
            torch.testing.assert_close(own, grads, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("plan", KINDS, ids=str)
def test_functions_of_all_words_in_the_forward_are_right_or_refused(ranks: Simulator, plan: dict[str, Any]) -> None:
    def result(ctx: accel.DistContext, made: Callable[[Tensor], Tensor]) -> Any:
        return run(ctx, made, lambda output: output, **plan)

    for made in WHOLE.values():
        expected, grads = run(accel.single(), made, lambda output: output)
        for whole, own in ranks.run(lambda ctx, made=made: result(ctx, made), 2, default_group=True):
            torch.testing.assert_close(whole, expected, rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(own, grads, rtol=1e-10, atol=1e-10)

    def refused(ctx: accel.DistContext) -> list[str]:
        found: list[str] = []
        for name, made in REFUSED.items():
            with pytest.raises(PrepareError) as caught:
                _ = result(ctx, made)
            found += [name] if "has no rule" in str(caught.value) else []
        return found

    assert ranks.run(refused, 2, default_group=True) == [list(REFUSED)] * 2


def test_a_loss_in_the_forward_with_a_context_without_tp_is_an_error(ranks: Simulator) -> None:
    """It would be of this rank's words, without an error where these have all targets."""
    one, few = accel.single(), TARGETS % 5

    class Reads(Net):
        def forward(self, ids: Tensor) -> Any:
            return accel.parallel.linear_cross_entropy(one, self.embed(ids), self.head.weight, few)

    def rank(ctx: accel.DistContext) -> bool:
        ctx = accel.replace(ctx, mesh="tp=2")
        losses: list[Callable[[Tensor], Tensor]] = [
            lambda logits: accel.parallel.vocab_cross_entropy(one, logits, few),
            lambda logits: post_training.token_logprobs(one, logits, few, vocab_parallel=True),
        ]
        for model in (*map(Net, losses), Reads(nn.Identity())):
            model = accel.prepare_model(ctx, model, plan=accel.parallel.Plan(tensor={"head": "colwise"}))
            with assert_raises(ConfigError, problem="the context has no tp"):
                model(IDS)
        return True

    assert ranks.run(rank, 2, default_group=True) == [True, True]


class Hidden(Net):
    def forward(self, ids: Tensor) -> Tensor:
        return self.embed(ids)


def test_a_loss_function_that_reads_the_weight_of_a_head_is_an_error_or_calls_the_head(ranks: Simulator) -> None:
    def stepped(ctx: accel.DistContext, of_hidden: Callable[[accel.DistContext, Any, Tensor], Tensor]) -> Tensor:
        torch.manual_seed(0)
        model: Any = Hidden(nn.Identity()).double()
        if ctx.world_size > 1:
            ctx = accel.replace(ctx, mesh="tp=2")
            model = accel.prepare_model(ctx, model, plan=accel.parallel.Plan(tensor={"head": "colwise"}))
        loss, _ = accel.forward_backward(
            ctx, model, begin_batch(ctx), IDS, loss_fn=lambda hidden: of_hidden(ctx, model, hidden), weight=12
        )
        return loss

    def by_head(ctx: accel.DistContext, model: Any, hidden: Tensor) -> Tensor:
        return accel.parallel.vocab_cross_entropy(ctx, model.head(hidden), TARGETS)

    def by_weight(ctx: accel.DistContext, model: Any, hidden: Tensor) -> Tensor:
        return accel.parallel.vocab_cross_entropy(ctx, functional.linear(hidden, model.head.weight), TARGETS)

    def rank(ctx: accel.DistContext) -> Tensor:
        with assert_raises(StepError, problem="as ranks keep it", fix="Call the module"):
            _ = stepped(ctx, by_weight)
        return stepped(ctx, by_head)

    expected = stepped(accel.single(), by_head)
    for found in ranks.run(rank, 2, default_group=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_a_loss_in_the_forward_takes_own_words(ranks: Simulator) -> None:
    """And returns the whole loss; `token_logprobs` too. The flag of other logits is an error."""

    def losses(ctx: accel.DistContext, **plan: Any) -> list[Tensor]:
        along = accel.replace(ctx, mesh="tp=2") if ctx.world_size > 1 else ctx

        def both(logits: Tensor) -> list[Tensor]:
            scores = post_training.token_logprobs(along, logits, TARGETS, vocab_parallel=True)
            return [accel.parallel.vocab_cross_entropy(along, logits * 2, TARGETS), scores]

        return [each.detach() for each in net(ctx, both, **plan)(IDS)]

    expected = losses(accel.single())
    for plan in KINDS:
        for found in ranks.run(lambda ctx, plan=plan: losses(ctx, **plan), 2, default_group=True):
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


class WithLoss(nn.Module):
    """Returns its loss, by a function that takes this rank's words or the weight of the head."""

    def __init__(self, ctx: accel.DistContext, loss: str) -> None:
        super().__init__()
        self.ctx, self.loss = ctx, loss
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embed(ids)
        hidden = hidden + self.down(self.up(hidden).relu())
        if self.loss == "linear":
            total = accel.parallel.linear_cross_entropy(self.ctx, hidden, self.head.weight, targets, reduction="sum")
        elif self.loss == "logprobs":
            total = -post_training.token_logprobs(self.ctx, self.head(hidden), targets, vocab_parallel=True).sum()
        else:
            total = accel.parallel.vocab_cross_entropy(self.ctx, self.head(hidden), targets)
        return total / targets.numel()


def losses_of_steps(
    ctx: accel.DistContext, loss: str, mesh: str = "", head: Any = "colwise", length: int = 6
) -> list[float]:
    """Losses that a model returns in three steps."""
    torch.manual_seed(0)
    ctx = accel.replace(ctx, mesh=mesh) if mesh else ctx
    net = WithLoss(ctx, loss).double()
    ids = torch.arange(2 * length).view(2, length) * 7 % WORDS
    part = accel.parallel.split_sequence(ctx, {"ids": ids, "targets": (ids + 1) % WORDS}, shift=())
    batch = part["ids"], part["targets"]
    example = None if "cp" in mesh else batch
    styles = {"up": "colwise", "down": "rowwise", "head": head}
    plan = accel.parallel.Plan(head=head) if example else accel.parallel.Plan(tensor=styles)
    model, optimizer = accel.prepare(
        ctx, net, torch.optim.SGD(net.parameters(), lr=0.5), example=example, plan=plan if mesh else None
    )
    state, found = accel.train_state(ctx), list[float]()
    for _ in range(3):
        state = begin_batch(ctx, state)
        mean = model(*batch)
        found.append(float(mean.detach()))
        state = accel.optimizer_step(ctx, optimizer, accel.backward(ctx, mean, state, weight=1))
    return found


LOSSES = ("vocab", "linear", "logprobs")


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_in_a_forward_with_a_plan_that_is_found(ranks: Simulator, loss: str) -> None:
    """The plan is found on one rank, so the loss does not communicate then. The head is divided as the plan says."""
    expected = losses_of_steps(accel.single(), loss)
    for found in ranks.run(lambda ctx: losses_of_steps(ctx, loss, "tp=2"), 2, default_group=True):
        assert found == pytest.approx(expected, rel=1e-10)

    def gathered(ctx: accel.DistContext) -> bool:
        with assert_raises(ConfigError, fix=r'plan=accel\.parallel\.Plan\(head="colwise"\)'):
            _ = losses_of_steps(ctx, loss, "tp=2", None)
        return True

    if loss != "linear":  # which takes a whole weight too
        assert ranks.run(gathered, 2, default_group=True) == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_in_a_forward_takes_own_words_of_own_positions(ranks: Simulator, loss: str) -> None:
    expected = losses_of_steps(accel.single(), loss, length=8)
    runs = ranks.run(lambda ctx: losses_of_steps(ctx, loss, "cp=2,tp=2", length=8), 4, default_group=True)
    assert all(found == pytest.approx(expected, rel=1e-10) for found in runs)


class ScaledHead(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 40)
        self.factor = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize(
    ("head", "kind"),
    [(ScaledHead, "a ScaledHead"), (lambda: weight_norm(nn.Linear(8, 40)), "a ParametrizedLinear")],
    ids=["further parameter", "parametrized"],
)
def test_a_head_that_no_style_divides_is_refused_with_a_found_plan(
    ranks: Simulator, head: Callable[[], nn.Module], kind: str
) -> None:
    def rank(ctx: accel.DistContext) -> bool:
        block = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        model = nn.Sequential(nn.Embedding(40, 8), block, head())
        plan = accel.parallel.Plan(head="colwise")
        with assert_raises(PrepareError, got=f"2: colwise is of linear layers.*{kind}"):
            _ = accel.prepare_model(accel.replace(ctx, mesh="tp=2"), model, example=IDS, plan=plan)
        return True

    assert ranks.run(rank, 2, default_group=True) == [True, True]


@pytest.mark.parametrize("plan", KINDS, ids=str)
def test_returned_logits_of_own_words_need_the_flag_and_the_context(ranks: Simulator, plan: dict[str, Any]) -> None:
    """Without them a loss is of a rank's words, without an error where these have all targets."""
    few = TARGETS % 5

    def rank(ctx: accel.DistContext) -> bool:
        along = accel.replace(ctx, mesh="tp=2")
        logits = net(ctx, lambda logits: logits, **plan)(IDS)
        with assert_raises(ConfigError, fix="vocab_parallel=True"):
            _ = post_training.token_logprobs(along, logits, few)
        with assert_raises(ConfigError, fix="the context that prepare_model got"):
            _ = post_training.token_logprobs(accel.single(), logits, few, vocab_parallel=True)
        with assert_raises(ConfigError, got="this rank's classes", fix="the context that prepare_model got"):
            _ = accel.parallel.vocab_cross_entropy(accel.single(), logits, few)
        return True

    assert ranks.run(rank, 2, default_group=True) == [True, True]


@pytest.mark.parametrize("plan", KINDS[:2], ids=str)
@pytest.mark.parametrize("style", ["colwise_gather_output", "replicated"])
def test_losses_of_own_words_refuse_logits_of_all_words(ranks: Simulator, style: str, plan: dict[str, Any]) -> None:
    """They would be wrong by the logarithm of the number of ranks. So would parts of them."""

    def refused(ctx: accel.DistContext) -> bool:
        logits = net(ctx, lambda logits: logits, style, **plan)(IDS)
        ctx = accel.replace(ctx, mesh="tp=2")
        for each in (logits, logits.detach(), logits[:, :1], logits.float() / 3):
            targets = TARGETS[:, : each.shape[1]]
            with pytest.raises(ConfigError):
                _ = accel.parallel.vocab_cross_entropy(ctx, each, targets)
            with pytest.raises(ConfigError):
                _ = post_training.token_logprobs(ctx, each, targets, vocab_parallel=True)
        return True

    assert ranks.run(refused, 2, default_group=True) == [True, True]


class Sums(Net):
    """Predicts by all words up to one."""

    def __init__(self) -> None:
        super().__init__(lambda logits: logits)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids).cumsum(1).sin())


@pytest.mark.parametrize("plan", KINDS[:2], ids=str)
def test_tokens_are_drawn_of_all_words_or_refused(ranks: Simulator, plan: dict[str, Any]) -> None:
    """Of words that ranks divide unevenly, too; and logits that the flag does not describe are an error."""
    options: dict[str, Any] = {"max_new_tokens": 5, "temperature": 1.0, "key": Key(3)}

    def tokens(ctx: accel.DistContext, style: Any = "colwise", **more: Any) -> Tensor:
        torch.manual_seed(0)
        model = Sums().double()
        if ctx.world_size > 1:
            ctx = accel.replace(ctx, mesh="tp=2")
            model = accel.prepare_model(ctx, model, plan=accel.parallel.Plan(tensor={"head": style}, **plan))
        return accel.training.generate(ctx, model, IDS, **options, **more)

    def rank(ctx: accel.DistContext) -> list[Tensor]:
        for style in ("colwise", "colwise_gather_output"):
            with assert_raises(ConfigError, got="17 along tp=2" if style == "colwise" else "66 along tp=2"):
                _ = tokens(ctx, style, vocab_parallel=style != "colwise")
        return [tokens(ctx, vocab_parallel=True), tokens(ctx, "colwise_gather_output")]

    expected = tokens(accel.single())
    for found in ranks.run(rank, 2, default_group=True):
        assert all(torch.equal(each, expected) for each in found)


class Biased(nn.Module):
    """A head with a bias of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.bias = nn.Parameter(torch.linspace(-1, 1, WORDS))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids)) + self.bias


@pytest.mark.parametrize("style", ["colwise", "colwise_gather_output"])
def test_a_bias_of_all_words_gets_its_whole_gradient_from_deferred_logits(ranks: Simulator, style: Any) -> None:
    def bias_gradient(ctx: accel.DistContext) -> Tensor:
        torch.manual_seed(0)
        model = Biased().double()
        if ctx.world_size > 1:
            ctx = accel.replace(ctx, mesh="tp=2")
            plan = accel.parallel.Plan(tensor={"head": style}, logits="deferred")
            model = accel.prepare_model(ctx, model, plan=plan)
        logits = model(IDS)
        if style == "colwise":
            loss = accel.parallel.vocab_cross_entropy(ctx, logits, TARGETS)
        else:
            loss = functional.cross_entropy(logits.flatten(0, 1), TARGETS.flatten(), reduction="sum")
        loss.backward()
        return full_tensor(cast(Tensor, model.bias.grad))

    expected = bias_gradient(accel.single())
    for found in ranks.run(bias_gradient, 2, default_group=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_on_an_accelerator_equal_logits_give_nan(ranks: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel.parallel.logits._vocabulary._waits", lambda _: True)
    model = Net(lambda logits: logits)

    def rank(ctx: accel.DistContext) -> bool:
        logits = model(IDS).detach().requires_grad_()
        loss = accel.parallel.vocab_cross_entropy(accel.replace(ctx, mesh="tp=2"), logits, TARGETS)
        loss.backward()
        return bool(loss.isnan() & logits.grad.isnan().all())

    assert ranks.run(rank, 2, default_group=True) == [True, True]


def test_own_words_with_few_values_are_no_error(ranks: Simulator) -> None:
    """A head of zeros gives each rank the same logits; so may all but one of the rows."""

    def rank(ctx: accel.DistContext) -> list[Tensor]:
        along = accel.replace(ctx, mesh="tp=2")
        one = torch.zeros(3, 17)
        one[1, 5] = ctx.rank
        masked = torch.full((3, 17), -torch.inf)
        masked[:, 0] = 0.0
        ids = torch.tensor([0, 17, 0])  # that are not masked
        return [accel.parallel.vocab_cross_entropy(along, each, ids) for each in (torch.zeros(3, 17), one, masked)]

    expected = 3 * torch.tensor([34.0, 2.0]).log()
    for zeros, one, masked in ranks.run(rank, 2, default_group=True):
        torch.testing.assert_close(torch.stack([zeros, masked]), expected)
        assert one.isfinite()


@pytest.mark.parametrize("value", [-1e9, -1e30])
def test_own_words_with_rows_and_words_of_a_masks_finite_value_are_no_error(ranks: Simulator, value: float) -> None:
    """A sum with such values would round the difference of the other logits away."""

    def rank(ctx: accel.DistContext) -> Tensor:
        logits = torch.randn(6, 8, generator=torch.Generator().manual_seed(ctx.rank))
        logits[2:4] = value
        logits[:, 2:5] = value
        ids = torch.tensor([0, 9, 2, 3, 6, 15])
        return accel.parallel.vocab_cross_entropy(accel.replace(ctx, mesh="tp=2"), logits, ids)

    assert all(loss.isfinite() for loss in ranks.run(rank, 2, default_group=True))


def test_a_target_that_is_no_class_makes_gradients_nan_too(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> Any:
        along = accel.replace(ctx, mesh="tp=2")
        logits = torch.randn(2, 3, generator=torch.Generator().manual_seed(ctx.rank)).requires_grad_()
        targets = torch.tensor([1, 6])
        accel.parallel.vocab_cross_entropy(along, logits, targets).backward()
        scores = post_training.token_logprobs(along, logits, targets, vocab_parallel=True)
        masked = torch.where(targets < 6, scores, 0.0)
        return logits.grad, torch.autograd.grad(masked.sum(), logits)[0]

    for grad, masked in ranks.run(rank, 2, default_group=True):
        assert grad[0].isfinite().all()
        assert grad[1].isnan().all()
        assert masked.isfinite().all()
