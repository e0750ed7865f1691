"""The settings that other frameworks have; ``python -m tests.support.foreign_names`` counts how
many of them are answered.

``python -m tests.support.foreign_names DIR`` first lists them anew from sources: ``DIR`` holds
unpacked wheels or source distributions, one directory each, named after the distribution, such as
``trl-1.16.0`` (``pip download --no-deps trl==1.16.0``, then ``unzip``). What is read are names
only: options of ``argparse``, fields of dataclasses, keys of YAML files. The lists are kept in
``tests/foreign/``, one name a line, after a line with the versions. ``guides.txt`` has the names of
five tuning guides, taken down by hand.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tunesmith.guide.names.foreign import meanings_of

LISTS = Path(__file__).parent / "foreign"


def listed(framework: str) -> list[str]:
    """The names of one framework as they are kept."""
    lines = (LISTS / f"{framework}.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.startswith("#")]


def versions(framework: str) -> str:
    return (
        (LISTS / f"{framework}.txt").read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
    )


def frameworks() -> list[str]:
    return sorted(path.stem for path in LISTS.glob("*.txt"))


def options(*files: Path) -> Iterator[str]:
    """``--option`` of every ``add_argument``."""
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
                for text in (part for argument in node.args for part in spelled(argument)):
                    if text.startswith("--"):
                        yield text.removeprefix("--")


def spelled(node: ast.expr) -> Iterator[str]:
    """A text constant; an f-string with ``prefix`` in it once for each model that has one."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        for model in ("actor", "critic"):
            yield "".join(p.value if isinstance(p, ast.Constant) else model for p in node.values)


def fields(path: Path, *classes: str) -> Iterator[str]:
    """Annotated fields of the classes; of every class whose name ends in Config or Arguments, if
    none is named."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ClassDef):
            continue
        if node.name in classes if classes else re.search(r"(Config|Arguments)$", node.name):
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    name = line.target.id
                    kind = ast.unparse(line.annotation)
                    if not name.startswith("_") and "ClassVar" not in kind and not name.isupper():
                        yield alias(line.value) or name


def alias(value: ast.expr | None) -> str | None:
    """Of pydantic's ``Field(..., alias="name")``."""
    words = value.keywords if isinstance(value, ast.Call) else []
    return next(
        (w.value.value for w in words if w.arg == "alias" and isinstance(w.value, ast.Constant)),
        None,
    )


def constants(path: Path) -> Iterator[str]:
    """Values of upper-case text constants that have a ``_DEFAULT`` beside them: keys that are read
    by hand."""
    found = {
        line.targets[0].id: line.value.value
        for line in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(line, ast.Assign)
        and isinstance(line.targets[0], ast.Name)
        and isinstance(line.value, ast.Constant)
    }
    for name, value in found.items():
        if f"{name}_DEFAULT" in found and isinstance(value, str):
            yield value


def leaves(tree: Any, prefix: str = "") -> Iterator[str]:
    """Dotted keys of a tree of mappings, without what Hydra itself reads."""
    for key, value in tree.items():
        if str(key).startswith("_") or key in ("defaults", "hydra"):
            continue
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def trl(root: Path) -> Iterator[str]:
    for path in [
        *root.glob("trl/trainer/*_config.py"),
        *root.glob("trl/experimental/*/*_config.py"),
    ]:
        yield from fields(path)
    yield from fields(root / "trl/scripts/utils.py")
    for path in root.glob("trl/scripts/*.py"):
        yield from fields(path)


def transformers(root: Path) -> Iterator[str]:
    yield from fields(root / "transformers/training_args.py", "TrainingArguments")
    yield from fields(root / "transformers/training_args_seq2seq.py", "Seq2SeqTrainingArguments")


def verl(root: Path) -> Iterator[str]:
    import yaml

    for path in sorted((root / "verl/trainer/config").glob("*.yaml")):
        if not path.name.startswith("ppo_"):  # whose parts the generated files spell out
            yield from leaves(yaml.safe_load(path.read_text(encoding="utf-8")))


def openrlhf(root: Path) -> Iterator[str]:
    yield from options(*root.glob("*.data/purelib/openrlhf/cli/*.py"))


def stateset(root: Path) -> Iterator[str]:
    training = root / "stateset_agents/training"
    for name in ("config", "gspo_config", "dapo_config", "vapo_config", "trl_grpo_config"):
        yield from fields(training / f"{name}.py")
    for name, made in (
        ("gepo_trainer", "GEPOConfig"),
        ("base_trainer", "BaseTrainerConfig"),
        ("vllm_backend", "VLLMConfig"),
        ("frontier_sft", "FrontierSFTConfig"),
        ("async_rollouts", "AsyncRolloutConfig"),
        ("distributed", "DistributedConfig"),
        ("transformer_reward_model", "RewardTrainingConfig"),
    ):
        yield from fields(training / f"{name}.py", made)
    yield from fields(root / "stateset_agents/experimental/ppo.py", "PPOConfig")
    yield from fields(root / "stateset_agents/core/agent_config.py", "AgentConfig")


def deepspeed(root: Path) -> Iterator[str]:
    """Of its JSON file; what is inside ``optimizer`` and ``scheduler`` is handed to their classes,
    and stands here."""
    package = root / "deepspeed"
    yield from (n for n in constants(package / "runtime/constants.py") if n != "enabled")
    for path, made, table in (
        ("runtime/precision_config.py", "DeepSpeedFP16Config", "fp16"),
        ("runtime/precision_config.py", "DeepSpeedBF16Config", "bf16"),
        ("runtime/zero/config.py", "DeepSpeedZeroConfig", "zero_optimization"),
        (
            "runtime/zero/offload_config.py",
            "DeepSpeedZeroOffloadParamConfig",
            "zero_optimization.offload_param",
        ),
        (
            "runtime/zero/offload_config.py",
            "DeepSpeedZeroOffloadOptimizerConfig",
            "zero_optimization.offload_optimizer",
        ),
        ("runtime/tensor_parallel/config.py", "TPTrainingConfig", "tensor_parallel"),
        ("monitor/config.py", "TensorBoardConfig", "tensorboard"),
        ("monitor/config.py", "WandbConfig", "wandb"),
        ("monitor/config.py", "CSVConfig", "csv_monitor"),
        ("monitor/config.py", "CometConfig", "comet"),
        ("comm/config.py", "CommsLoggerConfig", "comms_logger"),
        ("compile/config.py", "CompileConfig", "compile"),
        ("profiling/config.py", "DeepSpeedFlopsProfilerConfig", "flops_profiler"),
    ):
        yield from (f"{table}.{name}" for name in fields(package / path, made))
    for name in constants(package / "runtime/activation_checkpointing/config.py"):
        yield f"activation_checkpointing.{name}"
    yield from (
        f"optimizer.params.{name}"
        for name in ("lr", "betas", "eps", "weight_decay", "torch_adam", "adam_w_mode")
    )
    yield from (
        f"scheduler.params.{name}"
        for name in (
            "warmup_min_lr",
            "warmup_max_lr",
            "warmup_num_steps",
            "warmup_type",
            "total_num_steps",
            "cos_min_ratio",
        )
    )
    yield from ("optimizer.type", "scheduler.type")


def accelerate(root: Path) -> Iterator[str]:
    yield from fields(root / "accelerate/commands/config/config_args.py")
    yield from options(root / "accelerate/commands/launch.py")


READERS: Mapping[str, Callable[[Path], Iterator[str]]] = {
    "openrlhf": openrlhf, "verl": verl, "trl": trl, "transformers": transformers,
    "stateset-agents": stateset, "deepspeed": deepspeed, "accelerate": accelerate,
}  # fmt: skip


def relist(directory: Path) -> None:
    found: dict[str, set[str]] = {}
    roots: dict[str, list[str]] = {}
    for root in sorted(directory.iterdir()):
        distribution, _, version = root.name.rpartition("-")
        framework = distribution.replace("_", "-")
        if framework in READERS:
            found.setdefault(framework, set()).update(READERS[framework](root))
            roots.setdefault(framework, []).append(version)
    for framework, names in found.items():
        text = "\n".join([f"# {', '.join(roots[framework])}", *sorted(names)])
        (LISTS / f"{framework}.txt").write_text(text + "\n", encoding="utf-8")


def counts(framework: str) -> tuple[int, int, list[str]]:
    """How many names lead to a key, how many to a reason, and those that are not answered."""
    found = {name: meanings_of(name)[1] for name in listed(framework)}
    keys = sum(any(m.keys for m in of) for of in found.values())
    unanswered = [name for name, of in found.items() if not of]
    return keys, len(found) - keys - len(unanswered), unanswered


if __name__ == "__main__":
    if len(sys.argv) > 1:
        relist(Path(sys.argv[1]))
    print(
        f"{'framework':16} {'names':>5} {'a key':>6} {'a reason':>9} {'answered':>9}  not answered"
    )
    for each in frameworks():
        keys, reasons, unanswered = counts(each)
        total = len(listed(each))
        answered = f"{(keys + reasons) / total:.1%}"
        print(f"{each:16} {total:5} {keys:6} {reasons:9} {answered:>9}  {' '.join(unanswered)}")
