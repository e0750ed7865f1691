"""Tiny bases that answer a prompt with a few tokens and then end the turn as a chat template
does."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM

import tunesmith
from tests.support import data_tokenizers as kit
from tests.support import tiny
from tunesmith.learn.data.chat import ChatTemplate
from tunesmith.models.causal_lm import CausalLM

PLAIN = (
    "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}</s>{% "
    "endif %}\n{% endfor %}"
)
NEW = 5
"""Tokens of an answer before the turn ends."""
LONGEST = 4 * NEW


def asked(messages: list[dict[str, str]], system: str | None = None) -> list[dict[str, str]]:
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def ends_after(path: Path, prompts: list[list[int]], ending: list[int]) -> None:
    """Change the head so that greedy completions of the prompts are ``NEW`` tokens of noise and
    then ``ending``."""
    module = cast(Any, AutoModelForCausalLM.from_pretrained(path))
    rows = []
    wanted = []
    with torch.no_grad():
        for ids in prompts:
            noise = [(11 * place + 40) % 90 + 6 for place in range(NEW)]
            sequence = torch.tensor([[*ids, *noise, *ending]])
            hidden = module.model(sequence).last_hidden_state[0]
            rows.append(hidden[len(ids) - 1 : -1])
            wanted += [*noise, *ending]
        states = torch.cat(rows)
        target = torch.full((len(wanted), module.lm_head.weight.shape[0]), -4.0)
        target[torch.arange(len(wanted)), wanted] = 8.0
        module.lm_head.weight.copy_(torch.linalg.lstsq(states.double(), target.double()).solution.T)
    module.save_pretrained(path)


FAMILIES = {
    "chatml": ["<|im_end|>"],
    "llama3": ["<|eot_id|>"],
    "gemma": ["<end_of_turn>"],
    "phi4": ["<|im_end|>"],
    "mistral_v3": ["</s>"],
    "phi3": ["<|end|>"],
    "two": ["<|end|>", "</s>"],
    "plain": ["</s>"],
}


def template_of(name: str) -> str:
    if name == "two":
        return kit.template("phi3").replace("<|end|>", "<|end|></s>")
    return PLAIN if name == "plain" else kit.template(name)


def rigged(
    path: Path, name: str, kind: str, prompt: str = "hi", system: str | None = None, **shape: Any
) -> Path:
    """A base whose tokenizer has no template of its own, and that ends its answer to ``prompt`` as
    a template does."""
    tok = kit.KINDS[kind](template_of(name))
    shape = {"tie_word_embeddings": False, "hidden_size": 64, **shape}
    tiny.save_model(path, vocab_size=len(tok), **shape)
    text = ChatTemplate.of(tok).render(
        asked([{"role": "user", "content": prompt}], system), prompt=True
    )
    ending = [cast(int, tok.convert_tokens_to_ids(token)) for token in FAMILIES[name]]
    ends_after(path, [tok(text, add_special_tokens=False)["input_ids"]], ending)
    tok.chat_template = None
    tok.save_pretrained(path)
    return path


def sampled(model: Any, tok: Any, messages: list[dict[str, str]], **options: Any) -> list[int]:
    """A greedy completion by transformers alone."""
    inputs = tok.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    written = model.generate(**inputs, max_new_tokens=LONGEST, do_sample=False, **options)
    return written[0, inputs["input_ids"].shape[1] :].tolist()


def check_alike(
    model: Any, tok: Any, path: Path | CausalLM, prompt: str, ending: list[str], **options: Any
) -> None:
    """transformers and our engine complete alike, up to ``ending``."""
    found = sampled(model, tok, [{"role": "user", "content": prompt}], **options)
    [ours] = tunesmith.generate(path, [prompt], max_new_tokens=LONGEST, temperature=0)
    assert found == ours.token_ids[0] and ours.finish_reasons == ["stop"]
    assert tok.convert_ids_to_tokens(found)[NEW:] == ending
