"""The table of prefetch distances, and what the system tells about a processor."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from attention_scenes import FP16, FP32, INT4, INT8, dynamic_cache
from scenes import assert_same, first_quick

from kvkit.calls.prepared import forget_all
from kvkit.cpu import prefetching
from kvkit.cpu.attention import prepare
from kvkit.cpu.prefetching import ALWAYS, KB, Distance
from kvkit.errors import KvkitError
from kvkit.runtime import arrays, processor
from kvkit.runtime.processor import Processor
from kvkit.tools import tuning

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


DISTANCES = [
    prefetching.TABLE[-1].distances,
    *(
        prefetching.Distances(one, one, one, prefetching.NEVER, *runs)
        for one, runs in itertools.product(
            (Distance(2 * KB), Distance(16 * KB, near=True), Distance(64 * KB)),
            ((0, 0, 0), (ALWAYS, 4 * KB, 8 * KB), (8 * KB, ALWAYS, ALWAYS)),
        )
    ),
]


@pytest.mark.parametrize("heads", [2, 4, 8, 16])
@pytest.mark.parametrize("formats", first_quick([FP16, INT8, FP32, INT4], 2), ids=str)
@pytest.mark.parametrize("page_size", [0, 16], ids=["rows", "pages"])
def test_distances_change_no_bit(page_size, formats, heads, rng, monkeypatch):
    """Whatever a machine measures, its results are those of others, in runs and in short pages."""
    options = {"mode": int(page_size > 0), "page_size": page_size or 128}
    call = dynamic_cache(rng, formats, [(700, 1), (40, 1)], heads, kv_heads=2, dim=128, layout=3, **options)
    prepare.FIXED.clear()
    found = []
    for distances in DISTANCES:
        forget_all()
        with prefetching.using(distances):
            found.append(call.copy().run(return_lse=True))
    assert len(prepare.FIXED) == len(DISTANCES)
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            assert_same(one, other)


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """Keep distances in a folder of their own."""
    file = tmp_path / "code" / "kvkit-cpu-prefetching-distances-0-0.bin"
    monkeypatch.setattr(prefetching, "tuned_file", lambda: file)
    monkeypatch.delenv(prefetching.TUNE, raising=False)
    prefetching.of_this_machine.cache_clear()
    yield file
    prefetching.of_this_machine.cache_clear()


def test_measured_distances_are_kept_and_can_be_turned_off(kept, monkeypatch):
    default, source = prefetching.of_this_machine()
    assert source.startswith("table, ")
    chosen = default._replace(one_row=Distance(3 * KB, near=True), touched_run=1)
    prefetching.save(chosen)
    assert prefetching.of_this_machine() == (chosen, "measured here")
    assert prefetching.distances().of_rows(1) == Distance(3 * KB, near=True)
    monkeypatch.setenv(prefetching.TUNE, "off")
    prefetching.of_this_machine.cache_clear()
    assert prefetching.of_this_machine() == (default, source)
    assert tuning.tune() == "not measured: KVKIT_TUNE=off"
    monkeypatch.setenv(prefetching.TUNE, "no")
    with pytest.raises(KvkitError, match="KVKIT_TUNE: expected on or off, got 'no'"):
        prefetching.is_tuning()
    monkeypatch.delenv(prefetching.TUNE)
    kept.write_bytes(b"damaged")
    assert prefetching.load(default) is None
    assert source.removeprefix("table, ") in {line.measured for line in prefetching.TABLE}


def test_the_key_of_a_machine(monkeypatch):
    """Another processor, or another version of kvkit, has another file."""
    file = prefetching.tuned_file()
    monkeypatch.setattr(prefetching, "this_processor", lambda: Processor("GenuineIntel", 6, 207, 3))
    other = prefetching.tuned_file()
    monkeypatch.setattr(prefetching, "__version__", "0")
    assert len({file, other, prefetching.tuned_file()}) == (1 if file is None else 3)


FAST, SAME = (prefetching.TABLE[-1].distances._replace(short_run=i) for i in (1, 2))
TODAY = prefetching.TABLE[-1].distances


@pytest.mark.parametrize(
    ("factor", "noise", "expected"),
    [(0.8, 0.02, FAST), (0.99, 0.02, TODAY), (1.2, 0.02, TODAY), (0.8, 0.5, None)],
)
def test_a_choice_is_clear_or_none(factor, noise, expected, rng):
    def timed(distances):
        return (factor if distances == FAST else 1.0) * (1 + noise * rng.random())

    timings = tuning.take_turns(timed, TODAY, [SAME, FAST], 0.1)
    assert tuning.choice(timings, TODAY) == expected


def test_a_machine_is_asked_once(kept):
    """Distances that cannot be told from each other stay those of the table."""
    text = tuning.tune(seconds=0.4)
    if text.startswith("not "):
        assert not kept.exists()
        return
    assert kept.exists()
    assert tuning.tune() == "already measured"
    assert tuning.describe(prefetching.distances()) == text


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux tells the pages of memory")
def test_arrays_of_4_mb_ask_for_large_pages():
    array = arrays.zeros((2**23,), np.uint8)
    middle, flags = array.ctypes.data + 2**22, ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            begin, end = (int(text, 16) for text in match.groups())
        elif line.startswith("VmFlags") and begin <= middle < end:
            flags = line
    assert "hg" in flags.split()
    assert array.ctypes.data % arrays.ALIGNED == 0
