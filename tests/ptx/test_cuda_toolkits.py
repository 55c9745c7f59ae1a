"""What releases of NVIDIA's compiler (NVVM) compile kernels, which of its linker (nvJitLink) link them."""

import json
import os
import subprocess
import sys
from importlib import metadata

import pytest
import toolkit

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="libraries of packages have other names elsewhere"),
]
# The first and the last release of CUDA 12 that compile kernels, and the first of 13: 250 MB to download.
COMPILERS = {
    "12.5": "nvidia-cuda-nvcc-cu12==12.5.40",
    "12.9": "nvidia-cuda-nvcc-cu12==12.9.86",
    "13.0": "nvidia-nvvm==13.0.48",
}
LINKERS = {
    "12.5": "nvidia-nvjitlink-cu12==12.5.40",
    "12.9": "nvidia-nvjitlink-cu12==12.9.86",
    "13.0": "nvidia-nvjitlink==13.0.39",
}
LAST_WITHOUT_HALVES = "nvidia-cuda-nvcc-cu12==12.4.131"


def installed(package):
    major, minor, *_ = metadata.version(package).split(".")
    return f"{major}.{minor}"


def number(release):
    return tuple(map(int, release.split(".")))


def run(task, package, folder, asked=None):
    """Return what a release of a package answers; None is the installed one."""
    command, environment = [sys.executable, toolkit.__file__, task], {}
    if package:
        folder /= package
        download(package, folder)
        (library,) = [*folder.glob("nvidia/**/libnvvm.so*"), *folder.glob("nvidia/**/libnvJitLink.so*")]
        # Libraries that are loaded are not looked for; the bitcode of libdevice is found through its package.
        paths = [str(folder), os.environ.get("PYTHONPATH", "")]
        environment = {"LD_PRELOAD": str(library), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(
        command, env=os.environ | environment,
        input=json.dumps(asked), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    used, answer = json.loads(done.stdout)
    assert not package or used == environment["LD_PRELOAD"]
    return answer


def download(package, folder):
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run(
        [*command, "--target", folder, package], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.fail(f"pip cannot download {package}: {done.stderr}", pytrace=False)


def test_a_linker_takes_what_its_release_or_an_earlier_one_compiles(tmp_path):
    """And `needs` says so of every pair of a compiler and a linker."""
    compilers = COMPILERS | {installed("nvidia-nvvm"): None}
    linkers = LINKERS | {installed("nvidia-nvjitlink"): None}
    texts = {release: run("compile", package, tmp_path) for release, package in compilers.items()}
    for compiler, (_, _, said_of_newer) in texts.items():
        assert_newer(said_of_newer, compiler, "NVIDIA's compiler (NVVM)")
    for linker, package in linkers.items():
        answers = run("link", package, tmp_path, texts)
        assert list(answers) == list(compilers)
        for compiler, (said, failure, said_of_newer) in answers.items():
            fits = number(linker) >= number(compiler)
            assert [said is None, failure is None] == [fits, fits], (compiler, linker, said, failure)
            assert_newer(said_of_newer, linker, "a linker (nvJitLink)", fits)
            if not fits:
                (line,) = [line for line in texts[compiler][1].splitlines() if line.startswith(".version")]
                assert f"and the PTX of NVVM, {line[1:]}, got one that fails" in said
                assert f"Unsupported {line};" in said
                assert f"Unsupported {line};" in failure


def assert_newer(said, release, what, fits=True):
    """Check what is said of a library for a device of compute capability 12.0."""
    known = number(release) >= (12, 8)
    assert (said is None) == (known and fits)
    assert known or f"{what} of CUDA 12.8 or later, for compute capability 12.0" in said


def test_a_compiler_that_knows_no_halves_is_refused(tmp_path):
    said, failure, _ = run("compile", LAST_WITHOUT_HALVES, tmp_path)
    assert failure.startswith("ERROR_INVALID_IR")
    assert (
        "(NVVM) of CUDA 12.5 or later, for compute capability 8.0, got none that works (ERROR_INVALID_IR"
        in said
    )
