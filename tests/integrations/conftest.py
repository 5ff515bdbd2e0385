"""Models and engines of vLLM for tests inside it (`inside_vllm`); files about something else have a `model` of their
own.
"""

import gc

import pytest


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(model, its folder) by a name of `judged.MODELS`."""
    from integrations import judged, vllm_cpu

    made = {}

    def get(name: str):
        if name not in made:
            found = judged.MODELS[name]()
            made[name] = found, vllm_cpu.save(found, tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.fixture(scope="module")
def calibration(model, tmp_path_factory):
    """Calibrations of these models by scheme, each with its file."""
    from integrations import judged

    made = {}

    def get(name: str, scheme="klt4"):
        key = name, scheme if isinstance(scheme, str) else scheme.name
        if key not in made:
            made[key] = judged.calibrated(
                model(name)[0], scheme, tmp_path_factory.mktemp("calibration") / "c.safetensors"
            )
        return made[key]

    return get


@pytest.fixture
def reference_ops(monkeypatch):
    """Run the plugin as on a GPU, by the reference operations."""
    from integrations import vllm_cpu

    vllm_cpu.as_on_a_gpu(monkeypatch)


@pytest.fixture
def engine(model):
    """Engines by model, dtype and options; the last one goes before the next one comes."""
    from integrations import vllm_cpu
    from vllm.distributed import cleanup_dist_env_and_memory

    started = []

    def start(name: str, dtype: str, /, **options):
        started.append(vllm_cpu.engine(model(name)[1], dtype, **options))
        return started[-1]

    yield start
    for llm in started:
        llm.llm_engine.engine_core.shutdown()
    started.clear()
    gc.collect()
    cleanup_dist_env_and_memory()
    vllm_cpu.set_aside()
