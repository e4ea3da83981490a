# SPDX-License-Identifier: Apache-2.0
"""Four real processes train models that transformers has divided, by the error's line, as one process does."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import job, script_ranks

SCRIPT = """
import sys

import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers.distributed import DistributedConfig

import accel

torch.set_num_threads(1)
SMALL = dict(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, head_dim=4, max_position_embeddings=32,
)
KINDS = {
    "llama": transformers.LlamaConfig(**SMALL),
    "tied": transformers.LlamaConfig(**SMALL, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**SMALL),
    "mixtral": transformers.MixtralConfig(**SMALL, num_local_experts=4),
}
ROWS = TensorDataset(torch.randint(0, 32, (16, 8), generator=torch.Generator().manual_seed(0)))
CASES = [  # model, sizes, number of ranks with samples of their own
    ("llama", dict(tp_size=4), 1),
    ("qwen3", dict(tp_size=4), 1),
    ("tied", dict(tp_size=2, fsdp_size=2), 2),
    ("qwen3", dict(tp_size=2, fsdp_size=2), 2),
    ("llama", dict(tp_size=2, dp_replicate_size=2), 2),
    ("llama", dict(fsdp_size=2, dp_replicate_size=2), 4),
    ("mixtral", dict(fsdp_size=4, ep_size=2), 4),
    ("mixtral", dict(tp_size=2, fsdp_size=2, ep_size=4), 2),
]


def load(folder, kind, **sizes):
    config = DistributedConfig(**sizes) if sizes else None
    return transformers.AutoModelForCausalLM.from_pretrained(
        f"{folder}/{kind}", dtype=torch.float32, distributed_config=config
    )


def train(ctx, model, out):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    loader = accel.prepare_loader(ctx, DataLoader(ROWS, batch_size=4), global_batch=4)
    model, optimizer = accel.prepare(ctx, model, optimizer)
    state = accel.train_state(ctx, seed=0, accumulation=2)
    for batch in accel.batches(ctx, loader, state):
        (ids,) = batch.data
        state = state.next(batch)
        with accel.accumulate(ctx, state, model):
            logits = model(input_ids=ids).logits[:, :-1]
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            state = accel.backward(ctx, loss, state)
        if state.sync:
            state = accel.optimizer_step(ctx, optimizer, state, max_norm=0.5)
    items = {"model": model, "optimizer": optimizer}
    accel.save_state(ctx, out, items, step=1)
    found = {name: each.clone() for name, each in accel.get_state_dict(ctx, model, dst=None).items()}
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()
    accel.load_state(ctx, accel.latest_checkpoint(out), items)
    torch.testing.assert_close(accel.get_state_dict(ctx, model, dst=None), found, rtol=0, atol=0)
    return found


if __name__ == "__main__":
    folder = sys.argv[1]
    with accel.session(device="cpu") as ctx:
        if ctx.is_main_process:
            for kind, config in KINDS.items():
                torch.manual_seed(0)
                transformers.AutoModelForCausalLM.from_config(config).save_pretrained(f"{folder}/{kind}")
        accel.wait_for_everyone(ctx)
        want = {kind: train(accel.single(), load(folder, kind), f"{folder}/{kind}-{ctx.rank}") for kind in KINDS}
        for kind, sizes, own in CASES:
            used = accel.replace(ctx, strategy="fsdp" if "fsdp_size" in sizes else "ddp")
            model = load(folder, kind, **sizes)
            if "tp_size" in sizes:
                try:
                    accel.prepare(used, model)
                    raise AssertionError((kind, sizes))
                except accel.errors.PrepareError as error:
                    used = eval(error.fix.partition("ctx = ")[2], {"accel": accel, "model": model, "ctx": used})
            assert used.data_parallel[1] == own
            found = train(used, model, f"{folder}/{kind}-{'-'.join(sizes)}-{own}")
            torch.testing.assert_close(found, want[kind], rtol=0, atol=1e-5)
        for kind, sizes, named in (
            ("llama", dict(pp_size=4), "mesh='pp=2'"),  # with tp_size too, transformers itself fails
            ("mixtral", dict(tp_size=4, ep_size=4), "mesh='dp=2,ep=2'"),
        ):
            model = load(folder, kind, **sizes)
            used = ctx
            if "tp_size" in sizes:
                mesh = model.get_parameter("model.layers.0.self_attn.q_proj.weight").device_mesh
                used = accel.replace(ctx, mesh=mesh)
            try:
                accel.prepare(used, model)
                raise AssertionError((kind, sizes))
            except accel.errors.PrepareError as error:
                assert named in error.fix, error
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_what_transformers_divides_trains_as_one_process(tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5.20")
    script = tmp_path / "train_brought.py"
    script.write_text(SCRIPT)
    with script_ranks(script, job(4), str(tmp_path), folder=tmp_path) as ranks:
        assert [rank.wait(400) for rank in ranks] == [0] * 4, "\n".join(rank.said()[-4000:] for rank in ranks)
