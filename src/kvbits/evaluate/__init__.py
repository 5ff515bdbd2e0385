"""Measurement of what a cache costs in accuracy. This module holds limits that commands and reports share, and does not
need torch.
"""

MAX_KL = 0.05
"""Nats of KL against the 16-bit cache up to which a scheme passes: a few percent of perplexity."""
MAX_PPL_CHANGE = 0.02
"""Rise of perplexity up to which a scheme passes."""
