"""The commands as Python functions: the same checks, run directories and results, with Python
objects as settings.

    import tunesmith

    def short(completions, **columns):
        return [-len(text) / 100 for text in completions]

    result = tunesmith.rl("Qwen/Qwen3-0.6B", [{"prompt": "Hello"}], reward=short, train__steps=10)
    model, tokenizer = result.load()

Settings are those of a run file: ``rollout={"group_size": 8}`` or ``rollout__group_size=8``, where
``__`` stands for the dot, or ``**{"rollout.group_size": 8}``. The keywords ``train`` and ``eval``
are the data, so settings of ``[train]`` and ``[eval]`` must be written in one of the last two ways.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tunesmith.config.commands import DPOConfig, KTOConfig, PRMConfig, RMConfig
from tunesmith.config.schema import RunConfig, SFTConfig
from tunesmith.run.assembly.api_call import ApiCall, Data
from tunesmith.run.loop.callbacks import Callbacks, Metrics

if TYPE_CHECKING:
    from tunesmith.run.assembly.session import RunResult
    from tunesmith.run.offline.rft import RFTOutcome

Function = Callable[..., Any]
OnMetrics = Callable[[int, Metrics], bool | None]
OnCheckpoint = Callable[[int, Path], bool | None]
Resume = bool | Literal["auto"] | str | Path


def rl(
    model: str | Path,
    train: Data,
    *,
    reward: str | Function | Sequence[str | Function] | Mapping[str, Any] | None = None,
    eval: Data | None = None,
    environment: str | type | Function | Mapping[str, Any] | None = None,
    tools: str | Function | Sequence[str | Function] = (),
    run_dir: str | Path | None = None,
    resume: Resume = False,
    on_step: OnMetrics | None = None,
    on_evaluation: OnMetrics | None = None,
    on_checkpoint: OnCheckpoint | None = None,
    **settings: Any,
) -> RunResult:
    """Reinforcement learning, as ``tunesmith rl``.

    Args:
        model: a directory or a hub name.
        train: a file, a directory or a hub name, or rows: a ``datasets.Dataset``, a pandas
            ``DataFrame`` or any iterable of dicts. Rows are written into the run directory, so that
            the run can be resumed.
        reward: functions with TRL's signature, built-in rewards (``"math"``), references
            (``"file.py:function"``), or a mapping with the keys of ``[reward]``.
        eval: held-out data, as ``train``.
        environment: a class or an agent that plays every task, or a mapping with the keys of
            ``[environment]``.
        tools: typed functions with docstrings that the policy may call.
        run_dir: None makes ``runs/rl-<number>``.
        resume: True continues ``run_dir``; "auto" begins it if it has no checkpoint; a path names a
            checkpoint.
        on_step: called with the number of steps taken and the step's metrics. Like the other
            callbacks, it can end the run, with a checkpoint, by returning False
            (``tunesmith.STOP``).
        on_evaluation: the same, with the metrics of an evaluation.
        on_checkpoint: the same, with the directory of a checkpoint.
        settings: settings of a run file.

    Raises:
        UserError: settings, data or reward cannot be used; nothing was trained.
    """
    from tunesmith.run.assembly import run_rl

    if environment is not None and not isinstance(environment, Mapping):
        environment = {"path": environment}
    given = {"reward": _rewards(reward), "environment": environment}
    given |= {
        "environment.tools": ([tools] if isinstance(tools, str) or callable(tools) else list(tools))
        or None,
        "run_dir": run_dir,
        "checkpoint.resume": resume or None,
    }
    callbacks = Callbacks(on_step, on_evaluation, on_checkpoint)
    return ApiCall("rl", model, train, eval, given, settings).run(run_rl, callbacks)


def distill(
    model: str | Path,
    train: Data,
    *,
    teacher: str | Path,
    eval: Data | None = None,
    run_dir: str | Path | None = None,
    resume: Resume = False,
    on_step: OnMetrics | None = None,
    on_evaluation: OnMetrics | None = None,
    on_checkpoint: OnCheckpoint | None = None,
    **settings: Any,
) -> RunResult:
    """Distillation from a larger model, as ``tunesmith distill``.

    Args:
        teacher: a directory or a hub name.

    The other arguments are those of ``rl``.
    """
    from tunesmith.run.assembly import run_distill

    given = {"teacher.path": teacher, "run_dir": run_dir, "checkpoint.resume": resume or None}
    callbacks = Callbacks(on_step, on_evaluation, on_checkpoint)
    return ApiCall("distill", model, train, eval, given, settings).run(run_distill, callbacks)


def _supervised(kind: type[RunConfig], purpose: str) -> Callable[..., RunResult]:
    """The function of a command that trains on data without rollouts."""

    def train_on_data(
        model: str | Path,
        train: Data,
        *,
        eval: Data | None = None,
        run_dir: str | Path | None = None,
        resume: Resume = False,
        on_step: OnMetrics | None = None,
        on_evaluation: OnMetrics | None = None,
        on_checkpoint: OnCheckpoint | None = None,
        **settings: Any,
    ) -> RunResult:
        from tunesmith.run.assembly.train import run_supervised

        given = {"run_dir": run_dir, "checkpoint.resume": resume or None}
        callbacks = Callbacks(on_step, on_evaluation, on_checkpoint)
        return ApiCall(kind.command, model, train, eval, given, settings).run(
            partial(run_supervised, kind), callbacks
        )

    train_on_data.__name__ = train_on_data.__qualname__ = kind.command
    train_on_data.__doc__ = (
        f"{purpose}, as ``tunesmith {kind.command}``. The arguments are those of ``rl``."
    )
    return train_on_data


sft = _supervised(SFTConfig, "Supervised fine-tuning")
dpo = _supervised(DPOConfig, "Direct preference optimisation")
rm = _supervised(RMConfig, "A reward model from pairs of answers")
kto = _supervised(KTOConfig, "Preference optimisation from single judgements")
prm = _supervised(PRMConfig, "A process reward model from judged steps")


def rft(
    model: str | Path,
    train: Data,
    *,
    reward: str | Function | Sequence[str | Function] | Mapping[str, Any],
    eval: Data | None = None,
    step: Literal["generate", "train", "evaluate", "run"] = "run",
    run_dir: str | Path | None = None,
    **settings: Any,
) -> RFTOutcome:
    """Rejection-sampling fine-tuning, as ``tunesmith rft``; called again with the same ``run_dir``,
    it continues.

    Args:
        step: "run" does all steps.
        run_dir: None is ``runs/rft``.

    The other arguments are those of ``rl``.
    """
    from tunesmith.run.offline.rft import run_rft

    given = {"reward": _rewards(reward), "run_dir": run_dir or Path("runs").absolute() / "rft"}
    return ApiCall("rft", model, train, eval, given, settings).run(
        partial(run_rft, step), Callbacks()
    )


def _rewards(reward: Any) -> Any:
    if reward is None or isinstance(reward, Mapping):
        return reward
    return {"functions": list(reward) if isinstance(reward, list | tuple) else [reward]}
