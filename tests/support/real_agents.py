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


async def pydantic_ai_messages(base_url, api_key):
    """The same over Anthropic's interface."""
    from pydantic_ai import Agent, UnexpectedModelBehavior
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    provider = AnthropicProvider(base_url=base_url, api_key=api_key)
    try:
        agent = Agent(AnthropicModel("policy", provider=provider), output_type=Total)
        result = await agent.run("2+3?")
    except UnexpectedModelBehavior:
        return 0.0
    return float(result.output.total == 5)


async def openai_client(base_url, api_key):
    """The plain client: every interface, whole and streamed, validated by the package's own types."""
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
        async with client.responses.stream(model="m", input="hello") as stream:
            events = [event async for event in stream]
        assert events[-1].type in ("response.completed", "response.incomplete")
        deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
        assert "".join(deltas) == events[-1].response.output_text
        async with client.chat.completions.stream(model="m", messages=said) as stream:
            async for _ in stream:
                pass
            whole = stream.current_completion_snapshot.choices[0].message
        said += [{"role": "assistant", "content": whole.content}, *said]
        await client.chat.completions.create(model="m", messages=said)
        pieces = await client.completions.create(model="m", prompt="hello", stream=True)
        assert [piece async for piece in pieces][-1].choices[0].finish_reason
        return float(len(events) > 4)


async def anthropic_client(base_url, api_key):
    """The plain client: a tool called twice in one turn, streamed, and its results."""
    from anthropic import AsyncAnthropic

    numbers = {"a": {"type": "integer"}, "b": {"type": "integer"}}
    schema = {"type": "object", "properties": numbers}
    tools = [{"name": "add", "description": "Add.", "input_schema": schema}]
    said = [{"role": "user", "content": "2+3?"}]
    asked = {"model": "policy", "max_tokens": 400, "tools": tools}
    async with AsyncAnthropic(base_url=base_url, api_key=api_key) as client:
        assert (await client.models.list()).data[0].id
        assert (await client.messages.count_tokens(model="m", messages=said)).input_tokens > 0
        async with client.messages.stream(messages=said, **asked) as stream:
            texts = [text async for text in stream.text_stream]
            first = await stream.get_final_message()
        assert "".join(texts) == "".join(b.text for b in first.content if b.type == "text")
        calls = [block for block in first.content if block.type == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": c.id, "content": str(sum(c.input.values()))}
            for c in calls
            if set(c.input) == {"a", "b"}
        ]
        if not calls or len(results) < len(calls):
            return 0.0
        said += [
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": results},
        ]
        second = await client.messages.create(messages=said, **asked)
    return float(second.content[0].text == "5" and second.stop_reason == "end_turn")


async def langgraph(base_url, api_key):
    """A graph with a tool; the model's turns are streamed."""
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    @tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    model = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key, streaming=True)
    graph = create_react_agent(model, [add])
    messages = []
    async for mode, value in graph.astream(
        {"messages": [("user", "2+3?")]}, stream_mode=["messages", "values"]
    ):
        if mode == "values":
            messages = value["messages"]
    return float(messages[-1].content == "5")


async def llama_index(base_url, api_key):
    """A function agent over the interface of servers like OpenAI's."""
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.llms.openai_like import OpenAILike

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    model = OpenAILike(
        model="policy",
        api_base=base_url,
        api_key=api_key,
        is_chat_model=True,
        is_function_calling_model=True,
    )
    answer = await FunctionAgent(tools=[add], llm=model).run("2+3?")
    return float(str(answer) == "5")


async def langchain_anthropic(base_url, api_key):
    """The chat model of Anthropic's interface, with a tool and its result."""
    from langchain_anthropic import ChatAnthropic
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    @tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    model = ChatAnthropic(model="policy", base_url=base_url, api_key=api_key, max_tokens=400)
    model = model.bind_tools([add])
    said = [HumanMessage("2+3?")]
    first = await model.ainvoke(said)
    results = [
        ToolMessage(str(add.invoke(call["args"])), tool_call_id=call["id"])
        for call in first.tool_calls
    ]
    last = await model.ainvoke([*said, first, *results])
    return float(last.text == "5")


async def instructor(base_url, api_key):
    """A typed answer, as a function call."""
    import instructor
    from openai import AsyncOpenAI

    client = instructor.from_openai(AsyncOpenAI(base_url=base_url, api_key=api_key))
    said = [{"role": "user", "content": "2+3?"}]
    answer = await client.chat.completions.create(
        model="policy", response_model=Total, messages=said, max_retries=0
    )
    return float(answer.total == 5)


def mini_swe_agent(base_url, api_key):
    """The command-line agent, in a process of its own."""
    import os
    import subprocess
    import sys
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "OPENAI_API_BASE": base_url,
            "OPENAI_API_KEY": api_key,
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_GLOBAL_CONFIG_DIR": folder,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        command = [sys.executable, "-m", "minisweagent", "--yolo", "--exit-immediately"]
        command += [
            "--model",
            "openai/policy",
            "--task",
            "Write 5 to answer.txt.",
            "--cost-limit",
            "0",
        ]
        command += ["--output", f"{folder}/trajectory.json"]
        done = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stdout + done.stderr
        with open(f"{folder}/answer.txt") as answer:
            return float(answer.read().strip() == "5")


def load_environment():
    """An environment of the verifiers package."""
    import verifiers
    from datasets import Dataset

    def brief(completion, answer, **_):
        return float(len(completion[-1]["content"]) < 3 or answer in completion[-1]["content"])

    data = Dataset.from_list([{"prompt": [{"role": "user", "content": "Go."}], "answer": "5"}])
    return verifiers.SingleTurnEnv(dataset=data, rubric=verifiers.Rubric(funcs=[brief]))
