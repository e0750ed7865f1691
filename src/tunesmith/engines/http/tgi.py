"""A Text Generation Inference server behind the engine port (as of TGI 3.3.7). It cannot take new weights.

TGI is sent text. That its tokens are the prompt's is asked before anything is written, and refused where they are
not; what it writes comes as tokens, one event each, with log-probabilities after the temperature, top_k and top_p.
Where a completion stops is decided here, and the connection then closed, which ends it there too.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any, cast

from tunesmith.engines.http.client import Unavailable, short
from tunesmith.engines.http.engine import HOT, START_PATIENCE, Draft, HttpEngine
from tunesmith.errors import EngineError, UserError
from tunesmith.plan.engine import LAUNCH, LONGEST_OF_TGI, UNKNOWN_TO_TGI
from tunesmith.types import Sampling
from tunesmith.weights.base import Offer

REMEMBERED = 1024
"""Prompts whose text is kept in mind."""
_UNFIXED = "TGI cannot take new weights, so it serves commands that only sample; train with another system.engine"


class TgiEngine(HttpEngine):
    """One TGI server. See ``HttpEngine`` for the arguments."""

    kind = "TGI"
    launch = LAUNCH["tgi"]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._texts: OrderedDict[tuple[int, ...], str] = OrderedDict()

    async def interrupt(self) -> None:
        for task, draft in self._drafts.items():
            draft.interrupted = True
            task.cancel()

    async def take(self, version: int, offer: Offer) -> None:
        """Nothing, for version 0: the model as it was started."""
        del offer
        if version:
            raise EngineError(_UNFIXED)

    def _check_sampling(self, sampling: Sampling) -> None:
        for name, why in UNKNOWN_TO_TGI.items():
            if name in sampling.altered:
                raise UserError(f"sampling.{name} = {getattr(sampling, name):g}: {why}; leave it out")
        if sampling.ignore_eos:
            raise UserError("sampling.ignore_eos: TGI always stops at the end of a sequence")
        if sampling.max_new_tokens > LONGEST_OF_TGI:
            raise UserError(
                f"sampling.max_new_tokens = {sampling.max_new_tokens}: TGI tokenises its own text anew after "
                f"{LONGEST_OF_TGI} tokens, which may change them; ask for at most as many"
            )

    async def _open(self) -> int:
        info = await self._first(self._client.ask("/info", patience=START_PATIENCE))
        try:
            longest_prompt, longest = int(info["max_input_tokens"]), int(info["max_total_tokens"])
            most = int(info["max_concurrent_requests"])
        except (KeyError, TypeError, ValueError):
            raise EngineError(f"{self._client.url}/info answered what TGI 3 does not: {short(str(info))}") from None
        self._longest_prompt = min(self._longest_prompt, longest_prompt)
        self._longest = min(self._longest, longest)
        if info.get("model_id") != self._served.path:
            self._report(f"{self.name} serves '{info.get('model_id')}', in the place of '{self._served.path}'")
        sampling = Sampling(max_new_tokens=1, temperature=HOT)
        draft = Draft(sampling, 1, frozenset(), self._served.watch)
        await self._client.persist(lambda: self._attempt({"inputs": "1", **_parameters(sampling, 1, 0)}, draft, None))
        self._check_probe(draft.logprobs[0])
        return min(self._max_running, most)

    async def _complete(self, prompt_ids: list[int], draft: Draft) -> None:
        text = await self._text(tuple(prompt_ids))
        seed = secrets.randbits(63) if draft.sampling.seed is None else draft.sampling.seed % (1 << 63)
        body = {"inputs": text, **_parameters(draft.sampling, draft.limit, seed)}
        await self._client.persist(lambda: self._attempt(body, draft, len(prompt_ids)))
        self._prefilled += len(prompt_ids)

    async def _attempt(self, body: dict[str, Any], draft: Draft, prompt_tokens: int | None) -> None:
        """Write the completion from its beginning; the same seed draws the same."""
        draft.restart()
        async with aclosing(self._client.events("/generate_stream", body)) as events:
            async for event in events:
                try:
                    if "error" in event:
                        self._fail(event)
                    token, details = event["token"], event["details"]
                    draft.add(token["id"], token["logprob"], 0, self._client.url)
                    if details is not None:
                        read, reason = details["input_length"], details["finish_reason"]
                        if prompt_tokens not in (None, read):
                            raise EngineError(f"{self.name} read {read} tokens of a prompt of {prompt_tokens}")
                        draft.end("length" if reason == "length" else "stop")
                except (KeyError, TypeError):
                    raise EngineError(
                        f"{self._client.url}/generate_stream answered what TGI 3 does not: {short(str(event))}"
                    ) from None
                if draft.ended:
                    return
        raise Unavailable("the completion broke off")

    def _fail(self, event: dict[str, Any]) -> None:
        said = f"{self.name}: {event['error']}"
        raise EngineError(said) if event.get("error_type") == "validation" else Unavailable(said)

    async def _text(self, prompt_ids: tuple[int, ...]) -> str:
        """The text that the server makes these tokens of. Raises EngineError: there is none."""
        if (known := self._texts.get(prompt_ids)) is not None:
            return known
        # A tokenizer that puts its BOS before every text would put a second one there.
        starts = (1, 0) if prompt_ids[0] == self._served.bos_token_id else (0,)
        made: list[int] = []
        for start in starts:
            text = self._served.decode(prompt_ids[start:])
            made = self._token_ids(await self._client.ask("/tokenize", {"inputs": text})) if text else []
            if tuple(made) == prompt_ids:
                self._texts[prompt_ids] = text
                if len(self._texts) > REMEMBERED:
                    self._texts.popitem(last=False)
                return text
        at = next((i for i, (a, b) in enumerate(zip(prompt_ids, made, strict=False)) if a != b), len(made))
        raise EngineError(
            f"{self.name} takes text only, and makes other tokens of this prompt: at place {at} of {len(prompt_ids)} "
            f"it has {made[at : at + 3]}, and the prompt {list(prompt_ids[at : at + 3])}. Its tokenizer is another "
            "one, or the prompt is not what the tokenizer makes of its own text; sample it with another system.engine"
        )

    def _token_ids(self, found: Any) -> list[int]:
        try:
            return [int(token["id"]) for token in cast("Sequence[Any]", found)]
        except (KeyError, TypeError, ValueError):
            raise EngineError(f"{self._client.url}/tokenize answered no tokens: {short(str(found))}") from None


def _parameters(sampling: Sampling, limit: int, seed: int) -> dict[str, Any]:
    """TGI's ``parameters``. It takes neither a temperature of 0, nor a top_p of 1, nor a top_k of 0 for 'off'."""
    drawn: dict[str, Any] = {}
    if sampling.temperature > 0:
        drawn = {"do_sample": True, "temperature": sampling.temperature, "seed": seed}
        drawn |= {"top_p": sampling.top_p} if sampling.top_p < 1 else {}
        drawn |= {"top_k": sampling.top_k} if sampling.top_k > 0 else {}
    return {"parameters": {"max_new_tokens": limit, "details": True, **drawn}}
