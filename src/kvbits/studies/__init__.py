"""Guests: what source documents print, repeated and recomputed. A study uses the library, and nothing but its command uses a study.

int8_paper        the INT8 GPU quantization paper: its matrix operations on CPU and GPU, its measurements, its figures (`kvbits bench paper`)
source_figures    the memory figures that source documents print, recomputed (`kvbits plan --sources`)
"""
