"""Quantization of numbers to codes: plain PyTorch, one small module per step. The reference every kernel is compared
with.
"""
