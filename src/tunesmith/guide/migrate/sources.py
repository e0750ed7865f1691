"""Data, rewards and services, which other frameworks spread over several settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tunesmith.config.values import SINKS
from tunesmith.guide.migrate.given import UNKNOWN, Given
from tunesmith.guide.migrate.programs import MARKS
from tunesmith.guide.migrate.script.data import Data, all_data, written_split
from tunesmith.guide.migrate.there import OFF, Result, There, Value, by_hand, without

_DATA = MARKS["data"]
_MOVE = "move {} to a separate file that only defines {}"


def train_data(_given: Given, there: There) -> Result:
    """A path or a name; a table if it has a split, a subset or weights; a list if there are
    several."""
    held = there.get("train_dataset")
    if isinstance(held, Data):
        return _followed("data.train", held)
    paths = _listed(there.get(*_DATA["train"]))
    if not paths:
        return by_hand("no data set is given with it")
    split = there.get(*_DATA["train_splits"])
    split = split[0] if isinstance(split, list) and split else split
    shares = _listed(there.get(*_DATA["shares"]))
    weights = [float(w) for w in shares] if len(shares) == len(paths) else [None] * len(paths)
    common = {"split": split, "subset": there.get("dataset_config")}
    pairs = zip(paths, weights, strict=True)
    tables = [{"path": path, **common, "weight": weight} for path, weight in pairs]
    return Value("data.train", _plain(tables))


def eval_data(_given: Given, there: There) -> Result:
    """The held-out data; a split without a path belongs to the training data."""
    held = all_data(there.get("eval_dataset"))
    if held:
        origins = tuple(origin for data in held for origin in data.origins)
        return _followed("data.eval", replace(held[0], origins=origins))
    strategy = there.get("eval_strategy", "evaluation_strategy", default="no")
    if there.framework in ("trl", "transformers") and strategy in ("no", False):
        return without("nothing is evaluated there: eval_strategy is no")
    paths = _listed(there.get(*_DATA["eval"]))
    split = there.get(*_DATA["eval_splits"])
    subset = None
    if not paths and split:
        paths = _listed(there.get(*_DATA["train"]))[:1]
        subset = there.get("dataset_config")
    if not paths:
        return without("no data set is given with it")
    tables = [{"path": path, "split": split, "subset": subset} for path in paths]
    return Value("data.eval", _plain(tables))


def _followed(key: str, data: Data) -> Result:
    """The data set that a script passes to its trainer."""
    tables: list[dict[str, Any]] = []
    for origin in data.origins:
        split = written_split(origin)
        if split is None:
            part = origin.path + "".join(map(str, origin.cuts))
            return by_hand(f"a part of a part, {part}, has no line here; write its rows to a file")
        where = {"path": origin.path, "split": split, "subset": origin.subset}
        tables.append({**where, "weight": origin.weight})
    return Value(key, _plain(tables), "; ".join(dict.fromkeys(data.notes)))


def rows(given: Given, _there: There) -> Result:
    """``dataset.map(function)`` and what else a script does to its rows."""
    if ".py:" in given.value:
        return Value("data.map", given.value, _MOVE.format("it", "it"))
    how = 'data.map = "file.py:function", which gets a row and returns its columns, or None'
    return by_hand(f"{given.text} is not followed: write it as {how} to leave the row out")


def _listed(value: object) -> list[str]:
    """Paths from a list, or from comma-separated text."""
    if value is None or isinstance(value, bool):
        return []
    items = value if isinstance(value, list) else str(value).split(",")
    texts = [str(item).strip() for item in items]
    return [text for text in texts if text and not UNKNOWN.search(text)]


def _plain(tables: Sequence[Mapping[str, object]]) -> Any:
    """Tables without empty keys and the default split; a table with only a path becomes the path,
    a list of one its element."""
    items: list[Any] = []
    for table in tables:
        said = {k: v for k, v in table.items() if v is not None and (k, v) != ("split", "train")}
        items.append(table["path"] if len(said) == 1 else said)
    return items[0] if len(items) == 1 else items


def functions(given: Given, there: There) -> Result:
    """Reward functions from a Python script, or verl's file and function."""
    path = there.get("custom_reward_function.path", "reward.custom_reward_function.path")
    if path and "custom_reward_function" in given.name:
        name = there.get("custom_reward_function.name", default="compute_score")
        return Value("reward.functions", [f"{path}:{name}"])
    items = _items(given)
    built_in = _DATA["built_in"]
    known = [built_in.get(item, item) for item in items if ".py:" in item or item in built_in]
    if known and len(known) == len(items):
        own = _MOVE.format("them", "them") if set(known) - {"math"} else ""
        answer = Value("reward.answer", "solution", "the column that it reads there")
        return [Value("reward.functions", known, own), *([answer] if "math" in known else [])]
    if all(item in _DATA["managers"] for item in items):
        return without("it calls the functions of the data; no manager is needed here")
    names = ", ".join(UNKNOWN.sub(lambda m: m[0][2:-1], item) for item in items)
    return by_hand(f'name each function as "file.py:function" in reward.functions: {names}')


def _items(given: Given) -> list[str]:
    return [str(v) for v in (given.value if isinstance(given.value, list) else [given.value]) if v]


def tools(given: Given, _there: There) -> Result:
    """Tools: functions of a Python script."""
    items = _items(given)
    if items and all(".py:" in item for item in items):
        return Value("environment.tools", items, _MOVE.format("them", "them"))
    return by_hand('name each function as "file.py:function" in environment.tools')


def environment(given: Given, _there: There) -> Result:
    """An environment: a class of a Python script."""
    if isinstance(given.value, str) and ".py:" in given.value:
        return Value("environment.path", given.value, _MOVE.format("it", "it"))
    return by_hand('name the class of the environment as "file.py:name" in environment.path')


def models(given: Given, there: There) -> Result:
    if given.value is True:
        return without("it is set next to this")
    on = there.get("reward_model.enable", default=True) not in (False, None)
    if not on or not isinstance(given.value, str):
        return without("the reward model is off there")
    normalize = there.get("reward.normalize_enable", "normalize_enable", "normalize_reward")
    common = {"normalize": True} if normalize else {}
    tables = [{"path": path, **common} for path in _listed(given.value)]
    for number, table in enumerate(tables[1:], 2):
        table["name"] = f"reward_model_{number}"
    return Value("reward.models", tables) if tables else by_hand("no model is named")


def remote(given: Given, _there: There) -> Result:
    """A server's address, or a Python file with a function ``reward_func``."""
    paths = _listed(given.value)
    if paths and all(path.endswith(".py") for path in paths):
        names = [f"{path}:reward_func" for path in paths]
        return Value("reward.functions", names, "OpenRLHF's own name of the function")
    if paths and all(path.startswith(("http://", "https://")) for path in paths):
        return Value("reward.remote", [{"urls": paths, "protocol": "openrlhf"}])
    return by_hand("name the server in reward.remote, or the function in reward.functions")


def sinks(given: Given, _there: There) -> Result:
    """``report_to``, ``logger`` and flags such as ``use_wandb``."""
    flag = next((name for name in ("tensorboard", "wandb") if name in given.name), "")
    is_flag = given.value is True or (isinstance(given.value, str) and flag)
    named = _listed((flag or "wandb") if is_flag else given.value)
    names = ["wandb" if name == "all" else name for name in named]
    known = [name for name in names if name in SINKS]
    other = [name for name in names if name not in (*SINKS, "console", "none", "file")]
    if other:
        return by_hand(f"there is no sink {', '.join(other)} here; a class of yours can be one")
    if not known:
        return without("metrics.jsonl and the terminal are always written")
    return Value("monitor.sinks", known)


def samples(given: Given, _there: There) -> Result:
    if given.value is True:
        return without("rollouts.jsonl always has groups of every step (monitor.samples)")
    return Value("monitor.samples", given.count) if given.count else OFF


def hub(given: Given, there: There) -> Result:
    name = there.get("hub_model_id")
    if not given.value:
        return OFF
    if not name:
        return by_hand("name the repository: checkpoint.push_to_hub = 'you/model'")
    return Value("checkpoint.push_to_hub", name)
