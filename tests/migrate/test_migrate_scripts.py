# SPDX-License-Identifier: Apache-2.0
"""`accel migrate` on scripts: pairs of a script and what is written for it.

`python tests/migrate/test_migrate_scripts.py` records what is written anew.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import io
import json
import random
import re
import sys
import tokenize
import typing
from collections import Counter
from pathlib import Path
from typing import Any

import libcst as cst
import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share
from typing_extensions import override

import accel
from accel.errors import ConfigError
from accel.migrate import FileResult, migrate_bytes
from accel.migrate._vocabulary import FUNCTIONS, METHODS
from accel.testing import simulate
from accel.trackers import Tracker

PAIRS = sorted((Path(__file__).parent / "pairs").glob("*.before"))
SHORT = [  # the two long ones take longer than all others together
    pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path.stat().st_size > 10_000)) for path in PAIRS
]
PAGE = Path(__file__).parents[2] / "docs" / "migrate.md"
SOURCES = sorted((Path(accel.__file__).parent / "migrate").glob("*.py"))


@functools.cache
def migrated(text: str, name: str = "script.py") -> FileResult:
    return migrate_bytes(text.encode(), Path(name))


def test_the_page_shows_what_the_command_writes() -> None:
    before, after, diff = re.findall(r"^```(?:py|diff)\n(.*?)^```", PAGE.read_text(), flags=re.M | re.S)
    assert migrated(before).new.decode() == after
    expected = difflib.unified_diff(before.splitlines(), after.splitlines(), "a/train.py", "b/train.py", lineterm="")
    assert diff.splitlines() == [line.rstrip() for line in expected]


def commented(text: str) -> str:
    """A script with a comment of its own before and after each line of a statement."""
    lines = text.splitlines()
    trailing: dict[int, str] = {}
    begun = True
    before: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        at = token.start[0] - 1
        if token.type in (tokenize.NEWLINE, tokenize.NL) and lines[at].strip() and "#" not in lines[at]:
            trailing[at] = f"  # after {at}"
        if begun and token.type not in (tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT):
            before[at] = f"{lines[at][: token.start[1]]}# before {at}\n" if at < len(lines) else ""
            begun = False
        begun = begun or token.type == tokenize.NEWLINE
    return "".join(f"{before.get(at, '')}{line}{trailing.get(at, '')}\n" for at, line in enumerate(lines))


def orphans(before: str, after: str) -> Counter[str]:
    """Comments that were lost though the line that they stand at, or above, was not. A line of brackets is no line."""
    kept, had = (Counter(line.partition("#")[0].strip() for line in text.splitlines()) for text in (after, before))
    lines = before.splitlines()
    lost = Counter(comments_of(before)) - Counter(comments_of(after))
    told: Counter[str] = Counter()
    for at, line in enumerate(lines):
        code, _, comment = line.partition("#")
        below = next((each.partition("#")[0].strip() for each in lines[at:] if each.partition("#")[0].strip()), "")
        own = code.strip() or below
        if lost[f"#{comment}"] and (kept[own] < had[own] or not any(map(str.isalnum, own))):
            told[f"#{comment}"] += 1
    return lost - told


def comments_of(text: str) -> list[str]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [token.string for token in tokens if token.type == tokenize.COMMENT]


@pytest.mark.parametrize("path", PAIRS, ids=lambda path: path.stem)
def test_a_script_is_written_as_recorded_and_its_comments_survive(path: Path) -> None:
    before = path.read_text()
    after = migrated(before)
    assert after.new.decode() == path.with_suffix(".after").read_text()
    assert not orphans(before, after.new.decode())
    for note in (*after.notes, *after.changes):
        assert 1 <= note.line <= after.new.decode().count("\n")


class Decorated(cst.CSTTransformer):
    """Inserts annotations, comments and decorators at half of the places that take them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self.count = 0

    def _note(self) -> cst.Annotation | None:
        self.count += 1
        texts = ("int", "list[int]", "'a.B | None'", "Optional['T']", "Callable[..., None]")
        return cst.Annotation(cst.parse_expression(self._random.choice(texts))) if self._random.random() < 0.5 else None

    @override
    def leave_Param(self, original_node: cst.Param, updated_node: cst.Param) -> cst.Param:
        return updated_node.with_changes(annotation=updated_node.annotation or self._note())

    @override
    def visit_Lambda(self, node: cst.Lambda) -> bool:
        return False  # whose parameters take no annotation

    @override
    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> cst.FunctionDef:
        return self._decorated(updated_node).with_changes(returns=updated_node.returns or self._note())

    @override
    def leave_ClassDef(self, original_node: cst.ClassDef, updated_node: cst.ClassDef) -> cst.ClassDef:
        return self._decorated(updated_node)

    def _decorated(self, node: Any) -> Any:
        decorator = cst.Decorator(
            cst.parse_expression(self._random.choice(("marked", "marked.by(2)", "torch.no_grad()")))
        )
        kept = [decorator, *node.decorators] if self._random.random() < 0.3 else node.decorators
        return node.with_changes(decorators=kept)

    @override
    def leave_Assign(self, original_node: cst.Assign, updated_node: cst.Assign) -> cst.Assign | cst.AnnAssign:
        target = updated_node.targets[0].target
        if len(updated_node.targets) > 1 or not isinstance(target, cst.Name | cst.Attribute):
            return updated_node
        annotation = self._note()
        return cst.AnnAssign(target, annotation, updated_node.value) if annotation else updated_node

    @override
    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine:
        if self._random.random() < 0.5:
            return updated_node
        self.count += 1
        comment = cst.EmptyLine(comment=cst.Comment(f"# here {self.count}"))
        return updated_node.with_changes(leading_lines=[*updated_node.leading_lines, comment])


@pytest.mark.parametrize("path", SHORT)
@settings(max_examples=share(0.02), deadline=None)
@given(seed=st.integers(0, 2**20))
def test_annotations_comments_and_decorators_are_no_obstacle(path: Path, seed: int) -> None:
    before = cst.parse_module(path.read_text()).visit(Decorated(seed)).code
    try:
        _ = compile(before, path.name, "exec")
    except SyntaxError:  # an annotated name is global
        return
    after = migrated(before).new.decode()
    _ = compile(after, path.name, "exec")
    assert not orphans(before, after)


@pytest.mark.parametrize(
    "text",
    [
        "def main(model: int, optimizer: 'T' = None, *rest: int, out: str, **more: float) -> None:",
        "def main(model, optimizer, /, rest, *, out) -> dict[str, list[int]]:",
        "async def main(model, optimizer, rest=lambda a, *b: a, out=None):",
    ],
)
def test_a_function_that_saves_may_have_any_signature(text: str) -> None:
    lines = [
        "from accelerate import Accelerator",
        text,
        "    accelerator: Accelerator = Accelerator()",
        "    model, optimizer, loader = accelerator.prepare(model, optimizer, rest)",
        "    start: int = 0",
        "    for epoch in range(start, 3):",
        "        for batch in loader:",
        "            accelerator.backward(model(batch))",
        "            optimizer.step()",
        "            optimizer.zero_grad()",
        "        accelerator.save_state(out)",
    ]
    assert re.search(r"accel\.save_state\(\s*ctx, out", migrated("\n".join(lines) + "\n").new.decode())


@pytest.mark.parametrize("path", SHORT)
def test_every_line_may_carry_comments(path: Path) -> None:
    before = commented(path.read_text())
    after = migrated(before).new.decode()
    assert not orphans(before, after)
    compile(after, path.name, "exec")


class Plain(cst.CSTTransformer):
    """Writes `accelerator.backward(loss)` as `loss.backward()`."""

    @override
    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
        func = updated_node.func
        if not isinstance(func, cst.Attribute) or func.attr.value != "backward" or not updated_node.args:
            return updated_node
        loss, *others = updated_node.args
        value = loss.value
        if isinstance(value, cst.BinaryOperation | cst.UnaryOperation) and not value.lpar:
            value = value.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
        return updated_node.with_changes(func=cst.Attribute(value, cst.Name("backward")), args=others)


@pytest.mark.parametrize("path", [path for path in SHORT if path.id != "kinds"])  # which steps no optimizer
def test_a_plain_backward_is_that_of_the_accelerator_where_a_prepared_optimizer_steps(path: Path) -> None:
    before = path.read_text()
    assert migrated(cst.parse_module(before).visit(Plain()).code).new == migrated(before).new


PLAIN = """import torch
from accelerate import Accelerator

accelerator = Accelerator()
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(3):
    for x in loader:
        {body}
"""


@pytest.mark.parametrize(
    ("body", "trains", "stays"),
    [
        ("model(x).backward();optimizer.step();optimizer.zero_grad()", 1, 0),
        ("optimizer.zero_grad();(model(x) / 2).backward();optimizer.step()", 1, 0),
        ("model(x).backward();if epoch % 2:;    optimizer.step();    optimizer.zero_grad()", 1, 0),
        ("x.requires_grad_();model(x).sum().backward();print(x.grad)", 0, 1),
        ("model(x).backward();g = x.grad;optimizer.zero_grad();model(g).backward();optimizer.step()", 1, 1),
        ("for _ in range(3):;    model(x).backward();    x = x.grad;model(x).backward();optimizer.step()", 1, 1),
        ("model(x).backward();x.grad.zero_();model(x).backward();optimizer.step()", 1, 1),
        ("model(x).backward();other.step()", 0, 1),
        ("scaler.scale(model(x)).backward();scaler.step(optimizer)", 0, 1),
        ("model(x).backward(torch.ones(2));optimizer.step()", 0, 1),
    ],
)
def test_a_loop_trains_if_it_steps_a_prepared_optimizer_next(body: str, trains: int, stays: int) -> None:
    after = migrated(PLAIN.format(body="\n        ".join(body.split(";"))))
    text = after.new.decode()
    assert text.count("accel.backward(ctx,") == trains
    assert sum("whether this backward() trains" in note.text for note in after.notes) == stays
    assert text.count(").backward(") == stays


SEEDS = """from accelerate import Accelerator
from accelerate.utils import set_seed
import torch

def main(args, model, optimizer, loader):
    accelerator = Accelerator()
    {seeding}
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(model(batch))
        optimizer.step()
        optimizer.zero_grad()

{caller}
"""


@pytest.mark.parametrize(
    ("seeding", "caller", "expected"),
    [
        ("pass", "main(1, 2, 3, 4)", "seed=accel.seeding.draw_seed(ctx))"),
        ("set_seed(7)", "main(1, 2, 3, 4)", "seed=7)"),
        ("torch.manual_seed(0)", "main(1, 2, 3, 4)", "seed=0)"),
        ("pass", "set_seed(7)\nmain(1, 2, 3, 4)", "train_state(ctx)"),
        (
            "if args.seed is not None:\n        set_seed(args.seed)",
            "",
            "seed=args.seed if args.seed is not None else accel.",
        ),
    ],
)
def test_a_script_without_a_seed_draws_one(seeding: str, caller: str, expected: str) -> None:
    after = migrated(SEEDS.format(seeding=seeding, caller=caller))
    assert expected in after.new.decode()
    assert any("no seed is set" in change.text for change in after.changes) == ("draw_seed" in after.new.decode())


LAUNCHED = """from accelerate import Accelerator, debug_launcher, notebook_launcher

def loop(mixed_precision, seed):
    accelerator = Accelerator({options})
    accelerator.print(seed)

{launch}
"""


@pytest.mark.parametrize(
    ("options", "launch", "inside", "outside"),
    [
        ("mixed_precision='bf16'", "notebook_launcher(loop, ('no', 42))", "", ", precision='bf16')"),
        (
            "mixed_precision=mixed_precision",
            "notebook_launcher(loop, ('bf16', 42))",
            "precision=mixed_precision",
            "42))",
        ),
        ("mixed_precision=mixed_precision", "debug_launcher(loop, ('bf16', 42))", "precision=mixed_precision", "42))"),
        ("mixed_precision='bf16'", "debug_launcher(loop, ('bf16', 42))", "precision='bf16'", "42))"),
        ("mixed_precision='bf16'", "notebook_launcher(loop, (), mixed_precision='no')", "precision='bf16'", "='no')"),
        ("mixed_precision='bf16', cpu=True", "notebook_launcher(loop, ())", 'device="cpu"', ", precision='bf16')"),
        ("dynamo_backend='inductor'", "notebook_launcher(loop, ())", 'compile="whole"', "(loop, ())"),
        ("", "notebook_launcher(loop, ())", "", "(loop, ())"),
    ],
)
def test_options_within_a_launched_function_are_carried_over(
    options: str, launch: str, inside: str, outside: str
) -> None:
    text = migrated(LAUNCHED.format(options=options, launch=launch)).new.decode()
    assert ("    ctx = accel.replace(ctx, " in text) == bool(inside)
    assert inside in text
    assert text.rstrip().endswith(outside)
    _ = compile(text, "script.py", "exec")


ASKED = """from accelerate import Accelerator

def main(model):
    accelerator = Accelerator()
    state = accelerator.state
    print({expression})
"""


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("accelerator.state.num_processes", "ctx.world_size"),
        ("state.process_index", "ctx.rank"),
        ("getattr(accelerator, 'num_processes', 1)", "ctx.world_size"),
        ("getattr(state, 'device', None)", "ctx.device"),
        ("state.fsdp_plugin", ""),
        ("accelerator.state.fsdp_plugin is None", ""),
        ("getattr(accelerator.state, 'deepspeed_plugin', None)", ""),
        ("hasattr(accelerator, 'trackers')", ""),
        ("getattr(model, 'state', None)", "getattr(model, 'state', None)"),
    ],
)
def test_an_attribute_that_a_context_lacks_is_noted(expression: str, expected: str) -> None:
    after = migrated(ASKED.format(expression=expression))
    assert ("print(" + expected in after.new.decode()) or not expected
    assert any("a context lacks it" in note.text for note in after.notes) == (not expected)


@pytest.mark.parametrize("path", SHORT)
def test_migrating_twice_changes_nothing(path: Path) -> None:
    first = migrated(path.read_text())
    again = migrated(first.new.decode())
    assert not again.changed
    assert again.notes == first.notes


def run_written(name: str, *words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
    text = (Path(__file__).parent / "pairs" / f"{name}.after").read_text()
    exec(compile(text, f"{name}.py", "exec"), {"__name__": "__main__"})


def test_a_written_script_trains(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run_written("plain", monkeypatch=monkeypatch)
    assert re.search(r"epoch 2: \d+ right\ndone\n", capsys.readouterr().out)


def test_the_main_process_alone_does_what_it_did_and_all_ranks_save(tmp_path: Path) -> None:
    found: dict[str, Any] = {"__name__": "guards"}
    exec((Path(__file__).parent / "pairs" / "guards.after").read_text(), found)
    args = {"out": str(tmp_path), "trackers": "jsonl", "epochs": 2, "every": 2, "limit": 1}
    main, other = simulate(lambda ctx: found["main"](ctx, args), world_size=2)
    assert main == ["began", "saved 2", "epoch 0", "looked after 0", "saved 4", "epoch 1", "looked after 1"]
    assert other == []
    assert len(list(tmp_path.glob("step-*/head/weights.bin"))) == 2  # files of the script's own, which keep= spares
    items = json.loads((tmp_path / "step-00000004" / "manifest.json").read_text())["items"]
    assert "part_1/weights.bin" in str(items["hooks"])  # by a method that a wrapper has not


def test_loops_that_follow_each_other_carry_one_state() -> None:
    found: dict[str, Any] = {}
    exec((Path(__file__).parent / "pairs" / "loops.after").read_text(), found)
    model = torch.nn.Linear(2, 1)
    data: list[Any] = [{"x": torch.ones(2)}] * 6
    first, later = (torch.utils.data.DataLoader[Any](data[:size], batch_size=2) for size in (4, 6))  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps: list[object] = []
    _ = optimizer.register_step_post_hook(lambda used, args, options: steps.append(used))
    found["phases"](accel.single(), model, optimizer, first, later, 2)
    assert len(steps) == 2 + 3 * 3


def test_a_function_of_one_epoch_takes_the_state_and_returns_it(tmp_path: Path) -> None:
    found: dict[str, Any] = {"__name__": "epochs"}
    exec((Path(__file__).parent / "pairs" / "epochs.after").read_text(), found)
    args: dict[str, Any] = {"seed": 0, "out": str(tmp_path), "resume": None, "epochs": 3, "every": 2}
    found["main"](accel.single(), args)
    assert args["losses"] == sorted(args["losses"], reverse=True)  # each from where the last one ended
    again = {**args, "resume": str(tmp_path / "step-00000004")}
    found["main"](accel.single(), again)
    assert again["losses"] == args["losses"][2:]


def test_a_class_that_keeps_its_accelerator_keeps_a_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parent / "pairs" / "trainer.after").read_text().replace("tensorboard()", "jsonl()")
    found: dict[str, Any] = {"__name__": "trainer"}
    exec(text, found)
    args = {"seed": 0, "precision": "no", "accumulation": 2, "epochs": 3, "out": "out", "resume": None}
    losses = found["main"](args)
    assert losses == sorted(losses, reverse=True)
    items = json.loads((tmp_path / "out" / "step-00000002" / "manifest.json").read_text())["items"]
    assert items.keys() >= {"model", "optimizer", "trackers", "state"}
    assert found["main"]({**args, "resume": "out/step-00000002", "out": "again"}) == losses[1:]


def test_two_backward_passes_of_a_batch_are_those_of_one_process() -> None:
    found: dict[str, Any] = {"__name__": "losses"}
    exec((Path(__file__).parent / "pairs" / "losses.after").read_text(), found)

    def weights(ctx: accel.DistContext) -> torch.Tensor:
        args: dict[str, Any] = {"batch_size": 4 // ctx.world_size}
        found["main"](ctx, args)
        return torch.tensor(args["weights"])

    alone = weights(accel.single())
    for each in simulate(weights, world_size=2):
        torch.testing.assert_close(each, alone)


def test_two_models_are_saved_where_both_are_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--output_dir", str(tmp_path), "--report_to", "jsonl", "--gradient_accumulation_steps", "2"]
    run_written("subjects", *words, "--train_text_encoder", "--max_train_steps", "2", monkeypatch=monkeypatch)
    [saved] = tmp_path.glob("step-*")  # asked for behind the step
    items = json.loads((saved / "manifest.json").read_text())["items"]
    assert {"unet", "text_encoder", "hooks"} <= items.keys()


def test_a_long_script_saves_by_its_hooks_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    words = ["--output_dir", str(out), "--report_to", "jsonl", "--use_ema", "--seed", "1", "--train_batch_size", "4"]
    words += ["--checkpointing_steps", "2", "--checkpoints_total_limit", "2", "--gradient_accumulation_steps", "2"]
    run_written("diffusion", *words, "--max_train_steps", "4", monkeypatch=monkeypatch)
    assert [path.name for path in sorted(out.glob("step-*"))] == ["step-00000002", "step-00000004"]
    again = ["--resume_from_checkpoint", "latest", "--max_train_steps", "6"]
    run_written("diffusion", *words, *again, monkeypatch=monkeypatch)
    assert [path.name for path in sorted(out.glob("step-*"))] == ["step-00000004", "step-00000006"]
    steps = [json.loads(line)["step"] for line in (out / "logs" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]


@given(
    lines=st.lists(st.sampled_from(["import torch", "x = 1  # one", "", "    ", "def f():\n\treturn 'a'", "# é"])),
    end=st.sampled_from(["\n", "\r\n"]),
    marks=st.booleans(),
)
@settings(max_examples=share(0.6), deadline=None)
def test_what_has_no_accelerate_stays_byte_for_byte(lines: list[str], end: str, marks: bool) -> None:
    old = end.join(["# accelerated" if marks else "", *lines]).encode()
    result = migrate_bytes(old, Path("script.py"))
    assert result.new == old
    assert not result.notes


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_line_ends_and_encoding_survive(encoding: str, end: str) -> None:
    cookie = "# coding: latin-1" if encoding == "latin-1" else "# plain"
    text = f"{cookie}\nfrom accelerate import Accelerator\n\n\ndef f(accelerator):\n    accelerator.print('é')\n"
    result = migrate_bytes(text.replace("\n", end).encode(encoding), Path("script.py"))
    written = result.new.decode(encoding)
    assert result.new.startswith(b"\xef\xbb\xbf") == (encoding == "utf-8-sig")
    assert written.replace("\r\n", "\n").count("\n") == written.count(end)
    assert f"accel.print(ctx, 'é'){end}" in written


def test_an_import_within_a_function_goes_and_one_of_all_names_is_noted() -> None:
    inner = "def f(accelerator):\n    from accelerate.utils import gather\n    return gather(accelerator.device)\n"
    found = migrated(inner)
    assert found.new.decode() == "import accel\ndef f(ctx):\n    return accel.gather(ctx, ctx.device)\n"
    assert not found.notes
    found = migrated("from accelerate import *\n\naccelerator = Accelerator()\naccelerator.print(1)\n")
    assert "    accel.print(ctx, 1)\n" in found.new.decode()
    assert [note.text for note in found.notes] == [
        "decide names of Accelerate that this line brings (docs/from-accelerate.md)"
    ]


@pytest.mark.parametrize("value", ["[" * 3000 + "]" * 3000, "-" * 5000 + "1", "a" + "(1)" * 3000])
def test_what_python_itself_cannot_read_is_an_error_of_its_file(value: str) -> None:
    with assert_raises(ConfigError, problem="the file is not valid Python", got="too many"):
        _ = migrated(f"from accelerate import Accelerator\nx = {value}\n")


def test_a_tensor_that_follows_another_keyword_stays_a_keyword() -> None:
    call = 'accelerator.reduce(reduction="sum", tensor=x)'
    text = f"from accelerate import Accelerator\n\n\ndef f(accelerator: Accelerator, x):\n    return {call}\n"
    assert 'return accel.reduce(ctx, op="sum", tree=x)\n' in migrated(text).new.decode()


def test_a_mean_follows_a_tensor_that_is_a_keyword() -> None:
    opened = "from accelerate import Accelerator\nfrom accelerate.utils import reduce\n\n\n"
    text = f"{opened}def f(accelerator: Accelerator, x):\n    return reduce(tensor=x)\n"
    assert 'return accel.reduce(ctx, x, op="mean")\n' in migrated(text).new.decode()


def test_a_block_that_becomes_a_function_has_a_note_where_it_is_a_value() -> None:
    text = "from accelerate import Accelerator\n\n\ndef f(accelerator: Accelerator):\n    return "
    found = migrated(f"{text}accelerator.split_between_processes\n")
    assert [note.text.split(" (")[0] for note in found.notes] == [
        "decide what takes the place of accelerator.split_between_processes"
    ]


@pytest.mark.slow  # each starts a process
@pytest.mark.parametrize("value", ["+".join("1" * 500), "f(" * 150 + ")" * 150, "lambda: " * 200 + "1"])
def test_deep_expressions_are_rewritten_in_a_process_of_their_own(value: str) -> None:
    text = f"from accelerate import Accelerator\nx = {value}\n\n\ndef f(accelerator):\n    accelerator.print(x)\n"
    assert migrated(text).new.decode() == f"import accel\nx = {value}\n\n\ndef f(ctx):\n    accel.print(ctx, x)\n"


def test_every_name_that_is_written_exists() -> None:
    texts = [*(path.read_text() for path in SOURCES), *METHODS.values(), *FUNCTIONS.values()]
    names = {name for text in texts for name in re.findall(r"\baccel((?:\.[A-Za-z_]\w*)+)", text)}
    public = {name for name in names if name.split(".")[1] not in ("migrate", "errors", "py")}
    assert len(public) > 65
    for name in public:
        found: object = accel
        for part in name.strip(".").split("."):
            found = getattr(found, part)


TRACKED = """from accelerate import Accelerator

accelerator = Accelerator(log_with={name!r})
accelerator.init_trackers("run")
"""


def test_every_tracker_of_accel_is_known_by_its_name_and_nothing_else_is() -> None:
    """A tracker is what returns a `Tracker`, so that a new one needs no line in `accel.migrate`."""
    made = {
        name: typing.get_type_hints(found).get("return")
        for name, found in vars(accel.trackers).items()
        if inspect.isfunction(found)
    }
    assert {"wandb", "mlflow", "jsonl"} < {name for name in accel.trackers.__all__ if made.get(name) is Tracker}
    for name in accel.trackers.__all__:
        written = migrated(TRACKED.format(name=name))
        is_known = f"accel.trackers.{name}()" in written.new.decode()
        assert is_known == (made.get(name) is Tracker), name
        assert any("log_with=" in note.text for note in written.notes) == (not is_known), name


def test_every_page_that_a_note_names_exists() -> None:
    root = Path(accel.__file__).parent.parent
    pages = {page for path in SOURCES for page in re.findall(r'"(docs/[\w-]+\.md)"', path.read_text())}
    assert len(pages) > 10
    assert all((root / page).exists() for page in pages)


if __name__ == "__main__":
    for pair in PAIRS:
        _ = pair.with_suffix(".after").write_bytes(migrated(pair.read_text()).new)


WIDE = """\
import torch
from accelerate import Accelerator


def main(args, dataset):
    accelerator = Accelerator(gradient_accumulation_steps=4)
    model, optimizer = args.model, args.optimizer
    training_loader = torch.utils.data.DataLoader(dataset, 16)
    model, optimizer, training_loader = accelerator.prepare(
        model, optimizer, training_loader
    )
    {}
    for epoch in range(args.epochs):
        for batch_index, training_batch in enumerate(training_loader):
            with accelerator.accumulate(model):
                loss = model(training_batch).square().mean()
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        values = accelerator.gather(loss.detach().repeat(args.batch))
        accelerator.save_state(f"{args.output_directory}/epoch_{epoch}")


main(None, None)
"""


@pytest.mark.parametrize("width", [79, 88, 100, 120])
def test_a_script_keeps_its_width(width: int) -> None:
    before = WIDE.replace("{}", f"text = {'x' * (width - 13)!r}" if width > 79 else "pass")
    assert max(map(len, before.splitlines())) <= width
    after = migrated(before).new.decode()
    assert max(map(len, after.splitlines())) <= width
    assert ("        for batch_index, training_batch in enumerate(\n" in after) == (width < 100)


SHARED = """\
from accelerate import Accelerator


def main(args):
    count = args.start
    accelerator = Accelerator(mixed_precision=args.precision)
    {}
    print(1)
    print(2)
    print(3)
    print(4)
    print(5)
    print(6)
    print(7)
    print(8)
    print(9)
    print(10)
    print(11)
    print(12)
    print(accelerator.device, count)


main(make())
main(make())
"""
LIFTED = {
    "del of a nested function": "def f(a):\n        b = a\n        del b",
    "del": "value = 1\n    del value",
    "generator": "def f():\n        yield 1",
    "shared variable": "def f():\n        nonlocal count\n        count = 1",
    "comprehension": "rows = [row for row in args.rows]",
    "lambda": "f = lambda: count",
}
INDENTED = {
    "yield": "yield 1",
    "global": "global CACHE\n    CACHE = 1",
    "locals": "print(locals())",
}


@pytest.mark.parametrize("name", [*LIFTED, *INDENTED])
def test_lines_are_indented_only_where_they_cannot_be_a_function(name: str) -> None:
    after = migrated(SHARED.replace("{}", (LIFTED | INDENTED)[name])).new.decode()
    compile(after, "script.py", "exec")  # a `nonlocal` without a variable is an error
    assert ("def run(ctx, args, count" in after or "def run(ctx, count" in after) == (name in LIFTED)
    assert ("\n    print(10)\n" in after) == (name in LIFTED)
    assert ("\n        print(10)\n" in after) == (name in INDENTED)


HELPERS = """\
from accelerate import Accelerator


def d_step(accelerator, loss, optimizer):
    accelerator.backward(loss)
    optimizer.step()


def main(gan, optimizer, loader):
    accelerator = Accelerator()
    gan, optimizer, loader = accelerator.prepare(gan, optimizer, loader)
    for batch in loader:
        {}
"""


@pytest.mark.parametrize(("line", "is_noted"), [("d_step(accelerator, gan(batch), optimizer)", True), ("pass", False)])
def test_notes_name_the_callers_of_functions_that_step(line: str, is_noted: bool) -> None:
    notes = [note.text for note in migrated(HELPERS.replace("{}", line)).notes]
    assert any("the loop around backward: main calls d_step" in note for note in notes) == is_noted
    assert any("which state this loop's batches move: d_step runs" in note for note in notes) == is_noted
