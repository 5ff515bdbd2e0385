"""Figures of source documents, repeated and recomputed.

From a checkout, not part of the wheel; a study uses the library, and the library uses no study.

int8_paper        the INT8 GPU quantization paper: its matrix operations on CPU and GPU, its measurements, its figures
                  (`python -m studies paper`)
source_figures    the memory figures that source documents print, recomputed (`python -m studies sources`)

The C++ is a library of its own: `cmake -S studies -B build/studies && cmake --build build/studies` puts
libkvbits_studies.so into this folder.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # run_files
