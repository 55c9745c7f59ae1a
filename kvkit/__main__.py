"""Run the command line as `python -m kvkit`."""

from kvkit_cli.__main__ import start

start()
