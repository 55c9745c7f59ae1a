"""The program: Ctrl-C, at any moment, is one line."""

import sys


def start():
    try:
        from kvkit_cli.main import main

        main(prog_name="kvkit")
    except KeyboardInterrupt:
        sys.stderr.write("kvkit: interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    start()
