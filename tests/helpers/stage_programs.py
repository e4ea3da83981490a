# SPDX-License-Identifier: Apache-2.0
"""Programs that pipelines refuse by what a forward calls, and what it passes between stages."""

from __future__ import annotations

from axis_programs import Program

OTHER_ORDERS = (
    "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4)); self.order = [0, 1, 2, 3]\n"
    "    def forward(self, x, many=None):\n"
    "        for at in self.order if many is None else many: x = self.blocks[at](x)\n        return x\n"
    "model = Net(); x = torch.ones(4, 4); Plan = accel.parallel.Plan; state = accel.train_state(ctx).next()\n"
    "train = lambda model, *batch: accel.forward_backward(\n"
    "    ctx, model, state, batch, loss_fn=lambda out: out.sum(), weight=4)\n"
)
BETWEEN = (
    "x = torch.ones(4, 4); state = accel.train_state(ctx).next(); PLAN = accel.parallel.Plan(micro_batches=2)\n"
    "def train(model): return accel.forward_backward(ctx, accel.prepare_model(ctx, model, plan=PLAN, example=x),\n"
    "    state, (x,), loss_fn=lambda out: out.sum(), weight=4)\n"
)
STAGE_PROGRAMS: tuple[Program, ...] = (
    Program(
        "parallel/axes/pipeline/_planned.py",
        "the forward calls modules in another order than the stages",
        OTHER_ORDERS + "batch = (x, [2, 3, 0, 1])\n",
        "train(accel.prepare_model(ctx, model, example=x), *batch)",
        "accel.prepare(..., example=batch)",
        "model = eval({line!r}.replace('...', 'ctx, model')); train(model, *batch)",
        ranks=2,
        mesh="pp=2",
    ),
    Program(
        "parallel/axes/pipeline/_planned.py",
        "the last stage calls none of its modules",
        OTHER_ORDERS + "batch = (x, [0, 1])\n",
        "train(accel.prepare_model(ctx, model, example=x), *batch)",
        "accel.prepare(..., example=batch)",
        "model = eval({line!r}.replace('...', 'ctx, model')); train(model, *batch)",
        ranks=2,
        mesh="pp=2",
    ),
    *(
        Program(
            "parallel/axes/pipeline/_planned.py",
            problem,
            "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))\n"
            "    def one(self, x):\n        for each in self.blocks: x = each(x)\n        return x\n"
            "    def forward(self, x): return torch.stack([self.one(each) for each in x])\n"
            "model = Net(); batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))\n"
            "expected = model(batch).sum().detach() / 6\n"
            "Plan = accel.parallel.Plan; state = accel.train_state(ctx).next()\n"
            "train = lambda model: accel.forward_backward(\n"
            "    ctx, model, state, batch, loss_fn=lambda out: out.sum(), weight=6)[0]\n",
            f"train(accel.prepare_model(ctx, model{example}))",
            "Plan(micro_batches=len(batch))",
            "torch.testing.assert_close(float(train(accel.prepare_model(ctx, model, plan={line}))), float(expected))",
            ranks=2,
            mesh="pp=2",
        )
        for problem, example in (
            ("the forward calls modules in another order than the stages", ""),
            ("the last stage calls none of its modules", ", example=batch"),
        )
    ),
    Program(
        "parallel/axes/pipeline/_held.py",
        "two stages of one rank read different parameters of one module",
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.one, self.two = (nn.Parameter(torch.ones(4)) for _ in range(2))\n"
        "        self.a, self.b, self.c, self.d, self.e, self.f = (nn.Linear(4, 4) for _ in range(6))\n"
        "    def forward(self, x): return self.f(self.e(self.d(self.c(self.b(self.a(x) * self.one)) * self.two)))\n"
        "model = Net(); x = torch.ones(4, 4); state = accel.train_state(ctx).next()\n"
        "Plan = functools.partial(accel.parallel.Plan, schedule='Interleaved1F1B', stages_per_rank=2)\n",
        "accel.prepare_model(ctx, model, plan=Plan(stages=[['a'], ['b'], ['c'], ['d', 'e', 'f']]), example=x)",
        "Plan(stages=[[...], [...]])",
        "stages = ['a', 'b', 'c'], ['d'], ['e'], ['f']\n"
        "plan = eval({line!r}.replace('[[...], [...]]', 'stages'))\n"
        "accel.prepare_model(ctx, model, plan=plan, example=x)",
        ranks=4,
        mesh="dp=2,pp=2",
        strategy="fsdp",
    ),
    Program(
        "parallel/axes/pipeline/_planned.py",
        "the forward fails where it is recorded",
        "class Net(nn.Sequential):\n    def forward(self, x):\n"
        "        for each in self: x = torch.func.vmap(each)(x)\n        return x\n"
        "class Block(nn.Linear):\n    def forward(self, x): return VMAP(super().forward)(x)\n"
        "x = torch.ones(4, 4)\n",
        "accel.prepare_model(ctx, Net(nn.Linear(4, 4), nn.Linear(4, 4)), example=x)",
        "torch.func.vmap",
        "VMAP = {line}; accel.prepare_model(ctx, nn.Sequential(Block(4, 4), Block(4, 4)), example=x)",
        ranks=2,
        mesh="pp=2",
    ),
    Program(
        "parallel/axes/pipeline/_replays.py",
        "two micro-batches of a batch pass different tensors between stages",
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))\n"
        "    def forward(self, x, many):\n"
        "        x = first = self.a(x); is_long = bool(many.sum() > 0)\n"
        "        if is_long: x = self.b(x)\n"
        "        x = self.d(self.c(x)); return x + first if is_long else x\n"
        "model = Net(); batch = torch.ones(4, 4), torch.tensor([0, 0, 1, 1])\n"
        "Plan = functools.partial(accel.parallel.Plan, micro_batches=2)\n"
        "state = accel.train_state(ctx).next()\n"
        "train = lambda model, *batch: accel.forward_backward(\n"
        "    ctx, model, state, batch, loss_fn=lambda out: out.sum(), weight=4)\n"
        "plan = Plan(stages=[['a', 'b'], ['c', 'd']])\n",
        "train(accel.prepare_model(ctx, model, plan=plan), *batch)",
        "Plan(stages=[[...], [...]])",
        "plan = eval({line!r}.replace('[[...], [...]]', repr([['a'], ['b', 'c', 'd']])))\n"
        "train(accel.prepare_model(ctx, model, plan=plan), *batch)",
        ranks=2,
        mesh="pp=2",
    ),
    Program(
        "parallel/axes/pipeline/_replayed.py",
        "a checkpoint around several modules runs",
        "from torch.utils.checkpoint import checkpoint\n"
        "class Net(nn.Module):\n    def __init__(self, runs):\n        super().__init__()\n"
        "        self.norm, self.runs = nn.LayerNorm(4), runs\n"
        "        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))\n"
        "    def layers(self, x):\n        for each in self.blocks: x = self.norm(each(x))\n        return x\n"
        "    def forward(self, x): return self.runs(self.layers, x)\n"
        "x = torch.ones(4, 4); state = accel.train_state(ctx).next(); model = Net(lambda layers, x: layers(x))\n"
        "prepare = lambda model: accel.prepare_model(ctx, model, example=x,\n"
        "    plan=accel.parallel.Plan(stages=[['blocks.0'], ['blocks.1']]))\n"
        "train = lambda model: accel.forward_backward(\n"
        "    ctx, model, state, (x,), loss_fn=lambda out: out.sum(), weight=4)\n",
        "train(prepare(Net(functools.partial(checkpoint, use_reentrant=False))))",
        "accel.checkpoint_activations(model)",
        "{line}; train(prepare(model))",
        alone=True,
        ranks=2,
        mesh="pp=2",
    ),
    Program(
        "parallel/axes/pipeline/_work.py",
        "the shape of a tensor that is sent to the next stage depends on values",
        "class Net(nn.Module):\n    def __init__(self, masks):\n        super().__init__()\n"
        "        self.a, self.mid, self.b = (nn.Linear(4, 4) for _ in range(3)); self.masks = masks\n"
        "        nn.init.ones_(self.a.weight); nn.init.zeros_(self.a.bias)\n"
        "    def forward(self, x, old):\n"
        "        new = self.a(x); mask = new.mean(-1, keepdim=True) > 0\n"
        "        return self.b(self.mid(self.masks(mask, new, old)))\n"
        "x = torch.tensor([1.0, 1.0, 1.0, -1.0])[:, None].expand(4, 4)\nstate = accel.train_state(ctx).next()\n"
        "prepare = lambda model: accel.prepare_model(ctx, model, plan=plan, example=(x, x))\n"
        "train = lambda model: accel.forward_backward(\n"
        "    ctx, prepare(model), state, (x, x), loss_fn=lambda out: out.sum(), weight=4)\n"
        "plan = accel.parallel.Plan(micro_batches=2, stages=[['a', 'mid'], ['b']])\n",
        "train(Net(lambda mask, new, old: new[mask[:, 0]]))",
        "torch.where(mask, new, old)",
        "train(Net(lambda mask, new, old: {line}))",
        alone=True,
        ranks=2,
        mesh="pp=2",
    ),
    Program(
        "parallel/axes/pipeline/_replayed.py",
        "the forward calls its modules in another order than in its record",
        OTHER_ORDERS + "order = model.order; batch = x\n",
        "model = accel.prepare_model(ctx, model, example=x); train(model, x)\norder[:] = [1, 0, 2, 3]; train(model, x)",
        "accel.prepare(..., example=batch)",
        "order[:] = [1, 0, 2, 3]; model = eval({line!r}.replace('...', 'ctx, model')); train(model, x)",
        alone=True,
        ranks=2,
        mesh="pp=2",
    ),
    Program(
        "parallel/_copies.py",
        "a model that ranks share cannot be pickled",
        "import io; x = torch.ones(4, 4)\n"
        "model = accel.prepare_model(ctx, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))\n"
        "path = accel.broadcast_object_list(ctx, [tempfile.mkdtemp()])[0]\n",
        "torch.save(model, io.BytesIO())",
        "accel.save_model(ctx, model, path)",
        "{line}; saved = safetensors.torch.load_file(f'{path}/model.safetensors'); assert len(saved) == 4",
        ranks=2,
        mesh="pp=2",
    ),
    Program(
        "parallel/_record.py",
        "a module returns another number than in the record",
        BETWEEN + "class Block(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.layer = nn.Linear(4, 4)\n"
        "    def forward(self, x, factor):\n"
        "        number = factor / 2; return self.layer(x) * factor, RETURNS(number)\n"
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.blocks, self.count = nn.ModuleList([Block(), Block()]), 0\n"
        "    def forward(self, x):\n        self.count += 1; factor = float(self.count)\n"
        "        for each in self.blocks: x, factor = each(x, factor)\n        return x\n",
        "RETURNS = float; train(Net())",
        "torch.as_tensor(number)",
        "RETURNS = lambda number: {line}; train(Net())",
        alone=True,
        ranks=2,
        mesh="pp=2",
    ),
    Program(
        "parallel/_record.py",
        "a later stage needs a tensor within a reentrant checkpoint",
        BETWEEN + "class Net(nn.Module):\n    def __init__(self, runs):\n        super().__init__()\n"
        "        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4)); self.runs = runs\n"
        "    def both(self, x): return self.c(self.b(x))\n"
        "    def forward(self, x): return self.d(self.runs(self.both, self.a(x)))\n"
        "PLAN = accel.parallel.Plan(stages=[['a', 'b'], ['c', 'd']], micro_batches=2)\n",
        "train(Net(lambda function, x: torch.utils.checkpoint.checkpoint(function, x, use_reentrant=True)))",
        "torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False)",
        "train(Net(lambda function, x: {line}))",
        ranks=2,
        mesh="pp=2",
    ),
    Program(
        "parallel/_record.py",
        "code outside of modules changes a buffer",
        BETWEEN + "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))\n"
        "        self.register_buffer('count', torch.zeros(()))\n"
        "    def forward(self, x):\n        self.count += 1; x = x * self.count\n"
        "        for each in self.blocks: x = each(x)\n        return x\n"
        "Plan = functools.partial(accel.parallel.Plan, micro_batches=4)\n",
        "PLAN = Plan(schedule='Interleaved1F1B', stages_per_rank=2); train(Net())",
        'Plan(schedule="1F1B")',
        "PLAN = {line}; train(Net())",
        ranks=2,
        mesh="pp=2",
    ),
    Program(
        "parallel/_record.py",
        "the forward replaces parameters of the model",
        BETWEEN + "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.embed, self.mid, self.head = nn.Embedding(4, 4), nn.Linear(4, 4), nn.Linear(4, 4); self.tie()\n"
        "    def tie(self): pass\n    def again(self): self.head.weight = self.embed.weight\n"
        "    def forward(self, x): self.again(); return self.head(self.mid(self.embed(x.long())))\n",
        "train(Net())",
        "self.head.weight = self.embed.weight",
        "def tie(self): {line}\nNet.tie = tie; Net.again = lambda self: None; train(Net())",
        ranks=2,
        mesh="pp=2",
    ),
    Program(
        "parallel/_recorder.py",
        "a module returns an object with unknown tensors",
        BETWEEN + "class State:\n    def __init__(self, x): self.x = x\n"
        "class Block(nn.Linear):\n    def forward(self, state): return State(super().forward(state.x))\n"
        "class Net(nn.Sequential):\n    def forward(self, x): return super().forward(State(x)).x\n"
        "net = Net(Block(4, 4), Block(4, 4))\n",
        "train(net)",
        "accel.replace(ctx, containers=[accel.tree.Container(...)])",
        "kind = State, lambda state: {'x': state.x}, lambda like, parts: State(**parts)\n"
        "ctx = eval({line!r}.replace('...', '*kind')); train(net)",
        ranks=2,
        mesh="pp=2",
    ),
    Program(
        "parallel/_recorder.py",
        "a module returns a Python number that it reads from a tensor",
        BETWEEN + "class Block(nn.Linear):\n"
        "    def forward(self, x): x = super().forward(x); return x, READS(x.detach().mean())\n"
        "class Net(nn.Sequential):\n    def forward(self, x):\n"
        "        for each in self: x, size = each(x); x = x * size\n        return x\n"
        "net = Net(Block(4, 4), Block(4, 4))\n",
        "READS = lambda tensor: tensor.item(); train(net)",
        "Return the tensor",
        "READS = lambda tensor: tensor; train(net)",
        ranks=2,
        mesh="pp=2",
    ),
    Program(
        "parallel/_recorder.py",
        "code outside of a module reads a number that the module sets",
        BETWEEN + "class Block(nn.Linear):\n"
        "    def forward(self, x): value = x.mean(); SETS(self, value); return super().forward(x)\n"
        "class Net(nn.Sequential):\n    def forward(self, x):\n"
        "        for each in self: x = each(x); x = x * each.kept\n        return x\n"
        "net = Net(Block(4, 4), Block(4, 4))\n",
        "SETS = lambda self, value: setattr(self, 'kept', 2.0); train(net)",
        "self.kept = value.detach()",
        "def SETS(self, value): {line}\ntrain(net)",
        ranks=2,
        mesh="pp=2",
    ),
)
