"""Pages into 16-bit rows."""
