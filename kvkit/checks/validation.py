"""What is looked for only when KVKIT_VALIDATE=1 is in the environment: tables that are wrong, yet can be
read.
"""

import os

import numpy as np

from kvkit import checks
from kvkit.layouts.places import ENDLESS


def asked():
    """Whether operators shall look for more than they need."""
    return os.environ.get("KVKIT_VALIDATE", "0") not in ("", "0")


def block_tables(table, lengths, blocks, page_size):
    """The table of a call that reads pages."""
    if asked():
        rules = checks.table_rules
        rules.validate("block_tables", rules.padded(table, lengths, blocks, page_size))


def step(step):
    """The table of a step, and the pages that its new tokens are stored in; of offsets there is none."""
    if not asked() or step.page_size == ENDLESS:
        return
    rules, size = checks.table_rules, step.page_size
    lengths = np.diff(step.kvstarts)
    table = np.asarray(step.table)
    tables = rules.padded(table, lengths, step.rows, size)
    columns = np.arange(table.shape[1])
    stored = (columns >= step.start_pos[:, None] // size) & (columns < rules.pages_of(lengths, size)[:, None])
    rules.validate("cachestarts", tables, table[stored & (np.diff(step.seqstarts) > 0)[:, None]])
