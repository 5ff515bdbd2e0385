"""Integers and floats with a scale per token, group, channel or page."""
