"""Trellis codes, of keys in a basis."""
