"""Measures what the host and PyTorch's unfused kernels cost beside a model's matrix products, on one GPU or a CPU.

    python3 experiments/gpu/host_times.py --out host_times.json [--device cpu] [--seconds 150]

Needs torch and transformers alone; weights are random. Every section is written to the file before the next begins, so that a
short time leaves what it found. All times are seconds and medians of `repeats`.

Sections: `score` (one thread of the host), `launches` (operations that PyTorch launches, forward and backward), `graphs`
(replays of CUDA graphs), `copies` (a few tokens to and from the device), `rates` (bytes between host and device), `logits`
(log-probs and entropy over a vocabulary of 151,936 in fp32), `adam` (an update of 0.5B weights), `models`
(forward and training of Qwen2.5-0.5B and 1.5B, Qwen3-0.6B shapes by tokens: operations launched, seconds of host and device).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

SHAPES = {  # layers, hidden, intermediate, heads, kv heads, head size, vocabulary, tied embeddings
    "qwen2.5-0.5b": (24, 896, 4864, 14, 2, 64, 151936, True),
    "qwen2.5-1.5b": (28, 1536, 8960, 12, 2, 128, 151936, True),
    "qwen3-0.6b": (28, 1024, 3072, 16, 8, 128, 151936, True),
}
VOCABULARY = 151_936


class Operations(TorchDispatchMode):
    """The number of operations that reach a device, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.launched = 0
        self.by_name: dict[str, int] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if not function.is_view and "detach" not in str(function):
            self.launched += 1
            name = str(function).removeprefix("aten.")
            self.by_name[name] = self.by_name.get(name, 0) + 1
        return result


class Bench:
    """A device and the clock of its measurements."""

    def __init__(self, device: str, seconds: float, out: Path) -> None:
        self.device, self.out = device, out
        self.until_s = time.monotonic() + seconds
        self.record: dict[str, Any] = {}

    def sync(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def time(self, work: Callable[[], Any], repeats: int = 5, warm: int = 2) -> dict[str, float]:
        """Return the seconds until the host is done with a piece of work, of its processor, and until the device is."""
        for _ in range(warm):
            work()
        host, processor, device = [], [], []
        for _ in range(repeats):
            self.sync()
            began, used = time.perf_counter(), time.process_time()
            work()
            host.append(time.perf_counter() - began)
            processor.append(time.process_time() - used)
            self.sync()
            device.append(time.perf_counter() - began)
        names = ("host_s", "processor_s", "device_s")
        return dict(zip(names, map(statistics.median, (host, processor, device)), strict=True))

    def section(self, name: str, work: Callable[[], Any]) -> None:
        began = time.monotonic()
        if began > self.until_s:
            self.record[name] = "no time was left"
        else:
            try:
                self.record[name] = work()
            except Exception as error:  # the sections after it are worth as much
                self.record[name] = f"failed: {type(error).__name__}: {str(error)[:300]}"
        print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
        self.out.write_text(json.dumps(self.record, indent=1) + "\n")
        if self.device == "cuda":
            torch.cuda.empty_cache()


def score() -> dict[str, float]:
    """Return the seconds of three single-threaded loops, to compare hosts."""

    def python() -> int:
        total, names = 0, {}
        for i in range(1_000_000):
            names[i & 1023] = total
            total += len(str(i))
        return total

    times = {}
    for name, work in {
        "python_loop_s": python,
        "json_s": lambda: json.loads(json.dumps(list(range(500_000)))),
    }.items():
        taken = []
        for _ in range(5):
            began = time.process_time()
            work()
            taken.append(time.process_time() - began)
        times[name] = statistics.median(taken)
    return times


def launches(bench: Bench) -> dict[str, Any]:
    """Return the seconds an operation takes the host: 1,000 of a kind on a tensor too small to occupy the device."""
    count, small = 1000, torch.randn(64, 64, device=bench.device, dtype=torch.bfloat16)
    weight = torch.randn(64, 64, device=bench.device, dtype=torch.bfloat16, requires_grad=True)
    result = {}
    works = {
        "add": lambda: small + small,
        "matmul": lambda: small @ small,
        "linear": lambda: torch.nn.functional.linear(small, small),
    }
    works |= {
        "silu": lambda: torch.nn.functional.silu(small),
        "cast": lambda: small.float(),
        "view": lambda: small.view(4096),
    }
    for name, one in works.items():

        def many(one: Callable[[], Any] = one) -> None:
            with torch.no_grad():
                for _ in range(count):
                    one()

        result[name] = {key: value / count for key, value in bench.time(many).items()}

    def chain() -> torch.Tensor:
        y = small
        for _ in range(count):
            y = y @ weight
        return y

    result["matmul recorded by autograd"] = {k: v / count for k, v in bench.time(chain).items()}

    def backward() -> None:
        y = chain().sum()
        bench.sync()
        backward.began = time.perf_counter()  # type: ignore[attr-defined]
        y.backward()
        backward.took = time.perf_counter() - backward.began  # type: ignore[attr-defined]
        bench.sync()
        backward.done = time.perf_counter() - backward.began  # type: ignore[attr-defined]

    host, device = [], []
    for _ in range(5):
        backward()
        host.append(backward.took / count)  # type: ignore[attr-defined]
        device.append(backward.done / count)  # type: ignore[attr-defined]
    result["backward of a matmul (two products, one sum)"] = {
        "host_s": statistics.median(host),
        "device_s": statistics.median(device),
    }
    return result


def graphs(bench: Bench) -> dict[str, Any]:
    """Return the seconds of replaying CUDA graphs of tiny kernels, by their number."""
    if bench.device != "cuda":
        return {"none": "CUDA alone"}
    result = {}
    small = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
    for nodes in (1, 100, 300, 1000):
        y = small.clone()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            y.add_(1)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(nodes):
                y.add_(1)
        result[nodes] = bench.time(graph.replay, repeats=20)
    return result


def copies(bench: Bench) -> dict[str, Any]:
    """Return the seconds of moving a few tokens: to the device from pinned and pageable memory, and back with a wait."""
    result = {}
    for count in (1, 128, 512, 8192):
        here = torch.arange(count, dtype=torch.int64)
        there = here.to(bench.device)
        result[f"to_list {count}"] = bench.time(lambda there=there: there.tolist(), repeats=50)
        if bench.device == "cuda":
            pinned, back = here.pin_memory(), torch.empty(count, dtype=torch.int64, pin_memory=True)
            result[f"pinned to device {count}"] = bench.time(
                lambda p=pinned: p.to("cuda", non_blocking=True), repeats=50
            )
            result[f"pageable to device {count}"] = bench.time(
                lambda h=here: h.to("cuda"), repeats=50
            )

            def wait(there: torch.Tensor = there, back: torch.Tensor = back) -> None:
                back.copy_(there, non_blocking=True)
                event = torch.cuda.Event()
                event.record()
                event.synchronize()

            result[f"back to pinned and wait {count}"] = bench.time(wait, repeats=50)
    return result


def rates(bench: Bench) -> dict[str, Any]:
    """Return bytes a second between host and device, of 1 GiB."""
    if bench.device != "cuda":
        return {"none": "CUDA alone"}
    size = 2**30
    pageable = torch.ones(size, dtype=torch.uint8)
    began = time.perf_counter()
    pinned = pageable.pin_memory()
    result = {"pin_memory_s of 1 GiB": time.perf_counter() - began}
    there = torch.empty(size, dtype=torch.uint8, device="cuda")
    works = {
        "pinned to device": lambda: there.copy_(pinned, non_blocking=True),
        "pageable to device": lambda: there.copy_(pageable),
        "device to pinned": lambda: pinned.copy_(there, non_blocking=True),
        "device to pageable": lambda: pageable.copy_(there),
        "within the device": lambda: there.clone(),
    }
    for name, work in works.items():
        result[f"{name}, bytes_per_s"] = size / bench.time(work, repeats=3, warm=1)["device_s"]
    return result


def logits(bench: Bench, counts: tuple[int, ...]) -> dict[str, Any]:
    """Return the seconds of log-probs and entropy from bf16 logits, the ways that trainers write them."""
    result = {}
    for tokens in counts:
        scores = torch.randn(tokens, VOCABULARY, device=bench.device, dtype=torch.bfloat16)
        labels = torch.randint(VOCABULARY, (tokens,), device=bench.device)

        def log_softmax(x: torch.Tensor = scores, y: torch.Tensor = labels) -> torch.Tensor:
            return torch.log_softmax(x.float(), -1).gather(-1, y[:, None])[:, 0]

        def log_sum_exp(x: torch.Tensor = scores, y: torch.Tensor = labels) -> torch.Tensor:
            return x.gather(-1, y[:, None])[:, 0].float() - torch.logsumexp(x.float(), -1)

        def entropy(x: torch.Tensor = scores) -> torch.Tensor:
            x = x.float()
            p = torch.softmax(x, -1)
            return torch.logsumexp(x, -1) - (p * x).sum(-1)

        def temperature(x: torch.Tensor = scores) -> torch.Tensor:
            return x.div(1.0)

        for work in (log_softmax, log_sum_exp, entropy, temperature):
            result[f"{work.__name__} {tokens}"] = bench.time(work, repeats=3)
        if bench.device == "cuda":
            x = scores.detach().requires_grad_()

            def training(x: torch.Tensor = x, y: torch.Tensor = labels) -> None:
                (
                    torch.log_softmax(x.float(), -1).gather(-1, y[:, None]).sum() + entropy(x).sum()
                ).backward()
                x.grad = None

            def cross_entropy(x: torch.Tensor = x, y: torch.Tensor = labels) -> None:
                torch.nn.functional.cross_entropy(x.float(), y).backward()
                x.grad = None

            result[f"log-probs, entropy and backward {tokens}"] = bench.time(training, repeats=3)
            result[f"cross entropy and backward {tokens}"] = bench.time(cross_entropy, repeats=3)
    return result


def model_of(name: str, device: str) -> Any:
    """Return a random model of the shape, as transformers writes it, in bf16 with scaled-dot-product attention."""
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    layers, hidden, inner, heads, kv_heads, head, vocabulary, tied = SHAPES[name]
    kind, config = (
        (Qwen3ForCausalLM, Qwen3Config)
        if name.startswith("qwen3")
        else (Qwen2ForCausalLM, Qwen2Config)
    )
    shape = config(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=32768,
    )
    shape._attn_implementation = "sdpa"
    with torch.device(device):
        model = kind(shape)
    return model.to(torch.bfloat16)


def models(bench: Bench, names: list[str], batches: list[tuple[int, int]]) -> dict[str, Any]:
    """Return operations and seconds of forward and training (recomputed and not) for batches of sequences × tokens. `body` is
    the model without its head, so that the logits' own cost stays apart."""
    result: dict[str, Any] = {}
    for name in names:
        model = model_of(name, bench.device)
        rows = result[name] = {}
        for sequences, length in batches:
            ids = torch.randint(1000, (sequences, length), device=bench.device)

            def forward(model: Any = model, ids: torch.Tensor = ids) -> Any:
                with torch.no_grad():
                    return model.model(ids, use_cache=False).last_hidden_state

            def train(model: Any = model, ids: torch.Tensor = ids) -> None:
                model.model(
                    ids, use_cache=False
                ).last_hidden_state.float().square().mean().backward()
                model.zero_grad(set_to_none=True)

            for kind, work in {
                "forward": forward,
                "training": train,
                "training, recomputed": train,
            }.items():
                model.train(kind != "forward")
                if kind.endswith("recomputed"):
                    model.gradient_checkpointing_enable(
                        gradient_checkpointing_kwargs={"use_reentrant": False}
                    )
                try:
                    times = bench.time(work, repeats=3)
                    if length == batches[0][1]:
                        with Operations() as operations:
                            work()
                        times["operations"] = operations.launched
                    rows[f"{kind} {sequences}x{length}"] = times
                except torch.OutOfMemoryError:
                    rows[f"{kind} {sequences}x{length}"] = "out of memory"
                model.gradient_checkpointing_disable()
            if time.monotonic() > bench.until_s:
                return result
        if bench.device == "cuda":
            torch.cuda.empty_cache()
    return result


def adam(bench: Bench) -> dict[str, Any]:
    """Return the seconds of an AdamW update of 290 tensors with 0.5B weights in fp32, and of clipping the gradients."""
    result = {}
    for where in dict.fromkeys((bench.device, "cpu")):
        tensors = [
            torch.nn.Parameter(torch.zeros(1_700_000, device=where))
            for _ in range(290 if where == "cuda" else 60)
        ]
        for tensor in tensors:
            tensor.grad = torch.ones_like(tensor)
        weights = sum(tensor.numel() for tensor in tensors)
        for kind in ({"foreach": True}, {"fused": True}, {"foreach": False}):
            optimizer = torch.optim.AdamW(tensors, lr=1e-6, **kind)
            if where == "cpu" and kind == {"foreach": True}:
                continue
            result[f"{where}, {kind}, {weights / 1e9:.2f}B weights"] = bench.time(
                optimizer.step, repeats=3, warm=1
            )
            del optimizer
        result[f"{where}, clip_grad_norm_"] = bench.time(
            lambda t=tensors: torch.nn.utils.clip_grad_norm_(t, 1.0), repeats=3, warm=1
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--seconds", type=float, default=150.0, help="sections begin within this time"
    )
    args = parser.parse_args()
    bench = Bench(args.device, args.seconds, args.out)
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else "none"
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next(
        (line.partition(": ")[2] for line in lines if line.startswith("model name")),
        platform.processor(),
    )
    bench.record["here"] = {
        "gpu": gpu,
        "cpu": cpu,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    small = args.device == "cpu"
    bench.section("score", score)
    bench.section("launches", lambda: launches(bench))
    bench.section("graphs", lambda: graphs(bench))
    bench.section("copies", lambda: copies(bench))
    bench.section("logits", lambda: logits(bench, (16,) if small else (1024, 8192)))
    bench.section("rates", lambda: rates(bench))
    bench.section("adam", lambda: adam(bench))
    batches = (
        [(1, 64)] if small else [(1, 64), (1, 1024), (1, 4096), (8, 512), (4, 4096), (2, 16384)]
    )
    bench.section("models", lambda: models(bench, list(SHAPES)[: 1 if small else 3], batches))


if __name__ == "__main__":
    main()
