"""An engine for the loads of benchmarks/loads.py that is a clock and a queue."""

from __future__ import annotations

from dataclasses import dataclass, field

from loads import Update


@dataclass
class QueueEngine:
    """A step takes 10 ms and 1 ms for each answer under way, and 20 us for each token of a prompt that is not in its
    cache of prefixes; `slots` run at once.
    """

    slots: int = 8
    cached: int = 0
    clock: float = 100.0
    waiting: list = field(default_factory=list)
    running: dict = field(default_factory=dict)
    seen: list = field(default_factory=list)
    most: int = 0

    def now(self):
        return self.clock

    def wait(self, seconds):
        self.clock += seconds + 1e-9

    def add(self, request):
        self.seen.append(request)
        self.waiting.append(request)

    def step(self):
        new = [self.waiting.pop(0) for _ in range(min(self.slots - len(self.running), len(self.waiting)))]
        self.running |= {r.name: [r, 0] for r in new}
        self.most = max(self.most, len(self.running))
        self.clock += 0.01 + 0.001 * len(self.running) + 2e-5 * sum(max(0, len(r.prompt) - self.cached) for r in new)
        for name, at in list(self.running.items()):
            at[1] += 1
            finished = at[1] == at[0].answer
            if finished:
                del self.running[name]
            yield Update(name, [7], finished, min(self.cached, len(at[0].prompt)))

    def busy(self):
        return bool(self.waiting or self.running)

    def abort(self, names):
        assert set(names) == {r.name for r in self.waiting} | set(self.running)
        self.waiting, self.running = [], {}
