"""One folder a backend: `reference` in plain PyTorch, read first, then `cpu`, `cuda` and `triton`.

What ops take is in `types`, who serves a call in `dispatch`.
"""
