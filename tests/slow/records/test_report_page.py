"""The page in a real browser: runs over each other, rollouts, a run that goes on, hostile text
shown as text."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from typer.testing import CliRunner

from tests.support.browser import Page, browser, chromium
from tests.support.hand_made_runs import HOSTILE, make_run, rollout
from tunesmith.cli.main import app

pytestmark = [
    pytest.mark.skipif(
        chromium() is None, reason="needs Chromium (CONTRIBUTING.md says how to install it)"
    ),
]


def tokens(*texts: str) -> dict[str, Any]:
    return {
        "text": list(texts),
        "logprob": [-0.1 * i for i in range(len(texts))],
        "version": 3,
        "advantage": -0.5,
    }


LINES = [
    rollout(1, 0, 0.0, completion="wrong", by_token=tokens("wro", "ng", "<eos>"), tokens=3),
    rollout(1, 0, 1.0, completion="right", rewards={"exact": 1.0}),
    rollout(
        2,
        0,
        0.5,
        prompt=HOSTILE,
        completion=HOSTILE,
        columns={HOSTILE: HOSTILE},
        notes={"n": HOSTILE},
    ),
    rollout(2, 1, None, status="reward_failed", error=f"it raised {HOSTILE}"),
    rollout(
        3,
        0,
        1.0,
        parts=[
            {"record": 0, "by": "policy", "text": "ab", "tokens": 2},
            {"record": 0, "by": "environment", "text": "[tool]", "tokens": 1},
            {"record": 1, "by": "policy", "text": "c", "tokens": 1},
        ],
        by_token=tokens("a", "b", "c"),
    ),
    *(
        rollout(step, 0, kind="eval", completion=f"answer {step}", reward=step / 5)
        for step in (0, 5)
    ),
]


async def open_tab(page: Page, name: str) -> None:
    await page.run(
        f"[...document.querySelectorAll('[role=tab]')].find((tab) => "
        f"tab.textContent.startsWith('{name}')).click()"
    )


async def shown_groups(page: Page, count: int) -> list[str]:
    await page.until(f"document.querySelectorAll('#list [role=option]').length === {count}")
    return await page.run(
        "[...document.querySelectorAll('#list [role=option] strong')].map((one) => one.textContent)"
    )


async def choose(page: Page, label: str, value: str) -> None:
    await page.run(
        f"""(() => {{
            const labels = [...document.querySelectorAll('#controls label')];
            const input = labels.find((one) => one.textContent.startsWith('{label}')).querySelector('select, input');
            input.value = '{value}';
            input.dispatchEvent(new Event(input.matches('select') ? 'change' : 'input', {{ bubbles: true }}));
        }})()"""
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reports")
    one = make_run(folder / "one", 40, LINES)
    two = make_run(folder / "two", 20)
    settings = json.loads((two / "resolved.json").read_text())
    settings["settings"]["train.lr"]["value"] = 2e-6
    (two / "resolved.json").write_text(json.dumps(settings))
    done = CliRunner().invoke(
        app, ["report", str(one), str(two), "--out", str(folder / "report.html")]
    )
    assert done.exit_code == 0, done.output
    return folder / "report.html"


async def test_every_tab_shows_two_runs_without_an_error_or_a_request(report: Path) -> None:
    async with browser() as page:
        await page.open(report.as_uri())
        caption = "document.querySelector('[data-metric=reward] figcaption')"
        assert (await page.run(f"{caption}.textContent")).split() == ["one", "4", "two", "2"]
        assert await page.run(f"{caption}.querySelectorAll('.swatch').length") == 2
        canvas = "document.querySelector('[data-metric=reward] canvas')"
        painted = f"{canvas}.getContext('2d').getImageData(0, 0, 300, 150).data"
        await page.until(
            f"document.querySelector('[data-metric=reward] canvas').width > 300 && "
            f"{painted}.some(Boolean)"
        )
        assert await page.run("document.querySelectorAll('#runs input:checked').length") == 2
        await page.run("document.querySelector('#runs input').click()")
        assert await page.run(f"{caption}.textContent") == "2"
        await page.run("document.querySelector('#runs input').click()")
        for tab, text in (
            ("Time", "Step 40, from its metrics"),
            ("Evaluations", "answer 5"),
            ("Settings", "0.000002"),
            ("Memory", "planned, trainermeasuredpolicy: weights20 B"),
            ("Memory", "engine: kv8 B6 B"),
            ("Findings", "two"),
        ):
            await open_tab(page, tab)
            assert text in await page.run("document.querySelector('#body').textContent"), tab
        await open_tab(page, "Evaluations")
        headings = await page.run(
            "[...document.querySelectorAll('#body th')].map((cell) => cell.textContent)"
        )
        assert headings[:3] == ["metric", "step 0", "step 40"] and all(headings)
        await open_tab(page, "Settings")
        await choose(page, "Show", "differ")
        rows = await page.run(
            "[...document.querySelectorAll('tr.differs td:first-child')].map((cell) => "
            "cell.textContent)"
        )
        assert rows == ["train.steps", "train.lr"]
        assert not page.errors and page.requests == [report.as_uri()]


async def test_charts_outside_of_the_view_are_drawn_and_a_phone_sees_them_at_once(
    report: Path,
) -> None:
    async with browser() as page:
        await page.call(
            "Emulation.setDeviceMetricsOverride",
            width=390,
            height=844,
            deviceScaleFactor=1,
            mobile=True,
        )
        await page.open(report.as_uri())
        blank = (
            "[...document.querySelectorAll('details[open] canvas')].filter((one) => "
            "!one.getContext('2d').getImageData(0, 0, one.width, "
            "one.height).data.some(Boolean)).length"
        )
        await page.until(f"document.querySelectorAll('canvas').length > 4 && {blank} === 0")
        first = "document.querySelector('figure').getBoundingClientRect().top"
        assert await page.run(first) < 844 * 0.25
        assert not page.errors


async def test_a_constant_is_drawn_in_the_middle_also_smoothed(report: Path) -> None:
    """Smoothing moves it by rounding, between bounds too close for tick marks."""
    constant = """[1e-5, 0.2, 0.7, 3e7].map((value) => {
        const curve = smoothed(Array(60).fill(value), 0.83);
        const context = document.createElement("canvas").getContext("2d");
        const bounds = [Math.min(...curve), Math.max(...curve)];
        return Math.round(axes(context, 300, 100, [0, 60], bounds, false).atY(value));
    })"""
    async with browser() as page:
        await page.open(report.as_uri())
        assert await page.run(constant) == [44, 44, 44, 44]


async def test_rollouts_are_browsed_and_filtered(report: Path) -> None:
    async with browser() as page:
        await page.open(report.as_uri())
        await page.press("3")
        assert await shown_groups(page, 6) == [
            "evaluation after step 5",
            "evaluation after step 0",
            "step 3",
            "step 2",
            "step 2",
            "step 1",
        ]
        for label, value, count in (
            ("Kind", "eval", 2),
            ("Kind", "train", 4),
            ("Groups", "failed", 1),
            ("Groups", "contrast", 1),
        ):
            await choose(page, label, value)
            await shown_groups(page, count)
        await page.until("document.querySelectorAll('article.rollout').length === 2")
        assert await page.run(
            "[...document.querySelectorAll('.token')].map((one) => one.textContent)"
        ) == [
            "wro",
            "ng",
            "<eos>",
        ]
        colours = "[...document.querySelectorAll('.token')].map((one) => one.style.backgroundColor)"
        assert len(set(await page.run(colours))) == 3, "coloured by log-probability"
        await page.press("c")
        await page.until(f"new Set({colours}).size === 1")
        assert "exact" in await page.run("document.querySelector('#group').textContent")
        await choose(page, "Groups", "")
        await choose(page, "Text", "[TOOL]")
        await shown_groups(page, 1)
        texts = (
            "[...document.querySelectorAll('#group .text:not(.prompt) > *')].map((one) => "
            "one.textContent)"
        )
        await page.until(f"{texts}.length === 5")
        assert (await page.run(texts))[:3] == ["a", "b", "[tool]"] and "record 1" in (
            await page.run(texts)
        )[3]
        await choose(page, "Text", "")
        await choose(page, "Kind", "")
        await shown_groups(page, 6)
        await page.press("j")
        await page.until(
            "document.querySelectorAll('#list [role=option]')[1].getAttribute('aria-selected') "
            "=== 'true'"
        )
        await page.press("/")
        assert await page.run("document.activeElement.type") == "search"
        assert not page.errors


@contextmanager
def watched(run: Path) -> Generator[tuple[subprocess.Popen[str], str]]:
    """``tunesmith watch`` in a process of its own, and its address."""
    command = [sys.executable, "-m", "tunesmith", "watch", str(run)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


async def test_the_live_page_follows_a_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 3, LINES[:2])
    with watched(run) as (process, address):
        assert address.startswith("http://127.0.0.1:"), address
        async with browser() as page:
            await page.open(address)
            reward = "document.querySelector('[data-metric=reward] figcaption').textContent"
            assert await page.run(reward) == "0.3"
            with (run / "metrics.jsonl").open("a") as file:
                file.write('{"step": 4, "time": 300.0, "reward": 0.75}\n{"step": 5, "ti')
            await page.until(f"{reward} === '0.75'")
            await open_tab(page, "Rollouts")
            await shown_groups(page, 1)
            with (run / "rollouts.jsonl").open("a") as file:
                file.write(json.dumps(rollout(4, completion=HOSTILE)) + "\n")
            assert await shown_groups(page, 2) == ["step 4", "step 1"]
            selected = "document.querySelector('#list [aria-selected=true] strong').textContent"
            assert await page.run(selected) == "step 1", "what is looked at stays"
            with (run / "rollouts.jsonl").open("a") as file:
                file.write(json.dumps(rollout(4, reward=0.0)) + "\n")
            await page.until(
                "document.querySelector('#list [role=option]').textContent.includes('2 rollouts')"
            )
            assert await page.run(selected) == "step 1"
            await choose(page, "Text", "ALERT(1)")
            await shown_groups(page, 1)
            await page.until(
                "document.querySelector('#group article')?.textContent.includes('\\\\x1b[31m')"
            )
            assert not page.errors and {urlsplit(r).netloc for r in page.requests} == {
                urlsplit(address).netloc
            }
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
            await page.until(
                "document.querySelector('#status').textContent.startsWith('not connected')"
            )


async def test_hostile_text_is_shown_as_text(report: Path) -> None:
    async with browser(width=400) as page:
        await page.open(report.as_uri())
        await open_tab(page, "Rollouts")
        await choose(page, "Steps", "2")
        await choose(page, "to", "2")
        await shown_groups(page, 2)
        for number, part in ((0, "it raised"), (1, "reward 0.5")):
            await page.run(f"document.querySelectorAll('#list [role=option]')[{number}].click()")
            await page.until(
                f"document.querySelector('#group article')?.textContent.includes('{part}')"
            )
            text = await page.run("document.querySelector('#group').textContent")
            assert (
                "<script>window.hacked = 1</script></script><img src=x "
                "onerror=alert(1)>\\x1b[31m \\u202e & \\ud800 é"
            ) in text
        assert (
            await page.run("window.hacked") is None
            and await page.run("document.images.length") == 0
        )
        assert await page.run("document.documentElement.scrollWidth <= window.innerWidth"), (
            "fits a narrow screen"
        )
        assert not page.errors and page.requests == [report.as_uri()]
