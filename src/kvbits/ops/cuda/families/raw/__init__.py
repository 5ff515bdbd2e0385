"""16-bit pages."""
