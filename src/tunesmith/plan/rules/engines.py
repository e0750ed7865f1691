"""Rules about engines, the ways of weights to them, and clusters."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.errors import Problem
from tunesmith.plan.rules.rule import rule, unread
from tunesmith.plan.rules.situation import ENGINE, Situation, more
from tunesmith.types import altering

# A rule is a condition and a sentence: with an argument on each line there would be twice as many.
# fmt: off

REPLAY = "algorithm.routing_replay"
PLANE = "system.weight_plane"
SYNC = "system.adapter_sync"
TURNS = "system.hybrid"
CLUSTER = "system.cluster"
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@rule(RunConfig)
def speculation(s: Situation[RunConfig]) -> Iterator[Problem]:
    if s.engine_open:
        return
    elsewhere = s.engines_apart or s.engine.served
    if elsewhere and not s.engine.speculates_elsewhere and s.config.system.draft_model is not None:
        why = "is for the engine in the trainer's process; leave it out"
        yield s.clash("system.draft_model", why, ENGINE, "system.engine_process")
    elif s.config.system.draft_model is not None and s.model and s.model.carrying:
        why = (
            f": layers of '{s.model.family}' carry a state from token to token, out of which "
            "rejected guesses cannot be taken; leave it out"
        )
        yield s.clash("system.draft_model", why)


@rule(RLConfig)
def replayed_routing(s: Situation[RLConfig]) -> Iterator[Problem]:
    if s.config.algorithm.routing_replay == "off" or s.engine_open:
        return
    if not s.engine.records_experts:
        yield s.clash(REPLAY,
            f": the experts that tokens choose in {s.engine.title} are not recorded; leave it out, "
            f'or set {ENGINE} = "local"', ENGINE)
    if s.engine.name == "vllm":
        yield from _recorded_by_vllm(s)
    if s.config.system.draft_model is not None:
        yield s.clash(REPLAY,
            ": experts are not recorded of tokens that a draft model guesses; leave one of the two "
            "out", "system.draft_model")


def _recorded_by_vllm(s: Situation[RLConfig]) -> Iterator[Problem]:
    vllm = s.config.system.vllm
    if s.device_kind == "cpu":
        yield s.clash(REPLAY,
            ": vLLM records the experts that tokens choose on GPUs alone; leave it out, or set "
            f'{ENGINE} = "local"', ENGINE)
    if more(vllm.pipeline_parallel_size, 1):
        yield s.clash(REPLAY,
            ": vLLM records no experts with its layers in stages; leave one of the two out",
            "system.vllm.pipeline_parallel_size")
    if vllm.prefix_caching is False:
        yield s.clash(REPLAY,
            ": vLLM records experts with prefix caching alone; leave one of the two out",
            "system.vllm.prefix_caching")


@rule(RunConfig)
def servers(s: Situation[RunConfig]) -> Iterator[Problem]:
    system = s.config.system
    urls = s.config.system.engine_urls
    if not s.engine.served:
        return
    if not urls:
        launch = s.engine.launch.format(path=s.config.model.path, port=30000)
        yield s.clash(ENGINE,
            f"needs system.engine_urls. Start a server with: {launch}, and name it: "
            'system.engine_urls = ["http://127.0.0.1:30000"]')
    if len(set(urls)) < len(urls):
        yield Problem(("system.engine_urls",),
            "system.engine_urls names a server twice; name each server once")
    far = [url for url in urls if urlsplit(url).hostname not in _LOOPBACK]
    if far and system.engine_directory is None:
        yield Problem(("system.engine_urls",),
            f"weights reach {far[0]} through files: set system.engine_directory to a directory "
            "that this machine and the server's see under the same path")
    if system.engine_directory is not None and not system.engine_directory.is_dir():
        yield s.clash("system.engine_directory", "is not a directory", kind="machine")


@rule(RunConfig)
def sampling_that_the_engine_supports(s: Situation[RunConfig]) -> Iterator[Problem]:
    sampling = s.config.sampling_settings
    engine = s.engine
    if sampling is None:
        return
    why = engine.unaltered_only
    if why:
        for name in altering(sampling):
            key = f"{sampling.table}.{name}"
            yield s.clash(key, f"does not go with {s.said(ENGINE)}: {why}; leave it out", ENGINE)
    if engine.third_party and more(s.training.longest, s.switch):
        yield s.clash(ENGINE,
            "does not choose rotary frequencies by the length of each sequence, and the model "
            f"changes them above {s.switch} tokens (longrope). A prompt and completion may take "
            f'{s.training.longest}. Set {ENGINE} = "local", or lower '
            f"{sampling.table}.max_new_tokens",
            f"{sampling.table}.max_new_tokens")
    least = engine.least_temperature
    most = engine.most_temperature
    why = f": {engine.title} samples with {least:g} to {most:g}"
    temperature: float | None = getattr(sampling, "temperature", None)
    if temperature and not least <= temperature <= most:
        yield s.clash(f"{sampling.table}.temperature", f"{why}, or 0, which is greedy", ENGINE)
    if isinstance(s.config, RLConfig) and not least <= s.config.eval.temperature <= most:
        yield s.clash("eval.temperature", why, ENGINE)


@rule(RunConfig)
def weight_plane(s: Situation[RunConfig]) -> Iterator[Problem]:
    system = s.config.system
    plane = s.devices.weight_plane
    if plane == "disk" and system.engine_directory is None:
        yield s.clash(PLANE,
            "needs system.engine_directory, a directory that trainer and engines see under the "
            'same path; on one machine "memory" is faster')
    if plane == "nccl" and s.device_kind == "cpu":
        yield s.clash(PLANE, 'is for GPUs; on a CPU use "memory" or "gloo"', "system.device")
    if plane == "nccl" and s.placed_together:
        yield s.clash(PLANE,
            "is between GPUs, and system.placement.colocate puts an engine and a trainer on one; "
            'use "ipc" or "gloo"', "system.placement.colocate")


@rule(RunConfig)
def several_machines(s: Situation[RunConfig]) -> Iterator[Problem]:
    machines = s.devices.machines
    if machines == 1:
        return
    if s.devices.weight_plane == "memory":
        yield s.clash(PLANE,
            f"is for engines on the trainer's machine, and a launcher starts engines on {machines}"
            ' machines; use "gloo", or "disk" with a system.engine_directory that all of them see')
    if s.engine.served:
        yield s.clash("system.engine",
            f"samples on servers, and a launcher starts engines on {machines} machines, which would"
            " be idle; start the run on one machine")
    elif s.engine_process_off:
        yield s.clash("system.engine_process",
            f": a launcher starts engines on {machines} machines, each in a process; leave it out")


@rule(RunConfig)
def weights_through_mapped_memory(s: Situation[RunConfig]) -> Iterator[Problem]:
    """Buckets are read from where the ranks train, so each engine process is on the device of a
    rank, which waits."""
    if s.devices.weight_plane != "ipc":
        return
    if s.config.rl and s.system.hybrid is False:
        yield s.clash(PLANE,
            "hands over the weights that the trainer trains, which may not change meanwhile: "
            "engine and trainer take turns. Set system.hybrid = true, or leave "
            f"{PLANE} out", TURNS)
    if s.config.system.cluster == "ray" and not s.placed_together:
        yield s.clash(PLANE,
            f"with {s.said(CLUSTER)} is for engines on the GPUs of trainer ranks; set "
            'system.placement.colocate = [["actor", "rollout"]], or use "gloo"', CLUSTER)
    ranks = s.system.trainer_ranks
    wanted = (s.system.engines or 1) * s.devices.ranks_per_engine
    if ranks is None or s.device_kind == "cpu" or wanted <= ranks:
        return
    # On one GPU, one rank may have several engines beside it.
    if ranks > 1 or s.devices.ranks_per_engine > 1 or s.config.system.cluster == "ray":
        yield s.clash(PLANE,
            f"is for engines on the GPUs of trainer ranks, and they take {wanted}, where "
            f"system.trainer_ranks = {ranks}; set as many ranks, or fewer engines",
            "system.trainer_ranks", "system.engines", "system.vllm.tensor_parallel_size")


@rule(RunConfig)
def models_that_engines_read(s: Situation[RunConfig]) -> Iterator[Problem]:
    if s.model and s.model.family in s.engine.lacks:
        yield s.clash(ENGINE,
            f"does not read models of '{s.model.family}' as they are saved here. Set {ENGINE} = "
            '"local"')


@rule(RunConfig)
def weights_as_engines_take_them(s: Situation[RunConfig]) -> Iterator[Problem]:
    alone = s.devices.adapter_sync == "adapter"
    family = s.model.family if s.model else None
    fixed = s.engine.fixed_families.get(str(family)) if s.config.rl and not alone else None
    if fixed:
        yield s.clash(ENGINE,
            f"does not take new weights of '{family}': {fixed}. Set {ENGINE} = \"local\"")
    if alone and s.engine.adapters is None:
        yield s.clash(SYNC,
            f'with {s.said(ENGINE)}, which takes whole weights; set "merged", or leave it out',
            ENGINE)
    elif alone and s.plan and s.engine.adapters:
        problem = s.engine.adapters.problem(family, s.plan.adapter_rank)
        if problem:
            yield s.clash(SYNC,
                f'with {s.said(ENGINE)}: {problem}; set "merged", or leave it out', ENGINE)


@rule(RunConfig)
def quantised_bases_of_engines(s: Situation[RunConfig]) -> Iterator[Problem]:
    """Engines of others keep the base unquantised: they compute with the numbers that it stands
    for."""
    key = "model.quantize"
    quantize = s.config.model.quantize
    if not quantize:
        return
    other = s.engine.third_party
    if other and not s.config.trains:
        yield s.clash(key,
            f"with {s.said(ENGINE)}, which keeps weights unquantised, so nothing would be saved. "
            f'Set {ENGINE} = "local", or leave out model.quantize', ENGINE)
    elif other and s.devices.adapter_sync == "adapter" and not s.engine.rounds_base:
        yield s.clash(key,
            f"with an adapter alone for {s.said(ENGINE)}, which does not round the base as the "
            'trainer does; set "merged", or leave it out', SYNC, ENGINE)
    elif other and quantize == "int8" and s.algorithm and s.algorithm.correction.name == "none":
        yield s.clash(key,
            f"with {s.said(ENGINE)}, which does not round activations to 8 bits, as the trainer "
            'does; set model.quantize = "nf4", or correct for it with '
            'algorithm.correction = "token_truncate"', ENGINE, "algorithm.correction")
    elif not other and s.devices.adapter_sync == "merged":
        yield s.clash(key,
            "with merged weights: the engine would not compute with the quantised weights that "
            f'the adapter is trained on. Set {SYNC} = "adapter", or leave it out', SYNC)


@rule(RunConfig)
def taking_turns(s: Situation[RunConfig]) -> Iterator[Problem]:
    if not s.system.hybrid:
        return
    if not s.config.rl:
        yield s.clash(TURNS, "is for runs that sample and train in turn; leave it out")
    if s.engine.served:
        why = "servers do not sleep for a run; leave it out"
        yield s.clash(TURNS, f"with {s.said(ENGINE)}: {why}", ENGINE)
    if isinstance(s.config, RLConfig) and s.config.rollout.max_staleness and s.weights_apart:
        yield s.clash(TURNS,
            "lets engine and trainer take turns, and rollout.max_staleness lets both work at once; "
            "leave one of the two out", "rollout.max_staleness")


@rule(RunConfig)
def ray(s: Situation[RunConfig]) -> Iterator[Problem]:
    if s.config.system.cluster != "ray":
        return
    if not s.config.rl:
        why = "is for tunesmith rl and for distillation on sampled answers; leave it out"
        yield s.clash(CLUSTER, why)
        return
    if s.engine.served:
        yield s.clash(ENGINE,
            f"with {s.said(CLUSTER)}: servers run outside it; leave one out", CLUSTER)
    if more(s.device_number, 0):
        yield s.clash("system.device",
            f'with {s.said(CLUSTER)}, which gives each process its own GPUs; use "cuda", and hide '
            "GPUs from Ray with CUDA_VISIBLE_DEVICES", CLUSTER)


OF_SAMPLERS = unread(RunConfig,
       "system.critic_max_tokens system.reward_max_tokens system.engine system.engine_urls "
       "system.engine_directory system.engine_process system.engine_python system.engines "
       "system.engine_restarts system.engine_weights system.weight_plane system.weight_copy "
       "system.adapter_sync system.cluster system.ray_address system.ray_runtime_env "
       "system.placement system.kv_memory system.max_running system.max_prefill_tokens "
       "system.draft_model system.speculative_tokens system.vllm.", lambda s: s.config.supervised,
       "in supervised training, which samples nothing; leave it out")
unread(RunConfig, "system.vllm.", lambda s: not s.engine_open and s.engine.name != "vllm",
       'with system.engine = {system.engine}; set "vllm", or leave it out')
unread(RunConfig, "system.max_prefill_tokens", lambda s: s.engine.name == "vllm",
       'with system.engine = "vllm"; system.vllm.max_batched_tokens bounds the tokens of one '
       "forward pass")
unread(RunConfig, "system.vllm.cuda_graph_sizes", lambda s: s.vllm_eager,
       "with system.vllm.eager = true; leave one out")
unread(RunConfig, "system.engine_urls", lambda s: not s.engine.served,
       'with system.engine = {system.engine}; set "sglang", or leave it out')
unread(RunConfig, "system.engine_directory",
       lambda s: not s.engine.served and s.devices.weight_plane != "disk",
       'with system.engine = {system.engine}; set "sglang", or leave it out')
unread(RunConfig, "system.engine_process system.kv_memory system.max_prefill_tokens",
       lambda s: s.engine.served,
       "with system.engine = {system.engine}, a server that was started separately; leave it out")
unread(RunConfig, "system.engine_python system.engines", lambda s: s.engines_apart is False,
       "with system.engine_process = false; set true, or leave it out", harmless=(1,))
unread(RunConfig, "system.engine_restarts",
       lambda s: s.engines_apart is False and not s.engine.served,
       "with system.engine_process = false; set true, or leave it out")
unread(RunConfig, "system.speculative_tokens", lambda s: s.config.system.draft_model is None,
       "without system.draft_model; set that, or leave it out")
unread(RunConfig, "system.ray_address system.ray_runtime_env system.placement",
       lambda s: s.config.system.cluster == "none",
       'with system.cluster = "none"; set "ray", or leave it out')
unread(RunConfig, "system.engine_process", lambda s: s.config.system.cluster == "ray",
       'with system.cluster = "ray", where engines are actors; leave it out', harmless=(False,))
unread(RunConfig, "system.weight_plane", lambda s: s.engines_apart is False,
       "with the engine in the trainer's process; set system.engine_process = true, or leave it "
       "out")
unread(RunConfig, "system.adapter_sync", lambda s: s.weights_apart is False,
       "with the engine in the trainer's process, which samples with the trained weights; leave it "
       "out")
unread(RunConfig, "system.weight_copy", lambda s: s.devices.weight_plane != "nccl",
       'without system.weight_plane = "nccl"; set that, or leave it out')
unread(RunConfig, "system.adapter_sync", lambda s: not s.config.lora.on,
       "without an adapter; set lora.rank, or leave it out")
unread(RLConfig, "system.canary", lambda s: s.weights_apart is False,
       "with the engine in the trainer's process; set system.engine_process = true, or leave it "
       "out")
unread(RunConfig, "system.canary", lambda s: not s.config.rl,
       "in a run that does not sample and train; leave it out")
unread(RLConfig, REPLAY, lambda s: s.model and not s.model.expert_widths,
       "on a model without experts; leave it out", harmless=("off",))
