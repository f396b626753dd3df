"""The part plan: pure arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.contract.errors import StoreRejected
from exporter.contract.objects import Capabilities, MiB
from exporter.contract.spec import DEFAULT_MAX_BUFFER
from exporter.stream.layout import RESERVED_BUFFERS, aligned, data_size, plan_parts, segment_alignment

S3 = Capabilities()


def test_the_smallest_part_that_keeps_the_count_is_taken() -> None:
    assert plan_parts(1, 1000, S3, DEFAULT_MAX_BUFFER).part_size == 16 * MiB
    assert plan_parts(9_999 * 16 * MiB, 1000, S3, DEFAULT_MAX_BUFFER).part_size == 16 * MiB
    assert plan_parts(9_999 * 16 * MiB + 1, 1000, S3, DEFAULT_MAX_BUFFER).part_size == 32 * MiB
    assert plan_parts(100 * 2**30, 1000, Capabilities(max_parts=1_000), 1024 * MiB).part_size == 128 * MiB


def test_a_header_larger_than_a_part_chooses_a_larger_part_before_the_first_byte() -> None:
    assert plan_parts(1, 17 * MiB, S3, DEFAULT_MAX_BUFFER).part_size == 32 * MiB


def test_parts_in_flight_follow_from_the_buffer() -> None:
    assert plan_parts(1, 1, S3, 192 * MiB).in_flight == 10
    assert plan_parts(1, 1, S3, 48 * MiB).in_flight == 1


@pytest.mark.parametrize(
    ("data", "header", "buffer", "part", "says"),
    [
        (1, 1, 47 * MiB, None, "three times"),
        (1, 1, 192 * MiB, 65 * MiB, "three times"),
        (10**15, 1, 192 * MiB, None, "outside"),
        (10**12, 1, 192 * MiB, None, "three times"),
        (10**12, 1, 192 * MiB, 16 * MiB, "parts"),
        (1, 1, 192 * MiB, 1 * MiB, "outside"),
        (1, 1, 192 * MiB, 16 * MiB + 1, "multiple"),
        (1, 17 * MiB, 192 * MiB, 16 * MiB, "header"),
    ],
)
def test_a_plan_that_cannot_fit_is_refused(data: int, header: int, buffer: int, part: int | None, says: str) -> None:
    with pytest.raises(StoreRejected, match=says) as caught:
        plan_parts(data, header, S3, buffer, part)
    assert "WEIGHTLESS_" in caught.value.hint


@given(
    data=st.integers(0, 2**43),
    header=st.integers(0, 2**26),
    parts=st.sampled_from([1_000, 10_000]),
    buffer=st.integers(48 * MiB, 2**33),
)
def test_every_plan_fits_its_limits(data: int, header: int, parts: int, buffer: int) -> None:
    limits = Capabilities(max_parts=parts)
    try:
        plan = plan_parts(data, header, limits, buffer)
    except StoreRejected:
        return
    assert plan.parts == 1 + aligned(data, plan.part_size) // plan.part_size <= parts
    assert header <= plan.part_size
    assert (plan.in_flight + RESERVED_BUFFERS) * plan.part_size <= buffer
    assert plan.part_size & (plan.part_size - 1) == 0


def test_segments_are_aligned_to_128_and_their_own() -> None:
    assert [segment_alignment(value) for value in (0, 1, 3, 64, 4096)] == [128, 128, 384, 128, 4096]
    assert data_size([(1, 1), (1, 4096), (0, 1), (5, 1)]) == 4224 + 5
