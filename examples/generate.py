"""Example of a packed cache: it is built for a model and a scheme, passed to generate, and asked what it holds.

python examples/generate.py [MODEL] [SCHEME]
"""

import sys

import kvbits

model, tokenizer = kvbits.load_model(sys.argv[1] if len(sys.argv) > 1 else None)
inputs = tokenizer(
    "A cache holds the keys and values of every token, and attention reads them again and again. " * 20,
    return_tensors="pt",
)

cache = kvbits.KVCache.for_model(model, sys.argv[2] if len(sys.argv) > 2 else "int8_centered")
out = model.generate(**inputs, past_key_values=cache, max_new_tokens=40, do_sample=False)

print(tokenizer.decode(out[0, inputs.input_ids.shape[1] :], skip_special_tokens=True))
print(cache.explain())
