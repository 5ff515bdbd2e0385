"""Steps of SGLang's backend by its own classes, without an engine: rows that decode, or verify drafts, as a captured
graph has them, and prompts as GPUs read them.
"""

from __future__ import annotations

import importlib.util
import json
import types
import warnings

import pytest
import torch
from messages import raises

if importlib.util.find_spec("sglang_stand_ins") is None:
    pytest.skip("SGLang is not installed (tests/integrations/run_sglang_cpu.sh sets it up)", allow_module_level=True)


from integrations import vllm_cpu
from integrations.judged import MODELS, calibrated

from kvbits.errors import UnsupportedError

with warnings.catch_warnings(action="ignore"):  # of SGLang, which tells of what it has no GPU for
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.server_args import ServerArgs

    from kvbits.integrations.sglang import backend, pool
    from kvbits.integrations.sglang.host import KVBitsHostPool

pytestmark = pytest.mark.filterwarnings("ignore")
PAGE, HEADS, KV_HEADS, WIDTH, LAYERS = 64, 4, 2, 64, 2
LENGTHS = {3: 62, 1: 190, 5: 1}
"""Tokens of a prompt by the request's row of `req_to_token`."""


class Steps:
    """A backend with a pool of its own: each step's batch, and all layers' results of it."""

    def __init__(self, path, form: str, window: int | None, drafts: int, copied: int = 8) -> None:
        settings = {
            "device": "cpu",
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "attention_backend": form,
            "chunked_prefill_size": 128,
        }
        if drafts:
            settings |= {
                "speculative_algorithm": "NGRAM",
                "speculative_ngram_max_bfs_breadth": 1,
                "speculative_num_draft_tokens": drafts,
            }
        args = ServerArgs(model_path=str(path), **settings)
        args.resolve_once()
        self.mode, self.drafts = ForwardMode.TARGET_VERIFY if drafts else ForwardMode.DECODE, drafts
        self.pool = pool._class_of(form, copied)(
            size=40 * PAGE,
            page_size=PAGE,
            dtype=torch.float32,
            head_num=KV_HEADS,
            head_dim=WIDTH,
            layer_num=LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )
        rows = ReqToTokenPool(8, 1024, "cpu", enable_memory_saver=False)
        rows.free_slots = [i for i in rows.free_slots if i not in LENGTHS]
        for request in LENGTHS:  # pages of its own
            rows.req_to_token[request, : 5 * PAGE] = torch.arange(5 * PAGE) + (1 + 5 * request) * PAGE
        self.rows = rows
        layers = [
            RadixAttention(HEADS, WIDTH, WIDTH**-0.5, KV_HEADS, i, sliding_window_size=window or -1)
            for i in range(LAYERS)
        ]
        model = torch.nn.ModuleList(layers)
        config = types.SimpleNamespace(context_len=1024, hf_text_config=MODELS["llama"]().config)
        runner = {
            "token_to_kv_pool": self.pool,
            "req_to_token_pool": rows,
            "server_args": args,
            "model": model,
            "model_config": config,
            "device": "cpu",
        }
        assert resolved_view(args).page_size == PAGE
        self.layers, self.table = layers, rows.req_to_token
        # queries, keys, values
        self.numbers = torch.randn(
            9, LAYERS, 5 * PAGE, (HEADS + 2 * KV_HEADS) * WIDTH, generator=torch.Generator().manual_seed(0)
        )
        self.backend = backend.KVBitsBackend(types.SimpleNamespace(**runner), form)

    def capture(self, rows: int) -> None:
        """Capture a graph of so many rows; `run` with padding then replays it."""
        lens, none = (
            torch.full((rows,), self.backend.get_cuda_graph_seq_len_fill_value()),
            torch.zeros(rows * max(self.drafts, 1), dtype=torch.int64),
        )
        batch = types.SimpleNamespace(
            forward_mode=self.mode, seq_lens=lens, req_pool_indices=none[:rows], out_cache_loc=none
        )
        self.backend.init_cuda_graph_state(rows, len(none))
        self.backend.init_forward_metadata_out_graph(batch, in_capture=True)
        self.captured = self.backend._step

    def run(
        self, mode, requests: list[int], before: list[int], new: list[int], padded: int = 0, wrong: int = 0
    ) -> list[torch.Tensor]:
        """Results of the rows of `requests`, which had `before` tokens and get `new`, of all layers.

        With `padded` rows behind them, without slots, it is a replay: the step's tables are laid out, then the layers
        run with what the capture had. The last `wrong` tokens of each row have other numbers.
        """
        slots = torch.cat([self.table[r, n : n + m] for r, n, m in zip(requests, before, new, strict=True)])
        lens = torch.tensor(before) + torch.tensor(new) * (mode != ForwardMode.TARGET_VERIFY)
        tail = torch.zeros(padded, dtype=torch.int64)
        batch = types.SimpleNamespace(
            forward_mode=mode,
            seq_lens=torch.cat([lens, tail + self.backend.get_cuda_graph_seq_len_fill_value()]),
            seq_lens_cpu=lens,
            req_pool_indices=torch.cat([torch.tensor(requests), tail]),
            out_cache_loc=slots,
            extend_seq_lens=torch.tensor(new, dtype=torch.int32),
            extend_seq_lens_cpu=new,
        )
        self.backend.init_forward_metadata(batch)
        if padded:
            self.backend._step = self.captured
        found = []
        for i, layer in enumerate(self.layers):
            rows = [self.numbers[r, i, n : n + m].clone() for r, n, m in zip(requests, before, new, strict=True)]
            for row in rows:
                row[len(row) - wrong :] += 1
            x = torch.cat([*rows, torch.full((padded * max(self.drafts, 1), self.numbers.shape[-1]), 7.0)])
            q, k, v = x.split([HEADS * WIDTH, KV_HEADS * WIDTH, KV_HEADS * WIDTH], -1)
            found.append(
                self.backend.forward(q, k.unflatten(-1, (-1, WIDTH)), v.unflatten(-1, (-1, WIDTH)), layer, batch)[
                    : len(slots)
                ]
            )
        return found


@pytest.fixture(
    params=[("kvbits_int8_centered", None), ("kvbits_int8_centered", 70), ("kvbits_klt3", None)],
    ids=lambda x: f"{x[0]}-{x[1]}",
)
def made(request, tmp_path, monkeypatch):
    """Makes `Steps` of a format and a window; calibrated ones have raw copies unless told otherwise."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    form, window = request.param
    model = MODELS["llama"]()
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(backend, "get_parallel", lambda: types.SimpleNamespace(tp_rank=0, tp_size=1))
    kvbits = {}
    if form == "kvbits_klt3":
        kvbits["calibration"] = calibrated(model, "klt3", tmp_path / "c.safetensors").path

    def make(drafts=0, copied=8, **options):
        monkeypatch.setenv("KVBITS_SGLANG", json.dumps(kvbits and kvbits | options))
        return Steps(tmp_path, form, window, drafts, copied)

    return make


def prompts(steps: Steps, requests: list[int], before: int = 0) -> list[torch.Tensor]:
    return steps.run(
        ForwardMode.EXTEND,
        requests,
        [before and LENGTHS[r] for r in requests],
        [before or LENGTHS[r] for r in requests],
    )


def test_replayed_graphs_are_eager_steps(made):
    """Over borders of pages, in batches that change; rows that fill a captured batch up leave what others read and
    store alone.
    """
    plain, captured = made(), made()
    captured.capture(8)
    for steps in (plain, captured):
        prompts(steps, [3, 1, 5])
    grown = dict(LENGTHS)
    for requests in [[3, 1, 5]] * 4 + [[5, 3]] * 2:
        had = [grown[r] for r in requests]
        one, two = (
            s.run(ForwardMode.DECODE, requests, had, [1] * len(had), n)
            for s, n in ((plain, 0), (captured, 8 - len(had)))
        )
        for a, b in zip(one, two, strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)
        for r in requests:
            grown[r] += 1
    for a, b in zip(plain.pool.pages, captured.pool.pages, strict=True):
        assert torch.equal(a[1:], b[1:])  # page 0 takes what padding writes
        assert b[0].any()
    for a, b in zip(*(s.backend._layers.values() for s in (plain, captured)), strict=True):
        assert all(torch.equal(x, y) and x.any() for x, y in zip(a.copies, b.copies, strict=True))


def test_requests_without_copies_are_read_packed_until_others_end(made):
    """Rings for two of three requests: one is as without any copies, and gets the ring of the first that ends."""
    few, all_of, none = made(copied=2), made(), made(raw_newest=0)
    if not few.backend._steps.copies:
        pytest.skip("this format has no copies by itself")
    for steps in (few, all_of, none):
        prompts(steps, [1, 3, 5])
    assert few.backend._ring_of.tolist()[:6] == [-1, 0, -1, 1, -1, -1]
    had = [LENGTHS[r] for r in (1, 3, 5)]
    one, whole, packed = (s.run(ForwardMode.DECODE, [1, 3, 5], had, [1] * 3) for s in (few, all_of, none))
    for a, b, c in zip(one, whole, packed, strict=True):
        torch.testing.assert_close(a[:2], b[:2])
        torch.testing.assert_close(a[2:], c[2:])
        assert (b[:2] - c[:2]).abs().max() > 1e-4
    few.rows.free_slots.append(3)
    prompts(few, [1], before=1)
    assert few.backend._ring_of.tolist()[:6] == [-1, 0, -1, -1, -1, 1]


def test_pages_from_host_memory_are_read_packed(made):
    """Two pages of one request come back where another's copies were. What follows them is as without any copies, and
    wrong where past owners' copies count.
    """
    lost, found, none = made(), made(), made(raw_newest=0)
    for steps in (lost, found, none):
        prompts(steps, [3, 1, 5])
    two, kept, there = 2 * PAGE, torch.arange(2 * PAGE) + 4 * PAGE, found.table[3, : 2 * PAGE].long()
    for steps in (lost, found):
        host = KVBitsHostPool(steps.pool, 2.0, 0)
        host.backup_from_device_all_layer(steps.pool, kept, steps.table[1, :two].long(), "kernel")
        for pages in steps.pool.pages:
            pages[steps.table[1, :two:PAGE] // PAGE] = 0
        for layer in range(LAYERS):
            host.load_to_device_per_layer(steps.pool, kept, there, layer, "kernel")
        steps.table[1, :two] = there
    lost.pool.loaded.clear()
    behind = [s.run(ForwardMode.EXTEND, [1], [two], [LENGTHS[1] - two]) for s in (lost, found, none)]
    for wrong, one, packed in zip(*behind, strict=True):
        torch.testing.assert_close(one, packed, atol=0, rtol=0)
        assert not found.backend._steps.copies or (wrong - packed).abs().max() > 1e-2


@pytest.mark.parametrize("padded", [False, True], ids=["eager", "replayed"])
def test_drafts_are_single_tokens_read_together(made, padded):
    """Four at a time, of which none to three are wrong, over borders of pages: what follows is stored over them."""
    plain, drafts = made(raw_newest=0), made(4, raw_newest=0)
    drafts.capture(8)
    for steps in (plain, drafts):
        prompts(steps, [3, 1, 5])
    # of numbers about 1: wrong drafts count in the mean of a page that opens with them
    near = 5e-3 if plain.pool.layout.is_centered else 1e-5
    grown = dict(LENGTHS)
    for step, requests in enumerate([[3, 1, 5]] * 6 + [[5, 3]] * 16):
        had, right, n = [grown[r] for r in requests], 1 + step % 4, len(requests)
        found = drafts.run(ForwardMode.TARGET_VERIFY, requests, had, [4] * n, (8 - n) * padded, wrong=4 - right)
        one_by_one = [plain.run(ForwardMode.DECODE, requests, [h + i for h in had], [1] * n) for i in range(right)]
        for a, b in zip(found, zip(*one_by_one, strict=True), strict=True):
            torch.testing.assert_close(a.unflatten(0, (n, 4))[:, :right], torch.stack(b, 1), atol=near, rtol=1e-5)
        for r in requests:
            grown[r] += right
    assert grown[3] > 2 * PAGE - 15 and grown[1] > 3 * PAGE


def test_prompts_as_gpus_read_them_are_those_of_cpus(made, monkeypatch):
    """Histories unpacked for one call of FlashAttention, here by its definition, or read packed: chunks behind a
    history, beside rows of one token, and decoding after them.
    """
    found = []
    for on_gpu in (False, True):
        if on_gpu:
            monkeypatch.setattr(backend, "flash_for", lambda *widths: vllm_cpu.attend)
        steps = made()
        results = prompts(steps, [3, 1, 5]) + prompts(steps, [1, 5], 70)
        # mixed with prompts, single tokens are prompts
        results += steps.run(ForwardMode.EXTEND, [5, 3], [71, 62], [1, 40])
        results += steps.run(ForwardMode.DECODE, [3, 5], [102, 72], [1, 1])
        found.append(results)
    # of numbers about 1: CPU kernels round queries to bytes where codes are in a basis
    near = 1e-2 if steps.pool.form.calibrated else 2e-4
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=near, rtol=1e-4)


def test_steps_of_other_kinds_are_refused(made):
    with raises(UnsupportedError, "TARGET_VERIFY"):
        made().run(ForwardMode.TARGET_VERIFY, [3], [0], [4])
