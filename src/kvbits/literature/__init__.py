"""The second ring: formats of papers and their neighbours, kept to compare with (docs/results/evaluation.md).

schemes.py      the presets, with their sources
codebooks.py    codebooks of KVQuant's formats, by weighted k-means
histograms.py   the pass over prompts that fills them
fisher.py       its weights, squared gradients
kvquant/        CUDA kernels that read KVQuant's pages packed

All of it works and is tuned no further. On CPUs KVQuant's pages are unpacked by the reference and then attended to. The
core does not import this package: `kvbits.schemes` looks its presets and families up, and calibration loads it when a
scheme has a codebook.
"""
