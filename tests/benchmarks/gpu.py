# SPDX-License-Identifier: Apache-2.0
"""Tests and benchmarks of a machine with GPUs, by one command, into the section of docs/benchmarks.md.

    python tests/benchmarks/gpu.py [--gpus N] [--only WORD ...] [--limit-s 180] [--out FOLDER] [--write]

First `pytest -m gpu`, then each benchmark that the number of GPUs can hold, then `examples/gpt.py` for tokens a second
and MFU, which are printed beside those that torchtitan has published. What fails or takes too long is said, and the
others go on; all output is kept in the folder. `--write` puts the summary into docs/benchmarks.md. `--list` prints the
commands alone. Exit 2 without a GPU, 1 if a run failed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- gpu: begin -->", "<!-- gpu: end -->"
LINES = 80  # of a run's output in the summary
NOISE = re.compile(r"USDT:|Warning\b|^[IWE]\d{4} |^\[rank\d+\]:\[[IWE]|^\s+\"\"\"| tok/s\b")
THROUGHPUT = re.compile(r"  ([\d.]+)(k?) tok/s(?:  ([\d.]+) % MFU)?")  # of a line of the console


class Figure(NamedTuple):
    """Throughput of a model on a GPU.

    Attributes:
        model: its name.
        how: how it is trained.
        gpus: their number and name.
        tokens: a second, of each GPU.
        mfu: model FLOPs utilisation as it is published.
        source: of the figures.
    """

    model: str
    how: str
    gpus: str
    tokens: float
    mfu: str
    source: str

    def row(self) -> str:
        """Return a row of the table."""
        return f"| {self.model} | {self.how} | {self.gpus} | {self.tokens:,.0f} | {self.mfu or '-'} | {self.source} |"


HEAD = "| model | trained by | GPUs | tokens/s of a GPU | MFU | source |\n|---|---|---|---|---|---|"
H100, A100, H200 = "torchtitan, December 2024", "torchtitan, 2024", "Trainy with torchtitan, June 2025"
PUBLISHED = (
    Figure("Llama 3.1 8B", "FSDP2", "8 x H100", 5762, "33 %", H100),
    Figure("Llama 3.1 8B", "FSDP2, compiled", "8 x H100", 6667, "39 %", H100),
    Figure("Llama 3.1 8B", "FSDP2, compiled, Float8", "8 x H100", 8532, "", H100),
    Figure("Llama 3.1 8B", "FSDP2", "128 x H100", 5605, "", H100),
    Figure("Llama 3.1 8B", "FSDP2, compiled", "128 x H100", 6514, "", H100),
    Figure("Llama 3.1 8B", "FSDP2, compiled, Float8", "128 x H100", 8380, "", H100),
    Figure("Llama 3.1 70B", "FSDP2 32, TP 8, compiled, Float8", "256 x H100", 829, "", H100),
    Figure("Llama 3.1 405B", "FSDP2 8, TP 8, PP 8 by interleaved 1F1B, Float8", "512 x H100", 128, "", H100),
    Figure("Llama 3 8B", "FSDP2, batch 1", "64 x A100", 2973, "58.2 %", A100),
    Figure("Llama 3 70B", "FSDP2, batch 1", "64 x A100", 331, "51.7 %", A100),
    Figure("Llama 3.1 8B", "FSDP2, compiled, Float8", "32 x H200", 10938, "", H200),
)


class Run(NamedTuple):
    """A command of the list.

    Attributes:
        name: in the summary.
        words: arguments of the interpreter.
        gpus: GPUs that it needs at least; its processes take all there are unless `exact`.
        exact: whether it takes just that many.
    """

    name: str
    words: tuple[str, ...]
    gpus: int = 1
    exact: bool = False


FRESH = "FRESH"  # a folder of the run's own, so that no run resumes another
GPT = ("examples/gpt.py", "--steps", "60", "--batch", "128", "--out", FRESH)
LARGE = ("tests/benchmarks/tensor_parallel.py", "--widths", "4096", "--tokens", "4096", "--rounds", "5")
RUNS = (
    Run("tests", ("-m", "pytest", "-m", "gpu", "-n", "0", "tests/gpu"), exact=True),
    Run("step", ("tests/benchmarks/step_overhead.py",)),
    Run("step's kernels and waits", ("tests/benchmarks/step_counts.py",)),
    Run("sharded step", ("tests/benchmarks/fsdp.py",)),
    Run("loader", ("tests/benchmarks/loader.py",)),
    Run("metrics", ("tests/benchmarks/metrics.py",)),
    Run("checkpoint", ("tests/benchmarks/checkpoint.py",)),
    Run("streamed blocks", ("tests/benchmarks/big_model_overhead.py", "--rounds", "100"), exact=True),
    Run("gather and reduce", ("tests/benchmarks/collectives.py",), 2),
    Run("tensor parallel", ("--mesh", "tp=2", "tests/benchmarks/tensor_parallel.py"), 2, True),
    Run("tensor parallel in bf16", ("--mesh", "tp=2", "--precision", "bf16", *LARGE), 2, True),
    Run("pipeline", ("--mesh", "pp=2", "tests/benchmarks/pipeline.py"), 2, True),
    Run("context parallel", ("--mesh", "cp=2", "tests/benchmarks/context_parallel.py"), 2, True),
    Run("experts", ("tests/benchmarks/experts.py",), 2),
    Run("GPT by ddp in bf16", ("--precision", "bf16", *GPT)),
    Run("GPT by fsdp in bf16", ("--precision", "bf16", "--strategy", "fsdp", *GPT)),
    Run("GPT on dp x tp", ("--precision", "bf16", "--strategy", "fsdp", "--mesh", "dp=2,tp=2", *GPT), 4, True),
)


def command(run: Run, gpus: int, fresh: str = FRESH) -> list[str]:
    """Return the words of a run on a machine with so many GPUs, and with a folder of its own."""
    words = [fresh if word == FRESH else word for word in run.words]
    if words[0] == "-m" or "big_model_overhead" in words[0]:  # one process, by itself
        return [sys.executable, *words]
    processes = run.gpus if run.exact else gpus
    return [sys.executable, "-m", "accel.cli", "launch", "--nproc-per-node", str(processes), *words]


def chosen(gpus: int, only: Sequence[str]) -> list[Run]:
    """Return the runs that so many GPUs can hold, and whose name has one of the words."""
    return [run for run in RUNS if run.gpus <= gpus and (not only or any(word in run.name for word in only))]


def measure(run: Run, gpus: int, out: Path, limit_s: float) -> tuple[str, int]:
    """Run one, and keep its output; return it and its status, 124 after the limit."""
    name = run.name.replace(" ", "-").replace("'", "")
    file = out / f"{name}.txt"
    with file.open("w") as target:
        try:
            status = subprocess.run(
                command(run, gpus, str(out / name)),
                cwd=ROOT,
                stdout=target,
                stderr=subprocess.STDOUT,
                timeout=limit_s,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            status = 124
    return file.read_text(errors="replace"), status


def last_lines(output: str) -> str:
    """Return the last lines, without what libraries say and without throughputs, which have a table."""
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    return "\n".join([line for line in lines if not NOISE.search(line)][-LINES:])


def figures(machine: str, found: Sequence[tuple[Run, str, int]], gpus: int) -> list[Figure]:
    """Return the throughput of each run that prints tokens a second: the median of all lines but the first."""
    rows = list[Figure]()
    for run, output, status in found:
        lines = THROUGHPUT.findall(output)[1:]
        if lines and not status:
            tokens = median(float(number) * (1000 if unit else 1) for number, unit, _ in lines)
            known = [float(mfu) for _, _, mfu in lines if mfu]
            mfu = f"{median(known):.0f} %" if known else ""
            processes = run.gpus if run.exact else gpus
            name, how = "GPT of 124 million", run.name.removeprefix("GPT ").removeprefix("by ")
            rows.append(Figure(name, how, f"{processes} x {machine}", tokens / processes, mfu, "this run"))
    return rows


def table(rows: Sequence[Figure]) -> str:
    """Return figures as a table of Markdown."""
    return "\n".join([HEAD, *(each.row() for each in rows)])


def summary(machine: str, found: Sequence[tuple[Run, str, int]], gpus: int) -> str:
    """Return the section's text: for each run its command, status and last lines, and throughput as a table."""
    parts = [f"{machine}, by `python tests/benchmarks/gpu.py`."]
    for run, output, status in found:
        words = " ".join(["python", *command(run, gpus)[1:]])
        how = {0: "", 124: " It took too long."}.get(status, f" It failed with status {status}.")
        parts += [f"### {run.name}", f"`{words}`.{how}"]
        parts += [f"```text\n{lines}\n```"] if (lines := last_lines(output)) else []
    return "\n\n".join(parts)


def write(text: str, page: Path = PAGE) -> None:
    """Put the summary between the marks of the page."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpus", type=int, help="number of GPUs to use; all by default")
    parser.add_argument("--only", nargs="+", default=[], help="runs whose name has one of these words")
    parser.add_argument("--limit-s", type=float, default=180, help="seconds for each run")
    parser.add_argument("--out", type=Path, help="folder for all output; a temporary one by default")
    parser.add_argument("--write", action="store_true", help="put the summary into docs/benchmarks.md")
    parser.add_argument("--list", action="store_true", help="print the commands, and run nothing")
    options = parser.parse_args()

    import torch

    gpus = options.gpus or torch.cuda.device_count()
    runs = chosen(gpus, options.only)
    if options.list:
        print("\n".join(" ".join(command(run, gpus)) for run in runs))
        return 0
    if not gpus or not torch.cuda.is_available():
        print("no GPU here: torch.cuda.is_available() is false", file=sys.stderr)
        return 2
    out = options.out or Path(tempfile.mkdtemp(prefix="accel-gpu-"))
    out.mkdir(parents=True, exist_ok=True)
    found = list[tuple[Run, str, int]]()
    for run in runs:
        begun = time.monotonic()
        output, status = measure(run, gpus, out, options.limit_s)
        found.append((run, output, status))
        print(f"== {run.name}: status {status}, {time.monotonic() - begun:.0f} s\n{last_lines(output)}", flush=True)
    device = torch.cuda.get_device_name(0)
    own = figures(device, found, gpus)
    if own:
        print(f"== tokens a second beside torchtitan's\n{table([*own, *PUBLISHED])}", flush=True)
    text = summary(f"{gpus} x {device}, torch {torch.__version__}", found, gpus)
    if own:
        text += f"\n\n### Tokens a second\n\n{table(own)}"
    (out / "summary.md").write_text(text)
    if options.write:
        write(text)
    return int(any(status for _, _, status in found))


if __name__ == "__main__":
    sys.exit(main())
