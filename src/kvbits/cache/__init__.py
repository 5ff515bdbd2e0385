"""Places where codes live: page ids (integers), pools (bytes), the paged cache, saved files."""
