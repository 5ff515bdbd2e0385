"""Prefixes of sequences on disk, in object stores and on the wire, as blobs that attention reads as they arrive
(docs/internals/store.md).
"""
