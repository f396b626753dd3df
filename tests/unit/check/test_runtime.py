"""How outputs are compared, and how a child's end is read."""

from __future__ import annotations

import json
import math

import pytest
import torch

from exporter.check.runtime import Mismatch, compare, decimal_string
from exporter.check.smoke import read_outcome
from exporter.contract.errors import HostOutOfMemory, VerificationFailed


def test_equal_outputs_have_error_zero() -> None:
    value = torch.randn(3, 4)
    assert compare("forward", [value, None, 3], [value.clone(), 3]) == "0"


def test_the_error_is_relative_to_the_largest_value() -> None:
    reference = torch.tensor([100.0, 1e-3])
    assert compare("forward", [reference + 0.001], [reference]).endswith("e-05")


@pytest.mark.parametrize(
    ("value", "reference"),
    [
        (torch.tensor([1.0002]), torch.tensor([1.0])),
        (torch.tensor([math.nan]), torch.tensor([1.0])),
        (torch.tensor([math.inf]), torch.tensor([1.0])),
        (torch.tensor([1.0]), torch.tensor([math.nan])),
        (torch.tensor([1.0]), torch.tensor([-math.inf])),
        (torch.tensor([1]), torch.tensor([2])),
        (torch.tensor([1.0]), torch.tensor([1.0, 1.0])),
        (2, 3),
        (None, torch.tensor([1.0])),
    ],
)
def test_what_differs_is_a_mismatch(value: object, reference: object) -> None:
    with pytest.raises(Mismatch):
        compare("forward", [value], [reference])


def test_equal_nans_and_infinities_pass() -> None:
    value = torch.tensor([math.nan, math.inf, -math.inf, 2.0])
    assert compare("forward", [value], [value.clone()]) == "0"


@pytest.mark.parametrize("value", [0.0, 1e-300, 3.2e-7, 0.5, 1.0, 1234.5678])
def test_a_decimal_string_is_what_the_manifest_takes(value: float) -> None:
    from exporter.contract.manifest import Verification

    text = decimal_string(value)
    Verification(method="forward", status="passed", max_relative_error=text)
    assert float(text) == pytest.approx(value, rel=1e-3)


def test_a_signal_is_a_readable_error() -> None:
    lines = [json.dumps({"doing": "loading method forward"})]
    with pytest.raises(VerificationFailed, match="SIGSEGV while loading method forward"):
        read_outcome(lines, -11)
    with pytest.raises(HostOutOfMemory, match="while loading method forward"):
        read_outcome(lines, -9)


def test_an_outcome_is_read_among_other_output() -> None:
    lines = ["I 00:00:00 executorch", json.dumps({"method": "forward", "error": "1.0e-06"}), "{not json", "[1]"]
    assert read_outcome(lines, 0) == {"forward": "1.0e-06"}
    with pytest.raises(VerificationFailed, match="refused"):
        read_outcome([json.dumps({"failure": "refused"})], 1)
    with pytest.raises(VerificationFailed, match="status 3"):
        read_outcome([], 3)
