"""Tinker's HTTP interface, below ``/api/v1``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from tunesmith.errors import UserError
from tunesmith.records.addresses import is_loopback, is_served_name
from tunesmith.records.http_server import LIMITS, Handler, bearer_of, body_of, guarded, is_token
from tunesmith.run.tinker.listing import listing_routes
from tunesmith.run.tinker.messages import ForwardRequest
from tunesmith.run.tinker.requests import (
    CreateModel,
    CreateSampler,
    Load,
    OptimStep,
    SampleAsk,
    Save,
    SaveForSampler,
    parse,
    parse_object,
)
from tunesmith.run.tinker.service import TinkerService, UnknownNameError

ROOT = "/api/v1"
LARGEST = 256 * 1024 * 1024
"""Bytes of a request; clients send at most 5 MB of datums at a time, and any single one."""
POLL_SECONDS = 25.0
"""A client's poll for a result waits this long; clients give up after 45."""
PROTOBUF = "application/x-protobuf"
UNEMBEDDING = "train_unembed has no effect here: adapters are on the decoder's linear modules only"
"""The SDK sets it unless told otherwise, and logs this at the start."""
Reply = dict[str, object]


def make_app(service: TinkerService, host: str, token: str | None) -> web.Application:
    """The application. Requests need the token, if there is one, as the SDK's API key or as
    ``Authorization: Bearer``."""

    def served(name: str) -> bool:
        return is_loopback(name) if token is None else is_served_name(host, name)

    app = web.Application(
        client_max_size=LARGEST,
        middlewares=[_checking(token), guarded(LIMITS, None, hosts=served), _explaining],
    )
    routes = Routes(service)
    get = {
        "healthz": _constant({"status": "ok"}),
        "get_server_capabilities": routes.capabilities,
        "samplers/{name}": routes.sampler,
    }
    post = {
        "client/config": _constant({"use_pyqwest_transport": False}),
        "client/dynamic_config": _constant({}),
        "telemetry": _constant({"status": "accepted"}),
        "create_session": routes.create_session,
        "session_heartbeat": routes.heartbeat,
        "sessions/{name}/finish": routes.finish,
        "create_model": routes.create_model,
        "get_info": routes.info,
        "weights_info": routes.weights_info,
        "forward_backward": routes.forward,
        "optim_step": routes.step,
        "save_weights": routes.save,
        "save_weights_for_sampler": routes.save_for_sampler,
        "load_weights": routes.load,
        "create_sampling_session": routes.create_sampler,
        "asample": routes.sample,
        "retrieve_future": routes.retrieve,
    }
    app.add_routes([web.get(f"{ROOT}/{path}", handler) for path, handler in get.items()])
    app.add_routes([web.post(f"{ROOT}/{path}", handler) for path, handler in post.items()])
    app.add_routes(listing_routes(service, ROOT))
    return app


def _checking(token: str | None) -> Callable[..., Awaitable[web.StreamResponse]]:
    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        sent = request.headers.get("X-API-Key") or bearer_of(request)
        if token is not None and not is_token(sent, token):
            scheme = {"WWW-Authenticate": "Bearer"}
            told = {"error": "send the server's token: api_key"}
            return web.json_response(told, status=401, headers=scheme)
        return await handler(request)

    return middleware


@web.middleware
async def _explaining(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except UnknownNameError as error:
        return web.json_response({"error": str(error)}, status=404)
    except UserError as error:
        return web.json_response({"error": str(error)}, status=422)


def _constant(reply: Reply) -> Handler:
    async def handler(_: web.Request) -> web.StreamResponse:
        return web.json_response(reply)

    return handler


class Routes:
    """Handlers: what a request says, to the service."""

    def __init__(self, service: TinkerService) -> None:
        self._service = service

    async def capabilities(self, _: web.Request) -> web.Response:
        base = self._service.base
        model = {
            "model_name": base.name,
            "max_context_length": base.context,
            "trainable": True,
            "sampleable": True,
        }
        return web.json_response({"supported_models": [model]})

    async def create_session(self, _: web.Request) -> web.Response:
        name = self._service.open_session()
        reply = {"type": "create_session", "session_id": name, "warning_message": UNEMBEDDING}
        return web.json_response(reply)

    async def heartbeat(self, request: web.Request) -> web.Response:
        try:
            self._service.beat(await _said(request, "session_id"))
        except UnknownNameError as error:
            return web.json_response({"error": str(error)}, status=410)
        return web.json_response({"type": "session_heartbeat"})

    async def finish(self, request: web.Request) -> web.Response:
        self._service.finish(request.match_info["name"])
        return web.json_response({})

    async def create_model(self, request: web.Request) -> web.Response:
        return _promise(self._service.create_model(parse(CreateModel, body_of(request))))

    async def load(self, request: web.Request) -> web.Response:
        body = body_of(request)
        return await self._in_turn(request, lambda: self._service.load(parse(Load, body)))

    async def forward(self, request: web.Request) -> web.Response:
        return _promise(self._service.forward(ForwardRequest.read(body_of(request))))

    async def step(self, request: web.Request) -> web.Response:
        body = body_of(request)

        def submit() -> str:
            ask = parse(OptimStep, body)
            return self._service.step(ask.model_id, ask.seq_id, ask.adam_params)

        return await self._in_turn(request, submit)

    async def save(self, request: web.Request) -> web.Response:
        body = body_of(request)
        return await self._in_turn(request, lambda: self._service.save(parse(Save, body)))

    async def save_for_sampler(self, request: web.Request) -> web.Response:
        body = body_of(request)
        save = self._service.save_for_sampler
        return await self._in_turn(request, lambda: save(parse(SaveForSampler, body)))

    async def create_sampler(self, request: web.Request) -> web.Response:
        name = self._service.create_sampler(parse(CreateSampler, body_of(request)))
        return web.json_response({"type": "create_sampling_session", "sampling_session_id": name})

    async def sample(self, request: web.Request) -> web.Response:
        ask = parse(SampleAsk, body_of(request))
        name = self._service.sample(ask)
        sequences = [f"{name}:{index}" for index in range(ask.num_samples)]
        return web.json_response({"request_id": name, "sample_sequence_ids": sequences})

    async def sampler(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        weights = self._service.sampler(name)
        address = weights and weights.address
        reply = {"sampler_id": name, "base_model": self._service.base.name, "model_path": address}
        return web.json_response(reply)

    async def info(self, request: web.Request) -> web.Response:
        name = await _said(request, "model_id")
        base = self._service.base
        lora = self._service.model(name).lora
        data = {"model_name": base.name, "tokenizer_id": base.tokenizer_name}
        reply: Reply = {"type": "get_info", "model_id": name, "model_data": data, "is_lora": True}
        reply |= {"lora_rank": lora and lora.rank, "model_name": base.name}
        return web.json_response(reply)

    async def weights_info(self, request: web.Request) -> web.Response:
        address = await _said(request, "tinker_path")
        _, facts = self._service.store.find(address)
        lora = facts.lora()
        reply: Reply = {"base_model": facts.base_model, "is_lora": True, "lora_rank": lora.rank}
        reply |= lora.model_dump(include={"train_unembed", "train_mlp", "train_attn"})
        return web.json_response(reply)

    async def retrieve(self, request: web.Request) -> web.Response:
        """The result of a future; 408 if it is not there yet, 410 if there is no such future."""
        name = await _said(request, "request_id")
        futures = self._service.futures
        if name not in futures:
            return web.json_response({"error": f"there is no request '{name}'"}, status=410)
        result = await futures.wait(name, POLL_SECONDS)
        if result is None:
            waiting = {"type": "try_again", "request_id": name, "queue_state": "active"}
            return web.json_response(waiting, status=408)
        if isinstance(result, bytes):
            return web.Response(body=result, content_type=PROTOBUF)
        return web.json_response(dict(result))

    async def _in_turn(self, request: web.Request, submit: Callable[[], str]) -> web.Response:
        """Submit a numbered request of a model. One that cannot be read takes its turn too, or
        later ones would wait for it."""
        try:
            return _promise(submit())
        except UnknownNameError:
            raise
        except UserError as error:
            said = parse_object(body_of(request))
            name = said.get("model_id")
            number = said.get("seq_id")
            if not isinstance(name, str) or not isinstance(number, int):
                raise
            return _promise(self._service.refuse(name, number, error))


def _promise(name: str) -> web.Response:
    return web.json_response({"request_id": name})


async def _said(request: web.Request, name: str) -> str:
    """A text of the request's JSON object."""
    value = parse_object(body_of(request)).get(name)
    if not isinstance(value, str):
        raise UserError(f"'{name}' = {value!r} is not text")
    return value
