"""Asks the policy for a program, and keeps what the program prints: an agent of the standard library
alone."""

import json
import os
import subprocess
import sys
from urllib.request import Request, urlopen


def ask(messages: list[dict[str, str]]) -> str:
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages}
    headers = {"Content-Type": "application/json"}
    headers["Authorization"] = f"Bearer {os.environ['OPENAI_API_KEY']}"
    with urlopen(Request(url, json.dumps(body).encode(), headers)) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


messages = [{"role": "user", "content": sys.argv[1]}]
for _ in range(3):
    program = ask(messages)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=10, check=False
    )
    if done.returncode == 0:
        with open("answer.txt", "w", encoding="utf-8") as file:
            file.write(done.stdout.strip())
        break
    messages += [
        {"role": "assistant", "content": program},
        {"role": "user", "content": f"It failed:\n{done.stderr[-1000:]}\nWrite it again."},
    ]
