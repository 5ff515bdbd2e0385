"""An inference engine of its own over kvbits' pages: block tables, prompts in one chunk, decoding in a batch.

python examples/minimal_engine.py [MODEL] [int8_centered | int8 | int4 | raw]

The engine owns pages and tables. Two operations of kvbits serve it: `store` writes keys and values to slots,
`attend` reads them. The model is any Llama-like one; its weights are used through plain torch, its attention
and its cache are not.
"""

import sys

import torch
import torch.nn.functional as F

import kvbits
from kvbits import schemes
from kvbits.ops import attend, store
from kvbits.ops.types import PageStore, Table
from kvbits.quant.rotary import turn_by
from kvbits.spec import PageLayout, Rotary

PAGE = 64


class Engine:
    """Greedy decoding of up to `max_batch` sequences of up to `max_tokens` tokens each."""

    def __init__(self, model, scheme="int8", max_batch=8, max_tokens=2048):
        attention, config = model.model.layers[0].self_attn, model.config
        self.model, self.head_dim = model, attention.head_dim
        weight, spec, kv_heads = (
            model.lm_head.weight,
            schemes.get(scheme, head_dim=self.head_dim),
            config.num_key_value_heads,
        )
        kind = {"dtype": weight.dtype, "device": weight.device}
        self.layout = PageLayout(
            key=spec.key,
            value=spec.value,
            page_size=PAGE,
            num_kv_heads=kv_heads,
            head_dim=self.head_dim,
            raw_dtype=str(weight.dtype).removeprefix("torch."),
        )
        most = -(-max_tokens // PAGE)
        page = (kv_heads, self.layout.head_bytes)
        rotary = Rotary(inv_freq=model.model.rotary_emb.inv_freq.tolist())  # brings a page's mean key to the next page
        turn = turn_by(rotary, self.head_dim, PAGE).to(weight.device)
        self.pages = [
            PageStore(
                self.layout,
                (torch.zeros(max_batch * most, *page, dtype=torch.uint8, device=weight.device),),
                turn=turn,
            )
            for _ in model.model.layers
        ]
        self.free, self.tables, self.tokens = list(range(max_batch * most)), {}, {}
        self.table = torch.zeros(max_batch, most, dtype=torch.int32, device=weight.device)
        self.writer = store.choose(self.layout, weight.dtype, weight.device)
        heads = config.num_attention_heads
        self.reader = attend.plan(
            [self.layout], batch_size=max_batch, num_q_heads=heads, scaling=attention.scaling, **kind
        )
        for i, pages in enumerate(self.pages):
            self.reader.bind(i, [pages])

    def slots(self, name, start, end):
        """Return where tokens `start` .. `end` of a sequence are stored, and the page before each one's or -1. Take the
        pages that they need.
        """
        table = self.tables[name]
        while len(table) * PAGE < end:
            table.append(self.free.pop())
        return [
            (table[i // PAGE] * PAGE + i % PAGE, table[i // PAGE - 1] if i >= PAGE else -1) for i in range(start, end)
        ]

    @torch.no_grad()
    def forward(self, tokens, positions, slots, attend):
        """Compute the logits [N, vocabulary] of N tokens; attend(layer, q, k, v) returns [N, Hq, D]."""
        core, device = self.model.model, self.table.device
        tokens, positions, slots, previous = (
            torch.tensor(x, device=device) for x in (tokens, positions, *zip(*slots, strict=True))
        )
        x = core.embed_tokens(tokens)
        cos, sin = (angle[0, :, None] for angle in core.rotary_emb(x[None], positions[None]))
        for i, layer in enumerate(core.layers):
            a, h = layer.self_attn, layer.input_layernorm(x)
            q, k, v = (project(h).view(len(h), -1, self.head_dim) for project in (a.q_proj, a.k_proj, a.v_proj))
            q, k = (
                y * cos + torch.cat([-y[..., self.head_dim // 2 :], y[..., : self.head_dim // 2]], -1) * sin
                for y in (q, k)
            )
            self.writer.run(k, v, self.pages[i], slots, previous=previous)
            x = x + a.o_proj(attend(i, q, k, v).flatten(1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.model.lm_head(core.norm(x))

    def add(self, name, prompt):
        """Add a prompt in one chunk, which attends to itself in the model's precision, and choose its first token."""
        self.tables[name], self.tokens[name] = [], list(prompt)

        def dense(layer, q, k, v):
            q, k, v = (y.transpose(0, 1)[None] for y in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

        logits = self.forward(prompt, range(len(prompt)), self.slots(name, 0, len(prompt)), dense)
        self.tokens[name].append(int(logits[-1].argmax()))

    def step(self):
        """Generate one more token of every sequence."""
        names = list(self.tables)
        lengths = [len(self.tokens[n]) for n in names]
        slots = [self.slots(n, length - 1, length)[0] for n, length in zip(names, lengths, strict=True)]
        for row, n in enumerate(names):
            self.table[row, : len(self.tables[n])] = torch.tensor(self.tables[n])
        tokens = torch.tensor(lengths, dtype=torch.int32, device=self.table.device)
        self.reader.update([Table(self.table[: len(names)], tokens)])
        last = [self.tokens[n][-1] for n in names]
        logits = self.forward(
            last, [length - 1 for length in lengths], slots, lambda i, q, k, v: self.reader.run(q[:, None], i)[:, 0]
        )
        for n, token in zip(names, logits.argmax(-1).tolist(), strict=True):
            self.tokens[n].append(token)


if __name__ == "__main__":
    model, tokenizer = kvbits.load_model(sys.argv[1] if len(sys.argv) > 1 else None)
    engine = Engine(model, *sys.argv[2:3])
    for name, text in enumerate(
        ("The capital of France is", "A cache holds the keys and values of every token, so that")
    ):
        engine.add(name, tokenizer(text).input_ids)
    for _ in range(24):
        engine.step()
    print("\n".join(tokenizer.decode(tokens) for tokens in engine.tokens.values()))
    print(engine.reader.explain())
