"""One folder a backend: `reference` in plain PyTorch, read first, then `cpu` and `cuda`.

What ops take is in `types`, who serves a call in `dispatch`.
"""
