"""What a cache costs in accuracy. Here: limits that commands and reports share, without torch."""

MAX_KL = 0.05
"""Nats of KL against the 16-bit cache up to which a scheme passes: a few percent of perplexity."""
MAX_PPL_CHANGE = 0.02
"""Rise of perplexity up to which a scheme passes."""
