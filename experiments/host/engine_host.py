"""Measures what a decode pass of vLLM takes the host beside its kernels, without a GPU: a tiny model on
vLLM's CPU build, stepped in this process, with the seconds of its parts apart.

    python3 experiments/host/engine_host.py --out engine_host.json [--counts 1,8,32,128,256,512,1024]

Needs vLLM's CPU build alone. A batch of n equal requests decodes; every pass is timed on this thread's
processor clock, and so are the parts in it, by wrapping the functions that do them:

    schedule   the scheduler's choice of the pass
    kernels    the model's forward pass, and the sampler (on a GPU these are the device's)
    worker     all else of the model runner: its inputs, copies of sampled tokens into lists
    update     the scheduler's account of the sampled tokens
    output     what the front end makes of them: texts, log-probs, outputs (a process of its own behind AsyncLLM)
    message    encoding and decoding the outputs between the core's and the front end's processes
    executor   pickling and unpickling what goes to workers in other processes, and what comes back

So the host's time of a pass is schedule + worker + update (+ output, where all is one process). Medians over the passes of a
batch and over repeats; `score` is the same loop as in experiments/gpu/host_times.py, before and after.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

PARTS = ("schedule", "kernels", "worker", "update", "output", "message", "executor")
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "log-probs": {"logprobs": 0},
    "texts": {"detokenize": True},
    "texts, stop string": {"detokenize": True, "stop": ["never this"]},
}
PASSES, REPEATS = 40, 3
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


class Clock:
    """Seconds of this thread's processor by part, since the last `take`; a part in another one is not counted in that one."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self._inner: list[float] = []

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """Count the time of a method of an object as a part."""
        method: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            self._inner.append(0.0)
            try:
                return method(*args, **kwargs)
            finally:
                taken = time.thread_time() - began
                self.spent[part] += taken - self._inner.pop()
                if self._inner:
                    self._inner[-1] += taken

        setattr(owner, name, timed)

    def take(self) -> dict[str, float]:
        spent = {part: self.spent[part] for part in PARTS}
        self.spent.clear()
        return spent


def score() -> float:
    """Return the seconds of a loop of plain Python on one thread."""
    taken = []
    for _ in range(5):
        began, total, names = time.process_time(), 0, {}
        for i in range(1_000_000):
            names[i & 1023] = total
            total += len(str(i))
        taken.append(time.process_time() - began)
    return statistics.median(taken)


def line(rows: dict[int, float]) -> dict[str, float]:
    """Return the least-squares line through seconds by sequences, weighed by 1 / seconds²: each row counts by its share."""
    weights = {n: 1 / max(s, 1e-9) ** 2 for n, s in rows.items()}
    sums = [sum(w * n**k for n, w in weights.items()) for k in range(3)]
    value = [sum(w * n**k * rows[n] for n, w in weights.items()) for k in range(2)]
    slope = (sums[0] * value[1] - sums[1] * value[0]) / (sums[0] * sums[2] - sums[1] ** 2)
    return {"pass_s": (value[0] - slope * sums[1]) / sums[0], "sequence_s": slope}


def tokenizer(folder: Path) -> None:
    """Write a tokenizer of as many words as the model's vocabulary."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel
    from tokenizers.models import WordLevel

    words = {f"w{i}": i for i in range(CONFIG["vocab_size"])}  # type: ignore[call-overload]
    made = Tokenizer(WordLevel(words, unk_token="w0"))
    made.decoder = ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    special = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "eos_token": "w1"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))


def engine(folder: Path, most: int) -> Any:
    from vllm import LLM

    (folder / "config.json").write_text(json.dumps(CONFIG))
    tokenizer(folder)
    return LLM(
        model=str(folder),
        load_format="dummy",
        max_model_len=1024,
        max_num_seqs=most,
        max_num_batched_tokens=8192,
        enable_prefix_caching=True,
        generation_config="vllm",
        dtype="float32",
        enforce_eager=True,
        async_scheduling=False,
        disable_log_stats=True,
    ).llm_engine


def watched(of: Any) -> tuple[Clock, Any]:
    """Return a clock of an engine's parts, and the engine's core."""
    clock, core = Clock(), of.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    clock.wrap(core.scheduler, "schedule", "schedule")
    clock.wrap(core.scheduler, "update_from_output", "update")
    clock.wrap(runner, "execute_model", "worker")
    if hasattr(runner, "sample_tokens"):
        clock.wrap(runner, "sample_tokens", "worker")
    clock.wrap(runner.model, "forward", "kernels")
    clock.wrap(runner.model, "compute_logits", "kernels")
    clock.wrap(runner.sampler, "forward", "kernels")
    clock.wrap(of.output_processor, "process_outputs", "output")
    return clock, core


def messages(clock: Clock, core: Any) -> None:
    """Encode and decode the core's outputs as between processes, and count that as a part."""
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    encoder, decoder, update = (
        MsgpackEncoder(),
        MsgpackDecoder(EngineCoreOutputs),
        core.scheduler.update_from_output,
    )

    def sent(*args: Any, **kwargs: Any) -> Any:
        outputs = update(*args, **kwargs)
        began = time.thread_time()
        for one in outputs.values():
            decoder.decode(encoder.encode(one))
        clock.spent["message"] += time.thread_time() - began
        return outputs

    core.scheduler.update_from_output = sent


def pickled(clock: Clock, core: Any) -> None:
    """Pickle and unpickle what goes to the workers and comes back, and count that as a part."""
    executor = core.model_executor

    def there_and_back(method: Callable[..., Any]) -> Callable[..., Any]:
        def sent(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            pickle.loads(pickle.dumps(scheduled))  # of this process's own making
            clock.spent["executor"] += time.thread_time() - began
            returned = method(scheduled, *args, **kwargs)
            began = time.thread_time()
            result = returned.result() if hasattr(returned, "result") else returned
            pickle.loads(pickle.dumps(result))
            clock.spent["executor"] += time.thread_time() - began
            return returned

        return sent

    for name in ("execute_model", "sample_tokens"):
        if hasattr(executor, name):
            setattr(executor, name, there_and_back(getattr(executor, name)))


def passes(of: Any, clock: Clock, way: str, count: int) -> dict[str, float]:
    """Return the median seconds of the parts of decode passes of `count` sequences."""
    from vllm import SamplingParams

    settings = {
        "temperature": 1.0,
        "ignore_eos": True,
        "max_tokens": PASSES + 8,
        "min_tokens": PASSES + 8,
    }
    sampling = SamplingParams(**{**settings, "detokenize": False, **WAYS[way]})
    rows: dict[str, list[float]] = defaultdict(list)
    for repeat in range(REPEATS):
        for i in range(count):
            prompt = {"prompt_token_ids": [3 + i % 200, *range(5, 20)]}
            of.add_request(f"{way}-{count}-{repeat}-{i}", prompt, sampling)
        for _ in range(4):
            of.step()
        for _ in range(PASSES):
            clock.take()
            began = time.thread_time()
            of.step()
            whole = time.thread_time() - began
            spent = clock.take()
            for part, seconds in spent.items():
                rows[part].append(seconds)
            rows["other"].append(whole - sum(spent.values()))
        while of.has_unfinished_requests():
            of.step()
    return {part: statistics.median(seconds) for part, seconds in rows.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--counts", default="1,8,32,128,256,512,1024")
    args = parser.parse_args()
    counts = [int(count) for count in args.counts.split(",")]
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch
    import vllm

    torch.set_num_threads(1)
    record: dict[str, Any] = {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "python_loop_s before": score(),
    }
    with tempfile.TemporaryDirectory() as folder:
        of = engine(Path(folder), max(counts))
        clock, core = watched(of)
        messages(clock, core)
        pickled(clock, core)
        record["ways"] = {}
        for way in WAYS:
            rows = {count: passes(of, clock, way, count) for count in counts}
            parts = (*PARTS, "other")
            lines = {part: line({n: row[part] for n, row in rows.items()}) for part in parts}
            record["ways"][way] = {"passes": rows, "lines": lines}
            args.out.write_text(json.dumps(record, indent=1) + "\n")
    record["python_loop_s after"] = score()
    args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
