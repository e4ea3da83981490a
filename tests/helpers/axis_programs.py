# SPDX-License-Identifier: Apache-2.0
"""Programs that tensor, context, pipeline and expert parallelism refuse, with the line that each error has."""

from __future__ import annotations

from typing import NamedTuple


class Program(NamedTuple):
    """A program that is refused, and what it does with the line.

    Attributes:
        file, problem: of the site.
        before: statements before the refused ones; run again before the line.
        refused: the statements that raise.
        line: text within the fix.
        then: statements in the place of the refused ones, with the line at `{line}`.
        ranks: number of simulated ranks.
        strategy, mesh: of the context.
        needs: an optional package.
        alone: whether the run ends with the refusal, as where one rank is refused while the others wait for it.
    """

    file: str
    problem: str
    before: str
    refused: str
    line: str
    then: str = "{line}"
    ranks: int = 1
    strategy: str = "ddp"
    mesh: str | None = None
    needs: str = ""
    alone: bool = False


CHAIN = "model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)); x = torch.ones(4, 4)\n"
STYLED = CHAIN + "styles = {'0': 'colwise', '2': 'rowwise'}; Plan = accel.parallel.Plan\n"
LLAMA = (
    "import transformers; VOCABULARY = 16\n"
    "sizes = dict(hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, use_cache=False,"
    " num_key_value_heads=2, vocab_size=VOCABULARY)\n"
    "make = lambda **more: transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **more))\n"
    "ids = torch.arange(16).view(2, 8); model = make()\n"
)
PLANNED = (
    "plan = eval({line!r}.removeprefix('plan=').replace(')', ', tensor=styles)'))\n"
    "accel.prepare_model(ctx, model, plan=plan)(x)"
)
CUT = LLAMA + (
    "part = accel.parallel.split_sequence(ctx, {'input_ids': ids, 'labels': ids})\n"
    "model = accel.prepare_model(ctx, model); tokens = part['input_ids']; places = part['position_ids']\n"
)
QUERIES = (
    "q, k, v = torch.ones(3, 1, 2, 4, 8).unbind(); more = torch.ones(1, 2, 6, 8)\n"
    "attend = functools.partial(accel.parallel.context_attention, ctx)\n"
)
CALLED = (
    "from torch.utils.checkpoint import checkpoint\n"
    "class Block(nn.Module):\n"
    "    def __init__(self):\n        super().__init__()\n        self.layer = nn.Linear(4, 4)\n"
    "    def forward(self, x): return torch.softmax(self.layer(x) @ x.transpose(1, 2), -1) @ x\n"
    "class Net(nn.Module):\n    def __init__(self, call):\n        super().__init__()\n"
    "        self.block, self.call = Block(), call\n"
    "    def forward(self, x): return self.call(self.block, x)\n"
    "own = accel.parallel.split_sequence(ctx, {'x': torch.ones(2, 8, 4)})['x'].requires_grad_()\n"
    "prepared = lambda call: accel.prepare_model(ctx, Net(call))\n"
)
KERNEL = (
    "class Kernel(torch.autograd.Function):\n"
    "    @staticmethod\n    def forward(ctx, x): return torch.from_numpy(2 * x.detach().numpy())\n"
    "    @staticmethod\n    def backward(ctx, grad): return 2 * grad\n"
    "class Net(nn.Module):\n    def __init__(self, function):\n        super().__init__()\n"
    "        self.layer, self.function = nn.Linear(4, 4), function\n"
    "    def forward(self, x):\n        x = self.function(self.layer(x))\n"
    "        return torch.softmax(x @ x.transpose(1, 2), -1) @ x\n"
    "x = torch.arange(64.0).view(2, 8, 4).sin(); part = accel.parallel.split_sequence(ctx, {'x': x})\n"
    "def call(function):\n"
    "    net = Net(function); own = accel.parallel.split_sequence(ctx, {'y': net(x).detach()})['y']\n"
    "    assert torch.allclose(accel.prepare_model(ctx, net)(part['x']), own, atol=1e-5)\n"
    "function = Kernel.apply\n"
)
NESTED = CALLED + (
    "outer = lambda inner: lambda block, x: checkpoint(lambda x: inner(block, x), x, use_reentrant=False)\n"
    "prepared = lambda inner: accel.prepare_model(ctx, Net(outer(inner)))\n"
)
RECOMPUTED = CALLED + (
    "import warnings; warnings.simplefilter('ignore')  # of torch, about the proof's inputs and about views\n"
)
STAGED = CHAIN + (
    "Plan = accel.parallel.Plan; state = accel.train_state(ctx).next()\n"
    "train = lambda model: accel.forward_backward(ctx, model, state, (x,), loss_fn=lambda out: out.sum(), weight=4)\n"
)
STEPPED = (
    "net = nn.Sequential(nn.Linear(4, 4)); x = torch.ones(4, 4)\n"
    "def step(x):\n    optimizer = SGD(net.parameters(), lr=0.1)\n"
    "    model, optimizer = accel.prepare(ctx, net, optimizer)\n"
    "    state = accel.backward(ctx, model(x).sum(), accel.train_state(ctx).next(), weight=4)\n"
    "    accel.optimizer_step(ctx, optimizer, state)\n"
)
NORMED = (
    "model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)); x = torch.ones(4, 4)\n"
    "Plan = accel.parallel.Plan\n"
)
AXIS_PROGRAMS: tuple[Program, ...] = (
    Program(
        "parallel/logits/_vocabulary.py",
        "ranks along tp have the same logits",
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.words, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)\n"
        "        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)\n"
        "    def forward(self, ids): return self.head(self.down(self.up(self.words(ids)).relu()))\n"
        "ids = torch.arange(4)\n"
        "loss = lambda model: accel.parallel.vocab_cross_entropy(ctx, model(ids), ids)\n",
        "loss(accel.prepare_model(ctx, Net(), plan=accel.parallel.Plan(tensor={'head': 'colwise_gather_output'})))",
        'plan=accel.parallel.Plan(head="colwise")',
        "assert loss(accel.prepare_model(ctx, Net(), {line}, example=ids)).isfinite().all()",
        ranks=2,
        mesh="tp=2",
    ),
    Program(
        "parallel/parts/_region.py",
        "an output of the model holds tensors where nothing gives each rank its part of them",
        CALLED + "import dataclasses\n"
        "class Out:\n    def __init__(self, x): self.x = x\n"
        "make = lambda out: prepared(lambda block, x: out(block(x)))\n",
        "make(Out)(own)",
        "@dataclasses.dataclass",
        "{line}\nclass Out:\n    x: object\nassert make(Out)(own).x.shape == own.shape",
        ranks=2,
        mesh="cp=2",
    ),
    Program(
        "parallel/parts/_region.py",
        "an output of the model holds tensors where nothing gives each rank its part of them",
        CALLED + "make = lambda out: prepared(lambda block, x: out(block(x) for _ in range(2)))\n",
        "make(iter)(own)",
        "list(...)",
        "assert make({line!r}.partition('(')[0] == 'list' and list)(own)[1].shape == own.shape",
        ranks=2,
        mesh="cp=2",
    ),
    Program(
        "parallel/logits/_deferred.py",
        "the layer that gives the logits is not known",
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.words, self.head = nn.Embedding(8, 4), nn.Linear(4, 6)\n"
        "    def forward(self, ids): return self.head(self.words(ids))\n"
        "model = Net()\n",
        "accel.defer_logits(model)",
        'accel.defer_logits(model, "head")',
        "{line}; assert model(torch.tensor([[1]])).shape == (1, 1, 6)",
    ),
    Program(
        "parallel/axes/tensor/_overlap.py",
        "layers with a custom forward",
        STYLED + "class Own(nn.Linear):\n    def forward(self, x): return super().forward(x)\nmodel[0] = Own(4, 8)\n",
        "accel.prepare_model(ctx, model, plan=Plan(overlap=True, tensor=styles))",
        "plan=accel.parallel.Plan(overlap=False)",
        PLANNED,
        ranks=2,
        mesh="tp=2",
    ),
    Program(
        "parallel/axes/tensor/_spread.py",
        "only eager layers can overlap messages",
        STYLED,
        "vars(model)['_compiled_call_impl'] = model.forward\n"
        "accel.prepare_model(ctx, model, plan=Plan(overlap=True, tensor=styles))",
        "plan=accel.parallel.Plan(overlap=False)",
        PLANNED,
        ranks=2,
        mesh="tp=2",
    ),
    Program(
        "parallel/axes/tensor/_rules.py",
        "the model cannot be spread by this tensor-parallel plan",
        STYLED,
        "accel.prepare_model(ctx, model, plan=Plan(tensor={'other': 'colwise'}))",
        "accel.parallel.Plan(tensor=...)",
        "plan = eval({line!r}.replace('...', 'accel.parallel.tensor_plan(model)'))\n"
        "accel.prepare_model(ctx, model, plan=plan)(x)",
        ranks=2,
        mesh="tp=2",
    ),
    Program(
        "parallel/axes/tensor/_spread.py",
        "head has no effect with your own styles",
        LLAMA,
        "accel.prepare_model(ctx, model, plan=accel.parallel.Plan(tensor={'lm_head': 'colwise'}, head='colwise'))",
        "accel.parallel.tensor_plan(model, head=...)",
        "styles = eval({line!r}.replace('...', repr('colwise')))\n"
        "accel.prepare_model(ctx, model, plan=accel.parallel.Plan(tensor=styles))(ids)",
        ranks=2,
        mesh="tp=2",
        needs="transformers",
    ),
    Program(
        "parallel/axes/tensor/_tensor_plan.py",
        "the head of the model is not known",
        STYLED,
        "accel.prepare_model(ctx, model, plan=Plan(head='colwise'))",
        "accel.parallel.Plan(tensor={**styles, \"head\": 'colwise'})",
        "plan = eval({line!r}.replace('\"head\"', repr('2')).replace('colwise', 'rowwise'))\n"
        "accel.prepare_model(ctx, model, plan=plan)(x)",
        ranks=2,
        mesh="tp=2",
    ),
    Program(
        "parallel/logits/_vocabulary.py",
        "logits and targets do not fit",
        "logits, ids = torch.zeros(2, 5, 8), torch.ones(2, 5, dtype=torch.long); cut = ids[:, :4]\n",
        "accel.parallel.vocab_cross_entropy(ctx, logits, cut)",
        "(ctx, logits[:, :-1], ids[:, 1:])",
        "assert accel.parallel.vocab_cross_entropy{line}.ndim == 0",
    ),
    Program(
        "parallel/axes/context/_checks.py",
        "queries and keys of other positions",
        QUERIES,
        "attend(q, more, more)",
        "causal=False",
        "assert attend(q, more, more, {line}).shape == q.shape",
        ranks=2,
        mesh="cp=2",
    ),
    Program(
        "parallel/axes/context/_checks.py",
        "documents or a window of two sequences",
        QUERIES + "sees = torch.ones(4, 12, dtype=torch.bool)\n",
        "attend(q, more, more, causal=False, window=2)",
        "attn_mask=",
        "assert attend(q, more, more, causal=False, {line}sees).shape == q.shape",
        ranks=2,
        mesh="cp=2",
    ),
    Program(
        "parallel/axes/context/_checks.py",
        "the mask does not fit this rank's queries and all keys",
        QUERIES + "mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()\n",
        "attend(q, k, v, attn_mask=mask[..., :4], causal=False)",
        "accel.parallel.split_sequence(ctx, {'mask': mask}, dim=2)",
        "assert attend(q, k, v, attn_mask={line}['mask'], causal=False).shape == q.shape",
        ranks=2,
        mesh="cp=2",
    ),
    Program(
        "parallel/axes/context/_checks.py",
        "the mask is not valid",
        QUERIES + "mask = torch.ones(4, 8, dtype=torch.long)\n",
        "attend(q, k, v, attn_mask=mask, causal=False)",
        "mask.bool()",
        "assert attend(q, k, v, attn_mask={line}, causal=False).shape == q.shape",
        ranks=2,
        mesh="cp=2",
    ),
    Program(
        "parallel/axes/context/_checks.py",
        "a mask or scores of all keys where ranks have some",
        QUERIES + "Plan = accel.parallel.Plan; mask = torch.ones(4, 8, dtype=torch.bool)\n",
        "attend(q, k, v, attn_mask=mask, causal=False, method='ring')",
        'Plan(context="gather")',
        "method = {line}.context; assert attend(q, k, v, attn_mask=mask, causal=False, method=method).shape == q.shape",
        ranks=2,
        mesh="cp=2",
    ),
    Program(
        "parallel/axes/context/_checks.py",
        "a reentrant checkpoint does not keep the positions",
        RECOMPUTED,
        "prepared(lambda block, x: checkpoint(block, x, use_reentrant=True))(own)",
        "checkpoint(block, x, use_reentrant=False)",
        "prepared(lambda block, x: {line})(own).sum().backward()",
        ranks=4,
        mesh="dp=2,cp=2",
        strategy="fsdp",
    ),
    Program(
        "parallel/axes/context/_forward.py",
        "the model would compute other values",
        KERNEL,
        "call(function)",
        'accel.parallel.local_map(function, "rows")',
        "call({line})",
        ranks=2,
        mesh="cp=2",
    ),
    Program(
        "parallel/axes/context/_forward.py",
        "a checkpoint under hooks of saved tensors",
        NESTED,
        "model = prepared(lambda block, x: checkpoint(block, x, use_reentrant=False)); model(own).sum().backward()",
        "checkpoint(block, x=x, use_reentrant=False)",
        "model = prepared(lambda block, x: {line}); model(own).sum().backward()",
        ranks=2,
        mesh="cp=2",
    ),
    Program(
        "parallel/axes/context/_spread.py",
        "two methods of context parallelism",
        QUERIES + "prepare = lambda method: accel.prepare_model(\n"
        "    ctx, nn.Sequential(nn.Linear(2, 2)), plan=accel.parallel.Plan(context=method))\n"
        "prepare('gather')\n",
        "prepare('ring')",
        "method=",
        "assert attend(q, k, v, {line}'ring').shape == q.shape",
        ranks=2,
        mesh="cp=2",
    ),
    Program(
        "parallel/axes/context/_split.py",
        "a sequence that ranks cannot share equally",
        "ids = torch.arange(5).view(1, 5)\n",
        "accel.parallel.split_sequence(ctx, {'ids': ids})",
        "pad={name: value}",
        "name, value = 'ids', 9; part = accel.parallel.split_sequence(ctx, {'ids': ids}, {line})\n"
        "assert part['ids'].shape == (1, 4)",
        ranks=2,
        mesh="cp=2",
    ),
    Program(
        "parallel/axes/context/_checks.py",
        "tokens of no sequence that was cut",
        CUT + "length = 4\n",
        "model(tokens[:, :2])",
        "accel.parallel.sequence_positions(ctx, length)",
        "{line}; model(tokens[:, :2])",
        ranks=2,
        mesh="cp=2",
        needs="transformers",
    ),
    Program(
        "parallel/axes/context/_checks.py",
        "transformers would shift labels",
        CUT,
        "model(tokens, position_ids=places, labels=part['labels'])",
        "labels=part['labels'], shift_labels=part['labels']",
        "assert model(tokens, position_ids=places, {line}).loss.ndim == 0",
        ranks=2,
        mesh="cp=2",
        needs="transformers",
    ),
    Program(
        "parallel/axes/context/_checks.py",
        "dropout of attention in a ring",
        "part = accel.parallel.split_sequence(ctx, {'x': torch.randn(1, 8, 8)})['x']\n"
        "def run(plan):\n"
        "    layer = accel.prepare_model(ctx, torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), plan=plan)\n"
        "    return layer(part)\n",
        "run(accel.parallel.Plan(context='ring'))",
        'Plan(context="gather")',
        "assert run(accel.parallel.{line}).isfinite().all()",
        alone=True,  # a context has one method
        ranks=2,
        mesh="cp=2",
    ),
    Program(
        "parallel/axes/pipeline/_stages.py",
        "the plan has another number of stages",
        STAGED,
        "accel.prepare_model(ctx, model, plan=Plan(stages=(('0',), ('1',), ('2',))))",
        "accel.parallel.stage_plan(model, 2)",
        "train(accel.prepare_model(ctx, model, plan=Plan(stages={line})))",
        ranks=2,
        mesh="pp=2",
    ),
    Program(
        "parallel/axes/pipeline/_pipeline.py",
        "a pipelined model cannot be called",
        STAGED + "inputs = (x,)\n",
        "accel.prepare_model(ctx, model)(x)",
        "accel.training.forward(ctx, model, inputs)",
        "model = accel.prepare_model(ctx, model); {line}",
        ranks=2,
        mesh="pp=2",
    ),
    Program(
        "parallel/axes/pipeline/_held.py",
        "a module or a parameter was replaced after the model was cut",
        STAGED,
        "model = accel.prepare_model(ctx, model); model[2] = nn.Linear(8, 2); train(model)",
        "model = accel.prepare_model(ctx, model)",
        "model[2] = nn.Linear(8, 2); {line}; train(model)",
        ranks=2,
        mesh="pp=2",
    ),
    Program(
        "parallel/axes/pipeline/_planned.py",
        "the stages are not made of the model's modules",
        STAGED,
        "accel.prepare_model(ctx, model, plan=Plan(stages=(('0',), ('other',))))",
        "Plan(stages=[[...], [...]])",
        "plan = eval({line!r}.replace('...', repr('0'), 1).replace('...', repr('2')))\n"
        "train(accel.prepare_model(ctx, model, plan=plan))",
        ranks=2,
        mesh="pp=2",
    ),
    Program(
        "parallel/axes/pipeline/_planned.py",
        "the forward does not call the modules of the stages",
        STAGED,
        "accel.prepare_model(ctx, model, plan=Plan(stages=(('2',), ('0',))), example=x)",
        "Plan(stages=[[...], [...]])",
        "plan = eval({line!r}.replace('...', repr('0'), 1).replace('...', repr('2')))\n"
        "train(accel.prepare_model(ctx, model, plan=plan, example=x))",
        ranks=2,
        mesh="pp=2",
    ),
    Program(
        "parallel/axes/pipeline/_layout.py",
        "a batch norm takes the statistics of each micro-batch",
        NORMED,
        "accel.prepare_model(ctx, model)",
        "accel.parallel.Plan(micro_batches=2)",
        "accel.prepare_model(ctx, model, plan={line})",
        ranks=2,
        mesh="pp=2",
    ),
    Program(
        "parallel/axes/pipeline/_stages.py",
        "a model that is compiled as one",
        STAGED,
        "vars(model)['_compiled_call_impl'] = model.forward\naccel.prepare_model(ctx, model)",
        "accel.compile_model(model)",
        "model = accel.prepare_model(ctx, model); {line}",
        ranks=2,
        mesh="pp=2",
    ),
    Program(
        "parallel/axes/experts/_routing.py",
        "the bias does not fit the experts",
        "router = types.SimpleNamespace(e_score_correction_bias=torch.zeros(4, dtype=torch.bfloat16))\n"
        "balance = lambda: accel.parallel.balanced_bias(router.e_score_correction_bias, torch.arange(4), 0.1)\n",
        "balance()",
        "router.e_score_correction_bias = router.e_score_correction_bias.float()",
        "{line}; assert balance().dtype == torch.float32",
    ),
    Program(
        "parallel/axes/experts/_spread.py",
        "a mesh with a separate ep",
        CHAIN,
        "mesh = torch.distributed.init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'ep'))\n"
        "accel.prepare_model(accel.replace(ctx, mesh=mesh), model)",
        'accel.replace(ctx, mesh="dp=4,ep=2")',
        "assert {line}.axes.ep == 2",
        ranks=4,
    ),
    Program(
        "parallel/axes/context/_split.py",
        "ranks that share a sequence computed the same",
        STEPPED,
        "step(x)",
        "accel.replace(ctx, mesh=ctx.mesh)",
        "ctx = {line}; step(x)",
        ranks=2,
        mesh="cp=2",
    ),
    Program(
        "parallel/axes/context/_checks.py",
        "a mask of other positions",
        CUT + "mask = torch.ones(2, 1, 8, 8, dtype=torch.bool).tril()\n",
        "model(tokens, position_ids=places, attention_mask=torch.ones(2, 8))",
        "split_sequence(ctx, {'mask': mask}, dim=2)",
        "own = accel.parallel.{line}; model(tokens, position_ids=places, attention_mask=own['mask'])",
        ranks=2,
        mesh="cp=2",
        needs="transformers",
    ),
    Program(
        "parallel/axes/pipeline/_layout.py",
        "a batch norm would take the statistics of rows",
        NORMED + "DataLoader, rows = torch.utils.data.DataLoader, torch.utils.data.TensorDataset(torch.ones(7, 4))\n"
        "model = accel.prepare_model(ctx, model, plan=Plan(micro_batches=2))\n"
        "train = lambda x: accel.forward_backward(\n"
        "    ctx, model, accel.train_state(ctx).next(), (x,), loss_fn=lambda out: out.sum(), weight=len(x))\n",
        "train(torch.ones(7, 4))",
        "DataLoader(drop_last=True)",
        "for (each,) in eval({line!r}.replace('(', '(rows, batch_size=4, ')): train(each)",
        ranks=2,
        mesh="pp=2",
    ),
    Program(
        "parallel/logits/_vocabulary.py",
        "logits are a DTensor",
        "from torch.distributed.tensor import Shard, distribute_tensor\n"
        "logits = distribute_tensor(torch.zeros(2, 5, 8), ctx.mesh['tp'], [Shard(2)])\n"
        "targets = torch.ones(2, 5, dtype=torch.long); vocab_cross_entropy = accel.parallel.vocab_cross_entropy\n",
        "vocab_cross_entropy(ctx, logits, targets)",
        "vocab_cross_entropy(ctx, logits.to_local(), targets)",
        "assert {line}.ndim == 0",
        ranks=2,
        mesh="tp=2",
    ),
    Program(
        "parallel/axes/context/_checks.py",
        "every rank would compute the decoder for all positions",
        "import transformers; ids = torch.arange(16).view(2, 8)\n"
        "config = transformers.T5Config(d_model=8, d_ff=8, num_layers=1, num_heads=2, d_kv=4, vocab_size=16,\n"
        "    dropout_rate=0.0, decoder_start_token_id=0)\n"
        "model = transformers.T5ForConditionalGeneration(config)\n"
        "shifted = model.prepare_decoder_input_ids_from_labels(ids); model = accel.prepare_model(ctx, model)\n"
        "whole = {'ids': ids, 'shifted': shifted, 'labels': ids}\n",
        "part = accel.parallel.split_sequence(ctx, whole)\nmodel(input_ids=part['ids'], labels=part['labels'])",
        "accel.parallel.split_sequence(ctx, ..., shift=())",
        "part = eval({line!r}.replace('...', 'whole'))\n"
        "model(input_ids=part['ids'], decoder_input_ids=part['shifted'], labels=part['labels'])",
        ranks=2,
        mesh="cp=2",
        needs="transformers",
    ),
    Program(
        "parallel/axes/context/_split.py",
        "ranks that share a sequence did not see each other's positions",
        STEPPED + "part = accel.parallel.split_sequence(ctx, {'x': torch.ones(2, 8, 4)})['x']\n"
        "optimizer = SGD(net.parameters(), lr=0.1)\n",
        "state = accel.backward(ctx, net(part).sum(), accel.train_state(ctx).next(), weight=4)\n"
        "accel.optimizer_step(ctx, optimizer, state)",
        "accel.replace(ctx, mesh=ctx.mesh)",
        "ctx = {line}; step(part)",
        ranks=2,
        mesh="cp=2",
    ),
    Program(
        "parallel/axes/context/_transformers.py",
        "an attention and the mask of its model say different orders",
        "import transformers; ids = torch.arange(16).view(2, 8)\n"
        "sizes = dict(hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, use_cache=False,"
        " num_key_value_heads=1, head_dim=4, vocab_size=16)\n"
        "part = accel.parallel.split_sequence(ctx, {'input_ids': ids})\n"
        "make = lambda **more: transformers.GemmaForCausalLM(transformers.GemmaConfig(**sizes, **more))\n"
        "run = lambda **more: accel.prepare_model(ctx, make(**more))(**part)\n",
        "run(use_bidirectional_attention=True)",
        "use_bidirectional_attention=False",
        "run({line})",
        ranks=2,
        mesh="cp=2",
        needs="transformers",
    ),
    Program(
        "parallel/axes/context/_transformers.py",
        "a selection of a mask that is not in memory",
        CUT + "layer = accel.unwrap_model(model).get_decoder().layers[0]; plain = layer.forward\n"
        "select = lambda x, attention_mask=None, **more: plain(x, attention_mask=attention_mask[..., :], **more)\n"
        "layer.forward = select; order = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()\n"
        "pairs = accel.parallel.split_sequence(ctx, {'mask': order[None, None]}, dim=2)['mask']\n",
        "model(tokens, position_ids=places)",
        "attention_mask=",
        "model(tokens, position_ids=places, {line}pairs)",
        ranks=2,
        mesh="cp=2",
        needs="transformers",
    ),
    Program(
        "parallel/axes/context/_transformers.py",
        "positions that this model keeps for padding",
        "import transformers; ids = torch.arange(2, 18).view(2, 8)\n"
        "config = transformers.RobertaConfig(vocab_size=18, hidden_size=8, intermediate_size=16, num_hidden_layers=1,\n"
        "    num_attention_heads=2, pad_token_id=1, max_position_embeddings=10)\n"
        "model = accel.prepare_model(ctx, transformers.RobertaForMaskedLM(config).eval())\n"
        "part = accel.parallel.split_sequence(ctx, {'ids': ids})\n",
        "model(part['ids'], position_ids=part['position_ids'])",
        "position_ids=part['position_ids'] + 2",
        "model(part['ids'], {line})",
        ranks=2,
        mesh="cp=2",
        needs="transformers",
    ),
    Program(
        "parallel/axes/tensor/_tensor_plan.py",
        "the model declares tensor-parallel styles that have no counterpart",
        STYLED + "class Net(nn.Sequential): tp_plan = {'0': 'grouped_gemm', '2': 'rowwise'}\nmodel = Net(*model)\n",
        "accel.prepare_model(ctx, model)",
        "accel.parallel.Plan(tensor={...})",
        "plan = eval({line!r}.replace('{...}', 'styles')); accel.prepare_model(ctx, model, plan=plan)(x)",
        ranks=2,
        mesh="tp=2",
    ),
    Program(
        "parallel/logits/_head_calls.py",
        "the loss is computed after the head's parameters were resharded",
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.words, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)\n"
        "    def forward(self, ids): return self.head(self.words(ids))\n"
        "ids = torch.arange(6).view(2, 3); Plan = accel.parallel.Plan\n"
        "run = lambda plan: nn.functional.cross_entropy(\n"
        "    accel.prepare_model(ctx, Net(), plan=plan)(ids).flatten(0, 1), ids.flatten()).backward()\n",
        "run(Plan(logits='deferred', reshard_after_forward=True))",
        'plan=accel.parallel.Plan(logits="deferred")',
        "run({line})",
        ranks=2,
        strategy="fsdp",
        mesh="dp=2",
    ),
    Program(
        "parallel/axes/shard/_options.py",
        "tensor parallelism has spread the model over some of the ranks",
        STYLED + "from torch.distributed.tensor import Replicate, distribute_tensor\n"
        "mesh = torch.distributed.init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))\n"
        "for each in (model[0], model[2]):\n"
        "    for name, value in list(each.named_parameters()):\n"
        "        setattr(each, name, nn.Parameter(distribute_tensor(value.detach(), mesh['tp'], [Replicate()])))\n",
        "accel.prepare_model(ctx, model)",
        "accel.replace(ctx, mesh=mesh)",
        "accel.prepare_model({line}, model)",
        ranks=4,
        strategy="fsdp",
    ),
    Program(
        "parallel/axes/experts/_layer.py",
        "experts of sorted tokens are called with something else",
        "class Experts(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.up = nn.Parameter(torch.ones(4, 2, 3)); self.down = nn.Parameter(torch.ones(4, 3, 2))\n"
        "    def forward(self, tokens, indices, weights):\n"
        "        out = torch.zeros_like(tokens)\n"
        "        for at in range(self.up.shape[0]):\n"
        "            row, choice = torch.where(indices == at)\n"
        "            value = tokens[row] @ self.up[at] @ self.down[at]\n"
        "            out = out.index_add(0, row, value * weights[row, choice, None])\n"
        "        return out\n"
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__(); self.experts = Experts()\n"
        "    def forward(self, *given): return self.experts(*given)\n"
        "x = torch.ones(4, 2)\n"
        "given = (x, torch.arange(4)[:, None], torch.ones(4, 1))\n"
        "run = lambda style: accel.prepare_model(\n"
        "    ctx, Net(), plan=accel.parallel.Plan(experts={'experts': style}))(*given)\n",
        "run('sorted')",
        '"dispatch"',
        "assert run({line}).shape == x.shape",
        ranks=2,
        mesh="dp=2,ep=2",
    ),
    Program(
        "parallel/axes/tensor/_prove.py",
        "the tokens of this model cannot be shared between its layers",
        "model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)); x = torch.ones(6, 4)\n",
        "accel.prepare_model(ctx, model, plan=accel.parallel.Plan(sequence=True), example=[x])",
        "plan=accel.parallel.Plan(sequence=False)",
        "accel.prepare_model(ctx, model, {line}, example=[x])(x)",
        ranks=2,
        mesh="tp=2",
    ),
)
