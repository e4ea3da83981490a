# SPDX-License-Identifier: Apache-2.0
"""`accel plan`: meshes that fit and why others do not, for people in 80 columns and for programs; refused words."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from estimates import H100, Choice, MessageSpeed, with_recorded_calls
from model_configs import transformer_of
from processes import patience
from tables import rows

from accel.cli import main
from accel.cli._plan import show_choices
from accel.estimate import EstimatedStep, Job, Transformer, rank_memory, read_efficiencies, step_time
from accel.estimate._choices import Choices
from accel.topology import Axes, Balance, Plan

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
}  # fmt: skip

LLAMA_70B = LLAMA_8B | {
    "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64, "intermediate_size": 28672,
}  # fmt: skip

MESSAGES = (MessageSpeed(operation="all-reduce", ranks=8, hosts=1, bytes=1 << 28, seconds=0.01),)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a configuration, whose stages follow from the sizes: a record takes seconds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("accel.cli._plan.with_recorded_calls", lambda model, _: model)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = main(["plan", *words])
    return status, capsys.readouterr().out


def test_the_fastest_mesh_comes_first_and_says_how_to_take_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = asked(capsys, "config.json", "--ranks", "8", "--memory", "80GB", "--top", "3")
    assert status == 0
    lines = text.splitlines()
    assert lines[0] == "config.json: 8.03 billion parameters, 32 blocks"
    assert lines[1] == "A step of 8 x 4096 tokens in bf16 with adamw on 8 ranks of 77.0 GB:"
    assert lines[3].split() == ["MESH", "MEMORY", "STEP", "BUSY", "MICRO", "WITH"]
    assert lines[4].split()[0] == "dp=8"
    assert "The first: accel launch --mesh dp=8 --strategy fsdp train.py" in lines
    assert "Too large" in text
    assert all(len(line) <= 80 for line in lines)


@pytest.mark.parametrize("ranks", ["8", "24"])
def test_lines_are_as_wide_as_a_terminal(folder: Path, capsys: pytest.CaptureFixture[str], ranks: str) -> None:
    _, text = asked(capsys, ".", "--ranks", ranks, "--memory", "40GB", "--top", "1000", "--tokens", "8192")
    assert max(map(len, text.splitlines())) <= 80


def test_it_says_why_the_second_mesh_lost(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, text = asked(capsys, ".", "--ranks", "64", "--memory", "80GB", "--tokens", "8192")
    assert "The second, dp=32,cp=2, is as fast within 1 %, on 1 more axis." in text.splitlines()
    (folder / "config.json").write_text(json.dumps(LLAMA_70B))
    _, text = asked(capsys, ".", "--ranks", "64", "--memory", "80GB", "--tokens", "8192")
    lines = text.splitlines()
    at = next(at for at, line in enumerate(lines) if line.startswith("The second, "))
    assert lines[at].endswith("% longer:")
    assert "ms more of" in lines[at + 1]
    assert " along " in lines[at + 1]


def test_recomputing_all_but_products_is_tried(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, text = asked(capsys, ".", "--ranks", "8", "--memory", "80GB", "--tokens", "8192")
    assert "recompute but products" in text
    _, text = asked(capsys, ".", "--ranks", "8", "--memory", "80GB", "--tokens", "8192", "--compiled")
    assert '  and accel.checkpoint_activations(model, keep="products")' in text.splitlines()


def test_what_the_second_mesh_waits_for_is_what_its_step_has_more(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, text = asked(capsys, ".", "--ranks", "16", "--memory", "80GB", "--json")
    for each in msgspec.json.decode(text)["fitting"]:
        time = each["options"]["time"]
        assert time["exposed"] == pytest.approx(sum(time["messages"].values()))
        assert all(seconds >= 0 for seconds in time["messages"].values())


def test_the_stages_of_the_first_mesh_with_pp_are_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = (".", "--ranks", "16", "--memory", "80GB", "--batch", "256", "--link", "20GB,1GB", "--host", "2")
    _, text = asked(capsys, *slow)
    lines = text.splitlines()
    at = lines.index("Stages of pp=2,dp=8, balanced by time, on each rank along pp:")
    assert lines[at + 1].split() == ["STAGES", "BLOCKS", "MEMORY", "PRODUCTS"]
    assert lines[at + 2].startswith("0       embedding, 0-16  62.2 GB")
    assert lines[at + 3].startswith("1       17-31, head")
    assert lines[at + 4] == "by the sizes in the file: no forward of the model is recorded"
    assert "plan=accel.parallel.Plan(micro_batches=32)" in text
    first = msgspec.json.decode(asked(capsys, *slow, "--json")[1])["fitting"][0]
    assert [each["blocks"] for each in first["stages"]] == [[[0, 16]], [[17, 31]]]
    assert "Stages of" not in asked(capsys, ".", "--ranks", "8", "--memory", "80GB", "--top", "1")[1]


@pytest.mark.nightly
def test_the_stages_are_those_of_a_record(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    words = (".", "--ranks", "16", "--memory", "80GB", "--batch", "256", "--link", "20GB,1GB", "--host", "2", "--json")
    by_sizes = asked(capsys, *words)[1]
    with pytest.MonkeyPatch.context() as patch:
        seen: list[int] = []

        def recorded(model: Transformer, file: Path) -> Transformer:
            found = with_recorded_calls(model, file)
            seen.append(len(found.calls))
            return found

        patch.setattr("accel.cli._plan.with_recorded_calls", recorded)
        assert asked(capsys, *words)[1] == by_sizes
        assert asked(capsys, "config.json", *words[1:])[0] == 0
        assert "no forward" not in asked(capsys, *words[:-1])[1]
    assert seen == [35] * 3  # the embedding, 32 blocks, the norm and the head


@pytest.mark.parametrize("balance", ["blocks", "memory"])
def test_stages_that_prepare_does_not_make_are_named(balance: Balance) -> None:
    """A choice whose balance is not that of prepare says the line that makes its stages."""
    model = transformer_of(LLAMA_8B)
    step = EstimatedStep(tokens=64, micro_batches=8, balance=balance)
    job = Job(ranks=2, memory=1 << 40, tokens=64)
    axes = Axes(pp=2)
    memory, time = rank_memory(model, axes, step, Plan()), step_time(model, axes, step, Plan(), job.hosts)
    choice = Choice(axes=axes, step=step, plan=Plan(), memory=memory, time=time)
    found = Choices(fitting=[choice], too_large=[], refused=[])
    lines = show_choices("x", model, job, found, most=1, more=None).splitlines()
    assert "  in the script, plan=accel.parallel.Plan(micro_batches=8, stages=stages)" in lines
    assert f'in the script, stages = accel.parallel.stage_plan(model, 2, balance="{balance}")' in lines


LLAVA_7B: dict[str, Any] = {
    "model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32064},
    "vision_config": {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
        "image_size": 336, "patch_size": 14,
    },
}  # fmt: skip


def test_stages_of_a_model_with_an_encoder_begin_at_blocks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _ = (folder / "config.json").write_text(json.dumps(LLAVA_7B))
    words = (".", "--ranks", "16", "--memory", "80GB", "--batch", "256", "--tokens", "2048", "--top", "1000")
    _, text = asked(capsys, *words, "--link", "20GB,1GB", "--host", "2")
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert "plan=accel.parallel.Plan(micro_batches=32, stages=stages)" in text
    at = lines.index("STAGES  BLOCKS                    MEMORY   PRODUCTS")
    assert lines[at + 1].startswith("0       encoder, embedding, 0-14")  # fewer blocks beside the encoder
    assert lines[at + 2].startswith("1       15-31, head")
    assert lines[at + 4] == '  stages = [[f"model.language_model.layers.{at}"] for at in (0, 15)]'


def test_a_measured_table_gives_the_speeds(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [".", "--ranks", "8", "--memory", "80GB"]
    table = msgspec.structs.replace(H100, device="half an H100", torch="2.13", kind="cpu", messages=MESSAGES)
    slower = [msgspec.structs.replace(each, flops=each.flops / 2) for each in table.products]
    table = msgspec.structs.replace(table, products=tuple(slower))
    (folder / "table.json").write_bytes(msgspec.json.encode(table))
    _, text = asked(capsys, *words, "--efficiencies", "table.json")
    told = ["Speeds of half an H100, torch 2.13, 2025", "A plan for such CPUs, not for GPUs."]
    assert text.splitlines()[2:4] == told

    def seconds(*more: str) -> dict[str, float]:
        found = msgspec.json.decode(asked(capsys, *words, *more, "--json")[1])["fitting"]
        return next(each["options"]["time"] for each in found if each["mesh"] == "dp=4,tp=2")

    plain, half = seconds(), seconds("--efficiencies", "table.json")
    assert half["products"] == pytest.approx(2 * plain["products"])
    assert half["attention"] == plain["attention"]
    assert half["messages"]["reduce-scatter along tp"] > plain["messages"]["reduce-scatter along tp"]  # slower links
    linked = seconds("--efficiencies", "table.json", "--link", "450GB,50GB")
    assert linked["messages"]["reduce-scatter along tp"] == plain["messages"]["reduce-scatter along tp"]
    assert seconds("--compiled")["memory"] < plain["memory"]
    assert seconds("--precision", "fp8")["products"] < 0.7 * plain["products"]
    assert seconds("--tflops", "400")["memory"] == 0
    capped = seconds("--power", "350")
    for name in ("products", "attention"):
        assert capped[name] == pytest.approx(2 ** (1 / 3) * plain[name])
    assert capped["memory"] == plain["memory"]
    assert seconds("--power", "1000") == plain


def test_a_benchmark_writes_a_table_and_says_whose_it_is(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accel.estimate._efficiencies._SIZES", {"cpu": (16, 32)})
    monkeypatch.setattr("accel.estimate._efficiencies._TOKENS", {"cpu": (16,)})
    status, text = asked(capsys, "--calibrate", "cpu.json")
    assert status == 0
    assert text.splitlines()[-1] == "These are this CPU's speeds: a plan by them is one for such CPUs, not for GPUs."
    table = read_efficiencies(folder / "cpu.json")
    assert {(each.dtype, each.m, each.n, each.k) for each in table.products} >= {
        ("fp32", 16, 32, 16),
        ("bf16", 32, 32, 32),
    }
    assert asked(capsys, ".", "--ranks", "8", "--memory", "80GB", "--efficiencies", "cpu.json")[0] == 0
    assert main(["plan", "--calibrate", "nowhere/table.json"]) == 2
    assert main(["plan", "--calibrate", "."]) == 2


def test_programs_read_all_meshes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = asked(capsys, ".", "--ranks", "8", "--memory", "80GB", "--json")
    found = msgspec.json.decode(text)
    assert status == 0
    assert found["parameters"] == 8030261248
    assert found["limit"] == 77 * 10**9
    steps = [each["step_s"] for each in found["fitting"]]
    assert steps[0] <= 1.01 * min(steps)
    assert all(each["memory"] <= found["limit"] for each in found["fitting"])
    needs = [each["memory"] for each in found["too_large"]]
    assert needs == sorted(needs)
    assert needs[0] > found["limit"]


def test_where_nothing_fits_it_says_what_would(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = asked(capsys, ".", "--ranks", "2", "--memory", "80GB")
    assert status == 1
    assert "No mesh of 2 ranks fits." in text
    assert "It fits on 4 ranks: " in text or "It fits on 8 ranks: " in text
    status, text = asked(capsys, ".", "--ranks", "32", "--memory", "3001MB")
    assert status == 1
    assert "The smallest need is" in text


def test_a_prime_number_of_ranks_is_told_what_it_cannot_divide(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = asked(capsys, ".", "--ranks", "61", "--memory", "80GB")
    assert status == 0
    assert "heads cannot be divided along tp: 1, such as tp=61" in text
    assert "a stage would have no layer: 1, such as pp=61" in text
    status, text = asked(capsys, ".", "--ranks", "61", "--memory", "80GB", "--batch", "64")
    assert status == 1
    assert "the batch cannot be divided" in text
    assert "Use another --batch" in text


def test_faster_links_between_hosts_make_wide_tensor_parallelism_cheaper(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def seconds(link: str) -> float:
        words = (".", "--ranks", "16", "--memory", "80GB", "--json", "--link", link)
        found = msgspec.json.decode(asked(capsys, *words)[1])
        return next(
            each["step_s"] for each in found["fitting"] if each["mesh"] == "tp=16" or each["mesh"] == "dp=2,tp=8"
        )

    assert seconds("450GB,450GB") <= seconds("450GB,10GB")
    assert seconds("900GB,50GB") < seconds("100GB,50GB")


@rows(
    "words, told",
    [
        ([], "the following arguments are required"),
        (["config.json", "--memory", "80GB"], "required: --ranks"),
        (["config.json", "--ranks", "8"], "required: --memory"),
        (["config.json", "--ranks", "8", "--memory", "lots"], "the size is not valid"),
        (["config.json", "--ranks", "8", "--memory", "80"], "the size is not valid"),
        (["config.json", "--ranks", "8", "--memory", "2GB"], "the reserve takes all of the memory"),
        (["config.json", "--ranks", "0", "--memory", "80GB"], "the number is too small"),
        (["config.json", "--ranks", "-8", "--memory", "80GB"], "the number is too small"),
        (["config.json", "--ranks", "8.5", "--memory", "80GB"], "invalid int value"),
        (["config.json", "--ranks", "99999999", "--memory", "80GB"], "the meshes of so many ranks are not listed"),
        (["config.json", "--ranks", "8", "--memory", "80GB", "--batch", "0"], "at --batch"),
        (["config.json", "--ranks", "8", "--memory", "80GB", "--link", "50GB"], "the speeds of links are not valid"),
        (["config.json", "--ranks", "8", "--memory", "80GB", "--link", "50GB,x"], "the size is not valid"),
        (["config.json", "--ranks", "8", "--memory", "80GB", "--tflops", "-3"], "the speed is not valid"),
        (["config.json", "--ranks", "8", "--memory", "80GB", "--power", "0"], "a number above 0, got 0.0"),
        (["config.json", "--ranks", "8", "--memory", "80GB", "--power", "nan"], "a number above 0, got nan"),
        (["config.json", "--ranks", "8", "--memory", "80GB", "--power", "9", "--tflops", "9"], "got one speed"),
        (
            ["config.json", "--ranks", "8", "--memory", "80GB", "--efficiencies", "no.json"],
            "expected a table of speeds",
        ),
        (
            ["config.json", "--ranks", "8", "--memory", "80GB", "--efficiencies", "bert.json"],
            "the file is not a table of speeds",
        ),
        (
            ["config.json", "--ranks", "8", "--memory", "80GB", "--tflops", "9", "--efficiencies", "bert.json"],
            "two flags exclude each other",
        ),
        (["config.json", "--calibrate", "cpu.json"], "unknown flag"),
        (["config.json", "--ranks", "8", "--memory", "80GB", "--precision", "bf61"], "Did you mean `bf16`?"),
        (["config.json", "--ranks", "8", "--memory", "80GB", "--optimizer", "adan"], "unknown optimizer"),
        (["config.json", "--rank", "8", "--memory", "80GB"], "--rank"),
        (["config.json", "--ranks", "8", "--memory", "80GB", "--mesh", "dp=8"], "unknown flag"),
        (["nosuch.json", "--ranks", "8", "--memory", "80GB"], "there is no such file: expected a config.json"),
        (["bert.json", "--ranks", "8", "--memory", "80GB"], "the blocks of this kind of model are not known"),
        (["none.json", "--ranks", "8", "--memory", "80GB"], "the size of the model is not valid"),
        (["list.json", "--ranks", "8", "--memory", "80GB"], "the file cannot be read"),
        (["empty.json", "--ranks", "8", "--memory", "80GB"], "the file is not a configuration of a model"),
    ],
)
def test_bad_words_are_one_line(folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str) -> None:
    (folder / "bert.json").write_text('{"model_type": "bert"}')
    (folder / "none.json").write_text('{"model_type": "llama", "hidden_size": "wide"}')
    (folder / "list.json").write_text("[1]")
    (folder / "empty.json").write_text("{}")
    assert main(["plan", *words]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_without_transformers_no_torch_is_needed(folder: Path) -> None:
    words = "['plan', '.', '--ranks', '8', '--memory', '80GB']"
    code = "import sys; sys.modules['transformers'] = None; from accel.cli import main; "
    code += f"main({words}); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=patience(60), stdout=subprocess.DEVNULL)
