"""Families of formats, a room each: their kernels, and what chooses and launches them. Above them stands `engine`, which knows none."""
