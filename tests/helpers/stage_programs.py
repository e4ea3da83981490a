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
)
