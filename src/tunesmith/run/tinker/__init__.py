"""Tinker's API over a model of this machine: ``tunesmith serve-training``.

A client of the ``tinker`` package says what to compute; the server holds the weights. There is one
frozen base. Every training client has a LoRA adapter on it, a copy of the base's modules that
shares the base's weights, with an AdamW of its own, whose settings come with each ``optim_step``.
Gradients of several ``forward_backward`` requests add up until the next ``optim_step``. Every
sampling client has an engine on saved adapter weights, which no later step changes. On a GPU
engines take turns (``turns``).

A request is answered at once with the id of a future; the client polls for the result. The id
follows from what the client says (session, model, number), so a repeated request is the same
future, and nothing is trained twice. Requests of a model run in the order of their numbers, however
they arrive; training requests of all models run one after another.

What ``save_state`` writes is a checkpoint of the trainer, below the server's directory: it outlives
the server. A model that was not saved is lost with the server, and a client then starts from its
last saved state.

``data``: datums to forests and back; ``losses``: the losses by their names; ``futures``: requests
in order and their results; ``requests``: what clients send; ``messages``: protobuf; ``store``: what
is saved; ``service``: sessions, models and samplers; ``server``: HTTP.
"""
