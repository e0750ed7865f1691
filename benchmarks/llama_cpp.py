"""The same greedy completions by llama.cpp and by the embedded engine: ``python -m
benchmarks.llama_cpp --help``, in an environment with ``llama-cpp-python`` and ``gguf``.

Both take 16 sequences in one batch, llama.cpp by its C interface. Models have random weights in the
shapes of published ones; llama.cpp reads the file that ``tunesmith export`` writes of the same model.
A round takes every arm once, in turn, each in a process of its own. A ratio is llama.cpp's seconds
over the engine's in the same round: above 1 the engine is faster. With ``--threads 1`` they are the
CPU's seconds, which other programs disturb least. ``--kind`` writes the record of CPUs of that kind.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import gmtime, strftime
from typing import Any

from benchmarks.limits import KINDS
from benchmarks.report import README, write_between
from benchmarks.run import machine
from tunesmith.config.engines import EngineWeights

RESULTS = Path(__file__).with_name("results")
END = "<!-- end of llama.cpp -->"
SEQUENCES = 16
PROMPT = 16
FIRST_TOKEN = 261
"""After the special ones and the bytes."""
FORMS: dict[str, EngineWeights] = {"f32": "model", "f16": "float16", "q8_0": "int8"}
"""llama.cpp's number formats, and the ``system.engine_weights`` of a model in float32 that each is
compared with."""
SMOLLM2: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1_536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
QWEN: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4_864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
SHAPES = {"SmolLM2-135M": (SMOLLM2, 64), "Qwen2.5-0.5B": (QWEN, 24)}
"""A model's shape, and the tokens of a completion."""


def build(name: str, folder: Path) -> None:
    """The model of a shape in every format, where it is not there yet."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    from tunesmith.models.gguf.writing import export_gguf

    path = folder / name
    if not path.exists():
        torch.manual_seed(0)
        config = AutoConfig.for_model(**SHAPES[name][0], bos_token_id=1, eos_token_id=2)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(path)
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokens = ["<pad>", "<bos>", "<eos>", *alphabet, "ab"]
        vocabulary = {token: number for number, token in enumerate(tokens)}
        core = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        special = {f"{role}_token": f"<{role}>" for role in ("pad", "bos", "eos")}
        PreTrainedTokenizerFast(tokenizer_object=core, **special).save_pretrained(path)
    for form in FORMS:
        file = folder / f"{name}-{form}.gguf"
        if not file.exists():
            export_gguf(str(path), file, form)  # pyright: ignore


def clock_of(threads: int) -> Callable[[], float]:
    """Of one thread the CPU's seconds, which other programs disturb least."""
    return time.process_time if threads == 1 else time.perf_counter


def prompts(name: str, seed: int) -> list[list[int]]:
    vocabulary = SHAPES[name][0]["vocab_size"]
    rng = random.Random(seed)
    return [rng.choices(range(FIRST_TOKEN, vocabulary), k=PROMPT) for _ in range(SEQUENCES)]


async def by_tunesmith(path: Path, name: str, rounded: EngineWeights, threads: int) -> float:
    """Seconds, after a few tokens that are not counted."""
    import torch

    from tunesmith.models.causal_lm import CausalLM
    from tunesmith.run.engines.local.engine import LocalEngine
    from tunesmith.types import Sampling

    torch.set_num_threads(threads)
    clock = clock_of(threads)
    tokens = SHAPES[name][1]
    engine = LocalEngine(
        CausalLM.load(path, dtype=torch.float32),
        kv_bytes=1 << 28,
        max_running=SEQUENCES,
        max_prefill_tokens=SEQUENCES * PROMPT,
        rounded=rounded,
    )
    await engine.load_weights(0)  # they are prepared when the first tokens are sampled
    seconds = 0.0
    for number in range(2):
        sampling = Sampling(tokens if number else 4, temperature=0.0, ignore_eos=True)
        started = clock()
        await asyncio.gather(*(engine.generate(p, sampling) for p in prompts(name, number)))
        seconds = clock() - started
    await engine.close()
    return seconds


def by_llama_cpp(path: Path, name: str, threads: int) -> float:
    """Seconds, after a few tokens that are not counted."""
    import numpy as np

    cpp: Any = import_module("llama_cpp")
    clock = clock_of(threads)
    tokens = SHAPES[name][1]
    vocabulary = SHAPES[name][0]["vocab_size"]
    quiet = cpp.llama_log_callback(lambda *_: None)
    cpp.llama_log_set(quiet, None)
    cpp.llama_backend_init()
    model = cpp.llama_model_load_from_file(str(path).encode(), cpp.llama_model_default_params())
    settings = cpp.llama_context_default_params()
    settings.n_ctx = SEQUENCES * 256
    settings.n_seq_max = SEQUENCES
    settings.n_threads = settings.n_threads_batch = threads
    context = cpp.llama_init_from_model(model, settings)
    batch = cpp.llama_batch_init(SEQUENCES * PROMPT, 0, 1)

    def decode(rows: Sequence[tuple[int, int, int, bool]]) -> list[int]:
        """Most likely tokens after the rows that ask for them; a row is sequence, position, token
        and whether it asks."""
        batch.n_tokens = len(rows)
        for place, (sequence, position, token, asks) in enumerate(rows):
            batch.token[place] = token
            batch.pos[place] = position
            batch.n_seq_id[place] = 1
            batch.seq_id[place][0] = sequence
            batch.logits[place] = asks
        assert cpp.llama_decode(context, batch) == 0
        asked = [place for place, row in enumerate(rows) if row[3]]
        logits = (cpp.llama_get_logits_ith(context, place) for place in asked)
        return [int(np.ctypeslib.as_array(row, (vocabulary,)).argmax()) for row in logits]

    seconds = 0.0
    for number in range(2):
        cpp.llama_memory_clear(cpp.llama_get_memory(context), True)
        started = clock()
        last = PROMPT - 1
        drawn = decode(
            [
                (sequence, position, token, position == last)
                for sequence, prompt in enumerate(prompts(name, number))
                for position, token in enumerate(prompt)
            ]
        )
        for position in range(PROMPT, PROMPT + (tokens if number else 4) - 1):
            rows = [(sequence, position, token, True) for sequence, token in enumerate(drawn)]
            drawn = decode(rows)
        seconds = clock() - started
    return seconds


def arm(name: str, form: str, folder: Path, threads: int) -> float:
    """Seconds of one arm, in this process: a number format of llama.cpp, or the engine's."""
    if form in FORMS:
        return by_llama_cpp(folder / f"{name}-{form}.gguf", name, threads)
    rounded = {str(each): each for each in FORMS.values()}
    return asyncio.run(by_tunesmith(folder / name, name, rounded[form], threads))


def measured(name: str, folder: Path, threads: int) -> dict[str, float]:
    """Seconds of every arm in one round."""
    seconds = dict[str, float]()
    for form in (form for pair in FORMS.items() for form in pair):
        command = [sys.executable, "-m", "benchmarks.llama_cpp", "--folder", str(folder)]
        command += ["--arm", form, "--shapes", name, "--threads", str(threads)]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
        seconds[form] = json.loads(done.stdout.splitlines()[-1])
        print(f"{name} {form}: {seconds[form]:.2f} s", flush=True)
    return seconds


def table(results: dict[str, Any]) -> str:
    cpu = results["machine"]
    rows = [
        f"{cpu['cpu']} ({cpu['units']}), {results['threads']} threads; llama-cpp-python "
        f"{results['llama-cpp-python']}; medians of rounds; {results['date']}",
        "",
        "| shape | rounds | llama.cpp | tokens/s | ours | tokens/s | llama.cpp ÷ ours |",
        "| --- | ---: | --- | ---: | --- | ---: | ---: |",
    ]
    for name, rounds in results["rounds"].items():
        tokens = SEQUENCES * SHAPES[name][1]
        for form, ours in FORMS.items():
            theirs, own = (tokens / median(r[arm] for r in rounds) for arm in (form, ours))
            ratio = median(r[form] / r[ours] for r in rounds)
            rows.append(
                f"| {name} | {len(rounds)} | {form} | {theirs:.0f} | "
                f"{'float32' if ours == 'model' else ours} | {own:.0f} | {ratio:.2f} |"
            )
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.llama_cpp", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="keeps the models")
    parser.add_argument("--shapes", nargs="+", default=[*SHAPES], choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--build", action="store_true", help="only make the models")
    parser.add_argument("--kind", choices=KINDS, help="of this CPU: write its record")
    parser.add_argument("--add", action="store_true", help="keep the rounds on record")
    parser.add_argument("--arm", help="only print the seconds of this number format")
    given = parser.parse_args(arguments)
    if given.add and not given.kind:
        parser.error("--add adds to the record of --kind")
    if given.arm:
        print(json.dumps(arm(given.shapes[0], given.arm, given.folder, given.threads)))
        return
    for name in given.shapes:
        build(name, given.folder)
    if given.build:
        return
    record = RESULTS / f"llama-cpp-{given.kind}.json"
    rounds = json.loads(record.read_text())["rounds"] if given.add else {}
    for name in given.shapes * given.rounds:
        rounds.setdefault(name, []).append(measured(name, given.folder, given.threads))
    results = {
        "machine": machine([]),
        "threads": given.threads,
        "llama-cpp-python": version("llama-cpp-python"),
        "date": strftime("%Y-%m-%d", gmtime()),
        "rounds": rounds,
    }
    print(table(results))
    if given.kind:
        record.write_text(json.dumps(results, indent=1) + "\n")
        write_between(README, f"<!-- llama.cpp: {given.kind} -->\n", END, table(results))


if __name__ == "__main__":
    main()
