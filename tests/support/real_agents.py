"""Agents of well-known packages, unmodified: only the address and the key of the policy are given
to them."""

from __future__ import annotations

from pydantic import BaseModel


async def openai_agents(base_url, api_key):
    """The package's default, the ``responses`` interface; once whole and once streamed."""
    from agents import (
        Agent,
        ModelBehaviorError,
        OpenAIProvider,
        RunConfig,
        Runner,
        function_tool,
        set_tracing_disabled,
    )

    set_tracing_disabled(True)

    @function_tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    agent = Agent(name="sums", instructions="Use the tool.", tools=[add], model="policy")
    config = RunConfig(model_provider=OpenAIProvider(base_url=base_url, api_key=api_key))
    try:
        whole = await Runner.run(agent, "2+3?", run_config=config, max_turns=3)
        streamed = Runner.run_streamed(agent, "2+3?", run_config=config, max_turns=3)
        async for _ in streamed.stream_events():
            pass
    except ModelBehaviorError:  # the policy's turn was cut at its length limit
        return 0.0
    return float(whole.final_output == "5") + float(streamed.final_output == "5")


def smolagents(base_url, api_key):
    """Asks for ``tool_choice = "required"`` and stop strings."""
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    @tool
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return a + b

    model = OpenAIServerModel("policy", api_base=base_url, api_key=api_key)
    return float(ToolCallingAgent([add], model, max_steps=3, verbosity_level=0).run("2+3?") == 5)


class Total(BaseModel):
    total: int


async def pydantic_ai(base_url, api_key):
    """A typed output, for which it asks for ``tool_choice = "required"``."""
    from pydantic_ai import Agent, UnexpectedModelBehavior
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("policy", provider=OpenAIProvider(base_url=base_url, api_key=api_key))
    try:
        result = await Agent(model, output_type=Total).run("2+3?")
    except UnexpectedModelBehavior:
        return 0.0
    return float(result.output.total == 5)


async def openai_client(base_url, api_key):
    """The plain client: every interface, validated by the package's own types."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        said = [{"role": "user", "content": "hello"}]
        chat = await client.chat.completions.create(
            model="m", messages=said, n=2, logprobs=True, top_logprobs=1
        )
        assert len(chat.choices) == 2 and all(len(c.logprobs.content) > 0 for c in chat.choices)
        text = await client.completions.create(model="m", prompt="hello", max_tokens=4, logprobs=1)
        assert len(text.choices[0].logprobs.tokens) == text.usage.completion_tokens
        answer = await client.responses.create(model="m", input="hello", instructions="Be brief.")
        more = await client.responses.create(
            model="m", input="more", previous_response_id=answer.id
        )
        assert more.usage.input_tokens > 0 and isinstance(more.output_text, str)
        events = [
            e async for e in await client.responses.create(model="m", input="hello", stream=True)
        ]
        assert events[-1].type in ("response.completed", "response.incomplete")
        return float(len(events) > 4)


def load_environment():
    """An environment of the verifiers package."""
    import verifiers
    from datasets import Dataset

    def brief(completion, answer, **_):
        return float(len(completion[-1]["content"]) < 3 or answer in completion[-1]["content"])

    data = Dataset.from_list([{"prompt": [{"role": "user", "content": "Go."}], "answer": "5"}])
    return verifiers.SingleTurnEnv(dataset=data, rubric=verifiers.Rubric(funcs=[brief]))
