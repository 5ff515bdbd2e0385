"""Codes as levels of a table, outliers, keys before the rotary embedding: the formats of KVQuant."""
