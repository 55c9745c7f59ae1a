"""What a GPU would get is run where there is none: the PTX of kernels, by a machine that watches them.

See `cuda_machine` and `ptx_machine`. Every other test of kvkit_cuda without a device runs its functions in
Python or looks at its PTX; here the PTX itself appends, attends and checks, against the oracles and the twin.
"""

import pytest
from test_cuda import passed

TWIN = ("-p", "cuda_twin")
INTERFACE = "test_arrays_of_the_device and interface"
# A kernel of each kind; the rest takes an hour, nearly all of it for compiling.
QUICK = {
    "instructions": (["cuda_prefill.py"], "test_product or matrices or rounded or powers", 10),
    "transfers": (["cuda_simulated.py"], f"{INTERFACE} and dynamic", 1),
    "page tables": ([*TWIN, "cuda_scan.py"], "test_rows_that_look_wrong_but_are_legal", 8),
    "positions": (["cuda_positions.py"], "test_rotary_in_place", 2),
    "pieces": (["cuda_ascend.py"], INTERFACE, 5),
    "prefill": (["cuda_prefill.py"], "test_causal and fp16 and 40", 1),
    "decode": (["cuda_decode.py"], "test_contexts and fp16 and 100 or test_groups_of_copies", 2),
    "any attention": ([*TWIN, "cuda_attention.py"], "test_what_weighs_keys and plain", 1),
}
SUITES = {
    "cuda_prefill.py": 50,
    "cuda_decode.py": 60,
    "cuda_on_device.py": 150,
    "cuda_scan.py": 70,
    "cuda_positions.py": 70,
    "cuda_ascend.py": 90,
}


def by_machine(*arguments):
    return passed("-p", "cuda_machine", *arguments)


@pytest.mark.parametrize("name", QUICK)
def test_kernels(name):
    suite, words, count = QUICK[name]
    assert by_machine(*suite, "-k", words) >= count


@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES)
def test_suite(suite):
    assert by_machine(suite) > SUITES[suite]
