# SPDX-License-Identifier: Apache-2.0
"""Errors answer four questions, as text and as fields, and survive the way to another rank."""

from __future__ import annotations

import ast
import copy
import inspect
import pickle
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from operator import attrgetter
from pathlib import Path

import msgspec
import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share
from tables import rows
from torch import nn

import accel
from accel import errors
from accel.errors import AccelError, PeerError
from accel.errors._base import ErrorRecord, describe, rebuild
from accel.errors._checks import did_you_mean, not_unpickled, with_article
from accel.testing import Simulator

KINDS = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, AccelError)]
facts = st.text(max_size=20)


def test_the_four_answers_in_one_line():
    error = errors.ConfigError("not a rank", expected="0 to 3", got="4", where="on_process", fix="Pass another.")
    assert str(error) == "not a rank: expected 0 to 3, got 4 - at on_process. Pass another."
    assert str(errors.ConfigError("alone")) == "alone"


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=share(0.4))
@given(problem=facts, expected=facts, got=facts, where=facts, fix=facts)
def test_every_kind_survives_records_json_pickle_and_copy(kind, problem, expected, got, where, fix):
    error = kind(problem, expected=expected, got=got, where=where, fix=fix)
    record = msgspec.json.decode(msgspec.json.encode(describe(error)), type=ErrorRecord)
    for again in (rebuild(record), pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is kind
        assert (again.problem, again.expected, again.got, again.where, again.fix) == (
            problem,
            expected,
            got,
            where,
            fix,
        )
        assert str(again) == str(error)


def test_what_is_not_ours_is_quoted():
    record = describe(KeyError("weight"))
    assert type(rebuild(record)) is PeerError
    assert "KeyError: 'weight'" in str(rebuild(record))


def test_an_unknown_kind_is_still_ours():
    again = rebuild(ErrorRecord("FromANewerVersion", "broken", got="x"))
    assert type(again) is AccelError
    assert again.got == "x"


def test_kinds_are_caught_as_what_they_are():
    assert issubclass(accel.errors.EnvError, ValueError)
    assert issubclass(accel.errors.TreeError, TypeError)
    assert issubclass(accel.errors.MissingExtraError, ImportError)
    assert issubclass(accel.errors.NonFiniteError, FloatingPointError)
    for name in accel.errors.__all__:
        assert issubclass(getattr(accel.errors, name), AccelError)


def test_did_you_mean_names_the_closest_or_all():
    assert did_you_mean("fp61", ("fp32", "fp16", "bf16")) == "Did you mean `fp16`?"
    assert did_you_mean("zzz", ("b", "a")) == "Choose one of a, b."


IN_MODULES = [f"{module}.{name}" for module in accel._PUBLIC for name in import_module(f"accel.{module}").__all__]
PLACES = [*accel.__all__, *IN_MODULES]
PUBLIC = {place: attrgetter(place)(accel) for place in PLACES}
FUNCTIONS = [place for place, found in PUBLIC.items() if inspect.isfunction(found)]
OF_A_CONTEXT = [place for place in FUNCTIONS if [*inspect.signature(PUBLIC[place]).parameters][:1] == ["ctx"]]
OF_A_CONTEXT.remove("estimate.measure_efficiencies")  # its module loads no torch, and so no context
METHODS_OF_A_CONTEXT = [
    (place, method)
    for place, found in PUBLIC.items()
    if inspect.isclass(found) and not getattr(found, "_is_protocol", False)
    if all(each.default is not each.empty for each in inspect.signature(found).parameters.values())
    for method, function in inspect.getmembers(found, inspect.isfunction)
    if not method.startswith("_") and list(inspect.signature(function).parameters)[1:2] == ["ctx"]
]


@rows("name", OF_A_CONTEXT)
def test_a_call_without_the_context_says_to_pass_it_first(name: str) -> None:
    function: Callable[..., object] = PUBLIC[name]
    for arguments, got in [((), "no context"), ((torch.nn.Linear(1, 1),), "Linear"), ((1, 2, 3), "int")]:
        with assert_raises(accel.errors.ConfigError, problem="pass the context first") as caught:
            function(*arguments)
        assert caught.value.got == got
        assert caught.value.expected.startswith(f"`accel.{name}(ctx")
        assert "accel.session()" in caught.value.fix


@pytest.mark.parametrize(("kind", "method"), METHODS_OF_A_CONTEXT)
def test_a_method_without_the_context_says_to_pass_it_first(kind: str, method: str) -> None:
    with assert_raises(accel.errors.ConfigError, problem="pass the context first") as caught:
        getattr(PUBLIC[kind](), method)(torch.zeros(1))
    assert caught.value.got == "Tensor"
    assert f".{method}(ctx" in caught.value.expected


def test_the_context_may_be_named() -> None:
    accel.wait_for_everyone(ctx=accel.single("cpu"))
    with assert_raises(accel.errors.ConfigError, got="Tensor"):
        accel.gather(torch.zeros(1), ctx=accel.single("cpu"))


def test_a_prepared_model_that_left_its_ranks_has_the_call_that_unwraps_it(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> bytes:
        return pickle.dumps(accel.prepare_model(ctx, nn.Linear(2, 1)))

    [sent, _] = ranks.run(rank, 2, default_group=True)
    with pytest.raises(ValueError, match="process group") as caught:
        pickle.loads(sent)
    assert "accel.unwrap_model(model)" in not_unpickled(caught.value, "launch").fix
    assert "import its class" in not_unpickled(ImportError("no module named cell"), "launch").fix


ARTICLES = """an object, an AdamW, an SGD, an LSTM, an AutoModel, an UninitializedBuffer, an Event, a function, a list,
a OneCycleLR, a UserDict, a UnionType, a Module, a StepLR"""


@rows("noun", ARTICLES.replace("\n", " ").split(", "))
def test_the_article_follows_the_name(noun: str) -> None:
    assert with_article(noun.partition(" ")[2]) == noun


def matched_texts(source: str) -> Iterator[str]:
    """Calls of `pytest.raises` with `match=` for a class of this package, or for one that does not stand there."""
    ours = {each.__name__ for each in PUBLIC.values() if isinstance(each, type) and issubclass(each, AccelError)}
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr != "raises":
            continue
        kinds = node.args[0].elts if isinstance(node.args[0], ast.Tuple) else node.args[:1]
        names = [ast.unparse(each).rpartition(".")[2] for each in kinds]
        others = all(name.isidentifier() and name[0].isupper() and name not in ours for name in names)
        if not others and any(each.arg == "match" for each in node.keywords):
            yield f"{node.lineno}: {ast.unparse(node)}"


def test_tests_check_the_fields_of_an_error_and_not_its_text() -> None:
    here = Path(__file__).parent
    sources = {path.relative_to(here): path.read_text() for path in here.rglob("*.py")}
    found = [f"{path}:{each}" for path, text in sources.items() if "match=" in text for each in matched_texts(text)]
    assert not found, "write assert_raises(kind, problem=...), of catching.py:\n" + "\n".join(found)
    for kind in ("ConfigError", "errors.StepError", "kind", "(ValueError, DataError)", "accel.testing.Deadlock"):
        assert list(matched_texts(f"with pytest.raises({kind}, match='no'): pass"))
    for allowed in ("pytest.raises(ConfigError)", "pytest.raises((KeyError, OSError), match='no')"):
        assert not list(matched_texts(f"with {allowed}: pass"))


def is_a_name(path: str) -> bool:
    """Whether attributes and modules of the package have a path, such as accel.parallel.Plan."""
    found: object = accel
    for at, name in enumerate(path.split(".")):
        try:
            found = getattr(found, name) if at else accel
        except AttributeError:
            return False
    return True


def test_calls_that_errors_and_examples_name_exist() -> None:
    """A line to write that ends in an error of a name helps nobody."""
    package = Path(accel.__file__).parent
    called = re.compile(r"\baccel(?:\.[A-Za-z]\w*)+(?=\()")
    names = {name for path in package.rglob("*.py") for name in called.findall(path.read_text())}
    assert len(names) > 100
    assert [name for name in sorted(names) if not is_a_name(name)] == []
    assert not is_a_name("accel.Container")
