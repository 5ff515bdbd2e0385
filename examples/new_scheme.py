"""A new scheme is a value: 4-bit keys per channel, 2-bit values per token, raw first and last layers, and what it costs
before it is built.

python examples/new_scheme.py
"""

from kvbits import CacheSpec, LayerGeometry, Override, PerChannel, PerGroup, QuantSpec, Scheme

scheme = Scheme(
    name="mine",
    key=QuantSpec(format="int4", granularity=PerChannel(), symmetric=False),
    value=QuantSpec(format="int2", granularity=PerGroup(32), symmetric=False),
    num_sink_tokens=4,
    residual_length=64,
    overrides=(Override(layers=(0, -1), key=QuantSpec.raw(), value=QuantSpec.raw()),),
)
llama_8b = CacheSpec(scheme=scheme, layers=(LayerGeometry(num_kv_heads=8, head_dim=128),) * 32)

print(f"{llama_8b.bits_per_element:.2f} bits per element, {llama_8b.bytes_per_token / 1024:.1f} KiB per token")
print(f"{llama_8b.nbytes(131072) / 1e9:.2f} GB at 131,072 tokens; 16-bit: {llama_8b.raw_nbytes(131072) / 1e9:.2f} GB")
assert Scheme.from_json(scheme.to_json()) == scheme
