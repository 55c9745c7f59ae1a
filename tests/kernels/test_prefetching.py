"""The table of prefetch distances, and what the system tells about a processor."""

import pytest

from kvkit.cpu import prefetching
from kvkit.runtime import processor
from kvkit.runtime.processor import Processor

pytestmark = pytest.mark.cpu
CPUINFO = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 207
model name\t: Intel(R) Xeon(R) Processor
stepping\t: 2
microcode\t: 0x1
flags\t\t: fpu avx512f : x

processor\t: 1
vendor_id\t: AuthenticAMD
"""


def test_the_first_processor_is_read():
    expected = Processor("GenuineIntel", 6, 207, 2, "0x1", "Intel(R) Xeon(R) Processor")
    assert processor.from_cpuinfo(CPUINFO) == expected
    arm = "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\nmodel\t: ?\n"
    assert processor.from_cpuinfo(arm) == Processor(vendor="0x41", name="0xd4f")
    text = "Intel64 Family 6 Model 85 Stepping 7, GenuineIntel"
    assert processor.from_identifier(text) == Processor("GenuineIntel", 6, 85, 7, name=text)
    assert processor.from_identifier("") == processor.from_cpuinfo("") == Processor()


def test_a_system_that_tells_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "none")
    monkeypatch.setattr(processor, "CACHES", tmp_path)
    monkeypatch.delenv("PROCESSOR_IDENTIFIER", raising=False)
    assert processor.this_processor.__wrapped__() == Processor()


@pytest.mark.parametrize(
    ("vendor", "family", "features", "measured"),
    [
        ("AuthenticAMD", 25, {"avx512f": True}, "Zen 4"),
        ("AuthenticAMD", 25, {"avx512f": False}, "not measured"),
        ("AuthenticAMD", 26, {"avx512f": True}, "Zen 5"),
        ("AuthenticAMD", 23, {}, "not measured"),
        ("GenuineIntel", 6, {"avx512f": True, "avx512bf16": True}, "Emerald Rapids"),
        ("GenuineIntel", 6, {"avx512f": True}, "Cascade Lake"),
        ("", 0, {}, "Cascade Lake"),
        ("0x41", 0, {}, "Cascade Lake"),
    ],
)
def test_the_line_of_a_processor(vendor, family, features, measured):
    line = prefetching.line_of(Processor(vendor, family), features)
    assert measured in line.measured
    assert [line.distances.of_rows(rows) for rows in (1, 2, 4, 8)] == [
        line.distances.one_row, line.distances.four_rows, line.distances.four_rows, line.distances.eight_rows,
    ]  # fmt: skip
