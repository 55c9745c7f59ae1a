"""Kills processes in the midst of runs --in-place: `python kill_fuzz.py FOLDER COUNT SEED`.

After each kill the file is whole and either as it was or as the run leaves it, and the next writer leaves no
temporary file of a killed run. Prints how many kills came while a file was being written.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from kvkit.files import npz

SHAPE = (1, 1, 2, 2**15, 8, 16)  # 32 MiB: mapped, and written in several pieces
RUNS = """
import itertools, sys
from kvkit_cli.main import main
words = ["run", "key_value_cache", sys.argv[1], "--in-place", "--quiet"]
for value in itertools.count():
    try:
        main([*words, "--set", f"start_pos={value % 9}"])
    except SystemExit as error:
        assert not error.code
    print(value, flush=True)
"""


def kill(folder, count, seed):
    rng, amid = np.random.default_rng(seed), 0
    source = folder / "cache.npz"
    new = np.ones((1, 1, 8, 16), np.float32)
    npz.write(source, {"current_key": new, "current_value": new, "cache": np.zeros(SHAPE, np.float32),
                       "start_pos": np.array(0)})  # fmt: skip
    for _ in range(count):
        with subprocess.Popen([sys.executable, "-c", RUNS, str(source)], stdout=subprocess.PIPE) as process:
            process.stdout.readline()
            time.sleep(rng.uniform(0, 0.3))
            process.kill()
            done = [int(line) for line in process.stdout.read().split()]
        left = [path for path in folder.iterdir() if path != source]
        amid += bool(left)
        assert len(left) <= 1, left
        cache = npz.read(source).arrays["cache"]
        written = (cache != 0).any(axis=(0, 1, 2, 4, 5)).nonzero()[0]
        assert written.tolist() == list(range(len(written))), written
        assert len(written) >= min(max(done, default=0) + 1, 9), (written, done)
        assert (cache[:, :, :, : len(written)] == 1).all()
    npz.write(folder / "next.npz", {})
    assert sorted(path.name for path in folder.iterdir()) == ["cache.npz", "next.npz"]
    return {"kills": count, "while a file was written": amid}


if __name__ == "__main__":
    print(json.dumps(kill(Path(sys.argv[1]), *map(int, sys.argv[2:]))))
