# SPDX-License-Identifier: Apache-2.0
"""Values of numpy, paths, enums and dataclasses as items and inside of them: they come back exactly and by type."""

import dataclasses
import enum
import subprocess
import sys
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import msgspec
import numpy
from catching import assert_raises
from ckpt_helpers import CPU, equal
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as arrays
from processes import patience
from profiles import share

import accel
from accel.errors import CheckpointError


class Phase(enum.Enum):
    WARM = "warm"
    DONE = (1, 2)


class Level(enum.IntEnum):
    LOW = 1


class Parts(enum.Flag):
    HEAD = enum.auto()
    BODY = enum.auto()


@dataclasses.dataclass
class Report:
    best: Any = 0.0
    phase: Phase = Phase.WARM
    where: Path = Path()
    curve: Any = None


class Progress(msgspec.Struct, frozen=True):
    best: float = 0.0
    level: int = 0


DTYPES = st.one_of(
    arrays.boolean_dtypes(),
    arrays.integer_dtypes(endianness="?"),
    arrays.unsigned_integer_dtypes(),
    arrays.floating_dtypes(),
    arrays.complex_number_dtypes(),
    arrays.unicode_string_dtypes(),
    arrays.byte_string_dtypes(),
    arrays.datetime64_dtypes(),
)
ARRAYS = arrays.arrays(DTYPES, arrays.array_shapes(min_dims=0, min_side=0, max_dims=3, max_side=3))
SCALARS = arrays.arrays(DTYPES, ()).map(lambda array: array[()])
OTHERS = st.sampled_from([Phase.DONE, Level.LOW, Parts.HEAD, Parts.HEAD | Parts.BODY, Parts(0)])
PATHS = st.sampled_from([Path("a/b"), Path("\udcff"), PurePosixPath("/x"), PureWindowsPath("C:/y")])


def there_and_back(item: object, into: object, tmp_path: Path) -> Any:
    path = accel.save_state(CPU, tmp_path / "run", {"item": item}, step=1, allow_non_finite=True)
    return accel.load_state(CPU, path, {"item": into})["item"]


@settings(max_examples=share(0.8))
@given(st.one_of(ARRAYS, SCALARS, OTHERS, PATHS))
def test_values_of_other_libraries_come_back_exactly_and_by_type(tmp_path_factory: Any, value: Any) -> None:
    tmp_path = tmp_path_factory.mktemp("values")
    for item, into in ((value, value), ([{"a": value}], [{"a": value}]), (Report(curve=value), Report(curve=value))):
        found = there_and_back(item, into, tmp_path)
        taken = found if item is value else found[0]["a"] if isinstance(found, list) else found.curve
        assert type(taken) is type(value)
        if isinstance(value, numpy.ndarray | numpy.generic):
            assert (taken.dtype, taken.shape, taken.tobytes()) == (value.dtype, value.shape, value.tobytes())
        else:
            assert taken == value


def test_a_best_score_may_begin_as_a_number_of_python_or_as_none(tmp_path: Path) -> None:
    best = numpy.float64(0.75)
    for start in (None, 0.0, float("-inf"), 0, numpy.float32(1)):
        assert equal(there_and_back(best, start, tmp_path), best)
    assert equal(there_and_back(0.5, best, tmp_path), 0.5)
    with assert_raises(CheckpointError, problem="expected value str, got value float64"):
        there_and_back(best, "", tmp_path)


def test_records_hold_numbers_of_numpy_and_enums_where_annotations_say_plain_types(tmp_path: Path) -> None:
    saved = Progress(numpy.float64(0.5), Level.LOW)
    found = there_and_back([saved], [Progress(level=Level.LOW)], tmp_path)[0]
    assert [type(value) for value in (found.best, found.level)] == [numpy.float64, Level]
    assert found == saved


def test_a_dataclass_is_an_item_and_comes_back_without_its_constructor(tmp_path: Path) -> None:
    saved = Report(numpy.float32(2), Phase.DONE, Path("x"), [Report()])
    found = there_and_back(saved, Report(), tmp_path)
    assert found == saved
    assert type(found) is Report
    assert type(found.best) is numpy.float32


def test_a_value_that_its_own_record_would_refuse_is_refused_before_the_save(tmp_path: Path) -> None:
    with assert_raises(CheckpointError, got="Expected `float`.*`str`") as caught:
        accel.save_state(CPU, tmp_path, {"item": [Progress("x")]}, step=1)  # pyright: ignore[reportArgumentType]
    assert caught.value.where == "item[0]"
    assert not list(tmp_path.glob("step-*"))


def test_an_enum_without_the_member_is_refused_by_its_path(tmp_path: Path) -> None:
    smaller = enum.Enum("Phase", {"WARM": "warm"})
    with assert_raises(CheckpointError, problem=r"item\[0\]: expected a member of Phase, got DONE"):
        there_and_back([Phase.DONE], [smaller.WARM], tmp_path)


def test_files_need_neither_numpy_nor_a_package_of_stores() -> None:
    code = (
        "import sys; sys.modules['numpy'] = None\n"
        "import accel, tempfile\n"
        "ctx, items, out = accel.single(), {'best': 0.5, 'seen': [1, {'a': accel.Cursor()}]}, tempfile.mkdtemp()\n"
        "path = accel.save_state(ctx, out, items, step=1)\n"
        "assert accel.latest_checkpoint(out) == path\n"
        "assert accel.load_state(ctx, path, items) == items\n"
        "assert 'fsspec' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=patience(120))
