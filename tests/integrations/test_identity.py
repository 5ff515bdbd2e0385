"""Models that make other keys of the same tokens have other identities, and share no pages."""

import copy
import types

import peft
import pytest
import torch
from integrations.test_huggingface import tiny
from peft.tuners.tuners_utils import BaseTunerLayer

import kvbits
from kvbits import KVCache, PrefixStore, schemes
from kvbits.calibrate import calibrate
from kvbits.errors import CacheStateError, FileFormatError, KvbitsWarning
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
        with pytest.raises(CacheStateError, match=r"kvbits.identity"):
            write()
    model.set_adapter("a")
    cache.save(tmp_path / "c")
    KVCache.load(tmp_path / "c", model)
    model.set_adapter("b")
    with pytest.raises(FileFormatError, match="check_weights=False"):
        KVCache.load(tmp_path / "c", model)


def test_a_calibration_of_another_model_of_the_same_shape_is_said():
    model = tiny("llama")
    made = calibrate(model, [IDS], schemes.get("klt4", head_dim=16))
    other = tiny("llama")
    with torch.no_grad():
        other.model.layers[0].self_attn.k_proj.weight[0] *= 3
    with pytest.warns(KvbitsWarning, match="another model of the same shape"):
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
