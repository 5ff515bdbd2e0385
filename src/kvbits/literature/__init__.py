"""The second ring: formats of papers and their neighbours, kept to compare with (docs/results/evaluation.md).

schemes.py      the presets, with their sources
codebooks.py    codebooks of KVQuant's formats, by weighted k-means
histograms.py   the pass over prompts that fills them
fisher.py       its weights, squared gradients

All of it works, with kernels of its own (families/codebook) or the core's, and is tuned no further. The core does not
import this package: `kvbits.schemes` looks its presets up, and calibration loads it when a scheme has a codebook.
"""
