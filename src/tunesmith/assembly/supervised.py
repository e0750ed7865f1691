"""The commands that train on given data: what each reads, and the order of their runs.

What is built of the data, once a model may load, is in ``supervised_parts``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tunesmith.assembly.checking import checked
from tunesmith.assembly.common import load_tokenizer
from tunesmith.assembly.opening import (
    RunResult,
    checkpoint_to_resume,
    keep_and_tell,
    make_ready,
    open_session,
    run_result,
)
from tunesmith.assembly.rl import run_rl
from tunesmith.config.distillation import DistillConfig, OfflineDistillConfig
from tunesmith.config.load import find_kind
from tunesmith.config.preference import DPOConfig, KTOConfig, PRMConfig, RMConfig
from tunesmith.config.schema import DataSection, RunConfig, SFTConfig
from tunesmith.config.section import known
from tunesmith.data.packing import num_forest_tokens
from tunesmith.data.preference import Comparison, Solution, load_judged, load_pairs, load_steps
from tunesmith.data.prepare import Prepared, Sources, load_samples
from tunesmith.data.tokens import Tokenizer, encode
from tunesmith.errors import ConfigError
from tunesmith.monitor.interrupts import keeping
from tunesmith.monitor.run_dir import open_run_dir
from tunesmith.types import Sample


def run_sft(path: Path | None, overrides: Sequence[str] = (), reasons: Mapping[str, str] | None = None) -> RunResult:
    """``tunesmith sft``: supervised fine-tuning as a run file says.

    Args:
        reasons: by dotted key, where another command wrote the run file: why a key that nobody set has its value.
    """
    return _run(SFTConfig, path, overrides, reasons)


def run_rm(path: Path | None, overrides: Sequence[str] = ()) -> RunResult:
    """``tunesmith rm``: a reward model from pairs, as a run file says."""
    return _run(RMConfig, path, overrides)


def run_dpo(path: Path | None, overrides: Sequence[str] = ()) -> RunResult:
    """``tunesmith dpo``: direct preference optimisation as a run file says."""
    return _run(DPOConfig, path, overrides)


def run_kto(path: Path | None, overrides: Sequence[str] = ()) -> RunResult:
    """``tunesmith kto``: learning from answers judged one by one, as a run file says."""
    return _run(KTOConfig, path, overrides)


def run_prm(path: Path | None, overrides: Sequence[str] = ()) -> RunResult:
    """``tunesmith prm``: a process reward model from judged steps, as a run file says."""
    return _run(PRMConfig, path, overrides)


def run_distill(path: Path | None, overrides: Sequence[str] = ()) -> RunResult:
    """``tunesmith distill``: a student learns from a teacher, as a run file says.

    On the student's own samples it is a run of ``assembly/rl.py``, on given answers a supervised one.
    """
    kind = find_kind(path, overrides)
    if issubclass(kind, OfflineDistillConfig):
        return _run(OfflineDistillConfig, path, overrides)
    return run_rl(path, overrides, kind if issubclass(kind, DistillConfig) else DistillConfig)


def _run(
    kind: type[RunConfig], path: Path | None, overrides: Sequence[str], reasons: Mapping[str, str] | None = None
) -> RunResult:
    """Check, load data, derive, say, build, train."""
    reading = READINGS[kind]
    with ExitStack() as stack:
        config = stack.enter_context(checked(kind, path, overrides))
        base_dir, name = (path.parent, path.stem) if path else (Path.cwd(), "run")
        run_dir = stack.enter_context(
            open_run_dir(config.run_dir, config.monitor.run_name or name, config.checkpoint.resume)
        )
        checkpoint = checkpoint_to_resume(config, run_dir)
        tokenizer = load_tokenizer(config)
        load, sizes = partial(reading.load, config, tokenizer), partial(reading.sizes, config)
        run = make_ready(config, run_dir, tokenizer, load, sizes, reasons=reasons)
        session = open_session(stack, run, run_dir, base_dir, checkpoint, run.config.eval.metric or reading.metric)
        from tunesmith.assembly.supervised_parts import make_parts
        from tunesmith.loop import supervised

        with session.phase("setup"):
            parts = make_parts(run, session)
            supervised.restore(parts, session)
        with keeping(lambda: keep_and_tell(supervised.keep(parts, session), run_dir)):
            supervised.run(parts, session)
        return run_result(session, run_dir)


def _load_answers(_: RunConfig, tokenizer: Tokenizer, data: DataSection, source: Sources) -> Prepared[Sample]:
    return load_samples(data, source, tokenizer)


def _load_rm(config: RMConfig, tokenizer: Tokenizer, data: DataSection, source: Sources) -> Prepared[Comparison]:
    from tunesmith.models.score_model import whole_sequence

    room, share = known(config.system, "max_tokens_per_microbatch"), config.system.share_prompts
    found = load_pairs(data, source, tokenizer, room=room, share=share, shape=lambda s: whole_sequence(s.token_ids))
    if config.rm.loss == "logexp" and any(item.values["margin"][0] for item in found.items):
        raise ConfigError(
            "rm.loss = 'logexp' knows no margin, and the data has a column 'margin'; say rm.loss = 'sigmoid', "
            "or take the column out"
        )
    return found


def _load_dpo(config: DPOConfig, tokenizer: Tokenizer, data: DataSection, source: Sources) -> Prepared[Comparison]:
    room, share = known(config.system, "max_tokens_per_microbatch"), config.system.share_prompts
    return load_pairs(data, source, tokenizer, room=room, share=share)


def _load_kto(_: KTOConfig, tokenizer: Tokenizer, data: DataSection, source: Sources) -> Prepared[Comparison]:
    return load_judged(data, source, tokenizer)


def _load_prm(config: PRMConfig, tokenizer: Tokenizer, data: DataSection, source: Sources) -> Prepared[Solution]:
    label_tokens(config, tokenizer)
    return load_steps(data, source, tokenizer, config.prm.separator, (config.prm.good, config.prm.bad))


def label_tokens(config: PRMConfig, tokenizer: Tokenizer) -> tuple[int, int]:
    """The tokens of ``prm.good`` and ``prm.bad``.

    Raises:
        ConfigError: one of them is no single token.
    """
    ids = encode(tokenizer, [config.prm.good, config.prm.bad])
    for key, text, found in zip(("good", "bad"), (config.prm.good, config.prm.bad), ids, strict=True):
        if len(found) != 1:
            raise ConfigError(f"prm.{key} = '{text}' is {len(found)} tokens of this tokenizer; it has to be one")
    return ids[0][0], ids[1][0]


def _answer_sizes(_: RunConfig, sample: Sample) -> tuple[int, int]:
    return len(sample.token_ids), len(sample.token_ids)


def _pair_sizes(config: RMConfig | DPOConfig, item: Comparison) -> tuple[int, int]:
    extra = int(isinstance(config, RMConfig))
    longest = max(len(sample.token_ids) for sample in item.samples) - extra
    return longest, num_forest_tokens(item.samples, config.system.share_prompts)


def _single_sizes(_: KTOConfig, item: Comparison) -> tuple[int, int]:
    longest = max(len(sample.token_ids) for sample in item.samples)
    return longest, longest


def _step_sizes(config: PRMConfig, item: Solution) -> tuple[int, int]:
    """The pair of the last step is the largest: all tokens, and both labels."""
    longest = item.marks[-1] + 1
    return len(item.token_ids), longest + 2 if config.system.share_prompts else 2 * (longest + 1)


@dataclass(frozen=True, slots=True)
class Reading:
    """What a command makes of its data."""

    load: Callable[[Any, Tokenizer, DataSection, Sources], Prepared[Any]]
    sizes: Callable[[Any, Any], tuple[int, int]]
    """See ``make_ready``."""
    metric: str = "eval/accuracy"
    """What the best checkpoint is judged by where the run file does not say."""


READINGS: dict[type[RunConfig], Reading] = {
    SFTConfig: Reading(_load_answers, _answer_sizes, "eval/loss"),
    OfflineDistillConfig: Reading(_load_answers, _answer_sizes, "eval/loss"),
    RMConfig: Reading(_load_rm, _pair_sizes),
    DPOConfig: Reading(_load_dpo, _pair_sizes),
    KTOConfig: Reading(_load_kto, _single_sizes),
    PRMConfig: Reading(_load_prm, _step_sizes),
}
