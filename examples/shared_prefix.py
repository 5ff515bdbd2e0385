"""Many answers from one prompt: the prefix is stored once, forks share its pages until they write.

python examples/shared_prefix.py
"""

import torch

import kvbits

torch.manual_seed(0)
model, tokenizer = kvbits.load_model()
prompt = tokenizer("Once upon a time, in a house by the sea, there lived " * 20, return_tensors="pt").input_ids

cache = kvbits.KVCache.for_model(model, "int8_centered")
with torch.no_grad():
    logits = model(prompt, past_key_values=cache, logits_to_keep=1).logits[:, -1]
before = cache.nbytes
cache.batch_repeat_interleave(4)
print(f"one sequence {before:,} bytes, four forks {cache.nbytes:,}")

token = torch.multinomial(logits.softmax(-1).expand(4, -1), 1)
for _ in range(12):
    with torch.no_grad():
        logits = model(token, past_key_values=cache).logits[:, -1]
    token = torch.multinomial(logits.softmax(-1), 1)
print(f"after 12 different tokens each {cache.nbytes:,} bytes, lengths {cache.pages.seq_lens}")
