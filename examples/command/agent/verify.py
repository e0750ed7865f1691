"""The reward: 1 for the right answer, a tenth for any."""

import json
import os
from pathlib import Path

task = json.loads(Path(os.environ["TUNESMITH_TASK"]).read_text(encoding="utf-8"))
said = Path("answer.txt").read_text(encoding="utf-8") if os.path.exists("answer.txt") else None
reward = 1.0 if said == task["answer"] else 0.1 if said else 0.0
numbers = {"reward": reward, "answered": float(bool(said))}
Path(os.environ["TUNESMITH_REWARD"]).write_text(json.dumps(numbers), encoding="utf-8")
