"""Models that make other keys of the same tokens have other identities, and share no pages."""

import contextlib
import copy
import functools
import pickle
import types

import peft
import pytest
import torch
from integrations.test_huggingface import tiny
from messages import raises, warns
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import kvbits
from kvbits import KVCache, PrefixStore, schemes
from kvbits.calibrate import calibrate
from kvbits.errors import CacheStateError, DataError, FileFormatError, KvbitsWarning, UnsupportedError
from kvbits.integrations import identity as mechanism

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft")  # PEFT's own
IDS = torch.arange(3, 53).repeat(4)[None]


def lora(**fields):
    return peft.LoraConfig(target_modules=["v_proj"], init_lora_weights=False, **fields)


def next_logits(model, cache):
    with torch.no_grad():
        return model(input_ids=IDS[:, -1:], past_key_values=cache).logits


def test_a_store_serves_each_adapter_what_it_would_compute(tmp_path):
    model = peft.get_peft_model(tiny("llama"), lora(), "a").eval()
    model.add_adapter("b", lora(lora_alpha=64))
    shared, names = PrefixStore(tmp_path / "shared"), []

    def check(name):
        found = KVCache.from_prefix(model, IDS, store=shared, scheme="raw", wait=True)
        cold = KVCache.from_prefix(model, IDS, store=PrefixStore(tmp_path / f"cold{len(names)}"), scheme="raw")
        assert torch.equal(next_logits(model, found), next_logits(model, cold)), name
        names.append(kvbits.identity(model))

    check("a")
    model.set_adapter("b")
    check("b")
    with model.disable_adapter():
        check("none")
        assert kvbits.identity(model) == kvbits.identity(tiny("llama")), "a disabled adapter leaves the base model"
    for layer in model.base_model.model.model.layers:
        layer.self_attn.v_proj.scaling["b"] *= 0.5
    check("half of b")
    model.set_adapter("a")
    check("a again")
    model.merge_adapter()
    check("merged")
    assert names[0] == names[4] and len(set(names)) == 5


def test_adapters_that_transformers_loads_count(tmp_path):
    model = tiny("qwen3")
    base = kvbits.identity(model)
    for name in ("a", "b"):  # what model.add_adapter, set_adapter and disable_adapters do, in any version of peft
        peft.inject_adapter_in_model(lora(), model, name)
    model.eval()
    layers = [m for m in model.modules() if isinstance(m, BaseTunerLayer)]
    found = []
    for name in ("a", "b"):
        for layer in layers:
            layer.set_adapter(name)
        found.append(kvbits.identity(model))
    for layer in layers:
        layer.enable_adapters(False)
    assert kvbits.identity(model) == base and len({base, *found}) == 3
    for layer in layers:
        layer.enable_adapters(True)
    assert kvbits.identity(model) == found[1]


@pytest.mark.parametrize(
    "config",
    [
        lora(use_dora=True),
        lora(use_rslora=True),
        peft.IA3Config(target_modules=["v_proj"], feedforward_modules=[], init_ia3_weights=False),
        peft.LNTuningConfig(target_modules=["input_layernorm"]),
        peft.VeraConfig(target_modules=["v_proj"]),
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    ],
    ids=lambda c: f"{type(c).__name__}{'-dora' if getattr(c, 'use_dora', False) else ''}",
)
def test_every_kind_of_adapter_counts_number_by_number(config):
    model = peft.get_peft_model(tiny("llama"), config).eval()
    first = kvbits.identity(model)
    assert first != kvbits.identity(tiny("llama"))
    for name, p in model.named_parameters():
        if p.requires_grad:
            before = p.data.clone()
            p.data.view(-1)[-1] += 1
            assert kvbits.identity(model) != first, name
            p.data.copy_(before)
    assert kvbits.identity(model) == first


def edits():
    def element(m):
        m.model.layers[0].self_attn.k_proj.weight.data[3, 5] += 1e-3

    def sign(m):
        m.model.layers[1].mlp.up_proj.weight.data[2, 2] *= -1

    def signs(m):
        m.model.layers[1].mlp.up_proj.weight.data.neg_()

    def rows(m):
        w = m.model.layers[0].mlp.down_proj.weight.data
        w[[1, 4]] = w[[4, 1]].clone()

    def columns(m):
        w = m.model.embed_tokens.weight.data
        w[:, [1, 4]] = w[:, [4, 1]].clone()

    def layers(m):
        m.model.layers = torch.nn.ModuleList(reversed(m.model.layers))

    def frequencies(m):
        m.model.rotary_emb.inv_freq[0] *= 1.01

    def scaling(m):
        m.model.layers[0].self_attn.scaling *= 2

    def epsilon(m):
        m.model.norm.variance_epsilon *= 2

    def rope(m):
        m.config.rope_parameters["rope_theta"] *= 2

    def eps_field(m):
        m.config.rms_norm_eps *= 2

    def new_field(m):
        m.config.residual_multiplier = 0.5

    def half(m):
        m.bfloat16()

    def attribute(m):
        m.model.layers[0].steering = [torch.ones(3)]

    return [f for f in locals().values() if callable(f)]


@pytest.mark.parametrize("edit", edits(), ids=lambda f: f.__name__)
def test_everything_that_changes_keys_changes_the_identity(edit):
    model = tiny("llama")
    first = kvbits.identity(model)
    assert kvbits.identity(copy.deepcopy(model)) == first and len(first) == 64
    edit(model)
    assert kvbits.identity(model) != first


def test_what_changes_no_key_changes_no_identity():
    model = tiny("llama")
    first = kvbits.identity(model)
    model.config._name_or_path, model.config.eos_token_id, model.config.use_cache = "elsewhere", 7, False
    KVCache.for_model(model, "int8")
    assert kvbits.identity(model) == first
    KVCache.detach(model)
    model.set_attn_implementation("sdpa")
    assert kvbits.identity(model.train()) == first, "without dropout, training computes the same"
    assert kvbits.identity(model) == kvbits.identity(torch.compile(model))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_long_pass_leaves_the_identity_as_it_was(kind):
    more = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 32}
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0} | (more if kind == "longrope" else {})
    model = tiny("llama", rope_parameters=rope, max_position_embeddings=64)
    first = kvbits.identity(model)
    with torch.no_grad():
        model(torch.ones(1, 100, dtype=torch.long))
    assert kvbits.identity(model) == first


class Packed(torch.Tensor):
    """Codes with scales beside them, as quantized weights are kept."""

    @staticmethod
    def __new__(cls, codes, scales):
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        made.codes, made.scales = codes, scales
        return made

    def __tensor_flatten__(self):
        return ["codes", "scales"], None

    @classmethod
    def __torch_dispatch__(cls, func, types_, args=(), kwargs=None):
        raise NotImplementedError(func)


def test_packed_weights_count_with_what_goes_with_them():
    model = tiny("llama")
    proj = model.model.layers[0].self_attn.v_proj
    del proj.weight
    proj.weight = Packed(torch.zeros(4, 4, dtype=torch.uint8), torch.ones(4))
    first = kvbits.identity(model)
    proj.weight.scales[2] = 3
    second = kvbits.identity(model)
    proj.weight.codes[1, 1] = 1
    assert len({first, second, kvbits.identity(model)}) == 3
    proj.weight = torch.zeros(4, 4, dtype=torch.uint8)
    proj.weight.quant_state = types.SimpleNamespace(
        absmax=torch.ones(2), state2=types.SimpleNamespace(code=torch.ones(1))
    )
    first = kvbits.identity(model)
    proj.weight.quant_state.state2.code[0] = 2
    assert kvbits.identity(model) != first


def test_an_edit_of_a_large_tensor_is_noticed_after_the_first_reading(monkeypatch):
    model = tiny("llama", vocab_size=9000)
    assert model.model.embed_tokens.weight.nbytes > mechanism.SMALL
    first = kvbits.identity(model)
    with torch.no_grad():
        model.model.embed_tokens.weight[17, 3] += 1  # torch counts it
    second = kvbits.identity(model)
    model.model.embed_tokens.weight.data.mul_(1.5)  # torch does not
    assert len({first, second, kvbits.identity(model)}) == 3
    assert kvbits.identity(model) == kvbits.identity(copy.deepcopy(model))


def test_a_hook_of_somebody_else_shares_nothing_until_it_is_named(tmp_path):
    model = tiny("llama")
    plain = kvbits.identity(model)

    def steering(strength):
        return model.model.layers[0].register_forward_hook(lambda module, args, out: out + strength)

    hook = steering(1.0)
    steered = kvbits.identity(model)
    assert steered == kvbits.identity(model) != plain
    hook.remove()
    assert kvbits.identity(model) == plain
    hook = steering(2.0)
    assert kvbits.identity(model) not in (plain, steered)
    named = kvbits.identity(model, made_for="towards 2.0")
    hook.remove()
    hook = steering(2.0)
    assert kvbits.identity(model, made_for="towards 2.0") == named != kvbits.identity(model, made_for="towards 1.0")
    store = PrefixStore(tmp_path)
    KVCache.from_prefix(model, IDS, store=store, scheme="raw", made_for="towards 2.0")
    here = KVCache.for_model(model, "raw", made_for="towards 2.0")
    other = KVCache.for_model(model, "raw", made_for="towards 1.0")
    assert store.match(here.pages, IDS[:, :-1]) == IDS.shape[1] - 1 and store.match(other.pages, IDS) == 0
    assert PrefixStore(tmp_path, made_for="mine").match(here.pages, IDS) == 0


def test_pages_of_a_model_that_changed_meanwhile_are_neither_stored_nor_saved(tmp_path):
    model = peft.get_peft_model(tiny("llama"), lora(), "a").eval()
    model.add_adapter("b", lora())
    cache = KVCache.for_model(model, "int8")
    model.set_adapter("b")
    with torch.no_grad():
        model(IDS, past_key_values=cache)
    for write in (lambda: PrefixStore(tmp_path / "s").put(cache, IDS), lambda: cache.save(tmp_path / "c")):
        with raises(CacheStateError, "kvbits.identity", "reset()"):
            write()
    model.set_adapter("a")
    for write in (lambda: PrefixStore(tmp_path / "s").put(cache, IDS), lambda: cache.save(tmp_path / "c")):
        with raises(CacheStateError, "kvbits.identity", "reset()"):
            write()
    cache.reset()
    with torch.no_grad():
        model(IDS, past_key_values=cache)
    cache.save(tmp_path / "c")
    KVCache.load(tmp_path / "c", model)
    model.set_adapter("b")
    with raises(FileFormatError, "kvbits.identity", "check_weights=False"):
        KVCache.load(tmp_path / "c", model)


@contextlib.contextmanager
def adapter_b(model):
    model.set_adapter("b")
    yield
    model.set_adapter("a")


@contextlib.contextmanager
def hooked(model):
    hook = model.get_base_model().model.layers[0].register_forward_hook(lambda module, args, out: out * 2)
    yield
    hook.remove()


@contextlib.contextmanager
def dropping(model):
    yield model.train()
    model.eval()


BETWEEN = {
    "another adapter": (adapter_b, {}),
    "none": (lambda model: model.disable_adapter(), {}),
    "another scale": (lambda model: peft.helpers.rescale_adapter_scale(model, 0.1), {}),
    "by name": (contextlib.nullcontext, {"adapter_names": ["b"]}),
    "a hook": (hooked, {}),
    "dropout": (dropping, {}),
}


@pytest.mark.parametrize("tokens", [50, 1])
@pytest.mark.parametrize("what", BETWEEN)
def test_a_pass_of_something_else_is_remembered_when_it_is_over(tmp_path, what, tokens):
    if tokens == 1 and what == "a hook":
        pytest.skip("single tokens look at adapters and training only")
    model = peft.get_peft_model(tiny("llama"), lora(lora_dropout=0.5), "a").eval()
    model.add_adapter("b", lora())
    model.eval()
    cache, (inside, more) = KVCache.for_model(model, "raw"), BETWEEN[what]
    with torch.no_grad():
        model(input_ids=IDS[:, :100], past_key_values=cache)
        assert PrefixStore(tmp_path / "s").put(cache, IDS) == 100
        with inside(model):
            model(input_ids=IDS[:, 100 : 100 + tokens], past_key_values=cache, **more)
        model(input_ids=IDS[:, 100 + tokens :], past_key_values=cache)
    for held in (cache, copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        with raises(CacheStateError, "kvbits.identity", "reset()"):
            PrefixStore(tmp_path / "s").put(held, IDS)
        with raises(CacheStateError, "kvbits.identity", "reset()"):
            held.save(tmp_path / "c")


def test_a_pass_of_another_model_and_of_a_copy(tmp_path):
    model, store = tiny("llama"), PrefixStore(tmp_path)
    other = copy.deepcopy(model)
    cache = KVCache.for_model(model, "raw")
    KVCache.for_model(other, "raw")
    with torch.no_grad():
        other(IDS, past_key_values=cache)
    assert store.put(cache, IDS) == 200, "a copy makes the same keys"
    other.model.layers[0].mlp.up_proj.weight.data.mul_(2)
    KVCache.for_model(other, "raw")
    fresh, restored = KVCache.for_model(model, "raw"), pickle.loads(pickle.dumps(cache))
    for held in (fresh, restored):
        with torch.no_grad():
            other(IDS, past_key_values=held)
        with raises(CacheStateError, "kvbits.identity", "reset()"):
            store.put(held, IDS.repeat(1, 2))


def test_a_cache_made_before_the_model_changed_loads_no_prefix(tmp_path):
    model = peft.get_peft_model(tiny("llama"), lora(), "a").eval()
    model.add_adapter("b", lora())
    store = PrefixStore(tmp_path)
    KVCache.from_prefix(model, IDS, store=store, scheme="raw")
    cache = KVCache.for_model(model, "raw")
    model.set_adapter("b")
    with raises(CacheStateError, "kvbits.identity"):
        store.load(cache.pages, IDS)
    model.set_adapter("a")
    assert store.load(cache.pages, IDS) == IDS.shape[1] - 1


STRENGTH = 1.0


def by_closure(model):
    strength = {"now": 1.0}
    model.model.layers[0].register_forward_hook(lambda module, args, out: out * strength["now"])
    return lambda: strength.update(now=2.0)


def by_object(model):
    steering = types.SimpleNamespace(vector=torch.ones(64))

    def hook(vector, module, args, out):
        return out + vector

    model.model.layers[0].register_forward_hook(functools.partial(hook, steering.vector))
    return lambda: steering.vector.mul_(3)


def by_global(model):
    def change():
        globals()["STRENGTH"] = 3.0

    model.model.layers[0].register_forward_hook(lambda module, args, out: out * STRENGTH)
    return change


def by_private_attribute(model):
    class Scaled(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self._by, self._offset = inner, 2.0, torch.zeros(64)

        def forward(self, x):
            return self.inner(x) * self._by + self._offset

    scaled = model.model.layers[0].mlp = Scaled(model.model.layers[0].mlp)
    return lambda: scaled._offset.add_(1)


@pytest.mark.parametrize("way", [by_closure, by_object, by_global, by_private_attribute])
def test_numbers_that_somebodys_hook_or_module_holds_count(way):
    model = tiny("llama")
    change = way(model)
    first = kvbits.identity(model)
    assert kvbits.identity(model) == first
    change()
    assert kvbits.identity(model) != first


def test_a_hook_of_every_module_counts():
    model = tiny("llama")
    first = kvbits.identity(model)
    hook = torch.nn.modules.module.register_module_forward_hook(lambda module, args, out: None)
    try:
        assert kvbits.identity(model) != first
    finally:
        hook.remove()
    assert kvbits.identity(model) == first


def test_an_attention_function_of_ones_own_counts_and_is_not_replaced():
    def doubled(module, query, key, value, mask, **options):
        return sdpa_attention_forward(module, query, key, 2 * value, mask, **options)

    AttentionInterface.register("doubled", doubled)
    model = tiny("llama")
    first = kvbits.identity(model)
    model.set_attn_implementation("doubled")
    assert kvbits.identity(model) != first
    with raises(UnsupportedError, "'doubled'", "model.set_attn_implementation('sdpa')", "dense=True"):
        KVCache.for_model(model, "raw")
    want = model.generate(IDS, max_new_tokens=5, do_sample=False)
    cache = KVCache.for_model(model, "raw", dense=True)
    assert torch.equal(model.generate(IDS, past_key_values=cache, max_new_tokens=5, do_sample=False), want)


def test_files_and_swapped_sequences_say_what_made_them(tmp_path, monkeypatch):
    model = tiny("llama")
    monkeypatch.setenv("HOME", str(tmp_path))
    cache, store = KVCache.for_model(model, "raw"), PrefixStore(tmp_path / "s")
    with torch.no_grad():
        model(inputs_embeds=torch.randn(1, 200, 64), past_key_values=cache)
    cache.save("~/c")
    assert (tmp_path / "c").is_file()
    swapped = cache.pages.swap_out(0)
    for held in (KVCache.load("~/c", model).pages, cache.pages):
        if held is cache.pages:
            held.swap_in(0, swapped)
        with raises(UnsupportedError, "inputs_embeds", "extra=", "put()", "load()"):
            store.put(held, IDS)
    model.model.layers[0].mlp.up_proj.weight.data.mul_(2)
    other = KVCache.for_model(model, "raw")
    with torch.no_grad():
        model(IDS, past_key_values=other)
    other.pages.free(0)
    with raises(DataError, "model"):
        other.pages.swap_in(0, swapped)


def test_a_calibration_of_another_model_of_the_same_shape_is_said():
    model = tiny("llama")
    made = calibrate(model, [IDS.repeat(1, 3)], schemes.get("klt4", head_dim=16))
    other = tiny("llama")
    with torch.no_grad():
        other.model.layers[0].self_attn.k_proj.weight[0] *= 3
    with warns(KvbitsWarning, "klt4", "kvbits calibrate"):
        KVCache.for_model(other, "klt4", calibration=made)
    assert made.suits(model) and not made.suits(other)


def test_the_embedded_model_serves_no_adapter_anothers_keys(tmp_path):
    model, _ = kvbits.load_model()
    model = peft.get_peft_model(model, lora(r=4), "a").eval()
    model.add_adapter("b", lora(r=4))
    store = PrefixStore(tmp_path)
    KVCache.from_prefix(model, IDS, store=store, scheme="raw")
    model.set_adapter("b")
    assert store.match(KVCache.for_model(model, "raw").pages, IDS) == 0
    model.set_adapter("a")
    assert store.match(KVCache.for_model(model, "raw").pages, IDS[:, :-1]) == IDS.shape[1] - 1
