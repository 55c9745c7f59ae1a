"""Start the program. Ctrl-C prints one line, and signals that end a process let it clean up first."""

import os
import sys
from types import FrameType


def start() -> None:
    """Run `kvkit`."""
    os.environ.setdefault("PYTHONSAFEPATH", "1")  # child processes import no modules from the working folder
    try:
        import signal

        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, end_by_signal)

        from kvkit_cli.main import main

        main(prog_name="kvkit")
    except KeyboardInterrupt:
        sys.stderr.write("kvkit: interrupted\n")
        sys.exit(130)
    finally:
        # Ctrl-C inside an `exec` of text, as dataclasses use it, sets a flag by which Python ends itself with
        # SIGINT, whatever the exit code. The next `exec` resets the flag.
        exec("")


def end_by_signal(number: int, frame: FrameType | None) -> None:
    """Unwind as Ctrl-C does, so that no half-written file is left. During an import, end at once."""
    sys.stderr.write(f"kvkit: ended by signal {int(number)}\n")
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(128 + number)  # a module that is being imported may catch SystemExit, or fail on it
        frame = frame.f_back
    sys.exit(128 + number)


if __name__ == "__main__":
    start()
