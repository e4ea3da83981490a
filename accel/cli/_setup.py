# SPDX-License-Identifier: Apache-2.0
"""The set-up of a machine: `accel test` launches the self-check, `accel env` prints the facts for a bug report, and
`accel completion` the scripts that let a shell complete words of `accel`.

The scripts call `accel completion words` with what has been typed, so that one function answers all shells.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

import accel
from accel.cli._config import SUBCOMMANDS
from accel.cli._launch import parser, split_words
from accel.cli._main import COMMANDS
from accel.cli._parser import (
    CONFIG_FLAG,
    Parser,
    add_fields,
    find_file,
    print_settings_file,
    resolve_flags,
    value_flags,
)
from accel.config import resolve
from accel.config._schema import to_text
from accel.config._settings import FIELDS
from accel.errors import AccelError
from accel.errors._checks import check_choice
from accel.launching import run_launch
from accel.launching.local._machine import read_machine
from accel.run_folder import conflicting_package, hide_in_text, hide_variable
from accel.terminal import show_size

_ENV_USAGE = "accel env [--config FILE] [--json]"
_ENV_ABOUT = (
    "Print versions, devices, backends, the configuration and the launchers' variables for a bug report. Secrets are "
    "left out."
)
_PACKAGES = (
    *("torch", "safetensors", "msgspec", "numpy", "transformers", "datasets", "accelerate", "torchao"),
    *("torchdata", "transformer-engine", "schedulefree", "deepspeed", "hypothesis", "cloudpickle"),
)
_REQUIRED = 3
_SHOWN = re.compile(
    r"(ACCEL|TORCH|PYTORCH|TORCHELASTIC|TORCHINDUCTOR|PET|NCCL|GLOO|CUDA|OMPI_COMM_WORLD|PMI|PMIX|MV2_COMM_WORLD|OMP"
    r"|MKL|KMP|HIP|HSA|ROCR|XLA|PJRT|TPU|SM|SLURM)_\w+|((LOCAL_)?(RANK|WORLD_SIZE))|(NODE|GROUP)_RANK"
    r"|MASTER_(ADDR|PORT)|HF_HUB_OFFLINE|NVIDIA_VISIBLE_DEVICES|PYTHONPATH|LD_PRELOAD"
)
_PERSONAL_NAME = re.compile(r".*_(USER|ACCOUNT|UID|GID)", re.IGNORECASE)

_TEST_USAGE = "accel test [--folder DIR] [flags of accel launch]"
_TEST_ABOUT = """Check devices, collectives, data order, gradients, checkpoints and
bandwidth on the ranks of a launch. Flags, variables and the file apply as for
`accel launch`. On several hosts, run it on each."""
_SCRIPT = Path(accel.__path__[0], "testing", "selfcheck", "__main__.py")
_STOPPED = (130, 143)  # by Ctrl-C or SIGTERM, which is no finding
_PATIENCE_S = 60.0  # of a check's collectives, which take milliseconds

_COMPLETIONS = {
    "bash": """\
_accel() {
    local IFS=$'\\n'
    COMPREPLY=($(accel completion words "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _accel accel
""",
    "zsh": """\
_accel() {
    local -a found
    found=(${(f)"$(accel completion words "${(@)words[2,CURRENT]}" 2>/dev/null)"})
    if (( $#found )); then compadd -- $found; else _files; fi
}
compdef _accel accel
""",
    "fish": """\
complete -c accel -a '(accel completion words (commandline -opc)[2..] (commandline -ct) 2>/dev/null)'
""",
}
_COMPLETION_HELP = """usage: accel completion SHELL

Print the completion script of a shell.

SHELL and its set-up:
  bash  eval "$(accel completion bash)" in ~/.bashrc
  zsh   eval "$(accel completion zsh)" in ~/.zshrc, after compinit
  fish  accel completion fish > ~/.config/fish/completions/accel.fish"""

Facts = dict[str, dict[str, Any]]


class _ReportedCheck(msgspec.Struct, frozen=True):
    """One check in a report of the self-check; further fields are ignored."""

    name: str
    state: str
    cause: str = ""


def run_test(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Launch the self-check; return 0 if all is well, 1 if a check failed, else the status of the launch."""
    known = test_parser().read(words)
    resolved = resolve_flags(known, environ)
    print_settings_file(resolved)
    config = resolved.config
    timeout_s = _PATIENCE_S if config.timeout_s == "auto" else config.timeout_s
    config = msgspec.structs.replace(config, prefix=False, timeout_s=timeout_s)
    with tempfile.TemporaryDirectory(prefix="accel-test-", ignore_cleanup_errors=True) as folder:
        report = Path(folder, "report.json")
        shared = known.folder or (folder if config.hosts[1] == 1 else "")
        args = ["--report", str(report), *(["--folder", shared] if shared else [])]
        status = run_launch(str(_SCRIPT), args, config=config, environ=environ)
        checks = msgspec.json.decode(report.read_bytes(), type=list[_ReportedCheck]) if report.exists() else []
    if status and status not in _STOPPED:
        print(_interrupted(checks))
    return status or int(any(each.state not in ("ok", "skipped") for each in checks))


def test_parser() -> Parser:
    """Return the parser of the flags of `accel test`."""
    built = Parser("accel test", usage=_TEST_USAGE, description=_TEST_ABOUT)
    built.value("--folder", "DIR", "folder for trial checkpoints; several hosts must share it (default: temporary)")
    _ = add_fields(built)
    return built


def _interrupted(checks: Sequence[_ReportedCheck]) -> str:
    if not checks:
        return "The ranks did not get as far as the first check: see the report above, and `accel env`."
    return f"Broken off in the check of {checks[-1].name}; likely: {checks[-1].cause}"


def run_env(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Print the facts for a bug report; return the exit status."""
    known = env_parser().read(words)
    facts = {
        "versions": _versions(),
        "machine": _machine(),
        "torch": _torch(),
        "configuration": _configuration(known.config, environ),
        "environment": shown_variables(environ),
    }
    text = msgspec.json.format(msgspec.json.encode(facts)).decode() if known.json else describe(facts)
    print(text.replace(str(Path.home()), "~"))
    return 0


def env_parser() -> Parser:
    """Return the parser of the flags of `accel env`."""
    built = Parser("accel env", usage=_ENV_USAGE, description=_ENV_ABOUT)
    _ = built.add_argument(CONFIG_FLAG, metavar="FILE", help="file of settings, as for `accel launch`")
    built.switch("--json", "print JSON")
    return built


def describe(facts: Facts) -> str:
    """Return facts as text: a section for each, a line for each of its entries."""
    sections: list[str] = []
    for title, entries in facts.items():
        width = max(map(len, entries), default=0)
        lines = [f"  {name:{width}}  {value}".rstrip() for name, value in entries.items()]
        sections.append("\n".join([title, *(lines or ["  none"])]))
    return "\n\n".join(sections)


def shown_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that launchers and libraries of training read, without secrets and names of persons."""
    names = sorted(name for name in environ if _SHOWN.fullmatch(name) and not _PERSONAL_NAME.fullmatch(name))
    return {name: hide_variable(name, environ[name]) for name in names}


def _versions() -> dict[str, str]:
    found = {"python": f"{platform.python_version()} ({platform.python_implementation()}, {sys.executable})"}
    found["accel-torch"] = accel.__version__
    for at, package in enumerate(_PACKAGES):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            if at < _REQUIRED:
                found[package] = "not installed"
    if warning := conflicting_package():
        found["problem"] = warning
    return found


def _machine() -> dict[str, Any]:
    machine = read_machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpus = [f"{gpu.name} (compute capability {gpu.generation}.x)" for gpu in machine.gpus or ()]
    return {
        "system": platform.platform(),
        "cores": machine.cores,
        "memory": show_size(memory),
        "gpus": "of a kind that is not counted" if machine.gpus is None else ", ".join(gpus) or "none",
    }


def _torch() -> dict[str, Any]:
    try:
        torch = import_module("torch")
        dist = import_module("torch.distributed")
        backends = [name for name in ("gloo", "nccl", "mpi", "ucc", "xccl") if dist.is_backend_available(name)]
        cuda = torch.cuda.is_available()
        remark = import_module("accel.devices").untried_torch()
        return {
            **({"remark": remark} if remark else {}),
            "devices": ", ".join(torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())) or "cpu",
            "backends": ", ".join(backends) or "none",
            "cuda": torch.version.cuda or "not built in",
            "cudnn": torch.backends.cudnn.version() or "none",
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda and "nccl" in backends else "none",
            "rocm": torch.version.hip or "not built in",
            "bf16": torch.cuda.is_bf16_supported() if cuda else "on the CPU",
            "cpu capability": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
        }
    except Exception as error:  # the report is about broken installations
        return {"problem": hide_in_text(f"{type(error).__name__}: {error}")}


def _configuration(named: str | None, environ: Mapping[str, str]) -> dict[str, str]:
    try:
        file = find_file(named, environ)
        config, sources, _ = resolve({}, environ, file)
    except AccelError as error:
        return {"problem": hide_in_text(str(error))}
    shown = {"file": file.path if file else "none"}
    for field in FIELDS:
        value = hide_in_text(to_text(getattr(config, field.name)))
        shown[field.name] = f"{value} ({sources[field.name]})".strip()
    return shown


def run_completion(words: Sequence[str], _environ: Mapping[str, str]) -> int:
    """Print a shell's script, or after `words` what the last of them could become; return the exit status."""
    if words and words[0] == "words":
        print("\n".join(complete(words[1:])))
        return 0
    if words and words[0] in ("-h", "--help"):
        print(_COMPLETION_HELP)
        return 0
    shell = words[0] if words else ""
    check_choice(shell, list(_COMPLETIONS), "there is no script for this shell", where="accel completion")
    print(_COMPLETIONS[shell], end="")
    return 0


def complete(words: Sequence[str]) -> list[str]:
    """Return completions of the last word, which may be empty or half typed; none for a file or a word of the script's
    own."""
    *done, part = words or ("",)
    return [candidate for candidate in _candidates(done, part) if candidate.startswith(part)]


def _candidates(done: Sequence[str], part: str) -> list[str]:
    if not done:
        return [*(command.name for command in COMMANDS), "--help", "--version"]
    if done[0] == "completion":
        return list(_COMPLETIONS) if len(done) == 1 else []
    if done[0] == "config" and len(done) == 1:
        return [*SUBCOMMANDS, "--output"]
    if done[0] == "launch":
        own, script = split_words(done[1:])
        return [] if script else _flags(parser(), own, part)
    if done[0] in ("test", "env"):
        return _flags((test_parser if done[0] == "test" else env_parser)(), done[1:], part)
    if done[0] == "docs":
        return ["--web"] if part.startswith("-") else import_module("accel.cli._docs").names()
    if done[0] in ("report", "compare", "watch", "profile"):
        return _flags(getattr(import_module("accel.cli._runs"), f"{done[0]}_parser")(), done[1:], part)
    if done[0] in ("migrate", "estimate", "plan"):
        command = import_module(f"accel.cli._{done[0]}")
        return list(getattr(command, "NAMES", {}).get(done[-1], ())) or _flags(command.parser(), [], part)
    return _flags(parser(), done[2:], part) if list(done[:2]) == ["config", "show"] else []


def _flags(known: Parser, own: Sequence[str], part: str) -> list[str]:
    flag = own[-1] if own else ""
    if flag in value_flags():
        return [name for field in FIELDS if field.flag == flag for name in field.names]
    return known.flags() if part.startswith("-") else []
