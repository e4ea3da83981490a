"""Plans of reading: every wanted byte once, requests that the system takes, neighbours together."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given, settings, strategies as st
from profiles import share

from accel.storage import PAGE
from accel.storage._ranges import WantedBytes, plan_requests

CHUNK = 4 * PAGE


@st.composite
def wanted(draw: st.DrawFn) -> list[WantedBytes]:
    """Pieces of one file, in memory that they do not share; some as the file is laid out, some anywhere."""
    pieces: list[WantedBytes] = []
    start, address = draw(st.integers(0, 3 * PAGE)), 1 << 40
    for _ in range(draw(st.integers(0, 8))):
        size = draw(st.sampled_from([0, 1, 100, PAGE, 5 * PAGE, 9 * PAGE + 7]))
        kind = draw(st.sampled_from(["joined", "aligned", "anywhere"]))
        if kind == "aligned":
            address += 16 * PAGE + (start - address) % PAGE
        elif kind == "anywhere":
            address += draw(st.integers(PAGE, 2 * PAGE))
        pieces.append(WantedBytes(start, size, address))
        address += size
        start += size + draw(st.sampled_from([0, 0, 64, 3 * PAGE]))
        if draw(st.booleans()) and draw(st.booleans()):
            start = max(0, start - PAGE)  # two tensors of the same bytes
    return draw(st.permutations(pieces))


def joined(pieces: Iterable[WantedBytes]) -> list[WantedBytes]:
    """Return pieces by address, joined where they follow each other in memory and in the file."""
    found: list[WantedBytes] = []
    for piece in sorted(pieces, key=lambda each: each.address):
        if found and found[-1].address + found[-1].nbytes == piece.address and found[-1].stop == piece.start:
            found[-1] = found[-1]._replace(nbytes=found[-1].nbytes + piece.nbytes)
        elif piece.nbytes:
            found.append(piece)
    return found


@given(wanted())
@settings(max_examples=share(1.2))
def test_requests_cover_each_wanted_byte_once_and_fit_the_system(pieces: list[WantedBytes]) -> None:
    requests = plan_requests(pieces, chunk=CHUNK, gap=256, least=PAGE)
    assert joined(pieces) == joined(piece for request in requests for piece in request.pieces)
    for request in requests:
        assert request.stop - request.start <= CHUNK
        assert list(request.pieces) == sorted(request.pieces)
        assert max(piece.stop for piece in request.pieces) == request.stop
        assert request.start <= request.pieces[0].start < request.start + PAGE
        if request.is_straight:
            (piece,) = request.pieces
            assert piece.start % PAGE == piece.address % PAGE == piece.nbytes % PAGE == 0


def test_neighbours_in_file_and_memory_become_one_straight_request() -> None:
    pieces = [WantedBytes(100 * PAGE + at * 2048, 2048, 500 * PAGE + at * 2048) for at in range(8)]
    (request,) = plan_requests(pieces, least=PAGE)
    assert request.is_straight
    assert request.pieces == (WantedBytes(100 * PAGE, 4 * PAGE, 500 * PAGE),)


def test_neighbours_apart_in_memory_share_a_request() -> None:
    pieces = [WantedBytes(at * 1000, 1000, 1 << 30 + at) for at in range(20)]
    (request,) = plan_requests(pieces)
    assert len(request.pieces) == 20
    assert len(plan_requests([WantedBytes(0, 10, 0), WantedBytes(1 << 20, 10, 64)])) == 2
