"""Quantities are read exactly, refused with a reason, and written so that they read back."""

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim import units
from sim.errors import UnitError
from sim.units import (
    format_bytes,
    format_flops,
    format_percent,
    format_rate,
    format_time,
    parse_bytes,
    parse_energy,
    parse_flops,
    parse_power,
    parse_rate,
    parse_time,
    to_bytes,
)


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_bytes, "80 GiB", 85_899_345_920),
        (parse_bytes, "8 GB", 8_000_000_000),
        (parse_bytes, "0.1 GB", 100_000_000),
        (parse_bytes, "0.3 MB", 300_000),
        (parse_bytes, "512B", 512),
        (parse_bytes, " 1.5  KiB ", 1536),
        (parse_bytes, "39.18 GiB", 42_069_204_664),  # 42069204664.32
        (parse_bytes, "1e3 kB", 1_000_000),
        (parse_bytes, "1_000 B", 1000),
        (parse_bytes, "0 B", 0),
        (parse_rate, "25 GB/s", 25_000_000_000),
        (parse_rate, "200 Gbit/s", 25_000_000_000),
        (parse_rate, "2 TiB/s", 2 * 2**40),
        (parse_flops, "312 TFLOP/s", 312 * 10**12),
        (parse_flops, "281.6 GFLOP/s", 281_600_000_000),
        (parse_time, "10 us", 10_000),
        (parse_time, "1.3 ms", 1_300_000),
        (parse_time, "2 s", 2 * 10**9),
        (parse_time, "14.5 us", 14_500),
        (parse_power, "231 W", 231.0),
        (parse_energy, "1 pJ/bit", 8e-12),
    ],
)
def test_a_quantity_is_read_exactly(parse, text, value):
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (parse_bytes, "80 Gb", "value '80 Gb': expected a size such as '80 GiB' (did you mean 'GB'?)"),
        (parse_bytes, "8 KB", "value '8 KB': expected a size such as '80 GiB' (did you mean 'kB'?)"),
        (parse_bytes, "8 gib", "value '8 gib': expected a size such as '80 GiB' (did you mean 'GiB'?)"),
        (parse_rate, "5 Gb/s", "value '5 Gb/s': expected a rate such as '25 GB/s' (did you mean 'GB/s' or 'Gbit/s'?)"),
        (parse_rate, "25 Gbps", "value '25 Gbps': expected a rate such as '25 GB/s' (did you mean 'Gbit/s'?)"),
        (parse_rate, "25 GB", "value '25 GB': expected a rate such as '25 GB/s' (did you mean 'GB/s'?)"),
        (parse_flops, "9 TF", "value '9 TF': expected a compute rate such as '312 TFLOP/s' (did you mean 'TFLOP/s'?)"),
        (parse_time, "5 µs", "value '5 µs': expected a time such as '10 us' (did you mean 'us'?)"),
        (parse_time, "5 h", "value '5 h': expected a time such as '10 us', in ns, us, ms, s"),
        (parse_time, "5", "value '5': the unit is missing; expected a time such as '10 us', in ns, us, ms, s"),
        (parse_time, 5, "value 5: expected a time such as '10 us', a string with a unit: ns, us, ms, s"),
        (parse_time, "-5 us", "value '-5 us': expected a time such as '10 us', not a negative one"),
        (parse_time, "0.2 ns", "value '0.2 ns': expected a time such as '10 us', at least one ns"),
        (parse_time, "nan us", "value 'nan us': expected a time such as '10 us': a number and one of ns, us, ms, s"),
    ],
)  # fmt: skip
def test_a_wrong_quantity_is_refused_with_its_value_and_what_was_meant(parse, text, message):
    with pytest.raises(UnitError) as refused:
        parse(text)
    assert str(refused.value) == message


NO_SIZES = ["", " ", "GB", "nan", "inf GB", "nan GB", "1,5 GB", "0x10 B", "٣ GB", "1e999 GB", "1 G B", "1__0 GB"]
NO_SIZES += ["--1 GB", "1. GB", "80 GB/s", "80 Gbit", "80 gigabytes", "9 EB", "80 TB\n5 TB"]


@pytest.mark.parametrize("text", [*NO_SIZES, True, None, 80.5, Decimal("80")])
def test_what_is_no_size_is_refused_in_one_line(text):
    with pytest.raises(UnitError) as refused:
        parse_bytes(text)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("number", [1, 3, 17, 999])
def test_decimal_and_binary_units_and_bits_are_apart(number):
    assert parse_bytes(f"{number} GB") == number * 10**9
    assert parse_bytes(f"{number} GiB") == number * 2**30
    assert parse_rate(f"{8 * number} Gbit/s") == parse_rate(f"{number} GB/s")


def test_units_are_case_sensitive():
    for known, parse in ((units.BYTES, parse_bytes), (units.RATES, parse_rate), (units.TIMES, parse_time)):
        for unit in known:
            other = unit.swapcase()
            assert other not in known
            with pytest.raises(UnitError):
                parse(f"1 {other}")


def test_to_bytes_takes_whole_numbers_as_bytes_and_text_with_its_unit():
    assert to_bytes(7_000_000_000) == to_bytes("7 GB") == to_bytes(np.int64(7_000_000_000)) == 7_000_000_000
    assert to_bytes(7.5e9) == to_bytes(np.float64(7.5e9)) == 7_500_000_000
    assert type(to_bytes(7.5e9)) is int
    assert type(to_bytes(np.int64(5))) is int


@pytest.mark.parametrize(
    "value", [7.5, -7.0, float("inf"), float("nan"), True, -1, "7", "7 gb", None, [7], Fraction(7)]
)
def test_to_bytes_refuses_all_else(value):
    with pytest.raises(UnitError):
        to_bytes(value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_bytes(0), "0 B"),
        (format_bytes(999), "999 B"),
        (format_bytes(1000), "1 kB"),
        (format_bytes(85_899_345_920), "85.9 GB"),
        (format_bytes(85_899_345_920, binary=True), "80 GiB"),
        (format_bytes(85_899_345_920, digits=None), "85.89934592 GB"),
        (format_bytes(999_999_999), "1 GB"),  # not "1000 MB"
        (format_bytes(2**20 - 1, binary=True), "1 MiB"),
        (format_bytes(2**20 - 1, binary=True, digits=None), "1023.9990234375 KiB"),
        (format_bytes(-1_500_000), "-1.5 MB"),
        (format_bytes(123_456, digits=2), "123 kB"),
        (format_rate(25 * 10**9), "25 GB/s"),
        (format_flops(312 * 10**12), "312 TFLOP/s"),
        (format_time(1_300_000), "1.3 ms"),
        (format_time(90 * 10**9), "90 s"),
        (format_percent(0.0321), "3.2 %"),
        (format_percent(0.58), "58 %"),
        (format_percent(0.9949), "99 %"),
        (format_percent(3.0), "300 %"),  # not "3e+02 %"
        (format_percent(-0.996, sign=True), "-100 %"),
        (format_percent(12.994, digits=3, sign=True), "+1,299 %"),
        (format_percent(0.2791, digits=3, sign=True), "+27.9 %"),
    ],
)
def test_a_number_is_written_in_its_largest_unit(text, expected):
    assert text == expected


WRITERS = [
    (parse_bytes, format_bytes),
    (parse_bytes, lambda n, digits: format_bytes(n, binary=True, digits=digits)),
    (parse_rate, format_rate),
    (parse_flops, format_flops),
    (parse_time, format_time),
]
AMOUNTS = (
    st.integers(0, 2**53) | st.integers(0, 62).map(lambda k: 2**k - 1) | st.integers(0, 18).map(lambda k: 10**k - 1)
)


@pytest.mark.parametrize(("parse", "write"), WRITERS)
@given(amount=AMOUNTS)
def test_all_digits_read_back_the_same(parse, write, amount):
    assert parse(write(amount, digits=None)) == amount


@pytest.mark.parametrize(("parse", "write"), WRITERS)
@given(amount=AMOUNTS, digits=st.integers(1, 12))
def test_few_digits_read_back_the_nearest_number_of_that_many_digits(parse, write, amount, digits):
    error = abs(parse(write(amount, digits=digits)) - amount)
    assert error <= Fraction(amount, 2 * 10 ** (digits - 1)) + 1


@given(number=st.decimals(0, 10**6, allow_nan=False, places=3), unit=st.sampled_from(sorted(units.BYTES)))
def test_reading_rounds_the_exact_product_to_the_nearest_byte(number, unit):
    exact = Fraction(number) * units.BYTES[unit]
    if exact and not round(exact):
        with pytest.raises(UnitError):
            parse_bytes(f"{number} {unit}")
    elif exact < 2**63:
        assert abs(parse_bytes(f"{number} {unit}") - exact) <= Fraction(1, 2)


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_a_unit_error_of_one_line(text):
    try:
        read, refused = parse_bytes(text), ""
    except UnitError as error:
        read, refused = 0, str(error)
    assert read >= 0
    assert len(refused.splitlines()) == (1 if refused else 0)
