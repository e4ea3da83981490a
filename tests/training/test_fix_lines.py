# SPDX-License-Identifier: Apache-2.0
"""Lines that refusals of prepare and of the step tell the user to write: each is run by the program that met it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from axis_programs import AXIS_PROGRAMS, Program
from stage_programs import STAGE_PROGRAMS

import accel
from accel.errors import AccelError
from accel.testing import Simulator

PACKAGE = Path(accel.__file__).parent
TESTS = Path(__file__).parents[1]
FOLDERS = ("training", "parallel/axes/*", "parallel/logits")
FILES = (
    "_prepare_model", "_refused", "_labels", "_leftovers", "_entries", "_watches", "_sharded", "_sync", "_empty",
    "_brought_shards", "_same_batches", "_copies", "_record", "_recorder",
    "_recomputed_run", "_compile", "parts/_region",
)  # fmt: skip

HELD_BY_A_VARIABLE = ("batch", "call", "start")  # problems that the refusing function is passed

# Lines that no test runs: torch.cuda.set_device, which needs two GPUs. A new refusal with a line to write gets a row of
# PROGRAMS.
MOST_WITHOUT = 1


class Site(NamedTuple):
    """A refusal whose fix holds code, by its file and the beginning of its problem."""

    file: str
    problem: str


def _text(node: ast.expr | None) -> str:
    found = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)] if node is not None else []
    return " ".join(each for each in found if isinstance(each, str))


def _sites() -> Iterator[Site]:
    paths = [PACKAGE / "parallel" / f"{name}.py" for name in FILES]
    for path in [*paths, *(each for folder in FOLDERS for each in sorted(PACKAGE.glob(f"{folder}/*.py")))]:
        tree = ast.parse(path.read_text())
        named = {ast.unparse(each.targets[0]): each.value for each in tree.body if isinstance(each, ast.Assign)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            fixes = [named.get(ast.unparse(each.value), each.value) for each in node.keywords if each.arg == "fix"]
            fix = re.sub(r"`pip install [^`]*`", "", _text(fixes[0]) if fixes else "")
            if re.search(r"\w\(.*\)|\w\[|\w ?= ?\S", fix):
                yield Site(
                    str(path.relative_to(PACKAGE)),
                    (_text(node.args[0]) or ast.unparse(node.args[0])) if node.args else "",
                )


NET = "net = nn.Linear(2, 1); optimizer = SGD(net.parameters(), lr=0.1); x = torch.ones(4, 2)\n"
PREPARED = NET + "model, optimizer = accel.prepare(ctx, net, optimizer); state = accel.train_state(ctx)\n"
BEGUN = PREPARED + "state = state.next(); loss = model(x).sum()\n"
ENDED = BEGUN + "state = accel.backward(ctx, loss, state, weight=4)\n"
HALF = PREPARED + (
    "state = accel.backward(ctx, model(x).sum(), accel.train_state(ctx, accumulation=2).next(), weight=4)\n"
)
STEP = "\nstate = accel.optimizer_step(ctx, optimizer, state); assert not state.sync and state.figures.stepped"
WHOLE = "\nstate = accel.backward(ctx, model(x).sum(), accel.train_state(ctx).next(), weight=4)" + STEP
TWO = (
    "one, two = nn.Linear(2, 1), nn.Linear(2, 1); x = torch.ones(4, 2)\n"
    "first, second = SGD(one.parameters(), lr=0.1), SGD(two.parameters(), lr=0.1)\n"
    "one, two, first, second = accel.prepare(ctx, one, two, first, second)\n"
    "state = accel.backward(ctx, (one(x) + two(x)).sum(), accel.train_state(ctx).next(), weight=4)\n"
)
UNUSED = (
    "net = nn.ModuleDict({'a': nn.Linear(2, 1), 'b': nn.Linear(2, 1)}); net.forward = lambda x: net['a'](x)\n"
    "model = net; x = torch.ones(4, 2)\n"
)
ENCODES = (
    "class Net(nn.Linear):\n    def encode(self, x): return self(x)\n"
    "model = net = Net(2, 1); x = torch.ones(4, 2); optimizer = SGD(net.parameters(), lr=0.1)\n"
)
DISCARD = "state = accel.training.discard(state, model)"
NEXT = "state = state.next(batch)"
BATCHES = PREPARED + (
    "data = torch.utils.data.TensorDataset(x)\n"
    "loader = accel.prepare_loader(ctx, torch.utils.data.DataLoader(data, batch_size=2))\n"
    "batch, other = accel.batches(ctx, loader, state)\n"
)
ABSENT = (
    "make = lambda: nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2)))\n"
    "folder = tempfile.mkdtemp(); model = make()\n"
)
DISPATCHED = "model = accel.disk_offload(model, None, 'cpu', scratch=folder).model"
PAIR = (
    "net = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1)); optimizer = SGD(net.parameters(), lr=0.1)\n"
    "x = torch.ones(4, 2)\n"
)
LOOKUPS = (
    "class Net(nn.Module):\n    def __init__(self, **options):\n        super().__init__()\n"
    "        self.table, self.head = nn.Embedding(4, 2, **options), nn.Linear(2, 1)\n"
    "    def forward(self, ids): return self.head(self.table(ids))\n"
    "ids = torch.zeros(4, dtype=torch.long); state = accel.train_state(ctx).next()\n"
)
ROUTED = (
    "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.layers = nn.ModuleList([nn.ModuleDict({'router': nn.Linear(2, 8)})])\n"
    "        router = self.layers[0]['router']; router.register_buffer('expert_bias', torch.zeros(8))\n"
    "        router.register_forward_hook(lambda _, given, out: (out.sum() * 0 + given[0].sum(), out.topk(2)[1]))\n"
    "        self.first = nn.Linear(2, 2)\n"
    "    def forward(self, x): return self.layers[0]['router'](self.first(x))[0] * 1\n"
    "model = net = Net(); x = torch.ones(4, 2); optimizer = SGD(net.parameters(), lr=0.1)\n"
    "ExpertLoad = accel.training.ExpertLoad; state = accel.train_state(ctx).next(); named = {'layers.*.router': 8}\n"
)
COUNTED = (
    "with accel.accumulate(ctx, state, model), load.counting(state):\n"
    "    state = accel.backward(ctx, model(x), state, weight=4)\n"
)
LAUNCHED = "ctx = dataclasses.replace(accel.replace(ctx, **{1}), launched={{{0!r}: 'the launcher'}})\n"
QUANTIZED = NET + (
    "from accel.engines import quantized; folder = tempfile.mkdtemp()\n"
    "make = lambda: nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))\n"
    "accel.save_model(accel.single('cpu'), make(), folder)\n"
    "build = lambda: accel.init_empty_weights(make); x = torch.ones(4, 64)\n"
    "load = lambda: quantized.load_quantized(\n"
    "    accel.single('cpu'), build(), folder, config=quantized.Torchao()).requires_grad_(False)\n"
)
LISTED = (
    "class Router(nn.Linear):\n    def __init__(self): super().__init__(2, 8, bias=False)\n"
    "    def forward(self, x): return super().forward(x).softmax(-1).topk(2)\n"
    "class Block(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.router = Router()\n"
    "        self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(8))\n"
    "    def forward(self, x):\n        weights, chosen = self.router(x); out = x * 0\n"
    "        for at, each in enumerate(self.experts):\n            row, choice = torch.where(chosen == at)\n"
    "            out = out.index_add(0, row, each(x[row]) * weights[row, choice, None])\n        return out\n"
    "net = nn.Module(); net.layers = nn.ModuleList([Block(), Block()]); x = torch.ones(4, 2)\n"
    "net.forward = lambda x: net.layers[1](net.layers[0](x))\n"
)
BY_PARTS = (
    "class Block(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.norm, self.up = nn.LayerNorm(2), nn.Linear(2, 2)\n"
    "    def forward(self, x): return x + self.up(self.norm(x))\n"
    "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.blocks = nn.ModuleList(Block() for _ in range(2))\n"
    "    def forward(self, x):\n        for each in self.blocks: x = x + each.up(each.norm(x))\n        return x\n"
    "model, x = Net(), torch.ones(2, 2)\n"
)
PROGRAMS: tuple[Program, ...] = (
    *AXIS_PROGRAMS,
    Program(
        "parallel/_entries.py",
        "the forward calls a part of a unit",
        BY_PARTS,
        "accel.prepare_model(ctx, model)(x)",
        'accel.prepare_model(ctx, model, plan=accel.parallel.Plan(units=("blocks.*.norm", "blocks.*.up",)))',
        "alone = model(x).detach()\ntorch.testing.assert_close({line}(x).detach(), alone)",
        ranks=2,
        strategy="fsdp",
    ),
    *STAGE_PROGRAMS,
    # the model, before it is prepared
    Program(
        "parallel/_refused.py",
        "a model that Accelerate has dispatched",
        "build = lambda: nn.Sequential(nn.Linear(2, 2)); model = build(); folder = tempfile.mkdtemp()\n"
        "model[0]._hf_hook = types.SimpleNamespace(offload=True)\n"
        "path = folder + '/model.safetensors'; safetensors.torch.save_file(build().state_dict(), path)\n",
        "accel.prepare_model(ctx, model)",
        'accel.load_checkpoint_and_dispatch(ctx, accel.init_empty_weights(build), path, "auto")',
        "model = {line}.model\nassert model(torch.ones(1, 2)).shape == (1, 2)",
    ),
    Program(
        "parallel/_refused.py",
        "a model to train in inference mode",
        "model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))\n",
        "with torch.inference_mode(): accel.prepare_model(ctx, model)",
        "model.requires_grad_(False)",
        "with torch.inference_mode():\n    {line}; out = accel.prepare_model(ctx, model)(torch.ones(1, 2))\n"
        "assert out.shape == (1, 2)",
        ranks=2,
    ),
    Program(
        "parallel/_refused.py",
        "transformers has cut the model into stages",
        "model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))\n"
        "kind = type('Stage', (nn.Linear,), {'__module__': 'transformers.distributed.pipeline_parallel'})\n",
        "model[1] = kind(2, 2)\naccel.prepare_model(ctx, model)",
        "accel.replace(ctx, mesh='pp=2')",
        "ctx = {line}\naccel.prepare_model(ctx, model, example=torch.ones(2, 2))",
        ranks=2,
    ),
    Program(
        "parallel/_refused.py",
        "torch.jit has compiled a module",
        "model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))\n",
        "model[0] = torch.jit.script(model[0]); accel.prepare_model(ctx, model)",
        "accel.compile_model(model)",
        "assert accel.prepare_model(ctx, {line})[0].weight.shape == (4, 4)",
        ranks=2,
        mesh="tp=2",
    ),
    Program(
        "parallel/_refused.py",
        "a module's own forward is replaced by a function that torch has compiled",
        "class Net(nn.Sequential):\n    def __init__(self):\n        super().__init__(nn.Linear(4, 4))\n"
        "        self.forward = torch.compile(self.forward)\n",
        "accel.prepare_model(ctx, Net())",
        "self.compile()",
        "class Net(nn.Sequential):\n    def __init__(self):\n        super().__init__(nn.Linear(4, 4))\n"
        "        {line}\naccel.prepare_model(ctx, Net())",
        ranks=2,
        mesh="cp=2",
    ),
    Program(
        "parallel/_refused.py",
        "weights that are not in memory cannot be trained",
        ABSENT,
        DISPATCHED + "; model.requires_grad_(True); accel.prepare_model(ctx, model)",
        "model.requires_grad_(False)",
        "{line}\n" + DISPATCHED + "; accel.prepare_model(ctx, model)",
    ),
    Program(
        "parallel/_refused.py",
        "weights that are not in memory cannot be spread",
        ABSENT,
        "model.requires_grad_(False); " + DISPATCHED + "; accel.prepare_model(ctx, model)",
        "prepare_model(ctx, model, allocate=False)",
        "model = accel.init_empty_weights(make)\n"
        "ctx = accel.replace(ctx, mesh='tp=2', plan=accel.parallel.Plan(tensor={'0.0': 'colwise', '1.0': 'rowwise'}))\n"
        "accel.{line}\n"
        "assert all(each.is_meta for each in model.parameters())",
        ranks=2,
    ),
    Program(
        "parallel/_refused.py",
        "master weights are for replicated parameters",
        NET,
        "ctx = accel.replace(ctx, precision=accel.precision.Precision(params='bf16', master_weights='fp32'))\n"
        "accel.prepare_model(ctx, net)",
        'precision="bf16"',
        "ctx = accel.replace(ctx, {line})\naccel.prepare_model(ctx, net)",
        ranks=2,
        strategy="fsdp",
    ),
    Program(
        "parallel/_refused.py",
        "an embedding bounds the rows",
        LOOKUPS + "max_norm = 1.0\n",
        "accel.prepare_model(ctx, Net(max_norm=max_norm))",
        "rows = rows * (max_norm / rows.norm(dim=-1, keepdim=True).clamp(min=max_norm))",
        "model = accel.prepare_model(ctx, Net()); rows = nn.Embedding(4, 64)(ids)\n{line}\n"
        "torch.testing.assert_close(rows.norm(dim=-1), torch.ones(4))",
        ranks=2,
    ),
    Program(
        "parallel/_refused.py",
        "sparse gradients are exchanged by DDP only",
        "make = functools.partial(nn.Embedding, 4, 2)\n",
        "accel.prepare_model(ctx, make(sparse=True))",
        "sparse=False",
        "accel.prepare_model(ctx, make({line}))",
        ranks=2,
        strategy="fsdp",
    ),
    Program(
        "parallel/_refused.py",
        "a parameter would get sparse gradients and dense ones",
        "class Tied(nn.Module):\n    def __init__(self, **options):\n        super().__init__()\n"
        "        self.words, self.head = nn.Embedding(4, 2, **options), nn.Linear(2, 4, bias=False)\n"
        "        self.head.weight = self.words.weight\n",
        "accel.prepare_model(ctx, Tied(sparse=True))",
        "sparse=False",
        "accel.prepare_model(ctx, Tied({line}))",
        ranks=2,
    ),
    # parameters and gradients, at the step
    Program(
        "parallel/_labels.py",
        "the optimizer was built before the model was sharded",
        NET + "model = net\n",
        "model = accel.prepare_model(ctx, net)" + WHOLE,
        "model, optimizer = accel.prepare(ctx, model, optimizer)",
        "{line}" + WHOLE,
        ranks=2,
        strategy="fsdp",
    ),
    Program(
        "parallel/_labels.py",
        "parameters took no part in the loss",
        UNUSED,
        "model = accel.prepare_model(ctx, net); optimizer = SGD(model.parameters(), lr=0.1)" + WHOLE,
        "accel.prepare_model(ctx, model, find_unused_parameters=True)",
        "model = {line}; optimizer = SGD(model.parameters(), lr=0.1)" + WHOLE,
        ranks=2,
    ),
    Program(
        "parallel/_labels.py",
        "gradients were not exchanged between ranks",
        ENCODES,
        "model = accel.prepare_model(ctx, net)\n"
        "state = accel.backward(ctx, net.encode(x).sum(), accel.train_state(ctx).next(), weight=4)" + STEP,
        'accel.prepare_model(ctx, model, plan=accel.parallel.Plan(methods=("encode",)))',
        "model = {line}\n"
        "state = accel.backward(ctx, model.encode(x).sum(), accel.train_state(ctx).next(), weight=4)" + STEP,
        ranks=2,
    ),
    Program(
        "parallel/_labels.py",
        "a parameter is not prepared, so its gradient stays",
        NET + "model = net\n",
        "accel.prepare_model(ctx, nn.Linear(2, 1))" + WHOLE,
        "model = accel.prepare_model(ctx, model)",
        "{line}" + WHOLE,
        ranks=2,
    ),
    Program(
        "parallel/_leftovers.py",
        "the gradients of this window's first micro-batch are gone",
        HALF,
        "optimizer.zero_grad(); state = state.next()\nwith accel.accumulate(ctx, state, model): pass",
        DISCARD,
        "{line}" + WHOLE,
    ),
    Program(
        "parallel/_sync.py",
        "a parameter became trainable after preparing",
        NET + "net.bias.requires_grad_(False); model = accel.prepare_model(ctx, net)\n",
        "net.bias.requires_grad_(True)\nwith accel.accumulate(ctx, accel.train_state(ctx).next(), model): pass",
        "accel.prepare_model(ctx, accel.unwrap_model(model))",
        "net.bias.requires_grad_(True); model = {line}" + WHOLE,
        ranks=2,
    ),
    Program(
        "parallel/_sync.py",
        "DDP records a static graph in a backward",
        NET + "model = accel.prepare_model(ctx, net, static_graph=True); train_state = accel.train_state\n",
        "with accel.accumulate(ctx, accel.train_state(ctx, accumulation=2).next(), model): pass",
        "train_state(ctx, sync_each_batch=True)",
        "with accel.accumulate(ctx, {line}.next(), model): pass",
        ranks=2,
    ),
    # the order of calls
    Program(
        "training/_train_state.py",
        "the window is not full",
        HALF + "batch = None\n",
        "state.next_epoch()",
        DISCARD,
        "{line}; state.next_epoch()",
    ),
    Program(
        "training/_train_state.py",
        "the state has no record of",
        ENDED,
        "state.next()",
        "state = accel.optimizer_step(ctx, optimizer, state)",
        "{line}; state.next()",
    ),
    Program(
        "training/_train_state.py",
        "call",
        TWO,
        "state = accel.optimizer_step(ctx, first, state); accel.optimizer_step(ctx, second, state)",
        "optimizer_step(ctx, [first, second], state)",
        "state = accel.{line}; assert state.figures.stepped",
    ),
    Program(
        "training/_train_state.py",
        "no model to discard the gradients of",
        HALF,
        "accel.training.discard(state)",
        DISCARD,
        "{line}" + WHOLE,
    ),
    Program(
        "training/_train_state.py",
        "the samples of this batch are counted already",
        BATCHES,
        "state = state.next(batch)\nfor _ in range(2): state = accel.backward(ctx, model(batch.data[0]).sum(), state)",
        "same_units=True",
        "state = accel.backward(ctx, model(batch.data[0]).sum(), state.next(batch))\n"
        "state = accel.backward(ctx, model(batch.data[0]).sum(), state, {line})" + STEP,
    ),
    Program(
        "training/_train_state.py",
        "the number of samples of this batch is not known",
        BEGUN + "count = 4\n",
        "accel.backward(ctx, loss, state)",
        "state = accel.backward(ctx, loss, state, weight=count)",
        "{line}" + STEP,
    ),
    Program(
        "training/_train_state.py",
        "the batch does not begin at the state's position",
        BATCHES,
        "state.next(other)",
        NEXT,
        "{line}\nstate = accel.backward(ctx, model(batch.data[0]).sum(), state)" + STEP,
    ),
    Program(
        "training/_train_state.py",
        "the batch does not begin at the state's position",
        BATCHES,
        "state.next(other)",
        "state = accel.training.discard(state.next(batch), model)",
        "{line}\nstate = accel.backward(ctx, model(other.data[0]).sum(), state.next(other))" + STEP,
    ),
    Program(
        "training/_backward.py",
        "the loss is a sum, and without weight= it must be a mean over the samples of the batch",
        BATCHES + "state = accel.train_state(ctx, accumulation=2).next(batch)\n"
        "loss = nn.functional.mse_loss(model(batch.data[0]), torch.ones(2, 1), reduction='sum')\n",
        "accel.backward(ctx, loss, state)",
        "state = accel.backward(ctx, loss / max(batch.valid, 1), state)",
        "{line}; state = state.next(other); loss = model(other.data[0]).mean(); {line}" + STEP,
    ),
    Program(
        "training/_train_state.py",
        "the batch was taken already",
        BATCHES + "state = accel.backward(ctx, model(batch.data[0]).sum(), state.next(batch))" + STEP + "\n",
        "state.next(batch)",
        "state = state.next()",
        "{line}\nstate = accel.backward(ctx, model(batch.data[0]).sum(), state, weight=batch.valid)" + STEP,
    ),
    Program(
        "training/_step.py",
        "some of the gradients were divided",
        TWO,
        "state = accel.unscale_gradients(ctx, first, state); accel.optimizer_step(ctx, [first, second], state)",
        "state = accel.unscale_gradients(ctx, [first, second], state)",
        "{line}; state = accel.optimizer_step(ctx, [first, second], state); assert state.figures.stepped",
    ),
    Program(
        "training/_resume.py",
        "start",
        PREPARED + "out, items = tempfile.mkdtemp(), {'model': model}\n",
        "accel.resume(ctx, out, items, None)",
        "state = accel.resume(ctx, out, items, accel.train_state(ctx))",
        "{line}; assert not state.updates",
    ),
    Program(
        "training/_resume.py",
        "resume does not return a value among the items",
        PREPARED + "out, items = tempfile.mkdtemp(), {'model': model, 'best': 1.0}\n"
        "accel.save_state(ctx, out, items | {'state': state}, step=1)\n",
        "accel.resume(ctx, out, items, state)",
        'loaded = accel.load_state(ctx, out, items | {"state": state})',
        "{line}; assert loaded['best'] == 1.0",
    ),
    Program(
        "training/parts.py",
        "weight= and retain_graph= need an accumulation",
        PREPARED + "loss, scaler, weight = model(x).sum(), accel.LossScale(), 4\n",
        "accel.training.parts.backward(ctx, loss, scaler, weight=weight)",
        "accum = accel.training.parts.backward(ctx, loss, scaler, accel.Accumulation().next(), weight=weight)",
        "{line}; accel.training.parts.optimizer_step(ctx, optimizer, scaler, accum)",
    ),
    Program(
        "training/_fused.py",
        "gradients of an earlier backward would be added",
        PREPARED + "model(x).sum().backward()\n",
        "accel.training.fused_step(ctx, model(x).sum(), optimizer)",
        "optimizer.zero_grad()",
        "{line}; accel.training.fused_step(ctx, model(x).sum(), optimizer)",
    ),
    Program(
        "training/parts.py",
        "the accumulation has no record of every backward",
        PREPARED + "loss, scaler, accum = model(x).sum(), accel.LossScale(), accel.Accumulation().next()\n",
        "_ = accel.training.parts.backward(ctx, loss, scaler, accum)\n"
        "accel.training.parts.optimizer_step(ctx, optimizer, scaler, accum)",
        "accum = accel.training.parts.backward(ctx, loss, scaler, accum, ...)",
        "exec({line!r}.replace(', ...', '')); accel.training.parts.optimizer_step(ctx, optimizer, scaler, accum)",
    ),
    Program(
        "training/_window.py",
        "the step would use gradients from before its window",
        PREPARED + "model(x).sum().backward()\n",
        "state = state.next()\nwith accel.accumulate(ctx, state, model):\n"
        "    state = accel.backward(ctx, model(x).sum(), state, weight=4)" + STEP,
        "accel.training.clear_gradients(model)",
        "{line}; state = state.next()\nwith accel.accumulate(ctx, state, model):\n"
        "    state = accel.backward(ctx, model(x).sum(), state, weight=4)" + STEP,
    ),
    Program(
        "training/_window.py",
        "complex gradients cannot be cut to a value",
        "net = nn.Linear(2, 1, dtype=torch.complex64); optimizer = SGD(net.parameters(), lr=0.1)\n"
        "state = accel.train_state(ctx).next(); loss = net(torch.ones(4, 2, dtype=torch.complex64)).abs().sum()\n"
        "state = accel.backward(ctx, loss, state, weight=4)\n",
        "accel.optimizer_step(ctx, optimizer, state, max_value=1.0)",
        "max_norm=",
        "assert accel.optimizer_step(ctx, optimizer, state, {line}1.0).figures.stepped",
    ),
    Program(
        "training/_window.py",
        "sparse gradients of two backward passes",
        LOOKUPS + "def run(model):\n    optimizer = SGD(model.parameters(), lr=0.1)\n"
        "    kept = accel.backward(ctx, model(ids).sum(), state, weight=4, retain_graph=True)\n"
        "    assert accel.optimizer_step(ctx, optimizer, kept).figures.stepped\n",
        "run(accel.prepare_model(ctx, Net(sparse=True)))",
        "sparse=False",
        "run(accel.prepare_model(ctx, Net({line})))",
        ranks=2,
    ),
    Program(
        "training/_backward.py",
        "some backward passes of this window have a weight",
        PREPARED + "accum, scaler = accel.Accumulation(steps=2).next(), accel.LossScale(); loss = model(x).sum()\n"
        "accum = accel.training.parts.backward(ctx, loss, scaler, accum, weight=4).next()\n",
        "accel.training.parts.backward(ctx, model(x).sum(), scaler, accum)",
        "weight=",
        "accum = accel.training.parts.backward(ctx, model(x).sum(), scaler, accum, {line}4)\n"
        "accel.training.parts.optimizer_step(ctx, optimizer, scaler, accum)",
    ),
    Program(
        "training/_backward.py",
        "gradients that ranks exchange have no graph",
        BEGUN + "scale = torch.ones((), requires_grad=True); tensors = [scale]; loss = (model(x) * scale).sum()\n",
        "accel.backward(ctx, loss, state, weight=4, create_graph=True)",
        "torch.autograd.grad(loss, tensors, create_graph=True)",
        "loss = loss + sum(each.square().sum() for each in {line})\n"
        "state = accel.backward(ctx, loss, state, weight=4)" + STEP,
        ranks=2,
    ),
    Program(
        "training/_backward.py",
        "parameters that are spread over ranks are no leaves",
        PAIR,
        "model, optimizer = accel.prepare(ctx, net, optimizer); state = accel.train_state(ctx).next()\n"
        "leaves = list(model[1].parameters()); accel.backward(ctx, model(x).sum(), state, weight=4, inputs=leaves)",
        "requires_grad_(False)",
        "net[0].{line}; optimizer = SGD(net[1].parameters(), lr=0.1)\n"
        "model, optimizer = accel.prepare(ctx, net, optimizer); state = accel.train_state(ctx).next()\n"
        "state = accel.backward(ctx, model(x).sum(), state, weight=4)" + STEP,
        ranks=2,
        strategy="fsdp",
    ),
    Program(
        "training/_backward.py",
        "DDP saw some gradients twice",
        "net = nn.ModuleDict({'a': nn.Linear(2, 2), 'b': nn.Linear(2, 2)}); x = torch.ones(4, 2)\n"
        "net.forward = lambda x: (net['a'](x).sum(), net['b'](net['a'](x)).sum())\n"
        "optimizer = SGD(net.parameters(), lr=0.1); model, optimizer = accel.prepare(ctx, net, optimizer)\n"
        "state = accel.train_state(ctx).next(); first, second = model(x)\n",
        "state = accel.backward(ctx, first, state, weight=4, retain_graph=True)\n"
        "state = accel.backward(ctx, second, state, weight=4)",
        "(first + second)",
        "state = accel.backward(ctx, {line}, state, weight=4)" + STEP,
        ranks=2,
    ),
    Program(
        "training/_backward.py",
        "DDP exchanges the gradients of a parameter either sparse",
        LOOKUPS,
        "model = accel.prepare_model(ctx, Net(sparse=True))\n"
        "accel.backward(ctx, model(ids).sum() + accel.unwrap_model(model).table.weight.sum(), state, weight=4)",
        "sparse=False",
        "model = accel.prepare_model(ctx, Net({line}))\n"
        "accel.backward(ctx, model(ids).sum() + accel.unwrap_model(model).table.weight.sum(), state, weight=4)",
        ranks=2,
    ),
    Program(
        "training/_backward.py",
        "the loss has no gradient",
        BEGUN,
        "accel.backward(ctx, loss.detach(), state, weight=4)",
        "detach()",
        "state = accel.backward(ctx, loss, state, weight=4)  # without {line}" + STEP,
    ),
    Program(
        "training/_refused.py",
        "the precision of this run has no effect",
        LAUNCHED.format("precision", "{'precision': 'bf16'}") + PREPARED,
        "state = accel.backward(ctx, model(x).sum(), state.next(), weight=4)" + STEP,
        "with accel.autocast(ctx):",
        "{line} loss = model(x).sum()\nstate = accel.backward(ctx, loss, state.next(), weight=4)" + STEP,
    ),
    Program(
        "training/_refused.py",
        "the accumulation of this run has no effect",
        LAUNCHED.format("accumulation", "{'accumulation': 2}") + PREPARED,
        "state = accel.backward(ctx, model(x).sum(), accel.train_state(ctx, accumulation=1).next(), weight=4)" + STEP,
        "accel.train_state(ctx)",
        "state = {line}\nfor _ in range(2): state = accel.backward(ctx, model(x).sum(), state.next(), weight=4)" + STEP,
    ),
    Program(
        "training/_refused.py",
        "a dimension of this run's mesh has no effect",
        LAUNCHED.format("mesh", "{'mesh': 'tp=2'}")
        + NET
        + "state = accel.backward(ctx, net(x).sum(), accel.train_state(ctx).next(), weight=4)\n",
        "state = accel.optimizer_step(ctx, optimizer, state)",
        "ctx = accel.replace(ctx, mesh=ctx.mesh)",
        "{line}\nassert 'mesh' not in ctx.launched",
        ranks=2,
    ),
    Program(
        "training/_refused.py",
        "ReduceLROnPlateau needs a metric",
        ENDED + "scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer); metric = 1.0\n",
        "accel.optimizer_step(ctx, optimizer, state, scheduler=scheduler)",
        "scheduler.step(metric)",
        "state = accel.optimizer_step(ctx, optimizer, state); {line}",
    ),
    Program(
        "training/_refused.py",
        "a gradient of step",
        BEGUN + "state = accel.backward(ctx, loss * float('inf'), state, weight=4)\n",
        "accel.optimizer_step(ctx, optimizer, state)",
        "nonfinite='skip'",
        "assert not accel.optimizer_step(ctx, optimizer, state, {line}).figures.stepped",
    ),
    Program(
        "training/_step.py",
        "the learning rate's cycle is over",
        PREPARED + "OneCycleLR = functools.partial(torch.optim.lr_scheduler.OneCycleLR, optimizer, max_lr=0.1)\n"
        "take = lambda state, scheduler: accel.optimizer_step(\n"
        "    ctx, optimizer, accel.backward(ctx, model(x).sum(), state.next(), weight=4), scheduler=scheduler)\n",
        "scheduler = OneCycleLR(total_steps=2)\nfor _ in range(3): state = take(state, scheduler)",
        "accel.total_steps(...)",
        "data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x))\n"
        "total = eval({line!r}.replace('...', 'accel.prepare_loader(ctx, data), accumulation=1, epochs=1'))\n"
        "scheduler = OneCycleLR(total_steps=total)\nfor _ in range(3): state = take(state, scheduler)",
    ),
    Program(
        "training/_loss_sums.py",
        "loss_fn returns a mean",
        PREPARED + "cross_entropy, logits, targets = nn.functional.cross_entropy, None, torch.zeros(4, 1)\n"
        "x = torch.arange(8.0).view(4, 2); loss_fn = lambda logits, targets: nn.functional.mse_loss(logits, targets)\n"
        "state = state.next()\n",
        "accel.forward_backward(ctx, model, state, x, loss_fn=loss_fn, targets=targets, weight=4)",
        "losses.sum()",
        "loss_fn = lambda logits, targets: (lambda losses: {line})((logits - targets).square())\n"
        "accel.forward_backward(ctx, model, state, x, loss_fn=loss_fn, targets=targets, weight=4)",
    ),
    Program(
        "training/_evaluating.py",
        "the average cannot take a step with an unknown outcome",
        ENDED.replace("SGD(net.parameters(), lr=0.1)", "torch.optim.AdamW(net.parameters(), fused=True)")
        + "ema = accel.training.Ema(model, decay=0.9)\n",
        "state = accel.optimizer_step(ctx, optimizer, state, nonfinite='defer'); ema.update_(model)",
        "nonfinite='skip'",
        "state = accel.optimizer_step(ctx, optimizer, state, {line}); ema.update_(model)",
    ),
    Program(
        "training/_expert_load.py",
        "no experts to count at",
        ROUTED,
        "ExpertLoad(model, experts={'none': 8})",
        'experts={"layers.*.router": 8}',
        "ExpertLoad(model, {line})",
    ),
    Program(
        "training/_expert_load.py",
        "no router has a bias",
        ROUTED,
        "ExpertLoad(model, experts=named, speed=0.1)",
        'bias="expert_bias"',
        "ExpertLoad(model, experts=named, speed=0.1, {line})",
    ),
    Program(
        "training/_expert_load.py",
        "another ExpertLoad moves this bias",
        ROUTED + "make = functools.partial(ExpertLoad, model, experts=named, speed=0.1, bias='expert_bias')\n"
        "first = make()\n",
        "make()",
        "close()",
        "first.{line}; make()",
    ),
    Program(
        "training/_expert_load.py",
        "the counts of the window before were not taken",
        ROUTED
        + "load = ExpertLoad(model, experts=named)\n"
        + COUNTED
        + "state = accel.optimizer_step(ctx, optimizer, state)\n",
        "state = state.next()\n" + COUNTED,
        "counts = load.update_(ctx, state)",
        "{line}; state = state.next()\n" + COUNTED,
    ),
    Program(
        "training/_expert_load.py",
        "the window's tokens were not counted",
        ROUTED + "load = ExpertLoad(model, experts=named)\n",
        "state = accel.backward(ctx, model(x), state, weight=4)\n"
        "state = accel.optimizer_step(ctx, optimizer, state); load.update_(ctx, state)",
        "with accel.accumulate(ctx, state, model), load.counting(state):",
        "{line}\n    state = accel.backward(ctx, model(x), state, weight=4)\n"
        "state = accel.optimizer_step(ctx, optimizer, state); counts = load.update_(ctx, state)\n"
        "assert int(next(iter(counts.layers.values())).sum()) == 8",
    ),
    Program(
        "training/_expert_load.py",
        "no experts were called in the block",
        ROUTED + "load = ExpertLoad(model, experts=named)\n",
        "with load.counting(state): pass",
        "with accel.accumulate(ctx, state, model), load.counting(state):",
        "{line}\n    state = accel.backward(ctx, model(x), state, weight=4)",
    ),
    Program(
        "parallel/_watches.py",
        "the forward changes sharded parameters",
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.first, self.last = nn.Linear(2, 4), nn.Linear(4, 1)\n"
        "    def forward(self, x):\n        with torch.no_grad(): self.first.weight.mul_(0.9)\n"
        "        return self.last(self.first(x))\n"
        "net = Net(); x = torch.ones(4, 2)\n",
        "ctx = accel.replace(ctx, strategy='fsdp'); accel.prepare_model(ctx, net)(x)",
        'accel.replace(ctx, strategy="ddp")',
        "accel.prepare_model({line}, net)(x)",
        ranks=2,
        strategy="fsdp",
    ),
    Program(
        "parallel/_watches.py",
        "the forward computes with a parameter as ranks keep it",
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.first, self.last = nn.Linear(2, 4), nn.Linear(4, 1)\n"
        "        self.gain = nn.Parameter(torch.ones(()))\n"
        "    def forward(self, x):\n"
        "        scaled = {name: one * self.gain for name, one in self.first.named_parameters()}\n"
        "        return self.last(torch.func.functional_call(self.first, scaled, (x,)))\n"
        "net = Net(); x = torch.ones(4, 2)\n",
        "plan = accel.parallel.Plan(tensor={'first': 'colwise', 'last': 'rowwise'})\n"
        "accel.prepare_model(accel.replace(ctx, mesh='tp=2', plan=plan), net)(x)",
        'accel.replace(ctx, strategy="ddp")',
        "accel.prepare_model({line}, net)(x)",
        ranks=2,
    ),
    Program(
        "parallel/axes/replicate/_ddp.py",
        "two prepared models share parameters",
        "from functools import partial; prepare = partial(accel.prepare_model, ctx); x = torch.ones(4, 2)\n"
        "encoder = nn.Linear(2, 2); nets = [nn.Sequential(encoder, nn.Linear(2, 1)) for _ in range(2)]\n",
        "first, second = map(prepare, nets); first(x).mean() + second(x).mean()",
        "gradient_as_bucket_view=False",
        "first, second = (prepare(net, {line}) for net in nets); (first(x).mean() + second(x).mean()).backward()",
        ranks=2,
    ),
    Program(
        "parallel/_labels.py",
        "the loss computes with parameters as ranks keep them",
        "net = nn.Linear(2, 1); x = torch.ones(4, 2); factor = 0.1; state = accel.train_state(ctx).next()\n",
        "model = accel.prepare_model(ctx, net)\n"
        "penalty = sum(each.square().sum() for each in model.parameters())\n"  # a forward would gather the outer unit
        "accel.backward(ctx, model(x).mean() + factor * penalty, state, weight=4)",
        "weight_decay=2 * factor",
        "model, optimizer = accel.prepare(ctx, net, torch.optim.SGD(net.parameters(), lr=0.1, {line}))\n"
        "state = accel.backward(ctx, model(x).mean(), state, weight=4)\n"
        "accel.optimizer_step(ctx, optimizer, state)",
        ranks=2,
        strategy="fsdp",
    ),
    Program(
        "parallel/_labels.py",
        "the backward calls a module again",
        "class Again(torch.autograd.Function):\n"
        "    @staticmethod\n"
        "    def forward(ctx, x, blocks):\n"
        "        ctx.x, ctx.blocks = x, blocks\n"
        "        return nn.Sequential(*blocks)(x)\n"
        "    @staticmethod\n"
        "    def backward(ctx, gradient):\n"
        "        with torch.enable_grad():\n"
        "            x = found = ctx.x.detach().requires_grad_()\n"
        "            for block in ctx.blocks:\n"
        "                found = block.inner(found)\n"
        "        found.backward(gradient)\n"
        "        return x.grad, None\n"
        "class Inner(nn.Linear): pass\n"
        "class Block(nn.Module):\n"
        "    def __init__(self): super().__init__(); self.inner = Inner(2, 2)\n"
        "    def forward(self, x): return self.inner(x)\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__(); self.first = nn.Linear(2, 2); self.blocks = nn.ModuleList([Block(), Block()])\n"
        "    def forward(self, x): return Again.apply(self.first(x), self.blocks)\n"
        "net = Net(); x = torch.ones(4, 2); state = accel.train_state(ctx).next()\n",
        "accel.backward(ctx, accel.prepare_model(ctx, net)(x).mean(), state, weight=4)",
        'plan=accel.parallel.Plan(units=("Inner",))',
        "model, optimizer = accel.prepare(ctx, net, torch.optim.SGD(net.parameters(), lr=0.1), {line})\n"
        "state = accel.backward(ctx, model(x).mean(), state, weight=4)\n"
        "accel.optimizer_step(ctx, optimizer, state)",
        ranks=2,
        strategy="fsdp",
    ),
    Program(
        "parallel/_labels.py",
        "hooks on gradients of sharded parameters",
        "model = accel.prepare_model(ctx, nn.Linear(2, 1)); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "state = accel.train_state(ctx).next(); x = torch.ones(4, 2); seen = []\n",
        "for parameter in model.parameters(): parameter.register_hook(lambda grad: grad * 2)\n"
        "state = accel.backward(ctx, model(x).mean(), state, weight=4)\n"
        "accel.optimizer_step(ctx, optimizer, state)",
        "parameter.register_post_accumulate_grad_hook(hook)",
        "hook = seen.append\nfor parameter in model.parameters(): {line}\n"
        "state = accel.backward(ctx, model(x).mean(), state, weight=4)\n"
        "accel.optimizer_step(ctx, optimizer, state); assert len(seen) == 2",
        ranks=2,
        strategy="fsdp",
    ),
    Program(
        "parallel/_entries.py",
        "a part of a sharded model is called outside",
        "net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)); x = torch.ones(4, 2)\n",
        "model = accel.prepare_model(ctx, net); model.forward(x)",
        "model(...)",
        "model = accel.prepare_model(ctx, net); assert eval({line!r}.replace('...', 'x')).shape == (4, 1)",
        ranks=2,
        strategy="fsdp",
    ),
    Program(
        "parallel/_empty.py",
        "the model has no values yet",
        "model = accel.init_empty_weights(lambda: nn.Linear(2, 1)); path = tempfile.mkdtemp()\n"
        "path = accel.save_state(ctx, path, {'model': nn.Linear(2, 1)}, step=1)\n"
        "model = accel.prepare_model(ctx, model)\n",
        "model(torch.ones(1, 2))",
        "accel.load_state(ctx, path, {'model': model})",
        "{line}; model(torch.ones(1, 2))",
    ),
    Program(
        "parallel/axes/shard/_units.py",
        "a parameter that is not sharded is trainable",
        "net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)); plan = accel.parallel.Plan(ignored=('0',))\n",
        "accel.prepare_model(ctx, net, plan=plan)",
        "requires_grad_(False)",
        "net[0].{line}; accel.prepare_model(ctx, net, plan=plan)",
        ranks=2,
        strategy="fsdp",
    ),
    Program(
        "parallel/axes/shard/_options.py",
        "parameters would be gathered in a format",
        NET + "plan = accel.parallel.Plan(gather_dtype='bf16')\n",
        "accel.prepare_model(ctx, net, plan=plan)",
        "precision='bf16'",
        "accel.prepare_model(accel.replace(ctx, {line}), net, plan=plan)",
        ranks=2,
        strategy="fsdp",
    ),
    Program(
        "parallel/axes/shard/_options.py",
        "a module computes without autocast",
        NET + "ctx = accel.replace(ctx, precision='bf16'); Plan = accel.parallel.Plan\n"
        "run = lambda model: torch.autocast('cpu', enabled=False)(model)(x)\n",
        "run(accel.prepare_model(ctx, net))",
        "Plan(gather_dtype='fp32')",
        "run(accel.prepare_model(ctx, net, plan={line}))",
        ranks=2,
        strategy="fsdp",
    ),
    Program(
        "parallel/axes/replicate/_local_sgd.py",
        "ranks exchange this model's gradients at every step",
        PREPARED,
        "accel.parallel.local_sgd_step(ctx, model, accel.parallel.LocalSgd(every=2))",
        "accel.unwrap_model(model)",
        "accel.parallel.prepare_local_model(ctx, {line})",
        ranks=2,
    ),
    Program(
        "parallel/axes/replicate/_local_sgd.py",
        "a model for local SGD has no values",
        "model = nn.Linear(2, 1, device='meta')\n",
        "accel.parallel.prepare_local_model(ctx, model)",
        "model.to_empty(device='cpu')",
        "{line}; accel.parallel.prepare_local_model(ctx, model)",
        ranks=2,
    ),
    Program(
        "parallel/axes/replicate/_ddp.py",
        "DDP does not exchange float32 gradients",
        NET,
        "ctx = accel.replace(ctx, precision=accel.precision.Precision(params='bf16', master_weights='fp32'))\n"
        "accel.prepare_model(ctx, net.to(torch.bfloat16), find_unused_parameters=True)",
        'precision="bf16"',
        "accel.prepare_model(accel.replace(ctx, {line}), net, find_unused_parameters=True)",
        ranks=2,
    ),
    Program(
        "training/_closure.py",
        "the optimizer would not get the gradients",
        BATCHES + "state = state.next(batch); closure = lambda: model(batch.data[0]).sum()\n",
        "accel.optimizer_step(ctx, optimizer, state, closure=closure, max_norm=1.0)",
        "state = accel.optimizer_step(ctx, optimizer, state, closure=closure)",
        "{line}; assert state.updates == 1",
    ),
    Program(
        "training/_window.py",
        "the loss scale is not the one of the gradients",
        TWO + "parts, scaler, accum = accel.training.parts, accel.LossScale(scale=8.0), accel.Accumulation().next()\n"
        "accum = parts.backward(ctx, (one(x) + two(x)).sum(), scaler, accum, weight=4)\n",
        "parts.optimizer_step(ctx, first, accel.LossScale(scale=4.0), accum)",
        "optimizer_step(ctx, [first, second], ...)",
        "assert eval('parts.' + {line!r}.replace('...', 'scaler, accum')).stepped",
    ),
    Program(
        "training/_prepare.py",
        "a ZeroRedundancyOptimizer steps its own parameters",
        NET + "from torch.distributed.optim import ZeroRedundancyOptimizer as Zero\n"
        "masters = accel.precision.Precision(params='bf16', master_weights='fp32')\n",
        "accel.prepare(accel.replace(ctx, precision=masters), net, Zero(net.parameters(), SGD, lr=0.1))",
        'strategy="fsdp"',
        'ctx = accel.replace(ctx, {line}, precision="bf16"); accel.prepare(ctx, net, optimizer)',
        ranks=2,
    ),
    Program(
        "training/_prepare.py",
        "this parameter cannot have master weights",
        NET + "masters = accel.precision.Precision(params='bf16', master_weights='fp32')\n",
        "net.to(torch.bfloat16); accel.prepare_optimizer(accel.replace(ctx, precision=masters), optimizer)",
        'precision="bf16"',
        "accel.prepare(accel.replace(ctx, {line}), net, optimizer)",
    ),
    Program(
        "training/_evaluating.py",
        "an average takes weights between passes",
        NET + "from accel.parallel._modules import note_module\n",
        "note_module(net, emptied='an engine'); accel.training.Ema(net)",
        "strategy='fsdp'",
        "model = accel.prepare_model(accel.replace(ctx, {line}), net); accel.training.Ema(model)",
        ranks=2,
    ),
    Program(
        "training/_expert_load.py",
        "the experts of tokens do not show where",
        ROUTED,
        "load = ExpertLoad(model, experts={'first': 8})\n" + COUNTED,
        'experts={"layers.*.router": 8}',
        "load = ExpertLoad(model, {line})\n" + COUNTED,
    ),
    Program(
        "parallel/axes/replicate/_local_sgd.py",
        "ranks hold different models between two averages",
        NET + "model = accel.parallel.prepare_local_model(ctx, net); local_sgd_step = accel.parallel.local_sgd_step\n"
        "state = accel.backward(ctx, model(x).sum(), accel.train_state(ctx).next(), weight=4)\n"
        "accel.optimizer_step(ctx, optimizer, state); local = accel.parallel.LocalSgd(every=2)\n",
        "local_sgd_step(ctx, model, local).check_saveable()",
        "local_sgd_step(..., last=True)",
        "eval({line!r}.replace('...', 'ctx, model, local')).check_saveable()",
        ranks=2,
    ),
    Program(
        "parallel/_sharded.py",
        "the module holds parts of its parameters",
        NET + "state = net.state_dict(); folder = accel.broadcast_object_list(ctx, [tempfile.mkdtemp()])[0]\n"
        "path = accel.save(ctx, state, f'{folder}/net.safetensors')\n"
        "model = accel.prepare_model(ctx, net)\n",
        "model.load_state_dict(state)",
        "accel.bigmodel.load_checkpoint_in_model(ctx, model, path)",
        ranks=2,
        strategy="fsdp",
    ),
    Program(
        "parallel/axes/shard/_running.py",
        "fully_shard has sharded the module",
        "import copy\n" + NET + "ctx = accel.replace(ctx, strategy='fsdp'); model = net\n",
        "copy.deepcopy(accel.prepare_model(ctx, model))",
        "frozen = accel.prepare_model(ctx, copy.deepcopy(model))",
        "{line}; model = accel.prepare_model(ctx, model); assert torch.equal(model(x), frozen(x))",
        ranks=2,
    ),
    Program(
        "parallel/axes/shard/_running.py",
        "a transform of torch.func gives a sharded module other parameters",
        "import copy\n" + NET + "ctx = accel.replace(ctx, strategy='fsdp'); plain = copy.deepcopy(net)\n"
        "model = accel.prepare_model(ctx, net)\n"
        "def gradients(own):\n    values = {name: each.detach() for name, each in own.named_parameters()}\n"
        "    call = lambda given: torch.func.functional_call(own, given, (x,)).sum()\n"
        "    return torch.func.grad(call)(values)\n",
        "gradients(model)",
        "plain.load_state_dict(accel.get_state_dict(ctx, model, dst=None))",
        "{line}; assert gradients(plain)['weight'].tolist() == [[4.0, 4.0]]",
        ranks=2,
    ),
    Program(
        "parallel/axes/shard/_fully_shard.py",
        "each rank drops blocks at random",
        "class Net(nn.Module):\n    layerdrop = 0.1\n    def __init__(self):\n        super().__init__()\n"
        "        make = lambda: nn.Sequential(nn.Linear(2, 2)); self.blocks = nn.ModuleList([make(), make()])\n"
        "    def forward(self, x):\n        for each in self.blocks: x = each(x)\n        return x\n"
        "net = Net(); x = torch.ones(4, 2)\n",
        "accel.prepare_model(accel.replace(ctx, strategy='fsdp'), net)(x)",
        "find_unused_parameters=True",
        "accel.prepare_model(ctx, net, {line})(x)",
        ranks=2,
    ),
    Program(
        "parallel/_entries.py",
        "the plan names what is no method or submodule",
        "class Net(nn.Module):\n    def forward(self, x): return x * 1\n"
        "model = Net(); x = torch.ones(4, 2); plan = accel.parallel.Plan(methods=('encode',))\n",
        "accel.prepare_model(ctx, model, plan=plan)",
        "model(...)",
        "model = accel.prepare_model(ctx, model); assert torch.equal(eval({line!r}.replace('...', 'x')), x)",
    ),
    Program(
        "parallel/_refused.py",
        "Accelerate has prepared the model",
        "class Wide:\n    def __init__(self, forward): self.model_forward = forward\n"
        "    def __call__(self, *given): return self.model_forward(*given).float()\n"
        "model = nn.Linear(2, 1); own = model.forward\n"
        "class accelerator:\n    def unwrap_model(model, keep_fp32_wrapper):\n"
        "        del model.forward, model._original_forward; return model\n",
        "model._original_forward, model.forward = own, Wide(own); accel.prepare_model(ctx, model)",
        "accelerator.unwrap_model(model, keep_fp32_wrapper=False)",
        "model._original_forward, model.forward = own, Wide(own); accel.prepare_model(ctx, {line})",
    ),
    Program(
        "parallel/_refused.py",
        "quantized weights cannot be divided",
        QUANTIZED,
        'accel.prepare_model(accel.replace(ctx, strategy="fsdp"), load())',
        'strategy="ddp"',
        "accel.prepare_model(accel.replace(ctx, {line}), load())(x)",
        ranks=2,
        needs="torchao",
    ),
    Program(
        "parallel/_refused.py",
        "quantized weights cannot be trained",
        QUANTIZED,
        "model = load().requires_grad_(True); accel.prepare_model(ctx, model)",
        "model.get_parameter(name).requires_grad_(False)",
        "model = load().requires_grad_(True)\nfor name in ('0.weight', '1.weight'): {line}\n"
        "accel.prepare_model(ctx, model)(x)",
        needs="torchao",
    ),
    Program(
        "parallel/_same_batches.py",
        "ranks that share samples were given different",
        PAIR
        + "model = accel.prepare_model(ctx, net); data = torch.utils.data.TensorDataset(torch.arange(8.0).view(4, 2))\n"
        "sampler = torch.utils.data.DistributedSampler(data, ctx.world_size, ctx.rank)\n",
        "for (each,) in torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler): model(each)",
        "accel.prepare_loader(ctx, loader)",
        "loader = torch.utils.data.DataLoader(data, batch_size=2)\n"
        "for batch in accel.batches(ctx, {line}): model(batch.data[0])",
        ranks=2,
        mesh="tp=2",
    ),
    *(
        Program(
            "parallel/_watches.py",
            "the forward computes with a parameter as ranks keep it",
            "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        self.block, self.up, self.down = nn.Linear(2, 2), nn.Linear(2, 4), nn.Linear(4, 2)\n"
            f"    def forward(self, x):\n        weight = {read}; return self.down(self.up(x @ weight))\n"
            "net = Net(); x = torch.ones(4, 2); expected = net(x)\n"
            "plan = accel.parallel.Plan(tensor={'up': 'colwise', 'down': 'rowwise'})\n",
            "accel.prepare_model(ctx, net, plan=plan)(x)",
            "weight = self.block.weight",
            "def forward(self, x): {line}; return self.down(self.up(x @ weight))\n"
            "Net.forward = forward; torch.testing.assert_close(accel.prepare_model(ctx, net, plan=plan)(x), expected)",
            ranks=2,
            mesh="tp=2",
        )
        for read in ("dict(self.named_parameters())['block.weight']", "self.get_parameter('block.weight')")
    ),
    Program(
        "parallel/_watches.py",
        "a line computes with a parameter as ranks keep it",
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__(); self.inner, self.last = nn.Linear(2, 4), nn.Linear(4, 1)\n"
        "    def encode(self, x): return self.inner(x)\n"
        "    def forward(self, x): return self.last(self.encode(x))\n"
        "model, x = Net(), torch.ones(4, 2); expected = model.encode(x)\n",
        "model = accel.prepare_model(ctx, model)\n"
        "with accel.accumulate(ctx, accel.train_state(ctx).next(), model): x @ model.inner.weight.T",
        'model = accel.prepare_model(ctx, model, plan=accel.parallel.Plan(methods=("encode",)))',
        "{line}\ntorch.testing.assert_close(model.encode(x), expected)",
        ranks=2,
        strategy="fsdp",
    ),
    Program(
        "parallel/_watches.py",
        "the forward computes with a parameter as ranks keep it",
        "class Block(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__(); self.inner, self.gain = nn.Linear(2, 2), nn.Parameter(torch.ones(2))\n"
        "    def forward(self, x): return x + self.inner(x)\n"
        "    def read(self, x): return x * self.gain\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__(); self.blocks, self.last = nn.ModuleList([Block(), Block()]), nn.Linear(2, 1)\n"
        "    def forward(self, x): return self.last(self.blocks[0].read(self.blocks[1](self.blocks[0](x))))\n"
        "net = Net(); x = torch.ones(4, 2); expected = net(x)\n",
        "accel.prepare_model(ctx, net)(x)",
        "plan=accel.parallel.Plan(units=())",
        "torch.testing.assert_close(accel.prepare_model(ctx, net, {line})(x), expected)",
        ranks=2,
        strategy="fsdp",
    ),
    Program(
        "parallel/_watches.py",
        "the forward computes with a parameter as ranks keep it",
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.block, self.layer = nn.Module(), nn.Linear(2, 2)\n"
        "        self.block.weight = nn.Parameter(torch.ones(()))\n"
        "    def forward(self, x): return self.layer(x) * self.get_parameter('block.weight')\n"
        "net = Net(); x = torch.ones(4, 2); expected = net(x)\n",
        "accel.prepare_model(ctx, net)(x)",
        "weight = self.block.weight",
        "def forward(self, x): {line}; return self.layer(x) * weight\n"
        "Net.forward = forward; torch.testing.assert_close(accel.prepare_model(ctx, net)(x), expected)",
        ranks=2,
        strategy="fsdp",
    ),
    Program(
        "parallel/_brought_shards.py",
        "another library has divided experts",
        LISTED + "from torch.distributed.tensor import Shard, distribute_tensor\n"
        "plan = accel.parallel.Plan(experts={'layers.*.experts': 'dispatch'}, tensor={})\n",
        "mesh = torch.distributed.init_device_mesh('cpu', (2,), mesh_dim_names=('ep',))\n"
        "expert = net.layers[0].experts[0]\n"
        "expert.weight = nn.Parameter(distribute_tensor(expert.weight.detach(), mesh, [Shard(0)]))\n"
        "accel.prepare_model(ctx, net)",
        "accel.replace(ctx, mesh='dp=2,ep=2')",
        "accel.prepare_model({line}, net, plan=plan)(x)",
        ranks=2,
    ),
    Program(
        "parallel/axes/shard/_options.py",
        "torch cannot combine the axes",
        PAIR
        + "sizes = dict(pp=1, dp=2, tp=2, cp=2); plan = accel.parallel.Plan(tensor={'0': 'colwise', '1': 'rowwise'})\n"
        "mesh = torch.distributed.init_device_mesh('cpu', tuple(sizes.values()), mesh_dim_names=tuple(sizes))\n",
        "accel.prepare_model(accel.replace(ctx, mesh=mesh), net, plan=plan)",
        "accel.replace(ctx, mesh=...)",
        "ctx = eval({line!r}.replace('...', repr('pp=1,dp=2,cp=2,tp=2'))); accel.prepare_model(ctx, net, plan=plan)",
        ranks=8,
        strategy="fsdp",
    ),
    Program(
        "training/_expert_load.py",
        "the rows of experts in a list do not show",
        LISTED + "model = accel.prepare_model(ctx, net); ExpertLoad = accel.training.ExpertLoad\n"
        "state, mask = accel.train_state(ctx).next(), torch.ones(4)\n",
        "load = ExpertLoad(model, experts={'layers.*.experts': 8})\nwith load.counting(state, mask=mask): model(x)",
        'experts={"layers.*.router": 8}',
        "load = ExpertLoad(model, {line})\nwith load.counting(state, mask=mask): model(x)",
    ),
    Program(
        "parallel/axes/experts/_listed.py",
        "this loop over a list of experts cannot be divided among ranks",
        LISTED + "class Own(Block):\n    def forward(self, x): return super().forward(x.add_(1))\n"
        "class Experts(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.up = nn.Parameter(torch.ones(8, 2, 2))\n"
        "    def forward(self, tokens, indices, weights):\n        out = tokens * 0\n"
        "        for at, up in enumerate(self.up):\n            row, choice = torch.where(indices == at)\n"
        "            out = out.index_add(0, row, tokens[row] @ up * weights[row, choice, None])\n"
        "        return out\n"
        "class Stacked(Block):\n    def __init__(self):\n        super().__init__(); self.experts = Experts()\n"
        "run = lambda block: accel.prepare_model(ctx, nn.Sequential(block), plan=accel.parallel.Plan(\n"
        "    experts={'0.experts': 'dispatch'}))(x)\n",
        "run(Own())",
        "forward(tokens, indices, weights)",
        "def call(self, tokens):\n"
        "    weights, indices = self.router(tokens); forward = self.experts; return {line}\n"
        "Stacked.forward = call; assert run(Stacked()).shape == x.shape",
        ranks=2,
        mesh="dp=2,ep=2",
    ),
    Program(
        "training/_find_lr.py",
        "batch",
        PREPARED + "data = [{'x': torch.ones(2), 'y': torch.ones(1)} for _ in range(8)]\n"
        "loader = accel.prepare_loader(ctx, torch.utils.data.DataLoader(data, batch_size=4))\n"
        "loss_fn = nn.MSELoss(reduction='sum'); find_lr = accel.schedules.find_lr\n"
        "find = functools.partial(find_lr, ctx, state, loader, model, optimizer, loss_fn, steps=10)\n",
        "find()",
        'unpack=lambda batch: (batch.data["x"], batch.data["y"], None)',
        "find({line})",
    ),
    Program(
        "training/_generate.py",
        "the model attends to later tokens",
        "from transformers import BertConfig, BertLMHeadModel\n"
        "sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=8)\n"
        "config = BertConfig(**sizes)\n"
        "ids = torch.ones(1, 3, dtype=torch.long)\n",
        "model = BertLMHeadModel(config); accel.training.generate(ctx, model, ids, max_new_tokens=2)",
        "config.is_decoder = True",
        "{line}; model = BertLMHeadModel(config); accel.training.generate(ctx, model, ids, max_new_tokens=2)",
        needs="transformers",
    ),
    Program(
        "training/_resume.py",
        "the checkpoint holds more than one state",
        PREPARED + "out, items = tempfile.mkdtemp(), {'model': model}\n"
        "accel.save_state(ctx, out, items | {'state': state, 'other': state}, step=1)\n",
        "accel.resume(ctx, out, items, state)",
        "loaded = accel.load_state(ctx, out, items | {'other': state, 'state': None})",
        "{line}; assert loaded['other'] == state",
    ),
    Program(
        "parallel/_brought_shards.py",
        "a parametrization computes with parts",
        PAIR + "from torch.distributed.tensor import Replicate, Shard, distribute_tensor\n"
        "class Gathers(nn.Module):\n"
        "    def forward(self, part): return part.redistribute(placements=[Replicate()]).to_local()\n",
        "mesh = torch.distributed.init_device_mesh('cpu', (2,), mesh_dim_names=('fsdp',))\n"
        "net[0].weight = nn.Parameter(distribute_tensor(net[0].weight.detach(), mesh, [Shard(0)]))\n"
        "nn.utils.parametrize.register_parametrization(net[0], 'weight', Gathers(), unsafe=True)\n"
        "accel.prepare_model(ctx, net)",
        'accel.replace(ctx, strategy="fsdp")',
        "accel.prepare_model({line}, net)(x)",
        ranks=2,
    ),
    Program(
        "parallel/_recomputed_run.py",
        "a recomputed block changes one of its arguments",
        "class Block(nn.Module):\n    def __init__(self):\n        super().__init__(); self.layer = nn.Linear(4, 4)\n"
        "    def forward(self, x, seen): seen.append(1); return self.layer(x)\n"
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.blocks = nn.ModuleList([Block(), Block()])\n"
        "    def forward(self, x):\n        seen = []\n"
        "        for each in self.blocks: x = each(x, seen)\n        return x * len(seen)\n"
        "model = Net(); x = torch.ones(2, 4)\n",
        "accel.checkpoint_activations(model)(x).sum().backward()",
        'accel.checkpoint_activations(model, lambda name, module: type(module).__name__ == "Linear")',
        "{line}; model(x).sum().backward()",
    ),
    Program(
        "parallel/_compile.py",
        "a block keeps the outputs of other operators already",
        "model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))\n"
        "model = accel.checkpoint_activations(model, lambda name, module: name == '0')\n",
        "accel.checkpoint_activations(model, keep='products')",
        "select=",
        "accel.checkpoint_activations(model, {line}lambda name, module: name == '1', keep='products')",
    ),
    Program(
        "parallel/_compile.py",
        "torch does not compile layers that overlap messages with matmuls",
        "model = nn.Sequential(nn.Linear(2, 4), nn.GELU(), nn.Linear(4, 2))\n"
        "styles = {'0': 'colwise', '2': 'rowwise'}; Plan = functools.partial(accel.parallel.Plan, tensor=styles)\n",
        "accel.compile_model(accel.prepare_model(ctx, model, plan=Plan(overlap=True)))",
        "plan=accel.parallel.Plan(overlap=False)",
        "plan = {line!r}.replace('accel.parallel.', '')\n"
        "accel.compile_model(eval(f'accel.prepare_model(ctx, model, {plan})'))",
        ranks=2,
        mesh="tp=2",
    ),
)

# Sites whose line another test runs: the function that does.
ELSEWHERE = {
    Site("training/_loss_sums.py", "loss_fn returns a value that the model has computed"): (
        "training/test_loss_probe.py", "_own"
    ),
    Site("training/_loss_sums.py", "the model has computed its loss with rows that fill up"): (
        "training/test_loss_probe.py", "test_a_loss_of_the_models_own_takes_the_line_to_write"
    ),
    Site("training/_loss_sums.py", "loss_fn reads a tensor of a module in another stage"): (
        "parallel/test_replayed_forms.py",
        "test_a_loss_that_reads_what_modules_of_another_stage_keep_takes_the_line_to_write",
    ),
    Site("training/_prepare.py", "the optimizer was built on other parameters"): (
        "training/test_lines_to_write.py", "test_a_criterion_with_parameters_is_prepared_along"
    ),
    Site("training/_backward.py", "a block that reentrant checkpointing runs several times"): (
        "training/test_lines_to_write.py", "test_reentrant_checkpoints_of_a_shared_block_are_told_the_other_kind"
    ),
    Site("training/_decoding.py", "the logits do not have the classes of the model"): (
        "post_training/test_sample.py", "test_logits_of_a_part_of_the_classes_are_refused_with_the_right_flag"
    ),
    Site("training/_closure.py", "a step with a closure is for one optimizer"): (
        "training/test_closures.py", "test_shards_and_loss_scales_are_refused"
    ),
    Site("training/_closure.py", "each evaluation of a closure is a full window"): (
        "training/test_closures.py", "test_a_window_of_several_batches_is_refused"
    ),
    Site("parallel/_recomputed_run.py", "recomputed blocks keep no keys and values in a forward with gradients"): (
        "parallel/test_recomputed_arguments.py", "test_an_emptied_cache_says_so_where_it_would_be_missed"
    ),
    Site("parallel/axes/tensor/_part_layers.py", "torch has compiled a first part of the module"): (
        "parallel/test_compiled_breaks.py", "test_a_model_that_is_compiled_whole_may_break_its_graph_around_blocks"
    ),
}  # fmt: skip

SCOPE = (
    "import dataclasses, functools, tempfile, types\n"
    "import accel, safetensors.torch, torch\n"
    "from torch import nn\n"
    "from torch.optim import SGD\n"
)


def _is_of(site: Site, file: str, problem: str) -> bool:
    return site.file == file and site.problem.startswith(problem)


def assert_refused(program: Program, call: Callable[[], object]) -> None:
    with pytest.raises(AccelError) as caught:
        _ = call()
    problem = re.sub(r"^rank \d+: ", "", caught.value.problem)  # where ranks compared their errors
    assert problem.startswith(program.problem) or program.problem in HELD_BY_A_VARIABLE
    assert program.line in caught.value.fix, caught.value.fix


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of ZeroRedundancyOptimizer
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda each: f"{each.problem[:40]} ({each.file})")
def test_the_line_of_a_refusal_mends_the_program(ranks: Simulator, program: Program) -> None:
    if program.needs:
        _ = pytest.importorskip(program.needs)

    def scope(ctx: accel.DistContext) -> dict[str, Any]:
        mesh = {} if program.mesh is None else {"mesh": program.mesh}
        names: dict[str, Any] = {}
        exec(SCOPE, names)
        names["ctx"] = accel.replace(ctx, strategy=program.strategy, **mesh)
        exec(program.before, names)
        return names

    def refused(ctx: accel.DistContext) -> None:
        exec(program.refused, scope(ctx))

    def mended(ctx: accel.DistContext) -> None:
        names = scope(ctx)
        if not program.alone:
            assert_refused(program, lambda: exec(program.refused, names))
            exec(program.before, names)
        exec(program.then.replace("{line!r}", repr(program.line)).replace("{line}", program.line), names)

    if program.alone:
        assert_refused(program, lambda: ranks.run(refused, program.ranks, default_group=True))
    _ = ranks.run(mended, program.ranks, default_group=True)


def test_every_line_that_a_refusal_has_is_run() -> None:
    sites = set(_sites())
    assert len(sites) > 60
    stale = [each for each in PROGRAMS if not any(_is_of(site, each.file, each.problem) for site in sites)]
    assert not stale, stale
    for known, (file, function) in ELSEWHERE.items():
        assert any(_is_of(site, known.file, known.problem) for site in sites), known
        body = (TESTS / file).read_text().partition(f"def {function}(")[2].partition("\ndef ")[0]
        assert "exec(" in body, f"{file} does not run a line in {function}"
    run = [*ELSEWHERE, *(Site(each.file, each.problem) for each in PROGRAMS)]
    without = sorted(site for site in sites if not any(_is_of(site, each.file, each.problem) for each in run))
    assert len(without) <= MOST_WITHOUT, "no test runs the lines of:\n" + "\n".join(f"{a}: {b}" for a, b in without)
