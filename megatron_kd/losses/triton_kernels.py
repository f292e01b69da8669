"""`elementwise` in Triton, on CUDA: each pass reads a chunk's logits once.

Letters: n rows, Vp this rank's vocabulary, T temperatures.
"""

import functools
import importlib.util


@functools.cache
def available() -> bool:
    return importlib.util.find_spec("triton") is not None
