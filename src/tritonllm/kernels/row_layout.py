"""Columns of the matrix of decode rows, int32 [rows, HEADER + max_blocks]: the device's state of running sequences.

Two columns hold float32 bits (see them through `rows.view(torch.float32)`); the block table fills the columns from
HEADER on. A context length of 0 marks a row that holds no sequence.
"""

from __future__ import annotations

TOKEN = 0  # the newest token: the input of the next step
CONTEXT_LEN = 1  # tokens of the sequence, TOKEN included
TEMPERATURE = 2  # float32 bits
TOP_K = 3  # 0 = off
TOP_P = 4  # float32 bits, 1.0 = off
SEED = 5  # two columns: the low and the high word
HEADER = 16  # first column of the block table; a multiple of 16 bytes into the row
