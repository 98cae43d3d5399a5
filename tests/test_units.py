"""Numbers as people read them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.units import GIB, MIB, format_bytes, format_count, format_duration, format_rate, three_digits


@pytest.mark.parametrize(("value", "text"), [
    (0, "0"), (0.123, "0.123"), (4.567, "4.57"), (31.84, "31.8"), (412.3, "412"), (12345, "12,300"), (999.4, "999"), (-4.567, "-4.57"),
    (1000, "1,000"), (1234567, "1,230,000"),
])  # fmt: skip
def test_three_digits(value: float, text: str):
    assert three_digits(value) == text


@given(st.floats(0.1, 1e12))
def test_three_digits_are_near_and_have_no_exponent(value: float):
    text = three_digits(value)
    assert "e" not in text
    assert float(text.replace(",", "")) == pytest.approx(value, rel=5.1e-3)


@pytest.mark.parametrize(("num_bytes", "text"), [
    (0, "0 B"), (12, "12 B"), (1024, "1.00 KiB"), (512 * MIB, "512 MiB"), (5.2 * GIB, "5.20 GiB"), (113 * GIB, "113 GiB"),
    (-2 * GIB, "-2.00 GiB"), (1.5 * 1024, "1.50 KiB"),
])  # fmt: skip
def test_bytes(num_bytes: float, text: str):
    assert format_bytes(num_bytes) == text


def test_rates_are_decimal():
    assert format_rate(55.3e9) == "55.3 GB/s"
    assert format_rate(2.61e9) == "2.61 GB/s"
    assert format_rate(0) == "0 GB/s"


@pytest.mark.parametrize(("seconds", "text"), [
    (0, "0 s"), (45, "45 s"), (59.6, "1 min"), (200, "3 min 20 s"), (600, "10 min"), (3599, "59 min"), (3600, "1 h"), (7800, "2 h 10 min"),
    (86400, "1 d"), (100800, "1 d 4 h"),
])  # fmt: skip
def test_durations(seconds: float, text: str):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(("number", "text"), [
    (7_615_616_512, "7.62 B"), (134_515_008, "135 M"), (5212, "5,212"), (0, "0"), (1.5e13, "15.0 T"), (999_999, "999,999"),
])  # fmt: skip
def test_counts(number: float, text: str):
    assert format_count(number) == text
