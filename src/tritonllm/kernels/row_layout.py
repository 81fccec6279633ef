"""Columns of the matrix of decode rows, int32 [rows, HEADER + max_blocks]: the device's state of running sequences.

Some columns hold float32 bits (see them through `rows.view(torch.float32)`); the block table fills the columns from
HEADER on. A context length of 0 marks a row that holds no sequence. A row of zeros behind TOP_P samples plainly.
"""

from __future__ import annotations

TOKEN = 0  # the newest token: the input of the next step
CONTEXT_LEN = 1  # tokens of the sequence, TOKEN included
TEMPERATURE = 2  # float32 bits
TOP_K = 3  # 0 = off
TOP_P = 4  # float32 bits, 1.0 = off
SEED = 5  # two columns: the low and the high word
MIN_P = 7  # float32 bits, 0.0 = off
REPETITION_PENALTY = 8  # float32 bits; this one and the next two count only with HAS_PENALTIES
PRESENCE_PENALTY = 9  # float32 bits
FREQUENCY_PENALTY = 10  # float32 bits
CONTROLS = 11  # HAS_PENALTIES and HAS_MASK, or 0
NUM_BIASES = 12  # entries of the row's list of biases
NUM_LOGPROBS = 13  # 1 + how many of the likeliest tokens are reported, 0 = off
NUM_BAD_WORDS = 14  # entries of the row's table of words
HEADER = 16  # first column of the block table; a multiple of 16 bytes into the row

HAS_PENALTIES = 1  # bits of CONTROLS
HAS_MASK = 2
