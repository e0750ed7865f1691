"""The functions that this package registers for CPUs (``kernels.functions``)."""

from __future__ import annotations

from tunesmith.models.cpu import attention, layer_functions, training_functions, weight_gradients


class CpuFunctions:
    """Compiled when a process first asks whether they take a tensor."""

    RmsNorm = layer_functions.RmsNorm
    Heads = layer_functions.TurnedHeads
    Gated = layer_functions.Gated
    allow = staticmethod(training_functions.allow)
    fits = staticmethod(layer_functions.fits)
    multiplies = staticmethod(weight_gradients.multiplies)
    add_product = staticmethod(weight_gradients.add_product)
    attends = staticmethod(attention.attends)
    attend_backward = staticmethod(attention.attend_backward)


FUNCTIONS = CpuFunctions()
