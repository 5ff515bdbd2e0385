"""Two processes: one computes a prompt, the other goes on with it. What goes over the socket is the few-bit pages themselves, which attention then reads.

python examples/prefill_decode.py [MODEL]

Without a model the small one of examples/generate.py. Both processes load it; a page of another model, scheme or version would be refused before it is sent.
"""

import socket
import subprocess
import sys
import time

import torch

import kvbits
from kvbits.store.stream import Receiver, Sender

SCHEME = "int8_centered"
TEXT = "The lighthouse keeper wrote down the weather every morning, and every morning it was different. " * 40


def prefill(port: int, name: str | None) -> None:
    """Compute the prompt but its last token, and send its pages."""
    model, tokenizer = kvbits.load_model(name)
    ids = tokenizer(TEXT, return_tensors="pt").input_ids[:, :-1]
    cache = kvbits.KVCache.for_model(model, SCHEME)
    with torch.no_grad():
        model.base_model(ids, past_key_values=cache)
    sender = Sender(cache, ids)
    for _ in range(5):  # a broken connection goes on where it was
        try:
            with socket.create_connection(("127.0.0.1", port)) as connection:
                return sender.send(connection)
        except ConnectionError as error:
            print(f"prefill: {error}; once more", file=sys.stderr)
            time.sleep(1)


def decode(name: str | None) -> None:
    """Start the other process, take its pages and generate."""
    model, tokenizer = kvbits.load_model(name)
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    cache = kvbits.KVCache.for_model(model, SCHEME)
    receiver = Receiver(cache.store)
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = subprocess.Popen([sys.executable, __file__, "--prefill", str(server.getsockname()[1]), *([name] if name else [])])
        connection, _ = server.accept()
        start = time.perf_counter()
        with connection:
            received = receiver.receive(connection)
        seconds = time.perf_counter() - start
    assert received == ids[0, :-1].tolist()
    held, plain = cache.store.spec.nbytes(len(received)), cache.store.spec.raw_nbytes(len(received), 1, model.dtype.itemsize)
    print(f"{len(received)} tokens arrived in {seconds:.3f} s: {held:,} bytes, in {model.dtype} {plain:,}")
    cache = kvbits.KVCache(cache.store)
    answer = model.generate(ids, past_key_values=cache, max_new_tokens=20, do_sample=False)
    print(tokenizer.decode(answer[0, ids.shape[1] :]))
    sys.exit(other.wait())


if __name__ == "__main__":
    if "--prefill" in sys.argv:
        prefill(int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None)
    else:
        decode(sys.argv[1] if len(sys.argv) > 1 else None)
